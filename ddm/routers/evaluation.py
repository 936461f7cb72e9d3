"""Evaluates a router: cross-entropy on labelled images in bands of t."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddm.diffusion.path import LinearPath, Path, x_t
from ddm.errors import ShapeError
from ddm.routers.base import Router, log_prior

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

    Each expert's images are averaged first and then weighted by the prior, so the numbers of images do not matter.

    Args:
        router: returns the likelihoods.
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
    if (
        len(label_N) != len(x_N)
        or len(size_K) != len(prior_K)
        or bool(((size_K == 0) & (prior_K > 0)).any())
    ):
        got = (
            f"{len(label_N)} labels for {len(x_N)} images, images per expert {size_K[:16].tolist()}"
        )
        raise ShapeError(
            "labels", expected="one label per image, and an image of every expert", got=got
        )
    scores = []
    for index, (low, high) in enumerate(times):
        log_DNK = noised_log_likelihood(router, x_N, (low, high), seed + index, path)
        log_NK = (log_DNK + log_prior_K).log_softmax(2).mean(0)
        value = 0.0
        variance = 0.0
        for k in torch.nonzero(prior_K)[:, 0].tolist():
            loss_n = -log_NK[label_N == k, k]
            value += float(prior_K[k] * loss_n.mean())
            # The variance of a stratified mean: the sum over experts of pi_k^2 s_k^2 / n_k.
            variance += float(prior_K[k].square() * loss_n.var(correction=0)) / max(
                len(loss_n) - 1, 1
            )
        scores.append(BandScore(low=low, high=high, value=value, error=variance**0.5))
    return tuple(scores)


@torch.no_grad()
def noised_log_likelihood(
    router: Router,
    x_N: Tensor,
    band: Band,
    seed: int,
    path: Path | None = None,
    draws: int = _DRAWS,
) -> Tensor:
    """Return a router's log-likelihoods of images noised to times drawn from a band, shape (D, N, K), float64.

    The same seed gives two routers the same times and noise. The ends of a band may be equal.
    """
    generator = torch.Generator().manual_seed(seed)
    draws_of_images = []
    for t_N in times_of(len(x_N), band, generator, draws):
        noise = torch.randn(x_N.shape, generator=generator)
        noised = x_t(path or LinearPath(), x_N, noise, t_N)
        chunks = []
        for x_B, t_B in zip(torch.split(noised, _BLOCK), torch.split(t_N, _BLOCK), strict=True):
            chunks.append(router.log_likelihood(x_B, t_B).double())
        draws_of_images.append(torch.cat(chunks))
    return torch.stack(draws_of_images)


def times_of(
    num: int,
    band: Band,
    generator: torch.Generator,
    draws: int = _DRAWS,
) -> Tensor:
    """Draw the times that images are noised to, shape (D, N): before any noise, so that they can be drawn alone."""
    low, high = band
    return low + (high - low) * torch.rand(draws, num, generator=generator)
