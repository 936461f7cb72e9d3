"""What a site's policy lets a plan require. A part of the card; `silo.config` adds what only the site needs to know."""

from typing import Annotated

from pydantic import Field

from ddm.protocol.architecture import ArchitectureKind
from ddm.protocol.base import Delta, Epsilon, Model, PositiveInt, ShortText, Unit
from ddm.protocol.learning import Share

_WEEK_S = 7 * 24 * 3600
Licences = Annotated[tuple[ShortText, ...], Field(max_length=64)]


class PrivacyLimits(Model):
    """The unit that a plan has to protect, and the most that it may spend."""

    # A default that protects images would guarantee nothing to a patient who has several (ADR 0053).
    unit: Unit = "patient"
    max_epsilon: Epsilon = 8.0
    max_delta: Delta = 1e-5


class TrainingLimits(Model):
    """The most work and the largest files that a plan may require."""

    # Each of these is compared with the plan's own numbers before anything is opened (`ddm.limits`).
    max_experts: Annotated[int, Field(gt=0, le=1000)] = 64  # the transport carries 1,024 files
    max_steps: PositiveInt = 1_000_000
    max_batch_size: PositiveInt = 4096
    max_expert_bytes: PositiveInt = 4 * 1024**3
    max_statistic_bytes: PositiveInt = 256 * 1024**2
    max_train_s: PositiveInt = _WEEK_S
    max_gpu_hours: Annotated[float, Field(ge=0, le=1e9)] = 1000.0
    # An architecture is code that runs beside the images: each one is let in by name.
    architectures: Annotated[tuple[ArchitectureKind, ...], Field(max_length=16)] = ("dit",)


class SizeLimits(Model):
    """The largest sizes that a plan's numbers may imply, computed from them before any of its files is opened."""

    max_sample_values: PositiveInt = 2**26
    max_slices: PositiveInt = 512
    max_layer_values: PositiveInt = 2**27
    max_parameters: PositiveInt = 2**30
    max_file_bytes: PositiveInt = 2 * 1024**3
    max_memory_bytes: PositiveInt = 32 * 1024**3


class AuditLimits(Model):
    """The loosest leak audit that a plan may require.

    Attributes:
        required: whether a plan must require it.
        holdout_share: of the units (patients or images), held out of every plan's training to compare with.
        min_holdout_units: fewest that are held out; a plan must need as many. Where even `max_holdout_share` is fewer,
            nothing is held out, and the audit is inconclusive.
        max_holdout_share: of the units, the most that are held out to reach `min_holdout_units`.
        max_mia_auc: the largest that a plan may let pass, as are the next two.
        max_mia_tpr: see `ddm.protocol.limits.Audit`.
        max_near_copy_rate: the same.
    """

    required: bool = True
    holdout_share: Annotated[float, Field(ge=0.0, le=0.5)] = 0.1
    # 300 units give an AUC to within 0.05 and three false positives at 1% (ADR 0054).
    min_holdout_units: Annotated[int, Field(ge=2, le=10**6)] = 300
    max_holdout_share: Annotated[float, Field(ge=0.0, le=0.5)] = 0.25
    max_mia_auc: Annotated[float, Field(ge=0.5, le=1.0)] = 0.6
    max_mia_tpr: Share = 0.1
    max_near_copy_rate: Share = 0.01

    def num_holdout_units(self, num_units: int) -> int:
        """Return how many of a site's units are held out: the share, or as many as an audit needs, or none."""
        share_of_units = int(self.holdout_share * num_units)
        if share_of_units >= self.min_holdout_units:
            return share_of_units
        most = int(self.max_holdout_share * num_units)
        if self.holdout_share > 0 and most >= self.min_holdout_units:
            return self.min_holdout_units
        return 0


class PolicyLimits(Model):
    """Everything in a site's policy that a plan is compared with, except what the site declares about its data.

    Attributes:
        privacy: unit, epsilon and delta of one plan.
        training: the work, and the files.
        sizes: the sizes of samples, networks and memory.
        audit: limits of the leak audit.
        licences: under which releases may be published; with none, any licence.
        batch_parts: the parts into which the site's machine divides a batch, each of which takes memory by itself.
    """

    privacy: PrivacyLimits = PrivacyLimits()
    training: TrainingLimits = TrainingLimits()
    sizes: SizeLimits = SizeLimits()
    audit: AuditLimits = AuditLimits()
    licences: Licences = ()
    batch_parts: PositiveInt = 1
