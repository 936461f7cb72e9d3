"""Takes private pictures through the plan's transform, once, with what the plan needs to know of each."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddm.errors import DataError
from ddm.imaging.geometry import Floats
from ddm.imaging.reading import samples_at
from ddm.imaging.transform import Transform
from ddm.io.sources import Source, open_source
from silo.data.store import Item, store_cohort
from silo.data.volumes import TABLE_NAME, are_volumes, read_volume_column, read_volumes, volume_files

_MAX_CELL_BYTES = {"patients": 1024, "labels": 1024, "captions": 4 * 4096}
_KINDS = {"patients": "iufUS", "labels": "iu", "captions": "US"}
_ARRAYS = ("*.npy", "*.parquet")


def open_transformed(path: Path, transform: Transform, columns: Sequence[str], folder: Path) -> Source:
    """Return what the plan's transform makes of the pictures at `path`, from a copy in `folder` that is made once.

    Args:
        path: NIfTI volumes, or whatever `ddm.imaging.pictures.pictures` takes. Latents are returned as they are.
        transform: the plan's.
        columns: what the plan needs to know of each picture: `patients`, `labels`, `captions`.
        folder: private to the worker.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: no picture, one that the plan does not take, by its number, or a column that is absent or incomplete.
        DiskError: too little room.
    """
    if are_volumes(path):
        files = volume_files(path)
        found = {name: read_volume_column(path, name, len(files)) for name in columns}
        return _stored(path, transform, found, read_volumes(files, transform), len(files), folder)
    if path.is_dir() and not any(next(path.glob(each), None) for each in _ARRAYS):
        if columns:
            got = "a folder of pictures, which has no columns"
            raise DataError("data", expected=f"{' and '.join(columns)} beside the pictures", got=got)
        num = sum(len(names) for _, _, names in os.walk(path))
        return _stored(path, transform, {}, samples_at(path, transform, seen=False), num, folder)
    source = open_source(path)
    if source.name == "latents":
        return source
    found = {name: source.column(name, _MAX_CELL_BYTES[name]) for name in columns}
    return _stored(path, transform, found, samples_at(path, transform, seen=False), len(source), folder)


def _stored(
    path: Path,
    transform: Transform,
    columns: dict[str, NDArray[np.generic]],
    samples: Iterator[list[Floats]],
    num: int,
    folder: Path,
) -> Source:
    for name, column in columns.items():
        if column.shape != (num,):
            raise DataError(name, expected=f"shape ({num},), one for each image", got=str(column.shape))
        if column.dtype.kind not in _KINDS[name]:
            wanted = {"patients": "numbers or text", "labels": "whole numbers", "captions": "text"}[name]
            raise DataError(name, expected=wanted, got=str(column.dtype))
    items = (_item(each, columns, number) for number, each in enumerate(samples))
    return store_cohort(folder, [_stamp(path), sorted(columns)], transform, items, most=num * transform.most)


def _item(samples: Sequence[Floats], columns: dict[str, NDArray[np.generic]], number: int) -> Item:
    cells: dict[str, Any] = {name: column[number].item() for name, column in columns.items()}
    for name, cell in cells.items():
        if isinstance(cell, bytes):
            try:
                cells[name] = cell.decode()
            except ValueError:  # its message quotes the text
                raise DataError(name, expected="UTF-8", got="a text that is not valid UTF-8") from None
    return Item(samples, cells.get("patients"), cells.get("labels"), cells.get("captions"))


def _stamp(path: Path) -> str:
    """Return a digest of path, bytes and time of every file at `path`, with the table of volumes."""
    digest = hashlib.sha256()
    beside = [] if path.is_dir() else [path, path.parent / TABLE_NAME]
    for file in (*_files(path), *(each for each in beside if each.is_file())):
        found = file.stat()
        digest.update(f"{file.resolve()} {found.st_size} {found.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders.sort()
        yield from (Path(root, name) for name in sorted(names))
