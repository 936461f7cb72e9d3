"""The Fréchet distance between the Gaussians of two sets of features, its bias, and what each feature contributes.

``FID = |m_a - m_b|^2 + tr(S_a + S_b - 2 (S_a^(1/2) S_b S_a^(1/2))^(1/2))``

All is computed in float64, and roots of matrices by eigenvalues of symmetric ones, so no imaginary part needs dropping.
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
# random halvings; one where features are so long that each takes many seconds
_REPEATS, _MANY = (
    4,
    512,
)
_FLAT = 1e-12  # an eigenvalue below this share of the largest is rounding


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
        num = len(features_ND)
        mean_D = (
            sum(
                (block.double().sum(0) for block in torch.split(features_ND, BLOCK)),
                torch.zeros(()),
            )
            / num
        )
        scatter_DD = torch.zeros(len(mean_D), len(mean_D), dtype=torch.float64)
        for block in torch.split(features_ND, BLOCK):
            centred_BD = block.double() - mean_D
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
        there_DD: maps a onto b, both centred.
        back_DD: maps b onto a.
    """

    distance: float
    there_DD: Tensor
    back_DD: Tensor


def frechet_distance(a: Moments, b: Moments) -> float:
    """Return the squared Fréchet distance between two Gaussians."""
    root_DD, _ = _roots(a.covariance_DD)
    return _distance(a, b, torch.linalg.eigvalsh(root_DD @ b.covariance_DD @ root_DD))


def transport(a: Moments, b: Moments) -> Transport:
    """Return distance and maps.

    With ``M = S_a^(1/2) S_b S_a^(1/2)`` the map there is ``S_a^(-1/2) M^(1/2) S_a^(-1/2)``, the one back its inverse.
    Where a covariance is singular its inverse is taken on its range.
    """
    root_DD, inverse_DD = _roots(a.covariance_DD)
    product_DD = root_DD @ b.covariance_DD @ root_DD
    middle_DD, middle_inverse_DD = _roots(product_DD)
    distance = _distance(a, b, product_DD, middle_DD.trace())
    return Transport(
        distance, inverse_DD @ middle_DD @ inverse_DD, root_DD @ middle_inverse_DD @ root_DD
    )


def frechet_terms(features_ND: Tensor, own: Moments, other: Moments, map_DD: Tensor) -> Tensor:
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
    apart_D, bend_DD = (
        2 * (own.mean_D - other.mean_D),
        torch.eye(len(map_DD), dtype=torch.float64) - map_DD,
    )
    terms = []
    for block in torch.split(features_ND, BLOCK):
        centred_BD = block.double() - own.mean_D
        terms.append(centred_BD @ apart_D + ((centred_BD @ bend_DD) * centred_BD).sum(1))
    return torch.cat(terms)


def extrapolated(
    distance: float, samples_ND: Tensor, reference_MD: Tensor, *, seed: int
) -> float | None:
    """Return FID infinity, from random halves of both sets; None where half a set is too small for its covariance.

    Args:
        distance: of the whole sets.
        samples_ND: features of the samples.
        reference_MD: features of the reference.
        seed: of the halves.
    """
    if min(len(samples_ND), len(reference_MD)) // 2 <= samples_ND.shape[1]:
        return None
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(_REPEATS if samples_ND.shape[1] <= _MANY else 1):
        pairs = (_halves(samples_ND, generator), _halves(reference_MD, generator))
        found += [
            frechet_distance(Moments.of(a), Moments.of(b)) for a, b in zip(*pairs, strict=True)
        ]
    return 2 * distance - sum(found) / len(found)


def _halves(features_ND: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    order_N = torch.randperm(len(features_ND), generator=generator)
    half = len(features_ND) // 2
    return features_ND[order_N[:half]], features_ND[order_N[half : 2 * half]]


def _distance(a: Moments, b: Moments, spectrum: Tensor, root_trace: Tensor | None = None) -> float:
    root = spectrum.clamp(min=0).sqrt().sum() if root_trace is None else root_trace
    apart = (
        (a.mean_D - b.mean_D).square().sum()
        + a.covariance_DD.trace()
        + b.covariance_DD.trace()
        - 2 * root
    )
    return max(float(apart), 0.0)  # below 0 by rounding only


def _roots(symmetric_DD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the square root of a positive matrix, and the inverse of the root on the matrix's range."""
    value_D, vector_DD = torch.linalg.eigh((symmetric_DD + symmetric_DD.T) / 2)
    kept_D = value_D > _FLAT * value_D[-1].clamp(min=0)
    root_D = torch.where(kept_D, value_D, 0.0).sqrt()
    inverse_D = torch.where(kept_D, 1 / root_D, 0.0)
    return (vector_DD * root_D) @ vector_DD.T, (vector_DD * inverse_D) @ vector_DD.T
