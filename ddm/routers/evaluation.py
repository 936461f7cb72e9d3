"""How good is a router? Cross-entropy per band of t, on labelled images or, where nobody has labels, on public ones.

The aggregator has no silo's images. It weighs public held-out images by the released counts: under the counts router's
own premise, that within a public group all silos look alike, ``sum_k pi_k n_kc / n_k`` times the group's mean loss is
the silos' loss. The noisy counts enter linearly and unclipped, so their noise adds no bias for a fixed router. The
counts router was made from that same noise, which flatters it: the comparison leans against the learned router.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddm.errors import RefusedError, ShapeError
from ddm.routers.base import Router, log_prior
from ddm.routers.counts import CountsRouter
from ddm.routers.learned import LearnedRouter
from ddm.schedule import LinearPath, Path, x_t

# Shape legend: N images, K experts, G public groups, J bands of t, S bootstrap draws.

Band = tuple[float, float]
BANDS: tuple[Band, ...] = ((0.0, 0.2), (0.2, 0.4), (0.4, 0.6), (0.6, 0.8), (0.8, 1.0))
_DRAWS = 8
_BLOCK = 4096
_BOOTSTRAPS = 1000
_CHANGED = 1e-6
_TIE = 1e-9

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class BandScore:
    """A router's cross-entropy, nats, for t in [low, high), with its standard error over images."""

    low: float
    high: float
    value: float
    error: float


@dataclass(frozen=True)
class BandComparison:
    """Two routers and the prior for t in [low, high), all in nats; `difference` is learned minus counts.

    Attributes:
        low: where the band begins.
        high: where it ends.
        prior: cross-entropy of answering the prior.
        counts: cross-entropy of the counts router.
        learned: cross-entropy of the learned router.
        difference: paired, learned minus counts.
        difference_low: lower end of its 95% interval.
        difference_high: upper end.
    """

    low: float
    high: float
    prior: float
    counts: float
    learned: float
    difference: float
    difference_low: float
    difference_high: float

    @property
    def worse(self) -> bool:
        """Is the learned router worse than counts by more than the interval allows?"""
        return self.difference > _TIE and self.difference_low > 0.0


@dataclass(frozen=True)
class Comparison:
    """What the aggregator knows of both routers.

    Attributes:
        bands: on weighted public images.
        sketches: on held-out released sketches, which have true labels, from t_release to 1.
        trained: the learned router's weights differ from the counts router's.
        publish_learned: it was trained, and is not worse than counts in any band nor on the sketches.
    """

    bands: tuple[BandComparison, ...]
    sketches: BandComparison
    trained: bool
    publish_learned: bool


def cross_entropy(
    router: Router,
    x_N: Tensor,
    label_N: Tensor,
    prior: Sequence[float] | Tensor,
    times: Sequence[Band] = BANDS,
    seed: int = 0,
    *,
    path: Path | None = None,
) -> tuple[BandScore, ...]:
    """Return the cross-entropy ``-log w_k(x_t, t)`` of labelled images in each band of t.

    Each expert's images are averaged first and then weighted by the prior, so the mix of the images does not matter.

    Args:
        router: answers the likelihoods.
        x_N: images, shape (N, ...), data units.
        label_N: the expert of each; every expert with a prior above 0 needs at least one image.
        prior: weight of each expert.
        times: bands of t.
        seed: of times and noise; the same seed gives two routers the same noise.
        path: the probability path; linear when omitted.

    Raises:
        ShapeError: an expert without images, or not one label per image.
    """
    prior_K = log_prior(prior, router.num_experts).exp()
    size_K = torch.bincount(label_N, minlength=router.num_experts)
    if len(label_N) != len(x_N) or len(size_K) != len(prior_K) or bool(((size_K == 0) & (prior_K > 0)).any()):
        raise ShapeError("labels", expected="one per image, and an image of every expert", got="others")
    weight_N = (prior_K / size_K.clamp(min=1))[label_N]
    scores = []
    for index, (low, high) in enumerate(times):
        loss_NK = _losses(router, x_N, prior_K, (low, high), seed + index, path or LinearPath())
        loss_N = loss_NK.gather(1, label_N[:, None])[:, 0]
        value = float((weight_N * loss_N).sum())
        spread = [loss_N[label_N == k].var(correction=0) / max(int(n) - 1, 1) for k, n in enumerate(size_K) if n > 0]
        kept_K = prior_K[size_K > 0]
        error = float((kept_K.square() * torch.stack(spread)).sum().sqrt())
        scores.append(BandScore(low=low, high=high, value=value, error=error))
    return tuple(scores)


