"""Private training (DP-SGD): which units enter a step, their clipped gradients, and the noise that hides them.

Every unit enters a step by chance, decided by the training's secret. Its gradient, over all its images and all their
draws, is computed alone, clipped in float32 and rounded to a grid, so that the sum over units is exact whatever its
order, and does not depend on how many processes share it. Noise is added once, as whole steps of the same grid: the sum
is the Gaussian mechanism, rounded. What follows of it, AdamW, the averages, the weights that leave, costs nothing more.

What could depend on one unit's images otherwise, does not: the sum is divided by the plan's `units_per_step`, what is
not finite counts as 0, and nothing about a unit's draws, its gradient or the process that computes it depends on the
others.
"""

# Shape legend: N images, U units, S samples of a unit (images times draws), P trained weights.
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddm.errors import DataError, SetupError
from ddm.privacy.accounting import noise_multiplier_for
from ddm.privacy.noise import Octets, rounded_gaussian
from ddm.privacy.secret_stream import (
    SECRET_BYTES,
    SecretStream,
    name_of_secret,
    secret_generator,
)
from ddm.protocol.weight_privacy import DpSgd, DpSgdMechanism
from ddm.training.augmentation import augment
from ddm.training.batches import Examples, draw_times, hide, rows
from ddm.training.config import Engine
from ddm.training.objective import TrainingObjective
from ddm.training.state import TrainingState
from ddm.training.unit_gradients import UnitLoss, UnitSamples, unit_gradient

# Steps of the grid in the clipping norm: float32 holds every whole number up to it.
STEPS_PER_CLIP = 2**24
# Scaled in float32, a clipped gradient's norm is off by 2^-22 at most.
_ROUNDING = 1 + 2.0**-10
_NOISE_BLOCK = 2**20


@dataclass(frozen=True)
class PrivateTraining:
    """What private training needs beside the recipe.

    Attributes:
        terms: the plan's.
        paid: noise and sampling, as the ledger paid for them. Where units of the data are held out from training, the
            rate is still that of all units together, which is public.
        unit_N: each image's unit, from 0 without a gap.
        secret: the secret of this training, see `ddm.privacy.secret_stream`.
    """

    terms: DpSgd
    paid: DpSgdMechanism
    unit_N: Tensor
    secret: bytes

    def __post_init__(self) -> None:
        present_U = torch.unique(self.unit_N)
        if not torch.equal(present_U, torch.arange(len(present_U))):
            raise DataError(
                "privacy units",
                expected="units 0, 1, 2, ... without a gap",
                got=f"{len(present_U)} different units up to {int(self.unit_N.max())}",
            )

    @property
    def num_units(self) -> int:
        """How many units are trained on."""
        return int(self.unit_N.max()) + 1

    @cached_property
    def images_of(self) -> list[NDArray[np.int64]]:
        """Each unit's images."""
        # The stable sort keeps a unit's images in their order, which the unit's own random numbers refer to.
        order_N = np.argsort(self.unit_N.numpy(), kind="stable")
        ends_U = np.cumsum(np.bincount(self.unit_N.numpy(), minlength=self.num_units))
        return np.split(order_N, ends_U[:-1])

    @property
    def recipe(self) -> list[object]:
        """What a checkpoint must agree with; from one of another secret, the run would not resume to the byte."""
        return [
            self.terms.model_dump(),
            self.paid.model_dump(),
            self.num_units,
            name_of_secret(self.secret),
        ]

    def sampled(self, step: int) -> NDArray[np.int64]:
        """Return the units of a step: each by itself, with the paid probability rounded down to 2^-64."""
        octets = SecretStream(self.secret, "sampling", step).octets(8 * self.num_units)
        # Rounded down, so that no unit enters more often than was paid for. Each unit has its own 8 bytes: whether it
        # enters says nothing about the others.
        threshold = int(self.paid.rate * 2.0**64)
        if threshold >= 2**64:
            return np.arange(self.num_units)
        number_U = np.frombuffer(octets, dtype="<u8")
        return np.flatnonzero(number_U < np.uint64(threshold)).astype(np.int64)


