"""Where images may come from, npy, npz, idx or Parquet, to be read as images of a plan's shape and range.

A source is an opened file or folder: rows of one type and shape, and columns with one entry for each. An
uncompressed array in C order is read in place. Anything else is unpacked once, into an npy of its own type in a folder
that the caller names, and read there; that file is named by what it was made of. `ddm.images.arrays` reads the same
sources row by row, as pictures.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ddm.errors import DataError, MissingFileError
from ddm.images.array_source import NEEDS_TRANSFORM, ArraySource, Name, ParquetSource
from ddm.images.column_names import PartNames, npz_parts, split_of_shard
from ddm.images.fit import as_floats, check_row, fit
from ddm.images.idx import idx_array, is_idx, labels_beside, split_of_idx
from ddm.images.npy_folder import npy_folder
from ddm.images.npz import EncodedArray, npy_array, npz_array, npz_names, open_npy
from ddm.images.rows import Convert, FileArray, Images, StoredArray, StoredImages, write_rows
from ddm.images.types import Shape, Values, ValueType
from ddm.images.unpacked import stamps, unpacked_path
from ddm.io.files import replacing
from ddm.io.space import require_free_space
from ddm.protocol.data import DataSpec
from ddm.system.memory import machine_bytes

if TYPE_CHECKING:
    from torch import Tensor

ARRAYS = (".npz", ".npy", ".parquet")
"""How the names of files of many images end."""
KINDS = "an npz, an npy, an idx file, a folder with images.npy, or Parquet"
_PICTURES = "A folder of pictures in files of their own needs a plan with a table [transform]."


class ImageArrays(Protocol):
    """A place that holds images, or latents in place of them, and maybe columns with one entry for each."""

    @property
    def name(self) -> Name:
        """What it holds."""
        ...

    @property
    def row(self) -> tuple[ValueType, Shape]:
        """The type and the shape of one, as they are stored."""
        ...

    def __len__(self) -> int: ...

    def in_place(self) -> StoredArray | None:
        """Return the array where it can be read in place."""
        ...

    def unpacked(self) -> Iterator[Values]:
        """Yield all rows in blocks."""
        ...

    @property
    def columns(self) -> frozenset[str]:
        """The names of what it holds; a column in the singular has both names."""
        ...

    def column(self, name: str, max_bytes: int) -> Values:
        """Return one entry for each row, each of at most this many bytes."""
        ...

    def column_shape(self, name: str) -> Shape:
        """Return the shape of a column that is there; its header alone is read."""
        ...

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the rows, in order."""
        ...

    @property
    def recipe(self) -> str:
        """The name of what the rows depend on besides the files."""
        ...


def open_arrays(path: Path) -> ImageArrays:
    """Open a file or a folder; headers alone are read.

    Args:
        path: an npz with `images`; an npy of images; an idx file of images, maybe with its labels beside it; a
            folder with `images.npy`, or parts `images-*.npy`, beside which lie columns such as `patients.npy`; a
            Parquet file or a folder of them, with a column `image`. Unless it is idx, in place of
            images there may be `latents` or `latent`.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: none of these, headers that are damaged, no image, or several parts such as train and test.
    """
    source = _whole(open_parts(path))
    if not len(source):
        raise DataError(
            "images",
            expected="at least one",
            got="an empty array",
            remedy="Give at least one image.",
        )
    return source


def open_parts(path: Path) -> Mapping[str | None, ImageArrays]:
    """Open a file or a folder whose images may be in parts, such as train and test; see `open_arrays`.

    Returns:
        Each part by its name, in the words of the file; None names what belongs to no part in particular.
    """
    if path.is_dir():
        return _open_folder(path)
    if path.suffix == ".parquet":
        return _open_parquet((path,))
    if path.suffix == ".npy":
        name: Name = "images"
        if path.stem == "latents":
            name = "latents"
        return {None: ArraySource(name, (npy_array(path),), {}, (path,))}
    if not path.is_file():
        raise MissingFileError(str(path), expected=KINDS, got="nothing there")
    if is_idx(path):
        return _open_idx(path)
    return _open_npz(path)


def _whole(parts: Mapping[str | None, ImageArrays]) -> ImageArrays:
    """Return the only part of a data set: parts such as train and test are never one array."""
    if len(parts) > 1:
        raise DataError(
            "images",
            expected="one array",
            got=f"{len(parts)} parts, such as train and test",
            remedy=NEEDS_TRANSFORM,
        )
    (source,) = parts.values()
    return source


def open_images(
    source: ImageArrays,
    spec: DataSpec,
    folder: Path | None,
) -> Images:
    """Return the images of a source in the plan's shape and range; they are looked at when they are read.

    Args:
        source: from `open_arrays`.
        spec: the plan's shape and range.
        folder: where what cannot be read in place is unpacked; what was unpacked there from other files is removed.
            None reads all of it into memory.

    Raises:
        DataError: another shape or type than the plan requires, a damaged file, or more than memory holds.
        DiskError: too little room to unpack.
    """
    dtype, shape = source.row
    check_row(dtype, shape, spec)
    return _opened(source, partial(fit, spec=spec), spec.shape, folder)


