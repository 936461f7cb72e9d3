"""Which router a plan asks for. No torch: sizes only."""

from typing import Annotated, Literal

from pydantic import Field

from ddm.protocol.architecture import TransformerSize
from ddm.protocol.base import Model, NumSteps


class CountsRouter(Model):
    """The counts router as it is: no training."""

    kind: Literal["counts"] = "counts"


class MomentsRouter(Model):
    """One Gaussian per silo, from its noised mean and second moments."""

    kind: Literal["moments"] = "moments"


class LearnedRouter(Model):
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


class SamplesRouter(TransformerSize):
    """A transformer on x_t, trained on images drawn from the submitted experts; as private as their weights.

    Attributes:
        num_steps: training steps of the router.
        images_per_expert: images drawn from each expert.
    """

    kind: Literal["samples"] = "samples"
    num_steps: NumSteps
    images_per_expert: Annotated[int, Field(gt=1, le=1_000_000)]


Router = Annotated[LearnedRouter | CountsRouter | MomentsRouter | SamplesRouter, Field(discriminator="kind")]
