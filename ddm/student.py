"""A finished student: a file of weights, and beside it one of the same name in JSON, which says where it comes from."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ddm.ensemble import Ensemble
from ddm.files import read_bounded, require_file
from ddm.models import load_expert
from ddm.protocol.base import MAX_DOCUMENT_BYTES, Digest, Document, File, Model, NaturalInt, PlanId, PositiveInt
from ddm.protocol.plan import Architecture, DataSpec, TDistribution, Training
from ddm.schedule import path_named

WEIGHTS_SUFFIX, RECORD_SUFFIX = ".safetensors", ".json"


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
    """The student saw samples of the ensemble, and no data."""

    kind: Literal["own_samples"] = "own_samples"
    num: PositiveInt
    strategy: Literal["lock"] = "lock"
    seed: NaturalInt


class GivenImages(Model):
    """The student saw images that somebody gave: `digest` is that of their file, `num` how many of them were used."""

    kind: Literal["given_images"] = "given_images"
    num: PositiveInt
    digest: Digest


class Student(Document):
    """What the record says. Nobody signs it: it is a researcher's own record."""

    format: Literal["archipelago/student/1"] = "archipelago/student/1"
    source: Source
    images: Annotated[OwnSamples | GivenImages, Field(discriminator="kind")]
    teacher: Literal["label", "drawn", "mixture"]
    data: DataSpec
    architecture: Architecture
    path: Literal["linear", "cosine_vp"]
    t_distribution: TDistribution
    training: Training
    loss: float
    seconds: float
    file: File


def load_student(weights: Path) -> tuple[Student, Ensemble]:
    """Read a student as an ensemble of one: what samples from an ensemble samples from it.

    Args:
        weights: its file; the record lies beside it.

    Raises:
        MissingFileError: there is no record.
        DocumentError: the record is not one.
        DigestError: the weights are not those that it names.
        TensorFileError: the weights are not what its architecture implies.
    """
    path = require_file(weights.with_suffix(RECORD_SUFFIX), "a student's record")
    record = Student.parse(read_bounded(path, MAX_DOCUMENT_BYTES), subject=path.name)
    # Found beside the record, whatever it was called when it was written: the digest says whether it is the one.
    file = record.file.model_copy(update={"path": weights.name})
    expert = load_expert(record.architecture, record.data.shape, weights.parent, file)
    alone = Ensemble(
        [expert], None, [1.0], record.data.shape, path=path_named(record.path), expert_ids=[record.source.plan_id]
    )
    return record, alone
