"""The card of a base that was trained on public images, beside its weights."""

from typing import Literal

from pydantic import model_validator

from ddm.protocol.architecture import Architecture, Condition, Shape
from ddm.protocol.base import (
    Digest,
    Document,
    File,
    Licence,
    Measure,
    NumImages,
    NumSteps,
    Seconds,
    Time,
)
from ddm.protocol.data import PixelValue
from ddm.protocol.latent import LatentSpec
from ddm.protocol.learning import ExpertObjective, TDistribution, Training

CARD_NAME = "base.json"
WEIGHTS_NAME = "base.safetensors"


class TrainedBaseCard(Document):
    """What `aggregator base` states of a base; the operator's own, not signed.

    Attributes:
        created_at: when its training ended.
        licence: the licence of the base.
        images_digest: sha256 of the public images, in the form in which it learned them.
        num_images: the number of these images.
        shape: the shape of a sample, as the network sees it.
        range: lowest and highest value of an image.
        latent: what the network sees of an image: pixels, or latents.
        autoencoder: sha256 of the autoencoder's weights; null on pixels.
        condition: what it is conditioned on.
        architecture: the architecture of the network.
        objective: what it was trained for.
        t_distribution: the distribution of the training times.
        training: the recipe.
        steps: the number of steps made.
        loss: mean loss over about the last hundred steps.
        seconds: the number of seconds of training, over all restarts.
        file: its weights.
    """

    format: Literal["archipelago/base/1"] = "archipelago/base/1"
    created_at: Time
    licence: Licence
    images_digest: Digest
    num_images: NumImages
    shape: Shape
    range: tuple[PixelValue, PixelValue]
    latent: LatentSpec
    autoencoder: Digest | None
    condition: Condition
    architecture: Architecture
    objective: ExpertObjective
    t_distribution: TDistribution
    training: Training
    steps: NumSteps
    loss: Measure
    seconds: Seconds
    file: File

    @model_validator(mode="after")
    def _network_fits(self) -> "TrainedBaseCard":
        misfit = self.architecture.misfit(self.shape, self.condition)
        if misfit:
            raise ValueError(f"the architecture {self.architecture.kind} needs {misfit}")
        return self
