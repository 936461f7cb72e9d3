"""The values of DICOM's tags, of one frame or of all; what they hold goes no further than the decoder."""

from functools import cache
from typing import Any

import pydicom
from pydicom.tag import BaseTag, Tag
from pydicom.values import convert_value

PLAIN = frozenset({"CS", "DS", "IS", "OB", "OW", "UI", "US"})  # whose values depend on nothing else in the file


def value_of(tags: Any, keyword: str) -> Any:
    """Return the value of a tag, None where it is absent.

    `Dataset.get` is slow where it is absent, and `Dataset.__getitem__` takes most of its time for what a value that is
    read once has no use for.
    """
    tag = tag_of(keyword)
    element = tags.get_item(tag)
    if element is None:
        return None
    if isinstance(element, pydicom.DataElement):
        return element.value
    plain = element.VR in PLAIN and element.value is not None
    return convert_value(element.VR, element) if plain else tags[tag].value


@cache
def tag_of(keyword: str) -> BaseTag:
    """Return the tag of a keyword."""
    return Tag(keyword)


def group_of(tags: Any, number: int, name: str) -> Any:
    """Return what an enhanced file says of one frame, else of all of them, else the file itself."""
    for groups, index in (("PerFrameFunctionalGroupsSequence", number), ("SharedFunctionalGroupsSequence", 0)):
        found = value_of(tags, groups)
        if found and index < len(found) and name in found[index] and len(found[index][name].value):
            return found[index][name].value[0]
    return tags
