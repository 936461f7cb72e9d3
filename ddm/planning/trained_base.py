"""The card of a base that was trained on public images, beside its weights."""

import hashlib
from typing import Literal

import torch
from pydantic import model_validator
from torch import Tensor

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
from ddm.protocol.bases import BaseSourceText
from ddm.protocol.data import PixelValue
from ddm.protocol.latent import LatentSpec
from ddm.protocol.learning import ExpertObjective, TDistribution, Training

CARD_NAME = "base.json"
WEIGHTS_NAME = "base.safetensors"
# Images that are hashed together.
_HASHED_ROWS = 256


def images_digest(*columns: Tensor) -> str:
    """Return the digest that identifies images in this form, in this order, with their other columns."""
    sha256 = hashlib.sha256()
    for column in columns:
        sha256.update(f"{column.dtype} {tuple(column.shape)}".encode())
        for block in torch.split(column, _HASHED_ROWS):
            sha256.update(block.numpy().tobytes())
    return sha256.hexdigest()


class TrainedBaseCard(Document):
    """What `aggregator base` states of a base; the operator's own, not signed.

    Attributes:
        created_at: when its training ended.
        licence: the licence of the base.
        source: what the public images are, such as the name of their data set.
        images_digest: sha256 of the public images, in the form in which it learned them.
        public_digest: the same before an autoencoder encodes them, and without classes: a plan must be fitted on these
            images, so that those that it holds out are held out from the base too.
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
    source: BaseSourceText | None = None
    images_digest: Digest
    public_digest: Digest
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
