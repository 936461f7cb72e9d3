"""Why a recipe bounds the range of pixels: by the exact velocity, samples far from the noise's scale are wrong."""

import pytest
import torch
from torch import Tensor

from ddm.ensemble import Ensemble
from ddm.planning.recipe import HALF_WIDTHS


def drawn_spread(half_width: float) -> float:
    """The standard deviation of samples over the true one, half the half-width, for a Gaussian around 5."""
    std = half_width / 2

    def velocity(x_B: Tensor, t_B: Tensor) -> Tensor:
        alpha = 1 - t_B[:, None]
        sigma = t_B[:, None]
        off = (x_B - alpha * 5) / (alpha**2 * std**2 + sigma**2)
        return sigma * off - (5 + alpha * std**2 * off)  # the mean of eps - x_0 given x_t

    drawn = Ensemble([velocity], None, [1.0], shape=(1,), dtype=torch.float64).sample(
        4000, steps=25, seed=0
    )
    return float(drawn.images.std()) / std


def test_samples_have_the_spread_of_the_data_within_the_bounds_and_lose_it_beyond() -> None:
    for half_width in HALF_WIDTHS:
        assert drawn_spread(half_width) == pytest.approx(1.0, abs=0.04)
    least, most = HALF_WIDTHS
    assert drawn_spread(least / 50) < 0.5 and drawn_spread(most * 50) < 0.8, "the controls"
