"""Reads one owner's data set: images, and columns that belong to them. The only place that knows the files' formats."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from ddm.errors import DataError
from ddm.images.array_files import open_arrays, read_images
from ddm.images.labels import class_numbers
from ddm.images.reading import read_transformed
from ddm.protocol.classes import Classes
from ddm.protocol.plan import DataSpec, TransformSpec

_MAX_CELL_BYTES = 16 * 1024  # of one caption or label, with room for four bytes a character


@dataclass(frozen=True)
class Dataset:
    """One owner's images.

    Attributes:
        path: see `ddm.images.array_files.open_arrays`, with columns of as many rows.
        images: shape (N, C, H, W) or (N, C, D, H, W), float32, in the recipe's range.
    """

    path: Path
    images: Tensor

    @classmethod
    def read(cls, path: Path, spec: DataSpec, transform: TransformSpec | None = None) -> "Dataset":
        """Read the images, through the recipe's transform where it has one.

        Raises:
            MissingFileError: nothing at `path`.
            DataError: no images in it, or of another shape or range.
        """
        return cls(path, read_transformed(path, spec, transform) if transform else read_images(path, spec))

    def column(self, name: str) -> np.ndarray:
        """Read a column, one value an image.

        Raises:
            MissingFileError, DataError: there is none, or not one value for each image.
        """
        num, found = len(self.images), open_arrays(self.path).column(name, _MAX_CELL_BYTES)
        if found.shape != (num,):
            raise DataError(f"column {name}", expected=f"shape ({num},), one value an image", got=str(found.shape))
        return found

    def classes(self, classes: Classes) -> np.ndarray:
        """Read the column `labels` as classes, int64; by number, or by the names that the recipe gives them.

        Raises:
            MissingFileError, DataError: see `column`; or labels that are no classes.
        """
        return class_numbers(self.column("labels"), classes, "column labels")

    def captions(self) -> list[str]:
        """Read the column `captions` as texts.

        Raises:
            DataError: see `column`; or captions that are no text.
        """
        found = self.column("captions")
        if found.dtype.kind != "U":
            raise DataError("column captions", expected="text", got=str(found.dtype))
        return [str(text) for text in found]