def make_private(unit_N: Tensor, terms: DpSgd, num_steps: int) -> PrivateTraining:
    """Prepare a private training of one's own data, outside of a federation and its ledger: `train(..., private=...)`.

    The noise follows from epsilon and delta, and a new secret is drawn. Each call that trains on the same units costs
    epsilon and delta once more: what several trainings cost together is for the caller to add up. A training that is
    to be resumed needs the same object, or its secret.

    Args:
        unit_N: each image's unit, such as its patient, from 0 without a gap, int64 (N,).
        terms: epsilon, delta and how units enter a step.
        num_steps: the number of steps of the training.

    Raises:
        DataError: numbers of units with a gap.
        NumericalError: no noise is enough for this epsilon.
    """
    num_units = int(unit_N.max()) + 1
    rate = terms.rate(num_units)
    multiplier = noise_multiplier_for(terms.epsilon, terms.delta, rate, num_steps)
    mechanism = DpSgdMechanism(noise_multiplier=multiplier, rate=rate, steps=num_steps)
    return PrivateTraining(terms, mechanism, unit_N, secrets.token_bytes(SECRET_BYTES))


def sensitivity(num_weights: int) -> float:
    """Return the largest norm of one unit's clipped and rounded gradient, in steps of the grid.

    ``STEPS_PER_CLIP (1 + 2^-10) + sqrt(P) / 2``: each of P numbers is rounded by half a step at most.
    """
    return STEPS_PER_CLIP * _ROUNDING + sqrt(num_weights) / 2


