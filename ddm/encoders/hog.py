"""Histograms of oriented gradients as features, without weights from elsewhere: Dalal and Triggs, CVPR 2005.

Edges say more of what an image shows than its grey levels do. An image is divided into a grid of cells; each holds a
histogram of the directions of its gradients, weighted by their length. Features are principal components of the
histograms' square roots.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import pi, prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ddm.encoders.lost import fill_lost
from ddm.encoders.pca import PcaEncoder
from ddm.errors import DataError, ShapeError
from ddm.images.rows import Images
from ddm.io.tensors import TensorSpec
from ddm.protocol.encoder import HOG_DIRECTIONS
from ddm.protocol.encoder import HogEncoder as HogSpec

# Shape legend: N images, B images of one block, C channels, H height, W width, A directions.

_BLOCK_VALUES, _MOST = 1 << 20, 1024  # of pixels, and of images, that are looked at at once


@dataclass(frozen=True)
class HogEncoder:
    """A frozen encoder of gradients.

    Attributes:
        cells: of the grid, along each side.
        mirrored: whether an image and its mirror image have the same features.
        components: of the histograms of public images.
    """

    cells: int
    mirrored: bool
    components: PcaEncoder

    @classmethod
    def fit(cls, images: Tensor, dim: int, *, cells: int, mirrored: bool) -> "HogEncoder":
        """Find the principal components of public images' histograms.

        Args:
            images: public images, shape (N, C, H, W).
            dim: number of features.
            cells: along each side.
            mirrored: whether an image and its mirror image have the same features.

        Raises:
            DataError: the histograms do not span `dim` directions.
            ShapeError: images with fewer pixels than cells along a side, or no images.
        """
        return cls(
            cells, mirrored, PcaEncoder.fit(histograms(images, cells, mirrored=mirrored), dim)
        )

    @property
    def dim(self) -> int:
        """The number of features."""
        return self.components.dim

    def encode(
        self,
        images: Images,
        on_progress: Callable[[int, int], None] | None = None,
        *,
        lost: float | None = None,
    ) -> Tensor:
        """Return features, shape (N, dim), float32, of images of shape (N, C, H, W); `lost` stands for NaN.

        Raises:
            ShapeError: volumes, or fewer pixels than cells along a side.
        """
        found_NR = torch.empty(len(images), self.dim)
        for rows in _blocks(images.shape):
            found_NR[rows] = self.components.encode(
                histograms(images[rows], self.cells, mirrored=self.mirrored)
            )
            if on_progress:
                on_progress(min(rows.stop, len(images)), len(images))
        return (
            found_NR if lost is None else fill_lost(found_NR, lost, lambda: DataError("features"))
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return what a plan stores of this encoder."""
        return self.components.tensors()

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], spec: HogSpec) -> "HogEncoder":
        """Rebuild the encoder from tensors loaded against `hog_specs`."""
        return cls(spec.cells, spec.mirrored, PcaEncoder.from_tensors(tensors))


def hog_specs(spec: HogSpec) -> dict[str, TensorSpec]:
    """Return the names, dtypes and shapes of a stored encoder."""
    return {
        "mean": TensorSpec("F32", (spec.values,)),
        "basis": TensorSpec("F32", (spec.dim, spec.values)),
    }


def histograms(images: Tensor, cells: int, *, mirrored: bool) -> Tensor:
    """Return the square roots of images' histograms of oriented gradients, shape (N, directions, cells, cells).

    A direction and its opposite are one; a gradient counts for the two directions that it lies between; channels are
    averaged.

    Args:
        images: shape (N, C, H, W).
        cells: along each side.
        mirrored: average with the histograms of the mirror image.

    Raises:
        ShapeError: volumes, or fewer pixels than cells along a side.
    """
    if images.ndim != 4 or min(images.shape[2:]) < cells:
        expected = f"images (N, C, H, W) of at least {cells} pixels a side"
        raise ShapeError("images", expected=expected, got=f"shape {tuple(images.shape)}")
    found = images.new_empty(len(images), HOG_DIRECTIONS, cells, cells, dtype=torch.float32)
    for rows in _blocks(images.shape):
        block = images[rows].float()
        found[rows] = _histograms(block, cells)
        if mirrored:
            found[rows] = (found[rows] + _histograms(block.flip(3), cells)) / 2
    return found


def _blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Yield blocks of a power of two of images, at most 1024."""
    size = max(
        1, min(_MOST, 1 << max(0, (_BLOCK_VALUES // max(1, prod(shape[1:]))).bit_length() - 1))
    )
    return (slice(start, start + size) for start in range(0, shape[0], size))


def _histograms(images: Tensor, cells: int) -> Tensor:
    padded = F.pad(images, (1, 1, 1, 1), mode="replicate")
    right = padded[:, :, 1:-1, 2:] - padded[:, :, 1:-1, :-2]
    down = padded[:, :, 2:, 1:-1] - padded[:, :, :-2, 1:-1]
    length, place = (
        torch.hypot(right, down),
        (torch.atan2(down, right) % pi) * (HOG_DIRECTIONS / pi),
    )
    below = place.floor()
    upper = length * (place - below)
    index = below.long() % HOG_DIRECTIONS
    found = images.new_zeros(len(images), HOG_DIRECTIONS, *images.shape[2:])
    found.scatter_add_(1, index, length - upper)
    found.scatter_add_(1, (index + 1) % HOG_DIRECTIONS, upper)
    return F.adaptive_avg_pool2d(found / images.shape[1], cells).sqrt()
