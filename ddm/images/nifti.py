"""NIfTI-1 and NIfTI-2 in one file: volumes turned to the patient's axes, single slices as on a screen.

nibabel reads the header; a field that contradicts another is refused here by its name, under which nifti1.h and
nifti2.h describe it. Of the header nothing leaves but the geometry, the window and the scaling.
"""

# Shape legend: C channels, I J K axes of a file.
from collections.abc import Iterator
from typing import Any

import numpy as np
from nibabel.nifti1 import Nifti1Header
from nibabel.nifti2 import Nifti2Header
from nibabel.spatialimages import HeaderDataError
from numpy.typing import NDArray

from ddm.images.content import FileContent
from ddm.images.picture import DecodedPicture, DecodeLimits
from ddm.images.reasons import ImageError, Reason
from ddm.images.types import Bounds, Mask, Numbers, Scaling, Shape
from ddm.images.volume_files import bounds_of, picture_of_volume, read_header, read_volumes

# By format: the type of the header, and the offset before which no voxel can be.
_HEADERS = {
    "NIfTI": (Nifti1Header, 352),
    "NIfTI-2": (Nifti2Header, 544),
}
_MAX_VOX_OFFSET = 1 << 28
_SPACE_UNITS_MM = {0: 1.0, 1: 1000.0, 2: 1.0, 3: 0.001}  # an unknown unit counts as mm
_SPACE_UNIT_BITS = 0x07
_TIME_UNIT_BITS = 0x38
_INTENTS = {
    **dict.fromkeys((1002, 1003), "intent_code: labels"),
    **dict.fromkeys((1004, 1005), "intent_code: matrices"),
    **dict.fromkeys((1006, 2006, 2007, 2008, 2009, 2016, 2017, 2018), "intent_code: displacements"),
    **dict.fromkeys((1008, 1009, 1010, 2002, 2005), "intent_code: points of a surface"),
    2001: "intent_code: a series in time",
    2004: "intent_code: colours with transparency",
    **dict.fromkeys(range(3000, 3100), "intent_code: CIFTI"),
}


def read(
    content: FileContent,
    kind: str,
    limits: DecodeLimits,
) -> Iterator[DecodedPicture]:
    """Yield the volume of one file, its one slice as an image, or each volume of a series in time.

    Args:
        content: the file, which gzip may have packed.
        kind: NIfTI or NIfTI-2.
        limits: the most that it may ask for.

    Raises:
        ImageError: a header or voxels that give no picture, with the true reason.
    """
    header_type, min_offset = _HEADERS[kind]
    size = header_type.template_dtype.itemsize
    data = read_header(content, size)
    # The first field, sizeof_hdr, is the size of the header in the byte order of the file.
    order = ">"
    if int.from_bytes(data[:4], "little") == size:
        order = "<"
    header: Any = header_type(data, endianness=order, check=False)
    shape, num_volumes = _shape(header)
    stored = _dtype(header)
    intent = int(header["intent_code"])
    if intent in _INTENTS:
        raise ImageError(Reason.NO_PICTURE, _INTENTS[intent])
    slope, intercept = _scaling(header, stored)
    offset = float(header["vox_offset"])
    # The range first: a number that is not finite has no whole part.
    is_in_range = min_offset <= offset <= _MAX_VOX_OFFSET
    if not is_in_range or offset != int(offset):
        raise ImageError(Reason.DAMAGED, "vox_offset")
    matrix = _matrix(header, shape)
    window = _window(header)
    limits.check_pictures(num_volumes)
    # Colours are fields of a voxel.
    num_fields = 1
    if stored.names:
        num_fields = len(stored.names)
    limits.check(*shape, num_fields)
    is_scaled = (slope, intercept) != (1.0, 0.0)
    for values in read_volumes(content, int(offset), shape, stored, num_volumes):
        full = bounds_of(stored, slope, intercept)
        if stored.names:
            values = _colours(values)
            full = (0.0, 255.0)
        elif is_scaled:
            stored_values = values.astype(np.float64)
            values = stored_values * slope + intercept
        yield picture_of_volume(
            values,
            matrix,
            kind,
            window=window,
            full=full,
        )


def _window(header: Any) -> Bounds | None:
    """Return the values to show as black and white, if the file states such a window."""
    low = float(header["cal_min"])
    high = float(header["cal_max"])
    are_finite = np.isfinite(low) and np.isfinite(high)
    if not are_finite or low >= high:
        return None
    return low, high


