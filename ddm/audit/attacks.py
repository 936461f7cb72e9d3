"""Membership attacks on one expert: each gives an image a score, higher where the expert seems to know it.

All of them measure how well the expert removes noise near an image, at several shares of noise: a share s is the time
at which the path has the signal-to-noise ratio of the linear path at t = s.

Source:
    loss: Matsumoto et al. 2023, arXiv 2302.03262; SecMI: Duan et al. 2023, arXiv 2302.01316; PIA: Kong et al. 2023,
    arXiv 2305.18355; SimA: arXiv 2509.25003; gradient norm: Pang et al. 2023, arXiv 2308.06405 (there with a learned
    classifier on top).
"""

# Shape legend: B images, A attacks, D draws of noise, ... all data dimensions.
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddm.diffusion.path import Path, Prediction, target_of, x_0_and_eps_of, x_t

# The shares of noise of each attack, and how often it draws noise.
LOSS_SHARES = (0.03, 0.06, 0.1, 0.15, 0.2, 0.28, 0.36, 0.45, 0.55, 0.7)
LOSS_DRAWS = 2
SIMA_SHARES = (0.05, 0.1, 0.2, 0.4)
PIA_START = 0.02
PIA_SHARES = (0.1, 0.25, 0.45)
SECMI_SHARES = (0.03, 0.08, 0.16, 0.3)
GRADIENT_SHARE = 0.25
GRADIENT_DRAWS = 2
CALLS = (
    LOSS_DRAWS * len(LOSS_SHARES)
    + len(SIMA_SHARES)
    + 1
    + len(PIA_SHARES)
    + 2 * (len(SECMI_SHARES) - 1)
    + 3 * GRADIENT_DRAWS
)
"""What all attacks on one image cost, in evaluations of the expert; a gradient costs two more."""
# Scores that are not finite become these: a figure is needed of every image.
_LOWEST_SCORE = -1e30
_HIGHEST_SCORE = 1e30


def names() -> tuple[str, ...]:
    """Return the attacks in the order of `scores`, each with its share of noise."""
    shares_by_attack = {
        "loss": LOSS_SHARES,
        "sima": SIMA_SHARES,
        "pia": PIA_SHARES,
        "secmi": SECMI_SHARES[:-1],
        "gradient": (GRADIENT_SHARE,),
    }
    attacks: list[str] = []
    for attack, shares in shares_by_attack.items():
        attacks.extend(f"{attack} {share:g}" for share in shares)
    return tuple(attacks)


_Condition = tuple[Tensor, ...]
"""What the network takes beside images and times: the condition of each image, or nothing."""


@dataclass(frozen=True)
class AttackedExpert:
    """An expert, and how it is evaluated.

    Attributes:
        network: in evaluation mode, on `device`.
        path: it was trained on.
        prediction: what it predicts.
        device: where it computes.
    """

    network: nn.Module
    path: Path
    prediction: Prediction
    device: torch.device

    def time(self, share: float) -> Tensor:
        """Return the time at which the path has this share of noise."""
        # On the linear path, which defines shares, alpha is 1 - t and sigma is t.
        alpha = torch.tensor(1 - share)
        sigma = torch.tensor(share)
        return self.path.time_of(alpha, sigma).float()

    def times(self, share: float, num: int) -> Tensor:
        """Return this time for each of `num` images, shape (B,)."""
        t_B = self.time(share).repeat(num)
        return t_B.to(self.device)

    def eps(
        self,
        x_B: Tensor,
        t_B: Tensor,
        condition: _Condition,
    ) -> Tensor:
        """Return the noise that the expert predicts for x_B."""
        _, eps_B = self.data_and_eps(x_B, t_B, condition)
        return eps_B

    def data_and_eps(
        self,
        x_B: Tensor,
        t_B: Tensor,
        condition: _Condition,
    ) -> tuple[Tensor, Tensor]:
        """Return the image and the noise that the expert predicts for x_B."""
        output_B = self.network(x_B, t_B, *condition)
        # A network in half precision answers in it; the split into data and noise needs the precision of the images.
        output_B = output_B.to(x_B)
        return x_0_and_eps_of(self.path, self.prediction, x_B, output_B, t_B)


