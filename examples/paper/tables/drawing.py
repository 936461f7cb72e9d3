"""Draws the samples of a row, and counts what that takes."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ddm.diffusion.path import Expert
from ddm.ensemble import Ensemble, SamplingOptions
from ddm.sampling.samples import Samples
from examples.paper.tables.data import Part
from examples.paper.tables.exact import ExactRouter, exact_class_priors
from examples.paper.tables.models import Made, weights_of
from examples.paper.tables.presets import Preset
from examples.paper.tables.rows import STRATEGIES, Row
from examples.paper.tables.sources import Experts

# Shape legend: B batch, N samples, K experts.


class CountingExpert(nn.Module):
    """An expert that counts how many samples it has evaluated."""

    def __init__(self, expert: Expert) -> None:
        super().__init__()
        self.expert = expert
        self.num = 0

    def forward(self, x_B: Tensor, t_B: Tensor, *condition_B: Tensor) -> Tensor:
        """Evaluate the expert."""
        self.num += len(x_B)
        answer: Tensor = self.expert(x_B, t_B, *condition_B)
        return answer


def prepared(made: Made, row: Row, train: Part) -> tuple[Ensemble, list[CountingExpert]]:
    """Return the ensemble with the router that a row asks for, and its experts, which count their evaluations.

    Args:
        made: the model.
        row: what is drawn.
        train: the images that experts were trained on.
    """
    ensemble = made.ensemble
    if row.merged:
        ensemble = merged(ensemble)
    counted = [CountingExpert(ensemble.experts[k]) for k in range(len(ensemble.experts))]
    ensemble = replace(ensemble, experts=counted)
    if row.router == "exact":
        own_K = [train.at(rows) for rows in made.own_K]
        images_K = [own.images for own in own_K]
        ensemble = replace(ensemble, router=ExactRouter(images_K))
        if isinstance(row.source, Experts) and row.source.conditional:
            priors = exact_class_priors(images_K, [own.label_N for own in own_K])
            ensemble = replace(ensemble, class_prior=priors)
    return ensemble, counted


def merged(ensemble: Ensemble) -> Ensemble:
    """Return one expert whose weights are the mean of all experts' weights, by their priors.

    Source:
        Wortsman et al. 2022, Model soups: averaging weights of multiple fine-tuned models improves accuracy without
        increasing inference time.
    """
    total = sum(ensemble.prior)
    mean: dict[str, Tensor] = {}
    for number, prior in enumerate(ensemble.prior):
        for name, weight in weights_of(ensemble, number).items():
            mean[name] = mean.get(name, torch.zeros(())) + prior / total * weight
    network = deepcopy(cast(nn.Module, ensemble.experts[0]))
    network.load_state_dict(mean)
    return replace(ensemble, experts=[network], expert_ids=(), router=None, prior=[1.0])


def classes_of(train: Part, num: int, seed: int) -> Tensor:
    """Draw the classes of samples, as frequent as among the training images, int64 (N,)."""
    rows = torch.randint(len(train), (num,), generator=torch.Generator().manual_seed(seed))
    return train.label_N[rows]


def prior_of(ensemble: Ensemble, row: Row) -> list[float]:
    """Return the weights of the experts that a row asks for."""
    match row.prior:
        case "data":
            return list(ensemble.prior)
        case "equal":
            return [1.0] * len(ensemble.experts)
        case "lost":
            return [*list(ensemble.prior)[:-1], 0.0]


def drawn(
    ensemble: Ensemble,
    row: Row,
    preset: Preset,
    seed: int,
    classes: Tensor | None,
    on_progress: Callable[[int, int], None],
) -> Samples:
    """Draw samples as a row asks for them.

    Args:
        ensemble: as `prepared`.
        row: what is drawn.
        preset: how many, by how many steps.
        seed: of the noise.
        classes: those that are asked for; None without classes.
        on_progress: called with the steps taken and the steps in all.
    """
    how: dict[str, Any] = {"prior": prior_of(ensemble, row)}
    if classes is not None:
        how |= {"condition": classes, "guidance": row.guidance}
    return ensemble.sample(
        preset.num_samples,
        strategy=STRATEGIES[row.strategy],
        steps=row.steps or preset.sampling_steps,
        seed=seed,
        **how,
        options=SamplingOptions(solver=row.solver, on_progress=on_progress),
    )
