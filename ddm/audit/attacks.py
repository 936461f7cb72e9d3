"""Membership attacks on one expert: what each makes of an image, higher where the expert seems to know it.

All of them ask how well the expert undoes noise near an image, at several shares of noise: a share s is the time at
which the path has the signal-to-noise ratio of the linear path at t = s.

Source:
    loss: Matsumoto et al. 2023, arXiv 2302.03262; SecMI: Duan et al. 2023, arXiv 2302.01316; PIA: Kong et al. 2023,
    arXiv 2305.18355; SimA: arXiv 2509.25003; gradient norm: Pang et al. 2023, arXiv 2308.06405 (there with a learned
    classifier on top).
"""

# Shape legend: B images, A attacks, S shares of noise, ... all data dimensions.
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddm.diffusion.path import Path, Prediction, target_of, x_0_and_eps_of, x_t

LOSS, LOSS_DRAWS = (0.1, 0.25, 0.45, 0.7), 2
SIMA = (0.05, 0.1, 0.2, 0.4)
PIA_START, PIA = 0.02, (0.1, 0.25, 0.45)
SECMI = (0.03, 0.08, 0.16, 0.3)
GRADIENT, GRADIENT_DRAWS = 0.25, 2
CALLS = (
    LOSS_DRAWS * len(LOSS) + len(SIMA) + 1 + len(PIA) + 2 * (len(SECMI) - 1) + 3 * GRADIENT_DRAWS
)
"""What all attacks on one image cost, in evaluations of the expert; a gradient costs two more."""


def names() -> tuple[str, ...]:
    """Return the attacks in the order of `scores`, each with its share of noise."""
    shares = {"loss": LOSS, "sima": SIMA, "pia": PIA, "secmi": SECMI[:-1], "gradient": (GRADIENT,)}
    return tuple(f"{name} {share:g}" for name, listed in shares.items() for share in listed)


@dataclass(frozen=True)
class Target:
    """The expert that is attacked.

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

    def times(self, shares: tuple[float, ...], num: int) -> Tensor:
        """Return the times of all shares, each for `num` images, shape (S B,)."""
        return (
            torch.stack([self.time(share) for share in shares])
            .repeat_interleave(num)
            .to(self.device)
        )

    def eps(self, x_B: Tensor, t_B: Tensor, condition: tuple[Tensor, ...]) -> Tensor:
        """Return the noise that the expert sees in x_B."""
        return self.data_and_eps(x_B, t_B, condition)[1]

    def data_and_eps(
        self, x_B: Tensor, t_B: Tensor, condition: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Return the image and the noise that the expert sees in x_B."""
        answer = self.network(x_B, t_B, *condition)
        return x_0_and_eps_of(self.path, self.prediction, x_B, answer.to(x_B), t_B)


def scores(
    target: Target, x_B: Tensor, condition_B: Tensor | None, noise: torch.Generator
) -> Tensor:
    """Attack one block of images.

    Args:
        target: the expert.
        x_B: images in the expert's space, shape (B, ...).
        condition_B: the condition that each was trained under, None for an unconditional expert.
        noise: of the block; another expert attacked with the same one sees the same noise.

    Returns:
        Shape (B, A), float64, on the CPU, by `names`; a score that is not finite is the lowest finite number.
    """
    x_B = x_B.to(target.device, torch.float32)
    condition = () if condition_B is None else (condition_B.to(target.device),)
    drawn = [
        torch.randn(x_B.shape, generator=noise) for _ in range(max(LOSS_DRAWS, GRADIENT_DRAWS))
    ]
    eps = [each.to(target.device) for each in drawn]
    with torch.inference_mode():
        columns = [*_loss(target, x_B, condition, eps), *_sima(target, x_B, condition)]
        columns += [*_pia(target, x_B, condition), *_secmi(target, x_B, condition)]
    columns.append(_gradient(target, x_B, condition, eps[:GRADIENT_DRAWS]))
    found = -torch.stack([column.detach().double().cpu() for column in columns], 1)
    return found.nan_to_num(nan=-1e30, posinf=1e30, neginf=-1e30)


def _loss(
    target: Target, x_B: Tensor, condition: tuple[Tensor, ...], eps: list[Tensor]
) -> Iterator[Tensor]:
    """Yield the expert's error at each share, averaged over draws."""
    for share in LOSS:
        t_B = target.times((share,), len(x_B))
        found = [_error(target, x_B, condition, each, t_B) for each in eps[:LOSS_DRAWS]]
        yield torch.stack(found).mean(0)


def _error(
    target: Target, x_B: Tensor, condition: tuple[Tensor, ...], eps: Tensor, t_B: Tensor
) -> Tensor:
    answer: Tensor = target.network(x_t(target.path, x_B, eps, t_B), t_B, *condition)
    wanted = target_of(target.path, target.prediction, x_B, eps, t_B)
    return (answer - wanted).flatten(1).square().mean(1)


def _sima(target: Target, x_B: Tensor, condition: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """Yield the size of the noise that the expert sees in the image itself, without any."""
    for share in SIMA:
        t_B = target.times((share,), len(x_B))
        quiet_B = x_t(target.path, x_B, torch.zeros_like(x_B), t_B)
        yield target.eps(quiet_B, t_B, condition).flatten(1).square().mean(1)


def _pia(target: Target, x_B: Tensor, condition: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """Yield how far the noise seen in the image differs from that seen once the image is noised with it."""
    start_B = target.times((PIA_START,), len(x_B))
    first = target.eps(x_t(target.path, x_B, torch.zeros_like(x_B), start_B), start_B, condition)
    for share in PIA:
        t_B = target.times((share,), len(x_B))
        again = target.eps(x_t(target.path, x_B, first, t_B), t_B, condition)
        yield (again - first).flatten(1).abs().pow(4).mean(1).pow(0.25)


def _secmi(target: Target, x_B: Tensor, condition: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """Yield how far a deterministic step towards noise and back misses its start, along such steps from the image."""
    t_B = target.times(SECMI[:1], len(x_B))
    x_t_B = x_t(target.path, x_B, torch.zeros_like(x_B), t_B)
    for share in SECMI[1:]:
        later_B = target.times((share,), len(x_B))
        there_B = x_t(target.path, *target.data_and_eps(x_t_B, t_B, condition), later_B)
        back_B = x_t(target.path, *target.data_and_eps(there_B, later_B, condition), t_B)
        yield (back_B - x_t_B).flatten(1).square().mean(1)
        x_t_B, t_B = there_B, later_B


def _gradient(
    target: Target, x_B: Tensor, condition: tuple[Tensor, ...], eps: list[Tensor]
) -> Tensor:
    """Return the norm of the gradient of the error of each image, image by image, which bounds the memory."""
    weights = [weight for weight in target.network.parameters() if weight.is_floating_point()]
    trained = [weight.requires_grad for weight in weights]
    found = torch.zeros(len(x_B), dtype=torch.float64)
    try:
        for weight in weights:
            weight.requires_grad_(True)
        for number in range(len(x_B)):
            one = slice(number, number + 1)
            noise = torch.cat([each[one] for each in eps])
            images = x_B[one].expand_as(noise)
            own = tuple(each[one].expand(len(noise), *each.shape[1:]) for each in condition)
            error = _error(target, images, own, noise, target.times((GRADIENT,), len(noise))).mean()
            slopes = torch.autograd.grad(error, weights, allow_unused=True)
            norms = torch._foreach_norm([slope for slope in slopes if slope is not None])
            found[number] = torch.stack(norms).double().norm().cpu()
    finally:
        for weight, before in zip(weights, trained, strict=True):
            weight.requires_grad_(before)
    return found
