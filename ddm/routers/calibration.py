"""Calibrates a router with one temperature, so that what it predicts with probability 80% holds in 80% of cases.

``log p(x_t | e, t) = (output_e - log rho_e) / T_t`` with ``T_t = 1 + (T - 1) alpha_t^2``, where rho is each expert's
share in the router's training data. Noise hides where a router is wrong about the data, so that what is left to correct
falls with the data's share of the power of x_t, and nothing is left at t = 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from ddm.diffusion.path import Path
from ddm.errors import MathError
from ddm.protocol.calibration import CalibrationBand, Interval, ReliabilityBin
from ddm.routers.base import ConditionalRouter, Router, SketchRouter, log_prior
from ddm.routers.evaluation import BANDS, Band
from ddm.routers.public import PublicData, PublicWeights, spread

# Shape legend: N images, E experts, D draws of noise and time, B batch, Z bins.

TEMPERATURES = (0.05, 20.0)
_BINS = 15
_MIN_SHARE = 0.01
# Nats that a temperature other than 1 must gain.
_MIN_GAIN = 1e-3

OnSketches = Callable[[Tensor, Tensor], Tensor]
"""Called as ``log_likelihood(s_BR, t_B)``; returns (B, E)."""


class Calibrated:
    """A router as it is published.

    Args:
        router: returns likelihoods, or logits of a posterior under the training prior.
        temperature: T, at t = 0; in `TEMPERATURES`.
        training_prior: rho, in any unit; equal shares for a router that returns likelihoods.
        path: the probability path, which gives alpha_t.

    Raises:
        MathError: a temperature or training prior out of range.
    """

    def __init__(
        self,
        router: Router,
        temperature: float,
        training_prior: Sequence[float],
        path: Path,
    ) -> None:
        lowest, highest = TEMPERATURES
        if not lowest <= temperature <= highest:
            expected = f"{lowest:g} to {highest:g}"
            raise MathError("router temperature", expected=expected, got=f"{temperature:g}")
        self.log_training_prior_E = log_prior(training_prior, router.num_experts)
        is_zero_E = ~self.log_training_prior_E.isfinite()
        if bool(is_zero_E.any()):
            got = f"a share of 0 for {int(is_zero_E.sum())} of {router.num_experts}"
            raise MathError(
                "router training prior", expected="a share above 0 for every expert", got=got
            )
        self.num_experts = router.num_experts
        self.router = router
        self.temperature = temperature
        self.path = path

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """Return ``log p(x_t | e, t)`` up to a term common to all e, shape (B, E).

        Args:
            x_B: noised images, shape (B, ...).
            t_B: shape (B,), 0 is data, 1 is noise.
        """
        output_BE = self.router.log_likelihood(x_B, t_B)
        return self._applied(output_BE, t_B)

    @property
    def knows_shares(self) -> bool:
        """Whether the router itself says how data of a condition are divided among experts."""
        return isinstance(self.router, ConditionalRouter) and self.router.knows_shares

    def given(self, condition_B: Tensor) -> Router:
        """Return the router under each sample's condition; this one, where it reads none."""
        if not isinstance(self.router, ConditionalRouter):
            return self
        router = self.router.given(condition_B)
        training_prior_E = self.log_training_prior_E.exp().tolist()
        return Calibrated(router, self.temperature, training_prior_E, self.path)

    def log_shares(self, condition_B: Tensor) -> Tensor:
        """Return ``log p(c | e)`` up to a term common to all e, which no temperature changes; 0 where nobody knows."""
        if isinstance(self.router, ConditionalRouter):
            return self.router.log_shares(condition_B)
        shape = (len(condition_B), self.num_experts)
        return torch.zeros(shape, device=condition_B.device)

    def on_sketches(self, rank: int) -> OnSketches | None:
        """Return this router on sketches of `rank` dimensions; None for one that needs the image itself."""
        if not isinstance(self.router, SketchRouter):
            return None
        narrow = self.router.head(rank)

        def log_likelihood(s_BR: Tensor, t_B: Tensor) -> Tensor:
            output_BE = narrow.sketch_log_likelihood(s_BR, t_B)
            return self._applied(output_BE, t_B)

        return log_likelihood

    def _applied(self, output_BE: Tensor, t_B: Tensor) -> Tensor:
        """Return ``(output - log rho) / T_t``."""
        temperature_B = temperature_at(self.temperature, t_B.to(output_BE), self.path)
        log_rho_E = self.log_training_prior_E.to(output_BE)
        return (output_BE - log_rho_E) / temperature_B[:, None]


