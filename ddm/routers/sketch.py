"""The sketch: a public, low-rank, affine projection of an image that commutes with noising.

``s(x_t) = A (x_t - alpha_t m) / C``, so ``s(x_t) = alpha_t s(x_0) + (sigma_t / C) n`` with n a standard normal:
sketches noised at a silo and sketches of noised samples follow the same law.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddm.diffusion.path import Path
from ddm.encoders import principal_directions
from ddm.errors import DataError, NumericalError, PolicyError, ShapeError
from ddm.io.tensors import TensorSpec
from ddm.protocol.data import DataSpec

# Shape legend: N images, B batch, D values in one image, R sketch dimensions, G public groups.

# C leaves half a percent of public images outside the unit ball.
_QUANTILE = 0.995
# Pseudo-images of the pooled covariance per group, in units of R + 1.
_SHRINK = 1.0
# Smallest variance of a group in any direction, relative to the largest pooled variance.
_FLOOR = 1e-3
# For the orthonormality of float32 rows.
_TOLERANCE = 1e-4
_SCALES = (1e-6, 1e6)


@dataclass(frozen=True)
class Sketch:
    """The public projection, and the public statistics of sketches in each group.

    Attributes:
        basis_RD: A, orthonormal rows, float32.
        mean_D: m, mean of the public images, float32.
        scale: C, in data units.
        group_mean_GR: mean of s(x_0) in each public group, float32.
        group_cov_GRR: its regularised covariance, float32.
        group_weight_G: share of public images in each group, float32.
    """

    basis_RD: Tensor
    mean_D: Tensor
    scale: float
    group_mean_GR: Tensor
    group_cov_GRR: Tensor
    group_weight_G: Tensor

    @classmethod
    def fit(
        cls,
        images: Tensor,
        group_N: Tensor,
        rank: int,
        num_groups: int,
        released_rank: int | None = None,
    ) -> "Sketch":
        """Fit the projection and the statistics of each group on public images.

        Args:
            images: public images, shape (N, C, H, W).
            group_N: the group of each, in [0, num_groups).
            rank: number of sketch dimensions.
            num_groups: number of groups.
            released_rank: number of leading dimensions in the silos' sketches, all when omitted; C is fitted in these.

        Raises:
            DataError: a group without a public image, or images that do not span `rank` directions.
        """
        # Rounded first: scale and moments must be those of the float32 projection that silos and readers get.
        mean_D, basis_RD = (part.float() for part in principal_directions(images, rank))
        centred_ND = images.flatten(1).double() - mean_D.double()
        raw_NR = centred_ND @ basis_RD.double().T
        norm_N = raw_NR[:, :released_rank].norm(dim=1)
        scale = float(torch.quantile(norm_N, _QUANTILE, interpolation="higher").float())
        s_NR = raw_NR / scale
        size_G = torch.bincount(group_N, minlength=num_groups).double()
        has_images_G = size_G > 0
        if len(size_G) != num_groups or not bool(has_images_G.all()):
            got = f"images in {int(has_images_G.sum())} of {num_groups} groups"
            raise DataError(
                "public images",
                expected="at least one in every group",
                got=got,
                remedy="Give more public images, or plan fewer groups (clustering.num_groups in the recipe).",
            )
        mean_GR, cov_GRR = _group_moments(s_NR, group_N, size_G)
        return cls(
            basis_RD=basis_RD,
            mean_D=mean_D,
            scale=scale,
            group_mean_GR=mean_GR.float(),
            group_cov_GRR=cov_GRR.float(),
            group_weight_G=(size_G / size_G.sum()).float(),
        )

    @property
    def rank(self) -> int:
        """The number of sketch dimensions."""
        return len(self.basis_RD)

    @property
    def num_groups(self) -> int:
        """The number of public groups."""
        return len(self.group_weight_G)

    def head(self, rank: int) -> "Sketch":
        """Return the sketch of the leading `rank` dimensions, as the silos' statistics use it."""
        if not 1 <= rank <= self.rank:
            raise ShapeError("sketch", expected=f"1 to {self.rank} dimensions", got=str(rank))
        return replace(
            self,
            basis_RD=self.basis_RD[:rank],
            group_mean_GR=self.group_mean_GR[:, :rank],
            group_cov_GRR=self.group_cov_GRR[:, :rank, :rank],
        )

    def project(self, x_0: Tensor) -> Tensor:
        """Return ``s(x_0)`` clipped to the unit ball, shape (N, R), float64; 0 for an image that is not finite.

        Raises:
            ShapeError: images of another size.
        """
        # Clipped, since the sensitivity of a statistic is that of the unit ball.
        alpha_N = torch.ones(len(x_0), dtype=torch.float64)
        raw_NR = self._centred(x_0.double(), alpha_N) / self.scale
        # A NaN passes every comparison of the clipping, and one such row would make the whole statistic NaN.
        is_finite_N1 = torch.isfinite(raw_NR).all(1, keepdim=True)
        finite_NR = raw_NR.masked_fill(~is_finite_N1, 0.0)
        return _into_unit_ball(finite_NR)

    def of(self, x_t: Tensor, t: Tensor, path: Path) -> Tensor:
        """Return ``A (x_t - alpha_t m) / C``, never clipped.

        Args:
            x_t: noised images, shape (B, ...), data units.
            t: shape (B,), 0 is data, 1 is noise.
            path: the probability path.

        Returns:
            Shape (B, R), dtype and device of ``x_t``.
        """
        alpha_B = path.alpha(t.to(x_t))
        return self._centred(x_t, alpha_B) / self.scale

    def renoise(
        self,
        s_r: Tensor,
        t_r: float,
        t: Tensor,
        path: Path,
        generator: torch.Generator,
    ) -> Tensor:
        """Noise sketches further, from level `t_r` to later levels; this costs no privacy.

        ``s_t = (alpha_t / alpha_r) s_r + sqrt(sigma_t^2 - (alpha_t / alpha_r)^2 sigma_r^2) / C n``

        Args:
            s_r: noised sketches of a silo, shape (B, R).
            t_r: their noise level.
            t: shape (B,), each at least `t_r`.
            path: the probability path.
            generator: the generator of the added noise; the sketches are private already.

        Raises:
            NumericalError: a `t` below `t_r`, since noise cannot be removed.
        """
        if bool((t < t_r - 1e-9).any()):
            raise NumericalError(
                "re-noising", expected=f"t of at least {t_r:g}", got=f"{float(t.min()):g}"
            )
        t = t.double()
        at_r = torch.tensor(t_r, dtype=torch.float64)
        ratio_B = path.alpha(t) / path.alpha(at_r)
        variance_before_B = (ratio_B * path.sigma(at_r)).square()
        # Rounding may make the difference negative where t is t_r.
        added_variance_B = (path.sigma(t).square() - variance_before_B).clamp(min=0.0)
        std_B = added_variance_B.sqrt() / self.scale
        n_BR = torch.randn(s_r.shape, generator=generator, dtype=s_r.dtype)
        ratio_B1 = ratio_B.to(s_r)[:, None]
        std_B1 = std_B.to(s_r)[:, None]
        return ratio_B1 * s_r + std_B1 * n_BR

    def check(self) -> None:
        """Refuse a received sketch under which noise or accounting would not be valid.

        Raises:
            PolicyError: rows that are not orthonormal (so that the noise would not be standard), a scale that is not
                finite or out of range, or group statistics that are not means, covariances and shares.
        """
        parts = (
            self.basis_RD,
            self.mean_D,
            self.group_mean_GR,
            self.group_cov_GRR,
            self.group_weight_G,
        )
        if not all(bool(torch.isfinite(part).all()) for part in parts):
            raise PolicyError(
                "the plan's sketch",
                expected="finite numbers",
                got="NaN or infinity",
                remedy=(
                    "Ask the aggregator for another plan: this one contradicts itself, and "
                    "policy.toml cannot change that."
                ),
            )
        # Images are divided by it: near 0 all would overflow and count as 0, near infinity all would vanish in the
        # noise.
        smallest_scale, largest_scale = _SCALES
        if not smallest_scale <= self.scale <= largest_scale:
            expected = f"{smallest_scale:g} to {largest_scale:g}"
            raise PolicyError(
                "the plan's sketch scale",
                expected=expected,
                got=f"{self.scale:g}",
                remedy=(
                    "Ask the aggregator for another plan: this one contradicts itself, and "
                    "policy.toml cannot change that."
                ),
            )
        basis_RD = self.basis_RD.double()
        gram_RR = basis_RD @ basis_RD.T
        identity_RR = torch.eye(self.rank, dtype=torch.float64)
        off = float((gram_RR - identity_RR).abs().max())
        if off > _TOLERANCE:
            expected = f"orthonormal rows, to {_TOLERANCE:g}"
            raise PolicyError(
                "the plan's sketch basis",
                expected=expected,
                got=f"rows that deviate by {off:g}",
                remedy=(
                    "Ask the aggregator for another plan: this one contradicts itself, and "
                    "policy.toml cannot change that."
                ),
            )
        share_G = self.group_weight_G.double()
        smallest_share = float(share_G.min())
        total = float(share_G.sum())
        if smallest_share <= 0 or abs(total - 1) > _TOLERANCE:
            got = f"shares from {smallest_share:g} that sum to {total:g}"
            raise PolicyError(
                "the plan's group shares",
                expected="shares above 0 that sum to 1",
                got=got,
                remedy=(
                    "Ask the aggregator for another plan: this one contradicts itself, and "
                    "policy.toml cannot change that."
                ),
            )
        cov_GRR = self.group_cov_GRR.double()
        asymmetry = float((cov_GRR - cov_GRR.mT).abs().max())
        smallest = float(torch.linalg.eigvalsh(cov_GRR).min())
        # Written so that NaN is refused too.
        if not asymmetry <= _TOLERANCE or not smallest > 0:
            got = f"a smallest eigenvalue of {smallest:g} and an asymmetry of {asymmetry:g}"
            raise PolicyError(
                "the plan's group covariances",
                expected="positive definite matrices",
                got=got,
                remedy=(
                    "Ask the aggregator for another plan: this one contradicts itself, and "
                    "policy.toml cannot change that."
                ),
            )

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a plan stores."""
        return {
            "basis": self.basis_RD,
            "mean": self.mean_D,
            "scale": torch.tensor([self.scale]),
            "group_mean": self.group_mean_GR,
            "group_cov": self.group_cov_GRR,
            "group_weight": self.group_weight_G,
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Sketch":
        """Rebuild the sketch from tensors loaded against `sketch_specs`; call `check` on a received one."""
        return cls(
            basis_RD=tensors["basis"],
            mean_D=tensors["mean"],
            scale=float(tensors["scale"][0]),
            group_mean_GR=tensors["group_mean"],
            group_cov_GRR=tensors["group_cov"],
            group_weight_G=tensors["group_weight"],
        )

    def _centred(self, x_t: Tensor, alpha_B: Tensor) -> Tensor:
        """Return ``A (x_t - alpha m)``."""
        flat_BD = x_t.flatten(1)
        num_values = flat_BD.shape[1]
        if num_values != len(self.mean_D):
            raise ShapeError(
                "image size", expected=f"{len(self.mean_D)} values", got=str(num_values)
            )
        basis_RD = self.basis_RD.to(flat_BD)
        mean_D = self.mean_D.to(flat_BD)
        # A m is projected once, so that no image is copied to subtract it.
        mean_R = basis_RD @ mean_D
        return flat_BD @ basis_RD.T - alpha_B[:, None] * mean_R


def sketch_specs(data: DataSpec, rank: int, num_groups: int) -> dict[str, TensorSpec]:
    """Return the names, dtypes and shapes of a plan's stored sketch."""
    shapes = {
        "basis": (rank, data.dim),
        "mean": (data.dim,),
        "scale": (1,),
        "group_mean": (num_groups, rank),
        "group_cov": (num_groups, rank, rank),
        "group_weight": (num_groups,),
    }
    return {name: TensorSpec("F32", shape) for name, shape in shapes.items()}


