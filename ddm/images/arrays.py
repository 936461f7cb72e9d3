"""Arrays of many images as pictures one by one, with what the columns beside them say about each.

`ddm.images.array_files` opens the files, and `ddm.images.layout` says which shapes an image may have.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ddm.errors import DataError
from ddm.images.array_files import ImageArrays, open_parts
from ddm.images.column_names import FIELDS, MAX_CELL_BYTES, as_text
from ddm.images.content import FileContent
from ddm.images.layout import channels_first, check_dtype, check_layout, full_range
from ddm.images.npz import MAX_HEADER_BYTES, parse_header
from ddm.images.parquet import ParquetTable
from ddm.images.parquet_pictures import read_encoded
from ddm.images.picture import DecodedPicture, DecodeLimits, Picture
from ddm.images.reasons import ImageError, Reason
from ddm.images.types import Values

_IMAGES = "images"
_COLOURS = 3


def read(
    content: FileContent,
    kind: str,
    limits: DecodeLimits,
) -> Iterator[DecodedPicture | ImageError]:
    """Yield the images of one file; a row that gives no picture comes as its error, and the next ones follow.

    Args:
        content: the file; of `images-*.npy`, the first. Inside another file, an npy holds a single image.
        kind: npz, npy, idx or Parquet, as its first bytes show.
        limits: the most that one image may ask for.

    Raises:
        ImageError: headers or columns that are damaged or do not belong together.
    """
    path = content.path
    if path is None and kind == "npy":
        yield _read_single(content, limits)
        return
    if path is None:
        raise ImageError(Reason.UNSUPPORTED, "arrays inside another file")
    num_images = 0
    try:
        for picture in _read_file(path, kind, limits):
            num_images += 1
            yield picture
    except ImageError:
        raise
    except DataError as error:
        # Unlike damage, this may be the machine's fault, and a later scan tries again.
        if isinstance(error.__cause__, MemoryError):
            raise ImageError(Reason.MEMORY) from error
        raise ImageError(Reason.DAMAGED, f"{error.subject}: {error.got}") from error

    if num_images == 0:
        raise ImageError(Reason.NO_PIXELS, "an array or a table without an image")


def _read_file(
    path: Path,
    kind: str,
    limits: DecodeLimits,
) -> Iterator[DecodedPicture | ImageError]:
    if kind == "Parquet":
        table = ParquetTable((path,))
        column = table.image_column
        if column is None and table.latent_column is None:
            raise ImageError(Reason.UNKNOWN, "Parquet without a column called image")
        if column is not None and table.is_encoded(column):
            yield from read_encoded(table, column, limits)
            return
    # Parts and columns are found by their folder, so that the whole folder is opened.
    is_part = kind == "npy" and (path.name == "images.npy" or path.name.startswith("images-"))
    for split, source in open_parts(path.parent if is_part else path).items():
        if kind in ("npy", "npz"):
            _check_many(source, path)
        yield from _pictures(source, kind, split, limits)


def _read_single(content: FileContent, limits: DecodeLimits) -> DecodedPicture:
    """Return the image of an npy inside another file, such as a tar archive."""
    with content.open() as stream:
        head = stream.read(MAX_HEADER_BYTES)
        header = parse_header(head)
        check_dtype(header.dtype)
        limits.check(*(header.shape or (0,)))
        stream.seek(header.offset)
        # One byte more than announced shows that something follows.
        data = stream.read(header.num_bytes + 1)
    if len(data) != header.num_bytes:
        reason = Reason.DAMAGED
        if len(data) < header.num_bytes:
            reason = Reason.TRUNCATED
        raise ImageError(reason, "fewer or more bytes than the header of the npy says")
    flat = np.frombuffer(data, header.dtype)
    if header.by_columns:
        values = flat.reshape(header.shape, order="F")
    else:
        values = flat.reshape(header.shape)
    picture = Picture(channels_first(values, limits), full=full_range(header.dtype))
    return DecodedPicture.of(picture, kind="npy")


def _check_many(source: ImageArrays, path: Path) -> None:
    """Refuse what may be a single image, whose rows would be taken for images.

    Raises:
        ImageError: says how one image is saved.
    """
    _, shape = source.row
    if len(shape) != 2:
        return
    if 1 in shape or _COLOURS in shape or shape[-1] == _COLOURS + 1:
        detail = "one image with its channels, or many images with a side of 1, 3 or 4: save one as (1, H, W, C)"
        raise ImageError(Reason.AMBIGUOUS, detail)
    may_be_one_image = path.suffix == ".npy" and not path.name.startswith(_IMAGES)
    if len(source) == _COLOURS and may_be_one_image:
        detail = "(3, H, W): one image of three colours, saved as (1, 3, H, W), or three grey ones, as (3, 1, H, W)"
        raise ImageError(Reason.AMBIGUOUS, detail)


def _pictures(
    source: ImageArrays,
    kind: str,
    split: str | None,
    limits: DecodeLimits,
) -> Iterator[DecodedPicture | ImageError]:
    if source.name != _IMAGES:
        raise ImageError(Reason.NO_PICTURE, "latents")
    dtype, shape = source.row
    check_dtype(dtype)
    check_layout(shape)
    limits.check(*shape)
    columns = _read_columns(source)
    full = full_range(dtype)
    start = 0
    for block in source.unpacked():
        stop = start + len(block)
        cells = {}
        for field, column in columns.items():
            cells[field] = column[start:stop].tolist()
        for place, values in enumerate(block):
            try:
                picture = Picture(channels_first(values, limits), full=full)
            except ImageError as error:
                yield error
                continue
            fields: dict[str, Any] = {"split": split}
            for field, entries in cells.items():
                fields[field] = as_text(entries[place])
            yield DecodedPicture.of(picture, kind=kind, **fields)
        start = stop


def _read_columns(source: ImageArrays) -> Mapping[str, Values]:
    columns = {}
    for field, name in FIELDS.items():
        if name not in source.columns:
            continue
        column = source.column(name, MAX_CELL_BYTES[field])
        if column.shape != (len(source),):
            detail = f"{name} of shape {column.shape} for {len(source)} images: one entry for each is needed"
            raise ImageError(Reason.DAMAGED, detail)
        if column.dtype.kind not in "biufUS":
            raise ImageError(Reason.UNSUPPORTED, f"{name} that are neither text nor numbers")
        columns[field] = column
    return columns
