"""Whether a face could be drawn from a volume, or from slices that make one: of a head, or of what may be one."""

import re
from collections.abc import Sequence

from ddm.images.picture import Picture

MIN_SIDE = 24  # voxels along each axis; a coarser grid shows no face
# The sides of a volume that could hold a face.
_MIN_HEAD_MM = 100.0
_MAX_HEAD_MM = 400.0
# As hospitals write it, in a few languages. A word may be longer ("CRANIUM"), but not begin earlier ("SURFACE").
_WORDS = (
    r"(?<!FEMORAL )(?<!HUMERAL )(?<!RADIAL )HEAD",
    r"EARS?(?![^\W\d_])",
    r"WHOLE.?BODY",
    "FOREHEAD",
    "BRAIN",
    "SKULL",
    "FACE",
    "FACIAL",
    "NECK",
    "ORBIT",
    "EYE",
    "NOSE",
    "NASAL",
    "JAW",
    "MAXILL",
    "MANDIB",
    "SINUS",
    "CRANI",
    "CEREB",
    "CEPHAL",
    "CERVEAU",
    "CABEZA",
    "TESTA",
    "T[EÊ]TE",
    "CR[AÂ]NE",
    "HOOFD",
    "CERVIC",
    "C.?SPINE",
    "HWS",
    "KOPF",
    "SCH(?:Ä|AE)DEL",
    "(?:GE|GROSS|KLEIN)?HIRN",
    "GESICHT",
    "HALS",
)
_HEAD = re.compile(rf"(?<![^\W\d_])(?:{'|'.join(_WORDS)})")


def names_head(text: str) -> bool:
    """Whether a text, such as a series' description, names the head, a part of it, the neck, or the whole body."""
    return _HEAD.search(text.upper()) is not None


def may_show_face(
    sides: Sequence[int],
    extents_mm: Sequence[float] | None,
    is_head: bool | None,
) -> bool:
    """Whether a face may be visible in a volume; if the file says too little to know, it may.

    Args:
        sides: voxels along the three axes.
        extents_mm: along them; None where the file does not say.
        is_head: whether its file names a head; None where it names no part of the body.
    """
    if min(sides) < MIN_SIDE:
        return False
    if is_head is not None:
        return is_head
    return extents_mm is None or could_hold_head(extents_mm)


def could_hold_head(extents_mm: Sequence[float]) -> bool:
    """Whether each of these could be a side of a volume that holds a head."""
    return all(_MIN_HEAD_MM <= extent <= _MAX_HEAD_MM for extent in extents_mm)


def volume_may_show_face(volume: Picture, is_head: bool | None) -> bool:
    """Whether a face may be visible in a volume, values (C, D, H, W); see `may_show_face`."""
    sides = volume.values.shape[1:]
    if len(sides) != 3:
        return False
    extents_mm = None
    if volume.spacing is not None:
        extents_mm = [side * spacing for side, spacing in zip(sides, volume.spacing, strict=True)]
    return may_show_face(sides, extents_mm, is_head)
