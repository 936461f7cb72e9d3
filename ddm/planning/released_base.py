"""Takes an expert of a verified release as the base of a later plan, with its silo's consent."""

from collections.abc import Sequence, Set

from ddm.errors import PolicyError, SetupError
from ddm.loading.release import Release
from ddm.models import load_expert
from ddm.models.base_weights import BaseWeights
from ddm.planning.bases import BaseSource, BaseSpace
from ddm.protocol.bases import ExpertBase, SeedBase, StudentBase
from ddm.protocol.island import Island
from ddm.protocol.learning import ExpertObjective
from ddm.protocol.manifest import PublishedExpert
from ddm.protocol.plan import Plan


def expert_source(release: Release, expert_id: str, left: Set[str]) -> BaseSource:
    """Return an expert of a verified release as a base.

    Args:
        release: the release.
        expert_id: the expert's name.
        left: the silos whose consent is over, those of earlier rounds included.

    Raises:
        SetupError: the release has no such expert.
        PolicyError: its silo, or one whose images its own base learned, does not agree that it serves as a base.
        DigestError, TensorFileError: its file is not the one that the release lists.
    """
    plan = release.plan
    experts = {expert.expert_id: expert for expert in release.manifest.experts}
    if expert_id not in experts:
        raise SetupError(
            "--expert, or base.expert of a recipe",
            expected=f"an expert of the release: {', '.join(experts)}"[:400],
            got=ascii(expert_id)[:80],
        )
    expert = experts[expert_id]
    dissenting_silos = silos_without_consent(release, [expert], left)
    if dissenting_silos:
        raise no_consent_error(release, ", ".join(dissenting_silos))
    # A silo that is carried over has its files in the folder of its own plan.
    file = release.verified.files[expert.file.path]
    network = load_expert(
        plan.expert.architecture,
        plan.expert_shape,
        file.path.parent,
        expert.file.model_copy(update={"path": file.path.name}),
        plan.condition,
    )
    silos, is_private = teachers_of(release, [expert])
    submitted = {
        submitted.expert_id: submitted for submitted in release.submissions[expert.silo_id].experts
    }
    objective = plan.objective.of(expert.silo_id)
    return BaseSource(
        BaseWeights(network.state_dict(), plan.expert_shape),
        plan.expert.architecture.position_span(plan.expert_shape),
        ExpertBase(
            root=release.verified.root_fingerprint,
            plan_id=plan.plan_id,
            version=release.manifest.version,
            manifest=release.manifest_digest,
            silos=silos,
            digest=expert.file.digest,
            trained_privately=is_private,
            expert_id=expert_id,
        ),
        release.manifest.licence,
        submitted[expert_id].num_images,
        ExpertObjective(path=objective.path, prediction=objective.prediction),
        BaseSpace.of_plan(plan),
        architecture=plan.expert.architecture,
    )


def teachers_of(
    release: Release, experts: Sequence[PublishedExpert], *, by_student: bool = False
) -> tuple[tuple[str, ...], bool]:
    """Return the silos whose images these experts learned, also by way of their own base, and whether privately.

    Args:
        release: the release.
        experts: experts of it.
        by_student: whether a student learned from these experts.
    """
    silos = {expert.silo_id for expert in experts}
    is_private = all(expert.privacy is not None for expert in experts)
    plans = {}
    if by_student:
        # A student may have started from this plan's base, even where all experts are carried over from other plans.
        plans[release.plan.plan_id] = release.plan
    for expert in experts:
        plan = trained_plan(release, expert.silo_id)
        plans[plan.plan_id] = plan
    # Hundreds of silos train for one plan.
    for plan in plans.values():
        if plan.base is None:
            continue
        match plan.base.origin:
            case ExpertBase() | StudentBase() as origin:
                silos.update(origin.silos)
                is_private = is_private and origin.trained_privately
            case SeedBase():
                # It learned the images of all islands of its plan, also of those that are not published.
                silos.update(plan.silos)
                is_private = False
    return tuple(sorted(silos)), is_private


def trained_plan(release: Release, silo_id: str) -> Plan:
    """Return the plan for which a silo trained: of one that is carried over, an earlier one."""
    return release.earlier_plans.get(release.plan.origin(silo_id), release.plan)


def is_of_islands(release: Release) -> bool:
    """Return whether one owner trained all experts, so that no silo has to agree to anything."""
    return all(isinstance(document, Island) for document in release.submissions.values())


def consents(release: Release, silo_id: str, left: Set[str]) -> bool:
    """Return whether a silo agrees that training starts from its experts; `left` are those whose consent is over."""
    if silo_id in left:
        return False
    document = release.submissions[silo_id]
    # Islands are one owner's, who publishes them and starts from them alike.
    return isinstance(document, Island) or document.serve_as_base


def silos_without_consent(
    release: Release,
    experts: Sequence[PublishedExpert],
    left: Set[str],
    *,
    by_student: bool = False,
) -> tuple[str, ...]:
    """Return the silos that do not agree, or no longer, that training starts from these experts.

    Args:
        release: the release.
        experts: experts of it.
        left: the silos whose consent is over, those of earlier rounds included.
        by_student: whether training starts from a student of these experts.
    """
    dissenting_silos = {
        expert.silo_id for expert in experts if not consents(release, expert.silo_id, left)
    }
    # A silo of an earlier round signed its consent to that round, for which it was checked; it may be over since.
    teachers, _ = teachers_of(release, experts, by_student=by_student)
    dissenting_silos |= left & set(teachers)
    return tuple(sorted(dissenting_silos))


def no_consent_error(release: Release, silos: str) -> PolicyError:
    """Return the error of a base that silos of a release did not agree to."""
    return PolicyError(
        f"release {release.manifest.version} of plan {release.plan.plan_id}",
        expected="serve_as_base, a silo's signed consent that later plans start from its experts",
        got=f"submissions without it, or of silos that have left: {silos}"[:400],
        remedy="Ask for it: serve_as_base = true under [approval] in the silo's policy.toml, before it submits for "
        "the next plan. This release stays without it, and experts that learned from a silo that left cannot serve.",
    )
