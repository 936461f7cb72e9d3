"""Where images may come from, npy, npz, idx or Parquet, to be read as images of a plan's shape and range.

What lies in a file in C order, uncompressed, is read in place. Anything else is unpacked once, into an npy of its own
type in a folder that the caller names, and read there; that file is named by what it was made of.
"""

import os
from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ddm.errors import DataError, MissingFileError
from ddm.images.fit import as_floats, check_row, fit
from ddm.images.idx import IdxImages, is_idx
from ddm.images.npz import npy_header, npz_array, npz_blocks, npz_header, npz_names, open_npy, read_array
from ddm.images.parquet import ParquetTable
from ddm.images.rows import (
    BLOCK_BYTES,
    Convert,
    FileArray,
    Images,
    Joined,
    Stored,
    StoredImages,
    blocks,
    rows_of,
    write_rows,
)
from ddm.images.unpacked import stamps, unpacked_path
from ddm.io.files import replacing
from ddm.io.space import require_room
from ddm.protocol.plan import DataSpec

if TYPE_CHECKING:
    from torch import Tensor

Name = Literal["images", "latents"]
_MAX_COLUMN_HEADER_BYTES = 4096
_OF_A_ROW = {"images": "image", "latents": "latent", "patients": "patient", "labels": "label", "captions": "caption"}
ARRAYS = (".npz", ".npy", ".parquet")
"""How the names of files of many images end."""
KINDS = "an npz, an npy, an idx file, a folder with images.npy, or Parquet"
_PICTURES = "A folder of pictures in files of their own needs a plan with a table [transform]."


class Source(Protocol):
    """A place that holds images, or latents in place of them, and maybe columns with one entry for each."""

    @property
    def name(self) -> Name:
        """What it holds."""
        ...

    @property
    def row(self) -> tuple[np.dtype[np.generic], tuple[int, ...]]:
        """The type and the shape of one, as they are stored."""
        ...

    def __len__(self) -> int: ...

    def in_place(self) -> Stored | None:
        """Return the array where it can be read in place."""
        ...

    def unpacked(self) -> Iterator[NDArray[np.generic]]:
        """Yield all rows in blocks."""
        ...

    @property
    def columns(self) -> frozenset[str]:
        """The names of what it holds."""
        ...

    def column(self, name: str, max_bytes: int) -> NDArray[np.generic]:
        """Return one entry for each row, each of at most so many bytes."""
        ...

    def column_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a column that is there; its header alone is read."""
        ...

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the rows, in order."""
        ...

    @property
    def recipe(self) -> str:
        """Names what, besides the files, the rows depend on."""
        ...


def open_arrays(path: Path) -> Source:
    """Open a file or a folder; headers alone are read.

    Args:
        path: an npz with `images`; an npy of images; an idx file of images, maybe with its labels beside it; a
            folder with `images.npy`, or parts `images-*.npy`, beside which lie columns such as `patients.npy`; a
            Parquet file or a folder of them, with a column `image`. Unless it is idx, in place of
            images there may be `latents` or `latent`.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: none of these, headers that are damaged, or no image.
    """
    source = _open(path)
    if not len(source):
        raise DataError("images", expected="at least one", got="an empty array")
    return source


def latents_at(path: Path) -> Source | None:
    """Return the latents at a path; None where there is anything else, or nothing."""
    try:
        source = _open(path)
    except (DataError, MissingFileError):
        return None
    return source if source.name == "latents" and len(source) else None


def open_images(source: Source, spec: DataSpec, folder: Path | None) -> Images:
    """Return the images of a source in the plan's shape and range; they are looked at when they are read.

    Args:
        source: from `open_arrays`.
        spec: the plan's shape and range.
        folder: where what cannot be read in place is unpacked; what was unpacked there from other files is removed.
            None reads all of it into memory.

    Raises:
        DataError: another shape or type than the plan asks for, a damaged file, or more than memory holds.
        DiskError: too little room to unpack.
    """
    dtype, shape = source.row
    check_row(dtype, shape, spec)
    return _opened(source, partial(fit, spec=spec), spec.shape, folder)


