"""The state of a training run: weights, averages, optimiser; how a step changes it, and how checkpoints store it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from ddm.diffusion.path import target_of, x_t
from ddm.errors import NumericalError, SetupError
from ddm.protocol.learning import Training
from ddm.protocol.submission import MAX_LOSS
from ddm.system.devices import computes_in_bf16
from ddm.training.averages import (
    KEPT_WIDTHS,
    averaging_weight,
    exponent_of,
    keep,
    newest_weight,
    power_weight,
)
from ddm.training.batches import Batch, Teach
from ddm.training.checkpoints import Checkpoints
from ddm.training.distributed import TrainingProcess
from ddm.training.masking import kept_patches
from ddm.training.objective import TrainingObjective
from ddm.training.schedule import learning_rate
from ddm.training.weighting import loss_weights, weighted_mean

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

LOSS_DECAY = 0.99


@dataclass(frozen=True)
class StepMeasurements:
    """What was measured over all processes.

    Args:
        smoothed_loss: averaged over about the last hundred steps.
        num_steps: steps since the measurement before.
        loss: mean loss of these steps.
        gradient_norm: mean norm of their gradients before clipping; None where no step has such a norm.
    """

    smoothed_loss: float
    num_steps: int
    loss: float
    gradient_norm: float | None


class TrainingState:
    """The weights, their average, the optimizer's moments, the smoothed loss and the number of steps.

    Args:
        model: freshly built; moved to the process's device.
        settings: the plan's recipe.
        process: how this process takes part.
        accumulate: parts into which this process splits its share of a batch.
        stops: whether a gradient or a loss that is not finite ends the run; else the step takes a gradient of 0 in its
            place, so that nobody who watches the run learns what its images did.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Training,
        process: TrainingProcess,
        accumulate: int,
        *,
        stops: bool = True,
    ) -> None:
        self.model = model.train()
        self.settings = settings
        self.process = process
        # Before the weights are listed below, since sharding puts other tensors in their place.
        self.call = process.prepare(model)
        self.in_bf16 = computes_in_bf16(settings.precision, process.device)
        self.accumulate = accumulate
        self.stops = stops
        self.num_lost = torch.zeros((), dtype=torch.int64, device=process.device)
        self.named = {
            name: value for name, value in model.named_parameters() if value.requires_grad
        }
        self.weights: list[Tensor] = list(self.named.values())
        # The implementation is fixed, since the default depends on the device and on the version of torch.
        self.optimizer = torch.optim.AdamW(
            self.weights,
            settings.learning_rate,
            settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.ema = [weight.detach().clone() for weight in self.weights]
        widths = KEPT_WIDTHS if settings.ema_snapshots else ()
        self.kept = {
            width: [weight.detach().clone() for weight in self.weights] for width in widths
        }
        self.loss = torch.zeros((), device=process.device)
        # Sums since the last measurement. They stay on the device, which is waited for only when they are read.
        self._loss_sum = torch.zeros_like(self.loss)
        self._norm_sum = torch.zeros_like(self.loss)
        self._num_measured = 0
        self._has_norm = False
        self.step = 0
        self.seconds = 0.0
        # In which the run computes. The checkpoint has their number, which changes sums by rounding.
        self.threads = torch.get_num_threads()

    def advance(
        self,
        batch: Batch,
        objective: TrainingObjective,
        teach: Teach | None = None,
    ) -> None:
        """Take one step; every process gets the same batch and takes its part, with the teacher's target if any."""
        share = torch.zeros_like(self.loss)
        num_parts = self.accumulate * self.process.num_processes
        self.optimizer.zero_grad()
        for index in range(self.accumulate):
            part = batch.part(
                self.process.rank * self.accumulate + index, num_parts, self.process.device
            )
            # Parts may differ by one image, so that each counts by its number of images.
            share_of_batch = len(part) / len(batch)
            if teach is not None:
                part = teach(part)
            with self.process.gathering(last=index == self.accumulate - 1):
                loss = self._loss(part, objective) * share_of_batch
                # Processes average their gradients, but their shares of the loss add up.
                torch.autograd.backward(loss * self.process.num_processes)
            share += loss.detach()
        norm = whole(nn.utils.clip_grad_norm_(self.weights, self.settings.max_gradient_norm))
        if self.stops:
            # A gradient that is not finite makes the loss NaN for good, so checking the loss now and then is enough.
            share = share + 0.0 * norm
        else:
            share = self._without_lost(norm, share)
            norm = norm.nan_to_num(0.0, 0.0, 0.0)
        self._norm_sum += norm
        self._has_norm = True
        self.take_step(share)

    def take_step(self, share: Tensor) -> None:
        """Move the weights along the gradients that they hold, and the averages after them.

        Args:
            share: this process's share of the step's loss.
        """
        if not self.stops:
            # The sum of finite losses, of images or processes, may overflow.
            share = torch.where(torch.isfinite(share), share, self.loss).clamp(max=MAX_LOSS)
        self.optimizer.param_groups[0]["lr"] = learning_rate(self.settings, self.step)
        self.optimizer.step()
        self.step += 1
        with torch.no_grad():
            torch._foreach_lerp_(self.ema, self.weights, newest_weight(self.settings, self.step))
            for width, average in self.kept.items():
                torch._foreach_lerp_(
                    average, self.weights, power_weight(exponent_of(width), self.step)
                )
            self.loss.lerp_(share, averaging_weight(LOSS_DECAY, self.step))
            self._loss_sum += share
        self._num_measured += 1

    def _without_lost(self, norm: Tensor, share: Tensor) -> Tensor:
        """Make a gradient that is not finite 0, and return the loss to average; the device is not waited for."""
        lost = ~torch.isfinite(norm)
        for weight in self.weights:
            if weight.grad is not None:
                # Of a sharded gradient, the part that this process holds.
                getattr(weight.grad, "_local_tensor", weight.grad).masked_fill_(lost, 0.0)
        self.num_lost += lost
        return torch.where(lost, self.loss, share)

    def _loss(self, part: Batch, objective: TrainingObjective) -> Tensor:
        """Return the weighted mean squared error per value, of the kept tokens only where tokens are masked."""
        path = objective.path
        prediction = objective.prediction
        target = target_of(path, prediction, part.x_0, part.eps, part.t_B)
        inputs = [x_t(path, part.x_0, part.eps, part.t_B), part.t_B]
        if part.condition is not None:
            inputs.append(part.condition)
        options = {}
        if part.kept_BM is not None:
            options["kept_BM"] = part.kept_BM
        with torch.autocast(self.process.device.type, torch.bfloat16, enabled=self.in_bf16):
            prediction_B = self.call(*inputs, **options)
        if part.kept_BM is not None:
            target = kept_patches(self.model, target, part.kept_BM)
        weights_B = loss_weights(self.settings.loss_weighting, path, prediction, part.t_B)
        return weighted_mean((prediction_B.float() - target).square(), weights_B)

    @property
    def _is_first(self) -> bool:
        return self.process.rank == 0

    def finite_loss(self) -> float:
        """Return the smoothed loss; all processes must call it together.

        Raises:
            NumericalError: at some step since the last call the loss or the gradient was not finite.
        """
        return self._require_finite(float(self.process.total(self.loss)))

    def measure(self) -> StepMeasurements:
        """Return what was measured since the last call, waiting for the device once; all processes must call together.

        Raises:
            NumericalError: as `finite_loss`.
        """
        # The loss is the sum of the processes' shares; the norm of the whole gradient is the same in each.
        norm_share = self._norm_sum / self.process.num_processes
        sums = torch.stack([self.loss, self._loss_sum, norm_share])
        smoothed_loss, loss_sum, norm_sum = self.process.total(sums).tolist()
        self._require_finite(smoothed_loss)
        num_steps = self._num_measured
        measurements = StepMeasurements(
            smoothed_loss=smoothed_loss,
            num_steps=num_steps,
            loss=loss_sum / num_steps,
            gradient_norm=norm_sum / num_steps if self._has_norm else None,
        )
        self._loss_sum.zero_()
        self._norm_sum.zero_()
        self._num_measured = 0
        return measurements

    def _require_finite(self, loss: float) -> float:
        if not np.isfinite(loss):
            raise NumericalError(
                f"loss at step {self.step}",
                expected="a finite number",
                got=str(loss),
                remedy="Use a smaller learning rate or precision fp32; a silo asks the aggregator for such a plan.",
            )
        return loss

    def averaged(self) -> dict[str, Tensor]:
        """Return the model's state with the averaged weights in place of the last ones, on the CPU.

        All processes must call it together; it returns an empty mapping in all but the first.
        """
        return self._with_average(self.ema)

    def _with_average(self, average: list[Tensor]) -> dict[str, Tensor]:
        state = dict(self.model.state_dict()) | dict(zip(self.named, average, strict=True))
        # Every process takes part in gathering sharded tensors, also those that keep nothing.
        whole_state = {
            name: gathered(value.detach(), keep=self._is_first) for name, value in state.items()
        }
        if not self._is_first:
            return {}
        return {name: value.to("cpu", copy=True) for name, value in whole_state.items()}

    def keep_averages(self, folder: FilePath) -> None:
        """Keep the averages from which others are found after the run, in the first process."""
        averages = [self._with_average(average) for average in self.kept.values()]
        if self._is_first:
            keep(folder, self.step, averages)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor that a later step depends on, by name; views, not copies."""
        moments = [
            self.optimizer.state.get(weight) or _no_moments(weight) for weight in self.weights
        ]
        parts: Mapping[str, list[Tensor]] = {
            "ema": self.ema,
            "first_moment": [moment["exp_avg"] for moment in moments],
            "second_moment": [moment["exp_avg_sq"] for moment in moments],
        } | {f"average_{width:g}": average for width, average in self.kept.items()}
        tensors = {f"model/{name}": value for name, value in self.model.state_dict().items()}
        for part, values in parts.items():
            for name, value in zip(self.named, values, strict=True):
                tensors[f"{part}/{name}"] = value
        return tensors

    def save(self, checkpoints: Checkpoints) -> None:
        """Write a checkpoint in the first process; refuse to where the loss is not finite."""
        loss = self.finite_loss()
        # Sharded tensors are gathered one at a time, and kept only in the process that writes them.
        tensors = {
            name: gathered(value, keep=self._is_first) for name, value in self.tensors().items()
        }
        if self._is_first:
            checkpoints.save(
                tensors,
                step=self.step,
                loss=loss,
                seconds=self.seconds,
                threads=self.threads,
            )

    def restore(self, checkpoints: Checkpoints) -> None:
        """Continue from the last complete checkpoint, if there is one, whatever number of processes wrote it.

        Raises:
            SetupError: it belongs to another run, or the processes did not all find the same one.
        """
        checkpoint = checkpoints.load(self.tensors())
        step = checkpoint[0].step if checkpoint else 0
        total = self.process.total(torch.tensor(float(step), device=self.process.device))
        if total != step * self.process.num_processes:
            raise SetupError(
                "checkpoints",
                expected="the same step in every process",
                got=f"step {step} in process {self.process.rank + 1}, and other steps elsewhere",
                remedy="Give all processes the same folder of checkpoints.",
            )
        if checkpoint is None:
            return
        record, tensors = checkpoint
        self.step = record.step
        self.seconds = record.seconds
        self.threads = record.threads
        # Each process holds its share of the loss; the checkpoint has their sum.
        self.loss.fill_(record.loss / self.process.num_processes)
        for weight in self.weights:
            self.optimizer.state[weight] = _no_moments(weight) | {
                "step": torch.tensor(float(self.step), device=self.process.device)
            }
        with torch.no_grad():
            # Copied in place, so that the memory layout is that of a run that was never interrupted.
            for name, value in self.tensors().items():
                if _is_sharded(value):
                    from torch.distributed.tensor import distribute_tensor

                    placed = tensors[name].to(self.process.device)
                    value.copy_(distribute_tensor(placed, value.device_mesh, value.placements))
                else:
                    value.copy_(tensors[name])


def whole(value: Tensor) -> Tensor:
    """Return a sharded tensor whole, in every process."""
    if _is_sharded(value):
        return value.full_tensor()
    return value


def gathered(value: Tensor, *, keep: bool) -> Tensor:
    """Return a tensor whole; a sharded one on the CPU of the process that keeps it, and empty elsewhere."""
    if not _is_sharded(value):
        return value
    full = value.full_tensor()
    if keep:
        return full.cpu()
    return full.new_empty(0)


def _is_sharded(value: Tensor) -> "TypeIs[DTensor]":
    """Whether it is sharded; tested without importing DTensor, which takes a second that a single process can save."""
    return hasattr(value, "full_tensor")


def _no_moments(weight: Tensor) -> dict[str, Tensor]:
    return {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
