"""Gradients of single units: each is that of a unit's own loss, over all its images and all their draws.

Every unit is computed by itself, in tensors that hold nothing of another. In a batch of several units its gradient
would differ by rounding with the batch's shape and with its own place there, so with who else enters a step and how
many images they have, and a network's weights amplify rounding without bound
(docs/adr/0065-a-unit-is-computed-alone.md).
"""

# Shape legend: S samples of a unit (images times draws), ... all data dimensions.
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ddm.diffusion.path import target_of, x_t
from ddm.protocol.learning import Training
from ddm.training.objective import TrainingObjective
from ddm.training.weighting import loss_weights

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class UnitSamples:
    """What one unit learns from in a step.

    Attributes:
        x_0, eps: shape (S, ...).
        t_S: times.
        condition: shape (S, ...); None for an unconditional expert.
    """

    x_0: Tensor
    eps: Tensor
    t_S: Tensor
    condition: Tensor | None = None

    def __len__(self) -> int:
        return len(self.t_S)

    @property
    def fields(self) -> tuple[Tensor, ...]:
        """Its tensors."""
        fields = (self.x_0, self.eps, self.t_S, self.condition)
        return tuple(field for field in fields if field is not None)

    def copied(self, device: torch.device) -> "UnitSamples":
        """Return a copy on a device, in memory of torch's own alignment, which some kernels' rounding depends on."""
        return UnitSamples(*(field.to(device, copy=True) for field in self.fields))


@dataclass(frozen=True)
class UnitLoss:
    """The loss of a unit: the mean over its samples of the mean squared error per value.

    Attributes:
        model: called as ``model(x_B, t_B)``, or with a condition.
        settings: the plan's recipe.
        objective: what the model predicts.
        in_bf16: whether products are bfloat16; gradients are float32 in any case.
    """

    model: nn.Module
    settings: Training
    objective: TrainingObjective
    in_bf16: bool = False

    def of_samples(self, weights: Weights, fields: Sequence[Tensor]) -> Tensor:
        """Return each sample's loss, shape (B,); fields as `UnitSamples.fields`."""
        x_0, eps, t_B, *condition = fields
        path = self.objective.path
        prediction = self.objective.prediction
        with torch.autocast(x_0.device.type, torch.bfloat16, enabled=self.in_bf16):
            inputs = (x_t(path, x_0, eps, t_B), t_B, *condition)
            prediction_B = functional_call(self.model, dict(weights), inputs)
        target_B = target_of(path, prediction, x_0, eps, t_B)
        loss_B: Tensor = (prediction_B.float() - target_B).square().flatten(1).mean(1)
        weight_B = loss_weights(self.settings.loss_weighting, path, prediction, t_B)
        if weight_B is None:
            return loss_B
        return loss_B * weight_B.to(loss_B)


def unit_gradient(
    loss: UnitLoss, weights: Weights, unit: UnitSamples
) -> tuple[dict[str, Tensor], Tensor]:
    """Return a unit's gradient, and its loss, a scalar: a function of the weights and of this unit."""
    named = {name: value.detach().requires_grad_() for name, value in weights.items()}
    own = loss.of_samples(named, unit.fields).mean()
    gradients = torch.autograd.grad(own, list(named.values()))
    return dict(zip(named, gradients, strict=True)), own.detach()
