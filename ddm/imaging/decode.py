"""Decodes a folder of PNG and JPEG files, an npz, an npy, Parquet or idx into pictures."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ddm.errors import DataError
from ddm.imaging.picture import Picture
from ddm.io.idx import is_idx, read_idx
from ddm.io.images import BLOCK_BYTES, rows_of
from ddm.io.sources import Source, open_source

_ENDINGS = (".png", ".jpg", ".jpeg")
_FULL = {"uint8": (0.0, 255.0), "uint16": (0.0, 65535.0)}


def pictures(path: Path) -> Iterator[Picture]:
    """Yield the pictures of a file or a folder, of any depth, in the order of their names.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: no picture, or one that does not decode.
    """
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in _ENDINGS) if path.is_dir() else []
    if files:
        return map(_decoded, files)
    if path.is_file() and is_idx(path):
        return map(_picture, read_idx(path))
    return (_picture(row) for block in _blocks(open_source(path)) for row in block)


def _decoded(file: Path) -> Picture:
    try:
        with Image.open(file, formats=("PNG", "JPEG")) as image:
            if image.mode in ("P", "RGBA", "CMYK", "YCbCr"):
                image = image.convert("RGB")  # type: ignore[assignment]
            elif image.mode in ("1", "LA"):
                image = image.convert("L")  # type: ignore[assignment]
            array = np.asarray(image)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        got = f"{type(error).__name__} in reading it"
        raise DataError("picture", expected="a PNG or JPEG file", got=got) from error
    values = array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0)
    return _picture(np.ascontiguousarray(values))


def _blocks(source: Source) -> Iterator[NDArray[np.generic]]:
    array = source.in_place()
    if array is None:
        return source.unpacked()
    size = rows_of(BLOCK_BYTES, source.row[1])
    return (array.read(range(start, min(start + size, len(source)))) for start in range(0, len(source), size))


def _picture(values: NDArray[np.generic]) -> Picture:
    kept = values.astype(np.float32) if values.dtype.kind == "f" else values
    return Picture(kept[None] if kept.ndim == 2 else kept, full=_FULL.get(values.dtype.name))
