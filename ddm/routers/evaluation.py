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
        seed: the seed of times and noise; the same seed gives two routers the same noise.
        path: the probability path; linear when omitted.

    Raises:
        ShapeError: an expert without images, or not one label per image.
    """
    log_prior_K = log_prior(prior, router.num_experts)
    prior_K = log_prior_K.exp()
    size_K = torch.bincount(label_N, minlength=router.num_experts)
    num_labels = len(label_N)
    num_images = len(x_N)
    is_valid = num_labels == num_images
    # A label above the last expert makes more counts than there are experts.
    is_valid = is_valid and len(size_K) == len(prior_K)
    is_valid = is_valid and bool((size_K[prior_K > 0] > 0).all())
    if not is_valid:
        sizes = size_K[:16].tolist()
        got = f"{num_labels} labels for {num_images} images, images per expert {sizes}"
        raise ShapeError(
            "labels", expected="one label per image, and an image of every expert", got=got
        )
    scores = []
    for index, (low, high) in enumerate(times):
        log_likelihood_DNK = noised_log_likelihood(router, x_N, (low, high), seed + index, path)
        log_w_DNK = (log_likelihood_DNK + log_prior_K).log_softmax(2)
        log_NK = log_w_DNK.mean(0)
        value = 0.0
        variance = 0.0
        experts_with_prior = torch.nonzero(prior_K)[:, 0].tolist()
        for k in experts_with_prior:
            loss_n = -log_NK[label_N == k, k]
            value += float(prior_K[k] * loss_n.mean())
            # The variance of a stratified mean: the sum over experts of pi_k^2 s_k^2 / n_k.
            weighted_variance = float(prior_K[k].square() * loss_n.var(correction=0))
            variance += weighted_variance / max(len(loss_n) - 1, 1)
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
        # In blocks, since a router may need much more memory than the images.
        for start in range(0, len(noised), _BLOCK):
            block = slice(start, start + _BLOCK)
            log_BK = router.log_likelihood(noised[block], t_N[block])
            chunks.append(log_BK.double())
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
    uniform_DN = torch.rand(draws, num, generator=generator)
    return low + (high - low) * uniform_DN
