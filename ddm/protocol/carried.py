"""What a plan says about an expert that it takes over from an earlier plan, without training it again."""

from ddm.protocol.base import MAX_SILOS, Digest, Model, PlanId, SiloId


class CarriedSilo(Model):
    """One silo's accepted submission to an earlier plan, whose experts and statistics are used as they are.

    Attributes:
        silo_id: the silo.
        plan_id: the plan for which the silo trained and signed.
        plan_digest: sha256 of that plan's document, which the bundle holds.
        submission_digest: sha256 of the submission, as the silo signed it.
    """

    silo_id: SiloId
    plan_id: PlanId
    plan_digest: Digest
    submission_digest: Digest

    @property
    def plan_path(self) -> str:
        """The path of the earlier plan's document among the files of the plan that carries."""
        return f"plan/{self.plan_id}.json"


def check_carried_silos(
    plan_id: str, silos: tuple[str, ...], carried: tuple[CarriedSilo, ...]
) -> None:
    """Refuse a silo that is carried twice, or that trains as well, and two documents of one earlier plan.

    Raises:
        ValueError: on either.
    """
    silo_ids = [silo.silo_id for silo in carried]
    # The bound of `Plan.silos` as well: readers list both kinds of silo together.
    if silo_ids != sorted(set(silo_ids) - set(silos)) or len(silo_ids) + len(silos) > MAX_SILOS:
        raise ValueError(
            f"carried must be silos that do not train, sorted, distinct; these {len(silo_ids)} are not"
        )
    # The file of an earlier plan is called by the plan's id alone, so that one id can have one document only.
    digest_by_plan: dict[str, str] = {}
    for silo in carried:
        digest = digest_by_plan.setdefault(silo.plan_id, silo.plan_digest)
        if digest != silo.plan_digest or silo.plan_id == plan_id:
            raise ValueError("carried must name earlier plans, each by one digest")
