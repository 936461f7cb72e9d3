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
from ddm.models import empty_expert
from ddm.protocol.architecture import Architecture, Condition
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

    def __init__(
        self,
        frozen: nn.Linear,
        rank: int,
        alpha: float,
    ) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.scale = alpha / rank
        num_in = frozen.in_features
        num_out = frozen.out_features
        self.down_RI = nn.Parameter(frozen.weight.new_empty(rank, num_in))
        # Zeros, so that the sum of both layers begins as the frozen one.
        self.up_OR = nn.Parameter(frozen.weight.new_zeros(num_out, rank))
        bound = sqrt(1 / num_in)
        nn.init.uniform_(self.down_RI, -bound, bound)

    def forward(self, x_BI: Tensor) -> Tensor:
        """Return the sum of both layers' outputs."""
        update_BO = (x_BI @ self.down_RI.T) @ self.up_OR.T
        out: Tensor = self.frozen(x_BI) + self.scale * update_BO
        return out


def adapt(
    expert: nn.Module,
    adaptation: Adaptation,
    *,
    seed: int,
) -> nn.Module:
    """Prepare an expert for training: only the weights that the adaptation names require a gradient.

    Args:
        expert: the expert with the weights that training starts from; changed in place.
        adaptation: the plan's.
        seed: the seed of the added weights; the caller's random state is left as it was.

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


def num_added_parameters(
    adaptation: Adaptation,
    architecture: Architecture,
    shape: tuple[int, ...],
    condition: Condition,
) -> int:
    """Return how many numbers an adaptation adds to an expert: those of a low-rank one, without allocating them."""
    if not isinstance(adaptation, LoraAdaptation):
        return 0
    with torch.device("meta"):
        expert = empty_expert(architecture, shape, condition)
        adapt(expert, adaptation, seed=0)
    trained = [weight for weight in expert.parameters() if weight.requires_grad]
    return sum(weight.numel() for weight in trained)


def merged(weights: Mapping[str, Tensor], adaptation: Adaptation) -> dict[str, Tensor]:
    """Return the weights of the whole expert.

    Args:
        weights: the weights of an expert that `adapt` returned, by name.
        adaptation: the same.
    """
    if not isinstance(adaptation, LoraAdaptation):
        return dict(weights)
    scale = adaptation.alpha / adaptation.rank
    merged_weights = {}
    for name, weight in weights.items():
        if not name.endswith((".up_OR", ".down_RI")):
            merged_weights[name.replace(".frozen.", ".")] = weight
    for name, up_OR in weights.items():
        layer, _, factor = name.rpartition(".")
        if factor == "up_OR":
            frozen = merged_weights[f"{layer}.weight"]
            down_RI = weights[f"{layer}.down_RI"]
            # In double precision, so that the merged weight is the nearest one to the sum that was trained.
            update = scale * (up_OR.double() @ down_RI.double())
            whole = frozen.double() + update
            merged_weights[f"{layer}.weight"] = whole.to(up_OR)
    return merged_weights


def _add_lora(
    module: nn.Module,
    rank: int,
    alpha: float,
) -> None:
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            # Its frozen layer keeps its name below `.frozen`, which `merged` takes off again.
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
        if not any(_has_prefix(name, prefix) for name in names):
            raise SetupError(
                "plan, adaptation.trained",
                expected="names of the expert's weights, or prefixes of names",
                got=f"{prefix[:80]!r}, which no weight begins with",
                remedy="Ask the aggregator for a plan whose adaptation fits its architecture.",
            )


def _train_only(expert: nn.Module, prefixes: tuple[str, ...]) -> None:
    weights = dict(expert.named_parameters())
    check_trained(weights, prefixes)
    for name, weight in weights.items():
        is_trained = any(_has_prefix(name, prefix) for prefix in prefixes)
        weight.requires_grad_(is_trained)


def _has_prefix(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")
