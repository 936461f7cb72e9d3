"""The PCA encoder: principal components of the public images as features, without weights from elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from ddm.encoders.non_finite import replace_non_finite
from ddm.errors import DataError, ShapeError
from ddm.images.rows import Images
from ddm.io.tensors import TensorSpec
from ddm.protocol.data import DataSpec
from ddm.system.progress import ProgressCallback

# Shape legend: N images, B images of one block, D values in one image, R principal directions.

# Images in a block, and the most values of one. All blocks have one size, so that the features of an image do not
# depend on the number of the others.
_BLOCK = 1024
_BLOCK_VALUES = 1 << 25
# A direction whose spread is below this share of the widest one is rounding, not data.
_MIN_SPREAD = 1e-7


@dataclass(frozen=True)
class PcaEncoder:
    """A frozen linear encoder, ``features = basis (x - mean)``.

    Attributes:
        mean_D: mean of the public images, float32.
        basis_RD: leading principal directions, half whitened: orthogonal rows of length ``sqrt(spread_0 / spread)``.
            Later directions carry finer detail, which unwhitened would hardly change a distance.
        computes_alone: whether each image is computed alone, see `for_single_samples`.
    """

    mean_D: Tensor
    basis_RD: Tensor
    computes_alone: bool = False

    @classmethod
    def fit(cls, images: Tensor, dim: int) -> "PcaEncoder":
        """Find the `dim` leading principal directions of public images.

        Args:
            images: public images, shape (N, C, H, W).
            dim: number of features.

        Raises:
            DataError: the images do not span `dim` directions.
        """
        mean_D, basis_RD = principal_directions(images, dim)
        centred_ND = images.flatten(1).double() - mean_D
        spread_R = (centred_ND @ basis_RD.T).norm(dim=0)
        length_R = (spread_R[0] / spread_R).sqrt()
        scaled_RD = basis_RD * length_R[:, None]
        return cls(mean_D=mean_D.float(), basis_RD=scaled_RD.float())

    @property
    def dim(self) -> int:
        """The number of features."""
        return len(self.basis_RD)

    def for_single_samples(self) -> "PcaEncoder":
        """Return it computing each image alone, so that no bit of a feature depends on other images."""
        return replace(self, computes_alone=True)

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
            on_progress: not called, since this encoder takes no time.
            replacement: every feature of an image whose features are not all finite; None leaves them.

        Raises:
            ShapeError: the images are of another size than those it was fitted on.
        """
        num_values = len(self.mean_D)
        if len(images.shape) < 2 or prod(images.shape[1:]) != num_values:
            got = f"shape {tuple(images.shape[1:])}"
            raise ShapeError("image size", expected=f"{num_values} values", got=got)
        features_NR = torch.empty(len(images), self.dim)
        size = _block_size(num_values)
        num_at_once = size
        if self.computes_alone:
            num_at_once = 1
        for start in range(0, len(images), size):
            x_BD = images[start : start + size].flatten(1).float()
            features = [self._project(rows, num_at_once) for rows in torch.split(x_BD, num_at_once)]
            features_NR[start : start + len(x_BD)] = torch.cat(features)
        if replacement is None:
            return features_NR
        return replace_non_finite(features_NR, replacement, lambda: DataError("features"))

    def _project(self, x_BD: Tensor, num_rows: int) -> Tensor:
        # A product rounds differently for other numbers of rows, so the last block is filled up.
        padding = x_BD[-1:].expand(num_rows - len(x_BD), -1)
        centred = torch.cat([x_BD, padding]) - self.mean_D
        return (centred @ self.basis_RD.T)[: len(x_BD)]

    def tensors(self) -> dict[str, Tensor]:
        """Return what a plan stores of this encoder."""
        return {"mean": self.mean_D, "basis": self.basis_RD}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "PcaEncoder":
        """Rebuild the encoder from tensors loaded against `pca_specs`."""
        return cls(mean_D=tensors["mean"], basis_RD=tensors["basis"])


def pca_specs(data: DataSpec, dim: int) -> dict[str, TensorSpec]:
    """Return the names, dtypes and shapes of a stored encoder for images of `data`."""
    mean = TensorSpec("F32", (data.dim,))
    basis = TensorSpec("F32", (dim, data.dim))
    return {"mean": mean, "basis": basis}


def _block_size(dim: int) -> int:
    """Return the number of images in a block: a smaller power of two where they are large."""
    if dim >= _BLOCK_VALUES:
        return 1
    num_affordable = _BLOCK_VALUES // dim
    largest_power = 1 << (num_affordable.bit_length() - 1)
    return min(_BLOCK, largest_power)


def principal_directions(images: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the mean and the leading principal directions of images, both float64.

    The sign of a direction is fixed by making its largest entry positive, so two fits agree.

    Args:
        images: shape (N, ...), any data range.
        dim: number of directions.

    Returns:
        mean_D and basis_RD with orthonormal rows, widest direction first.

    Raises:
        DataError: the images do not span `dim` directions.
    """
    x_ND = images.flatten(1).double()
    mean_D = x_ND.mean(0)
    _, spread, basis = torch.linalg.svd(x_ND - mean_D, full_matrices=False)
    num_spanned = 0
    if len(spread):
        num_spanned = int((spread > _MIN_SPREAD * spread[0]).sum())
    if num_spanned < dim:
        raise DataError(
            "public images",
            expected=f"at least {dim} principal directions",
            got=f"{len(images)} images that span {num_spanned}",
            remedy="Give more public images that differ, or lower encoder.dim in the recipe.",
        )
    basis_RD = basis[:dim]
    place_of_peak_R1 = basis_RD.abs().argmax(1, keepdim=True)
    peak_R1 = basis_RD.gather(1, place_of_peak_R1)
    signed_RD = basis_RD * peak_R1.sign()
    return mean_D, signed_RD.contiguous()