def temperature_at(temperature: float, t: Tensor, path: Path) -> Tensor:
    """Return ``T_t = 1 + (T - 1) alpha_t^2``, of the shape of t."""
    alpha = path.alpha(t)
    return 1 + (temperature - 1) * alpha.square()


@dataclass(frozen=True)
class Calibration:
    """The chosen temperature and its effect.

    Attributes:
        temperature: T, at t = 0; 1 unless another one clearly helps.
        errors: the calibration errors per band of t, on images not used to fit T.
        path: the probability path.
    """

    temperature: float
    errors: tuple[CalibrationBand, ...]
    path: Path

    def applied(self, router: Router) -> Calibrated:
        """Return a router that answers likelihoods as it would be published."""
        equal_shares = [1.0] * router.num_experts
        return Calibrated(router, self.temperature, equal_shares, self.path)


def calibrate(
    router: Router,
    public: PublicData,
    bands: Sequence[Band] = BANDS,
) -> Calibration:
    """Fit T on one half of the public images; keep it only if it clearly helps on the other half.

    It clearly helps if the whole 95% interval of the gain is above 0.001 nats. A smaller gain could be an artefact of
    the public images.

    Args:
        router: returns likelihoods.
        public: public images with their weights.
        bands: bands of t, equally weighted.
    """
    log_prior_E = log_prior(public.prior_E, router.num_experts)
    # Each band's answers of the router are computed once; temperatures only scale them.
    log_likelihoods = []
    times = []
    for index, band in enumerate(bands):
        log_likelihoods.append(public.log_likelihoods(router, band, index))
        times.append(public.times(band, index).double())
    # On the images that it was fitted on, the fitted temperature never does worse than 1.
    fit_N, judge_N = halves(public.group_N, public.seed)
    fit_weights = public.evidence.weights(public.group_N[fit_N], public.seed)
    fit_weight_NE = torch.from_numpy(fit_weights.weight_NE)

    def joint(band: int, temperature: float, rows: Tensor) -> Tensor:
        t_DN = times[band][:, rows]
        log_likelihood_DNE = log_likelihoods[band][:, rows]
        temperature_DN = temperature_at(temperature, t_DN, public.path)
        return log_likelihood_DNE / temperature_DN[..., None] + log_prior_E

    def losses(temperature: float, rows: Tensor) -> Tensor:
        log_posteriors = []
        for band in range(len(bands)):
            log_w_DNE = joint(band, temperature, rows).log_softmax(2)
            log_posteriors.append(log_w_DNE.mean(0))
        return -torch.stack(log_posteriors).mean(0)

    def fit_loss(log_temperature: float) -> float:
        # Searched on a logarithmic scale, on which twice and half the temperature are equally far from 1.
        temperature = float(np.exp(log_temperature))
        loss_NE = losses(temperature, fit_N)
        return float((fit_weight_NE * loss_NE).sum())

    best = minimize_scalar(
        fit_loss,
        bounds=tuple(np.log(TEMPERATURES)),
        method="bounded",
        options={"xatol": 1e-3},
    )
    fitted = float(np.exp(best.x))
    weights = public.evidence.weights(public.group_N[judge_N], public.seed)
    # The change of the loss: a temperature that helps has a negative one.
    change_NE = losses(fitted, judge_N) - losses(1.0, judge_N)
    _, highest_change = weights.intervals(change_NE.numpy()[None])[0]
    chosen = 1.0
    if highest_change < -_MIN_GAIN:
        chosen = fitted
    errors = []
    for index, (low, high) in enumerate(bands):
        w_before_DNE = joint(index, 1.0, judge_N).softmax(2)
        w_after_DNE = joint(index, chosen, judge_N).softmax(2)
        before, _ = reliability(weights, w_before_DNE)
        after, bins = reliability(weights, w_after_DNE)
        band_errors = CalibrationBand(low=low, high=high, before=before, after=after, bins=bins)
        errors.append(band_errors)
    return Calibration(temperature=chosen, errors=tuple(errors), path=public.path)


