"""The files of a finished student: its weights, and a JSON record of the same name that states its provenance."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator

from ddm.diffusion.path import path_named
from ddm.encoders.autoencoder import open_latent
from ddm.ensemble import Ensemble
from ddm.errors import DigestError
from ddm.footprint import drawing_bytes
from ddm.io.files import read_bounded, require_file
from ddm.models import load_expert, network_size
from ddm.models.arithmetic import Arithmetic
from ddm.protocol.architecture import Architecture, Condition, NoCondition
from ddm.protocol.base import (
    MAX_DOCUMENT_BYTES,
    Digest,
    Document,
    File,
    Measure,
    Model,
    NaturalInt,
    PlanId,
    PositiveInt,
    Seconds,
)
from ddm.protocol.data import DataSpec
from ddm.protocol.latent import Autoencoder, IdentityLatent, LatentSpec
from ddm.protocol.learning import TDistribution, Training
from ddm.sampling.guidance import ClassPrior

RECORD_SUFFIX = ".json"
AUTOENCODER_SUFFIX = ".autoencoder.safetensors"


class StudentOrigin(Model):
    """The release that a student was distilled from.

    Attributes:
        plan_id: its plan.
        version: the version of the release.
        manifest: digest of its manifest, which lists every expert by digest.
        root: fingerprint of the root of trust that it was verified against.
    """

    plan_id: PlanId
    version: PositiveInt
    manifest: Digest
    root: Digest


class OwnSamples(Model):
    """The student was trained on the ensemble's samples, not on data; `texts` is the digest of the file of texts."""

    kind: Literal["own_samples"] = "own_samples"
    num: PositiveInt
    strategy: Literal["lock"] = "lock"
    seed: NaturalInt
    texts: Digest | None = None


class GivenImages(Model):
    """The student was trained on images of the user's: the digest of their file, and how many of them were used."""

    kind: Literal["given_images"] = "given_images"
    num: PositiveInt
    digest: Digest


class Student(Document):
    """The record beside a student's weights: a researcher's own, not signed.

    Attributes:
        source: the release.
        images: its training images.
        teacher: which experts' velocity was its target.
        data: shape and range of one sample.
        latent: the space that it works in.
        autoencoder: the weights that decode its latents, a file of the same name beside it; None on pixels.
        condition: the kind of condition that it takes.
        architecture: the architecture of its network.
        path: the probability path.
        t_distribution: the distribution of the training times.
        training: the recipe.
        base: digest of the expert's weights that training started from; None for random ones.
        loss: mean squared error against the teacher per value, averaged over about the last hundred steps.
        seconds: time spent training, over all restarts.
        file: its weights, whatever their file is called now.
    """

    format: Literal["archipelago/student/1"] = "archipelago/student/1"
    source: StudentOrigin
    images: Annotated[OwnSamples | GivenImages, Field(discriminator="kind")]
    teacher: Literal["label", "drawn", "mixture"]
    data: DataSpec
    latent: LatentSpec = IdentityLatent()
    autoencoder: File | None = None
    condition: Condition = NoCondition()
    architecture: Architecture
    path: Literal["linear", "cosine_vp"]
    t_distribution: TDistribution
    training: Training
    base: Digest | None = None
    loss: Measure
    seconds: Seconds
    file: File

    def sampling_bytes(
        self,
        *,
        num: int,
        batch: int,
        steps: int,
    ) -> int:
        """Return the bytes of loading the student and drawing samples; see `ddm.footprint.drawing_bytes`."""
        size = network_size(self.architecture, self.latent.shape(self.data.shape), self.condition)
        loaded = self.file.bytes + size.forward_bytes(0)
        if self.autoencoder is not None:
            loaded += self.autoencoder.bytes
        return loaded + drawing_bytes(
            size, self.latent, self.data.shape, num=num, batch=batch, steps=steps
        )

    @model_validator(mode="after")
    def _latents_are_decoded(self) -> "Student":
        if isinstance(self.latent, Autoencoder) != (self.autoencoder is not None):
            needed = "no autoencoder"
            if self.autoencoder is None:
                needed = "an autoencoder"
            raise ValueError(f"the latent {self.latent.kind} needs {needed} beside it")
        misfit = self.latent.misfit(self.data.shape)
        if misfit:
            raise ValueError(f"the latent {self.latent.kind} needs {misfit}")
        misfit = self.architecture.misfit(self.latent.shape(self.data.shape), self.condition)
        if misfit:
            raise ValueError(f"the architecture {self.architecture.kind} needs {misfit}")
        return self