def open_latents(source: Source, shape: tuple[int, ...], folder: Path | None) -> Images:
    """Return the latents of a source, as they are stored, in float32; see `open_images`.

    Args:
        source: from `open_arrays`; it holds latents.
        shape: of one.
        folder: as for images.
    """
    dtype, found = source.row
    if found != shape or dtype.kind != "f":
        expected = f"floating point {shape}, as this plan's autoencoder gives them"
        raise DataError("latents", expected=expected, got=f"{dtype} {found}")
    return _opened(source, as_floats, shape, folder)


def read_images(path: Path, spec: DataSpec) -> "Tensor":
    """Read all images into memory; see `open_arrays` and `open_images`.

    Returns:
        Shape (N, C, H, W) or (N, C, D, H, W), float32, in the plan's range.
    """
    source = open_arrays(path)
    if source.name != "images":
        raise DataError("data", expected="images", got="latents")
    images = open_images(source, spec, None)
    return images[:]


def _opened(source: Source, convert: Convert, shape: tuple[int, ...], folder: Path | None) -> Images:
    array = source.in_place()
    if folder is None:
        import torch

        memory, needed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 4 * len(source) * prod(shape)
        if needed > memory:
            raise DataError("images", expected=f"at most {memory} bytes of memory", got=f"{needed} bytes")
        found = torch.empty(len(source), *shape)
        parts = _parts(source) if array is None else blocks(StoredImages(array, convert, shape))
        for start, part in parts:
            rows = range(start, start + len(part))
            found[rows.start : rows.stop] = part if isinstance(part, torch.Tensor) else convert(part, rows)
        return found
    return StoredImages(unpack(source, folder) if array is None else array, convert, shape)


def unpack(source: Source, folder: Path) -> FileArray:
    """Unpack a source into a file of `folder`, once; one that was unpacked from anything else is removed.

    Whoever unpacks into the same folder meanwhile waits.

    Raises:
        DataError: a damaged file, or fewer rows than it says.
        DiskError: too little room.
    """
    dtype, shape = source.row
    with unpacked_path(folder, [source.name, dtype.str, shape, source.recipe, stamps(source.files)]) as path:
        if not path.exists():
            require_room({folder: len(source) * prod(shape) * dtype.itemsize}, "the unpacked images")
            with replacing(path, mode=0o600) as handle:
                write_rows(handle, (len(source), *shape), dtype, source.unpacked())
        return open_npy(path)


def _parts(source: Source) -> Iterator[tuple[int, NDArray[np.generic]]]:
    start = 0
    for part in source.unpacked():
        yield start, part
        start += len(part)
    if start != len(source):
        raise DataError("rows", expected=f"{len(source)}, as announced", got=f"{start}")


class _Npz:
    """One npz."""

    recipe = ""

    def __init__(self, path: Path) -> None:
        self._path = path
        names = npz_names(path)
        self.name: Name = "latents" if "latents" in names and "images" not in names else "images"
        self._header = npz_header(path, self.name)
        _require_rows(self._header.shape)
        self.row, self.files = (self._header.dtype, self._header.shape[1:]), (path,)

    def __len__(self) -> int:
        return self._header.shape[0]

    def in_place(self) -> Stored | None:
        return npz_array(self._path, self.name)

    def unpacked(self) -> Iterator[NDArray[np.generic]]:
        return npz_blocks(self._path, self.name)

    @property
    def columns(self) -> frozenset[str]:
        return npz_names(self._path)

    def column(self, name: str, max_bytes: int) -> NDArray[np.generic]:
        return read_array(self._path, name, max_bytes=_MAX_COLUMN_HEADER_BYTES + len(self) * max_bytes)

    def column_shape(self, name: str) -> tuple[int, ...]:
        return npz_header(self._path, name).shape


