"""Weights of the times in the loss. They decide where an expert spends its effort, not what it is to predict.

At every (x, t) the best prediction is the same whatever the weight of t, so experts of different weightings mix.
"""

# Shape legend: B batch.
from math import exp
from typing import Literal, assert_never

import torch
from torch import Tensor

from ddm.diffusion.path import Path, Prediction

SIGMOID_BIAS = -1.0
_LEAST_SIGMA = 1e-6  # of x_0, whose weight at sigma = 0 is a limit

Weighting = Literal["none", "sigmoid"]


def loss_weights(
    kind: Weighting,
    path: Path,
    prediction: Prediction,
    t_B: Tensor,
) -> Tensor | None:
    """Return the weight of each time in the squared error of the prediction, shape (B,); None for equal weights.

    With ``snr = alpha^2 / sigma^2`` the sigmoid weights of the squared error of eps are ``sigmoid(b - log snr)`` with
    b = -1 (Hoogeboom et al. 2024, arXiv 2410.19324).

    An error d of another prediction implies an error of eps, so its weights are these times a square:

    - velocity: ``(alpha / D)^2``, with ``D = alpha d_sigma - sigma d_alpha``;
    - v: ``(alpha / (alpha^2 + sigma^2))^2``;
    - x_0: ``snr``.

    Source:
        Kingma and Gao 2023, arXiv 2303.00848, for one weighting in terms of several predictions.
    """
    if kind == "none":
        return None
    alpha = path.alpha(t_B)
    sigma = path.sigma(t_B).clamp(min=_LEAST_SIGMA)
    # sigmoid(b - log snr) = 1 / (1 + exp(-b) alpha^2 / sigma^2), times sigma^2 above and below.
    scaled_signal = exp(-SIGMOID_BIAS) * alpha.square()
    of_eps = sigma.square() / (sigma.square() + scaled_signal)
    match prediction:
        case "eps":
            return of_eps
        case "velocity":
            determinant = alpha * path.d_sigma(t_B) - sigma * path.d_alpha(t_B)
            implied = alpha / determinant
        case "v":
            implied = alpha / (alpha.square() + sigma.square())
        case "x_0":
            implied = alpha / sigma
        case _:
            assert_never(prediction)
    return of_eps * implied.square()


def weighted_mean(squares: Tensor, weights_B: Tensor | None) -> Tensor:
    """Return the mean of squared errors, shape (B, ...), each sample's times its weight; a scalar."""
    if weights_B is None:
        return squares.mean()
    mean_B = squares.flatten(1).mean(1)
    return torch.dot(mean_B, weights_B.to(squares)) / len(squares)
