"""Fine-tunes an expert from public weights: which weights are trained, and how they merge into a whole expert.

A silo always releases a whole expert of the plan's architecture, so nothing after it depends on how it was trained.
With averaged weights, the two factors of a LoRA are averaged separately.
"""

# Shape legend: B batch, I inputs, O outputs of a layer, R rank.
from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from typing import assert_never

import torch
from torch import Tensor, nn

from ddm.errors import SetupError
from ddm.protocol.learning import (
    Adaptation,
    FullAdaptation,
    LoraAdaptation,
    OwnAdaptation,
    PartialAdaptation,
)


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trained one of low rank, which starts at zero.

    ``y = W x + b + alpha / R * up (down x)``

    Args:
        frozen: W and b.
        rank: R.
        alpha: scale.

    Source:
        Hu et al. 2021, arXiv 2106.09685.
    """

    def __init__(self, frozen: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        weight = frozen.weight
        self.frozen, self.scale = frozen.requires_grad_(False), alpha / rank
        self.down_RI = nn.Parameter(weight.new_empty(rank, frozen.in_features))
        self.up_OR = nn.Parameter(weight.new_zeros(frozen.out_features, rank))
        nn.init.uniform_(self.down_RI, -sqrt(1 / frozen.in_features), sqrt(1 / frozen.in_features))

    def forward(self, x_BI: Tensor) -> Tensor:
        """Return the sum of both layers' outputs."""
        out: Tensor = self.frozen(x_BI) + self.scale * ((x_BI @ self.down_RI.T) @ self.up_OR.T)
        return out


def adapt(expert: nn.Module, adaptation: Adaptation, *, seed: int) -> nn.Module:
    """Prepare an expert for training: only the weights that the adaptation names require a gradient.

    Args:
        expert: with the weights that training starts from; changed in place.
        adaptation: the plan's.
        seed: of the added weights; the caller's random state is left as it was.

    Returns:
        The same expert, called as before; its outputs are unchanged until it is trained.

    Raises:
        SetupError: the adaptation names weights that the expert does not have.
    """
    match adaptation:
        case FullAdaptation() | OwnAdaptation():
            return expert.requires_grad_(True)
        case LoraAdaptation(rank=rank, alpha=alpha):
            expert.requires_grad_(False)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                _add_lora(expert, rank, alpha)
            return expert
        case PartialAdaptation(trained=trained):
            _train_only(expert, trained)
            return expert
        case _:
            assert_never(adaptation)


def merged(weights: Mapping[str, Tensor], adaptation: Adaptation) -> dict[str, Tensor]:
    """Return the weights of the whole expert.

    Args:
        weights: of an expert that `adapt` returned, by name.
        adaptation: the same.
    """
    if not isinstance(adaptation, LoraAdaptation):
        return dict(weights)
    whole = {
        name.replace(".frozen.", "."): value
        for name, value in weights.items()
        if not _is_factor(name)
    }
    for name, up_OR in weights.items():
        layer, _, factor = name.rpartition(".")
        if factor == "up_OR":
            update = (up_OR.double() @ weights[f"{layer}.down_RI"].double()) * (
                adaptation.alpha / adaptation.rank
            )
            whole[f"{layer}.weight"] = (whole[f"{layer}.weight"].double() + update).to(up_OR)
    return whole


def _is_factor(name: str) -> bool:
    return name.endswith((".up_OR", ".down_RI"))


def _add_lora(module: nn.Module, rank: int, alpha: float) -> None:
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, LoraLinear(child, rank, alpha))
        else:
            _add_lora(child, rank, alpha)


def check_trained(names: Iterable[str], prefixes: Sequence[str]) -> None:
    """Refuse names or prefixes that none of an expert's weights begins with.

    Raises:
        SetupError: names the first of them.
    """
    names = list(names)
    for prefix in prefixes:
        if not any(_begins(name, prefix) for name in names):
            raise SetupError(
                "plan, adaptation.trained",
                expected="names of the expert's weights, or prefixes of names",
                got=f"{prefix[:80]!r}, which no weight begins with",
                remedy="Ask the aggregator for a plan whose adaptation fits its architecture.",
            )


def _train_only(expert: nn.Module, prefixes: tuple[str, ...]) -> None:
    check_trained([name for name, _ in expert.named_parameters()], prefixes)
    for name, weight in expert.named_parameters():
        weight.requires_grad_(any(_begins(name, prefix) for prefix in prefixes))


def _begins(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")
