"""Kernel sums and nearest neighbours of two sets of features, in one pass over blocks of their products.

Kernel means give KID; the distances to the k-th neighbour give precision, recall, density and coverage. Squared
distances follow from inner products in float64. Memory grows with the number of features, never with its square.

Source:
    Bińkowski et al. 2018, Demystifying MMD GANs (KID); Kynkäänniemi et al. 2019, Improved precision and recall metric;
    Naeem et al. 2020, Reliable fidelity and diversity metrics (density, coverage).
"""

# Shape legend: N samples, M reference features, B of one block, D values of one feature, K neighbours.
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Tick = Callable[[int], None]
"""Called with the features that one block had."""

# of one block of products: so large that its memory goes back once it is freed
_BLOCK_BYTES = 1 << 26
_TILE = 1024
_SAME = 1e-13  # distances below this share of the features' energy are rounding


@dataclass(frozen=True)
class Within:
    """One set of features compared with itself, each feature left out of its own comparison.

    Attributes:
        radius_N: squared distance to the k-th neighbour.
        nearest_N: squared distance to the nearest other feature.
        kernel_N: sum of the kernel over all others.
        k: which neighbour bounds a feature's ball.
    """

    radius_N: Tensor
    nearest_N: Tensor
    kernel_N: Tensor
    k: int


@dataclass(frozen=True)
class Between:
    """Samples compared with a reference.

    Attributes:
        inside_N: which samples lie in the ball of some reference feature; their share is the precision.
        balls_N: in how many reference balls each sample lies.
        recalled_M: which reference features lie in the ball of some sample; their share is the recall.
        covered_M: which reference balls hold a sample; their share is the coverage.
        nearest_N: squared distance from each sample to its nearest reference feature.
        which_N: the index of that feature.
        kernel_N: sum of the kernel over the reference, for each sample.
        kernel_M: sum of the kernel over the samples, for each reference feature.
    """

    inside_N: Tensor
    balls_N: Tensor
    recalled_M: Tensor
    covered_M: Tensor
    nearest_N: Tensor
    which_N: Tensor
    kernel_N: Tensor
    kernel_M: Tensor


def within(features_ND: Tensor, k: int, tick: Tick | None = None) -> Within:
    """Compare a set with itself.

    Args:
        features_ND: more than k.
        k: which neighbour bounds a feature's ball.
        tick: called after each block.
    """
    energy_N, parts = _energy(features_ND), []
    for start, product_BN in _products(features_ND, features_ND):
        rows = torch.arange(len(product_BN))
        kernel_BN = _kernel(product_BN, features_ND.shape[1])
        kernel_BN[rows, start + rows] = 0.0
        apart_BN = _squared(product_BN, energy_N[start : start + len(rows)], energy_N)
        apart_BN[rows, start + rows] = torch.inf
        nearest_BK = apart_BN.topk(k, dim=1, largest=False).values
        parts.append((nearest_BK[:, -1], nearest_BK[:, 0], kernel_BN.sum(1)))
        if tick:
            tick(len(rows))
    radius_N, nearest_N, kernel_N = (torch.cat(part) for part in zip(*parts, strict=True))
    return Within(radius_N, nearest_N, kernel_N, k)


def between(
    samples_ND: Tensor, reference_MD: Tensor, own: Within, theirs: Within, tick: Tick | None = None
) -> Between:
    """Compare samples with a reference.

    Args:
        samples_ND: features of the samples.
        reference_MD: features of the reference.
        own: the samples within themselves.
        theirs: the reference within itself.
        tick: called after each block.
    """
    energy_N, energy_M = _energy(samples_ND), _energy(reference_MD)
    recalled_M, covered_M = (torch.zeros(len(reference_MD), dtype=torch.bool) for _ in range(2))
    kernel_M, parts = torch.zeros(len(reference_MD), dtype=torch.float64), []
    for start, product_BM in _products(samples_ND, reference_MD):
        rows = slice(start, start + len(product_BM))
        kernel_BM = _kernel(product_BM, samples_ND.shape[1])
        kernel_M += kernel_BM.sum(0)
        apart_BM = _squared(product_BM, energy_N[rows], energy_M)
        balls_BM = apart_BM <= theirs.radius_N
        recalled_M |= (apart_BM <= own.radius_N[rows, None]).any(0)
        covered_M |= balls_BM.any(0)
        nearest = apart_BM.min(1)
        parts.append(
            (balls_BM.any(1), balls_BM.sum(1), nearest.values, nearest.indices, kernel_BM.sum(1))
        )
        if tick:
            tick(len(product_BM))
    inside_N, balls_N, nearest_N, which_N, kernel_N = (
        torch.cat(part) for part in zip(*parts, strict=True)
    )
    return Between(inside_N, balls_N, recalled_M, covered_M, nearest_N, which_N, kernel_N, kernel_M)


