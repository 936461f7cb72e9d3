"""The Fréchet distance between the Gaussians of two sets of features, its bias, and what each feature contributes.

``FID = |m_a - m_b|^2 + tr(S_a + S_b - 2 (S_a^(1/2) S_b S_a^(1/2))^(1/2))``

All is computed in float64, and roots of matrices by eigenvalues of symmetric ones, so that they have no imaginary part.
The estimate from N features is biased upwards by about c / N. From half the features it is biased by 2 c / N, so
``2 FID(N) - FID(N / 2)`` removes this part (FID infinity).

Source:
    Heusel et al. 2017, GANs trained by a two time-scale update rule; Chong and Forsyth 2020, Effectively unbiased FID.
"""

# Shape legend: N features, D values of one.
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 1024  # features that are converted to float64 together
# Random halvings, whose distances are averaged; a single one where features are so long that each takes many seconds.
_NUM_HALVINGS = 4
_LONG_FEATURES = 512
_ROUNDING = 1e-12  # an eigenvalue below this share of the largest is rounding


@dataclass(frozen=True)
class Moments:
    """Mean and covariance of features.

    Attributes:
        num: N, at least 2.
        mean_D: float64.
        covariance_DD: unbiased, float64.
    """

    num: int
    mean_D: Tensor
    covariance_DD: Tensor

    @classmethod
    def of(cls, features_ND: Tensor) -> "Moments":
        """Compute both, block by block."""
        num, dim = features_ND.shape
        total_D = torch.zeros(dim, dtype=torch.float64)
        for block_BD in torch.split(features_ND, BLOCK):
            exact_BD = block_BD.double()
            total_D += exact_BD.sum(0)
        # The mean first, in a pass of its own: the mean square less the squared mean would lose digits where features
        # are far from 0.
        mean_D = total_D / num
        scatter_DD = torch.zeros(dim, dim, dtype=torch.float64)
        for block_BD in torch.split(features_ND, BLOCK):
            centred_BD = block_BD.double() - mean_D
            scatter_DD.addmm_(centred_BD.T, centred_BD)
        return cls(num, mean_D, scatter_DD / (num - 1))

    @property
    def singular(self) -> bool:
        """Whether there are too few features for a covariance of full rank."""
        return self.num <= len(self.mean_D)


@dataclass(frozen=True)
class Transport:
    """The optimal maps between two Gaussians, from which distance and derivatives follow.

    Attributes:
        distance: the squared Fréchet distance.
        map_to_b_DD: from a to b, both centred.
        map_to_a_DD: from b to a.
    """

    distance: float
    map_to_b_DD: Tensor
    map_to_a_DD: Tensor


def frechet_distance(a: Moments, b: Moments) -> float:
    """Return the squared Fréchet distance between two Gaussians."""
    root_DD, _ = _roots(a.covariance_DD)
    product_DD = root_DD @ b.covariance_DD @ root_DD
    # The trace of its root is that of the roots of its eigenvalues, which cost less than the root itself.
    eigenvalue_D = torch.linalg.eigvalsh(product_DD)
    root_trace = eigenvalue_D.clamp(min=0).sqrt().sum()
    return _distance(a, b, root_trace)


def transport(a: Moments, b: Moments) -> Transport:
    """Return distance and maps.

    With ``M = S_a^(1/2) S_b S_a^(1/2)`` the map there is ``S_a^(-1/2) M^(1/2) S_a^(-1/2)``, the one back its inverse.
    Where a covariance is singular its inverse is taken on its range.
    """
    root_DD, inverse_DD = _roots(a.covariance_DD)
    product_DD = root_DD @ b.covariance_DD @ root_DD
    middle_DD, middle_inverse_DD = _roots(product_DD)
    return Transport(
        distance=_distance(a, b, middle_DD.trace()),
        map_to_b_DD=inverse_DD @ middle_DD @ inverse_DD,
        map_to_a_DD=root_DD @ middle_inverse_DD @ root_DD,
    )


