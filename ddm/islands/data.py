"""Reads one owner's data set: images, and columns that belong to them. The only place that knows the files' formats."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from ddm.errors import DataError
from ddm.images.columns import TextColumn, class_numbers, text_column
from ddm.images.samples import ImageSet, open_image_set
from ddm.protocol.classes import Classes
from ddm.protocol.data import DataSpec
from ddm.protocol.transform import TransformSpec


@dataclass(frozen=True)
class Dataset:
    """One owner's images.

    Attributes:
        path: see `ddm.images.samples.open_image_set`.
        images: shape (N, C, H, W) or (N, C, D, H, W), float32, in the recipe's range.
        opened: the same images as they were opened, with their columns.
    """

    path: Path
    images: Tensor
    opened: ImageSet

    @classmethod
    def read(cls, path: Path, spec: DataSpec, transform: TransformSpec | None = None) -> "Dataset":
        """Read the images, through the recipe's transform where it has one.

        Raises:
            MissingFileError: nothing at `path`.
            DataError: no images in it, of another shape or range, or images that cannot be used, by their files' names.
        """
        opened = open_image_set(path, spec, transform, subject="data")
        return cls(path, opened.read(), opened)

    def column(self, name: str) -> np.ndarray:
        """Read a column, one value an image.

        Raises:
            MissingFileError, DataError: there is none, or not one value for each image.
        """
        # Of volumes cut into slices, a column has a value for each slice by now.
        cells = self.opened.column(name)
        num = len(self.images)
        if cells.shape != (num,):
            raise DataError(
                f"column {name}",
                expected=f"shape ({num},), one value an image",
                got=str(cells.shape),
            )
        return cells

    def remarks(self) -> list[str]:
        """Return what the owner should know about how the images were read, and about how they use their range."""
        return [*self.opened.remarks, *self.opened.range_remarks(self.images)]

    def values(self, name: str) -> TextColumn:
        """Read a column of text or numbers whose spellings are joined.

        Raises:
            MissingFileError, DataError: see `column`; or a column of something else.
        """
        return text_column(self.column(name), f"column {name}")

    def classes(self, classes: Classes) -> np.ndarray:
        """Read the column `labels` as classes, int64; by number, or by the names that the recipe gives them.

        Raises:
            MissingFileError, DataError: see `column`; or labels that are not classes.
        """
        return class_numbers(self.column("labels"), classes, "column labels")

    def captions(self) -> list[str]:
        """Read the column `captions` as texts.

        Raises:
            DataError: see `column`; or captions that are not text.
        """
        captions = self.column("captions")
        # NumPy's kinds of text: of one length, or Python objects.
        if captions.dtype.kind not in "UO":
            raise DataError("column captions", expected="text", got=str(captions.dtype))
        return [str(caption) for caption in captions]
