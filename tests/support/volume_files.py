"""NIfTI and MGH files laid out field by field from a known array."""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

CODES = {
    "u1": 2,
    "i2": 4,
    "i4": 8,
    "f4": 16,
    "f8": 64,
    "i1": 256,
    "u2": 512,
    "u4": 768,
    "i8": 1024,
    "u8": 1280,
}
_MGH_CODES = {"u1": 0, "i4": 1, "f4": 3, "i2": 4, "u2": 10}
# Offset and type of each field: nifti1.h and nifti2.h.
_FIELDS = {
    1: {
        "dim": (40, "h"),
        "intent_code": (68, "h"),
        "datatype": (70, "h"),
        "bitpix": (72, "h"),
        "pixdim": (76, "f"),
        "vox_offset": (108, "f"),
        "scl_slope": (112, "f"),
        "scl_inter": (116, "f"),
        "xyzt_units": (123, "B"),
        "cal_max": (124, "f"),
        "cal_min": (128, "f"),
        "qform_code": (252, "h"),
        "sform_code": (254, "h"),
        "quatern": (256, "f"),
        "srow": (280, "f"),
    },
    2: {
        "datatype": (12, "h"),
        "bitpix": (14, "h"),
        "dim": (16, "q"),
        "pixdim": (104, "d"),
        "vox_offset": (168, "q"),
        "scl_slope": (176, "d"),
        "scl_inter": (184, "d"),
        "cal_max": (192, "d"),
        "cal_min": (200, "d"),
        "qform_code": (344, "i"),
        "sform_code": (348, "i"),
        "quatern": (352, "d"),
        "srow": (400, "d"),
        "xyzt_units": (500, "i"),
        "intent_code": (504, "i"),
    },
}


def encode_nifti(
    voxels: np.ndarray,
    *,
    affine: np.ndarray | None = None,
    version: int = 1,
    order: str = "<",
    extension: bytes = b"",
    **fields: Any,
) -> bytes:
    """Return a file; every field of the header may be given, and `affine` makes the sform.

    Args:
        voxels: numbers in the axes of the file, or structured colours of one byte each.
        affine: from voxels to mm.
        version: of NIfTI.
        order: of the bytes.
        extension: content of one extension, of code 6.
        fields: other values of fields, numbers or lists.
    """
    # Voxels may begin right behind the header and the four bytes that say whether extensions follow.
    size = 348 if version == 1 else 540
    offset = size + 4
    extensions = b"\0\0\0\0"
    if extension:
        esize = -(-(8 + len(extension)) // 16) * 16
        extensions = (
            b"\1\0\0\0" + struct.pack(order + "ii", esize, 6) + extension.ljust(esize - 8, b"\0")
        )
        offset += esize
    code = CODES.get(voxels.dtype.str[1:], 0)
    values_by_field: dict[str, Any] = {
        "dim": [voxels.ndim, *voxels.shape] + [1] * (7 - voxels.ndim),
        "datatype": code,
        "bitpix": 8 * voxels.itemsize,
        "pixdim": [1.0] * 8,
        "vox_offset": offset,
    }
    if affine is not None:
        values_by_field |= {"sform_code": 1, "srow": np.asarray(affine, float)[:3].ravel().tolist()}
    header = bytearray(size)
    header[:4] = struct.pack(order + "i", size)
    if version == 2:
        header[4:12] = b"n+2\0\r\n\x1a\n"
    for name, value in (values_by_field | fields).items():
        place, letter = _FIELDS[version][name]
        values = value if isinstance(value, list | tuple) else [value]
        data = struct.pack(f"{order}{len(values)}{letter}", *values)
        header[place : place + len(data)] = data
    if version == 1:
        header[344:348] = b"n+1\0"
    stored = voxels if voxels.dtype.names else voxels.astype(voxels.dtype.newbyteorder(order))
    return bytes(header) + extensions + stored.tobytes(order="F")


def encode_mgh(
    voxels: np.ndarray,
    directions: np.ndarray,
    sides: Sequence[float] = (1, 1, 1),
    *,
    code: int | None = None,
    has_axes: int = 1,
    repetition_time: float | None = None,
) -> bytes:
    """Return a file of voxels.

    Args:
        voxels: (I, J, K, frames).
        directions: of each axis, in columns.
        sides: of a voxel, mm.
        code: of the voxels' type; that of `voxels` by default.
        has_axes: whether readers are to use the directions.
        repetition_time: behind the voxels, ms; left out by default.
    """
    if code is None:
        code = _MGH_CODES[voxels.dtype.str[1:]]
    header = struct.pack(">i4iiih", 1, *voxels.shape, code, 0, has_axes)
    header += struct.pack(">15f", *sides, *np.asarray(directions, float).T.ravel(), 0, 0, 0)
    footer = b"" if repetition_time is None else struct.pack(">5f", repetition_time, 0, 0, 0, 0)
    return (
        header.ljust(284, b"\0")
        + voxels.astype(voxels.dtype.newbyteorder(">")).tobytes(order="F")
        + footer
    )
