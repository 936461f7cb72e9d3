import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ddm.errors import ShapeError
from ddm.routers.evaluation import BANDS, cross_entropy
from tests.support.router_problems import RouterProblem, make_problem

SHARES = [[0.7, 0.1, 0.1, 0.1], [0.05, 0.25, 0.3, 0.4]]
PRIOR = [0.7, 0.3]


class Flat:
    """A router that knows nothing."""

    num_experts = 2

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        return torch.zeros(len(x_B), 2)


class TwoNormals:
    """The exact router of two experts N(-1, 1/4) and N(1, 1/4) in one dimension."""

    num_experts = 2

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        mean = (1 - t_B)[:, None] * torch.tensor([-1.0, 1.0])
        variance = (0.25 * (1 - t_B).square() + t_B.square())[:, None]
        return -0.5 * (x_B.flatten(1) - mean).square() / variance


@pytest.fixture(scope="module")
def world() -> RouterProblem:
    return make_problem(SHARES, [600, 300])


def test_cross_entropy_of_a_flat_router_is_the_entropy_of_the_prior(world: RouterProblem) -> None:
    x = torch.cat(world.silos)
    label = torch.arange(2).repeat_interleave(torch.tensor(world.num_units))
    for prior in ([600, 300], [0.5, 0.5], [0.9, 0.1]):
        p = np.array(prior) / sum(prior)
        for band in cross_entropy(Flat(), x, label, prior):
            assert band.value == pytest.approx(-(p * np.log(p)).sum(), abs=1e-6)


def test_cross_entropy_of_the_exact_router_matches_numerical_integration() -> None:
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(20_000) % 2
    x = (2 * label - 1)[:, None] + 0.5 * torch.randn(20_000, 1, generator=generator)
    prior = np.array([0.7, 0.3])
    for (low, high), band in zip(
        BANDS, cross_entropy(TwoNormals(), x, label, prior.tolist()), strict=True
    ):
        grid = np.linspace(-7, 7, 2001)
        total = 0.0
        times = np.linspace(low, high, 41)[:-1] + (high - low) / 80
        for t in times:
            std = math.sqrt(0.25 * (1 - t) ** 2 + t**2)
            density = np.stack(
                [np.exp(-0.5 * ((grid - (1 - t) * m) / std) ** 2) / std for m in (-1, 1)]
            )
            density /= density.sum(1, keepdims=True)
            joint = prior[:, None] * density
            total -= (joint * np.log(joint / joint.sum(0))).sum() / len(times)
        assert abs(band.value - total) < 5 * band.error + 1e-3
    flat = cross_entropy(Flat(), x, label, prior.tolist())
    assert flat[0].value > cross_entropy(TwoNormals(), x, label, prior.tolist())[0].value + 0.3


def test_cross_entropy_refuses_an_expert_without_images() -> None:
    with pytest.raises(ShapeError):
        cross_entropy(Flat(), torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64), [0.5, 0.5])


def _draw(num: int) -> tuple[Tensor, Tensor]:
    """Images of `TwoNormals` drawn with weights .7 and .3, and p(expert | image) at t = 0."""
    generator = torch.Generator().manual_seed(11)  # not the seed of the noise put on them
    label = (torch.rand(num, generator=generator) < 0.3).long()
    x = (2 * label - 1)[:, None] + 0.5 * torch.randn(num, 1, generator=generator)
    clean = TwoNormals().log_likelihood(x, torch.zeros(num)).double()
    return x, (clean + torch.tensor(PRIOR, dtype=torch.float64).log()).softmax(1)


def _joint(t: float) -> np.ndarray:
    """Prior times density of both experts on a grid, summing to 1."""
    grid = np.linspace(-7, 7, 4001)
    std = math.sqrt(0.25 * (1 - t) ** 2 + t**2)
    density = np.stack([np.exp(-0.5 * ((grid - (1 - t) * m) / std) ** 2) for m in (-1, 1)])
    return np.array(PRIOR)[:, None] * density / density.sum(1, keepdims=True)


def test_cross_entropy_of_an_expert_of_weight_0_is_left_out() -> None:
    x, _ = _draw(60)
    for band in cross_entropy(TwoNormals(), x, torch.arange(60) % 2, [1.0, 0.0]):
        assert band.value == pytest.approx(0.0, abs=1e-9)
