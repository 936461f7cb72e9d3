"""Draws a report's images from an ensemble: of each silo and of all, with the silos' shares and the router along t.

The seed determines everything. The number of images depends on the cost of one evaluation of an expert, not on a clock,
so that the same release gives the same pages.
"""

# Shape legend: N images, D draws of noise, E experts, T times.
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ddm.ensemble import Ensemble
from ddm.routers.base import log_prior
from ddm.routers.evaluation import noised_log_likelihood

Progress = Callable[[int, int], None]
"""Called with the batches done, and with the batches in all."""

MAX_FLOPS = 2e12  # about a minute on two cores
MAX_SILOS = 12  # whose own images are shown
NUM_TIMES = 21
SOLVER: Literal["midpoint"] = "midpoint"  # evaluates twice a step
_NOISE_DRAWS = 4


@dataclass(frozen=True)
class Effort:
    """The number of images to draw.

    Attributes:
        own: images of each silo alone.
        mixed: images by each strategy.
        strategies: their names; `lock` has t_lock = 1.
        steps: solver steps of each image; two evaluations a step.
    """

    own: int
    mixed: int
    strategies: tuple[str, ...]
    steps: int = 24

    def evaluations(self, num_silos: int, num_experts: int) -> int:
        """Return the number of evaluations of one expert on one image."""
        followed = sum(num_experts if name == "full" else 1 for name in self.strategies)
        return 2 * self.steps * (self.own * min(num_silos, MAX_SILOS) + self.mixed * followed)


EFFORTS = (
    Effort(own=32, mixed=128, strategies=("lock", "sample", "full", "top-1")),
    Effort(own=8, mixed=32, strategies=("lock", "full")),
    Effort(own=4, mixed=8, strategies=("lock",)),
)


@dataclass(frozen=True)
class Drawn:
    """Images with the index of the silo that each came from.

    Attributes:
        images: float32, shape (N, C, H, W), in the data's range.
        silo_N: the silo that each followed last.
        inputs: the router's inputs for them: the images, or their latents.
    """

    images: Tensor
    silo_N: tuple[int, ...]
    inputs: Tensor | None = None


@dataclass(frozen=True)
class Drawing:
    """All drawn images and the router's posterior on them.

    Attributes:
        seed: of the images and of their noise.
        steps: solver steps.
        solver: its name.
        own: each shown silo's images from its experts alone, by the silo's index.
        mixed: images of the ensemble, by strategy.
        posterior: for each shown silo's images, the mean probability of every silo, one row per t from 0 to 1.
    """

    seed: int
    steps: int
    solver: str
    own: dict[int, Drawn]
    mixed: dict[str, Drawn]
    posterior: dict[int, tuple[tuple[float, ...], ...]]


def affordable(flops: float, num_silos: int, num_experts: int) -> Effort | None:
    """Return the largest effort within the budget, given the FLOPs of one evaluation; None if none is."""
    costs = ((effort, effort.evaluations(num_silos, num_experts) * flops) for effort in EFFORTS)
    return next((effort for effort, cost in costs if cost <= MAX_FLOPS), None)


def draw(
    ensemble: Ensemble,
    silo_E: Sequence[int],
    effort: Effort,
    *,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> Drawing:
    """Draw the images of a report.

    Args:
        ensemble: the experts and the router.
        silo_E: the silo of each expert, by index.
        effort: the number of images.
        seed: of the images and of their noise.
        on_progress: called after each batch of images.
    """
    shown = largest(ensemble.prior, silo_E)
    total, done = len(shown) + len(effort.strategies), 0

    def draw_some(num: int, strategy: str, prior: Sequence[float]) -> Drawn:
        nonlocal done
        samples = ensemble.sample(
            num, strategy=strategy, steps=effort.steps, solver=SOLVER, seed=seed, prior=prior
        )
        done += 1
        if on_progress:
            on_progress(done, total)
        return Drawn(
            samples.images, tuple(silo_E[k] for k in samples.expert_N.tolist()), samples.latents
        )

    own = {k: draw_some(effort.own, "lock", _alone(ensemble.prior, silo_E, k)) for k in shown}
    mixed = {name: draw_some(effort.mixed, name, ensemble.prior) for name in effort.strategies}
    posterior = {
        k: _posterior(
            ensemble, silo_E, drawn.images if drawn.inputs is None else drawn.inputs, seed
        )
        for k, drawn in own.items()
    }
    return Drawing(
        seed=seed, steps=effort.steps, solver=SOLVER, own=own, mixed=mixed, posterior=posterior
    )


def largest(prior_E: Sequence[float], silo_E: Sequence[int]) -> list[int]:
    """Return the silos whose own images are shown: all, or those with the largest shares, in their order."""
    share = _by_silo(torch.tensor(prior_E, dtype=torch.float64), silo_E).tolist()
    return sorted(sorted(range(len(share)), key=lambda k: (-share[k], k))[:MAX_SILOS])


def _alone(prior_E: Sequence[float], silo_E: Sequence[int], k: int) -> list[float]:
    """Return a prior restricted to one silo's experts."""
    own = [prior if silo == k else 0.0 for prior, silo in zip(prior_E, silo_E, strict=True)]
    return own if any(own) else [float(silo == k) for silo in silo_E]


@torch.inference_mode()
def _posterior(
    ensemble: Ensemble, silo_E: Sequence[int], images: Tensor, seed: int
) -> tuple[tuple[float, ...], ...]:
    """Return the mean posterior of every silo over images noised to each t, shape (T, silos)."""
    if ensemble.router is None:
        return ()
    prior_E, rows = log_prior(ensemble.prior, len(silo_E)), []
    for t in torch.linspace(0, 1, NUM_TIMES).tolist():
        log_DNE = noised_log_likelihood(
            ensemble.router, images, (t, t), seed, ensemble.path, _NOISE_DRAWS
        )
        w_E = (log_DNE + prior_E).softmax(2).mean((0, 1))
        rows.append(tuple(_by_silo(w_E, silo_E).tolist()))
    return tuple(rows)


def _by_silo(weight_E: Tensor, silo_E: Sequence[int]) -> Tensor:
    return torch.zeros(max(silo_E) + 1, dtype=torch.float64).index_add_(
        0, torch.tensor(silo_E), weight_E
    )
