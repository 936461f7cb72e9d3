"""Arrays in files of numpy, npy and npz: their headers are bounded and checked before anything is allocated."""

from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import IO
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import numpy as np
from numpy.typing import NDArray

from ddm.errors import DataError
from ddm.images.rows import BLOCK_BYTES, FileArray, rows_of
from ddm.io.files import decoding, require_file

_KIND = "an npz without pickled objects"
MAX_HEADER_BYTES = 1 << 14
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_LOCAL_HEADER_BYTES, _LOCAL_MAGIC = 30, b"PK\x03\x04"


@dataclass(frozen=True)
class Header:
    """What an npy says of its array.

    Attributes:
        dtype: of its values; never of objects.
        shape: of the array.
        by_columns: whether it is stored in Fortran order.
        offset: where the values begin, in bytes after the magic.
    """

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    by_columns: bool
    offset: int

    @property
    def num_bytes(self) -> int:
        """Of the values."""
        return prod(self.shape) * self.dtype.itemsize


def parse_header(head: bytes) -> Header:
    """Parse the header of an npy from its first `MAX_HEADER_BYTES`.

    Raises:
        ValueError: no npy, one of pickled objects, one whose header is too long, or sides that are no sizes.
    """
    handle = BytesIO(head)
    version = np.lib.format.read_magic(handle)
    if version not in _HEADERS:
        raise ValueError("another version")
    shape, by_columns, dtype = _HEADERS[version](handle)
    if dtype.hasobject or dtype.kind == "V" or any(side < 0 for side in shape):
        raise ValueError("no array of numbers or text")
    return Header(np.dtype(dtype), tuple(shape), by_columns and len(shape) > 1, handle.tell())


def npy_header(path: Path) -> Header:
    """Read the header of an npy.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not an npy, or one of pickled objects.
    """
    require_file(path, "an npy")
    try:
        with path.open("rb") as handle:
            return parse_header(handle.read(MAX_HEADER_BYTES))
    except ValueError as error:  # numpy's own are of this kind
        raise _no_npy(error) from error


def open_npy(path: Path) -> FileArray:
    """Open an npy to be read in place.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not an npy, one of pickled objects, one in Fortran order, or a file cut short.
    """
    header = npy_header(path)
    if header.by_columns:
        remedy = "Save it in C order: np.save(path, np.ascontiguousarray(array))."
        raise DataError("data file", expected="an npy in C order", got="one in Fortran order", remedy=remedy)
    return FileArray(path, header.dtype, header.shape, header.offset)


def npz_names(path: Path) -> frozenset[str]:
    """Return the names of what an npz holds.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not an npz.
    """
    require_file(path, "an npz of images")
    with decoding(_KIND), ZipFile(path) as archive:
        return frozenset(_name(entry) for entry in archive.infolist())


def npz_header(path: Path, name: str) -> Header:
    """Read the header of one array of an npz.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not an npz, no such array, one of pickled objects, or one that says it is longer than it is.
    """
    require_file(path, "an npz of images")
    with decoding(_KIND), ZipFile(path) as archive:
        entry = _entry(archive, name)
        with archive.open(entry) as handle:
            header = parse_header(handle.read(MAX_HEADER_BYTES))
        if header.offset + header.num_bytes > entry.file_size:
            raise ValueError("an array longer than its entry")
        return header


def npz_array(path: Path, name: str) -> FileArray | None:
    """Open one array of an npz to be read in place; None where it is compressed or in Fortran order.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not an npz, no such array, or one of pickled objects.
    """
    header = npz_header(path, name)
    with decoding(_KIND), ZipFile(path) as archive:
        entry = _entry(archive, name)
        if entry.compress_type != ZIP_STORED or header.by_columns:
            return None
        with path.open("rb") as file:  # the entry's local header, whose length the directory does not tell
            file.seek(entry.header_offset)
            local = file.read(_LOCAL_HEADER_BYTES)
        if len(local) < _LOCAL_HEADER_BYTES or not local.startswith(_LOCAL_MAGIC):
            raise ValueError("no entry where the directory says")
        lengths = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
        begin = entry.header_offset + _LOCAL_HEADER_BYTES + lengths
        return FileArray(path, header.dtype, header.shape, begin + header.offset)


def npz_blocks(path: Path, name: str) -> Iterator[NDArray[np.generic]]:
    """Yield one array of an npz in blocks of rows, unpacked as they are asked for.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not an npz, no such array, one of pickled objects, or a damaged one.
    """
    header = npz_header(path, name)
    if header.by_columns:
        yield np.ascontiguousarray(_whole(path, name))
        return
    with decoding(_KIND), ZipFile(path) as archive, archive.open(_entry(archive, name)) as handle:
        head = handle.read(MAX_HEADER_BYTES)
        num_rows, row_bytes = header.shape[0], prod(header.shape[1:]) * header.dtype.itemsize
        size, stream = rows_of(BLOCK_BYTES, header.shape[1:]), _After(head[header.offset :], handle)
        for start in range(0, num_rows, size):
            num = min(size, num_rows - start)
            block = np.frombuffer(stream.read(num * row_bytes), header.dtype)
            yield block.reshape(num, *header.shape[1:])


def read_array(path: Path, name: str, *, max_bytes: int) -> np.ndarray:
    """Read one array of an npz; its size is known before it is unpacked.

    Args:
        path: the file.
        name: of the array.
        max_bytes: most bytes that it may have, unpacked, with its header.

    Raises:
        DataError: not an npz, no such array, one that is too large, or one of pickled objects.
    """
    with decoding(_KIND), ZipFile(path) as archive:
        size = _entry(archive, name).file_size
        if size > max_bytes:
            raise DataError(name, expected=f"at most {max_bytes} bytes, unpacked", got=f"{size}")
    return _whole(path, name)


def _whole(path: Path, name: str) -> np.ndarray:
    with decoding(_KIND), path.open("rb") as handle, np.load(handle, allow_pickle=False) as archive:
        return np.asarray(archive[name])


class _After:
    """The rest of a stream, after bytes that were read from it already."""

    def __init__(self, head: bytes, handle: IO[bytes]) -> None:
        self._head, self._handle = head, handle

    def read(self, num: int) -> bytes:
        """Read exactly so many bytes."""
        begun, self._head = self._head[:num], self._head[num:]
        found = begun + self._handle.read(num - len(begun)) if len(begun) < num else begun
        if len(found) != num:
            raise ValueError("an entry that ends early")
        return found


def _entry(archive: ZipFile, name: str) -> ZipInfo:
    found = [entry for entry in archive.infolist() if _name(entry) == name]
    if not found:
        got = f"{len(archive.infolist())} arrays with other names"
        raise DataError("data file", expected=f"an array called {name}", got=got)
    return found[-1]


def _name(entry: ZipInfo) -> str:
    return entry.filename.removesuffix(".npy")


def _no_npy(error: Exception) -> DataError:
    return DataError(
        "data file", expected="an npy without pickled objects", got=f"no such file ({type(error).__name__})"
    )
