"""Gradients of single units: each is that of a unit's own loss, over all its images and all their draws.

Two ways, exact both; docs/adr/0057-how-gradients-of-single-units-are-computed.md holds the measurements. Factors of a
LoRA are few, so every unit computes with a copy of its own, and the backward pass leaves a gradient in each copy. For
other weights a loop takes one backward pass a unit.
"""

# Shape legend: U units, S samples of each unit (images times draws, padded), ... all data dimensions.
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ddm.diffusion.path import Path, Prediction, target_of, x_t
from ddm.models.adaptation import LoraLinear
from ddm.protocol.plan import Training
from ddm.training.weighting import loss_weights

Weights = Mapping[str, Tensor]
_COPIED = frozenset({"down_RI", "up_OR"})


@dataclass(frozen=True)
class UnitBatch:
    """Some units of a step, each with as many samples.

    Attributes:
        x_0, eps: shape (U, S, ...).
        t_US: times.
        weight_US: each sample's share of its unit's loss; 0 for padding, else they sum to 1 over a unit.
        condition: shape (U, S, ...); None for an unconditional expert.
    """

    x_0: Tensor
    eps: Tensor
    t_US: Tensor
    weight_US: Tensor
    condition: Tensor | None = None

    def __len__(self) -> int:
        return len(self.t_US)

    def to(self, device: torch.device) -> "UnitBatch":
        """Return the batch on a device."""
        fields = (self.x_0, self.eps, self.t_US, self.weight_US, self.condition)
        return UnitBatch(*(None if each is None else each.to(device) for each in fields))  # type: ignore[arg-type]

    @property
    def fields(self) -> tuple[Tensor, ...]:
        """Its tensors."""
        fields = (self.x_0, self.eps, self.t_US, self.weight_US, self.condition)
        return tuple(each for each in fields if each is not None)


@dataclass(frozen=True)
class UnitLoss:
    """The loss of a unit: the weighted mean over its samples of the mean squared error per value.

    Attributes:
        model: called as ``model(x_B, t_B)``, or with a condition.
        settings: the plan's recipe.
        path: the probability path.
        prediction: what the model predicts.
        in_bf16: whether products are bfloat16; gradients are float32 in any case.
    """

    model: nn.Module
    settings: Training
    path: Path
    prediction: Prediction
    in_bf16: bool = False

    def of_samples(self, weights: Weights, fields: Sequence[Tensor]) -> Tensor:
        """Return each sample's weighted loss, shape (B,); fields as `UnitBatch.fields`, with one leading dimension."""
        x_0, eps, t_B, weight_B, *condition = fields
        with torch.autocast(x_0.device.type, torch.bfloat16, enabled=self.in_bf16):
            inputs = (x_t(self.path, x_0, eps, t_B), t_B, *condition)
            prediction_B = functional_call(self.model, dict(weights), inputs)
        target_B = target_of(self.path, self.prediction, x_0, eps, t_B)
        squares_B = (prediction_B.float() - target_B).square().flatten(1).mean(1)
        at_t_B = loss_weights(self.settings.loss_weighting, self.path, self.prediction, t_B)
        loss_B: Tensor = squares_B * weight_B
        return loss_B if at_t_B is None else loss_B * at_t_B.to(loss_B)


def by_copies(loss: UnitLoss, weights: Weights, batch: UnitBatch) -> tuple[dict[str, Tensor], Tensor]:
    """Return each unit's gradient of LoRA factors, shapes (U, ...), and its loss (U,): every unit has its own copy."""
    copies = {
        name: value.detach().expand(len(batch), *value.shape).clone().requires_grad_()
        for name, value in weights.items()
    }
    loss_B = loss.of_samples(copies, [each.flatten(0, 1) for each in batch.fields])
    gradients = torch.autograd.grad(loss_B.sum(), list(copies.values()))
    return dict(zip(copies, gradients, strict=True)), loss_B.detach().view(len(batch), -1).sum(1)


def by_loop(loss: UnitLoss, weights: Weights, batch: UnitBatch) -> tuple[dict[str, Tensor], Tensor]:
    """Return each unit's gradient and loss, by one backward pass a unit."""
    named = {name: value.detach().requires_grad_() for name, value in weights.items()}
    gradients = {name: value.new_empty((len(batch), *value.shape)) for name, value in weights.items()}
    losses = []
    for unit in range(len(batch)):
        own = loss.of_samples(named, [each[unit] for each in batch.fields]).sum()
        for name, gradient in zip(named, torch.autograd.grad(own, list(named.values())), strict=True):
            gradients[name][unit] = gradient
        losses.append(own.detach())
    return gradients, torch.stack(losses) if losses else torch.zeros(0)


def takes_copies(model: nn.Module) -> bool:
    """Whether all weights that are trained are factors of a LoRA."""
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    layers = [name for name, module in model.named_modules() if isinstance(module, LoraLinear)]
    return bool(trained) and trained == {f"{layer}.{factor}" for layer in layers for factor in _COPIED}
