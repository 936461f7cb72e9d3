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

BlockReport = Callable[[int], None]
"""Called with the features that one block had."""

# Of one block of products: so large that its memory goes back to the system once it is freed.
_BLOCK_BYTES = 1 << 26
_TILE_ROWS = 1024
_ROUNDING = 1e-13  # distances below this share of the features' energy are rounding


@dataclass(frozen=True)
class SelfComparison:
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
class CrossComparison:
    """Samples compared with a reference; the ball of a feature reaches to its k-th neighbour in its own set.

    Attributes:
        inside_N: which samples are in the ball of some reference feature; their share is the precision.
        balls_N: in how many reference balls each sample is.
        recalled_M: which reference features are in the ball of some sample; their share is the recall.
        covered_M: which reference balls have a sample in them; their share is the coverage.
        nearest_N: squared distance from each sample to its nearest reference feature.
        nearest_index_N: the index of that feature.
        kernel_N: sum of the kernel over the reference, for each sample.
        kernel_M: sum of the kernel over the samples, for each reference feature.
    """

    inside_N: Tensor
    balls_N: Tensor
    recalled_M: Tensor
    covered_M: Tensor
    nearest_N: Tensor
    nearest_index_N: Tensor
    kernel_N: Tensor
    kernel_M: Tensor


def compare_with_itself(
    features_ND: Tensor,
    k: int,
    on_block: BlockReport | None = None,
) -> SelfComparison:
    """Compare a set with itself.

    Args:
        features_ND: more than k.
        k: which neighbour bounds a feature's ball.
        on_block: called after each block.
    """
    num, dim = features_ND.shape
    energy_N = _energy(features_ND)
    radius_N = torch.empty(num, dtype=torch.float64)
    nearest_N = torch.empty(num, dtype=torch.float64)
    kernel_N = torch.empty(num, dtype=torch.float64)
    for start, product_BN in _products(features_ND, features_ND):
        num_rows = len(product_BN)
        block = slice(start, start + num_rows)
        row_B = torch.arange(num_rows)
        own_column_B = start + row_B
        # Each feature is its own nearest neighbour, and is left out.
        kernel_BN = _kernel(product_BN, dim)
        kernel_BN[row_B, own_column_B] = 0.0
        squared_BN = _squared_distances(product_BN, energy_N[block], energy_N)
        squared_BN[row_B, own_column_B] = torch.inf
        nearest_BK = squared_BN.topk(k, dim=1, largest=False).values
        radius_N[block] = nearest_BK[:, -1]
        nearest_N[block] = nearest_BK[:, 0]
        kernel_N[block] = kernel_BN.sum(1)
        if on_block:
            on_block(num_rows)
    return SelfComparison(
        radius_N=radius_N,
        nearest_N=nearest_N,
        kernel_N=kernel_N,
        k=k,
    )


def compare_sets(
    samples_ND: Tensor,
    reference_MD: Tensor,
    samples: SelfComparison,
    reference: SelfComparison,
    on_block: BlockReport | None = None,
) -> CrossComparison:
    """Compare samples with a reference.

    Args:
        samples_ND: features of the samples.
        reference_MD: features of the reference.
        samples: the samples compared with themselves.
        reference: the reference compared with itself.
        on_block: called after each block.
    """
    num, dim = samples_ND.shape
    num_reference = len(reference_MD)
    energy_N = _energy(samples_ND)
    energy_M = _energy(reference_MD)
    both = CrossComparison(
        inside_N=torch.empty(num, dtype=torch.bool),
        balls_N=torch.empty(num, dtype=torch.int64),
        recalled_M=torch.zeros(num_reference, dtype=torch.bool),
        covered_M=torch.zeros(num_reference, dtype=torch.bool),
        nearest_N=torch.empty(num, dtype=torch.float64),
        nearest_index_N=torch.empty(num, dtype=torch.int64),
        kernel_N=torch.empty(num, dtype=torch.float64),
        kernel_M=torch.zeros(num_reference, dtype=torch.float64),
    )
    for start, product_BM in _products(samples_ND, reference_MD):
        block = slice(start, start + len(product_BM))
        # The kernel comes before the distances, which are computed in place of the products.
        kernel_BM = _kernel(product_BM, dim)
        both.kernel_N[block] = kernel_BM.sum(1)
        both.kernel_M.add_(kernel_BM.sum(0))

        squared_BM = _squared_distances(product_BM, energy_N[block], energy_M)
        nearest_B = squared_BM.min(1)
        both.nearest_N[block] = nearest_B.values
        both.nearest_index_N[block] = nearest_B.indices

        in_reference_ball_BM = squared_BM <= reference.radius_N
        both.inside_N[block] = in_reference_ball_BM.any(1)
        both.balls_N[block] = in_reference_ball_BM.sum(1)
        is_covered_M = in_reference_ball_BM.any(0)
        both.covered_M.logical_or_(is_covered_M)

        in_sample_ball_BM = squared_BM <= samples.radius_N[block, None]
        is_recalled_M = in_sample_ball_BM.any(0)
        both.recalled_M.logical_or_(is_recalled_M)
        if on_block:
            on_block(len(product_BM))
    return both


