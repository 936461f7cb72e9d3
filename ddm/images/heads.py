"""Whether a face could be drawn from a volume, or from slices that make one: of a head, or of what may be one."""

import re
from collections.abc import Sequence

from ddm.images.picture import Picture

LEAST_SIDE = 24  # voxels along each axis; a coarser grid shows no face
_EXTENT_MM = (100.0, 400.0)  # of a volume that could hold a face, along each axis
# As hospitals write it, in a few languages; a word may go on ("CRANIUM"), but not begin before ("HEART", "SURFACE").
_WORDS = (
    *(r"(?<!FEMORAL )(?<!HUMERAL )(?<!RADIAL )HEAD", r"EARS?(?![^\W\d_])", r"WHOLE.?BODY"),
    *(
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
    ),
    *(
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
    ),
    *(
        "CERVIC",
        "C.?SPINE",
        "HWS",
        "KOPF",
        "SCH(?:Ä|AE)DEL",
        "(?:GE|GROSS|KLEIN)?HIRN",
        "GESICHT",
        "HALS",
    ),
)
_HEAD = re.compile(rf"(?<![^\W\d_])(?:{'|'.join(_WORDS)})")


def names_head(text: str) -> bool:
    """Whether a text, such as a series' description, names the head, a part of it, the neck, or the whole body."""
    return _HEAD.search(text.upper()) is not None


def may_show_face(
    sides: Sequence[int], extents_mm: Sequence[float] | None, named: bool | None
) -> bool:
    """Whether a face may be seen in a volume; what the file does not state counts as seen.

    Args:
        sides: voxels along the three axes.
        extents_mm: along them; None where the file does not say.
        named: whether its file names a head; None where it names no part of the body.
    """
    if min(sides) < LEAST_SIDE:
        return False
    if named is not None or extents_mm is None:
        return named is not False
    return as_long_as_a_head(extents_mm)


def as_long_as_a_head(extents_mm: Sequence[float]) -> bool:
    """Whether each of these could be a side of a volume that holds a head."""
    return all(_EXTENT_MM[0] <= extent <= _EXTENT_MM[1] for extent in extents_mm)


def in_a_head(volume: Picture, named: bool | None) -> bool:
    """Whether a face may be seen in a volume, values (C, D, H, W); see `may_show_face`."""
    sides = volume.values.shape[1:]
    if len(sides) != 3:
        return False
    extents_mm = None
    if volume.spacing is not None:
        extents_mm = [side * spacing for side, spacing in zip(sides, volume.spacing, strict=True)]
    return may_show_face(sides, extents_mm, named)