def _into_unit_ball(s_NR: Tensor) -> Tensor:
    """Scale rows of norm above 1 to just below 1, so that rounding keeps them in the unit ball."""
    norm_N1 = s_NR.norm(dim=1, keepdim=True)
    shortened_NR = s_NR / (norm_N1 * (1 + 1e-12))
    return torch.where(norm_N1 > 1, shortened_NR, s_NR)


def _group_moments(s_NR: Tensor, group_N: Tensor, size_G: Tensor) -> tuple[Tensor, Tensor]:
    """Return each group's mean and covariance, shrunk towards the pooled covariance and floored."""
    num_groups = len(size_G)
    rank = s_NR.shape[1]
    sum_GR = s_NR.new_zeros(num_groups, rank).index_add_(0, group_N, s_NR)
    mean_GR = sum_GR / size_G[:, None]
    residual_NR = s_NR - mean_GR[group_N]
    members = (residual_NR[group_N == group] for group in range(num_groups))
    scatter_GRR = torch.stack([residual.T @ residual for residual in members])
    pooled_RR = scatter_GRR.sum(0) / max(len(s_NR) - num_groups, 1)
    largest_variance = float(torch.linalg.eigvalsh(pooled_RR)[-1])
    floor = _FLOOR * largest_variance + 1e-12
    # A group of fewer than R + 1 images has a singular covariance, which the pooled one fills up.
    pseudo = _SHRINK * (rank + 1)
    cov_GRR = (scatter_GRR + pseudo * pooled_RR) / (size_G + pseudo)[:, None, None]
    # The mean of size_G images has a variance of its own.
    cov_GRR = cov_GRR * (1 + 1 / size_G)[:, None, None]
    floor_RR = floor * torch.eye(rank, dtype=s_NR.dtype)
    return mean_GR, cov_GRR + floor_RR
