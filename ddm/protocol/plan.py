"""The plan: the aggregator's signed instructions to every silo."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ddm.protocol.architecture import (
    Architecture,
    ClassCondition,
    Condition,
)
from ddm.protocol.base import (
    Document,
    File,
    KeyText,
    PlanId,
    SiloId,
    Time,
)
from ddm.protocol.carried import Carried, check_listed
from ddm.protocol.data import DataSpec
from ddm.protocol.encoder import Encoder
from ddm.protocol.enrolment import Agreed
from ddm.protocol.latent import (
    Autoencoder,
    DiffusersKlLatent,
    Latent,
)
from ddm.protocol.learning import (
    Expert,
    Objective,
    OwnAdaptation,
    TDistribution,
)
from ddm.protocol.limits import Audit, Limits
from ddm.protocol.partition import (
    Clustering,
    Partition,
    RandomPartition,
    SiloClusterPartition,
    SiloPartition,
    SketchSpec,
)
from ddm.protocol.routers import LearnedRouter, Router, SamplesRouter
from ddm.protocol.statistics import Budget, Statistics
from ddm.protocol.transform import TransformSpec


class Plan(Document):
    """The signed instructions of one federation, or of one owner's islands; see `docs/reference` for an example.

    `silos` train for this plan; the experts of those in `carried` go on from an earlier one. In a `rehearsal`, experts
    are trained for so few steps that they draw noise.
    """

    format: Literal["archipelago/plan/1"] = "archipelago/plan/1"
    plan_id: PlanId
    created_at: Time
    expires_at: Time
    silos: Annotated[tuple[SiloId, ...], Field(min_length=1, max_length=1024)]
    carried: Annotated[tuple[Carried, ...], Field(max_length=1024)] = ()
    agreed: Annotated[dict[SiloId, Agreed], Field(max_length=1024)]
    receipt_key: KeyText
    files: Annotated[tuple[File, ...], Field(min_length=1, max_length=64)]
    data: DataSpec
    transform: TransformSpec | None = None
    latent: Latent
    encoder: Encoder
    clustering: Clustering
    sketch: SketchSpec
    partition: Partition
    objective: Objective
    t_distribution: TDistribution
    condition: Condition
    expert: Expert
    statistics: Statistics
    router: Router
    audit: Audit
    limits: Limits
    rehearsal: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> "Plan":
        if list(self.silos) != sorted(set(self.silos)):
            raise ValueError(f"silos must be sorted and distinct; these {len(self.silos)} are not")
        check_listed(self.plan_id, self.silos, self.carried)
        if set(self.agreed) != set(self.members):
            raise ValueError("agreed must name each silo once, as silos and carried do")
        listed = [file.path for file in self.files]
        if len(set(listed)) != len(listed):
            raise ValueError(
                f"files must be listed once each, got {len(listed)} entries for {len(set(listed))} files"
            )
        if len(set(self.parts)) != len(self.parts):
            raise ValueError(
                f"each part must have a file of its own, got {len(set(self.parts))} for {len(self.parts)}"
            )
        if missing := set(self.parts) - set(listed):
            raise ValueError(
                f"files that the plan uses must be listed in files; {len(missing)} of them are not"
            )
        if unused := set(listed) - set(self.parts):
            raise ValueError(
                f"files must list what the plan uses and nothing else; {len(unused)} are not used"
            )
        if odd := [
            path
            for path in {*self.parts} - {*self.earlier_plans}
            if not path.startswith("plan/") or not path.endswith(".safetensors")
        ]:
            raise ValueError(f"files of a plan must be plan/NAME.safetensors; {len(odd)} are not")
        if any(self.file(path).digest != digest for path, digest in self.earlier_plans.items()):
            raise ValueError(
                "the documents of earlier plans must have the digests that carried names"
            )
        counted = self.statistics.class_counts
        if (
            isinstance(self.condition, ClassCondition)
            and counted
            and counted.num_classes != self.condition.num_classes
        ):
            got = f"{self.condition.num_classes} and {counted.num_classes}"
            raise ValueError(
                f"condition and class counts must have the same number of classes, got {got}"
            )
        exceptions = [exception.silo_id for exception in self.objective.exceptions]
        if exceptions != sorted(set(exceptions) & set(self.members)):
            wanted = "exceptions of the objective must be silos of the plan, sorted and distinct"
            raise ValueError(f"{wanted}; these {len(exceptions)} are not")
        own = self.expert.adaptation
        if isinstance(own, OwnAdaptation) and not set(own.submissions) <= set(self.silos):
            raise ValueError("adaptation.submissions must be of silos that train for the plan")
        if misfit := self.latent.misfit(self.data.shape):
            raise ValueError(f"the latent {self.latent.kind} needs {misfit}")
        if isinstance(self.latent, DiffusersKlLatent) and self.data.range != (-1.0, 1.0):
            low, high = self.data.range
            raise ValueError(
                f"the latent diffusers_kl needs data in the range -1 to 1, not {low:g} to {high:g}"
            )
        unit = self.statistics.unit if self.statistics.private else None
        if self.transform and (misfit := self.transform.misfit(self.data, unit)):
            raise ValueError(f"the transform needs {misfit}")
        _check_shape(self.expert_shape, self.condition, self.expert.architecture, self.router)
        if misfit := self.encoder.misfit(self.data.shape):
            raise ValueError(f"an encoder of the kind {self.encoder.kind} takes {misfit}")
        if self.expires_at <= self.created_at:
            raise ValueError("expires_at must be later than created_at")
        _check_routing(self.statistics, self.router, self.sketch, self.clustering)
        if self.expert.privacy:
            if not isinstance(self.partition, SiloPartition) or not self.statistics.private:
                raise ValueError(
                    'private training needs the partition "silo", and noised statistics: one expert per silo'
                )
            self.spends  # noqa: B018  # a sum that no document can hold is refused
        return self

    @property
    def spends(self) -> Budget:
        """The most that the plan costs a unit: its statistics and, with private training, the expert, added up."""
        total, private = self.statistics.total, self.expert.privacy
        if private is None:
            return total
        return Budget(epsilon=total.epsilon + private.epsilon, delta=total.delta + private.delta)

    @property
    def parts(self) -> tuple[str, ...]:
        """The paths of the files that the plan uses: its public parts, then the documents of earlier plans."""
        autoencoder = self.latent.path if isinstance(self.latent, Autoencoder) else None
        paths = (
            self.encoder.path,
            self.clustering.path,
            self.sketch.path,
            autoencoder,
            self.expert.base,
        )
        return (*filter(None, paths), *self.earlier_plans)

    @property
    def earlier_plans(self) -> dict[str, str]:
        """The documents of the plans from which experts are carried: path among `files` to sha256."""
        return {each.plan_path: each.plan_digest for each in self.carried}

    @property
    def members(self) -> tuple[SiloId, ...]:
        """The silos whose experts this plan joins: those that train and those that are carried, sorted."""
        return tuple(sorted([*self.silos, *(each.silo_id for each in self.carried)]))

    def origin(self, silo_id: str) -> PlanId:
        """Return the id of the plan for which a silo signs: this one, or the one that it is carried from."""
        return next(
            (each.plan_id for each in self.carried if each.silo_id == silo_id), self.plan_id
        )

    @property
    def expert_shape(self) -> tuple[int, ...]:
        """The shape of a sample in the space of experts, routers and sketches."""
        return self.latent.shape(self.data.shape)

    def file(self, path: str) -> File:
        """Return the listed file called `path`."""
        return next(file for file in self.files if file.path == path)


def _check_shape(
    shape: tuple[int, ...],
    condition: Condition,
    architecture: Architecture,
    router: Router,
) -> None:
    """Refuse networks that do not take samples of this shape, or experts that do not take the condition."""
    if misfit := architecture.misfit(shape, condition):
        raise ValueError(f"the architecture {architecture.kind} needs {misfit}")
    if isinstance(router, SamplesRouter) and (misfit := router.misfit(shape, condition)):
        raise ValueError(f"the router samples needs {misfit}")


def _check_routing(
    statistics: Statistics,
    router: Router,
    sketch: SketchSpec,
    clustering: Clustering,
) -> None:
    """Refuse a router without its statistics, and statistics that do not fit the projection or the clusters."""
    if isinstance(router, LearnedRouter) and statistics.private and statistics.sketch is None:
        raise ValueError(
            "the router learned needs the statistic sketch, which the plan does not have"
        )
    rank = statistics.sketch.rank if statistics.sketch else 0
    if rank > sketch.rank:
        raise ValueError(
            f"a statistic has rank {rank}, more than the {sketch.rank} dimensions of the projection"
        )
    if not clustering.num_coarse <= statistics.counts.num_groups <= clustering.num_fine:
        got = f"{clustering.num_coarse}, {statistics.counts.num_groups} and {clustering.num_fine}"
        raise ValueError(f"num_coarse <= num_groups <= num_fine must hold, got {got}")


def most_experts(plan: Plan) -> int:
    """Return the most experts that one silo may have."""
    partition = plan.partition
    if isinstance(partition, SiloClusterPartition):
        return plan.clustering.num_coarse
    return partition.num_parts if isinstance(partition, RandomPartition) else 1
