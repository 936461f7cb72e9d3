"""The names under which files keep images and what belongs to each: labels, patients, captions and splits.

A column may be called in the singular or in the plural, in either case. Two columns of one meaning are refused, since
it is unknown which of them counts.
"""

import re
import unicodedata
from collections.abc import Collection
from dataclasses import dataclass
from math import isfinite

from ddm.images.patients import is_missing, visible_text
from ddm.images.reasons import ImageError, Reason

# The first name of each is what this project calls the column.
_NAMES = {
    "labels": ("labels", "label", "class"),
    "patients": ("patients", "patient", "patient_id", "patient_ids"),
    "captions": ("captions", "caption", "text", "texts"),
    "splits": ("splits", "split"),
}
_IMAGES = "images"
_MEANINGS = {name: meaning for meaning, names in _NAMES.items() for name in names}
FIELDS = {"label": "labels", "patient": "patients", "caption": "captions", "split": "splits"}
"""The fields of `ddm.images.picture.DecodedPicture` that have a column."""

MAX_CELL_BYTES = {"label": 1024, "patient": 1024, "caption": 4 * 4096, "split": 1024}
"""The most that one entry may have, in any encoding of Unicode."""

_PART_NAMES = {
    "train": ("train", "training", "trn", "tr"),
    "validation": ("validation", "valid", "val", "dev", "development", "tune", "tuning"),
    # Images that a model is evaluated on must not be trained on: a word that may mean this, means this.
    "test": ("test", "testing", "tst", "te", "holdout", "heldout", "evaluation", "eval"),
}
_PART_OF = {name: part for part, names in _PART_NAMES.items() for name in names}
_PUNCTUATION = re.compile(r"[\W_]+")
_SUFFIX = re.compile(r"(sub)?(set|split|data|images|part)$")

# Two letters in the name of a file may mean anything.
SPLITS = frozenset(name for name in _PART_OF if len(name) > 2) | {"extra"}
"""The words for parts of a data set in the names of arrays and files."""


def part_of(text: str | None) -> str | None:
    """Return train, validation or test for any of their usual names, other names as they are, and None for none.

    Case, blanks and punctuation do not count, nor does a word for a part at the end: ``Hold-out set`` is test.
    """
    if text is None:
        return None
    stripped = text.strip()
    if is_missing(stripped):
        return None
    normalised = unicodedata.normalize("NFKC", text).casefold()
    name = _PUNCTUATION.sub("", normalised)
    if name in _PART_OF:
        return _PART_OF[name]
    name_without_suffix = _SUFFIX.sub("", name)
    return _PART_OF.get(name_without_suffix, stripped)


def find_column(name: str, names: Collection[str]) -> str | None:
    """Return which of the names of a file's columns has the meaning of a name; None where there is none.

    Raises:
        ImageError: two columns of this meaning.
    """
    meaning = _MEANINGS.get(name.lower())
    if meaning is None:
        if name in names:
            return name
        return None
    matches = [candidate for candidate in names if _MEANINGS.get(candidate.lower()) == meaning]
    if len(matches) > 1:
        raise ImageError(Reason.AMBIGUOUS, f"several columns that may be the {meaning}: keep one")
    if not matches:
        return None
    return matches[0]


def is_known_column(name: str) -> bool:
    """Whether a column of this name is one of those that this project knows."""
    return name.lower() in _MEANINGS


def known_columns(names: Collection[str]) -> frozenset[str]:
    """Return the names of columns, and what this project calls those that it knows."""
    columns = set(names)
    for name in names:
        meaning = _MEANINGS.get(name.lower())
        if meaning is not None:
            columns.add(meaning)
    return frozenset(columns)


def as_text(cell: object) -> str | None:
    """Return an entry of a column as text; None where it says that there is nothing, as tables write that.

    Blanks are single, and invisible characters are gone. Whole numbers in floating point are written as whole numbers,
    and truth as 1 and 0.
    """
    if cell is None:
        return None
    if isinstance(cell, float) and not isfinite(cell):
        return None
    if isinstance(cell, bytes):
        text = _decoded(cell)
    elif isinstance(cell, bool) or (isinstance(cell, float) and cell.is_integer()):
        text = str(int(cell))
    else:
        text = str(cell)
    words = visible_text(text).split()
    text = " ".join(words)
    if is_missing(text):
        return None
    return text