def scores(
    expert: AttackedExpert,
    x_B: Tensor,
    condition_B: Tensor | None,
    noise: torch.Generator,
) -> Tensor:
    """Attack one block of images.

    Args:
        expert: the expert.
        x_B: images in the expert's space, shape (B, ...).
        condition_B: the condition that each was trained under, None for an unconditional expert.
        noise: the noise of the block; another expert attacked with the same one gets the same noise.

    Returns:
        Shape (B, A), float64, on the CPU, by `names`; a score that is not finite is the lowest finite number.
    """
    x_B = x_B.to(expert.device, torch.float32)
    condition: _Condition = ()
    if condition_B is not None:
        condition = (condition_B.to(expert.device),)
    # Drawn on the CPU, whose numbers are the same on every machine.
    eps = []
    for _ in range(max(LOSS_DRAWS, GRADIENT_DRAWS)):
        eps_B = torch.randn(x_B.shape, generator=noise)
        eps.append(eps_B.to(expert.device))

    # In the order of `names`.
    errors: list[Tensor] = []
    with torch.inference_mode():
        errors.extend(_loss(expert, x_B, condition, eps[:LOSS_DRAWS]))
        errors.extend(_sima(expert, x_B, condition))
        errors.extend(_pia(expert, x_B, condition))
        errors.extend(_secmi(expert, x_B, condition))
    errors.append(_gradient(expert, x_B, condition, eps[:GRADIENT_DRAWS]))
    errors_on_cpu = [error_B.detach().double().cpu() for error_B in errors]

    # Every attack yields an error, which is small where the expert knows an image; a score is high there.
    score_BA = -torch.stack(errors_on_cpu, 1)
    return score_BA.nan_to_num(
        nan=_LOWEST_SCORE,
        posinf=_HIGHEST_SCORE,
        neginf=_LOWEST_SCORE,
    )


def _loss(
    expert: AttackedExpert,
    x_B: Tensor,
    condition: _Condition,
    eps: list[Tensor],
) -> Iterator[Tensor]:
    """Yield the expert's error at each share, averaged over draws."""
    for share in LOSS_SHARES:
        t_B = expert.times(share, len(x_B))
        errors = []
        for eps_B in eps:
            error_B = _prediction_error(expert, x_B, condition, eps_B, t_B)
            errors.append(error_B)
        yield torch.stack(errors).mean(0)


def _prediction_error(
    expert: AttackedExpert,
    x_B: Tensor,
    condition: _Condition,
    eps_B: Tensor,
    t_B: Tensor,
) -> Tensor:
    x_t_B = x_t(expert.path, x_B, eps_B, t_B)
    output_B: Tensor = expert.network(x_t_B, t_B, *condition)
    target_B = target_of(expert.path, expert.prediction, x_B, eps_B, t_B)
    return _mean_square(output_B - target_B)


def _mean_square(x_B: Tensor) -> Tensor:
    """Return the mean of the squared values of each image, shape (B,)."""
    values_BV = x_B.flatten(1)
    return values_BV.square().mean(1)


def _without_noise(expert: AttackedExpert, x_B: Tensor, t_B: Tensor) -> Tensor:
    """Return ``alpha_t x_0``: what the expert would see at t of an image to which no noise was added."""
    no_noise_B = torch.zeros_like(x_B)
    return x_t(expert.path, x_B, no_noise_B, t_B)


def _sima(
    expert: AttackedExpert,
    x_B: Tensor,
    condition: _Condition,
) -> Iterator[Tensor]:
    """Yield the size of the noise that the expert predicts for the image itself, to which none was added."""
    for share in SIMA_SHARES:
        t_B = expert.times(share, len(x_B))
        x_t_B = _without_noise(expert, x_B, t_B)
        eps_B = expert.eps(x_t_B, t_B, condition)
        yield _mean_square(eps_B)