def kernel_distance(
    own: Within, theirs: Within, both: Between
) -> tuple[float, tuple[Tensor, Tensor]]:
    """Return KID, the unbiased squared maximum mean discrepancy of ``(x.y / D + 1)^3``, and its first-order terms."""
    num, others = len(own.kernel_N), len(theirs.kernel_N)
    own_N, theirs_M = own.kernel_N / (num - 1), theirs.kernel_N / (others - 1)
    value = own_N.mean() + theirs_M.mean() - 2 * both.kernel_N.mean() / others
    return float(value), (
        2 * (own_N - both.kernel_N / others),
        2 * (theirs_M - both.kernel_M / num),
    )


def nearest(rows_ND: Tensor, others_MD: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's squared distance to the nearest of the others, and its index."""
    energy_N, energy_M = _energy(rows_ND), _energy(others_MD)
    parts = [
        _squared(product_BM, energy_N[start : start + len(product_BM)], energy_M).min(1)
        for start, product_BM in _products(rows_ND, others_MD)
    ]
    return torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts])


def nearest_few(
    rows_ND: Tensor, blocks: Iterable[tuple[int, Tensor]], k: int
) -> tuple[Tensor, Tensor]:
    """Find each row's k nearest among others that come in blocks and are never held together.

    Args:
        rows_ND: the rows.
        blocks: the others, each block with the number of its first.
        k: how many; of fewer others the rest is at infinity, with the number -1.

    Returns:
        Squared distances, ascending, and numbers of the others, each of shape (N, k).
    """
    energy_N = _energy(rows_ND)
    apart_NK = torch.full((len(rows_ND), k), torch.inf, dtype=torch.float64)
    which_NK = torch.full((len(rows_ND), k), -1, dtype=torch.int64)
    for first, others_BD in blocks:
        energy_B = _energy(others_BD)
        for start, product_RB in _products(rows_ND, others_BD):
            rows = slice(start, start + len(product_RB))
            found = _squared(product_RB, energy_N[rows], energy_B).topk(
                min(k, len(others_BD)), dim=1, largest=False
            )
            both = (
                torch.cat([apart_NK[rows], found.values], 1),
                torch.cat([which_NK[rows], found.indices + first], 1),
            )
            kept = both[0].topk(k, dim=1, largest=False)
            apart_NK[rows], which_NK[rows] = kept.values, both[1].gather(1, kept.indices)
    return apart_NK, which_NK


def _products(a_ND: Tensor, b_MD: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield where each block of rows begins, and its inner products with all of b, shape (B, M), float64."""
    size = max(1, _BLOCK_BYTES // (8 * len(b_MD)))
    for start in range(0, len(a_ND), size):
        block_BD = a_ND[start : start + size].double()
        product_BM = torch.empty(len(block_BD), len(b_MD), dtype=torch.float64)
        for first in range(0, len(b_MD), _TILE):
            product_BM[:, first : first + _TILE] = block_BD @ b_MD[first : first + _TILE].double().T
        yield start, product_BM


def _kernel(product_BM: Tensor, dim: int) -> Tensor:
    return (product_BM / dim).add_(1).pow_(3)


def _energy(features_ND: Tensor) -> Tensor:
    return torch.cat([block.double().square().sum(1) for block in torch.split(features_ND, _TILE)])


def _squared(product_BM: Tensor, energy_B: Tensor, energy_M: Tensor) -> Tensor:
    """Turn inner products, in place, into squared distances; 0 where they are no more than rounding."""
    total_BM = energy_B[:, None] + energy_M
    apart_BM = product_BM.mul_(-2).add_(total_BM)
    return apart_BM.masked_fill_(apart_BM <= total_BM.mul_(_SAME), 0.0)