def frechet_terms(
    features_ND: Tensor,
    own: Moments,
    other: Moments,
    map_DD: Tensor,
) -> Tensor:
    """Return the derivative of the distance in the direction of each feature, up to a constant.

    ``2 (m - m') (x - m) + (x - m)^T (1 - T) (x - m)``, T the optimal map from the features' own Gaussian to the other.

    Args:
        features_ND: the features.
        own: their moments.
        other: those of the other set.
        map_DD: T.

    Returns:
        Shape (N,), float64.
    """
    linear_D = 2 * (own.mean_D - other.mean_D)
    identity_DD = torch.eye(len(map_DD), dtype=torch.float64)
    quadratic_DD = identity_DD - map_DD
    terms = []
    for block_BD in torch.split(features_ND, BLOCK):
        centred_BD = block_BD.double() - own.mean_D
        linear_B = centred_BD @ linear_D
        mapped_BD = centred_BD @ quadratic_DD
        quadratic_B = (mapped_BD * centred_BD).sum(1)
        terms.append(linear_B + quadratic_B)
    return torch.cat(terms)


def fid_infinity_of(
    distance: float,
    samples_ND: Tensor,
    reference_MD: Tensor,
    *,
    seed: int,
) -> float | None:
    """Return FID infinity, from random halves of both sets; None where half a set is too small for its covariance.

    Args:
        distance: of the whole sets.
        samples_ND: features of the samples.
        reference_MD: features of the reference.
        seed: the seed of the halves.
    """
    dim = samples_ND.shape[1]
    num_images = min(len(samples_ND), len(reference_MD))
    if num_images // 2 <= dim:
        return None
    num_halvings = _NUM_HALVINGS
    if dim > _LONG_FEATURES:
        num_halvings = 1
    generator = torch.Generator().manual_seed(seed)
    half_distances = []
    for _ in range(num_halvings):
        sample_halves = _random_halves(samples_ND, generator)
        reference_halves = _random_halves(reference_MD, generator)
        for samples, reference in zip(sample_halves, reference_halves, strict=True):
            sample_moments = Moments.of(samples)
            reference_moments = Moments.of(reference)
            half_distance = frechet_distance(sample_moments, reference_moments)
            half_distances.append(half_distance)
    mean_of_halves = sum(half_distances) / len(half_distances)
    # The bias is proportional to 1 / N: that of a half is twice that of the whole.
    return 2 * distance - mean_of_halves


def _random_halves(features_ND: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return two random halves; of an odd number of features one is in neither."""
    order_N = torch.randperm(len(features_ND), generator=generator)
    half = len(features_ND) // 2
    first_half = features_ND[order_N[:half]]
    second_half = features_ND[order_N[half : 2 * half]]
    return first_half, second_half


def _distance(
    a: Moments,
    b: Moments,
    root_trace: Tensor,
) -> float:
    """Return the squared distance, given the trace of the root of ``S_a^(1/2) S_b S_a^(1/2)``."""
    difference_D = a.mean_D - b.mean_D
    of_means = difference_D.square().sum()
    trace_a = a.covariance_DD.trace()
    trace_b = b.covariance_DD.trace()
    of_covariances = trace_a + trace_b - 2 * root_trace
    # Below 0 by rounding only.
    return max(float(of_means + of_covariances), 0.0)


def _roots(symmetric_DD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the square root of a positive matrix, and the inverse of the root on the matrix's range."""
    # Products of three matrices are symmetric up to rounding only, and `eigh` reads one triangle.
    exactly_symmetric_DD = (symmetric_DD + symmetric_DD.T) / 2
    value_D, vector_DD = torch.linalg.eigh(exactly_symmetric_DD)
    # What should be 0 in a singular covariance comes out as rounding, and its inverse would be enormous.
    largest = value_D[-1].clamp(min=0)
    in_range_D = value_D > _ROUNDING * largest
    root_D = torch.where(in_range_D, value_D, 0.0).sqrt()
    inverse_D = torch.where(in_range_D, 1 / root_D, 0.0)
    root_DD = (vector_DD * root_D) @ vector_DD.T
    inverse_DD = (vector_DD * inverse_D) @ vector_DD.T
    return root_DD, inverse_DD
