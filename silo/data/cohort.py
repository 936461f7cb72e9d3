"""Reads private images with their patients, classes and captions; file names and patient identifiers stop here."""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddm.errors import DataError
from ddm.io.npz import count_rows, read_array, read_images
from ddm.protocol.base import Unit
from ddm.protocol.plan import DataSpec
from silo.data.volumes import are_volumes, read_volume_column, read_volumes, volume_files

_MAX_CELL_BYTES = 1024  # of one patient or class; a header comes on top
_MAX_COLUMN_HEADER_BYTES = 4096
MAX_CAPTION = 4096  # characters
_MAX_CAPTION_BYTES = 4 * MAX_CAPTION
_MISSING = frozenset({"", "nan", "nat", "none", "null", "na", "n/a", "<na>"})  # as tables write them
_PATIENTS_REMEDY = "Give every image its patient: one without could belong to a patient who is counted already."


@dataclass(frozen=True)
class Cohort:
    """The images this site trains on.

    Attributes:
        images: shape (N, C, H, W), or (N, C, D, H, W) of volumes, float32, in the plan's range.
        digest: see `dataset_digest`.
        unit_N: the privacy unit of each image, int64: its patient, numbered by first appearance, or the image itself.
        num_units: how many units there are.
        label_N: each image's class, int64; None for a plan without classes.
        captions: each image's text, blank where it has none; None for a plan without texts. Never shown.
        text_NLD: the captions as vectors, the experts' text condition; see `silo.data.captions`.
    """

    images: Tensor
    digest: str
    unit_N: Tensor
    num_units: int
    label_N: Tensor | None
    captions: tuple[str, ...] | None = field(default=None, repr=False)
    text_NLD: Tensor | None = field(default=None, repr=False)


def load_cohort(
    path: Path,
    spec: DataSpec,
    *,
    min_images: int,
    salt: bytes,
    unit: Unit,
    num_classes: int | None,
    captions: bool = False,
) -> Cohort:
    """Read `path` and check it against the plan.

    Args:
        path: an npz with `images`, as `ddm.io.npz.read_images` takes them; `patients`, shape (N,), numbers or text,
            read where the patient is the unit; `labels`, shape (N,), whole numbers in [0, num_classes), read where the
            plan needs classes; `captions`, text, read where it needs texts. Or a folder of NIfTI volumes, as
            `silo.data.volumes` reads them, with these columns in its table.
        spec: the plan's shape and range.
        min_images: fewest images that the plan and this site accept.
        salt: this site's, for the digest.
        unit: the plan's.
        num_classes: the plan's, None where it needs no classes.
        captions: whether the plan needs texts.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not an npz of images, images of the wrong shape or range, not finite, or too few; or a column of
            patients, labels or captions that is absent, of the wrong length, incomplete, out of range or too long.
    """
    read, column = (read_volumes, read_volume_column) if are_volumes(path) else (read_images, _read_column)
    images = read(path, spec)
    num = len(images)
    if num < min_images:
        raise DataError("images", expected=f"at least {min_images}, as plan and policy require", got=f"{num}")
    unit_N = _numbered(column(path, "patients", num)) if unit == "patient" else np.arange(num)
    label_N = None if num_classes is None else _labels(column(path, "labels", num), num_classes)
    texts = _captions(column(path, "captions", num)) if captions else None
    if int(unit_N.max()) < 1:
        raise DataError(f"{unit}s", expected="at least 2", got="1")
    columns = {"patients": unit_N if unit == "patient" else None, "labels": label_N}
    used = {name: value for name, value in columns.items() if value is not None}
    return Cohort(
        images=images,
        digest=dataset_digest(images, salt, captions=texts or (), **used),
        unit_N=torch.from_numpy(unit_N),
        num_units=int(unit_N.max()) + 1,
        label_N=None if label_N is None else torch.from_numpy(label_N),
        captions=texts,
    )


def count_units(path: Path, *, patients: bool) -> tuple[int, int | None]:
    """Count the images at `path`, and their patients if asked for; no image is read.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not an npz of images and not a folder of volumes, or a column of patients that is not complete.
    """
    volumes = are_volumes(path)
    num = len(volume_files(path)) if volumes else count_rows(path, "images")
    if not patients:
        return num, None
    column = read_volume_column if volumes else _read_column
    return num, int(_numbered(column(path, "patients", num)).max(initial=-1)) + 1


def dataset_digest(images: Tensor, salt: bytes, *, captions: Sequence[str] = (), **columns: NDArray[np.int64]) -> str:
    """Return the HMAC-SHA256 of the images' shape and float32 values and of the columns used; one change changes it.

    It is keyed with a secret of this site because ledger entries contain it and their digests leave: without the key,
    whoever knows all images but one could try candidates for the last against the ledger's chain.
    """
    array = images.contiguous().numpy()
    keyed = hmac.new(salt, repr(array.shape).encode() + array.tobytes(), hashlib.sha256)
    for name in sorted(columns):
        keyed.update(name.encode() + columns[name].astype("<i8").tobytes())
    for caption in captions:
        text = caption.encode()
        keyed.update(b"caption %d " % len(text) + text)
    return keyed.hexdigest()


def _read_column(path: Path, name: str, num: int) -> NDArray[np.generic]:
    """Read a one-dimensional array with one entry for each image."""
    cell_bytes = _MAX_CAPTION_BYTES if name == "captions" else _MAX_CELL_BYTES
    column = read_array(path, name, max_bytes=_MAX_COLUMN_HEADER_BYTES + num * cell_bytes)
    if column.shape != (num,):
        raise DataError(name, expected=f"shape ({num},), one for each image", got=str(column.shape))
    return column


def _numbered(patient_N: NDArray[np.generic]) -> NDArray[np.int64]:
    """Number patients by first appearance. Text counts without blanks around it, so that no patient becomes two."""
    if patient_N.dtype.kind not in "iufUS":
        expected = "whole numbers, floating point or text"
        raise DataError("patients", expected=expected, got=str(patient_N.dtype), remedy=_PATIENTS_REMEDY)
    if patient_N.dtype.kind in "US":
        texts = [(p.decode("latin-1") if isinstance(p, bytes) else p).strip() for p in patient_N.tolist()]
        patient_N, missing_N = np.array(texts), np.array([text.lower() in _MISSING for text in texts])
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
    captions = tuple("" if text.lower() in _MISSING else text for text in plain)
    if not any(captions):
        raise DataError("captions", expected="a text for at least one image", got="only blank ones")
    return captions
