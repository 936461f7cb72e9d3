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
        return self.path.time_of(torch.tensor(1 - share), torch.tensor(share)).float()

    def times(self, share: float, num: int) -> Tensor:
        """Return this time for each of `num` images, shape (B,)."""
        return self.time(share).repeat(num).to(self.device)

    def eps(
        self,
        x_B: Tensor,
        t_B: Tensor,
        condition: tuple[Tensor, ...],
    ) -> Tensor:
        """Return the noise that the expert predicts for x_B."""
        _, eps_B = self.data_and_eps(x_B, t_B, condition)
        return eps_B

    def data_and_eps(
        self,
        x_B: Tensor,
        t_B: Tensor,
        condition: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        """Return the image and the noise that the expert predicts for x_B."""
        output_B = self.network(x_B, t_B, *condition)
        return x_0_and_eps_of(self.path, self.prediction, x_B, output_B.to(x_B), t_B)


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
        noise: of the block; another expert attacked with the same one gets the same noise.

    Returns:
        Shape (B, A), float64, on the CPU, by `names`; a score that is not finite is the lowest finite number.
    """
    x_B = x_B.to(expert.device, torch.float32)
    condition: tuple[Tensor, ...] = ()
    if condition_B is not None:
        condition = (condition_B.to(expert.device),)
    # Drawn on the CPU, whose numbers are the same on every machine.
    eps = []
    for _ in range(max(LOSS_DRAWS, GRADIENT_DRAWS)):
        eps_B = torch.randn(x_B.shape, generator=noise)
        eps.append(eps_B.to(expert.device))
    with torch.inference_mode():
        errors = [
            *_loss(expert, x_B, condition, eps[:LOSS_DRAWS]),
            *_sima(expert, x_B, condition),
            *_pia(expert, x_B, condition),
            *_secmi(expert, x_B, condition),
        ]
    errors.append(_gradient(expert, x_B, condition, eps[:GRADIENT_DRAWS]))
    # Every attack yields an error, which is small where the expert knows an image.
    error_BA = torch.stack([error_B.detach().double().cpu() for error_B in errors], 1)
    return (-error_BA).nan_to_num(nan=_LOWEST_SCORE, posinf=_HIGHEST_SCORE, neginf=_LOWEST_SCORE)


def _loss(
    expert: AttackedExpert,
    x_B: Tensor,
    condition: tuple[Tensor, ...],
    eps: list[Tensor],
) -> Iterator[Tensor]:
    """Yield the expert's error at each share, averaged over draws."""
    for share in LOSS_SHARES:
        t_B = expert.times(share, len(x_B))
        errors = [_prediction_error(expert, x_B, condition, eps_B, t_B) for eps_B in eps]
        yield torch.stack(errors).mean(0)


def _prediction_error(
    expert: AttackedExpert,
    x_B: Tensor,
    condition: tuple[Tensor, ...],
    eps_B: Tensor,
    t_B: Tensor,
) -> Tensor:
    x_t_B = x_t(expert.path, x_B, eps_B, t_B)
    output_B: Tensor = expert.network(x_t_B, t_B, *condition)
    target_B = target_of(expert.path, expert.prediction, x_B, eps_B, t_B)
    return _mean_square(output_B - target_B)


def _mean_square(x_B: Tensor) -> Tensor:
    return x_B.flatten(1).square().mean(1)


def _sima(
    expert: AttackedExpert,
    x_B: Tensor,
    condition: tuple[Tensor, ...],
) -> Iterator[Tensor]:
    """Yield the size of the noise that the expert predicts for the image itself, to which none was added."""
    for share in SIMA_SHARES:
        t_B = expert.times(share, len(x_B))
        x_t_B = x_t(expert.path, x_B, torch.zeros_like(x_B), t_B)
        yield _mean_square(expert.eps(x_t_B, t_B, condition))


def _pia(
    expert: AttackedExpert,
    x_B: Tensor,
    condition: tuple[Tensor, ...],
) -> Iterator[Tensor]:
    """Yield how far the noise predicted for the image differs from that predicted once this noise is added."""
    start_B = expert.times(PIA_START, len(x_B))
    x_start_B = x_t(expert.path, x_B, torch.zeros_like(x_B), start_B)
    first_eps_B = expert.eps(x_start_B, start_B, condition)
    for share in PIA_SHARES:
        t_B = expert.times(share, len(x_B))
        x_t_B = x_t(expert.path, x_B, first_eps_B, t_B)
        second_eps_B = expert.eps(x_t_B, t_B, condition)
        difference_B = (second_eps_B - first_eps_B).flatten(1)
        # The 4-norm of the paper, as a mean, so that it does not depend on the size of images.
        yield difference_B.abs().pow(4).mean(1).pow(0.25)


def _secmi(
    expert: AttackedExpert,
    x_B: Tensor,
    condition: tuple[Tensor, ...],
) -> Iterator[Tensor]:
    """Yield how far a deterministic step towards noise and back misses its start, along such steps from the image."""
    t_B = expert.times(SECMI_SHARES[0], len(x_B))
    x_t_B = x_t(expert.path, x_B, torch.zeros_like(x_B), t_B)
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
    condition: tuple[Tensor, ...],
) -> Tensor:
    """Move samples to another time with the image and the noise that the expert predicts for them."""
    x_0_B, eps_B = expert.data_and_eps(x_from_B, from_B, condition)
    return x_t(expert.path, x_0_B, eps_B, to_B)


def _gradient(
    expert: AttackedExpert,
    x_B: Tensor,
    condition: tuple[Tensor, ...],
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
            condition_D = tuple(
                value_B[row].expand(len(eps_D), *value_B.shape[1:]) for value_B in condition
            )
            error = _prediction_error(expert, x_D, condition_D, eps_D, t_D).mean()
            gradients = torch.autograd.grad(error, weights, allow_unused=True)
            norms = torch._foreach_norm([part for part in gradients if part is not None])
            norm_B[number] = torch.stack(norms).double().norm().cpu()
    finally:
        for weight, needed_gradient in zip(weights, needed_gradients, strict=True):
            weight.requires_grad_(needed_gradient)
    return norm_B