def clipped(gradient: Mapping[str, Tensor], clip: float) -> dict[str, Tensor]:
    """Clip a unit's gradient to a norm of at most `clip`, and round it to the grid.

    Args:
        gradient: float32.
        clip: the largest norm.

    Returns:
        Whole numbers of at most `STEPS_PER_CLIP`, float32; 0 where the gradient is not finite.
    """
    norms = [torch.linalg.vector_norm(value, dtype=torch.float64) for value in gradient.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    scale = STEPS_PER_CLIP / clip * (clip / norm).clamp(max=1.0)
    # A gradient of norm 0 has no direction, and its scale would be infinite.
    scale = torch.where(norm > 0, scale, 0.0).float()
    is_finite = torch.isfinite(norm)
    return {
        name: torch.where(is_finite, value * scale, 0.0).round_()
        for name, value in gradient.items()
    }


def noise_of(num: int, std: float, source: Octets) -> Iterator[tuple[int, Tensor]]:
    """Yield Gaussian noise rounded to whole numbers, block by block, each with its place."""
    for start in range(0, num, _NOISE_BLOCK):
        size = min(_NOISE_BLOCK, num - start)
        yield start, torch.from_numpy(rounded_gaussian((size,), std, source))


class PrivateSteps:
    """Draws the units of each step, and takes it.

    Args:
        state: the state of the run.
        private: see `PrivateTraining`.
        examples: the images.
        objective: what the model predicts.

    Raises:
        DataError: not one unit per image.
    """

    def __init__(
        self,
        state: TrainingState,
        private: PrivateTraining,
        examples: Examples,
        objective: TrainingObjective,
    ) -> None:
        if len(private.unit_N) != len(examples.images):
            raise DataError(
                "privacy units",
                expected=f"one unit for each of {len(examples.images)} images",
                got=f"{len(private.unit_N)}",
            )
        self._state = state
        self._private = private
        self._examples = examples
        self._objective = objective
        self._loss = UnitLoss(state.model, state.settings, objective, state.in_bf16)
        self._num_weights = sum(weight.numel() for weight in state.weights)

    def draw(self, step: int) -> list[UnitSamples]:
        """Draw this process's part of a step; empty where chance leaves no unit.

        A unit's number says which process computes it, not its place among those that enter: processes may have
        different devices, whose rounding differs.
        """
        process = self._state.process
        sampled_units = self._private.sampled(step)
        own_units = sampled_units[sampled_units % process.num_processes == process.rank]
        return [self._draw_unit(step, int(unit)) for unit in own_units]

    def advance(self, drawn: Sequence[UnitSamples]) -> None:
        """Take one step."""
        state = self._state
        private = self._private
        # float64 adds whole numbers exactly up to 2^53, so 2^29 units at the clipping norm, in whatever order they
        # come.
        sums = [torch.zeros_like(weight, dtype=torch.float64) for weight in state.weights]
        losses: list[Tensor] = []
        for unit in drawn:
            gradients, loss = unit_gradient(
                self._loss, state.named, unit.copied(state.process.device)
            )
            clipped_gradients = clipped(gradients, private.terms.clip).values()
            for total, gradient in zip(sums, clipped_gradients, strict=True):
                total += gradient
            losses.append(loss)
        flat_P = torch.cat([total.flatten() for total in sums])
        # One process adds the noise, once: the sum over processes has it whatever their number.
        if state.process.rank == 0:
            std = private.paid.noise_multiplier * sensitivity(self._num_weights)
            source = SecretStream(private.secret, "noise", state.step)
            for start, noise in noise_of(len(flat_P), std, source):
                flat_P[start : start + len(noise)] += noise.to(flat_P)
        # Divided by a number of the plan: the number of units that entered is not public. Fewer are expected where
        # units are held out, or where a site has so few that each enters every step.
        step_of_grid = private.terms.clip / STEPS_PER_CLIP / private.terms.units_per_step
        flat_P = state.process.total(flat_P) * step_of_grid
        start = 0
        for weight in state.weights:
            weight.grad = flat_P[start : start + weight.numel()].view(weight.shape).to(weight)
            start += weight.numel()
        state.take_step(self._mean(losses))

    def _mean(self, losses: list[Tensor]) -> Tensor:
        """Return this process's share of the mean loss, which stays at this site; what is not finite is left out."""
        process = self._state.process
        loss_U = torch.zeros(0, device=process.device)
        if losses:
            loss_U = torch.stack(losses)
        finite_U = loss_U[torch.isfinite(loss_U)]
        num_finite = torch.tensor(float(len(finite_U)), device=process.device)
        sums: Tensor = process.total(torch.stack([finite_U.sum(), num_finite]))
        total, num = sums.unbind()
        if not num:
            return self._state.loss.clone()
        return total / num / process.num_processes

    def _draw_unit(self, step: int, unit: int) -> UnitSamples:
        """Draw a unit's images, times and noises at a step: a function of secret, step, unit and the unit's images."""
        private = self._private
        terms = private.terms
        random = secret_generator(private.secret, step, unit)
        images = private.images_of[unit]
        # The bound on a step's memory is the plan's. A unit's loss is a mean, so that its number of images does not
        # weigh.
        if len(images) > terms.images_per_unit:
            images = np.sort(random.choice(images, terms.images_per_unit, replace=False))
        chosen = torch.from_numpy(np.repeat(images, terms.draws))
        x_0 = augment(rows(self._examples.images, chosen), self._state.settings, random)
        eps = torch.from_numpy(random.standard_normal(tuple(x_0.shape), dtype=np.float32))
        # One time in each quantile, in order; a permutation gives them to the samples at random.
        ordered_S = draw_times(self._objective.t_distribution, len(chosen), random)
        t_S = ordered_S[torch.from_numpy(random.permutation(len(chosen)))]
        condition = None
        if self._examples.labels is not None:
            hidden_S = torch.from_numpy(random.random(len(chosen)) < self._examples.drop)
            condition = hide(rows(self._examples.labels, chosen), hidden_S)
        return UnitSamples(x_0, eps, t_S, condition)


def check_engine(engine: Engine) -> None:
    """Refuse settings under which a unit's gradient is not at hand.

    Raises:
        SetupError: names the setting.
    """
    for name in ("compile", "recompute", "shard"):
        if getattr(engine, name):
            raise SetupError(
                f"training.{name}",
                expected="false, as the plan trains privately",
                got="true",
                remedy=f"Set training.{name} = false in silo.toml; a plan's batch_size bounds the memory of a step.",
            )
