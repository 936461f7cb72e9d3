"""Draws a report's images from an ensemble: of each silo and of all, with the silos' shares and the router along t.

The seed determines everything. The number of images depends on the cost of one evaluation of an expert, not on a clock,
so that the same release gives the same pages.
"""

# Shape legend: N images, D draws of noise, E experts, T times.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ddm.ensemble import Ensemble, SamplingOptions
from ddm.routers.base import log_prior
from ddm.routers.evaluation import noised_log_likelihood
from ddm.system.progress import ProgressCallback

MAX_FLOPS = 2e12  # about a minute on two cores
MAX_SHOWN_SILOS = 12  # whose own images are shown
NUM_TIMES = 21
SOLVER: Literal["midpoint"] = "midpoint"
EVALUATIONS_PER_STEP = 2  # of the midpoint solver
_NOISE_DRAWS = 4


@dataclass(frozen=True)
class DrawingEffort:
    """The number of images to draw.

    Attributes:
        own: images of each silo alone.
        mixed: images by each strategy.
        strategies: their names; `lock` has t_lock = 1.
        steps: solver steps of each image.
    """

    own: int
    mixed: int
    strategies: tuple[str, ...]
    steps: int = 24

    def evaluations(self, num_silos: int, num_experts: int) -> int:
        """Return the number of evaluations of one expert on one image."""
        num_shown = min(num_silos, MAX_SHOWN_SILOS)
        expert_images = self.own * num_shown
        for strategy in self.strategies:
            # Only the full mixture evaluates every expert at each step.
            num_followed = num_experts if strategy == "full" else 1
            expert_images += self.mixed * num_followed
        return EVALUATIONS_PER_STEP * self.steps * expert_images


# From the most to the least: a release of expensive experts gets fewer images.
EFFORTS = (
    DrawingEffort(own=32, mixed=128, strategies=("lock", "sample", "full", "top-1")),
    DrawingEffort(own=8, mixed=32, strategies=("lock", "full")),
    DrawingEffort(own=4, mixed=8, strategies=("lock",)),
)


@dataclass(frozen=True)
class DrawnImages:
    """Images with the index of the silo that each came from.

    Attributes:
        images: float32, shape (N, C, H, W), in the data's range.
        silo_N: the silo that each followed last.
        latents: the router's inputs for them, where experts work on latents; None where these are the images.
    """

    images: Tensor
    silo_N: tuple[int, ...]
    latents: Tensor | None = None

    @property
    def router_inputs(self) -> Tensor:
        """What the router sees of these images at t = 0."""
        return self.images if self.latents is None else self.latents


@dataclass(frozen=True)
class Drawing:
    """All drawn images and the router's posterior on them.

    Attributes:
        seed: the seed of the images and of their noise.
        steps: solver steps.
        solver: its name.
        own: each shown silo's images from its experts alone, by the silo's index.
        mixed: images of the ensemble, by strategy.
        posterior: for each shown silo's images, the mean probability of every silo, one row per t from 0 to 1.
    """

    seed: int
    steps: int
    solver: str
    own: dict[int, DrawnImages]
    mixed: dict[str, DrawnImages]
    posterior: dict[int, tuple[tuple[float, ...], ...]]


def affordable_effort(flops: float, num_silos: int, num_experts: int) -> DrawingEffort | None:
    """Return the largest effort within the budget, given the FLOPs of one evaluation; None if none is."""
    for effort in EFFORTS:
        if effort.evaluations(num_silos, num_experts) * flops <= MAX_FLOPS:
            return effort
    return None


def draw(
    ensemble: Ensemble,
    silo_E: Sequence[int],
    effort: DrawingEffort,
    *,
    seed: int = 0,
    on_progress: ProgressCallback | None = None,
) -> Drawing:
    """Draw the images of a report.

    Args:
        ensemble: the experts and the router.
        silo_E: the silo of each expert, by index.
        effort: the number of images.
        seed: the seed of the images and of their noise.
        on_progress: called after each batch of images.
    """
    shown_silos = largest_silos(ensemble.prior, silo_E)
    num_batches = len(shown_silos) + len(effort.strategies)
    num_drawn = 0
    options = SamplingOptions(solver=SOLVER)

    def draw_batch(num: int, strategy: str, prior: Sequence[float]) -> DrawnImages:
        nonlocal num_drawn
        # The same seed for every strategy, so that they begin from the same noise and differ by the strategy alone.
        samples = ensemble.sample(
            num, strategy=strategy, steps=effort.steps, seed=seed, prior=prior, options=options
        )
        num_drawn += 1
        if on_progress:
            on_progress(num_drawn, num_batches)
        silo_N = tuple(silo_E[expert] for expert in samples.expert_N.tolist())
        return DrawnImages(samples.images, silo_N, samples.latents)

    own = {}
    for silo in shown_silos:
        own[silo] = draw_batch(effort.own, "lock", _prior_of_silo(ensemble.prior, silo_E, silo))
    mixed = {}
    for strategy in effort.strategies:
        mixed[strategy] = draw_batch(effort.mixed, strategy, ensemble.prior)
    posterior = {}
    for silo, drawn in own.items():
        posterior[silo] = _posterior_along_t(ensemble, silo_E, drawn.router_inputs, seed)
    return Drawing(
        seed=seed, steps=effort.steps, solver=SOLVER, own=own, mixed=mixed, posterior=posterior
    )


def largest_silos(prior_E: Sequence[float], silo_E: Sequence[int]) -> list[int]:
    """Return the silos whose own images are shown: all, or those with the largest shares, in their order."""
    share_K = _sum_by_silo(torch.tensor(prior_E, dtype=torch.float64), silo_E).tolist()
    # The largest first; equal ones in the manifest's order, so that the pages do not depend on anything else.
    by_share = sorted(range(len(share_K)), key=lambda silo: (-share_K[silo], silo))
    return sorted(by_share[:MAX_SHOWN_SILOS])


def _prior_of_silo(prior_E: Sequence[float], silo_E: Sequence[int], silo: int) -> list[float]:
    """Return a prior restricted to one silo's experts; even among them where their priors are 0."""
    restricted_E = [
        prior if owner == silo else 0.0 for prior, owner in zip(prior_E, silo_E, strict=True)
    ]
    if any(restricted_E):
        return restricted_E
    return [float(owner == silo) for owner in silo_E]


@torch.inference_mode()
def _posterior_along_t(
    ensemble: Ensemble, silo_E: Sequence[int], images: Tensor, seed: int
) -> tuple[tuple[float, ...], ...]:
    """Return the mean posterior of every silo over images noised to each t, shape (T, silos)."""
    if ensemble.router is None:
        return ()
    log_prior_E = log_prior(ensemble.prior, len(silo_E))
    rows = []
    # Always the same noise: the curve over t is smooth, and the page repeatable.
    for t in torch.linspace(0, 1, NUM_TIMES).tolist():
        log_DNE = noised_log_likelihood(
            ensemble.router, images, (t, t), seed, ensemble.path, _NOISE_DRAWS
        )
        posterior_E = (log_DNE + log_prior_E).softmax(2).mean((0, 1))
        rows.append(tuple(_sum_by_silo(posterior_E, silo_E).tolist()))
    return tuple(rows)


def _sum_by_silo(weight_E: Tensor, silo_E: Sequence[int]) -> Tensor:
    sum_K = torch.zeros(max(silo_E) + 1, dtype=torch.float64)
    return sum_K.index_add_(0, torch.tensor(silo_E), weight_E)
