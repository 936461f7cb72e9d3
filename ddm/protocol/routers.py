"""The settings of the router that a plan requires, a document for each family; without torch."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ddm.protocol.architecture import (
    Condition,
    DropProbability,
    NoCondition,
    Shape,
    TransformerSize,
)
from ddm.protocol.base import Model, NumSteps
from ddm.protocol.learning import Share
from ddm.protocol.statistics import Statistics

RouterKind = Literal["counts", "learned", "samples"]
"""The families of routers, as plans and manifests name them; `ddm.routers.families` has their code."""


class FamilySettings(Model):
    """What the settings of every family can say about a plan."""

    def misfit(self, shape: Shape, condition: Condition) -> str | None:
        """Return what the router needs of samples or condition that the plan does not give; None where it fits."""
        return None

    def missing_statistic(self, statistics: Statistics) -> str | None:
        """Return the statistic that the router is fitted to and that the plan lacks; None where it has all."""
        return None

    def needs_null(self, statistics: Statistics) -> bool:
        """Whether the router is trained on images that experts draw without a condition."""
        return False


class CountsSettings(FamilySettings):
    """The counts router as it is: no training."""

    kind: Literal["counts"] = "counts"


class LearnedSettings(FamilySettings):
    """A router trained on the noised sketches; published only where it is not worse than counts.

    Attributes:
        hidden: width of its network.
        depth: layers of its network.
        num_steps: training steps of the router.
    """

    kind: Literal["learned"] = "learned"
    hidden: Annotated[int, Field(gt=0, le=4096)]
    depth: Annotated[int, Field(gt=0, le=32)]
    num_steps: NumSteps

    def missing_statistic(self, statistics: Statistics) -> str | None:
        """See `FamilySettings.missing_statistic`; one owner's islands need no sketches, their labels being known."""
        if statistics.private and statistics.sketch is None:
            return "sketch"
        return None


Labels = Literal["experts", "group", "class", "silo"]


class SamplesSettings(FamilySettings, TransformerSize):
    """A transformer on x_t, the paper's router, trained on labelled public images or on images that the experts draw.

    Trained on images of the experts it is as private as their weights; labels of public images cost no privacy.

    Attributes:
        labels: what tells the router whose data an image resembles: the expert that drew it (experts); or of public
            images their public group (group), their class and group (class), weighed by the silos' noised counts, or
            the silo that they are said to be of (silo). One owner's islands are always known.
        num_steps: training steps of the router.
        images_per_expert: images drawn from each expert, or of each island at most; not used for public images.
        batch_size: images in a step.
        learning_rate: the highest of the run.
        schedule: how the learning rate falls: not at all, to `final_rate` along half a cosine, or along a line.
        warmup_steps: steps over which it first rises from 0; the fall has begun by then.
        final_rate: the share of the learning rate that is left at the end; not for the schedule constant.
        weight_decay: AdamW's weight decay.
        precision: the precision of the arithmetic in training, as for experts: auto is bf16 where its products are
            faster.
        conditional: whether the router reads the class or the text that experts are told, too.
        drop: share of the images whose condition training hides, for answers without one; only where it reads one.
    """

    kind: Literal["samples"] = "samples"
    labels: Labels = "experts"
    num_steps: NumSteps
    images_per_expert: Annotated[int, Field(gt=1, le=1_000_000)] = 1000
    batch_size: Annotated[int, Field(gt=0, le=2**20)] = 128
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-3
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0, le=10**9)] = 0
    final_rate: Share = 0.0
    weight_decay: Share = 0.05
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    conditional: bool = False
    drop: DropProbability = 0.1

    def misfit(self, shape: Shape, condition: Condition) -> str | None:
        """See `TransformerSize.misfit`; a router that reads a condition needs one."""
        if self.conditional and isinstance(condition, NoCondition):
            return (
                "a condition to read, class or text: leave conditional out for experts without one"
            )
        return TransformerSize.misfit(self, shape, condition)

    def needs_null(self, statistics: Statistics) -> bool:
        """See `FamilySettings.needs_null`; the islands of one owner's images are known, so that nothing is drawn."""
        return statistics.private and self.labels == "experts" and not self.conditional

    def router_condition(self, condition: Condition) -> Condition:
        """Return the condition that the router reads, given that of the experts."""
        return condition if self.conditional else NoCondition()

    @model_validator(mode="after")
    def _only_a_falling_rate_has_an_end(self) -> "SamplesSettings":
        if self.final_rate and self.schedule == "constant":
            raise ValueError("final_rate needs the schedule cosine or linear")
        return self


# Those that a recipe writes as a plan does; a recipe of the samples router may name a published size instead.
PlainSettings = CountsSettings | LearnedSettings
RouterSettings = Annotated[PlainSettings | SamplesSettings, Field(discriminator="kind")]
