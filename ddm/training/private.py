"""Private training (DP-SGD): which units enter a step, their clipped gradients, and the noise that hides them.

Every unit enters a step by chance, decided by the training's secret. Its gradient, over all its images and all their
draws, is clipped in float32 and rounded to a grid, so that the sum over units is exact whatever its order, and does not
depend on how many processes share it. Noise is added once, as whole steps of the same grid: the sum is the Gaussian
mechanism, rounded. What follows of it, AdamW, the averages, the weights that leave, costs nothing more.

What could depend on one unit's images otherwise, does not: the mean is taken over the expected number of units, what is
not finite counts as 0, and nothing about a unit's draws depends on the others.
"""

# Shape legend: N images, U units, S samples of a unit (images times draws, padded), P trained weights.
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddm.diffusion.path import Path, Prediction
from ddm.errors import DataError, SetupError
from ddm.privacy.noise import Octets, rounded_gaussian
from ddm.privacy.secret_stream import SecretStream, name_of_secret, secret_generator
from ddm.protocol.plan import DpSgd, TDistribution
from ddm.protocol.weight_privacy import DpSgdMechanism
from ddm.training.augmentation import augmented
from ddm.training.batches import Examples, draw_times, hide, rows
from ddm.training.config import Engine
from ddm.training.state import State
from ddm.training.unit_gradients import UnitBatch, UnitLoss, by_copies, by_loop, takes_copies

STEPS_PER_CLIP = 2**24  # of the grid: float32 holds every whole number up to it
# Of float32: a clipped gradient's norm is off by 2^-22, and the gradients of a step's other units differ by about 2^-22
# each with the shape of the batch that they are computed in, which one unit's number of images may change.
_ROUNDING = 1 + 2.0**-10
_NOISE_BLOCK = 2**20
_MAX_COPIED = 2**25  # gradients of single units in memory at once, in numbers


@dataclass(frozen=True)
class Private:
    """What private training needs beside the recipe.

    Attributes:
        terms: the plan's.
        paid: noise and sampling, as the ledger paid for them. Where units of the data are held out from training, the
            rate is still that of all units together, which is public.
        unit_N: each image's unit, from 0 without a gap.
        secret: of this training, see `ddm.privacy.secret_stream`.
    """

    terms: DpSgd
    paid: DpSgdMechanism
    unit_N: Tensor
    secret: bytes

    def __post_init__(self) -> None:
        present_U = torch.unique(self.unit_N)
        if not torch.equal(present_U, torch.arange(len(present_U))):
            got = f"{len(present_U)} different units up to {int(self.unit_N.max())}"
            raise DataError("privacy units", expected="units 0, 1, 2, ... without a gap", got=got)

    @property
    def num_units(self) -> int:
        """How many units are trained on."""
        return int(self.unit_N.max()) + 1

    @cached_property
    def images_of(self) -> list[NDArray[np.int64]]:
        """Each unit's images."""
        order_N = np.argsort(self.unit_N.numpy(), kind="stable")
        ends_U = np.cumsum(np.bincount(self.unit_N.numpy(), minlength=self.num_units))
        return np.split(order_N, ends_U[:-1])

    @property
    def recipe(self) -> list[object]:
        """What a checkpoint must agree with: one of another secret would not be gone on with to the byte."""
        return [self.terms.model_dump(), self.paid.model_dump(), self.num_units, name_of_secret(self.secret)]

    def sampled(self, step: int) -> NDArray[np.int64]:
        """Return the units of a step: each by itself, with the paid probability rounded down to 2^-64."""
        octets = SecretStream(self.secret, "sampling", step).octets(8 * self.num_units)
        threshold = int(self.paid.rate * 2.0**64)
        if threshold >= 2**64:
            return np.arange(self.num_units)
        return np.flatnonzero(np.frombuffer(octets, dtype="<u8") < np.uint64(threshold)).astype(np.int64)


