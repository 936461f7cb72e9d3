"""Log-densities of noised sketches under many Gaussians, for the counts router.

``log N(s; alpha m_g, alpha^2 S_g + (sigma / C)^2 I)`` for every g: in the eigenbasis of S_g the covariance is diagonal
at every t, so one matrix product rotates a sketch into the eigenbases of all Gaussians, and no matrix is inverted.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ddm.errors import NumericalError, ShapeError

# Shape legend: G Gaussians, B batch, R sketch dimensions, Q = G R.

# Values of one intermediate tensor, small enough for a processor's cache.
_BLOCK = 1 << 19


class NoisedGaussians:
    """Gaussians of clean sketches, convolved with any amount of noise.

    Args:
        mean_GR: their means.
        cov_GRR: their covariances, symmetric.

    Raises:
        ShapeError: not one covariance per mean.
        NumericalError: numbers that are not finite, or a covariance that is not positive definite.
    """

    def __init__(self, mean_GR: Tensor, cov_GRR: Tensor) -> None:
        num, rank = mean_GR.shape
        expected_shape = (num, rank, rank)
        if cov_GRR.shape != expected_shape:
            raise ShapeError(
                "covariances", expected=str(expected_shape), got=str(tuple(cov_GRR.shape))
            )
        are_means_finite = bool(torch.isfinite(mean_GR).all())
        are_covariances_finite = bool(torch.isfinite(cov_GRR).all())
        if not are_means_finite or not are_covariances_finite:
            raise NumericalError(
                "Gaussians", expected="finite means and covariances", got="NaN or infinity"
            )
        # In its own axes a Gaussian is independent in each, and remains so with any amount of noise, so that one
        # product with the axes of all of them replaces a decomposition for each t.
        spread_GR, axes_GRR = torch.linalg.eigh(cov_GRR.double())
        smallest = float(spread_GR.min())
        if smallest <= 0:
            got = f"a smallest eigenvalue of {smallest:g}"
            raise NumericalError("covariances", expected="positive definite matrices", got=got)
        self._num = num
        self._axes_RQ = axes_GRR.permute(1, 0, 2).reshape(rank, num * rank)
        self._mean_Q = torch.einsum("gr,grq->gq", mean_GR.double(), axes_GRR).flatten()
        self._spread_Q = spread_GR.flatten()

    def log_density(self, s_BR: Tensor, alpha_B: Tensor, noise_B: Tensor) -> Tensor:
        """Return the log densities up to a constant common to all Gaussians, shape (B, G).

        Args:
            s_BR: noised sketches; computed in their precision, at least float32.
            alpha_B: weight of the data, shape (B,).
            noise_B: standard deviation of the noise in a sketch, shape (B,).
        """
        dtype = torch.promote_types(s_BR.dtype, torch.float32)
        s_BR = s_BR.to(dtype)
        axes_RQ = self._axes_RQ.to(s_BR)
        mean_Q = self._mean_Q.to(s_BR)
        spread_Q = self._spread_Q.to(s_BR)
        alpha_B1 = alpha_B.to(s_BR)[:, None]
        noise_B1 = noise_B.to(s_BR)[:, None]
        chunks = []
        for rows in blocks(s_BR.shape[0], len(spread_Q)):
            alpha = alpha_B1[rows]
            noise = noise_B1[rows]
            # Noised, a Gaussian has mean alpha m and covariance alpha^2 C + noise^2 I.
            along_BQ = s_BR[rows] @ axes_RQ - alpha * mean_Q
            variance_BQ = alpha.square() * spread_Q + noise.square()
            terms_BQ = along_BQ.square() / variance_BQ + variance_BQ.log()
            terms_BGR = terms_BQ.unflatten(1, (self._num, -1))
            chunks.append(-0.5 * terms_BGR.sum(2))
        return torch.cat(chunks)


def blocks(num_rows: int, width: int) -> Iterator[slice]:
    """Yield slices of rows of `width` values that fit one block, at least one row each."""
    if torch.compiler.is_compiling():
        # A program that torch traces has one block, whatever number of rows it will be called with.
        yield slice(None)
        return
    rows = max(1, _BLOCK // width)
    # Without any rows there is one empty block, so that what is concatenated has a shape.
    for start in range(0, max(num_rows, 1), rows):
        yield slice(start, start + rows)