def kernel_distance(
    samples: SelfComparison,
    reference: SelfComparison,
    both: CrossComparison,
) -> tuple[float, tuple[Tensor, Tensor]]:
    """Return KID, the unbiased squared maximum mean discrepancy of ``(x.y / D + 1)^3``, and its first-order terms."""
    num = len(samples.kernel_N)
    num_reference = len(reference.kernel_N)
    # Mean kernels without each feature's own, which is what makes the estimate unbiased.
    own_N = samples.kernel_N / (num - 1)
    own_M = reference.kernel_N / (num_reference - 1)
    other_N = both.kernel_N / num_reference
    other_M = both.kernel_M / num
    within_sets = own_N.mean() + own_M.mean()
    between_sets = other_N.mean()
    value = within_sets - 2 * between_sets
    term_N = 2 * (own_N - other_N)
    term_M = 2 * (own_M - other_M)
    return float(value), (term_N, term_M)


def nearest(rows_ND: Tensor, others_MD: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's squared distance to the nearest of the others, and its index."""
    energy_N = _energy(rows_ND)
    energy_M = _energy(others_MD)
    nearest_N = torch.empty(len(rows_ND), dtype=torch.float64)
    index_N = torch.empty(len(rows_ND), dtype=torch.int64)
    for start, product_BM in _products(rows_ND, others_MD):
        block = slice(start, start + len(product_BM))
        squared_BM = _squared_distances(product_BM, energy_N[block], energy_M)
        nearest_B = squared_BM.min(1)
        nearest_N[block] = nearest_B.values
        index_N[block] = nearest_B.indices
    return nearest_N, index_N


def nearest_in_blocks(
    rows_ND: Tensor,
    blocks: Iterable[tuple[int, Tensor]],
    k: int,
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
    shape = (len(rows_ND), k)
    nearest_NK = torch.full(shape, torch.inf, dtype=torch.float64)
    number_NK = torch.full(shape, -1, dtype=torch.int64)
    for first, others_BD in blocks:
        energy_B = _energy(others_BD)
        num_candidates = min(k, len(others_BD))
        for start, product_RB in _products(rows_ND, others_BD):
            rows = slice(start, start + len(product_RB))
            squared_RB = _squared_distances(product_RB, energy_N[rows], energy_B)
            candidates = squared_RB.topk(num_candidates, dim=1, largest=False)
            candidate_numbers = candidates.indices + first
            # The k nearest of this block and of all blocks before it, which are in the table.
            best_before = nearest_NK[rows]
            numbers_before = number_NK[rows]
            squared_RC = torch.cat([best_before, candidates.values], 1)
            number_RC = torch.cat([numbers_before, candidate_numbers], 1)
            best = squared_RC.topk(k, dim=1, largest=False)
            nearest_NK[rows] = best.values
            number_NK[rows] = number_RC.gather(1, best.indices)
    return nearest_NK, number_NK


def _products(a_ND: Tensor, b_MD: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield where each block of rows begins, and its inner products with all of b, shape (B, M), float64."""
    num_others = len(b_MD)
    row_bytes = 8 * num_others
    num_rows = max(1, _BLOCK_BYTES // row_bytes)
    for start in range(0, len(a_ND), num_rows):
        block_BD = a_ND[start : start + num_rows].double()
        product_BM = torch.empty(len(block_BD), num_others, dtype=torch.float64)
        # Tile by tile, so that b is never held in float64 as a whole.
        for first in range(0, num_others, _TILE_ROWS):
            tile = slice(first, first + _TILE_ROWS)
            tile_TD = b_MD[tile].double()
            product_BM[:, tile] = block_BD @ tile_TD.T
        yield start, product_BM


def _kernel(product_BM: Tensor, dim: int) -> Tensor:
    """Return ``(x.y / D + 1)^3``."""
    # The division makes the one copy, since the products are still needed.
    kernel_BM = product_BM / dim
    return kernel_BM.add_(1).pow_(3)


def _energy(features_ND: Tensor) -> Tensor:
    """Return each feature's squared length, shape (N,), float64."""
    energies = []
    for tile_TD in torch.split(features_ND, _TILE_ROWS):
        squared_TD = tile_TD.double().square()
        energies.append(squared_TD.sum(1))
    return torch.cat(energies)


def _squared_distances(
    product_BM: Tensor,
    energy_B: Tensor,
    energy_M: Tensor,
) -> Tensor:
    """Turn inner products, in place, into squared distances; 0 where they are no more than rounding."""
    total_BM = energy_B[:, None] + energy_M
    # |a - b|^2 = |a|^2 + |b|^2 - 2 a.b. Of two equal features this leaves rounding, maybe below 0: a copy must have the
    # distance 0.
    squared_BM = product_BM.mul_(-2).add_(total_BM)
    rounding_BM = total_BM.mul_(_ROUNDING)
    is_rounding_BM = squared_BM <= rounding_BM
    return squared_BM.masked_fill_(is_rounding_BM, 0.0)
