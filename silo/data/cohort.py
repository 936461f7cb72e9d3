"""Reads private images with their patients, classes and captions; file names and patient identifiers stop here."""

import hashlib
import hmac
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddm.errors import DataError
from ddm.imaging.transform import Transform
from ddm.io.images import Images, feed
from ddm.io.sources import Source, open_images, open_latents, open_source
from ddm.protocol.base import Unit
from ddm.protocol.plan import DataSpec, TransformSpec
from silo.data.store import MISSING
from silo.data.transformed import open_transformed
from silo.data.volumes import Volumes, are_volumes, read_volume_column, volume_columns, volume_files

_MAX_CELL_BYTES = 1024  # of one patient or class; a header comes on top
MAX_CAPTION = 4096  # characters
_MAX_CAPTION_BYTES = 4 * MAX_CAPTION
_COLUMNS = frozenset({"patients", "labels", "captions"})
_PATIENTS_REMEDY = "Give every image its patient: one without could belong to a patient who is counted already."


@dataclass(frozen=True)
class Cohort:
    """The images this site trains on.

    Attributes:
        images: shape (N, C, H, W), or (N, C, D, H, W) of volumes, float32, in the plan's range; read when they are
            asked for.
        digest: see `dataset_digest`.
        unit_N: the privacy unit of each image, int64: its patient, numbered by first appearance, or the image itself.
        num_units: how many units there are.
        label_N: each image's class, int64; None for a plan without classes.
        captions: each image's text, blank where it has none; None for a plan without texts. Never shown.
        text_NLD: the captions as vectors, the experts' text condition; see `silo.data.captions`.
        latent: whether `images` are latents that the site brings, not over the plan's `scale`.
    """

    images: Images
    digest: str
    unit_N: Tensor
    num_units: int
    label_N: Tensor | None
    captions: tuple[str, ...] | None = field(default=None, repr=False)
    text_NLD: Tensor | None = field(default=None, repr=False)
    latent: bool = False


def load_cohort(
    path: Path,
    spec: DataSpec,
    *,
    min_images: int,
    salt: bytes,
    unit: Unit,
    num_classes: int | None,
    captions: bool = False,
    latent_shape: tuple[int, ...] | None = None,
    folder: Path | None = None,
    transform: TransformSpec | None = None,
) -> Cohort:
    """Read `path` once, block by block, and check it against the plan.

    Args:
        path: images or, for a plan with an autoencoder, its latents, as `ddm.io.sources.open_source` takes them, with
            `patients`, shape (N,), numbers or text, read where the patient is the unit; `labels`, shape (N,), whole
            numbers in [0, num_classes), read where the plan needs classes; `captions`, text, read where it needs texts.
            Or a folder of NIfTI volumes, as `silo.data.volumes` reads them, with these columns in its table.
        spec: the plan's shape and range.
        min_images: fewest images that the plan and this site accept.
        salt: this site's, for the digest.
        unit: the plan's.
        num_classes: the plan's, None where it needs no classes.
        captions: whether the plan needs texts.
        latent_shape: of a latent, None for a plan whose experts are trained on the images.
        folder: private to the worker, for what cannot be read where it lies; None reads all of it into memory.
        transform: the plan's, where it has one: every picture goes through it once, into a copy in `folder`.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: no images, images of the wrong shape or range, not finite, or too few; or a column of patients,
            labels or captions that is absent, of the wrong length, incomplete, out of range or too long.
    """
    asked = {"patients": unit == "patient", "labels": num_classes is not None, "captions": captions}
    source = _source(path, spec, transform, folder, [name for name, needed in asked.items() if needed])
    num, latent = len(source), source.name == "latents"
    if num < min_images:
        raise DataError("images", expected=f"at least {min_images}, as plan and policy require", got=f"{num}")
    if latent and latent_shape is None:
        raise DataError("data", expected="images: this plan's experts have no autoencoder", got="latents")
    unit_N = _numbered(_column(source, "patients")) if unit == "patient" else np.arange(num)
    label_N = None if num_classes is None else _labels(_column(source, "labels"), num_classes)
    texts = _captions(_column(source, "captions")) if captions else None
    if int(unit_N.max()) < 1:
        raise DataError(f"{unit}s", expected="at least 2", got="1")
    images = (
        open_latents(source, latent_shape, folder) if latent and latent_shape else open_images(source, spec, folder)
    )
    columns = {"patients": unit_N if unit == "patient" else None, "labels": label_N}
    used = {name: value for name, value in columns.items() if value is not None}
    return Cohort(
        images=images,
        digest=dataset_digest(images, salt, captions=texts or (), **used),
        unit_N=torch.from_numpy(unit_N),
        num_units=int(unit_N.max()) + 1,
        label_N=None if label_N is None else torch.from_numpy(label_N),
        captions=texts,
        latent=latent,
    )


def _source(
    path: Path, spec: DataSpec, transform: TransformSpec | None, folder: Path | None, columns: Sequence[str]
) -> Source:
    if transform:
        if folder is None:
            raise TypeError("a plan with a transform needs a folder for the copy that it makes")
        return open_transformed(path, Transform(transform, spec), columns, folder)
    return Volumes(path, spec) if are_volumes(path) else open_source(path)


def check_data(path: Path) -> None:
    """Refuse, before there is a plan, what no plan could take: all that is wrong at once. No image is read.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: no images in it; images of a type or with sides that no plan has; columns of patients, labels or
            captions that have not one entry for each image, or cannot be read.
    """
    problems = list(_problems_of_volumes(path) if are_volumes(path) else _problems(open_source(path)))
    if len(problems) == 1:
        raise problems[0]
    if problems:
        remedy = "Mend all of these in the data file, then run the command again."
        raise DataError("; ".join(str(problem) for problem in problems), remedy=remedy)