class _Npy:
    """One npy, or the npys of a folder."""

    recipe = ""

    def __init__(self, name: Name, files: tuple[Path, ...], folder: Path | None) -> None:
        self.name, self.files, self._folder = name, files, folder
        for path in files:
            _require_rows(npy_header(path).shape)
        self._array = Joined(tuple(open_npy(path) for path in files))
        self.row = self._array.dtype, self._array.shape[1:]

    def __len__(self) -> int:
        return self._array.shape[0]

    def in_place(self) -> Stored | None:
        return self._array.parts[0] if len(self._array.parts) == 1 else self._array

    def unpacked(self) -> Iterator[NDArray[np.generic]]:
        size = rows_of(BLOCK_BYTES, self.row[1])
        for start in range(0, len(self), size):
            yield self._array.read(range(start, min(start + size, len(self))))

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(path.stem for path in self._folder.glob("*.npy")) if self._folder else frozenset()

    def _column_path(self, name: str) -> Path:
        path = self._folder / f"{name}.npy" if self._folder else None
        if path is None or not path.is_file():
            place = "in the folder of the images" if path else "beside the images, in a folder with images.npy"
            raise DataError("data", expected=f"{name}.npy {place}", got="no such file")
        return path

    def column(self, name: str, max_bytes: int) -> NDArray[np.generic]:
        path = self._column_path(name)
        header = npy_header(path)
        if header.num_bytes > len(self) * max_bytes:
            most = f"at most {len(self) * max_bytes} bytes"
            raise DataError(name, expected=most, got=f"{header.num_bytes}")
        return np.load(path, allow_pickle=False)  # type: ignore[no-any-return]

    def column_shape(self, name: str) -> tuple[int, ...]:
        return npy_header(self._column_path(name)).shape


class _Parquet:
    """One Parquet file, or several."""

    recipe = ""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self._table, self.files = ParquetTable(files), files
        names = self._table.names
        self.name: Name = "latents" if "latent" in names and "image" not in names else "images"
        if _OF_A_ROW[self.name] not in names:
            got = f"{len(names)} columns with other names"
            raise DataError("data file", expected="a column called image", got=got)
        self.row = self._table.row_type(_OF_A_ROW[self.name])

    def __len__(self) -> int:
        return self._table.num_rows

    def in_place(self) -> Stored | None:
        return None

    def unpacked(self) -> Iterator[NDArray[np.generic]]:
        return self._table.pictures(_OF_A_ROW[self.name])

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(self._table.names)

    def column(self, name: str, max_bytes: int) -> NDArray[np.generic]:
        cell = _OF_A_ROW.get(name, name)
        if cell not in self._table.names:
            got = f"{len(self._table.names)} columns with other names"
            raise DataError("data file", expected=f"a column called {cell}", got=got)
        return self._table.cells(cell, max_bytes)

    def column_shape(self, name: str) -> tuple[int, ...]:
        return (len(self),)  # as every column of a table


def _open(path: Path) -> Source:
    if path.is_dir():
        names: tuple[Name, ...] = ("images", "latents")
        for name in names:
            files = sorted(path.glob(f"{name}.npy")) or sorted(path.glob(f"{name}-*.npy"))
            if files:
                return _Npy(name, tuple(files), path)
        if tables := sorted(path.glob("*.parquet")):
            return _Parquet(tuple(tables))
        expected = "images.npy, images-*.npy or *.parquet"
        raise DataError("data folder", expected=expected, got="no such file", remedy=_PICTURES)
    if path.suffix == ".parquet":
        return _Parquet((path,))
    if path.suffix == ".npy":
        return _Npy("latents" if path.stem == "latents" else "images", (path,), None)
    if not path.is_file():
        raise MissingFileError(str(path), expected=KINDS, got="nothing there")
    return IdxImages(path) if is_idx(path) else _Npz(path)


def _require_rows(shape: tuple[int, ...]) -> None:
    if not shape:
        raise DataError("data file", expected="an array of images", got="a single number")
