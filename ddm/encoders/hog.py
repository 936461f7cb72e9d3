"""Histograms of oriented gradients as features, without weights from elsewhere: Dalal and Triggs, CVPR 2005.

Edges say more about the content of an image than its grey levels do. An image is divided into a grid of cells; each
holds a histogram of the directions of its gradients, weighted by their length. Features are principal components of the
histograms' square roots.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import pi, prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ddm.encoders.non_finite import replace_non_finite
from ddm.encoders.pca import PcaEncoder
from ddm.errors import DataError, ShapeError
from ddm.images.rows import Images
from ddm.io.tensors import TensorSpec
from ddm.protocol.encoder import HOG_DIRECTIONS, HogEncoderSpec
from ddm.system.progress import ProgressCallback

# Shape legend: N images, B images of one block, C channels, H height, W width, A directions.

# Most images in a block, and most of their values.
_MAX_BLOCK = 1024
_BLOCK_VALUES = 1 << 20


@dataclass(frozen=True)
class HogEncoder:
    """A frozen encoder of gradients.

    Attributes:
        cells: the cells of the grid, along each side.
        mirrored: whether an image and its mirror image have the same features.
        components: of the histograms of public images.
    """

    cells: int
    mirrored: bool
    components: PcaEncoder

    @classmethod
    def fit(
        cls,
        images: Tensor,
        dim: int,
        *,
        cells: int,
        mirrored: bool,
    ) -> "HogEncoder":
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
        components = PcaEncoder.fit(histograms(images, cells, mirrored=mirrored), dim)
        return cls(cells, mirrored, components)

    @property
    def dim(self) -> int:
        """The number of features."""
        return self.components.dim

    def for_single_samples(self) -> "HogEncoder":
        """Return it computing each image alone, so that no bit of a feature depends on other images."""
        return replace(self, components=self.components.for_single_samples())

    def encode(
        self,
        images: Images,
        on_progress: ProgressCallback | None = None,
        *,
        replacement: float | None = None,
    ) -> Tensor:
        """Return features, shape (N, dim), float32.

        Args:
            images: shape (N, C, H, W).
            on_progress: called with images done and images in all.
            replacement: every feature of an image whose features are not all finite; None leaves them.

        Raises:
            ShapeError: volumes, or fewer pixels than cells along a side.
        """
        features_NR = torch.empty(len(images), self.dim)
        for rows in _blocks(images.shape):
            block = images[rows]
            num_at_once = len(block)
            if self.components.computes_alone:
                num_at_once = 1
            features = [
                self.components.encode(histograms(piece, self.cells, mirrored=self.mirrored))
                for piece in torch.split(block, num_at_once)
            ]
            features_NR[rows] = torch.cat(features)
            if on_progress:
                on_progress(min(rows.stop, len(images)), len(images))
        if replacement is None:
            return features_NR
        return replace_non_finite(features_NR, replacement, lambda: DataError("features"))

    def tensors(self) -> dict[str, Tensor]:
        """Return what a plan stores of this encoder."""
        return self.components.tensors()

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], spec: HogEncoderSpec) -> "HogEncoder":
        """Rebuild the encoder from tensors loaded against `hog_specs`."""
        return cls(spec.cells, spec.mirrored, PcaEncoder.from_tensors(tensors))


def hog_specs(spec: HogEncoderSpec) -> dict[str, TensorSpec]:
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
        raise ShapeError(
            "images",
            expected=f"images (N, C, H, W) of at least {cells} pixels a side",
            got=f"shape {tuple(images.shape)}",
        )
    shape = (len(images), HOG_DIRECTIONS, cells, cells)
    all_histograms = images.new_empty(shape, dtype=torch.float32)
    for rows in _blocks(images.shape):
        block = images[rows].float()
        block_histograms = _histograms(block, cells)
        if mirrored:
            # The mean of both is the same for an image and its mirror image.
            mirror_histograms = _histograms(block.flip(3), cells)
            block_histograms = (block_histograms + mirror_histograms) / 2
        all_histograms[rows] = block_histograms
    return all_histograms


def _blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Yield blocks of a power of two of images, at most 1024."""
    num_affordable = max(1, _BLOCK_VALUES // max(1, prod(shape[1:])))
    largest_power = 1 << (num_affordable.bit_length() - 1)
    size = min(_MAX_BLOCK, largest_power)
    for start in range(0, shape[0], size):
        yield slice(start, start + size)


def _histograms(images: Tensor, cells: int) -> Tensor:
    # Central differences; at the border the edge pixel is repeated.
    padded = F.pad(images, (1, 1, 1, 1), mode="replicate")
    right = padded[:, :, 1:-1, 2:] - padded[:, :, 1:-1, :-2]
    down = padded[:, :, 2:, 1:-1] - padded[:, :, :-2, 1:-1]
    length = torch.hypot(right, down)
    # A gradient's direction in units of the histogram, over half a turn.
    angle = torch.atan2(down, right) % pi
    direction = angle * (HOG_DIRECTIONS / pi)
    below = direction.floor()
    index = below.long() % HOG_DIRECTIONS
    upper_share = length * (direction - below)

    num_images, num_channels, height, width = images.shape
    by_direction = images.new_zeros(num_images, HOG_DIRECTIONS, height, width)
    by_direction.scatter_add_(1, index, length - upper_share)
    by_direction.scatter_add_(1, (index + 1) % HOG_DIRECTIONS, upper_share)
    pooled = F.adaptive_avg_pool2d(by_direction / num_channels, cells)
    return pooled.sqrt()
