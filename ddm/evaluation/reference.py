"""Reference images, read in blocks behind one class: from files, which are never unpacked whole, or from an array.

Pictures go through the plan's transform, as they do at silos; what it makes of them stays in memory in its compact
type.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
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
_FLOAT_BYTES = 4
SILO_COLUMNS = ("silos", "silo")
_LABEL_COLUMNS = ("labels", "label")
_CAPTION_COLUMNS = ("captions", "caption")
# The first of these that a file has divides its images into the groups for which recall is given.
_GROUP_COLUMNS = (*SILO_COLUMNS, *_LABEL_COLUMNS)


@dataclass(frozen=True)
class Reference:
    """Images to compare samples with.

    Attributes:
        num: the number of them.
        blocks: begins to read, and yields blocks of images in order, float32.
        digest: sha256 of the file; None for an array.
        groups: a label or silo of each image, as text; empty where there are none.
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

    def rows(self, numbers: Iterable[int]) -> dict[int, Tensor]:
        """Return images by their number; reads up to the last of them."""
        ascending = sorted(set(numbers))
        rows: dict[int, Tensor] = {}
        if not ascending:
            return rows
        start = 0
        for block in self.blocks():
            end = start + len(block)
            for number in ascending:
                if start <= number < end:
                    # A copy, or one image would keep its whole block in memory.
                    rows[number] = block[number - start].clone()
            if ascending[-1] < end:
                break
            start = end
        return rows

    def select(self, is_selected: Sequence[bool]) -> "Reference":
        """Return the selected images, by one truth value for each; the digest stays that of the whole file."""
        mask = torch.tensor(is_selected)

        def blocks() -> Iterator[Tensor]:
            start = 0
            for block in self.blocks():
                end = start + len(block)
                selected = block[mask[start:end]]
                start = end
                if len(selected):
                    yield selected

        groups: list[str] = []
        if self.groups:
            groups = list(compress(self.groups, is_selected))
        return replace(
            self,
            num=int(mask.sum()),
            blocks=blocks,
            groups=groups,
            # Its columns are those of the whole file.
            images=None,
        )

    def column(self, names: Sequence[str]) -> NDArray[np.generic] | None:
        """Return the first column of these names that there is, one entry for each image; None without one.

        Raises:
            DataError: a column that has not one entry for each image.
        """
        if self.images is None:
            return None
        for name in names:
            if name in self.images.column_names:
                return self.images.column(name)
        return None

    @classmethod
    def of(
        cls,
        images: Any,
        groups: Sequence[object] = (),
        group_name: str = "labels",
    ) -> "Reference":
        """Take an array or a tensor, shape (N, ...).

        Args:
            images: whatever `ddm.io.array_input.real_tensor` takes.
            groups: a label or a silo of each image.
            group_name: what the groups are.

        Raises:
            DataError: no real numbers.
            ShapeError: no rows, or another number of groups than of images.
        """
        rows = rows_of_numbers(images, "reference")
        num = len(rows)
        if len(groups) not in (0, num):
            raise ShapeError("groups", expected=f"{num}, one for each image", got=str(len(groups)))
        block_rows = 1
        if num > 0:
            block_rows = max(1, BLOCK_BYTES // (_FLOAT_BYTES * rows[0].numel()))

        def blocks() -> Iterator[Tensor]:
            return (block.float() for block in torch.split(rows, block_rows))

        texts = [_text(group) for group in groups]
        return cls(num, blocks, groups=texts, group_name=group_name)


def rows_of_numbers(values: Any, subject: str) -> Tensor:
    """Return an array of images or features as a tensor, shape (N, ...).

    Raises:
        DataError: no real numbers.
        ShapeError: fewer than two axes, or an axis of length zero after the first.
    """
    rows = real_tensor(values, subject)
    if rows.ndim < 2 or 0 in rows.shape[1:]:
        raise ShapeError(
            subject,
            expected="shape (N, ...), one row for each image",
            got=str(tuple(rows.shape)),
        )
    return rows.cpu()


def open_reference(
    path: Path,
    spec: DataSpec,
    by: str | None = None,
    transform: TransformSpec | None = None,
) -> Reference:
    """Open the images of a file without reading them; pictures that a transform is for are read.

    Args:
        path: see `ddm.images.samples.open_image_set`; a column may divide the images into groups. With a transform,
            arrays in floating point of the plan's shape are taken as samples that need none.
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
        columns = ", ".join(sorted(names))[:200] or "no columns"
        raise DataError(
            "--by",
            expected=f"a column of {path.name}",
            got=f"{by!r}; it has {columns}",
            remedy="Name a column of the file with --by, or leave --by out.",
        )
    group_name = by
    if group_name is None:
        present_names = [name for name in _GROUP_COLUMNS if name in names]
        if present_names:
            group_name = present_names[0]
    groups: list[str] = []
    if group_name:
        groups = _groups(images, group_name)
    return Reference(
        num=len(images),
        blocks=images.blocks,
        digest=digest_of(images.files),
        groups=groups,
        group_name=group_name,
        images=images,
        num_bytes=images.num_bytes,
    )


def classes_of(reference: Reference, classes: Classes) -> Tensor | None:
    """Return the class of each reference image, int64 (N,), from the column `labels` or `label`; None without one.

    Raises:
        DataError: labels that are not classes, by number or by name.
    """
    labels = reference.column(_LABEL_COLUMNS)
    if labels is None:
        return None
    remedy = (
        "Label them as the plan does, or draw classes otherwise: --class equal, or --class none."
    )
    numbers = class_numbers(labels, classes, "labels of the reference", remedy)
    return torch.from_numpy(numbers)


def captions_of(reference: Reference) -> list[str] | None:
    """Return the caption of each reference image, from the column `captions` or `caption`; None without one.

    Raises:
        DataError: captions that are not texts.
    """
    captions = reference.column(_CAPTION_COLUMNS)
    if captions is None:
        return None
    if captions.ndim != 1 or captions.dtype.kind not in "UO":
        raise DataError(
            "captions of the reference",
            expected="one text an image",
            got=f"{captions.dtype}",
            remedy="Save the captions as texts, one for each image.",
        )
    return [_text(caption) for caption in captions.tolist()]


def _groups(images: ImageSet, name: str) -> list[str]:
    values = images.column(name)
    if values.ndim != 1 or values.dtype.kind not in "biuUSO":
        expected = f"{len(images)} whole numbers or texts, one for each image"
        raise DataError(name, expected=expected, got=f"{values.dtype}, shape {values.shape}")
    return [_text(value) for value in values.tolist()]


def digest_of(files: Sequence[Path]) -> str:
    """Return the digest of a file, or of the digests of several."""
    digests = [sha256_file(path) for path in files]
    if len(digests) == 1:
        return digests[0]
    text = " ".join(digests)
    return sha256_hex(text.encode())


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return str(value)
