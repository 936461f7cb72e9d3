"""The sigmoid weights against their definition on the error of eps, with the error of a velocity converted exactly."""

from typing import Any

import pytest
import torch

from ddm.diffusion.path import CosinePath, LinearPath, Path, expand_time, x_0_and_eps_of
from ddm.training.weighting import loss_weights, weighted_mean

PATHS: list[Path] = [LinearPath(), CosinePath()]
TIMES = torch.linspace(0.01, 0.99, 50, dtype=torch.float64)


def published(path: Path) -> torch.Tensor:
    snr = (path.alpha(TIMES) / path.sigma(TIMES)) ** 2
    return torch.sigmoid(-1.0 - snr.log())


@pytest.mark.parametrize("path", PATHS)
def test_weights_of_eps_are_the_published_ones(path: Path) -> None:
    weights = loss_weights("sigmoid", path, "eps", TIMES)
    assert weights is not None
    assert torch.allclose(weights, published(path))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("prediction", ["velocity", "v", "x_0"])
def test_other_predictions_have_the_loss_that_their_eps_would_have(
    prediction: Any, path: Path
) -> None:
    random = torch.Generator().manual_seed(0)
    x, u, off = (torch.randn(50, 3, generator=random, dtype=torch.float64) for _ in range(3))
    wrong, right = (
        x_0_and_eps_of(path, prediction, x, answer, TIMES)[1] for answer in (u + off, u)
    )
    error = wrong - right
    weights = loss_weights("sigmoid", path, prediction, TIMES)
    assert weights is not None
    of_eps = error.square() * expand_time(published(path), error)
    assert torch.allclose(off.square() * expand_time(weights, off), of_eps)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("prediction", ["velocity", "eps", "v", "x_0"])
def test_weights_are_finite_at_both_ends(prediction: Any, path: Path) -> None:
    weights = loss_weights("sigmoid", path, prediction, torch.tensor([0.0, 1.0]))
    assert weights is not None
    assert bool(weights.isfinite().all())
    assert bool((weights >= 0).all())


def test_equal_weights_are_none_and_the_mean_is_plain() -> None:
    assert loss_weights("none", LinearPath(), "velocity", TIMES) is None
    squares = torch.rand(50, 2, 3, generator=torch.Generator().manual_seed(0))
    assert weighted_mean(squares, None) == squares.mean()
    weights = torch.rand(50, generator=torch.Generator().manual_seed(1))
    assert weighted_mean(squares, weights) == pytest.approx(
        float((squares * weights[:, None, None]).mean()), rel=1e-6
    )
