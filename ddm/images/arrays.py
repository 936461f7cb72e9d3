"""Arrays of many images, npz, npy, idx or Parquet, as pictures one by one, with the columns beside them.

An image may be (H, W), (C, H, W) with 1 or 3 channels, (H, W, C) with 1, 3 or 4, or a volume (C, D, H, W). In an npz,
`train_images`, `train_labels` and the like count as parts of one data set, as MedMNIST names them.
"""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddm.errors import DataError
from ddm.images.array_files import Source, open_arrays
from ddm.images.content import FileContent
from ddm.images.npz import npz_blocks, npz_header, npz_names, read_array
from ddm.images.picture import DecodedPicture, Limits, Picture, supported
from ddm.images.reasons import ImageError, Reason
from ddm.images.rows import BLOCK_BYTES, rows_of

_IMAGES = "images"
_MAX_CELL_BYTES = {"label": 1024, "patient": 1024, "caption": 4 * 4096}
_FOUR = 4  # channels of colours with transparency


def read(content: FileContent, kind: str, limits: Limits) -> Iterator[DecodedPicture | ImageError]:
    """Yield the images of one file; a row that gives no picture comes as its error, and the next ones follow.

    Args:
        content: the file; of `images-*.npy`, the first.
        kind: npz, npy, idx or Parquet, as its first bytes tell.
        limits: the most that one image may ask for.

    Raises:
        ImageError: headers or columns that are damaged or do not belong together.
    """
    path = content.path
    if path is None:
        raise ImageError(Reason.UNSUPPORTED, "arrays inside another file")
    try:
        if kind == "npz" and _IMAGES not in (names := npz_names(path)):
            yield from _parts(path, names, limits)
        else:
            yield from _source(open_arrays(path.parent if _is_part(path, kind) else path), kind, limits)
    except ImageError:
        raise
    except DataError as error:
        raise ImageError(Reason.DAMAGED, f"{error.subject}: {error.got}") from error


def _is_part(path: Path, kind: str) -> bool:
    return kind == "npy" and (path.name == "images.npy" or path.name.startswith("images-"))


def _parts(path: Path, names: frozenset[str], limits: Limits) -> Iterator[DecodedPicture | ImageError]:
    parts = sorted(name for name in names if name.endswith(f"_{_IMAGES}"))
    if not parts:
        raise ImageError(Reason.UNKNOWN, "an npz without an array called images")
    for name in parts:
        split = name.removesuffix(f"_{_IMAGES}")
        header = npz_header(path, name)
        columns = {
            column: read_array(path, f"{split}_{column}s", max_bytes=4096 + header.shape[0] * 4 * most)
            for column, most in _MAX_CELL_BYTES.items()
            if f"{split}_{column}s" in names
        }
        yield from _rows(npz_blocks(path, name), header.shape[0], header.dtype, "npz", limits, columns, split=split)


def _source(source: Source, kind: str, limits: Limits) -> Iterator[DecodedPicture | ImageError]:
    if source.name != _IMAGES:
        raise ImageError(Reason.NO_PICTURE, "latents")
    dtype, shape = source.row
    if kind == "idx" and len(shape) < 2:
        raise ImageError(Reason.SHAPE, f"{len(shape) + 1} axes in place of 3 or 4")
    limits.check(*(shape or (0,)))
    columns = {
        column: source.column(f"{column}s", most)
        for column, most in _MAX_CELL_BYTES.items()
        if {column, f"{column}s"} & source.columns
    }
    stored = source.in_place()
    if stored is None:
        blocks = source.unpacked()
    else:
        size = rows_of(BLOCK_BYTES, shape)
        num = len(source)
        blocks = (stored.read(range(start, min(start + size, num))) for start in range(0, num, size))
    yield from _rows(blocks, len(source), dtype, kind, limits, columns)


def _rows(
    blocks: Iterator[NDArray[np.generic]],
    num: int,
    dtype: np.dtype[np.generic],
    kind: str,
    limits: Limits,
    columns: Mapping[str, NDArray[np.generic]],
    split: str | None = None,
) -> Iterator[DecodedPicture | ImageError]:
    texts = {name: cells for name, column_N in columns.items() if (cells := _cells(column_N, num)) is not None}
    bounds = np.iinfo(np.dtype(dtype.str)) if dtype.kind in "iu" and dtype.itemsize < 4 else None
    full = None if bounds is None else (float(bounds.min), float(bounds.max))
    row = 0
    for block in blocks:
        for values in block:
            try:
                picture = Picture(_channels_first(values, limits), full=full)
                told: dict[str, Any] = {name: cells[row] for name, cells in texts.items()}
                yield DecodedPicture.of(picture, kind=kind, split=split, **told)
            except ImageError as error:
                yield error
            row += 1


def _channels_first(values: NDArray[np.generic], limits: Limits) -> NDArray[np.generic]:
    shape = values.shape
    limits.check(*(shape or (0,)))
    if len(shape) == 2:
        return supported(values[None])
    if len(shape) == 4:
        return supported(values)
    if len(shape) == 3 and shape[0] in (1, 3):
        return supported(values)
    if len(shape) == 3 and shape[-1] in (1, 3, _FOUR):
        if shape[-1] == _FOUR:
            most = np.iinfo(np.dtype(values.dtype.str)).max if values.dtype.kind in "iu" else 1.0
            laid = values[..., :3].astype(np.float64) * (values[..., 3:].astype(np.float64) / most)
            values = (np.round(laid) if values.dtype.kind in "iu" else laid).astype(values.dtype)
        return supported(np.moveaxis(values, -1, 0))
    raise ImageError(Reason.SHAPE, f"rows of {len(shape)} axes, {prod(shape)} values, without 1 or 3 channels")


def _cells(column_N: NDArray[np.generic], num: int) -> list[str] | None:
    """Return a column as text, one cell a row; a column of several numbers a row says nothing here."""
    if column_N.ndim == 2 and column_N.shape[1] == 1:
        column_N = column_N[:, 0]
    if column_N.ndim != 1:
        return None
    if len(column_N) != num:
        raise ImageError(Reason.DAMAGED, f"{len(column_N)} entries in a column for {num} images")
    texts = [_text(cell) if isinstance(cell, bytes) else str(cell) for cell in column_N.tolist()]
    return [text.strip() for text in texts]


def _text(cell: bytes) -> str:
    try:
        return cell.decode()
    except ValueError:
        return cell.decode("latin-1")
