"""Columns that belong to images, one entry for each: read once, normalised in one way; no message quotes an entry.

Spellings that differ in case, in blanks or in how Unicode encodes a letter are one value; what says that there is
nothing (blank, NA, nan, null and the like) is missing, in every column.
"""

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ddm.errors import DataError
from ddm.images.array_files import ImageArrays
from ddm.images.column_names import as_text
from ddm.images.patients import PatientRule, canonical, is_missing, visible_text
from ddm.images.record import MAX_CAPTION
from ddm.images.types import Shape, Values
from ddm.protocol.classes import Classes

_MAX_CELL_BYTES = 1024  # of one patient or class; a header comes on top
# Of four bytes a character, and one character more, so that `captions_of` reports which text is too long.
_MAX_CAPTION_BYTES = 4 * (MAX_CAPTION + 1)
_TEXT_KINDS = "USO"
_NUMBER_KINDS = "biuf"
_WHOLE_NUMBER = re.compile(r"(-?\d+)\.0+")  # as a table of floating point writes it
_PATIENTS_REMEDY = (
    "Give every image its patient: one without could belong to a patient who is counted already."
)


@dataclass(frozen=True)
class TextColumn:
    """A column whose spellings are joined.

    Attributes:
        values: the values of each image: the most frequent spelling of its value; None where it is missing.
        num_joined: how many spellings were joined to another one.
    """

    values: tuple[str | None, ...] = field(repr=False)
    num_joined: int = 0

    @property
    def num_missing(self) -> int:
        """How many images have no value."""
        return self.values.count(None)

    def require_complete(self, name: str) -> list[str]:
        """Return the values.

        Raises:
            DataError: an image without one.
        """
        present = [value for value in self.values if value is not None]
        if len(present) < len(self.values):
            got = f"none for {self.num_missing} of {len(self.values)} images"
            remedy = "Give every image a value, or leave the image out."
            raise DataError(name, expected="a value for each image", got=got, remedy=remedy)
        return present


def text_column(column_N: Values, name: str) -> TextColumn:
    """Return a column of text or numbers with its spellings joined.

    Args:
        column_N: shape (N,).
        name: the name of the column, for errors.

    Raises:
        DataError: anything but text or numbers.
    """
    texts = texts_of(column_N, name)
    counts: dict[str, Counter[str]] = {}
    for text in texts:
        if text is not None:
            counts.setdefault(folded(text), Counter())[text] += 1
    # Of several spellings, the one that is written most often stands for all.
    usual_spelling = {}
    num_joined = 0
    for key, spellings in counts.items():
        ((spelling, _),) = spellings.most_common(1)
        usual_spelling[key] = spelling
        num_joined += len(spellings) - 1
    values: list[str | None] = []
    for text in texts:
        if text is None:
            values.append(None)
        else:
            values.append(usual_spelling[folded(text)])
    return TextColumn(tuple(values), num_joined)


def texts_of(column_N: Values, name: str) -> list[str | None]:
    """Return the entries of a column as text without blanks around it; None where one is missing.

    Whole numbers in floating point are written without a fraction, truth as 1 and 0.

    Raises:
        DataError: anything but text or numbers.
    """
    is_text_or_number = column_N.dtype.kind in _TEXT_KINDS + _NUMBER_KINDS
    if column_N.ndim != 1 or not is_text_or_number:
        raise DataError(
            name,
            expected="one text or number an image",
            got=f"{column_N.dtype}, shape {column_N.shape}",
            remedy="Give the images a column of this kind, with one entry for each of them, in their order.",
        )
    cells = column_N.tolist()
    if not all(isinstance(cell, str | bytes | int | float | None) for cell in cells):
        raise DataError(
            name,
            expected="one text or number an image",
            got="objects of another type",
            remedy="Give the images a column of this kind, with one entry for each of them, in their order.",
        )
    return [as_text(cell) for cell in cells]


def read_column(source: ImageArrays, name: str) -> Values:
    """Read a one-dimensional array with one entry for each image.

    Raises:
        DataError: no such array, or one of another length.
    """
    max_bytes = _MAX_CELL_BYTES
    if name == "captions":
        max_bytes = _MAX_CAPTION_BYTES
    column = source.column(name, max_bytes)
    check_length(name, column.shape, len(source))
    return column


def check_length(
    name: str,
    shape: Shape,
    num: int,
) -> None:
    """Refuse a column without one entry for each of this many images.

    Raises:
        DataError: another shape.
    """
    if shape != (num,):
        raise DataError(
            name,
            expected=f"shape ({num},), one for each image",
            got=f"shape {shape}",
            remedy="Give the images a column of this kind, with one entry for each of them, in their order.",
        )


def num_patients(patient_N: Values, rule: PatientRule = "spelling") -> int:
    """Count patients; see `numbered`.

    Raises:
        DataError: an image without one.
    """
    return int(numbered(patient_N, rule).max(initial=-1)) + 1


