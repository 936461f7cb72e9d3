"""Decides whether a router may be published: compares a candidate with the counts router, and either with the prior.

The comparisons need no silo's images. They use public images weighted by the silos' counts, and held-out sketches of
the silos, which have true labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri
from torch import Tensor

from ddm.errors import RefusedError, ShapeError
from ddm.protocol.router_report import BandComparison
from ddm.routers.base import Router, log_prior
from ddm.routers.calibration import Calibrated, OnSketches
from ddm.routers.evaluation import BANDS, Band
from ddm.routers.public import PublicData
from ddm.routers.sketch import Sketch

# Shape legend: N images or sketches, K silos, E experts, B batch, R sketch dimensions.

_DRAWS = 8


@dataclass(frozen=True)
class HeldOut:
    """Silos' sketches that the candidate was not trained on.

    Attributes:
        sketches: (N, R), one tensor per silo, in order.
        sketch: the public sketch of these R dimensions.
        t_release: their noise level.
    """

    sketches: Sequence[Tensor]
    sketch: Sketch
    t_release: float


@dataclass(frozen=True)
class Comparison:
    """The comparison of a candidate with counts.

    Attributes:
        bands: on weighted public images.
        sketches: on held-out sketches, from t_release to 1; None where there are none.
    """

    bands: tuple[BandComparison, ...]
    sketches: BandComparison | None

    @property
    def worse(self) -> tuple[BandComparison, ...]:
        """The bands in which the candidate is worse; it may be published if there are none."""
        compared = list(self.bands)
        if self.sketches is not None:
            compared.append(self.sketches)
        return tuple(band for band in compared if band.worse)


def compare(
    counts: Calibrated,
    candidate: Calibrated,
    public: PublicData,
    held_out: HeldOut | None = None,
    *,
    bands: Sequence[Band] = BANDS,
) -> Comparison:
    """Compare a candidate of any family with the counts router, both as they would be published.

    The intervals cover the choice of public images and the noise of the counts. Since testing several intervals would
    reject a good candidate too often, each is widened so that they hold jointly (Bonferroni).

    Args:
        counts: the baseline router of the experts.
        candidate: another router of the same experts.
        public: the public images.
        held_out: held-out sketches; ignored for a candidate that needs the image itself.
        bands: bands of t.

    Raises:
        ShapeError: routers or sketches of another number of experts or silos.
    """
    num_experts = len(public.prior_E)
    if not counts.num_experts == candidate.num_experts == num_experts:
        got = f"{counts.num_experts} and {candidate.num_experts}"
        raise ShapeError("routers", expected=f"{num_experts} experts each", got=got)
    sketch_routers: list[OnSketches] = []
    if held_out is not None:
        for router in (counts, candidate):
            on_sketches = router.on_sketches(held_out.sketch.rank)
            if on_sketches is not None:
                sketch_routers.append(on_sketches)
    # Sketches can judge a candidate only if it reads them, as counts does.
    compares_sketches = len(sketch_routers) == 2
    num_looks = len(bands) + compares_sketches

    weights = public.weights
    # The loss of a router that ignores the image, in the same weighted average as the two others.
    prior_loss_E = -log_prior(public.prior_E, num_experts).numpy()
    prior_NE = np.broadcast_to(prior_loss_E, weights.weight_NE.shape)
    prior = float(weights.means(prior_NE[None])[0])
    counts_MNE = np.stack(public.losses(counts, bands))
    candidate_MNE = np.stack(public.losses(candidate, bands))
    intervals = weights.intervals(candidate_MNE - counts_MNE, num_looks)
    counts_M = weights.means(counts_MNE).tolist()
    candidate_M = weights.means(candidate_MNE).tolist()
    compared_bands = []
    for index, band in enumerate(bands):
        compared = _band(band, prior, counts_M[index], candidate_M[index], intervals[index])
        compared_bands.append(compared)

    sketches = None
    if held_out is not None and compares_sketches:
        sketches = _compare_sketches(held_out, sketch_routers, public, num_looks)
    return Comparison(bands=tuple(compared_bands), sketches=sketches)


def minus_prior(router: Router, public: PublicData) -> tuple[float, float, float]:
    """Return a router's cross-entropy over all t less that of the prior, nats, with its 95% interval.

    Args:
        router: the router as it would be published.
        public: the public images.
    """
    prior_E = log_prior(public.prior_E, router.num_experts).numpy()
    loss_NE = np.mean(public.losses(router), axis=0)
    excess_1NE = (loss_NE + prior_E)[None]
    weights = public.weights
    value = float(weights.means(excess_1NE)[0])
    low, high = weights.intervals(excess_1NE)[0].tolist()
    return value, low, high


def refuse_worse_than_prior(
    name: str, router: Router, public: PublicData
) -> tuple[float, float, float]:
    """Refuse a router that is worse than the prior on public images; return what `minus_prior` measures.

    Args:
        name: the router's family.
        router: the router as it would be published.
        public: the public images.

    Raises:
        RefusedError: over all t it is worse than predicting the prior, by its whole 95% interval.
    """
    value, low, high = minus_prior(router, public)
    if low > 0:
        got = f"{value:.4f} nats worse, 95% interval {low:.4f} to {high:.4f}"
        subject = f"{name} router on public data"
        raise RefusedError(
            subject,
            expected="at least as good as the prior",
            got=got,
            remedy=(
                "Train it longer or with more public images, or plan another router.kind; a "
                "release that uses only the prior needs no router."
            ),
        )
    return value, low, high


def _band(
    band: Band,
    prior: float,
    counts: float,
    candidate: float,
    interval: Sequence[float] | NDArray[np.float64],
) -> BandComparison:
    return BandComparison(
        low=band[0],
        high=band[1],
        prior=prior,
        counts=counts,
        candidate=candidate,
        difference=candidate - counts,
        difference_low=float(interval[0]),
        difference_high=float(interval[1]),
    )


@torch.no_grad()
def _compare_sketches(
    held_out: HeldOut,
    routers: Sequence[OnSketches],
    public: PublicData,
    num_looks: int,
) -> BandComparison:
    """Compare on sketches re-noised to t in [t_release, 1); the interval is normal, stratified by silo."""
    generator = torch.Generator().manual_seed(public.seed)
    t_r = held_out.t_release
    silo_E = torch.tensor(public.evidence.layout.silo_E)
    num_silos = int(silo_E.max()) + 1
    if len(held_out.sketches) != num_silos:
        got = str(len(held_out.sketches))
        raise ShapeError("held-out sketches", expected=f"{num_silos} silos", got=got)
    log_prior_E = log_prior(public.prior_E, len(silo_E))
    prior_K = torch.zeros(num_silos, dtype=torch.float64)
    prior_K.index_add_(0, silo_E, log_prior_E.exp())

    def losses(
        router: OnSketches,
        s_BR: Tensor,
        t_B: Tensor,
        k: int,
    ) -> Tensor:
        """Return each sketch's loss, averaged over draws; the label of silo k stands for all of its experts."""
        log_joint_BE = router(s_BR, t_B).double() + log_prior_E
        log_w_BE = log_joint_BE.log_softmax(1)
        log_of_silo_B = log_w_BE[:, silo_E == k].logsumexp(1)
        return -log_of_silo_B.view(_DRAWS, -1).mean(0)

    means = torch.zeros(2, dtype=torch.float64)
    variance = 0.0
    for k, s_NR in enumerate(held_out.sketches):
        s_BR = s_NR.double().repeat(_DRAWS, 1)
        uniform_B = torch.rand(len(s_BR), generator=generator, dtype=torch.float64)
        t_B = t_r + (1 - t_r) * uniform_B
        s_BR = held_out.sketch.renoise(s_BR, t_r, t_B, public.path, generator)
        # Both routers judge the same noised sketches: the variance of their difference is far below that of either
        # loss.
        loss_2N = torch.stack([losses(router, s_BR, t_B, k) for router in routers])
        means += prior_K[k] * loss_2N.mean(1)
        difference_N = loss_2N[1] - loss_2N[0]
        # The variance of a stratified mean: the sum over silos of pi_k^2 s_k^2 / n_k.
        variance_of_mean = float(difference_N.var(correction=0)) / max(len(difference_N) - 1, 1)
        variance += float(prior_K[k].square()) * variance_of_mean
    # The cross-entropy of a router that always answers the prior.
    entropy = -float((prior_K * prior_K.log()).sum())
    half = -float(ndtri(0.025 / num_looks)) * variance**0.5
    counts, candidate = means.tolist()
    difference = candidate - counts
    interval = (difference - half, difference + half)
    return _band((t_r, 1.0), entropy, counts, candidate, interval)