def public_comparison(
    counts: CountsRouter,
    learned: LearnedRouter,
    images: Tensor,
    group_N: Tensor,
    noisy_KG: Tensor,
    num_units: Sequence[int],
    held_out: Mapping[str, Tensor],
    *,
    epsilon: float,
    seed: int,
    bands: Sequence[Band] = BANDS,
) -> Comparison:
    """Compare the learned router with the counts router without any silo's images, and decide.

    The learned router is published when it was trained and its paired difference to counts is nowhere above 0 by more
    than its 95% interval. The interval covers the choice of public images and the counts release's own noise.

    Args:
        counts: the baseline.
        learned: the candidate.
        images: public images that neither the groups nor the sketch were fitted on, shape (N, ...).
        group_N: their groups.
        noisy_KG: the released histograms, unclipped, in the order of experts.
        num_units: the public number of units of each expert.
        held_out: released sketches by silo, in the order of experts, that the learned router was not trained on.
        epsilon: of the counts release.
        seed: of times, noise and bootstrap.
        bands: bands of t.

    Raises:
        ShapeError: histograms, sizes or sketches for another number of experts.
        RefusedError: on public data the counts router is worse than the prior: the releases contradict the plan.
    """
    if not len(noisy_KG) == len(num_units) == len(held_out) == counts.num_experts == learned.num_experts:
        raise ShapeError("releases", expected=f"{counts.num_experts} of each kind", got="others")
    prior_K = torch.tensor(num_units, dtype=torch.float64) / sum(num_units)
    weights = _PublicWeights(noisy_KG, prior_K, num_units, group_N, epsilon, seed)
    found, gains = [], []
    for index, (low, high) in enumerate(bands):
        args = (images, prior_K, (low, high), seed + index, counts.path)
        counts_NK, learned_NK = _losses(counts, *args), _losses(learned, *args)
        prior_NK = -prior_K.log().expand_as(counts_NK)
        found.append(
            _compare(
                (low, high),
                [weights.mean(part) for part in (prior_NK, counts_NK, learned_NK)],
                weights.interval(learned_NK - counts_NK),
            )
        )
        gains.append(counts_NK - prior_NK)
    excess_NK = torch.stack(gains).mean(0)
    if weights.interval(excess_NK)[0] > 0:
        loss = f"{weights.mean(excess_NK):.4f} nats worse"
        raise RefusedError("counts router on public data", expected="at least as good as the prior", got=loss)
    sketches = _compare_sketches(counts, learned, list(held_out.values()), prior_K, seed)
    trained = _differs(counts, learned)
    publish = trained and not any(part.worse for part in (*found, sketches))
    return Comparison(bands=tuple(found), sketches=sketches, trained=trained, publish_learned=publish)


class _PublicWeights:
    """How much each public image counts for each expert, and how uncertain any weighted mean is."""

    def __init__(
        self,
        noisy_KG: Tensor,
        prior_K: Tensor,
        num_units: Sequence[int],
        group_N: Tensor,
        epsilon: float,
        seed: int,
    ) -> None:
        n_K1 = np.asarray(num_units, dtype=np.float64)[:, None]
        share_K1 = prior_K.numpy()[:, None] / n_K1
        self._group_N = group_N.numpy()
        self._size_G = np.bincount(self._group_N, minlength=noisy_KG.shape[1])
        self._weight_KG = share_K1 * _sum_to(noisy_KG.double().numpy(), n_K1)
        present_G = self._size_G > 0
        covered = self._weight_KG[:, present_G].sum()
        if covered <= 0:
            raise RefusedError("public images", expected="some in the silos' groups", got="none")
        self._scale = 1 / float(covered)
        self._rng = np.random.default_rng(seed)
        # P(z) ~ q^|z| is the difference of two geometric variables; a seed may draw it here, where nothing is released
        stop = -np.expm1(-epsilon / 2)
        shape = (_BOOTSTRAPS, *noisy_KG.shape)
        noise_SKG = (self._rng.geometric(stop, shape) - self._rng.geometric(stop, shape)).astype(np.float64)
        self._noise_SKG = share_K1 * _sum_to(noise_SKG, 0.0)

    def mean(self, loss_NK: Tensor) -> float:
        """Return the weighted mean loss."""
        return self._scale * float((self._weight_KG * self._group_means(loss_NK.numpy())).sum())

    def interval(self, loss_NK: Tensor) -> tuple[float, float]:
        """Return the 95% interval of `mean`, by bootstrap over images within groups and over the counts' noise."""
        loss = loss_NK.numpy()
        centre = self.mean(loss_NK)
        order_N = np.argsort(self._group_N, kind="stable")
        start_N = np.repeat(np.cumsum(self._size_G) - self._size_G, self._size_G)
        size_N = np.repeat(self._size_G, self._size_G)
        moved = np.empty(_BOOTSTRAPS)
        for index, noise_KG in enumerate(self._noise_SKG):
            pick_N = order_N[start_N + np.floor(self._rng.random(len(order_N)) * size_N).astype(np.int64)]
            mean_KG = self._group_means(loss[pick_N], self._group_N[order_N])
            moved[index] = self._scale * ((self._weight_KG + noise_KG) * mean_KG).sum()
        low, high = np.quantile(moved - centre, [0.025, 0.975])
        return centre + float(low), centre + float(high)

    def _group_means(
        self, loss_NK: NDArray[np.float64], group_N: NDArray[np.int64] | None = None
    ) -> NDArray[np.float64]:
        """Return each group's mean loss for each expert, shape (K, G); 0 where a group has no image."""
        group_N = self._group_N if group_N is None else group_N
        sums = [np.bincount(group_N, loss_N, minlength=len(self._size_G)) for loss_N in loss_NK.T]
        return np.asarray(np.stack(sums) / np.maximum(self._size_G, 1))


