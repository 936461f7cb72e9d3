"""Screens experts for signs that they were not trained as the plan says: loss by noise level, size of weights, copies.

An expert that passed every formal check may still be useless or poisoned. Screening uses public images only and refuses
nobody: a person decides about flagged experts. The limits leave room for silos that hold a single class;
docs/explanation/screening.md says on which experts they were measured. `intake.trial` makes the measurements.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aggregator.intake.drawn import DrawnFigures
from aggregator.intake.flags import Fault
from aggregator.intake.sweep import WorstRow
from ddm.diffusion.path import Path, Prediction, target_of, x_t
from ddm.protocol.base import Digest, ExpertId, Model
from ddm.protocol.learning import Training
from ddm.routers.evaluation import BANDS
from ddm.training.schedule import travel

# Shape legend: Z bands of t, N images, E experts.

FEWEST_IMAGES, MOST_IMAGES = 16, 64
FLOPS = 2e12  # budget for each part of a trial, a minute of one thread; exceeded only for the fewest images and rows
SANE = 2.0  # times the loss of answering 0: an expert of a single class reached 1.2 on images of others
# Near t = 1 every image is noise: where the prediction holds it, no choice of data explains a loss above answering 0.
SANE_AT_NOISE = 1.02
ROW = 10.0  # times the loss of answering 0, of one image at one time below t = 0.8; honest experts: up to 3.3
ALIKE = 0.5  # times the distance of the most alike public images; an expert of zeros alone: 0.92
# The median and the largest distance of drawn images from the public set, in those among public images. An error of eps
# grows on the way to t = 0; honest ones: up to 0.64 and 0.7 for velocity, 0.73 and 1.6 for eps.
FAR: dict[Prediction, tuple[float, float]] = {
    "velocity": (1.0, 1.0),
    "eps": (2.0, 4.0),
    "v": (1.0, 1.0),
    "x_0": (1.0, 1.0),
}
TRAVEL = 0.2  # of a weight: a plan whose training can move weights this far teaches any expert to denoise
LEARNT = 0.8  # times the loss of the best constant, near t = 1; honest experts: up to 0.41
SAME = 0.01  # relative difference of two experts' losses, image by image; honest ones differ by 0.29 and more somewhere
SAME_ANSWERS = 0.005  # times the mean square error: the mean square difference of two experts; honest ones: from 0.026
DEVIATIONS = 4.0
# lower bound on the spread of honest experts' log losses in each band
SPREAD_Z = (
    0.3,
    0.3,
    0.3,
    0.15,
    0.15,
)
NUM_FEWEST = 3  # experts needed to tell which of them stands apart
_MAD_TO_STD = 1.4826
_ENDLESS = 1e30  # replaces a loss that is not finite

Velocity = Callable[[Tensor, Tensor], Tensor]
"""Called as ``u(x_BCHW, t_B)``."""


class ExpertFigures(Model):
    """The measurements of one expert.

    Attributes:
        expert_id: the expert.
        digest: of its file.
        losses: velocity loss of each public image in each band, mean over its values.
        excess_rms: the largest excess of a weight tensor's root mean square over that of a fresh one.
        excess_tensor: the name of that tensor.
        answers: errors of its answers at secret places, the same for every expert.
        worst: its largest loss at a single time, against the limit there.
        drawn: what the images drawn from it are like, under each condition tried.
    """

    expert_id: ExpertId
    digest: Digest
    losses: tuple[tuple[float, ...], ...]
    excess_rms: float
    excess_tensor: str
    answers: tuple[float, ...]
    worst: WorstRow
    drawn: tuple[DrawnFigures, ...]

    @property
    def loss_Z(self) -> NDArray[np.float64]:
        """The mean loss in each band."""
        return np.asarray(np.asarray(self.losses).mean(1))


@dataclass(frozen=True)
class Probe:
    """Public images noised once, the same for every expert.

    Attributes:
        x: noised images of all bands, shape (Z N, ...).
        t: their times.
        target: the prediction that an expert learns there.
        constant: the best prediction that depends on t alone.
        prediction: the quantity that an expert predicts.
        holds_noise: whether that quantity holds the noise at t = 1, which every expert can see there.
    """

    x: Tensor
    t: Tensor
    target: Tensor
    constant: Tensor
    prediction: Prediction = "velocity"
    holds_noise: bool = True

    @classmethod
    def of(
        cls,
        images: Tensor,
        mean: Tensor,
        path: Path,
        prediction: Prediction,
        rng: np.random.Generator,
    ) -> "Probe":
        """Noise held-out images, one time in each of as many equal parts of each band.

        Args:
            images: shape (N, ...); at most `num_images` of them.
            mean: mean of the public images that the plan was fitted on.
            path: of the noising.
            prediction: the quantity that an expert predicts. Its loss is taken on that quantity: near t = 1 the
                velocity follows from eps by a division by almost 0.
            rng: draws times and noise.
        """
        num = len(images)
        place_ZN = torch.from_numpy((np.arange(num) + rng.random((len(BANDS), num))) / num).float()
        t = torch.cat(
            [
                low + (high - low) * place_N
                for (low, high), place_N in zip(BANDS, place_ZN, strict=True)
            ]
        )
        x_0 = images.repeat(len(BANDS), *[1] * (images.dim() - 1))
        eps = torch.from_numpy(rng.standard_normal(tuple(x_0.shape), dtype=np.float32))
        target = target_of(path, prediction, x_0, eps, t)
        constant = target_of(path, prediction, mean.expand_as(x_0), torch.zeros_like(eps), t)
        one = torch.ones(1)
        holds_noise = float(target_of(path, prediction, 0 * one, one, one)) > 0.5
        return cls(x_t(path, x_0, eps, t), t, target, constant, prediction, holds_noise)

    def losses(self, answer: Velocity) -> NDArray[np.float64]:
        """Return the mean squared error of every image in every band, shape (Z, N)."""
        return self.losses_of(self.error(answer))

    def error(self, answer: Velocity) -> Tensor:
        """Return by how much every answer is off, shape (Z N, ...), float64."""
        return (answer(self.x, self.t) - self.target).double()

    def losses_of(self, error: Tensor) -> NDArray[np.float64]:
        """See `losses`."""
        loss_ZN = error.square().flatten(1).mean(1).view(len(BANDS), -1).numpy()
        return np.asarray(np.nan_to_num(loss_ZN, nan=_ENDLESS, posinf=_ENDLESS).clip(max=_ENDLESS))

    @property
    def silent_Z(self) -> NDArray[np.float64]:
        """The loss of answering 0, as an expert does before its first training step."""
        return np.asarray(self.losses(lambda x, t: torch.zeros_like(x)).mean(1))

    @property
    def constant_Z(self) -> NDArray[np.float64]:
        """The loss of the best prediction that depends on t alone: that for the mean image without noise."""
        return np.asarray(self.losses(lambda x, t: self.constant).mean(1))


def num_images(forward_flops: float) -> int:
    """Return the number of public images on which an expert is measured: fewer where an evaluation costs more."""
    return int(np.clip(FLOPS / (forward_flops * len(BANDS)), FEWEST_IMAGES, MOST_IMAGES))


def fresh_rms(shape: Sequence[int], kind: str = "dit") -> float:
    """Return the largest root mean square of a freshly drawn weight of this shape (Glorot); 0 for a bias.

    Args:
        shape: the weight's.
        kind: the architecture's; in a `unet` normalisations and class embeddings start at 1.
    """
    drawn = (
        math.sqrt(2.0 / sum(shape)) * (1.0 + 4.0 / math.sqrt(math.prod(shape)))
        if len(shape) > 1
        else 0.0
    )
    return max(drawn, 1.0 + 4.0 / math.sqrt(math.prod(shape))) if kind == "unet" else drawn


def absolute_faults(
    figures: ExpertFigures, probe: Probe, training: Training, *, rehearsal: bool = False
) -> list[Fault]:
    """Describe what is implausible about an expert by itself.

    Args:
        figures: the expert's.
        probe: the public images on which they were measured.
        training: the plan's.
        rehearsal: whether the plan is one, whose few steps need not teach anything.
    """
    name, found = figures.expert_id, list[Fault]()
    ratio_Z = figures.loss_Z / probe.silent_Z
    reach = travel(training)
    trained = reach >= TRAVEL or not rehearsal
    if figures.excess_rms > reach:
        beyond = f"grew by {figures.excess_rms:.3g} in root mean square; training can add {reach:.3g} at most"
        words = f": tensor {figures.excess_tensor} {beyond}"
        found.append(Fault(expert_id=name, flag="large_weights", words=words))
    if bool(np.allclose(ratio_Z, 1.0, rtol=0.0, atol=1e-9)):
        silent = " answers 0 to every input, as before its first training step"
        return [*found, Fault(expert_id=name, flag="answers_zero", words=silent)]
    found += _single_faults(figures, FAR[probe.prediction], trained=trained)
    limit_Z = np.full(len(BANDS), SANE)
    if probe.holds_noise:
        limit_Z[-1] = SANE_AT_NOISE
    for band, ratio, limit in zip(BANDS, ratio_Z, limit_Z, strict=True):
        if not ratio <= limit:
            words = f": {_at(band)} its loss is {ratio:.3g} times that of answering 0, above the limit {limit:g}"
            found.append(Fault(expert_id=name, flag="high_loss", words=words))
    of_constant = float(figures.loss_Z[-1] / probe.constant_Z[-1])
    if probe.holds_noise and trained and not of_constant <= LEARNT:
        learnt = f"{of_constant:.3g} times that of the best constant, above the limit {LEARNT:g}"
        learnt += f" after {training.num_steps} steps"
        found.append(
            Fault(
                expert_id=name, flag="not_learnt", words=f": {_at(BANDS[-1])} its loss is {learnt}"
            )
        )
    return found


def _single_faults(
    figures: ExpertFigures, most: tuple[float, float], *, trained: bool
) -> list[Fault]:
    """Describe what is implausible at a single time, and in the drawn images, which after few steps are noise."""
    name, worst, found = figures.expert_id, figures.worst, list[Fault]()
    if not worst.times <= 1:
        words = f": at t {worst.t:g}{worst.told} its loss is {worst.times:.3g} times the limit, and above it at "
        words += f"{worst.num_over} of {worst.num_rows} single times"
        found.append(Fault(expert_id=name, flag="high_loss_once", words=words))
    for each in figures.drawn:
        images = f": of {each.num} images drawn{each.told}"
        if each.num_broken:
            words = f"{images} {each.num_broken} are not finite"
            found.append(Fault(expert_id=name, flag="broken_images", words=words))
        elif trained and not (each.far <= most[0] and each.farthest <= most[1]):
            words = f"{images}, half lie {each.far:.3g} times as far from every public image as two of those from each "
            words += (
                f"other, one {each.farthest:.3g} times as far as the "
                f"two that differ the most, above {most[0]:g} or "
            )
            words += f"{most[1]:g}"
            found.append(Fault(expert_id=name, flag="far_images", words=words))
        elif trained and not each.alike >= ALIKE:
            words = f"{images}, two differ {each.alike:.3g} times as much as the most alike public ones, not {ALIKE:g}"
            found.append(Fault(expert_id=name, flag="alike_images", words=words))
    return found


def copies(
    figures: ExpertFigures, others: Mapping[str, Sequence[ExpertFigures]], training: Training
) -> list[Fault]:
    """Name the experts that this one copies: byte for byte or, after enough training to tell, by its predictions."""
    found = []
    for silo_id, theirs in others.items():
        for other in theirs:
            if other.digest == figures.digest:
                found.append(
                    f" is identical, byte for byte, to expert {other.expert_id} of {silo_id}"
                )
            elif travel(training) >= TRAVEL and _same(figures, other):
                found.append(f" predicts the same as expert {other.expert_id} of {silo_id}")
    return [Fault(expert_id=figures.expert_id, flag="copy", words=words) for words in found]


def relative_faults(by_silo: Mapping[str, Sequence[ExpertFigures]]) -> dict[str, list[Fault]]:
    """Describe which silos' experts stand apart: log loss far above the median, in units of the median deviation.

    Args:
        by_silo: the figures of all present experts.

    Returns:
        Faults by silo; empty with fewer than `NUM_FEWEST` experts.
    """
    lined_up = [(silo_id, figures) for silo_id, experts in by_silo.items() for figures in experts]
    if len(lined_up) < NUM_FEWEST:
        return {}
    log_EZ = np.log(np.stack([figures.loss_Z for _, figures in lined_up]))
    median_Z = np.median(log_EZ, axis=0)
    spread_Z = np.maximum(_MAD_TO_STD * np.median(np.abs(log_EZ - median_Z), axis=0), SPREAD_Z)
    apart_EZ = (log_EZ - median_Z) / spread_Z
    found: dict[str, list[Fault]] = {}
    for (silo_id, figures), apart_Z, log_Z in zip(lined_up, apart_EZ, log_EZ, strict=True):
        for band, apart, times in zip(BANDS, apart_Z, np.exp(log_Z - median_Z), strict=True):
            if apart > DEVIATIONS:
                loss = f"its loss is {times:.3g} times the median of {len(lined_up)} experts, {apart:.1f} deviations"
                fault = Fault(
                    expert_id=figures.expert_id, flag="stands_apart", words=f": {_at(band)} {loss}"
                )
                found.setdefault(silo_id, []).append(fault)
    return found


def _same(first: ExpertFigures, second: ExpertFigures) -> bool:
    """Whether two experts have the same loss on every image, or nearly the same answers."""
    a_ZN, b_ZN = np.asarray(first.losses), np.asarray(second.losses)
    if bool((np.abs(a_ZN - b_ZN) <= SAME * np.minimum(a_ZN, b_ZN)).all()):
        return True
    a_A, b_A = np.asarray(first.answers), np.asarray(second.answers)
    own = min(float(np.square(a_A).mean()), float(np.square(b_A).mean()))
    return float(np.square(a_A - b_A).mean()) < SAME_ANSWERS * own


def _at(band: tuple[float, float]) -> str:
    return f"at t {band[0]:g}-{band[1]:g}"
