"""Volumes from which a face could be drawn: those of a head, and those that may be of one and are fine enough."""

import numpy as np

from ddm.imaging.picture import Picture

_LEAST_VOXELS = 24  # along each axis; a coarser grid shows no face
_EXTENT_MM = (100.0, 400.0)  # of a volume that could hold a face, along each axis
_HEADS = (
    "HEAD",
    "BRAIN",
    "SKULL",
    "FACE",
    "NECK",
    "ORBIT",
    "EYE",
    "EAR",
    "NOSE",
    "JAW",
    "MAXILLA",
    "MANDIBLE",
    "SINUS",
)


def in_a_head(volume: Picture, body_part: str | None) -> bool:
    """Whether a face may be seen in a volume; what nothing tells of counts as seen.

    Args:
        volume: values (C, D, H, W).
        body_part: what its file names, in capitals; None where it names nothing.
    """
    sides = volume.values.shape[1:]
    if len(sides) != 3 or min(sides) < _LEAST_VOXELS:
        return False
    if body_part is not None:
        return any(word in body_part for word in _HEADS)
    if volume.spacing is None:
        return True
    extents = np.multiply(sides, volume.spacing)
    return bool((extents >= _EXTENT_MM[0]).all() and (extents <= _EXTENT_MM[1]).all())