def reliability(
    weights: PublicWeights, w_DNE: Tensor
) -> tuple[Interval, tuple[ReliabilityBin, ...]]:
    """Return the expected calibration error of the most probable expert, and the bins of confidence that it sums.

    ``sum_z |sum over images in bin z of (confidence - hit)|`` over equal bins of the confidence, all images weighted.
    As a sum of absolute values it is biased upwards: noise in the counts alone makes it positive. Bins with less than
    1% of the images, whose accuracy nobody could read, are left out of those returned. Intervals are of 95% and lie
    around the figure as computed, its bias included; those of accuracies take a bin's share and confidence for known.

    Args:
        weights: the images' weights.
        w_DNE: posteriors, for each draw of time and noise.
    """
    num_draws, num_images, num_experts = w_DNE.shape
    most_probable = w_DNE.max(2)
    confidence_DN = most_probable.values.numpy()
    top_DN = most_probable.indices.numpy()
    # A confidence of 1 belongs to the last bin.
    bin_DN = np.minimum((confidence_DN * _BINS).astype(np.int64), _BINS - 1)
    gap_ZNE = np.zeros((_BINS, num_images, num_experts))
    share_Z = np.zeros(_BINS)
    confidence_Z = np.zeros(_BINS)
    rows = np.arange(num_images)
    weight_N = weights.weight_NE.sum(1)
    for bin_N, confidence_N, top_N in zip(bin_DN, confidence_DN, top_DN, strict=True):
        # A public image has no label. It counts for every expert by its weight, and is a hit for the most probable one.
        gap_ZNE[bin_N, rows] += confidence_N[:, None] / num_draws
        gap_ZNE[bin_N, rows, top_N] -= 1 / num_draws
        weighted_confidence_N = weight_N * confidence_N / num_draws
        share_Z += np.bincount(bin_N, weight_N / num_draws, _BINS)
        confidence_Z += np.bincount(bin_N, weighted_confidence_N, _BINS)
    gap_Z = weights.means(gap_ZNE)
    drawn_SZ = weights.bootstrap(gap_ZNE)
    value = np.abs(gap_Z).sum(keepdims=True)
    drawn_value_S1 = np.abs(drawn_SZ).sum(1, keepdims=True)
    # A resample adds noise of its own to a sum of absolute values. Without taking off their surplus, an interval of a
    # small error would lie above the error itself.
    surplus = np.median(drawn_value_S1) - value
    low, high = spread(value, drawn_value_S1 - surplus)[0]
    bins = []
    bins_with_images = np.nonzero(share_Z >= _MIN_SHARE)[0]
    for z in bins_with_images:
        low_gap, high_gap = spread(gap_Z, drawn_SZ)[z]
        # A gap is confidence less accuracy, so that the highest gap is the lowest accuracy.
        gaps = np.array([gap_Z[z], high_gap, low_gap])
        accuracies = (confidence_Z[z] - gaps) / share_Z[z]
        value_low_high = np.clip(accuracies, 0, 1)
        reliability_bin = ReliabilityBin(
            share=float(share_Z[z]),
            confidence=float(confidence_Z[z] / share_Z[z]),
            accuracy=tuple(value_low_high.tolist()),
        )
        bins.append(reliability_bin)
    # The interval is shifted by the bootstrap and may reach below 0, where no sum of absolute values is.
    error = (float(value[0]), max(float(low), 0.0), float(high))
    return error, tuple(bins)


def halves(group_N: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Split the images of each group into two halves at random."""
    generator = torch.Generator().manual_seed(seed)
    random_N = torch.randperm(len(group_N), generator=generator)
    # Every second image of a list that is sorted by group: both halves have the groups in the same proportions.
    by_group_N = group_N[random_N].argsort(stable=True)
    order_N = random_N[by_group_N]
    first = order_N[::2].sort().values
    second = order_N[1::2].sort().values
    return first, second
