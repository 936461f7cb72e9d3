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
from ddm.images.columns import class_numbers
from ddm.images.samples import ImageSet, open_image_set
from ddm.io.array_input import real_tensor
from ddm.protocol.base import sha256_file, sha256_hex
from ddm.protocol.classes import Classes
from ddm.protocol.data import DataSpec
from ddm.protocol.transform import TransformSpec

BLOCK_BYTES = 1 << 24  # of float32 images
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
        images: what was opened at a path, with its columns; None for an array, and for a part of a reference.
        num_bytes: held in memory.
    """

    num: int
    blocks: Callable[[], Iterator[Tensor]]
    digest: str | None = None
    groups: Sequence[str] = ()
    group_name: str | None = None
    images: ImageSet | None = None
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

        groups = (
            [group for group, keep in zip(self.groups, kept, strict=True) if keep]
            if self.groups
            else ()
        )
        return replace(self, num=int(mask.sum()), blocks=blocks, groups=groups, images=None)

    def column(self, names: Sequence[str]) -> NDArray[np.generic] | None:
        """Return the first column of these names that there is, one entry for each image; None without one.

        Raises:
            DataError: a column that has not one entry for each image.
        """
        if self.images is None:
            return None
        name = next((name for name in names if name in self.images.column_names), None)
        return None if name is None else self.images.column(name)

    @classmethod
    def of(
        cls, images: Any, groups: Sequence[object] = (), group_name: str = "labels"
    ) -> "Reference":
        """Take an array or a tensor, shape (N, ...).

        Args:
            images: whatever `ddm.io.array_input.real_tensor` takes.
            groups: a label or a silo of each image.
            group_name: what the groups are.

        Raises:
            DataError: no real numbers.
            ShapeError: no rows, or as many groups as images are needed.
        """
        rows = rows_of_numbers(images, "reference")
        if len(groups) not in (0, len(rows)):
            raise ShapeError(
                "groups", expected=f"{len(rows)}, one for each image", got=str(len(groups))
            )
        size = max(1, BLOCK_BYTES // (4 * max(1, rows[0].numel()))) if len(rows) else 1
        texts = [_text(each) for each in groups]
        return cls(
            len(rows),
            lambda: (part.float() for part in torch.split(rows, size)),
            None,
            texts,
            group_name,
        )


def rows_of_numbers(values: Any, subject: str) -> Tensor:
    """Return an array of images or features as a tensor, shape (N, ...).

    Raises:
        DataError: no real numbers.
        ShapeError: fewer than two axes, or an axis of length zero after the first.
    """
    rows = real_tensor(values, subject)
    if rows.ndim < 2 or 0 in rows.shape[1:]:
        raise ShapeError(
            subject, expected="shape (N, ...), one row for each image", got=str(tuple(rows.shape))
        )
    return rows.cpu()


def open_reference(
    path: Path, spec: DataSpec, by: str | None = None, transform: TransformSpec | None = None
) -> Reference:
    """Open the images of a file without reading them; pictures that a transform is for are read.

    Args:
        path: see `ddm.images.samples.open_image_set`; a column may tell images apart. With a transform, arrays in
            floating point of the plan's shape are taken as samples that need none.
        spec: the plan's shape and range.
        by: the name of that column; by default `silos` or `labels`, where there is one.
        transform: the plan's.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not such a file, images of another shape, or no column of that name; pictures that cannot be used,
            by the names of their files; values that do not fit are noticed when they are read.
    """
    images = open_image_set(path, spec, transform, takes_samples=True, subject="reference")
    names = images.column_names
    if by is not None and by not in names:
        got = ", ".join(sorted(names))[:200] or "no columns"
        raise DataError("--by", expected=f"a column of {path.name}", got=f"{by!r}; it has {got}")
    column = by or next((name for name in COLUMNS if name in names), None)
    return Reference(
        num=len(images),
        blocks=images.blocks,
        digest=digest_of(images.files),
        groups=_groups(images, column) if column else [],
        group_name=column,
        images=images,
        num_bytes=images.num_bytes,
    )


def classes_of(reference: Reference, classes: Classes) -> Tensor | None:
    """Return the class of each reference image, int64 (N,), from the column `labels` or `label`; None without one.

    Raises:
        DataError: labels that are no classes, by number or by name.
    """
    found = reference.column(_LABELS)
    if found is None:
        return None
    remedy = (
        "Label them as the plan does, or draw classes otherwise: --class equal, or --class none."
    )
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
        raise DataError(
            "captions of the reference", expected="one text an image", got=f"{found.dtype}"
        )
    return [_text(each) for each in found.tolist()]


def _groups(images: ImageSet, name: str) -> list[str]:
    values = images.column(name)
    if values.ndim != 1 or values.dtype.kind not in "biuUSO":
        expected = f"{len(images)} whole numbers or texts, one for each image"
        raise DataError(name, expected=expected, got=f"{values.dtype}, shape {values.shape}")
    return [_text(value) for value in values.tolist()]


def digest_of(files: Sequence[Path]) -> str:
    """Return the digest of a file, or of the digests of several."""
    digests = [sha256_file(path) for path in files]
    return digests[0] if len(digests) == 1 else sha256_hex(" ".join(digests).encode())


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
