"""NIfTI and MGH through nibabel: volumes turned to the patient's axes, single slices as on a screen; no header leaves.

A fourth axis are channels; a fifth too where the fourth has one entry.
"""

import gzip
import warnings
from collections.abc import Iterator
from typing import Any

import nibabel
import numpy as np
from numpy.typing import NDArray

from ddm.images.content import FileContent
from ddm.images.orientation import flattened, oriented
from ddm.images.picture import DecodedPicture, Limits, Picture, supported
from ddm.images.reasons import ImageError, Reason

_MM = {"meter": 1000.0, "micron": 0.001}
_CLASSES = {"NIfTI": nibabel.Nifti1Image, "NIfTI-2": nibabel.Nifti2Image, "MGH": nibabel.MGHImage}


def read(content: FileContent, kind: str, limits: Limits) -> Iterator[DecodedPicture]:
    """Yield the volume of one file, or its one slice as an image.

    Args:
        content: the file, which gzip may have packed.
        kind: NIfTI, NIfTI-2 or MGH, as its first bytes tell.
        limits: the most that it may ask for.

    Raises:
        ImageError: a header or voxels that give no picture, with the true reason.
    """
    packed = content.head(2) == b"\x1f\x8b"
    with content.open() as file, gzip.open(file) if packed else file as stream, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image: Any = _CLASSES[kind].from_stream(stream)  # type: ignore[attr-defined]
        shape = tuple(int(side) for side in image.shape)
        if not 2 <= len(shape) <= 5 or (len(shape) == 5 and shape[3] != 1):
            raise ImageError(Reason.SHAPE, f"{len(shape)} axes")
        limits.check(*shape)
        try:
            values = np.asanyarray(image.dataobj)
        except (OSError, ValueError) as error:
            if isinstance(error, gzip.BadGzipFile):
                raise ImageError(Reason.DAMAGED, "packed with errors") from error
            raise ImageError(Reason.TRUNCATED, "fewer voxels than its header says") from error
    values = _channels_first(values)
    full = _full(image)
    turned, spacing = oriented(values, np.asarray(image.affine, np.float64))
    units = "mm" if kind == "MGH" else image.header.get_xyzt_units()[0]
    spacing_mm = tuple(side * _MM.get(units, 1.0) for side in spacing)
    window = _window(image.header, kind)
    if 1 in turned.shape[1:]:
        flat, left = flattened(turned, (spacing_mm[0], spacing_mm[1], spacing_mm[2]))
        picture = Picture(supported(flat), left, window, full)
        yield DecodedPicture.of(picture, kind=kind)
        return
    volume = Picture(supported(turned), spacing_mm, window, full)
    yield DecodedPicture.of(volume, kind=kind)


def _channels_first(values: NDArray[Any]) -> NDArray[np.generic]:
    """Return (C, I, J, K)."""
    if values.dtype.names:  # colours
        values = np.stack([values[name] for name in values.dtype.names[:3]], -1)
        values = values.reshape(*values.shape[:-1], 1, 3) if values.ndim == 4 else values
    values = values[:, :, None] if values.ndim == 2 else values
    if values.ndim == 5:
        values = values[:, :, :, 0]
    return values[None] if values.ndim == 3 else np.moveaxis(values, -1, 0)


def _full(image: Any) -> tuple[float, float] | None:
    kind = np.dtype(image.get_data_dtype())
    if kind.names:
        return 0.0, 255.0
    if kind.kind not in "iu" or kind.itemsize > 2:
        return None
    bounds, slope, intercept = np.iinfo(kind), 1.0, 0.0
    if hasattr(image.dataobj, "slope"):
        slope, intercept = float(image.dataobj.slope), float(image.dataobj.inter)
    ends = bounds.min * slope + intercept, bounds.max * slope + intercept
    return min(ends), max(ends)


def _window(header: Any, kind: str) -> tuple[float, float] | None:
    if kind == "MGH":
        return None
    low, high = float(header["cal_min"]), float(header["cal_max"])
    return (low, high) if np.isfinite([low, high]).all() and low < high else None
