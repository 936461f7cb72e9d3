"""A finished student: a file of weights, and beside it one of the same name in JSON, which says where it comes from."""

from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator

from ddm.diffusion.path import path_named
from ddm.encoders.autoencoder import open_latent
from ddm.ensemble import Ensemble
from ddm.errors import DigestError
from ddm.io.files import read_bounded, require_file
from ddm.models import load_expert
from ddm.protocol.base import MAX_DOCUMENT_BYTES, Digest, Document, File, Model, NaturalInt, PlanId, PositiveInt
from ddm.protocol.plan import (
    Architecture,
    AutoencoderKlLatent,
    Condition,
    DataSpec,
    IdentityLatent,
    Latent,
    NoCondition,
    TDistribution,
    Training,
)
from ddm.sampling.guidance import Given

RECORD_SUFFIX, AUTOENCODER_SUFFIX = ".json", ".autoencoder.safetensors"


class Source(Model):
    """The release that a student was distilled from.

    Attributes:
        plan_id: its plan.
        version: of the release.
        manifest: digest of its manifest, which lists every expert by digest.
        root: fingerprint of the root of trust that it was verified against.
    """

    plan_id: PlanId
    version: PositiveInt
    manifest: Digest
    root: Digest


class OwnSamples(Model):
    """The student saw samples of the ensemble, and no data; `texts` is the digest of the file of what it was told."""

    kind: Literal["own_samples"] = "own_samples"
    num: PositiveInt
    strategy: Literal["lock"] = "lock"
    seed: NaturalInt
    texts: Digest | None = None


class GivenImages(Model):
    """The student saw images that somebody gave: `digest` is that of their file, `num` how many of them were used."""

    kind: Literal["given_images"] = "given_images"
    num: PositiveInt
    digest: Digest


class Student(Document):
    """What the record says. Nobody signs it: it is a researcher's own record.

    Attributes:
        source: the release.
        images: what it saw.
        teacher: who answered.
        data: one sample.
        latent: what it works on.
        autoencoder: the weights that turn its latents into samples, a file of the same name beside it; None on pixels.
        condition: what it is told.
        architecture: of its network.
        path: how samples become noise.
        t_distribution: of the training times.
        training: the recipe.
        base: digest of the public expert's weights that it started from; None for random ones.
        loss: mean squared distance from the teacher's answers per value, averaged over about the last hundred steps.
        seconds: time spent training, over all restarts.
        file: its weights, whatever they are called.
    """

    format: Literal["archipelago/student/1"] = "archipelago/student/1"
    source: Source
    images: Annotated[OwnSamples | GivenImages, Field(discriminator="kind")]
    teacher: Literal["label", "drawn", "mixture"]
    data: DataSpec
    latent: Latent = IdentityLatent()
    autoencoder: File | None = None
    condition: Condition = NoCondition()
    architecture: Architecture
    path: Literal["linear", "cosine_vp"]
    t_distribution: TDistribution
    training: Training
    base: Digest | None = None
    loss: float
    seconds: float
    file: File

    @model_validator(mode="after")
    def _latents_are_decoded(self) -> "Student":
        if isinstance(self.latent, AutoencoderKlLatent) != (self.autoencoder is not None):
            raise ValueError("latents and their autoencoder go together")
        if misfit := self.latent.misfit(self.data.shape):
            raise ValueError(f"the latent {self.latent.kind} needs {misfit}")
        return self


def autoencoder_beside(weights: Path) -> Path:
    """Return where a student's autoencoder lies."""
    return weights.with_name(weights.stem + AUTOENCODER_SUFFIX)


def load_student(weights: Path | str, *, device: torch.device | str = "cpu") -> tuple[Student, Ensemble]:
    """Read a student as an ensemble of one: what samples from an ensemble samples from it.

    Args:
        weights: its file; the record lies beside it, and what decodes its latents if it works on those.
        device: where it shall compute.

    Raises:
        MissingFileError: there are no weights, no record, or no autoencoder.
        DocumentError: the record is not one.
        DigestError: the weights, or the autoencoder's, are not those that it names.
        ShapeError: it describes a network that cannot be.
        TensorFileError: the weights are not what its architecture implies.
    """
    weights = require_file(Path(weights), "a student's weights")
    path = require_file(weights.with_suffix(RECORD_SUFFIX), "a student's record")
    record = Student.parse(read_bounded(path, MAX_DOCUMENT_BYTES), subject=path.name)
    shape, latent = record.latent.shape(record.data.shape), record.latent
    # Found beside the record, whatever they are called: the digests say whether it is these.
    file = record.file.model_copy(update={"path": weights.name})
    if isinstance(latent, AutoencoderKlLatent):
        beside = require_file(autoencoder_beside(weights), "a student's autoencoder")
        latent = latent.model_copy(update={"path": beside.name})
    try:
        expert = load_expert(record.architecture, shape, weights.parent, file, record.condition).to(device)
        decoder = open_latent(latent, record.data.shape, record.autoencoder, weights.parent)
    except DigestError as error:  # nobody signed or published these, so the error's own remedy would mislead
        expected, got = f"the file that {path.name} names", "another"
        remedy = "Bring back the files that ddm distill wrote together, or distil again."
        raise DigestError(error.subject, expected=expected, got=got, remedy=remedy) from error
    alone = Ensemble(
        [expert],
        None,
        [1.0],
        shape,
        path=path_named(record.path),
        expert_ids=[record.source.plan_id],
        device=device,
        condition=record.condition,
        given_class=lambda label: Given([1.0]),
        latent=decoder,
    )
    return record, alone