def autoencoder_beside(weights: Path) -> Path:
    """Return the path of a student's autoencoder."""
    return weights.with_name(weights.stem + AUTOENCODER_SUFFIX)


def read_record(weights: Path | str) -> Student:
    """Read the record beside a student's weights.

    Raises:
        MissingFileError: there are no weights, or no record.
        DocumentError: the record is not one.
    """
    weights = require_file(Path(weights), "a student's weights")
    path = require_file(weights.with_suffix(RECORD_SUFFIX), "a student's record")
    return Student.parse(read_bounded(path, MAX_DOCUMENT_BYTES), subject=path.name)


def load_student(
    weights: Path | str,
    *,
    device: torch.device | str = "cpu",
    check: Callable[[Student], None] = lambda record: None,
) -> tuple[Student, Ensemble]:
    """Load a student as an ensemble of one expert, to sample from as from any ensemble.

    Args:
        weights: its file; the record is beside it, and its autoencoder if it works on latents.
        device: where it computes.
        check: called with the record before anything that it names is loaded; what it raises ends the loading.

    Raises:
        MissingFileError: there are no weights, no record, or no autoencoder.
        DocumentError: the record is not one.
        DigestError: the weights, or the autoencoder's, differ from those that the record names.
        ShapeError: the record describes a network that cannot be built.
        TensorFileError: the weights are not what its architecture implies.
    """
    record = read_record(weights)
    check(record)
    return record, build_student(record, Path(weights), device=device)


def build_student(
    record: Student,
    weights: Path,
    *,
    device: torch.device | str = "cpu",
    arithmetic: Arithmetic = Arithmetic(),
) -> Ensemble:
    """Build the student that a record describes; see `load_student`.

    Args:
        record: as `read_record` read it.
        weights: the file of its weights.
        device: where it computes.
        arithmetic: the arithmetic in which it computes.
    """
    latent = record.latent
    shape = latent.shape(record.data.shape)
    # The files may have been renamed together with the record; the digests identify them.
    file = record.file.model_copy(update={"path": weights.name})
    if isinstance(latent, Autoencoder):
        beside = require_file(autoencoder_beside(weights), "a student's autoencoder")
        latent = latent.model_copy(update={"path": beside.name})
    try:
        network = load_expert(record.architecture, shape, weights.parent, file, record.condition)
        expert = network.to(device)
        decoder = open_latent(latent, record.data.shape, record.autoencoder, weights.parent)
    # These files are not from a publisher, so the error's own remedy would mislead.
    except DigestError as error:
        record_name = weights.with_suffix(RECORD_SUFFIX).name
        raise DigestError(
            error.subject,
            expected=f"the file that {record_name} names, {error.expected}",
            got=f"a file of {error.got}",
            remedy=(
                "Bring back the files that were written together, or distil again: `ddm distill RELEASE "
                "--root FILE --out FILE.safetensors`."
            ),
        ) from error
    return Ensemble(
        # A single expert has the weight 1 everywhere, so that there is no router.
        [arithmetic.prepare(expert)],
        None,
        [1.0],
        shape,
        path=path_named(record.path),
        expert_ids=[record.source.plan_id],
        device=device,
        condition=record.condition,
        # The one expert has all of every class.
        class_prior=lambda label: ClassPrior([1.0]),
        latent=decoder,
        release=record.source.manifest,
        value_range=record.data.range,
    )
