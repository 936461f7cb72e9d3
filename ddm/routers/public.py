"""Weights public held-out images to stand in for the silos' images, with bootstrap intervals of weighted averages.

The aggregator has no silo's images. It weights public images by the silos' counts: under the counts router's assumption
that within a public group the images of all silos have the same distribution, ``sum_k pi_k n_kc / n_k`` times the
group's mean loss is the silos' loss. The noised counts enter linearly and unclipped, so their noise adds no bias for a
fixed router. The counts router itself was made from the same noise, so a comparison is biased in its favour.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddm.diffusion.path import Path
from ddm.errors import RefusedError, ShapeError
from ddm.partition.layout import Layout
from ddm.routers.base import Router, log_prior
from ddm.routers.evaluation import BANDS, Band, noised_log_likelihood, times_of

# Shape legend: N images, K silos, E experts, G public groups, S bootstrap draws, M figures, Q = N E.

_BOOTSTRAPS = 2000
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Evidence:
    """The silos' histograms, from which the weights of public images follow.

    Attributes:
        noisy_KG: noised counts, unclipped, in the order of silos.
        num_units: the public number of units of each silo.
        epsilon: the epsilon of the statistic.
        layout: the experts.
        share_K: each silo's weight, summing to 1; its share of all units when omitted.
    """

    noisy_KG: Tensor
    num_units: Sequence[int]
    epsilon: float
    layout: Layout
    share_K: Sequence[float] | None = None

    def __post_init__(self) -> None:
        num_silos = max(self.layout.silo_E) + 1
        num_counts = len(self.noisy_KG)
        num_with_units = len(self.num_units)
        num_shares = num_with_units
        if self.share_K is not None:
            num_shares = len(self.share_K)
        if not num_counts == num_with_units == num_shares == num_silos:
            expected = f"counts, units and shares of {num_silos} silos"
            got = f"{num_counts}, {num_with_units} and {num_shares}"
            raise ShapeError("statistics", expected=expected, got=got)

    def weights(self, group_N: Tensor, seed: int) -> "PublicWeights":
        """Return the weights of public images by their groups; the seed is that of the bootstrap."""
        return PublicWeights(self, group_N, seed)


class PublicWeights:
    """The weight of each public image for each expert; all weights sum to 1.

    Args:
        evidence: the statistics.
        group_N: the images' groups.
        seed: the seed of the bootstrap.

    Raises:
        RefusedError: the images' groups hold no units, as far as the noised counts tell.
    """

    def __init__(self, evidence: Evidence, group_N: Tensor, seed: int) -> None:
        noisy_KG = evidence.noisy_KG.double().numpy()
        n_K1 = np.asarray(evidence.num_units, dtype=np.float64)[:, None]
        num_silos, num_groups = noisy_KG.shape
        even_KG = torch.full((num_silos, num_groups), 1.0 / num_groups, dtype=torch.float64)
        mass_EG, share_E = evidence.layout.split(even_KG)
        # An expert's share of each of its silo's groups: that of a silo which is spread evenly over them.
        self._member_EG = (num_groups * mass_EG * share_E[:, None]).numpy()
        self._silo_E = list(evidence.layout.silo_E)
        share_K1 = n_K1 / n_K1.sum()
        if evidence.share_K is not None:
            share_K1 = np.asarray(evidence.share_K)[:, None]
        self._per_unit_K1 = share_K1 / n_K1
        self._epsilon = evidence.epsilon
        self._shape = noisy_KG.shape
        self._seed = seed
        self._group_N = group_N.numpy()
        self._size_G = np.bincount(self._group_N, minlength=num_groups)
        # A silo's number of units is public, so that its noise is not to change the silo's weight as a whole.
        weight_EG = self._of_experts(_sum_to(noisy_KG, n_K1))
        has_images_G = self._size_G > 0
        covered = float(weight_EG[:, has_images_G].sum())
        # Noised counts may be negative, and a sum of 0 or less cannot be scaled to 1.
        if covered <= 0:
            num_images = len(self._group_N)
            raise RefusedError(
                "public images",
                expected="images in groups that silos hold",
                got=f"{num_images} images, in groups whose noised counts are 0 or less together",
                remedy="Hold out more public images, public images that resemble the silos', or plan a larger epsilon.",
            )
        self._scale_G = 1 / (covered * np.maximum(self._size_G, 1))
        self._weight_EG = weight_EG
        # The weight of a group is shared by its images.
        of_one_image_EG = weight_EG * self._scale_G
        self.weight_NE: NDArray[np.float64] = of_one_image_EG[:, self._group_N].T

    @property
    def _is_exact(self) -> bool:
        """Whether the counts carry no noise."""
        # The probability of a noise of 0 rounds to 1.
        return bool(np.expm1(-self._epsilon / 2) == -1.0)

    def means(self, figure_MNE: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return weighted averages of M figures, each given per image and expert, shape (M,)."""
        figure_MQ = figure_MNE.reshape(len(figure_MNE), -1)
        return np.asarray(figure_MQ @ self.weight_NE.ravel())

    def bootstrap(self, figure_MNE: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return `means` with images of the same groups and noise of the counts resampled, shape (S, M).

        Every call draws the same resamples, so that the figures of different calls are paired.
        """
        rng = np.random.default_rng(self._seed)
        num_images = len(self._group_N)
        # Exact counts leave the images to resample, and their figures summed over experts: of one owner's islands,
        # noise would have as many cells as islands squared.
        own_MN = None
        num_weights = self.weight_NE.size
        if self._is_exact:
            own_MN = (figure_MNE * self.weight_NE).sum(2)
            num_weights = num_images
        at_once = max(1, _BLOCK // num_weights)
        figure_MQ = figure_MNE.reshape(len(figure_MNE), -1)
        # Images in the order of their groups; of each place the group's first place, and the group's size.
        order_N = np.argsort(self._group_N, kind="stable")
        start_G = np.cumsum(self._size_G) - self._size_G
        start_N = np.repeat(start_G, self._size_G)
        size_N = np.repeat(self._size_G, self._size_G)
        draws = []
        for first in range(0, _BOOTSTRAPS, at_once):
            num = min(at_once, _BOOTSTRAPS - first)
            # Each image is replaced by one of its group, so that the groups keep their sizes.
            uniform_SN = rng.random((num, num_images))
            offset_SN = np.floor(uniform_SN * size_N).astype(np.int64)
            pick_SN = order_N[start_N + offset_SN]
            # A range of its own for each draw lets one count over all draws say how often each image was picked.
            first_cell_S1 = num_images * np.arange(num)[:, None]
            cell_SN = pick_SN + first_cell_S1
            times_SN = np.bincount(cell_SN.ravel(), minlength=num * num_images)
            times_SN = times_SN.reshape(num, num_images)
            if own_MN is not None:
                draws.append(times_SN @ own_MN.T)
                continue
            noise_SEG = self._of_experts(self._noise(rng, num))
            weight_SEG = (self._weight_EG + noise_SEG) * self._scale_G
            of_images_SEN = weight_SEG[:, :, self._group_N]
            weight_SNE = times_SN[:, :, None] * of_images_SEN.transpose(0, 2, 1)
            weight_SQ = weight_SNE.reshape(num, -1)
            draws.append(weight_SQ @ figure_MQ.T)
        return np.concatenate(draws)

    def intervals(self, figure_MNE: NDArray[np.float64], num_looks: int = 1) -> NDArray[np.float64]:
        """Return the 95% intervals of `means`, shape (M, 2); jointly 95% for `num_looks` of them (Bonferroni)."""
        value_M = self.means(figure_MNE)
        drawn_SM = self.bootstrap(figure_MNE)
        return spread(value_M, drawn_SM, num_looks)

    def _of_experts(self, count_KG: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the experts' shares of all units from the silos' counts, shape (..., E, G); linear."""
        share_KG = count_KG * self._per_unit_K1
        of_own_silo_EG = share_KG[..., self._silo_E, :]
        return np.asarray(of_own_silo_EG * self._member_EG)

    def _noise(self, rng: np.random.Generator, num: int) -> NDArray[np.float64]:
        # P(z) ~ q^|z| is the difference of two geometric variables. It may come from a seed here: it protects nothing.
        stop = -np.expm1(-self._epsilon / 2)
        shape = (num, *self._shape)
        noise_SKG = rng.geometric(stop, shape) - rng.geometric(stop, shape)
        return _sum_to(noise_SKG.astype(np.float64), 0.0)


@dataclass(frozen=True)
class PublicData:
    """Public images that nothing was fitted on, and their weights.

    Attributes:
        images: shape (N, ...).
        group_N: their groups.
        evidence: the silos' counts.
        prior_E: each expert's share of all units.
        path: the probability path.
        seed: the seed of times, noise and bootstrap.
    """

    images: Tensor
    group_N: Tensor
    evidence: Evidence
    prior_E: Sequence[float]
    path: Path
    seed: int

    @property
    def weights(self) -> PublicWeights:
        """The weight of each image for each expert."""
        return self.evidence.weights(self.group_N, self.seed)

    def losses(self, router: Router, bands: Sequence[Band] = BANDS) -> list[NDArray[np.float64]]:
        """Return ``-log w_e(x_t, t)`` for every expert e, averaged over draws, one (N, E) per band."""
        log_prior_E = log_prior(self.prior_E, router.num_experts)
        losses = []
        for index, band in enumerate(bands):
            log_DNE = self.log_likelihoods(router, band, index) + log_prior_E
            losses.append(-log_DNE.log_softmax(2).mean(0).numpy())
        return losses

    def log_likelihoods(self, router: Router, band: Band, index: int) -> Tensor:
        """Return the router's log-likelihoods of the images in the band of that index, shape (D, N, E)."""
        seed = self.seed + index
        return noised_log_likelihood(router, self.images, band, seed, self.path)

    def times(self, band: Band, index: int) -> Tensor:
        """Return the times at which `log_likelihoods` evaluates the router, shape (D, N)."""
        # The seed of `log_likelihoods`, so that these are its times.
        generator = torch.Generator().manual_seed(self.seed + index)
        return times_of(len(self.images), band, generator)


def spread(
    value_M: NDArray[np.float64],
    drawn_SM: NDArray[np.float64],
    num_looks: int = 1,
) -> NDArray[np.float64]:
    """Return intervals around figures from their bootstrap draws, shape (M, 2); see `PublicWeights.intervals`."""
    tail = 0.025 / num_looks
    shift_2M = np.quantile(drawn_SM - value_M, [tail, 1 - tail], axis=0)
    interval_2M = value_M + shift_2M
    return np.asarray(interval_2M.T)


def _sum_to(noisy: NDArray[np.float64], total: NDArray[np.float64] | float) -> NDArray[np.float64]:
    """Shift rows by a constant so that they sum to the public total; linear, so without bias."""
    num_groups = noisy.shape[-1]
    excess = noisy.sum(-1, keepdims=True) - total
    return np.asarray(noisy - excess / num_groups)