def open_latents(
    source: ImageArrays,
    shape: Shape,
    folder: Path | None,
) -> Images:
    """Return the latents of a source, as they are stored, in float32; see `open_images`.

    Args:
        source: from `open_arrays`; it holds latents.
        shape: the shape of one.
        folder: as for images.
    """
    dtype, row_shape = source.row
    if row_shape != shape or dtype.kind != "f":
        raise DataError(
            "latents",
            expected=f"floating point {shape}, as this plan's autoencoder gives them",
            got=f"{dtype} {row_shape}",
        )
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


def _opened(
    source: ImageArrays,
    convert: Convert,
    shape: Shape,
    folder: Path | None,
) -> Images:
    if folder is None:
        return _read_whole(source, convert, shape)
    array = source.in_place()
    if array is None:
        array = unpack(source, folder)
    return StoredImages(array, convert, shape)


def _read_whole(
    source: ImageArrays,
    convert: Convert,
    shape: Shape,
) -> "Tensor":
    import torch

    memory_bytes = machine_bytes()
    num_bytes = 4 * len(source) * prod(shape)
    if num_bytes > memory_bytes:
        raise DataError(
            "images",
            expected=f"at most {memory_bytes} bytes of memory",
            got=f"{num_bytes} bytes",
            remedy="Give fewer or smaller images at a time.",
        )
    images = torch.empty(len(source), *shape)
    start = 0
    for block in source.unpacked():
        rows = range(start, start + len(block))
        images[rows.start : rows.stop] = convert(block, rows)
        start = rows.stop
    # Rows that did not come would be whatever was in this memory before.
    if start != len(source):
        raise DataError("rows", expected=f"{len(source)}, as announced", got=f"{start}")
    return images


def unpack(source: ImageArrays, folder: Path) -> FileArray:
    """Unpack a source into a file of `folder`, once; one that was unpacked from anything else is removed.

    Other processes that unpack into the same folder wait.

    Raises:
        DataError: a damaged file, or fewer rows than it says.
        DiskError: too little room.
    """
    num_rows = len(source)
    dtype, shape = source.row
    # What the unpacked bytes depend on: another file, or the same one changed, is unpacked again.
    origin = [source.name, dtype.str, shape, source.recipe, stamps(source.files)]
    with unpacked_path(folder, origin) as path:
        if not path.exists():
            row_bytes = prod(shape) * dtype.itemsize
            require_free_space({folder: num_rows * row_bytes}, "the unpacked images")
            with replacing(path, mode=0o600) as handle:
                write_rows(handle, (num_rows, *shape), dtype, source.unpacked())
        return open_npy(path)


def _open_folder(path: Path) -> Mapping[str | None, ImageArrays]:
    names = os.listdir(path)  # noqa: PTH208 - names alone
    kinds: tuple[Name, ...] = ("images", "latents")
    for name in kinds:
        folder = npy_folder(names, name)
        if folder is None:
            continue
        files = tuple(path / part for part in folder.parts)
        arrays = [npy_array(file) for file in files]
        columns = {}
        for column in folder.columns:
            columns[column] = partial(_open_column_files, path, folder.column_files, column)
        return {None: ArraySource(name, arrays, columns, files)}
    tables = sorted(path.glob("*.parquet"))
    if tables:
        return _open_parquet(tuple(tables))
    raise DataError(
        "data folder",
        expected="images.npy, images-*.npy or *.parquet",
        got="no such file",
        remedy=_PICTURES,
    )


def _open_column_files(
    path: Path,
    column_files: Callable[[str], tuple[str, ...]],
    column: str,
) -> Sequence[EncodedArray]:
    return [npy_array(path / file) for file in column_files(column)]


def _open_parquet(files: tuple[Path, ...]) -> Mapping[str | None, ImageArrays]:
    """Open Parquet files, each of which may state its split by its name."""
    siblings = [path.name for path in files[0].parent.glob("*.parquet")]
    files_of_split: dict[str | None, list[Path]] = {}
    for path in files:
        split = split_of_shard(path.name, siblings)
        files_of_split.setdefault(split, []).append(path)
    parts: dict[str | None, ImageArrays] = {}
    for split, paths in files_of_split.items():
        parts[split] = ParquetSource(tuple(paths))
    return parts


def _open_idx(path: Path) -> Mapping[str | None, ImageArrays]:
    beside = labels_beside(path)
    # A name without `images-idx3` gives the same path again.
    columns = {}
    if beside != path and beside.is_file():
        columns["labels"] = partial(_open_idx_labels, beside)
    source = ArraySource("images", (idx_array(path),), columns, (path,))
    return {split_of_idx(path.name): source}


def _open_idx_labels(path: Path) -> Sequence[EncodedArray]:
    return (idx_array(path),)


def _open_npz(path: Path) -> Mapping[str | None, ImageArrays]:
    names = npz_names(path)
    if "latents" in names and "images" not in names:
        columns = {name: name for name in names}
        only_part = PartNames(None, "latents", columns)
        return {None: _npz_source(path, "latents", only_part)}
    parts: dict[str | None, ImageArrays] = {}
    for part in npz_parts(names):
        parts[part.split] = _npz_source(path, "images", part)
    return parts


def _npz_source(
    path: Path,
    name: Name,
    part: PartNames,
) -> ImageArrays:
    columns = {}
    for column, array in part.columns.items():
        columns[column] = partial(_open_npz_column, path, array)
    images = npz_array(path, part.images)
    return ArraySource(name, (images,), columns, (path,))


def _open_npz_column(path: Path, array: str) -> Sequence[EncodedArray]:
    return (npz_array(path, array),)