def _problems_of_volumes(path: Path) -> Iterator[DataError]:
    num = len(volume_files(path))
    for name in volume_columns(path):
        try:
            read_volume_column(path, name, num)
        except DataError as error:
            yield error


def _problems(source: Source) -> Iterator[DataError]:
    dtype, shape = source.row
    if not (dtype.kind == "f" or dtype in (np.uint8, np.uint16)):
        yield DataError("image values", expected="floating point, uint8 or uint16", got=str(dtype))
    if not 1 <= len(shape) <= 4 or 0 in shape:
        yield DataError("image shape", expected="(H, W), (C, H, W) or (C, D, H, W)", got=str(shape))
    for name in sorted(source.columns & _COLUMNS):
        try:
            _check_length(name, source.column_shape(name), len(source))
        except DataError as error:
            yield error


def count_units(path: Path, *, patients: bool) -> tuple[int, int | None]:
    """Count the images at `path`, and their patients if asked for; no image is read.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: no images and no folder of volumes, or a column of patients that is not complete.
    """
    if are_volumes(path):
        num = len(volume_files(path))
        return num, _num_patients(read_volume_column(path, "patients", num)) if patients else None
    source = open_source(path)
    return len(source), _num_patients(_column(source, "patients")) if patients else None


def dataset_digest(images: Images, salt: bytes, *, captions: Sequence[str] = (), **columns: NDArray[np.int64]) -> str:
    """Return the HMAC-SHA256 of the images' shape and float32 values and of the columns used; one change changes it.

    It is keyed with a secret of this site because ledger entries contain it and their digests leave: without the key,
    whoever knows all images but one could try candidates for the last against the ledger's chain.
    """
    keyed = hmac.new(salt, repr(tuple(images.shape)).encode(), hashlib.sha256)
    feed(keyed.update, images)
    for name in sorted(columns):
        keyed.update(name.encode() + columns[name].astype("<i8").tobytes())
    for caption in captions:
        text = caption.encode()
        keyed.update(b"caption %d " % len(text) + text)
    return keyed.hexdigest()


def _column(source: Source, name: str) -> NDArray[np.generic]:
    """Read a one-dimensional array with one entry for each image."""
    column = source.column(name, _MAX_CAPTION_BYTES if name == "captions" else _MAX_CELL_BYTES)
    _check_length(name, column.shape, len(source))
    return column


def _check_length(name: str, shape: tuple[int, ...], num: int) -> None:
    if shape != (num,):
        raise DataError(name, expected=f"shape ({num},), one for each image", got=f"shape {shape}")


def _num_patients(patient_N: NDArray[np.generic]) -> int:
    return int(_numbered(patient_N).max(initial=-1)) + 1


def _numbered(patient_N: NDArray[np.generic]) -> NDArray[np.int64]:
    """Number patients by first appearance. Text counts without blanks around it, so that no patient becomes two."""
    if patient_N.dtype.kind not in "iufUS":
        expected = "whole numbers, floating point or text"
        raise DataError("patients", expected=expected, got=str(patient_N.dtype), remedy=_PATIENTS_REMEDY)
    if patient_N.dtype.kind in "US":
        texts = [(p.decode("latin-1") if isinstance(p, bytes) else p).strip() for p in patient_N.tolist()]
        patient_N, missing_N = np.array(texts), np.array([text.lower() in MISSING for text in texts])
    else:
        missing_N = ~np.isfinite(patient_N.astype(np.float64))
    if missing_N.any():
        got = f"none for {int(missing_N.sum())} of {len(missing_N)} images"
        raise DataError("patients", expected="a patient for each image", got=got, remedy=_PATIENTS_REMEDY)
    _, first_U, unit_N = np.unique(patient_N, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first_U))[unit_N].astype(np.int64)


def _labels(label_N: NDArray[np.generic], num_classes: int) -> NDArray[np.int64]:
    """Check each image's class."""
    if label_N.dtype.kind not in "iu":
        raise DataError("labels", expected="whole numbers", got=str(label_N.dtype))
    if label_N.min() < 0 or label_N.max() >= num_classes:
        expected = f"0 to {num_classes - 1}, as the plan requires"
        raise DataError("labels", expected=expected, got="labels outside this range")
    return label_N.astype(np.int64)


def _captions(caption_N: NDArray[np.generic]) -> tuple[str, ...]:
    """Return each image's text with single blanks, blank where it has none; no message ever quotes a text."""
    if caption_N.dtype.kind not in "US":
        raise DataError("captions", expected="text", got=str(caption_N.dtype))
    try:
        texts = [(cell.decode() if isinstance(cell, bytes) else cell) for cell in caption_N.tolist()]
        longest = max(len(text.encode().decode()) for text in texts)
    except ValueError:  # its message quotes the text
        raise DataError("captions", expected="UTF-8", got="a text that is not valid UTF-8") from None
    if longest > MAX_CAPTION:
        raise DataError("captions", expected=f"at most {MAX_CAPTION} characters each", got=f"a caption of {longest}")
    plain = (" ".join(text.split()) for text in texts)
    captions = tuple("" if text.lower() in MISSING else text for text in plain)
    if not any(captions):
        raise DataError("captions", expected="a text for at least one image", got="only blank ones")
    return captions