def _sum_to(noisy: NDArray[np.float64], total: NDArray[np.float64] | float) -> NDArray[np.float64]:
    """Shift rows equally so that they sum to what is publicly known; linear, so it adds no bias."""
    return np.asarray(noisy - (noisy.sum(-1, keepdims=True) - total) / noisy.shape[-1])


@torch.no_grad()
def _losses(router: Router, x_N: Tensor, prior_K: Tensor, band: Band, seed: int, path: Path) -> Tensor:
    """Return ``-log w_k(x_t, t)`` for every k, averaged over draws of t in the band and of noise, shape (N, K)."""
    generator = torch.Generator().manual_seed(seed)
    low, high = band
    log_prior_K = prior_K.log()
    total_NK = torch.zeros(len(x_N), len(prior_K), dtype=torch.float64)
    for _ in range(_DRAWS):
        t_N = low + (high - low) * torch.rand(len(x_N), generator=generator)
        eps = torch.randn(x_N.shape, generator=generator)
        noised = x_t(path, x_N, eps, t_N)
        parts = zip(torch.split(noised, _BLOCK), torch.split(t_N, _BLOCK), strict=True)
        logits_NK = torch.cat([router.log_likelihood(*part).double() for part in parts]) + log_prior_K
        total_NK -= logits_NK.log_softmax(1)
    return total_NK / _DRAWS


def _compare(band: Band, values: Sequence[float], interval: tuple[float, float]) -> BandComparison:
    prior, counts, learned = values
    return BandComparison(
        low=band[0],
        high=band[1],
        prior=prior,
        counts=counts,
        learned=learned,
        difference=learned - counts,
        difference_low=interval[0],
        difference_high=interval[1],
    )


@torch.no_grad()
def _compare_sketches(
    counts: CountsRouter, learned: LearnedRouter, held_out: Sequence[Tensor], prior_K: Tensor, seed: int
) -> BandComparison:
    """Compare on released sketches, re-noised to t in [t_release, 1); the interval is normal, stratified by silo."""
    generator = torch.Generator().manual_seed(seed)
    t_r, sketch, path = learned.t_release, counts.sketch, counts.path
    mean_counts, mean_learned, variance = 0.0, 0.0, 0.0
    for k, s_NR in enumerate(held_out):
        s_BR = s_NR.double().repeat(_DRAWS, 1)
        t_B = t_r + (1 - t_r) * torch.rand(len(s_BR), generator=generator, dtype=torch.float64)
        s_BR = sketch.renoise(s_BR, t_r, t_B, path, generator)
        counts_N, learned_N = (
            -(router.sketch_log_likelihood(s_BR, t_B) + prior_K.log()).log_softmax(1)[:, k].view(_DRAWS, -1).mean(0)
            for router in (counts, learned)
        )
        difference_N = learned_N - counts_N
        mean_counts += float(prior_K[k] * counts_N.mean())
        mean_learned += float(prior_K[k] * learned_N.mean())
        variance += float(prior_K[k].square() * difference_N.var(correction=0)) / max(len(difference_N) - 1, 1)
    entropy = -float((prior_K * prior_K.log()).sum())
    half = 1.96 * variance**0.5
    difference = mean_learned - mean_counts
    interval = difference - half, difference + half
    return _compare((t_r, 1.0), (entropy, mean_counts, mean_learned), interval)


def _differs(counts: CountsRouter, learned: LearnedRouter) -> bool:
    moved = float((learned.mixture.log_mass_KG.exp() - counts.log_mass_KG.exp()).abs().max())
    return moved > _CHANGED or learned.residual.speaks
