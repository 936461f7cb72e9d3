"""The plan: the aggregator's signed instructions to every silo."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ddm.protocol.architecture import ClassCondition, Condition, learns_null
from ddm.protocol.base import MAX_SILOS, File, KeyText, Licence, Model, PlanId, SiloId, Time
from ddm.protocol.bases import Base, SeedBase, licence_misfit
from ddm.protocol.carried import CarriedSilo, check_carried_silos
from ddm.protocol.data import DataSpec
from ddm.protocol.encoder import EncoderSpec
from ddm.protocol.enrolment import AgreedSize
from ddm.protocol.federation import FederationDocument
from ddm.protocol.latent import Autoencoder, DiffusersKlLatent, LatentSpec
from ddm.protocol.learning import Expert, Objective, OwnAdaptation, TDistribution
from ddm.protocol.limits import Audit, SubmissionLimits
from ddm.protocol.partition import (
    Clustering,
    Partition,
    RandomPartition,
    SiloClusterPartition,
    SiloPartition,
    SketchSpec,
)
from ddm.protocol.routers import RouterSettings
from ddm.protocol.statistics import Budget, Statistics
from ddm.protocol.transform import TransformSpec

REHEARSAL = "A rehearsal: it tries the federation out, and its experts draw noise."


class ModelTerms(Model):
    """The fields that a plan repeats word for word from its recipe, be it a federation's or one owner's.

    A recipe inherits from this class, and `ddm.planning.document.plan_of` copies its fields. So a new one needs one
    line here, and whatever acts on it.
    """

    data: DataSpec
    transform: TransformSpec | None = None
    partition: Partition
    objective: Objective
    t_distribution: TDistribution
    expert: Expert
    router: RouterSettings


class PlanTerms(ModelTerms):
    """The same, with what only a federation chooses: in the plan of one owner's islands these follow from the data.

    Attributes:
        rehearsal: the plan tries the federation out with experts that draw noise, so that few steps will do; screening
            then forgives what few steps cannot teach.
    """

    statistics: Statistics
    audit: Audit
    limits: SubmissionLimits
    rehearsal: bool = False


class Plan(PlanTerms, FederationDocument):
    """The signed instructions of one federation, or of one owner's islands; see `docs/reference` for an example.

    `silos` train for this plan; the experts of those in `carried` continue from an earlier one. The fields that an
    operator chooses are in `PlanTerms`; those here are fitted, counted or signed.

    Attributes:
        licence: the licence of the releases that contain what the silos send.
        base: what the public expert is that training starts from; null where there is none.
    """

    format: Literal["archipelago/plan/1"] = "archipelago/plan/1"
    plan_id: PlanId
    created_at: Time
    expires_at: Time
    licence: Licence
    silos: Annotated[tuple[SiloId, ...], Field(min_length=1, max_length=MAX_SILOS)]
    carried: Annotated[tuple[CarriedSilo, ...], Field(max_length=MAX_SILOS)] = ()
    agreed: Annotated[dict[SiloId, AgreedSize], Field(max_length=MAX_SILOS)]
    receipt_key: KeyText
    files: Annotated[tuple[File, ...], Field(min_length=1, max_length=64)]
    latent: LatentSpec
    encoder: EncoderSpec
    clustering: Clustering
    sketch: SketchSpec
    condition: Condition
    base: Base | None = None

    @model_validator(mode="after")
    def _silos_are_sorted_and_agreed(self) -> "Plan":
        if list(self.silos) != sorted(set(self.silos)):
            raise ValueError(f"silos must be sorted and distinct; these {len(self.silos)} are not")
        check_carried_silos(self.plan_id, self.silos, self.carried)
        if set(self.agreed) != set(self.members):
            raise ValueError("agreed must name each silo once, as silos and carried do")
        return self

    @model_validator(mode="after")
    def _files_are_those_that_it_uses(self) -> "Plan":
        listed_paths = [file.path for file in self.files]
        num_distinct = len(set(listed_paths))
        if num_distinct != len(listed_paths):
            raise ValueError(
                f"files must be listed once each, got {len(listed_paths)} entries for {num_distinct} files"
            )
        # Two parts at one path would be the same bytes, read under two sets of names and shapes.
        num_distinct = len(set(self.parts))
        if num_distinct != len(self.parts):
            raise ValueError(
                f"each part must have a file of its own, got {num_distinct} for {len(self.parts)}"
            )

        missing_paths = set(self.parts) - set(listed_paths)
        if missing_paths:
            raise ValueError(
                f"files that the plan uses must be listed in files; {len(missing_paths)} of them are not"
            )
        # A file that nothing uses would travel to every silo without any rule that bounds or reads it.
        unused_paths = set(listed_paths) - set(self.parts)
        if unused_paths:
            raise ValueError(
                f"files must list what the plan uses and nothing else; {len(unused_paths)} are not used"
            )

        public_parts = set(self.parts) - set(self.earlier_plans)
        misplaced_paths = [
            path
            for path in public_parts
            if not path.startswith("plan/") or not path.endswith(".safetensors")
        ]
        if misplaced_paths:
            raise ValueError(
                f"files of a plan must be plan/NAME.safetensors; {len(misplaced_paths)} are not"
            )
        for path, digest in self.earlier_plans.items():
            if self.file(path).digest != digest:
                raise ValueError(
                    "the documents of earlier plans must have the digests that carried names"
                )
        return self

    @model_validator(mode="after")
    def _classes_are_those_that_are_counted(self) -> "Plan":
        # Row c of a silo's class counts says how many of its images have class c of the condition.
        class_counts = self.statistics.class_counts
        if class_counts is None or not isinstance(self.condition, ClassCondition):
            return self
        if class_counts.num_classes != self.condition.num_classes:
            got = f"{self.condition.num_classes} and {class_counts.num_classes}"
            raise ValueError(
                f"condition and class counts must have the same number of classes, got {got}"
            )
        return self

    @model_validator(mode="after")
    def _silos_of_objective_and_adaptation_are_in_the_plan(self) -> "Plan":
        exceptions = [exception.silo_id for exception in self.objective.exceptions]
        if exceptions != sorted(set(exceptions) & set(self.members)):
            expected = "exceptions of the objective must be silos of the plan, sorted and distinct"
            raise ValueError(f"{expected}; these {len(exceptions)} are not")
        adaptation = self.expert.adaptation
        if not isinstance(adaptation, OwnAdaptation):
            return self
        # A carried silo does not train, so that there is nothing that it could begin from.
        if not set(adaptation.submissions) <= set(self.silos):
            raise ValueError("adaptation.submissions must be of silos that train for the plan")
        return self

    @model_validator(mode="after")
    def _base_is_stated(self) -> "Plan":
        path = self.expert.base
        if (self.base is None) != (path is None):
            raise ValueError("base must state what expert.adaptation starts from, and only that")
        if self.base is None or path is None:
            return self
        if self.file(path).digest != self.base.digest:
            raise ValueError("base must have the digest of its file in files")
        # Here too, and not in planning alone: silos and readers need not believe that the operator compared them.
        if licence_misfit(self.base.licence, self.licence) is not None:
            raise ValueError("base.licence must be permissive, or the licence of the plan")
        # In a federation nobody has all silos' images, so that such a base would have a false origin.
        if isinstance(self.base.origin, SeedBase) and self.statistics.private:
            raise ValueError(
                "base.origin seed is for the islands of one owner: a federation trains no seed on its silos' images"
            )
        # Its guarantee would cover what private training adds, and not what the base already knows about the same
        # units.
        exposed_silos = set(self.base.exposed_silos) & set(self.silos)
        if self.expert.privacy is not None and exposed_silos:
            raise ValueError(
                "private training cannot start from a base that learned images of the plan's silos without it; "
                f"{len(exposed_silos)} of them did"
            )
        return self

    @model_validator(mode="after")
    def _images_fit_latent_transform_and_encoder(self) -> "Plan":
        misfit = self.latent.misfit(self.data.shape)
        if misfit:
            raise ValueError(f"the latent {self.latent.kind} needs {misfit}")
        # The published autoencoders were trained on this range.
        if isinstance(self.latent, DiffusersKlLatent) and self.data.range != (-1.0, 1.0):
            low, high = self.data.range
            raise ValueError(
                f"the latent diffusers_kl needs data in the range -1 to 1, not {low:g} to {high:g}"
            )
        if self.transform:
            # Exact counts hide nothing, so that it does not matter whose record their unit is.
            unit = self.statistics.unit if self.statistics.private else None
            misfit = self.transform.misfit(self.data, unit)
            if misfit:
                raise ValueError(f"the transform needs {misfit}")
        return self

    @model_validator(mode="after")
    def _networks_take_the_samples(self) -> "Plan":
        architecture = self.expert.architecture
        misfit = architecture.misfit(self.expert_shape, self.condition)
        if misfit:
            raise ValueError(f"the architecture {architecture.kind} needs {misfit}")
        misfit = self.router.misfit(self.expert_shape, self.condition)
        if misfit:
            raise ValueError(f"the router {self.router.kind} needs {misfit}")
        misfit = self.encoder.misfit(self.data.shape)
        if misfit:
            raise ValueError(f"an encoder of the kind {self.encoder.kind} takes {misfit}")
        return self

    @model_validator(mode="after")
    def _expires_after_it_begins(self) -> "Plan":
        if self.expires_at <= self.created_at:
            raise ValueError("expires_at must be later than created_at")
        return self

    @model_validator(mode="after")
    def _router_has_its_statistics(self) -> "Plan":
        statistics = self.statistics
        missing = self.router.missing_statistic(statistics)
        if missing:
            raise ValueError(
                f"the router {self.router.kind} needs the statistic {missing}, which the plan does not have"
            )
        if self.router.needs_null(statistics) and not learns_null(self.condition):
            raise ValueError(
                f"the router {self.router.kind} draws from experts without a condition, which they never learned: "
                "condition.drop must be above 0, or router.conditional true"
            )
        if statistics.sketch and statistics.sketch.rank > self.sketch.rank:
            raise ValueError(
                f"a statistic has rank {statistics.sketch.rank}, more than the {self.sketch.rank} dimensions of "
                "the projection"
            )
        num_groups = statistics.counts.num_groups
        if not self.clustering.num_coarse <= num_groups <= self.clustering.num_fine:
            got = f"{self.clustering.num_coarse}, {num_groups} and {self.clustering.num_fine}"
            raise ValueError(f"num_coarse <= num_groups <= num_fine must hold, got {got}")
        return self

    @model_validator(mode="after")
    def _private_training_is_of_one_expert_per_silo(self) -> "Plan":
        if self.expert.privacy is None:
            return self
        if not isinstance(self.partition, SiloPartition) or not self.statistics.private:
            raise ValueError(
                'private training needs the partition "silo", and noised statistics: one expert per silo'
            )
        self.spends  # noqa: B018  # raises where the sum is more than a document can hold
        return self

    @property
    def spends(self) -> Budget:
        """The most that the plan costs a unit: its statistics and, with private training, the expert, added up."""
        total = self.statistics.total
        private_training = self.expert.privacy
        if private_training is None:
            return total
        # Basic composition: epsilons and deltas of mechanisms on the same unit add up.
        return Budget(
            epsilon=total.epsilon + private_training.epsilon,
            delta=total.delta + private_training.delta,
        )

    @property
    def parts(self) -> tuple[str, ...]:
        """The paths of the files that the plan uses: its public parts, then the documents of earlier plans."""
        paths = [self.encoder.path, self.clustering.path, self.sketch.path]
        if isinstance(self.latent, Autoencoder):
            paths.append(self.latent.path)
        if self.expert.base is not None:
            paths.append(self.expert.base)
        return (*paths, *self.earlier_plans)

    @property
    def earlier_plans(self) -> dict[str, str]:
        """The documents of the plans from which experts are carried: path among `files` to sha256."""
        return {carried.plan_path: carried.plan_digest for carried in self.carried}

    @property
    def members(self) -> tuple[SiloId, ...]:
        """The silos whose experts this plan joins: those that train and those that are carried, sorted."""
        carried_silos = [carried.silo_id for carried in self.carried]
        return tuple(sorted([*self.silos, *carried_silos]))

    def origin(self, silo_id: str) -> PlanId:
        """Return the id of the plan for which a silo signs: this one, or the one that it is carried from."""
        for carried in self.carried:
            if carried.silo_id == silo_id:
                return carried.plan_id
        return self.plan_id

    @property
    def expert_shape(self) -> tuple[int, ...]:
        """The shape of a sample in the space of experts, routers and sketches."""
        return self.latent.shape(self.data.shape)

    def file(self, path: str) -> File:
        """Return the listed file called `path`."""
        return next(file for file in self.files if file.path == path)


def max_experts_per_silo(plan: Plan) -> int:
    """Return the most experts that one silo may have."""
    match plan.partition:
        case SiloPartition():
            return 1
        case SiloClusterPartition():
            return plan.clustering.num_coarse
        case RandomPartition(num_parts=num_parts):
            return num_parts
