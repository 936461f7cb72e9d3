"""Turns a volume so that it ascends from inferior to superior, anterior to posterior, the patient's right to left."""

import numpy as np
from nibabel.orientations import apply_orientation, axcodes2ornt, io_orientation, ornt_transform
from numpy.typing import NDArray

from ddm.images.reasons import ImageError, Reason

AXES = "SPL"  # where D, H and W end


def oriented(
    values: NDArray[np.generic], matrix: NDArray[np.float64]
) -> tuple[NDArray[np.generic], tuple[float, float, float]]:
    """Turn and flip the last three axes, without resampling, each to the axis of the body that it is nearest to.

    Args:
        values: shape (C, I, J, K).
        matrix: from voxels (i, j, k, 1) to mm to the patient's right, front and top, as NIfTI counts them.

    Returns:
        The values, shape (C, D, H, W), and the spacing of D, H and W in mm.

    Raises:
        ImageError: a matrix that is not finite or maps an axis to nothing.
    """
    sides = np.sqrt((matrix[:3, :3] ** 2).sum(0))
    if not np.isfinite(matrix).all() or not (sides > 0).all():
        raise ImageError(Reason.DAMAGED, "axes without finite lengths above 0")
    turn = ornt_transform(io_orientation(matrix), axcodes2ornt(tuple(AXES)))  # type: ignore[no-untyped-call]
    if not np.isfinite(turn).all():
        raise ImageError(Reason.DAMAGED, "two axes of one direction")
    turned = np.moveaxis(apply_orientation(np.moveaxis(values, 0, -1), turn), -1, 0)  # type: ignore[no-untyped-call]
    spacing = [0.0, 0.0, 0.0]
    for axis, to in enumerate(turn[:, 0].astype(int)):
        spacing[to] = float(sides[axis])
    return turned, (spacing[0], spacing[1], spacing[2])


def flattened(
    values: NDArray[np.generic], spacing: tuple[float, float, float]
) -> tuple[NDArray[np.generic], tuple[float, ...]]:
    """Turn a volume of one slice, shape (C, D, H, W), into the image of a screen, on which the head is up."""
    thin = next(axis for axis in (1, 2, 3) if values.shape[axis] == 1)
    image = values.squeeze(thin)
    left = tuple(side for axis, side in enumerate(spacing, 1) if axis != thin)
    return (image if thin == 1 else image[:, ::-1]), left