def _decoded(cell: bytes) -> str:
    try:
        return cell.decode()
    except ValueError:
        # Latin-1 has a character for every byte, so that different cells stay different.
        return cell.decode("latin-1")


@dataclass(frozen=True)
class PartNames:
    """The arrays of one part of a data set in an npz.

    Attributes:
        split: the part's name, in the words of the file; None where the images are in one part.
        images: the name of the array of images.
        columns: the names of the columns, by meaning or, of others, by name.
    """

    split: str | None
    images: str
    columns: dict[str, str]


def npz_parts(names: Collection[str]) -> list[PartNames]:
    """Return the parts of a data set by the names of its arrays.

    There is one array ``images`` with its columns, or there is one for each part: ``train_images`` with
    ``train_labels``, as MedMNIST names them, ``images_train`` or, as Keras names them, ``x_train`` with ``y_train``.

    Raises:
        ImageError: no such array; columns without images; or columns that belong to no part in particular.
    """
    if _IMAGES in names:
        if any(_meaning_and_split(name) is not None for name in names):
            detail = "images beside arrays of parts, such as train_images or train_labels: keep one or the other"
            raise ImageError(Reason.AMBIGUOUS, detail)
        columns = {name: name for name in names}
        return [PartNames(None, _IMAGES, columns)]
    parts: dict[str, dict[str, str]] = {}
    for name in names:
        place = _meaning_and_split(name)
        if place is None:
            continue
        meaning, split = place
        arrays = parts.setdefault(split, {})
        if meaning in arrays:
            raise ImageError(
                Reason.AMBIGUOUS, f"several arrays that may be the {meaning} of one part: keep one"
            )
        arrays[meaning] = name
    if not any(_IMAGES in arrays for arrays in parts.values()):
        raise ImageError(
            Reason.UNKNOWN, "an npz without an array called images, or train_images and the like"
        )
    if not all(_IMAGES in arrays for arrays in parts.values()):
        raise ImageError(Reason.AMBIGUOUS, "columns of a part that has no images")
    if any(name.lower() in _MEANINGS for name in names):
        detail = "a column for all parts beside train_images or the like: name the part of each, as in train_labels"
        raise ImageError(Reason.AMBIGUOUS, detail)
    named_parts = []
    for split, arrays in sorted(parts.items()):
        images = arrays.pop(_IMAGES)
        # What is left are the columns.
        named_parts.append(PartNames(split, images, arrays))
    return named_parts


def _meaning_and_split(name: str) -> tuple[str, str] | None:
    """Return what an array of a part is, and of which part; None for any other array."""
    first, _, rest = name.lower().partition("_")
    start, _, last = name.lower().rpartition("_")
    # `train_images`, as MedMNIST writes it, or `images_train`.
    for split, word in ((first, rest), (last, start)):
        if split not in SPLITS:
            continue
        if word == "images":
            return _IMAGES, split
        if word in _MEANINGS:
            return _MEANINGS[word], split
    # Keras puts the letter first.
    if last in SPLITS and start == "x":
        return _IMAGES, last
    if last in SPLITS and start == "y":
        return "labels", last
    return None


_SHARD = re.compile(r"(?P<prefix>.+)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?\.parquet", re.IGNORECASE)


def split_of_shard(name: str, siblings: Collection[str]) -> str | None:
    """Return the split that the name of a Parquet file states, as Hugging Face names them.

    Args:
        name: such as ``train-00000-of-00002.parquet``.
        siblings: the names of all Parquet files of its folder. Where one of them is no such name, names say nothing.
    """
    if not all(_SHARD.fullmatch(sibling) for sibling in siblings):
        return None
    shard = _SHARD.fullmatch(name)
    if shard is None:
        return None
    prefix = shard["prefix"].lower()
    words = re.split(r"[-_.]", prefix)
    splits = [word for word in words if word in SPLITS]
    if len(splits) == 1:
        return splits[0]
    return None
