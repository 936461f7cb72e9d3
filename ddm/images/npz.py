"""Arrays in files, such as npy and npz: their headers are bounded and checked before anything is allocated."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from math import prod
from pathlib import Path
from typing import IO
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import numpy as np

from ddm.errors import DataError
from ddm.images.reasons import ImageError, Reason
from ddm.images.rows import BLOCK_BYTES, FileArray, Rows, StoredArray, rows_of
from ddm.images.types import Shape, Values, ValueType
from ddm.io.files import decoding, require_file

_NPY = "an npy without pickled objects"
_NPZ = "an npz without pickled objects"
_ANY = "an npy, npz or idx file"
MAX_HEADER_BYTES = 1 << 14
# Of a compressed array in Fortran order, no row of which is complete before the end.
_MAX_WHOLE_BYTES = 1 << 30
_FORTRAN_BLOCK_BYTES = 1 << 26
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_LOCAL_HEADER_BYTES = 30
_LOCAL_MAGIC = b"PK\x03\x04"


@dataclass(frozen=True)
class Header:
    """What an npy says about its array.

    Attributes:
        dtype: the dtype of its values; never of objects.
        shape: the shape of the array.
        by_columns: whether it is stored in Fortran order.
        offset: where the values begin, in bytes from the beginning of the npy.
    """

    dtype: ValueType
    shape: Shape
    by_columns: bool
    offset: int

    @property
    def num_bytes(self) -> int:
        """The bytes of the values."""
        return prod(self.shape) * self.dtype.itemsize


def parse_header(head: bytes) -> Header:
    """Parse the header of an npy from its first `MAX_HEADER_BYTES`.

    Raises:
        ImageError: pickled objects, or records of several fields.
        ValueError: no npy, one whose header is too long, or sides that are not sizes.
    """
    handle = BytesIO(head)
    version = np.lib.format.read_magic(handle)
    if version not in _HEADERS:
        raise ValueError("another version")
    shape, by_columns, dtype = _HEADERS[version](handle)
    # Unpickling runs whatever the file says.
    if dtype.hasobject:
        raise ImageError(
            Reason.UNSUPPORTED, "an array of pickled Python objects: save it as numbers or text"
        )
    if dtype.kind == "V":
        raise ImageError(
            Reason.UNSUPPORTED, "an array of records: save each field as an array of its own"
        )
    if dtype.itemsize < 1 or any(side < 0 for side in shape):
        raise ValueError("no array of numbers or text")
    return Header(
        dtype=np.dtype(dtype),
        shape=tuple(int(side) for side in shape),
        by_columns=by_columns and len(shape) > 1,
        offset=handle.tell(),
    )


@dataclass(frozen=True)
class EncodedArray:
    """An array in an npy, an npz or an idx file, of which the header alone was read.

    Attributes:
        path: the file.
        header: the header of the array.
        open_values: opens a stream of the values, unpacked.
        offset: where the values begin in the file; None where they are compressed.
    """

    path: Path
    header: Header
    open_values: Callable[[], AbstractContextManager[IO[bytes]]]
    offset: int | None = None

    @property
    def shape(self) -> Shape:
        """The shape of the array."""
        return self.header.shape

    @property
    def dtype(self) -> ValueType:
        """The type of its values, in this machine's byte order."""
        return self.header.dtype.newbyteorder("=")

    def in_place(self) -> StoredArray | None:
        """Return the array to be read by rows; None where it is compressed or in Fortran order."""
        if self.offset is None or self.header.by_columns:
            return None
        header = self.header
        stored = FileArray(self.path, header.dtype, header.shape, self.offset)
        if header.dtype.isnative:
            return stored
        return NativeOrderArray(stored)

    def blocks(self) -> Iterator[Values]:
        """Yield the rows in blocks, in memory that does not grow with their number.

        Raises:
            DataError: a damaged file.
            ImageError: compressed and in Fortran order, and too large for memory.
        """
        if not self.header.by_columns:
            blocks = self._in_order()
        elif self.offset is None:
            blocks = self._compressed_by_columns()
        else:
            blocks = self._stored_by_columns(self.offset)
        for block in blocks:
            yield block.astype(self.dtype, copy=False)

    def whole(self) -> Values:
        """Return all of it; the caller has looked at its size."""
        blocks = list(self.blocks())
        if not blocks:
            return np.empty(self.shape, self.dtype)
        if len(blocks) == 1:
            return blocks[0]
        return np.concatenate(blocks)

    def _in_order(self) -> Iterator[Values]:
        dtype = self.header.dtype
        row_shape = self.shape[1:]
        row_bytes = prod(row_shape) * dtype.itemsize
        # Those of an npz go through the archive also where they are stored: it knows their checksum.
        with decoding(_ANY), self.open_values() as handle:
            for rows in self._block_rows(BLOCK_BYTES):
                num_rows = len(rows)
                data = _read(handle, num_rows * row_bytes)
                values = np.frombuffer(data, dtype)
                yield values.reshape(num_rows, *row_shape)
            # At its end the archive also compares the checksum of the entry.
            if handle.read(1):
                raise ValueError("bytes after the last row")

    def _compressed_by_columns(self) -> Iterator[Values]:
        if self.header.num_bytes > _MAX_WHOLE_BYTES:
            detail = f"compressed in Fortran order, and more than {_MAX_WHOLE_BYTES} bytes: save it in C order"
            raise ImageError(Reason.TOO_LARGE, detail)
        with decoding(_ANY), self.open_values() as handle:
            data = _read(handle, self.header.num_bytes)
        values = np.frombuffer(data, self.header.dtype)
        # In Fortran order the first axis changes fastest: read in C order, this is the array with its axes reversed.
        reversed_shape = self.shape[::-1]
        whole = values.reshape(reversed_shape).T
        for rows in self._block_rows(BLOCK_BYTES):
            block = whole[rows.start : rows.stop]
            yield np.ascontiguousarray(block)

    def _stored_by_columns(self, offset: int) -> Iterator[Values]:
        """Read rows of an array whose first axis changes fastest: the same place of all rows, then the next place."""
        dtype = self.header.dtype
        num_rows, *row_shape = self.shape
        num_places = prod(row_shape)
        num_values = num_places * num_rows
        values = FileArray(self.path, dtype, (num_values,), offset)
        # As many rows as possible at once: each place of an image costs a read.
        for rows in self._block_rows(_FORTRAN_BLOCK_BYTES):
            block = np.empty((num_places, len(rows)), dtype)
            for place in range(num_places):
                start = place * num_rows + rows.start
                end = start + len(rows)
                block[place] = values.read(range(start, end))
            by_reversed_axes = block.reshape(*reversed(row_shape), len(rows))
            yield np.ascontiguousarray(by_reversed_axes.T)

    def _block_rows(self, block_bytes: int) -> Iterator[range]:
        """Yield the numbers of the rows of each block."""
        num_rows, *row_shape = self.shape
        size = rows_of(block_bytes, tuple(row_shape), self.header.dtype.itemsize)
        for start in range(0, num_rows, size):
            end = min(start + size, num_rows)
            yield range(start, end)