def sensitivity(num_weights: int) -> float:
    """Return the largest norm of one unit's clipped and rounded gradient, in steps of the grid.

    ``STEPS_PER_CLIP (1 + 2^-10) + sqrt(P) / 2``: each of P numbers is rounded by half a step at most.
    """
    return STEPS_PER_CLIP * _ROUNDING + sqrt(num_weights) / 2


def clipped(gradients: Mapping[str, Tensor], clip: float) -> dict[str, Tensor]:
    """Clip each unit's gradient to a norm of at most `clip`, and round it to the grid.

    Args:
        gradients: shapes (U, ...), float32.
        clip: the largest norm.

    Returns:
        Whole numbers of at most `STEPS_PER_CLIP`, float32; 0 for a unit whose gradient is not finite.
    """
    squares = [torch.linalg.vector_norm(each.flatten(1), dim=1, dtype=torch.float64) for each in gradients.values()]
    norm_U = torch.linalg.vector_norm(torch.stack(squares), dim=0)
    scale_U = STEPS_PER_CLIP / clip * (clip / norm_U).clamp(max=1.0)
    finite_U, scale_U = torch.isfinite(norm_U), torch.where(norm_U > 0, scale_U, 0.0).float()
    found = {}
    for name, each in gradients.items():
        view = (-1, *[1] * (each.dim() - 1))
        found[name] = torch.where(finite_U.view(view), each * scale_U.view(view), 0.0).round_()
    return found


def noise_of(num: int, std: float, source: Octets) -> Iterator[tuple[int, Tensor]]:
    """Yield Gaussian noise rounded to whole numbers, block by block, each with its place."""
    for start in range(0, num, _NOISE_BLOCK):
        size = min(_NOISE_BLOCK, num - start)
        yield start, torch.from_numpy(rounded_gaussian((size,), std, source))