def numbered(patient_N: Values, rule: PatientRule = "spelling") -> NDArray[np.int64]:
    """Number patients by first appearance; ways of spelling one identifier are one, see `canonical`.

    Args:
        patient_N: numbers or text, shape (N,).
        rule: which characters of an identifier distinguish patients.

    Raises:
        DataError: an image without a patient, or numbers that are none.
    """
    if patient_N.dtype.kind not in "iuf" + _TEXT_KINDS:
        expected = "whole numbers, floating point or text"
        raise DataError(
            "patients",
            expected=expected,
            got=str(patient_N.dtype),
            remedy=_PATIENTS_REMEDY,
        )
    if patient_N.dtype.kind in "iuf" and rule == "spelling":
        missing_N = ~np.isfinite(patient_N.astype(np.float64))
        key_N = patient_N
    else:
        names = texts_of(patient_N, "patients")
        is_missing_name = [name is None for name in names]
        missing_N = np.array(is_missing_name, dtype=bool)
        keys = [canonical(name or "", rule) for name in names]
        key_N = np.array(keys, dtype=np.object_)
    num_missing = int(missing_N.sum())
    if num_missing:
        got = f"none for {num_missing} of {len(patient_N)} images"
        raise DataError(
            "patients",
            expected="a patient for each image",
            got=got,
            remedy=_PATIENTS_REMEDY,
        )
    # In the order in which keys come first.
    number_by_key: dict[object, int] = {}
    numbers = []
    for key in key_N.tolist():
        numbers.append(number_by_key.setdefault(key, len(number_by_key)))
    return np.array(numbers, dtype=np.int64)


def names_of(column_N: Values) -> list[str]:
    """Return the entries of a column as text, blank where one is missing."""
    return [text or "" for text in texts_of(column_N, "column")]


def captions_of(caption_N: Values) -> tuple[str, ...]:
    """Return each image's text with single blanks, blank where it has none; no message ever quotes a text.

    Raises:
        DataError: no UTF-8, too long a text, or only blank ones.
    """
    if caption_N.dtype.kind not in _TEXT_KINDS:
        raise DataError(
            "captions",
            expected="text",
            got=str(caption_N.dtype),
            remedy="Save the captions as texts, not as other objects.",
        )
    texts: list[str] = []
    for cell in caption_N.tolist():
        text = _caption(cell)
        if len(text) > MAX_CAPTION:
            got = f"a caption of {len(text)}"
            raise DataError(
                "captions",
                expected=f"at most {MAX_CAPTION} characters each",
                got=got,
                remedy="Shorten these texts.",
            )
        texts.append(" ".join(text.split()))
    captions = []
    for text in texts:
        if is_missing(visible_text(text)):
            text = ""
        captions.append(text)
    if not any(captions):
        raise DataError(
            "captions",
            expected="a text for at least one image",
            got="only blank ones",
            remedy="Give the images texts in the column captions, or ask for a plan without texts.",
        )
    return tuple(captions)


def _caption(cell: object) -> str:
    if cell is None:
        return ""
    try:
        text = cell
        if isinstance(cell, bytes):
            text = cell.decode()
        if isinstance(text, str):
            text.encode()  # refuses half of a surrogate pair
            return text
    except UnicodeError:  # its message quotes the text
        raise DataError(
            "captions",
            expected="UTF-8",
            got="a text that is not valid UTF-8",
            remedy="Save the texts as UTF-8.",
        ) from None
    raise DataError(
        "captions",
        expected="text",
        got="objects of another type",
        remedy="Save the captions as texts, not as other objects.",
    )


def folded(text: str) -> str:
    """Return a text without the differences in spelling that do not make another value."""
    plain = " ".join(unicodedata.normalize("NFKC", text).split()).casefold()
    number = _WHOLE_NUMBER.fullmatch(plain)
    if number:
        return number[1]
    return plain


def class_numbers(
    label_N: Values,
    classes: Classes,
    subject: str = "labels",
    remedy: str | None = None,
) -> NDArray[np.int64]:
    """Return the class of each label, shape (N,); a message never quotes a label, which may be private.

    Args:
        label_N: whole numbers, or text as a table holds it.
        classes: the plan's.
        subject: what errors call the labels.
        remedy: what errors advise.

    Raises:
        DataError: labels of another type or shape, or labels that are not classes.
    """
    expected = f"classes of the plan, {classes.words()}"
    if label_N.ndim != 1 or label_N.dtype.kind not in "biuUSO":
        got = f"{label_N.dtype}, shape {label_N.shape}"
        raise DataError(subject, expected=f"{expected}, one for each image", got=got, remedy=remedy)
    if label_N.dtype.kind in "biu":
        number_N = label_N.astype(np.int64)
    else:
        texts = texts_of(label_N, subject)
        num_missing = texts.count(None)
        if num_missing:
            expected = f"{expected}, one for each image"
            got = f"none for {num_missing} of {len(texts)} images"
            raise DataError(subject, expected=expected, got=got, remedy=remedy)
        number_N = _numbers_by_name([text or "" for text in texts], classes)
    is_outside_N = (number_N < 0) | (number_N >= classes.num)
    num_outside = int(is_outside_N.sum())
    if num_outside:
        got = f"others at {num_outside} of {len(label_N)} images"
        raise DataError(subject, expected=expected, got=got, remedy=remedy)
    return number_N


def _numbers_by_name(texts: list[str], classes: Classes) -> NDArray[np.int64]:
    """Return the class of each text; -1 for a text that means none."""
    # Each different text is looked up once, since there are many images and few classes.
    name_U, place_N = np.unique(texts, return_inverse=True)
    numbers = []
    for name in name_U:
        number = classes.number(str(name))
        if number is None:
            number = -1
        numbers.append(number)
    number_U = np.array(numbers, dtype=np.int64)
    return number_U[place_N]
