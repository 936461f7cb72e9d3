"""An attacker outside the product: trains shadows on other images, and attacks an expert as published.

It knows the recipe and the public expert, and has as many images of the same kind as the silo, none of them the silo's.
It shares no code with the audit's attacks, so that it can tell whether the audit finds too little.

Source:
    LiRA, offline: Carlini et al. 2022, arXiv 2112.03570. RMIA, offline: Zarifzadeh et al. 2024, arXiv 2312.03262. PIA:
    Kong et al. 2023, arXiv 2305.18355, here beside shadows.
"""

# Shape legend: I attacked images, of them the first M members; T times; D draws; S shadows.
from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor, nn

TIMES = (0.03, 0.06, 0.1, 0.15, 0.2, 0.28, 0.36, 0.45, 0.55, 0.7)
NUM_DRAWS = 6
_PIA_START = 0.02
_PIA_TIME = 0.25
_BLOCK_SIZE = 100


@dataclass(frozen=True)
class Success:
    """How well an attack does.

    Attributes:
        attack: its name.
        auc: area under the ROC curve.
        tpr: share of members found at 1% false positives.
    """

    attack: str
    auc: float
    tpr: float


def attack_as_outsider(
    expert: nn.Module, shadows: Sequence[nn.Module], members: Tensor, others: Tensor
) -> tuple[Success, ...]:
    """Return how well each attack does.

    Args:
        expert: predicts the velocity on the linear path, as do all shadows.
        shadows: trained like it on images that are neither members nor others.
        members: images that the expert learned.
        others: as many like them that nobody learned.
    """
    images = torch.cat([members, others])
    is_member_I = torch.arange(len(images)) < len(members)
    error_IT = _errors(expert, images)
    shadow_error_SIT = torch.stack([_errors(shadow, images) for shadow in shadows])
    pia_I = _pia(expert, images).log()
    shadow_pia_SI = torch.stack([_pia(shadow, images).log() for shadow in shadows])
    score_by_attack = {
        "LiRA": _lira(error_IT, shadow_error_SIT, is_member_I),
        "RMIA": _rmia(error_IT, shadow_error_SIT, images[0].numel()),
        "PIA": shadow_pia_SI.mean(0) - pia_I,
    }
    successes = []
    for attack, score_I in score_by_attack.items():
        member_M = score_I[is_member_I]
        other_N = score_I[~is_member_I]
        successes.append(Success(attack, _area(member_M, other_N), _found(member_M, other_N)))
    return tuple(successes)


@torch.inference_mode()
def _errors(network: nn.Module, images: Tensor) -> Tensor:
    """Return the mean squared error of the velocity at each time, over draws of noise and their negatives."""
    rows = []
    for number, x_B in enumerate(torch.split(images, _BLOCK_SIZE)):
        # The same noise for every network.
        random = torch.Generator().manual_seed(number)
        error_BT = torch.zeros(len(x_B), len(TIMES))
        for _ in range(NUM_DRAWS // 2):
            eps_B = torch.randn(x_B.shape, generator=random)
            for column, t in enumerate(TIMES):
                for noise_B in (eps_B, -eps_B):
                    velocity_B = network((1 - t) * x_B + t * noise_B, torch.full((len(x_B),), t))
                    error_B = (velocity_B - (noise_B - x_B)).square().flatten(1).mean(1)
                    error_BT[:, column] += error_B / NUM_DRAWS
        rows.append(error_BT)
    return torch.cat(rows).double()


@torch.inference_mode()
def _pia(network: nn.Module, images: Tensor) -> Tensor:
    """Return how far the noise predicted for an image differs from that predicted once this noise is added."""
    rows = []
    for x_B in torch.split(images, _BLOCK_SIZE):
        eps_B = _predicted_noise(network, (1 - _PIA_START) * x_B, _PIA_START)
        x_t_B = (1 - _PIA_TIME) * x_B + _PIA_TIME * eps_B
        difference_B = _predicted_noise(network, x_t_B, _PIA_TIME) - eps_B
        rows.append(difference_B.flatten(1).abs().pow(4).sum(1).pow(0.25))
    return torch.cat(rows).double()


def _predicted_noise(network: nn.Module, x_t_B: Tensor, t: float) -> Tensor:
    # On the linear path x_t = (1 - t) x_0 + t eps and u = eps - x_0, so that eps = x_t + (1 - t) u.
    velocity_B: Tensor = network(x_t_B, torch.full((len(x_t_B),), t))
    return x_t_B + (1 - t) * velocity_B


def _lira(error_IT: Tensor, shadow_error_SIT: Tensor, is_member_I: Tensor) -> Tensor:
    """Return how far the log error is below that of shadows, in deviations, summed over times.

    With few shadows one variance is taken for all images.
    """
    below_IT = shadow_error_SIT.log().mean(0) - error_IT.log()
    deviation_T = below_IT[~is_member_I].std(0)
    return (below_IT / deviation_T).sum(1)


def _rmia(error_IT: Tensor, shadow_error_SIT: Tensor, num_values: int) -> Tensor:
    """Return the log likelihood over the shadows' mean likelihood.

    RMIA's score is the share of other images whose ratio is smaller, which orders images as the ratio itself does.
    """
    # Of Gaussian noise of variance 1, half the squared error is the negative log likelihood up to a constant.
    log_p_I = -num_values / 2 * error_IT.mean(1)
    log_p_SI = -num_values / 2 * shadow_error_SIT.mean(2)
    return log_p_I - (log_p_SI.logsumexp(0) - log(len(log_p_SI)))


def _area(member_M: Tensor, other_N: Tensor) -> float:
    above_MN = member_M[:, None] > other_N
    equal_MN = member_M[:, None] == other_N
    return float((above_MN.double() + equal_MN.double() / 2).mean())


def _found(member_M: Tensor, other_N: Tensor) -> float:
    threshold = other_N.sort(descending=True).values[len(other_N) // 100]
    return float((member_M > threshold).double().mean())
