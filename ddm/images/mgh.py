"""MGH and MGZ, FreeSurfer's volumes, turned to the patient's axes; nibabel reads the header.

Frames are channels, or volumes of their own where the footer states a repetition time.
"""

# Shape legend: C channels, I J K axes of a file.
from collections.abc import Iterator

import numpy as np
from nibabel.freesurfer.mghformat import MGHHeader
from nibabel.spatialimages import HeaderDataError

from ddm.images.content import FileContent
from ddm.images.picture import DecodedPicture, DecodeLimits
from ddm.images.reasons import ImageError, Reason
from ddm.images.volume_files import (
    bounds_of,
    picture_of_volume,
    read_footer,
    read_header,
    read_volumes,
)

_HEADER_BYTES = 90
_VOXELS_AT = 284


def read(
    content: FileContent,
    kind: str,
    limits: DecodeLimits,
) -> Iterator[DecodedPicture]:
    """Yield the volume of one file, its one slice as an image, or each volume of a series in time.

    Args:
        content: the file, which gzip may have packed.
        kind: MGH.
        limits: the most that it may ask for.

    Raises:
        ImageError: a header or voxels that give no picture, with the true reason.
    """
    data = read_header(content, _HEADER_BYTES)
    header = MGHHeader(data, check=False)
    try:
        stored = np.dtype(header.get_data_dtype()).newbyteorder(">")
    except (KeyError, HeaderDataError) as error:
        raise ImageError(Reason.UNSUPPORTED, "type") from error
    width, height, depth, num_frames = (int(side) for side in header["dims"])
    if int.from_bytes(data[28:30]) != 1:  # nibabel replaces another number by 1
        raise ImageError(Reason.UNSUPPORTED, "goodRASFlag: no axes of the patient")
    limits.check(width, height, depth)
    # Frames are channels of one volume, unless there is a repetition time.
    num_channels = num_frames
    num_volumes = 1
    if num_frames > 1:
        # The repetition time is in the footer, behind all voxels.
        num_voxels = width * height * depth * num_frames
        end = _VOXELS_AT + num_voxels * stored.itemsize
        footer = read_footer(content, end)
        header = MGHHeader(data + footer, check=False)
        if header["tr"] != 0:
            num_channels = 1
            num_volumes = num_frames
    limits.check_pictures(num_volumes)
    shape = (width, height, depth, num_channels)
    limits.check(*shape)
    matrix = header.get_affine()
    for values in read_volumes(content, _VOXELS_AT, shape, stored, num_volumes):
        yield picture_of_volume(values, matrix, kind, window=None, full=bounds_of(stored))