def _pia(
    expert: AttackedExpert,
    x_B: Tensor,
    condition: _Condition,
) -> Iterator[Tensor]:
    """Yield how far the noise predicted for the image differs from that predicted once this noise is added."""
    start_B = expert.times(PIA_START, len(x_B))
    x_start_B = _without_noise(expert, x_B, start_B)
    first_eps_B = expert.eps(x_start_B, start_B, condition)
    for share in PIA_SHARES:
        t_B = expert.times(share, len(x_B))
        x_t_B = x_t(expert.path, x_B, first_eps_B, t_B)
        second_eps_B = expert.eps(x_t_B, t_B, condition)
        difference_B = (second_eps_B - first_eps_B).flatten(1)
        # The 4-norm of the paper, as a mean, so that it does not depend on the size of images.
        fourth_power_B = difference_B.abs().pow(4).mean(1)
        yield fourth_power_B.pow(0.25)


def _secmi(
    expert: AttackedExpert,
    x_B: Tensor,
    condition: _Condition,
) -> Iterator[Tensor]:
    """Yield how far a deterministic step towards noise and back misses its start, along such steps from the image."""
    t_B = expert.times(SECMI_SHARES[0], len(x_B))
    x_t_B = _without_noise(expert, x_B, t_B)
    for share in SECMI_SHARES[1:]:
        later_B = expert.times(share, len(x_B))
        x_later_B = _deterministic_step(expert, x_t_B, t_B, later_B, condition)
        x_back_B = _deterministic_step(expert, x_later_B, later_B, t_B, condition)
        yield _mean_square(x_back_B - x_t_B)
        x_t_B = x_later_B
        t_B = later_B


def _deterministic_step(
    expert: AttackedExpert,
    x_from_B: Tensor,
    from_B: Tensor,
    to_B: Tensor,
    condition: _Condition,
) -> Tensor:
    """Move samples to another time with the image and the noise that the expert predicts for them."""
    x_0_B, eps_B = expert.data_and_eps(x_from_B, from_B, condition)
    return x_t(expert.path, x_0_B, eps_B, to_B)


def _gradient(
    expert: AttackedExpert,
    x_B: Tensor,
    condition: _Condition,
    eps: list[Tensor],
) -> Tensor:
    """Return the norm of the gradient of the error of each image, image by image, which bounds the memory."""
    weights = [weight for weight in expert.network.parameters() if weight.is_floating_point()]
    needed_gradients = [weight.requires_grad for weight in weights]
    norm_B = torch.zeros(len(x_B), dtype=torch.float64)
    t_D = expert.times(GRADIENT_SHARE, len(eps))
    try:
        for weight in weights:
            weight.requires_grad_(True)
        for number in range(len(x_B)):
            row = slice(number, number + 1)
            # The same image once for each draw of noise.
            eps_D = torch.cat([eps_B[row] for eps_B in eps])
            x_D = x_B[row].expand_as(eps_D)
            condition_D: _Condition = ()
            for value_B in condition:
                value_D = value_B[row].expand(len(eps_D), *value_B.shape[1:])
                condition_D += (value_D,)
            error_D = _prediction_error(expert, x_D, condition_D, eps_D, t_D)
            norm_B[number] = _gradient_norm(error_D.mean(), weights)
    finally:
        for weight, needed_gradient in zip(weights, needed_gradients, strict=True):
            weight.requires_grad_(needed_gradient)
    return norm_B


def _gradient_norm(error: Tensor, weights: list[nn.Parameter]) -> Tensor:
    """Return the norm of the gradient over all weights together, float64, on the CPU."""
    gradients = torch.autograd.grad(error, weights, allow_unused=True)
    # A weight that this prediction does not use, such as that of another class, has no gradient.
    used_gradients = [gradient for gradient in gradients if gradient is not None]
    # One call for all weights: a call for each would take longer than the gradients.
    norms = torch.stack(torch._foreach_norm(used_gradients))
    norm: Tensor = norms.double().norm()
    return norm.cpu()