def _shape(header: Any) -> tuple[tuple[int, int, int, int], int]:
    """Return the shape (I, J, K, C) of one volume, and how many there are: the fourth axis is time if it has a unit."""
    num_axes = int(header["dim"][0])
    if not 1 <= num_axes <= 7:
        raise ImageError(Reason.DAMAGED, "dim[0]")
    sides = [int(side) for side in header["dim"][1 : 1 + num_axes]]
    if min(sides) < 1:
        raise ImageError(Reason.DAMAGED, "dim: a side of length zero")
    sides += [1] * (7 - num_axes)
    i, j, k, fourth, fifth, *further = sides
    has_times_and_channels = fourth > 1 and fifth > 1
    if num_axes == 1 or max(further) > 1 or has_times_and_channels:
        raise ImageError(
            Reason.SHAPE,
            "dim: only one axis, or more axes than a volume and its channels or times have",
        )
    units = int(header["xyzt_units"])
    space_unit = units & _SPACE_UNIT_BITS
    time_unit = units & _TIME_UNIT_BITS
    other_bits = units - space_unit - time_unit
    if space_unit not in _SPACE_UNITS_MM or other_bits:
        raise ImageError(Reason.DAMAGED, "xyzt_units")
    if time_unit:
        return (i, j, k, fifth), fourth
    num_channels = fourth * fifth
    return (i, j, k, num_channels), 1


def _dtype(header: Any) -> np.dtype[Any]:
    """Return the type of a voxel; that of colours has fields."""
    try:
        stored: np.dtype[Any] = np.dtype(header.get_data_dtype())
    except (KeyError, HeaderDataError) as error:
        raise ImageError(Reason.UNSUPPORTED, "datatype") from error
    is_number = stored.kind in "iuf" and stored.itemsize <= 8
    if not stored.names and not is_number:
        raise ImageError(
            Reason.UNSUPPORTED,
            "datatype: neither whole numbers nor floating point of 64 bits at most",
        )
    if int(header["bitpix"]) != 8 * stored.itemsize:
        raise ImageError(Reason.DAMAGED, "bitpix: datatype has another size")
    return stored


def _scaling(header: Any, stored: np.dtype[Any]) -> Scaling:
    """Return slope and intercept; a slope of 0 means none, and colours are never scaled (nifti1.h, DATA SCALING)."""
    try:
        slope, intercept = header.get_slope_inter()
    except HeaderDataError as error:
        raise ImageError(Reason.DAMAGED, "scl_inter") from error
    has_colours = bool(stored.names)
    if slope is None or has_colours:
        return 1.0, 0.0
    return slope, intercept


def _colours(values: Numbers) -> NDArray[np.uint8]:
    """Return RGB, shape (I, J, K, 3)."""
    if values.shape[3] != 1:
        raise ImageError(Reason.SHAPE, "dim: colours with a further axis of channels")
    names = values.dtype.names or ()
    if "A" in names:
        is_transparent = values["A"] != 255
        if is_transparent.any():
            raise ImageError(Reason.UNSUPPORTED, "datatype: RGBA32 with transparency")
    channels = [values[name] for name in "RGB"]
    return np.concatenate(channels, axis=3)


def _matrix(header: Any, shape: Shape) -> NDArray[np.float64]:
    """Return the matrix from voxels to mm: that of sform, else of qform, else of the sides of voxels alone."""
    pixdim = header["pixdim"]
    # A view: what is written to it is written to the header.
    voxel_sides = pixdim[1:4]
    is_thin = np.array(shape[:3]) == 1
    # Flat images often state no thickness, and one voxel needs none.
    has_no_side = ~(voxel_sides > 0)
    voxel_sides[is_thin & has_no_side] = 1
    if header["sform_code"] > 0:
        matrix = header.get_sform()
        _fill_thin_axis(matrix, is_thin)
    elif not (voxel_sides > 0).all():
        raise ImageError(Reason.DAMAGED, "pixdim")
    elif header["qform_code"] > 0:
        # nifti1.h: any other number than -1 counts as 1.
        sign = 1
        if pixdim[0] < 0:
            sign = -1
        pixdim[0] = sign
        try:
            matrix = header.get_qform()
        except ValueError as error:
            raise ImageError(Reason.DAMAGED, "quatern: longer than 1") from error
    else:
        # Neither says where the patient's axes are. nibabel takes the first axis to go to the left, the second to the
        # front, the third to the top, as in ANALYZE 7.5 and in FSL.
        scales = voxel_sides * (-1, 1, 1)
        matrix = np.diag([*scales, 1])
    matrix = np.array(matrix, np.float64)
    space_unit = int(header["xyzt_units"]) & _SPACE_UNIT_BITS
    matrix[:3] *= _SPACE_UNITS_MM[space_unit]
    return matrix


def _fill_thin_axis(matrix: NDArray[np.float64], is_thin: Mask) -> None:
    """Give an axis of one voxel that sform maps to nothing, as of a flat image, the direction across the others."""
    # By rows, a view of the matrix: the direction of each axis of the file.
    directions = matrix[:3, :3].T
    has_direction = directions.any(axis=1)
    is_empty = is_thin & ~has_direction
    if is_empty.sum() != 1:
        return
    first, second = directions[~is_empty]
    normal = np.cross(first, second)
    length = np.linalg.norm(normal)
    if length > 0:
        directions[is_empty] = normal / length
