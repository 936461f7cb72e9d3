"""Turns a volume so that it ascends from inferior to superior, anterior to posterior, the patient's right to left."""

# Shape legend: C channels, I J K axes of a file, D slices, H height, W width.
import numpy as np
from nibabel.affines import voxel_sizes
from nibabel.orientations import (
    apply_orientation,
    axcodes2ornt,
    inv_ornt_aff,
    io_orientation,
    ornt_transform,
)
from numpy.typing import NDArray

from ddm.images.reasons import ImageError, Reason
from ddm.images.types import Values

_LARGEST_COSINE = 1e-3  # between two axes: half a voxel in 500, more than rounding in headers makes
_TARGET = axcodes2ornt(("S", "P", "L"))  # where D, H and W go to


def oriented(
    values: Values,
    matrix: NDArray[np.float64],
) -> tuple[Values, tuple[float, float, float]]:
    """Turn and flip the last three axes, without resampling, each to the axis of the body that it is nearest to.

    Args:
        values: shape (C, I, J, K).
        matrix: from voxels (i, j, k, 1) to mm to the patient's right, front and top, as NIfTI counts them.

    Returns:
        The values, shape (C, D, H, W), and the spacing of D, H and W in mm.

    Raises:
        ImageError: a matrix that is not finite, maps an axis to nothing, or has axes that are not at right angles,
            so that what is upright in the patient would lean in the array.
    """
    sides = voxel_sizes(matrix)
    is_finite = np.isfinite(matrix).all() and np.isfinite(sides).all()
    if not is_finite or not (sides > 0).all():
        raise ImageError(Reason.DAMAGED, "axes without finite lengths above 0")
    directions = matrix[:3, :3] / sides
    # The cosines of the angles between axes: 1 of an axis with itself, 0 of two at a right angle.
    cosines = directions.T @ directions
    deviations = np.abs(cosines - np.eye(3))
    if deviations.max() > _LARGEST_COSINE:
        raise ImageError(Reason.SHAPE, "axes that are not at right angles (shear)")
    orientation = io_orientation(matrix)
    transform = ornt_transform(orientation, _TARGET)
    # nibabel turns the first three axes, so that channels are the last one meanwhile.
    values_IJKC = np.moveaxis(values, 0, -1)
    values_DHWC = apply_orientation(values_IJKC, transform)
    turned = np.moveaxis(values_DHWC, -1, 0)
    from_turned_voxels = inv_ornt_aff(transform, values.shape[1:])
    depth, height, width = voxel_sizes(matrix @ from_turned_voxels)
    return turned, (float(depth), float(height), float(width))


def flattened(
    values: Values,
    spacing: tuple[float, float, float],
) -> tuple[Values, tuple[float, ...]]:
    """Turn a volume of one slice, shape (C, D, H, W), into the image of a screen, on which the head is up."""
    thin_axis = next(axis for axis in (1, 2, 3) if values.shape[axis] == 1)
    image = values.squeeze(thin_axis)
    # Axis 0 is that of the channels, which has no spacing.
    image_spacing = (*spacing[: thin_axis - 1], *spacing[thin_axis:])
    if thin_axis != 1:
        # Rows of a coronal or sagittal slice ascend to the head; on a screen they descend.
        image = image[:, ::-1]
    return image, image_spacing