class PrivateSteps:
    """Draws the units of each step, and takes it.

    Args:
        state: of the run.
        private: see `Private`.
        examples: the images.
        path: the probability path.
        prediction: what the model predicts.
        distribution: of the times.

    Raises:
        DataError: not one unit per image.
    """

    def __init__(
        self,
        state: State,
        private: Private,
        examples: Examples,
        path: Path,
        prediction: Prediction,
        distribution: TDistribution,
    ) -> None:
        if len(private.unit_N) != len(examples.images):
            expected = f"one unit for each of {len(examples.images)} images"
            raise DataError("privacy units", expected=expected, got=f"{len(private.unit_N)}")
        self._state, self._private, self._examples, self._distribution = state, private, examples, distribution
        self._loss = UnitLoss(state.model, state.settings, path, prediction, state.in_bf16)
        self._gradients = by_copies if takes_copies(state.model) else by_loop
        self._num_weights = sum(weight.numel() for weight in state.weights)

    def draw(self, step: int) -> list[UnitBatch]:
        """Draw this process's part of a step; empty where chance leaves no unit."""
        machine = self._state.machine
        mine = self._private.sampled(step)[machine.rank :: machine.num_processes]
        units = sorted((self._of_unit(step, int(unit)) for unit in mine), key=lambda each: len(each[0].t_US[0]))
        alone = self._gradients is by_loop
        most = 1 if alone else max(1, _MAX_COPIED // self._num_weights)
        return [_joined(group) for group in _grouped(units, self._state.settings.batch_size, most)]

    def advance(self, drawn: Sequence[UnitBatch]) -> None:
        """Take one step."""
        state, private = self._state, self._private
        sums = [torch.zeros_like(weight, dtype=torch.float64) for weight in state.weights]
        losses: list[Tensor] = []
        for batch in drawn:
            gradients, loss_U = self._gradients(self._loss, state.named, batch.to(state.machine.device))
            for total, each in zip(sums, clipped(gradients, private.terms.clip).values(), strict=True):
                total += each.sum(0, dtype=torch.float64)
            losses.append(loss_U)
        flat_P = torch.cat([each.flatten() for each in sums])
        if state.machine.rank == 0:
            std = private.paid.noise_multiplier * sensitivity(self._num_weights)
            for start, noise in noise_of(len(flat_P), std, SecretStream(private.secret, "noise", state.step)):
                flat_P[start : start + len(noise)] += noise.to(flat_P)
        flat_P = state.machine.total(flat_P) * (private.terms.clip / STEPS_PER_CLIP / private.terms.units_per_step)
        start = 0
        for weight in state.weights:
            weight.grad = flat_P[start : start + weight.numel()].view(weight.shape).to(weight)
            start += weight.numel()
        state.take_step(self._mean(losses))

    def _mean(self, losses: list[Tensor]) -> Tensor:
        """Return this process's share of the mean loss, for this machine's own eyes; what is not finite is left out."""
        machine = self._state.machine
        all_U = torch.cat(losses) if losses else torch.zeros(0, device=machine.device)
        kept_U = all_U[torch.isfinite(all_U)]
        told = machine.total(torch.stack([kept_U.sum(), torch.tensor(float(len(kept_U)), device=machine.device)]))
        if not told[1]:
            return self._state.loss.clone()
        return told[0] / told[1] / machine.num_processes

    def _of_unit(self, step: int, unit: int) -> tuple[UnitBatch, int]:
        """Draw a unit's images, times and noises at a step: a function of secret, step, unit and the unit's images."""
        private, terms, settings = self._private, self._private.terms, self._state.settings
        random = secret_generator(private.secret, step, unit)
        images = private.images_of[unit]
        if len(images) > terms.images_per_unit:
            images = np.sort(random.choice(images, terms.images_per_unit, replace=False))
        chosen = torch.from_numpy(np.repeat(images, terms.draws))
        x_0 = augmented(rows(self._examples.images, chosen), settings, random)
        eps = torch.from_numpy(random.standard_normal(tuple(x_0.shape), dtype=np.float32))
        t_S = draw_times(self._distribution, len(chosen), random)[torch.from_numpy(random.permutation(len(chosen)))]
        condition = None
        if self._examples.labels is not None:
            hidden_S = torch.from_numpy(random.random(len(chosen)) < self._examples.drop)
            condition = hide(rows(self._examples.labels, chosen), hidden_S)[None]
        weight_US = torch.full((1, len(chosen)), 1 / len(chosen))
        return UnitBatch(x_0[None], eps[None], t_S[None], weight_US, condition), len(chosen)


def _grouped(
    units: Sequence[tuple[UnitBatch, int]], most_samples: int, most_units: int
) -> Iterator[Sequence[UnitBatch]]:
    """Yield units in groups whose samples, padded, are at most so many, or a single unit."""
    group: list[UnitBatch] = []
    for unit, num in units:  # ascending
        if group and (len(group) == most_units or (len(group) + 1) * num > most_samples):
            yield group
            group = []
        group.append(unit)
    if group:
        yield group


def _joined(units: Sequence[UnitBatch]) -> UnitBatch:
    """Join units into one batch; those with fewer samples are padded with their own first one, of weight 0."""
    most = max(each.t_US.shape[1] for each in units)

    def padded(field: Tensor, *, weight: bool = False) -> Tensor:
        if not (missing := most - field.shape[1]):
            return field
        first = field[:, :1].expand(-1, missing, *field.shape[2:])
        return torch.cat([field, torch.zeros_like(first) if weight else first], 1)

    conditions = [padded(each.condition) for each in units if each.condition is not None]
    return UnitBatch(
        torch.cat([padded(each.x_0) for each in units]),
        torch.cat([padded(each.eps) for each in units]),
        torch.cat([padded(each.t_US) for each in units]),
        torch.cat([padded(each.weight_US, weight=True) for each in units]),
        torch.cat(conditions) if conditions else None,
    )


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