@dataclass(frozen=True)
class NativeOrderArray:
    """An array in the other byte order, read in this machine's."""

    stored: StoredArray

    @property
    def shape(self) -> Shape:
        """The shape of the array."""
        return self.stored.shape

    @property
    def dtype(self) -> ValueType:
        """The type of its values, in this machine's byte order."""
        return self.stored.dtype.newbyteorder("=")

    def read(self, rows: Rows) -> Values:
        """Return rows; see `ddm.images.rows.StoredArray`."""
        return self.stored.read(rows).astype(self.dtype)


def npy_header(path: Path) -> Header:
    """Read the header of an npy.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not an npy, or one of pickled objects.
    """
    require_file(path, "an npy")
    with decoding(_NPY), path.open("rb") as handle:
        head = handle.read(MAX_HEADER_BYTES)
        return parse_header(head)


def npy_array(path: Path) -> EncodedArray:
    """Open an npy.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not an npy, or one with fewer or more bytes than its header says.
    """
    header = npy_header(path)
    expected = header.offset + header.num_bytes
    num_bytes = path.stat().st_size
    # The header alone decides how much memory is allocated: it must agree with the file first.
    if num_bytes < expected:
        raise ImageError(Reason.TRUNCATED, "fewer bytes than the header of the npy says")
    if num_bytes > expected:
        raise ImageError(Reason.DAMAGED, "bytes after the array of an npy, such as a second array")
    open_values = partial(_open_npy_values, path, header.offset)
    return EncodedArray(path, header, open_values, header.offset)


@contextmanager
def _open_npy_values(path: Path, offset: int) -> Iterator[IO[bytes]]:
    with path.open("rb") as handle:
        handle.seek(offset)
        yield handle


