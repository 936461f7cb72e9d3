"""The pictures of a file or a folder of this machine's own, decoded in this process."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ddm.errors import DataError, MissingFileError
from ddm.images.array_files import ARRAYS, Source, open_arrays
from ddm.images.content import FileContent
from ddm.images.formats import decode
from ddm.images.idx import is_idx
from ddm.images.picture import Picture
from ddm.images.reasons import ImageError
from ddm.images.rows import BLOCK_BYTES, rows_of

_TABLES = (".csv", ".tsv")
_FULL = {"uint8": (0.0, 255.0), "uint16": (0.0, 65535.0)}


def pictures(path: Path) -> Iterator[Picture]:
    """Yield the pictures of a file or a folder, which people have looked at: none waits for a person here.

    Args:
        path: a picture of any kind that `ddm.images.formats` knows; a folder of them, at any depth, by their names,
            files before folders, without hidden ones and without arrays that hold no pictures; or arrays as
            `ddm.images.array_files` takes them: a file, a folder with images.npy or its parts, or one of
            Parquet files alone.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: no picture, or one that does not decode.
    """
    files = picture_files(path)
    if files is None:
        return (_picture(row) for block in _blocks(open_arrays(path)) for row in block)
    if files == (path,):
        return _decoded(path)
    return (picture for file in files for picture in _in_folder(file))


def picture_files(path: Path) -> tuple[Path, ...] | None:
    """Return the files that hold the pictures at `path`, in order; None for arrays of `ddm.images.array_files`.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: an empty folder, or a table.
    """
    if not path.exists():
        raise MissingFileError(str(path), expected="pictures", got="no such file or folder")
    if path.suffix.lower() in _TABLES:
        remedy = "Give the folder of its pictures: only a silo's data may be a table."
        raise DataError("pictures", expected="a picture, a folder of them, or arrays", got="a table", remedy=remedy)
    if path.is_file():
        return None if path.suffix.lower() in ARRAYS or is_idx(path) else (path,)
    files = [file for file in path.rglob("*") if file.is_file() and not _hidden(file.relative_to(path))]
    files.sort(key=lambda file: (*((1, part) for part in file.parent.parts), (0, file.name)))
    if not files:
        raise DataError("pictures", expected="at least one", got="an empty folder")
    return None if _are_rows(files) else tuple(files)


def _are_rows(files: Sequence[Path]) -> bool:
    """Whether a folder's files are one array in parts, with its columns."""
    parts = any(file.name == "images.npy" or file.match("images-*.npy") for file in files)
    return parts or all(file.suffix.lower() == ".parquet" for file in files)


def _in_folder(file: Path) -> Iterator[Picture]:
    """Yield the pictures of one file of a folder; arrays beside pictures may be anything."""
    found = _decoded(file)
    try:
        first = next(found, None)
    except DataError:
        if file.suffix.lower() not in ARRAYS:
            raise
        return
    if first is not None:
        yield first
    yield from found


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _decoded(file: Path) -> Iterator[Picture]:
    try:
        for found in decode(FileContent.of(file)):
            if isinstance(found, ImageError):
                raise found
            yield found
    except ImageError as error:
        raise DataError("picture", expected="an image that can be read", got=error.got) from error


def _blocks(source: Source) -> Iterator[NDArray[np.generic]]:
    array = source.in_place()
    if array is None:
        return source.unpacked()
    size = rows_of(BLOCK_BYTES, source.row[1])
    return (array.read(range(start, min(start + size, len(source)))) for start in range(0, len(source), size))


def _picture(values: NDArray[np.generic]) -> Picture:
    kept = values.astype(np.float32) if values.dtype.kind == "f" else values
    return Picture(kept[None] if kept.ndim == 2 else kept, full=_FULL.get(values.dtype.name))
