"""The values of DICOM's tags, of one frame or of all; what they hold goes no further than the decoder.

Numbers are read from the bytes of the file directly. pydicom's own conversion takes several times as long, and it
follows the type that the file writes beside each value, which is wrong in many files ("UN", or "US" for "SS").
"""

from functools import cache
from math import isfinite
from typing import Any

import numpy as np
import pydicom
from pydicom.tag import BaseTag, Tag

from ddm.images.reasons import ImageError, Reason

_TEXT_PADDING = " \0"


@cache
def tag_of(keyword: str) -> BaseTag:
    """Return the tag of a keyword."""
    return Tag(keyword)


def has_tag(tags: Any, keyword: str) -> bool:
    """Whether a tag is present, with or without a value."""
    return tag_of(keyword) in tags


def value_of(tags: Any, keyword: str) -> Any:
    """Return the value of a tag as pydicom converts it, None where it is absent."""
    tag = tag_of(keyword)
    if tag not in tags:
        return None
    return tags[tag].value


def text_of(tags: Any, keyword: str) -> str:
    """Return a text of plain letters, such as a code string or a UID; empty where it is absent."""
    element = tags.get_item(tag_of(keyword))
    if element is None or element.value is None:
        return ""
    value = element.value
    if isinstance(value, bytes):
        # Any byte is a character of Latin-1, and the letters of codes and UIDs are the same in it as in ASCII.
        return value.decode("latin-1").strip(_TEXT_PADDING)
    if isinstance(value, pydicom.multival.MultiValue | list | tuple):
        return "\\".join(str(part) for part in value)
    return str(value).strip(_TEXT_PADDING)


def texts_of(tags: Any, keyword: str) -> list[str]:
    """Return the parts of a text that backslashes divide; none where it is absent or empty."""
    text = text_of(tags, keyword)
    if not text:
        return []
    return [part.strip(_TEXT_PADDING) for part in text.split("\\")]


def floats_of(tags: Any, keyword: str) -> list[float]:
    """Return the numbers of a decimal or integer string; none where there are none.

    Raises:
        ImageError: something that is not a finite number.
    """
    parts = [part for part in texts_of(tags, keyword) if part]
    try:
        numbers = [float(part) for part in parts]
    except ValueError as error:
        raise ImageError(Reason.DAMAGED, f"{keyword} is not a number") from error
    if not all(isfinite(number) for number in numbers):
        raise ImageError(Reason.DAMAGED, f"{keyword} is not a finite number")
    return numbers


def float_of(tags: Any, keyword: str) -> float | None:
    """Return the first number of a tag, None where it has none.

    Raises:
        ImageError: something that is not a finite number.
    """
    numbers = floats_of(tags, keyword)
    if not numbers:
        return None
    return numbers[0]


def words_of(tags: Any, keyword: str) -> list[int]:
    """Return the 16-bit words of a tag of type US, SS or OW, as unsigned numbers; none where it is absent.

    Raises:
        ImageError: a length that is not whole words, or something else than numbers.
    """
    element = tags.get_item(tag_of(keyword))
    if element is None or element.value is None:
        return []
    value = element.value
    if isinstance(value, bytes):
        if len(value) % 2:
            raise ImageError(Reason.DAMAGED, f"{keyword} is not made of whole words")
        is_little_endian = getattr(element, "is_little_endian", True)
        # Most often; NumPy would take ten times as long.
        if len(value) == 2:
            if is_little_endian:
                return [int.from_bytes(value, "little")]
            return [int.from_bytes(value, "big")]
        kind = ">u2"
        if is_little_endian:
            kind = "<u2"
        words: list[int] = np.frombuffer(value, kind).tolist()
        return words
    if isinstance(value, pydicom.multival.MultiValue | list | tuple):
        parts = list(value)
    else:
        parts = [value]
    if not all(isinstance(part, int) for part in parts):
        raise ImageError(Reason.DAMAGED, f"{keyword} is not a whole number")
    # Of a signed type pydicom gives negative numbers; this has their bits as they are in the file.
    return [part % (1 << 16) for part in parts]


def word_of(tags: Any, keyword: str) -> int | None:
    """Return the one 16-bit word of a tag as an unsigned number, None where it has none.

    Raises:
        ImageError: more than one value, or none that is a whole number.
    """
    words = words_of(tags, keyword)
    if len(words) > 1:
        raise ImageError(Reason.DAMAGED, f"{keyword} has more than one value")
    if not words:
        return None
    return words[0]


def sequence_of(tags: Any, keyword: str) -> Any:
    """Return the items of a sequence; none where it is absent.

    Raises:
        ImageError: something else than a sequence.
    """
    value = value_of(tags, keyword)
    if value is None or value == b"":
        return ()
    if not isinstance(value, pydicom.Sequence):
        raise ImageError(Reason.DAMAGED, f"{keyword} is not a sequence")
    return value


def group_of(
    tags: Any,
    number: int,
    keyword: str,
) -> Any:
    """Return what an enhanced file says about one frame, else about all, else the file itself (PS3.3 C.7.6.16)."""
    for groups, index in (
        ("PerFrameFunctionalGroupsSequence", number),
        ("SharedFunctionalGroupsSequence", 0),
    ):
        items = sequence_of(tags, groups)
        if index < len(items):
            macro = sequence_of(items[index], keyword)
            if len(macro):
                return macro[0]
    return tags
