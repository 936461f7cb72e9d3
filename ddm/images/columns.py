"""Reads what lies beside private images, one value for each: patients, labels and captions; no message quotes one."""

import numpy as np
from numpy.typing import NDArray

from ddm.errors import DataError
from ddm.images.array_files import Source
from ddm.images.patients import MISSING, canonical
from ddm.images.record import MOST_CAPTION

_MAX_CELL_BYTES = 1024  # of one patient or class; a header comes on top
_MAX_CAPTION_BYTES = 4 * MOST_CAPTION
_PATIENTS_REMEDY = "Give every image its patient: one without could belong to a patient who is counted already."


def read_column(source: Source, name: str) -> NDArray[np.generic]:
    """Read a one-dimensional array with one entry for each image.

    Raises:
        DataError: no such array, or one of another length.
    """
    column = source.column(name, _MAX_CAPTION_BYTES if name == "captions" else _MAX_CELL_BYTES)
    check_length(name, column.shape, len(source))
    return column


def check_length(name: str, shape: tuple[int, ...], num: int) -> None:
    """Refuse a column without one entry for each of so many images.

    Raises:
        DataError: another shape.
    """
    if shape != (num,):
        raise DataError(name, expected=f"shape ({num},), one for each image", got=f"shape {shape}")


def num_patients(patient_N: NDArray[np.generic]) -> int:
    """Count patients.

    Raises:
        DataError: an image without one.
    """
    return int(numbered(patient_N).max(initial=-1)) + 1


def numbered(patient_N: NDArray[np.generic]) -> NDArray[np.int64]:
    """Number patients by first appearance; ways of spelling one identifier are one, see `canonical`.

    Raises:
        DataError: an image without a patient, or numbers that are none.
    """
    if patient_N.dtype.kind not in "iufUS":
        expected = "whole numbers, floating point or text"
        raise DataError("patients", expected=expected, got=str(patient_N.dtype), remedy=_PATIENTS_REMEDY)
    if patient_N.dtype.kind in "US":
        texts = [_text(cell) for cell in patient_N.tolist()]
        missing_N = np.array([text.lower() in MISSING for text in texts])
        patient_N = np.array([canonical(text) for text in texts])
    else:
        missing_N = ~np.isfinite(patient_N.astype(np.float64))
    if missing_N.any():
        got = f"none for {int(missing_N.sum())} of {len(missing_N)} images"
        raise DataError("patients", expected="a patient for each image", got=got, remedy=_PATIENTS_REMEDY)
    _, first_U, unit_N = np.unique(patient_N, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first_U))[unit_N].astype(np.int64)


def names_of(patient_N: NDArray[np.generic]) -> list[str]:
    """Return identifiers as text."""
    if patient_N.dtype.kind in "US":
        return [_text(cell) for cell in patient_N.tolist()]
    return [f"{cell:.0f}" if float(cell).is_integer() else repr(cell) for cell in patient_N.tolist()]


def captions_of(caption_N: NDArray[np.generic]) -> tuple[str, ...]:
    """Return each image's text with single blanks, blank where it has none; no message ever quotes a text.

    Raises:
        DataError: no UTF-8, too long a text, or only blank ones.
    """
    if caption_N.dtype.kind not in "US":
        raise DataError("captions", expected="text", got=str(caption_N.dtype))
    try:
        texts = [(cell.decode() if isinstance(cell, bytes) else cell) for cell in caption_N.tolist()]
        longest = max(len(text.encode().decode()) for text in texts)
    except ValueError:  # its message quotes the text
        raise DataError("captions", expected="UTF-8", got="a text that is not valid UTF-8") from None
    if longest > MOST_CAPTION:
        raise DataError("captions", expected=f"at most {MOST_CAPTION} characters each", got=f"a caption of {longest}")
    plain = (" ".join(text.split()) for text in texts)
    captions = tuple("" if text.lower() in MISSING else text for text in plain)
    if not any(captions):
        raise DataError("captions", expected="a text for at least one image", got="only blank ones")
    return captions


def _text(cell: str | bytes) -> str:
    return (cell.decode("latin-1") if isinstance(cell, bytes) else cell).strip()
