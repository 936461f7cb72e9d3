"""How good is a router on images whose expert is known, or known as a distribution? Cross-entropy and accuracy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddm.errors import ShapeError
from ddm.routers.base import Router, log_prior
from ddm.schedule import LinearPath, Path, x_t

# Shape legend: N images, K experts, D draws of noise and time.

Band = tuple[float, float]
BANDS: tuple[Band, ...] = ((0.0, 0.2), (0.2, 0.4), (0.4, 0.6), (0.6, 0.8), (0.8, 1.0))
_DRAWS = 8
_BLOCK = 4096


@dataclass(frozen=True)
class BandScore:
    """A router's cross-entropy, nats, for t in [low, high), with its standard error over images."""

    low: float
    high: float
    value: float
    error: float


@dataclass(frozen=True)
class TimeScore:
    """A figure at one time t, with its standard error over images."""

    t: float
    value: float
    error: float


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
    log_prior_K = log_prior(prior, router.num_experts)
    prior_K = log_prior_K.exp()
    size_K = torch.bincount(label_N, minlength=router.num_experts)
    if len(label_N) != len(x_N) or len(size_K) != len(prior_K) or bool(((size_K == 0) & (prior_K > 0)).any()):
        raise ShapeError("labels", expected="one per image, and an image of every expert", got="others")
    scores = []
    for index, (low, high) in enumerate(times):
        log_DNK = noised_log_likelihood(router, x_N, (low, high), seed + index, path)
        log_NK = (log_DNK + log_prior_K).log_softmax(2).mean(0)
        value, variance = 0.0, 0.0
        for k in torch.nonzero(prior_K)[:, 0].tolist():
            loss_n = -log_NK[label_N == k, k]
            value += float(prior_K[k] * loss_n.mean())
            variance += float(prior_K[k].square() * loss_n.var(correction=0)) / max(len(loss_n) - 1, 1)
        scores.append(BandScore(low=low, high=high, value=value, error=variance**0.5))
    return tuple(scores)


def cross_entropy_at(
    router: Router,
    x_N: Tensor,
    soft_NK: Tensor,
    prior: Sequence[float] | Tensor,
    times: Sequence[float],
    seed: int = 0,
    *,
    path: Path | None = None,
) -> tuple[TimeScore, ...]:
    """Return the cross-entropy ``-sum_k p_k log w_k(x_t, t)`` at exact times, nats, each image counting the same.

    Args:
        router: answers the likelihoods.
        x_N: images, shape (N, ...), data units.
        soft_NK: p_k, the probability that an image is each expert's; rows sum to 1.
        prior: weight of each expert.
        times: in [0, 1].
        seed: of noise; the same seed gives two routers the same noise.
        path: the probability path; linear when omitted.

    Raises:
        ShapeError: not one distribution over the experts per image.
    """

    def loss(w_DNK: Tensor) -> Tensor:
        # an expert of weight 0 costs nothing where nobody says that the image is its own
        return -torch.where(soft_NK > 0, soft_NK * w_DNK.log(), 0.0).sum(2)

    return _scores_at(loss, router, x_N, soft_NK, prior, times, seed, path)


def accuracy_at(
    router: Router,
    x_N: Tensor,
    soft_NK: Tensor,
    prior: Sequence[float] | Tensor,
    times: Sequence[float],
    seed: int = 0,
    *,
    path: Path | None = None,
) -> tuple[TimeScore, ...]:
    """Return how often the most probable expert is the image's own, ``p_k at k = argmax w``, at exact times.

    Args and errors are those of `cross_entropy_at`.
    """

    def hit(w_DNK: Tensor) -> Tensor:
        return soft_NK.expand_as(w_DNK).gather(2, w_DNK.argmax(2, keepdim=True))[:, :, 0]

    return _scores_at(hit, router, x_N, soft_NK, prior, times, seed, path)


@torch.no_grad()
def noised_log_likelihood(
    router: Router, x_N: Tensor, band: Band, seed: int, path: Path | None = None, draws: int = _DRAWS
) -> Tensor:
    """Return what a router says of images noised to times drawn from a band, shape (D, N, K), float64.

    The same seed gives two routers the same times and noise. A band may be one time, twice.
    """
    generator = torch.Generator().manual_seed(seed)
    low, high = band
    found = []
    for _ in range(draws):
        t_N = low + (high - low) * torch.rand(len(x_N), generator=generator)
        noised = x_t(path or LinearPath(), x_N, torch.randn(x_N.shape, generator=generator), t_N)
        parts = zip(torch.split(noised, _BLOCK), torch.split(t_N, _BLOCK), strict=True)
        found.append(torch.cat([router.log_likelihood(*part).double() for part in parts]))
    return torch.stack(found)


def _scores_at(
    figure: Callable[[Tensor], Tensor],
    router: Router,
    x_N: Tensor,
    soft_NK: Tensor,
    prior: Sequence[float] | Tensor,
    times: Sequence[float],
    seed: int,
    path: Path | None,
) -> tuple[TimeScore, ...]:
    """Average a figure of the posteriors (D, N, K) over draws, then over images."""
    if soft_NK.shape != (len(x_N), router.num_experts):
        raise ShapeError("labels", expected=str((len(x_N), router.num_experts)), got=str(tuple(soft_NK.shape)))
    log_prior_K = log_prior(prior, router.num_experts)
    scores = []
    for index, t in enumerate(times):
        log_DNK = noised_log_likelihood(router, x_N, (t, t), seed + index, path) + log_prior_K
        figure_N = figure(log_DNK.softmax(2)).mean(0)
        error = float(figure_N.var(correction=0) / max(len(figure_N) - 1, 1)) ** 0.5
        scores.append(TimeScore(t=t, value=float(figure_N.mean()), error=error))
    return tuple(scores)
