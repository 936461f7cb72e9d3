"""Reference images, read in blocks behind one class: from an npz, which is never unpacked whole, or from an array."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import torch
from torch import Tensor

from ddm.errors import ArchipelagoError, DataError, ShapeError
from ddm.io.files import require_file
from ddm.io.npz import count_rows, fit, read_array
from ddm.protocol.base import sha256_file
from ddm.protocol.plan import DataSpec

BLOCK_BYTES = 1 << 24  # of float32 images
_COLUMN_BYTES = 1 << 28
SILO_COLUMNS = ("silos", "silo")
COLUMNS = (*SILO_COLUMNS, "labels", "label")  # by which recall is told apart, the first that is there


@dataclass(frozen=True)
class Reference:
    """Images to compare samples with.

    Attributes:
        num: how many.
        blocks: begins to read, and yields blocks of images in order, float32.
        digest: sha256 of the file; None for an array.
        groups: a label or silo of each image, as text; empty where nothing tells them apart.
        group_name: what the groups are.
    """

    num: int
    blocks: Callable[[], Iterator[Tensor]]
    digest: str | None = None
    groups: Sequence[str] = ()
    group_name: str | None = None

    def rows(self, wanted: Iterable[int]) -> dict[int, Tensor]:
        """Return images by their number; reads up to the last of them."""
        left, found, start = sorted(set(wanted)), dict[int, Tensor](), 0
        for block in self.blocks() if left else ():
            while left and left[0] < start + len(block):
                found[left[0]] = block[left[0] - start].clone()
                left.pop(0)
            if not left:
                break
            start += len(block)
        return found

    @classmethod
    def of(cls, images: Any, groups: Sequence[object] = (), group_name: str = "labels") -> "Reference":
        """Take an array or a tensor, shape (N, ...).

        Raises:
            ShapeError: as many groups as images are needed.
        """
        rows = torch.as_tensor(images)
        if len(groups) not in (0, len(rows)):
            raise ShapeError("groups", expected=f"{len(rows)}, one for each image", got=str(len(groups)))
        size = max(1, BLOCK_BYTES // (4 * max(1, rows[0].numel()))) if len(rows) else 1
        texts = [_text(each) for each in groups]
        return cls(len(rows), lambda: (part.float() for part in torch.split(rows, size)), None, texts, group_name)


def open_reference(path: Path, spec: DataSpec, by: str | None = None) -> Reference:
    """Open the images of a file without reading them.

    Args:
        path: an npz with `images`, see `ddm.io.npz.read_images`, and perhaps an array that tells them apart.
        spec: the plan's shape and range.
        by: the name of that array; by default `silos` or `labels`, where there is one.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not such a file, or no array of that name; images that do not fit are noticed when they are read.
    """
    require_file(path, "an npz of reference images")
    num = count_rows(path, "images")
    if not num:
        raise DataError("reference images", expected="at least one", got="an empty array")
    with ZipFile(path) as archive:
        names = {name.removesuffix(".npy") for name in archive.namelist()}
    if by is not None and by not in names:
        got = ", ".join(sorted(names))[:200]
        raise DataError("--by", expected=f"an array of {path.name}", got=f"{by!r}; it has {got}")
    column = by or next((name for name in COLUMNS if name in names), None)
    groups = _column(path, column, num) if column else []
    return Reference(num, lambda: _npz_blocks(path, spec), sha256_file(path), groups, column)


def _column(path: Path, name: str, num: int) -> list[str]:
    values = read_array(path, name, max_bytes=_COLUMN_BYTES)
    if values.ndim != 1 or len(values) != num or values.dtype.kind not in "biuUS":
        expected = f"{num} whole numbers or texts, one for each image"
        raise DataError(name, expected=expected, got=f"{values.dtype}, shape {values.shape}")
    return [_text(value) for value in values.tolist()]


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _npz_blocks(path: Path, spec: DataSpec) -> Iterator[Tensor]:
    """Unpack an npz block by block."""
    try:
        with ZipFile(path) as archive, archive.open("images.npy") as handle:
            version = np.lib.format.read_magic(handle)
            header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, fortran, dtype = header[version](handle)
            if dtype.kind not in "fu" or dtype.itemsize > 8:
                raise DataError("image values", expected="floating point, uint8 or uint16", got=str(dtype))
            if fortran:
                raise DataError("reference images", expected="rows one after another", got="a Fortran-ordered array")
            row_values = int(np.prod(shape[1:], dtype=np.int64))
            if not 0 < row_values <= 2 * spec.dim:  # before anything is allocated by a header
                raise DataError("image shape", expected=str(spec.shape), got=str(tuple(shape[1:])))
            size = max(1, BLOCK_BYTES // (4 * spec.dim))
            for start in range(0, shape[0], size):
                rows = min(size, shape[0] - start)
                data = handle.read(rows * row_values * dtype.itemsize)
                block = np.frombuffer(data, dtype, rows * row_values).reshape(rows, *shape[1:])
                yield torch.from_numpy(np.array(fit(block, spec)))
    except ArchipelagoError:
        raise
    except Exception as error:  # whatever zip, its compressions and the array's header may raise
        expected, got = "an npz without pickled objects", f"a file that does not read as one ({type(error).__name__})"
        raise DataError("reference file", expected=expected, got=got) from error
