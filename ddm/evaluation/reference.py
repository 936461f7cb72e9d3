"""Reference images, read in blocks behind one class: from files, which are never unpacked whole, or from an array.

Pictures go through the plan's transform, as they do at silos; what it makes of them stays in memory in its compact
type.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddm.errors import DataError, ShapeError
from ddm.images.array_files import Source, open_arrays
from ddm.images.fit import check_row, fit
from ddm.images.labels import class_numbers
from ddm.images.public import picture_files
from ddm.images.reading import Transformed, is_prepared
from ddm.protocol.base import sha256_file, sha256_hex
from ddm.protocol.classes import Classes
from ddm.protocol.plan import DataSpec, TransformSpec

BLOCK_BYTES = 1 << 24  # of float32 images
_CELL_BYTES, _CAPTION_BYTES = 1024, 16 * 1024
_LABELS, _CAPTIONS = ("labels", "label"), ("captions", "caption")
SILO_COLUMNS = ("silos", "silo")
COLUMNS = (*SILO_COLUMNS, *_LABELS)  # by which recall is told apart, the first that is there


@dataclass(frozen=True)
class Reference:
    """Images to compare samples with.

    Attributes:
        num: how many.
        blocks: begins to read, and yields blocks of images in order, float32.
        digest: sha256 of the file; None for an array.
        groups: a label or silo of each image, as text; empty where nothing tells them apart.
        group_name: what the groups are.
        source: the arrays with their columns; None for pictures in files of their own, and for an array.
        count_P: how many images each row of `source` became; None for one each.
        num_bytes: held in memory.
    """

    num: int
    blocks: Callable[[], Iterator[Tensor]]
    digest: str | None = None
    groups: Sequence[str] = ()
    group_name: str | None = None
    source: Source | None = None
    count_P: Sequence[int] | None = None
    num_bytes: int = 0

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

    def only(self, kept: Sequence[bool]) -> "Reference":
        """Return the images that are kept, one answer for each; the digest stays that of the whole file."""
        mask = torch.tensor(kept)

        def blocks() -> Iterator[Tensor]:
            start = 0
            for block in self.blocks():
                part = block[mask[start : start + len(block)]]
                start += len(block)
                if len(part):
                    yield part

        groups = [group for group, keep in zip(self.groups, kept, strict=True) if keep] if self.groups else ()
        return replace(self, num=int(mask.sum()), blocks=blocks, groups=groups, source=None, count_P=None)

    def column(self, names: Sequence[str]) -> NDArray[np.generic] | None:
        """Return the first column of these names that there is, one entry for each image; None without one.

        Raises:
            DataError: a column that has not one entry for each row.
        """
        name = next((name for name in names if self.source and name in self.source.columns), None)
        if self.source is None or name is None:
            return None
        found = self.source.column(name, _CAPTION_BYTES)
        if len(found) != len(self.source):
            expected = f"{len(self.source)} entries, one for each image"
            raise DataError(name, expected=expected, got=f"shape {found.shape}")
        return found if self.count_P is None else np.repeat(found, self.count_P, 0)

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


def open_reference(
    path: Path, spec: DataSpec, by: str | None = None, transform: TransformSpec | None = None
) -> Reference:
    """Open the images of a file without reading them; pictures that a transform is for are read.

    Args:
        path: see `ddm.images.array_files.open_arrays`; a column may tell images apart. With a transform also
            whatever `ddm.images.public.pictures` takes; arrays in floating point of the plan's shape are then taken
            as samples that need none.
        spec: the plan's shape and range.
        by: the name of that column; by default `silos` or `labels`, where there is one.
        transform: the plan's.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not such a file, images of another shape, or no column of that name; a picture that cannot be used;
            values that do not fit are noticed when they are read.
    """
    files = picture_files(path) if transform else None
    if transform and files:
        _check_by(by, frozenset(), path)
        made = Transformed.read(path, spec, transform)
        return Reference(len(made.kept), made.blocks, digest_of(files), num_bytes=made.num_bytes)
    source = open_arrays(path)
    if source.name != "images":
        raise DataError("reference", expected="images", got="latents")
    _check_by(by, source.columns, path)
    column = by or next((name for name in COLUMNS if name in source.columns), None)
    groups = _groups(source, column) if column else []
    if transform and not is_prepared(path, spec):
        made = Transformed.read(path, spec, transform)
        if groups:
            groups = [group for group, count in zip(groups, made.count_P, strict=True) for _ in range(count)]
        digest, num = digest_of(source.files), len(made.kept)
        return Reference(num, made.blocks, digest, groups, column, source, made.count_P, made.num_bytes)
    check_row(*source.row, spec)
    return Reference(len(source), lambda: _blocks(source, spec), digest_of(source.files), groups, column, source)


def _check_by(by: str | None, columns: frozenset[str], path: Path) -> None:
    if by is not None and by not in columns:
        got = ", ".join(sorted(columns))[:200] or "no columns"
        raise DataError("--by", expected=f"a column of {path.name}", got=f"{by!r}; it has {got}")


def classes_of(reference: Reference, classes: Classes) -> Tensor | None:
    """Return the class of each reference image, int64 (N,), from the column `labels` or `label`; None without one.

    Raises:
        DataError: labels that are no classes, by number or by name.
    """
    found = reference.column(_LABELS)
    if found is None:
        return None
    remedy = "Label them as the plan does, or draw classes otherwise: --class equal, or --class none."
    return torch.from_numpy(class_numbers(found, classes, "labels of the reference", remedy))


def captions_of(reference: Reference) -> list[str] | None:
    """Return the caption of each reference image, from the column `captions` or `caption`; None without one.

    Raises:
        DataError: captions that are no texts.
    """
    found = reference.column(_CAPTIONS)
    if found is None:
        return None
    if found.ndim != 1 or found.dtype.kind not in "UO":
        raise DataError("captions of the reference", expected="one text an image", got=f"{found.dtype}")
    return [_text(each) for each in found.tolist()]


def _groups(source: Source, name: str) -> list[str]:
    values = source.column(name, _CELL_BYTES)
    if values.ndim != 1 or len(values) != len(source) or values.dtype.kind not in "biuUSO":
        expected = f"{len(source)} whole numbers or texts, one for each image"
        raise DataError(name, expected=expected, got=f"{values.dtype}, shape {values.shape}")
    return [_text(value) for value in values.tolist()]


def digest_of(files: Sequence[Path]) -> str:
    """Return the digest of a file, or of the digests of several."""
    digests = [sha256_file(path) for path in files]
    return digests[0] if len(digests) == 1 else sha256_hex(" ".join(digests).encode())


def _blocks(source: Source, spec: DataSpec) -> Iterator[Tensor]:
    start = 0
    for block in source.unpacked():
        yield fit(block, range(start, start + len(block)), spec=spec)
        start += len(block)


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