def open_npy(path: Path) -> FileArray:
    """Open an npy in C order and this machine's byte order, as this project writes them, to be read in place.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not such an npy, or a file cut short.
    """
    header = npy_header(path)
    if header.by_columns or not header.dtype.isnative:
        raise DataError(
            "data file",
            expected="an npy in C order and native byte order",
            got="another order",
            remedy="Save it with numpy.save(FILE, numpy.ascontiguousarray(images)).",
        )
    return FileArray(path, header.dtype, header.shape, header.offset)


def npz_names(path: Path) -> frozenset[str]:
    """Return the names of what an npz holds.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not an npz.
    """
    require_file(path, "an npz of images")
    with decoding(_NPZ), ZipFile(path) as archive:
        return frozenset(_name(entry) for entry in archive.infolist())


def npz_array(path: Path, name: str) -> EncodedArray:
    """Open one array of an npz.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not an npz, no such array, one of pickled objects, or one that is not as long as it says.
    """
    require_file(path, "an npz of images")
    with decoding(_NPZ), ZipFile(path) as archive:
        entry = _entry(archive, name)
        with archive.open(entry) as handle:
            head = handle.read(MAX_HEADER_BYTES)
        header = parse_header(head)
        # Before anything is unpacked: a small entry could announce an array of any size.
        if header.offset + header.num_bytes != entry.file_size:
            raise ValueError("an array longer or shorter than its entry")
        offset = None
        if entry.compress_type == ZIP_STORED:
            offset = _content_offset(path, entry) + header.offset
    open_values = partial(_open_npz_values, path, name, header.offset)
    return EncodedArray(path, header, open_values, offset)


@contextmanager
def _open_npz_values(
    path: Path,
    name: str,
    offset: int,
) -> Iterator[IO[bytes]]:
    with ZipFile(path) as archive, archive.open(_entry(archive, name)) as handle:
        _read(handle, offset)
        yield handle


def _content_offset(path: Path, entry: ZipInfo) -> int:
    """Return where an entry's content begins, which only its local header states."""
    with path.open("rb") as file:
        file.seek(entry.header_offset)
        local = file.read(_LOCAL_HEADER_BYTES)
    if len(local) < _LOCAL_HEADER_BYTES or not local.startswith(_LOCAL_MAGIC):
        raise ValueError("no entry where the directory says")
    # Lengths of the name and of the extra field (APPNOTE 4.3.7); those in the central directory may be others.
    name_bytes = int.from_bytes(local[26:28], "little")
    extra_bytes = int.from_bytes(local[28:30], "little")
    return entry.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes


def read_array(
    path: Path,
    name: str,
    *,
    max_bytes: int,
) -> np.ndarray:
    """Read one array of an npz; its size is known before it is unpacked.

    Args:
        path: the file.
        name: the name of the array.
        max_bytes: most bytes that it may have, unpacked, with its header.

    Raises:
        DataError: not an npz, no such array, one that is too large, or one of pickled objects.
    """
    array = npz_array(path, name)
    num_bytes = array.header.offset + array.header.num_bytes
    if num_bytes > max_bytes:
        raise DataError(
            name,
            expected=f"at most {max_bytes} bytes, unpacked",
            got=f"{num_bytes}",
            remedy="Give a smaller array.",
        )
    if array.shape:
        return array.whole()
    with decoding(_NPZ), array.open_values() as handle:
        data = _read(handle, array.header.num_bytes)
    single_value = np.frombuffer(data, array.header.dtype)
    return single_value.reshape(())


def _read(handle: IO[bytes], num_bytes: int) -> bytes:
    data = handle.read(num_bytes)
    if len(data) != num_bytes:
        raise ValueError("an entry that ends early")
    return data


def _entry(archive: ZipFile, name: str) -> ZipInfo:
    all_entries = archive.infolist()
    entries = [entry for entry in all_entries if _name(entry) == name]
    if not entries:
        got = f"{len(all_entries)} arrays with other names"
        raise DataError(
            "data file",
            expected=f"an array called {name}",
            got=got,
            remedy="Save the array under this name, such as by numpy.savez(FILE, images=images).",
        )
    if len(entries) > 1:
        raise ImageError(Reason.AMBIGUOUS, "several arrays of one name in an npz")
    return entries[0]


def _name(entry: ZipInfo) -> str:
    return entry.filename.removesuffix(".npy")
