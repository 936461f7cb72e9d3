"""Screens experts for signs that they were not trained as the plan says: loss by noise level, size of weights, copies.

An expert that passed every formal check may still be useless or poisoned. Screening uses public images only and refuses
nobody: a person decides about flagged experts. The limits leave room for silos that hold a single class;
docs/explanation/screening.md says on which experts they were measured. `intake.trial` makes the measurements.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aggregator.intake.drawn import DrawnFigures
from aggregator.intake.flags import Fault
from aggregator.intake.sweep import WorstRow
from ddm.diffusion.path import Path, Prediction, Velocity, target_of, x_t
from ddm.protocol.base import Digest, ExpertId, Model
from ddm.protocol.learning import Training
from ddm.routers.evaluation import BANDS
from ddm.training.schedule import travel

# Shape legend: Z bands of t, N images, E experts, A answers.

MIN_IMAGES = 16
MAX_IMAGES = 64
# Budget for each part of a trial, a minute of one thread; exceeded only for the fewest images and rows.
TRIAL_FLOPS = 2e12
# Times the loss of answering 0: an expert of a single class reached 1.2 on images of others.
MAX_LOSS_RATIO = 2.0
# Near t = 1 every image is noise: where the prediction holds it, no choice of data explains a loss above answering 0.
MAX_LOSS_RATIO_AT_NOISE = 1.02
# Times the loss of answering 0, of one image at one time below t = 0.8; honest experts: up to 3.3.
MAX_ROW_RATIO = 10.0
# Times the distance of the most alike public images; an expert of zeros alone: 0.92.
MIN_DISTANCE_OF_DRAWN = 0.5
# Of a weight: a plan whose training can move weights this far teaches any expert to denoise.
MIN_TRAVEL = 0.2
# Times the loss of the best constant, near t = 1; honest experts: up to 0.41.
MAX_LEARNT_RATIO = 0.8
# Relative difference of two experts' losses, image by image; honest ones differ by 0.29 and more somewhere.
MAX_DIFFERENCE_OF_COPIES = 0.01
# Times the mean square error: the mean square difference of two experts; honest ones: from 0.026.
MAX_ANSWER_DIFFERENCE_OF_COPIES = 0.005
# Of the sum of learning rates: how far the weight tensor that moved most is from the base, root mean square. Every
# optimiser step of AdamW moves a weight by about its rate, and steps back and forth still leave their square root.
MIN_MOVE_FROM_BASE = 1e-4
# Times the mean square error: the mean square difference of an expert's answers from the base's.
MIN_ANSWER_DIFFERENCE_FROM_BASE = 1e-6
# Of two experts' differences from their base: copies differ less from each other.
MAX_SHARE_OF_DIFFERENCE_FROM_BASE = 0.25
# Of an expert's log loss from the median, in units of the median deviation.
MAX_DEVIATIONS = 4.0
# Lower bound on the spread of honest experts' log losses in each band.
MIN_SPREAD_Z = (0.3, 0.3, 0.3, 0.15, 0.15)
# Experts needed to find which of them stands apart.
MIN_EXPERTS = 3
# The standard deviation of a normal distribution, as a multiple of its median absolute deviation.
_MAD_TO_STD = 1.4826
# Replaces a loss that is not finite.
_ENDLESS = 1e30


@dataclass(frozen=True)
class DistanceLimits:
    """How far drawn images may be from the public set, as multiples of distances among public images.

    Attributes:
        median: the median of the drawn images' distances, in median distances of two public images.
        largest: of them, in distances of the two public images that differ the most.
    """

    median: float
    largest: float


# An error of eps grows on the way to t = 0; honest experts: up to 0.64 and 0.7 for velocity, 0.73 and 1.6 for eps.
MAX_DISTANCES: dict[Prediction, DistanceLimits] = {
    "velocity": DistanceLimits(1.0, 1.0),
    "eps": DistanceLimits(2.0, 4.0),
    "v": DistanceLimits(1.0, 1.0),
    "x_0": DistanceLimits(1.0, 1.0),
}


class BaseFigures(Model):
    """How far an expert is from the one that it started from.

    Attributes:
        move: the largest root mean square by which a weight tensor moved.
        difference: the mean square difference of the answers, at the places of `ExpertFigures.answers`.
    """

    move: float
    difference: float


class ExpertFigures(Model):
    """The measurements of one expert.

    Attributes:
        expert_id: the expert.
        digest: the digest of its file.
        losses: velocity loss of each public image in each band, mean over its values.
        excess_rms: the largest excess of a weight tensor's root mean square over that of a fresh one or of the
            expert that it started from, whichever is larger.
        excess_tensor: the name of that tensor.
        answers: errors of its answers at secret places, the same for every expert.
        worst: its largest loss at a single time, against the limit there.
        drawn: what the images drawn from it are like, under each condition tried.
        base: how far it is from the expert that it started from; None where it started from random weights.
    """

    expert_id: ExpertId
    digest: Digest
    losses: tuple[tuple[float, ...], ...]
    excess_rms: float
    excess_tensor: str
    answers: tuple[float, ...]
    worst: WorstRow
    drawn: tuple[DrawnFigures, ...]
    base: BaseFigures | None = None

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
            path: the path of the noising.
            prediction: the quantity that an expert predicts. Its loss is taken on that quantity: near t = 1 the
                velocity follows from eps by a division by almost 0.
            rng: draws times and noise.
        """
        num = len(images)
        place_ZN = torch.from_numpy((np.arange(num) + rng.random((len(BANDS), num))) / num).float()
        times_of_bands = [
            low + (high - low) * place_N
            for (low, high), place_N in zip(BANDS, place_ZN, strict=True)
        ]
        t = torch.cat(times_of_bands)
        x_0 = images.repeat(len(BANDS), *[1] * (images.dim() - 1))
        eps = torch.from_numpy(rng.standard_normal(tuple(x_0.shape), dtype=np.float32))
        # The best prediction that depends on t alone takes the mean image for x_0, and no noise for eps.
        constant = target_of(path, prediction, mean.expand_as(x_0), torch.zeros_like(eps), t)
        one = torch.ones(1)
        holds_noise = float(target_of(path, prediction, 0 * one, one, one)) > 0.5
        return cls(
            x=x_t(path, x_0, eps, t),
            t=t,
            target=target_of(path, prediction, x_0, eps, t),
            constant=constant,
            prediction=prediction,
            holds_noise=holds_noise,
        )

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


def num_screening_images(forward_flops: float) -> int:
    """Return the number of public images on which an expert is measured: fewer where an evaluation costs more."""
    affordable = TRIAL_FLOPS / (forward_flops * len(BANDS))
    return int(np.clip(affordable, MIN_IMAGES, MAX_IMAGES))


def fresh_rms(shape: Sequence[int], *, has_unit_weights: bool = False) -> float:
    """Return the largest root mean square of a freshly drawn weight of this shape (Glorot); 0 for a bias.

    Args:
        shape: the weight's.
        has_unit_weights: whether normalisations and class embeddings start at 1, as the architecture says.
    """
    # 4 / sqrt(n) is 5.7 standard deviations of the root mean square of n normal values.
    chance = 1.0 + 4.0 / math.sqrt(math.prod(shape))
    drawn = 0.0
    if len(shape) > 1:
        drawn = math.sqrt(2.0 / sum(shape)) * chance
    if has_unit_weights:
        return max(drawn, chance)
    return drawn


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
    name = figures.expert_id
    max_growth = travel(training)
    has_learnt = max_growth >= MIN_TRAVEL or not rehearsal
    faults: list[Fault] = []
    if figures.excess_rms > max_growth:
        words = (
            f": tensor {figures.excess_tensor} grew by {figures.excess_rms:.3g} in root mean square; training can add "
            f"{max_growth:.3g} at most"
        )
        faults.append(Fault(expert_id=name, flag="large_weights", words=words))
    ratio_Z = figures.loss_Z / probe.silent_Z
    if bool(np.allclose(ratio_Z, 1.0, rtol=0.0, atol=1e-9)):
        # The other rules would say the same once more.
        words = " answers 0 to every input, as before its first training step"
        faults.append(Fault(expert_id=name, flag="answers_zero", words=words))
        return faults
    faults += _unchanged_faults(figures, max_growth, has_learnt=has_learnt)
    faults += _row_faults(figures)
    faults += _drawn_faults(figures, MAX_DISTANCES[probe.prediction], has_learnt=has_learnt)
    faults += _band_faults(name, ratio_Z, probe)
    if probe.holds_noise and has_learnt:
        faults += _learning_faults(figures, probe, training)
    return faults


def _unchanged_faults(
    figures: ExpertFigures, max_growth: float, *, has_learnt: bool
) -> Iterator[Fault]:
    """Describe an expert that is the base itself: by its weights or, where these were rearranged, by its answers."""
    base = figures.base
    if base is None:
        return
    error = float(np.square(figures.answers).mean())
    min_move = MIN_MOVE_FROM_BASE * max_growth
    # The few steps of a rehearsal need not change any answer.
    min_difference = -1.0
    if has_learnt:
        min_difference = MIN_ANSWER_DIFFERENCE_FROM_BASE * error
    if not (base.move > min_move and base.difference > min_difference):
        words = (
            f" is the base that training started from: no tensor moved by more than {base.move:.3g}, answers differ by "
            f"{base.difference:.3g} of a square error of {error:.3g}"
        )
        yield Fault(expert_id=figures.expert_id, flag="unchanged", words=words)


def _band_faults(expert_id: str, ratio_Z: NDArray[np.float64], probe: Probe) -> Iterator[Fault]:
    """Describe a loss far above that of answering 0."""
    limit_Z = np.full(len(BANDS), MAX_LOSS_RATIO)
    if probe.holds_noise:
        limit_Z[-1] = MAX_LOSS_RATIO_AT_NOISE
    for band, ratio, limit in zip(BANDS, ratio_Z, limit_Z, strict=True):
        # Written in this way, here and below, since a value that is not a number must be a fault too.
        if not ratio <= limit:
            words = f": {_in_band(band)} its loss is {ratio:.3g} times that of answering 0, above the limit {limit:g}"
            yield Fault(expert_id=expert_id, flag="high_loss", words=words)


def _learning_faults(figures: ExpertFigures, probe: Probe, training: Training) -> Iterator[Fault]:
    """Describe an expert that is no better near t = 1 than a constant, which it learns there first."""
    of_constant = float(figures.loss_Z[-1] / probe.constant_Z[-1])
    if not of_constant <= MAX_LEARNT_RATIO:
        words = (
            f": {_in_band(BANDS[-1])} its loss is {of_constant:.3g} times that of the best constant, above the limit "
            f"{MAX_LEARNT_RATIO:g} after {training.num_steps} steps"
        )
        yield Fault(expert_id=figures.expert_id, flag="not_learnt", words=words)


def _row_faults(figures: ExpertFigures) -> Iterator[Fault]:
    """Describe what is implausible at a single time."""
    worst = figures.worst
    if not worst.times <= 1:
        words = (
            f": at t {worst.t:g}{worst.condition} its loss is {worst.times:.3g} times the limit, and above it at "
            f"{worst.num_over} of {worst.num_rows} single times"
        )
        yield Fault(expert_id=figures.expert_id, flag="high_loss_once", words=words)


def _drawn_faults(
    figures: ExpertFigures, limits: DistanceLimits, *, has_learnt: bool
) -> Iterator[Fault]:
    """Describe what is implausible about the drawn images, which after few steps are noise."""
    name = figures.expert_id
    for drawn in figures.drawn:
        images = f": of {drawn.num} images drawn{drawn.condition}"
        if drawn.num_broken:
            words = f"{images} {drawn.num_broken} are not finite"
            yield Fault(expert_id=name, flag="broken_images", words=words)
        # A rehearsal trains a few steps, after which an honest expert draws noise.
        elif not has_learnt:
            continue
        elif not (drawn.far <= limits.median and drawn.farthest <= limits.largest):
            words = (
                f"{images}, half lie {drawn.far:.3g} times as far from every public image as two of those from each "
                f"other, one {drawn.farthest:.3g} times as far as the two that differ the most, above "
                f"{limits.median:g} or {limits.largest:g}"
            )
            yield Fault(expert_id=name, flag="far_images", words=words)
        elif not drawn.alike >= MIN_DISTANCE_OF_DRAWN:
            words = (
                f"{images}, two differ {drawn.alike:.3g} times as much as the most alike public ones, not "
                f"{MIN_DISTANCE_OF_DRAWN:g}"
            )
            yield Fault(expert_id=name, flag="alike_images", words=words)


def copy_faults(
    figures: ExpertFigures, others: Mapping[str, Sequence[ExpertFigures]], training: Training
) -> list[Fault]:
    """Name the experts that this one copies: byte for byte or, after enough training, by its predictions."""
    owners = [silo_id for silo_id, experts in others.items() for _ in experts]
    other_experts = [expert for experts in others.values() for expert in experts]
    predicts_same_E = np.zeros(len(other_experts), dtype=bool)
    # An expert that hardly moved from its random weights predicts what every such expert does. From a base it is the
    # same: honest experts first learn what the base lacks, and by that differ from it in nearly the same way.
    if other_experts and travel(training) >= MIN_TRAVEL:
        predicts_same_E = _predict_the_same(figures, other_experts)
    descriptions = []
    for silo_id, other, predicts_same in zip(owners, other_experts, predicts_same_E, strict=True):
        if other.digest == figures.digest:
            descriptions.append(
                f" is identical, byte for byte, to expert {other.expert_id} of {silo_id}"
            )
        elif predicts_same:
            descriptions.append(f" predicts the same as expert {other.expert_id} of {silo_id}")
    return [Fault(expert_id=figures.expert_id, flag="copy", words=words) for words in descriptions]


def relative_faults(by_silo: Mapping[str, Sequence[ExpertFigures]]) -> dict[str, list[Fault]]:
    """Describe which silos' experts stand apart: log loss far above the median, in units of the median deviation.

    Args:
        by_silo: the figures of all present experts.

    Returns:
        Faults by silo; empty with fewer than `MIN_EXPERTS` experts.
    """
    experts = []
    for silo_id, figures_of_silo in by_silo.items():
        experts += [(silo_id, figures) for figures in figures_of_silo]
    num_experts = len(experts)
    # Of two experts that differ, nobody can tell which one stands apart.
    if num_experts < MIN_EXPERTS:
        return {}
    loss_EZN = np.asarray([figures.losses for _, figures in experts])
    log_EZ = np.log(loss_EZN.mean(2))
    # Median and median deviation, which a minority of bad experts cannot move.
    median_Z = np.median(log_EZ, axis=0)
    distance_EZ = log_EZ - median_Z
    median_deviation_Z = np.median(np.abs(distance_EZ), axis=0)
    spread_Z = np.maximum(_MAD_TO_STD * median_deviation_Z, MIN_SPREAD_Z)
    deviations_EZ = distance_EZ / spread_Z
    ratio_EZ = np.exp(distance_EZ)

    faults: dict[str, list[Fault]] = {}
    # Written in this way, since a value that is not a number must be a fault too.
    for number, band_number in np.argwhere(~(deviations_EZ <= MAX_DEVIATIONS)):
        silo_id, figures = experts[number]
        ratio = ratio_EZ[number, band_number]
        deviations = deviations_EZ[number, band_number]
        words = (
            f": {_in_band(BANDS[band_number])} its loss is {ratio:.3g} times the median of {num_experts} experts, "
            f"{deviations:.1f} deviations"
        )
        fault = Fault(expert_id=figures.expert_id, flag="stands_apart", words=words)
        faults.setdefault(silo_id, []).append(fault)
    return faults


def _predict_the_same(expert: ExpertFigures, others: Sequence[ExpertFigures]) -> NDArray[np.bool_]:
    """Return which of the others have the same loss as an expert on every image, or nearly the same answers."""
    loss_ZN = np.asarray(expert.losses)
    other_loss_EZN = np.asarray([other.losses for other in others])
    difference_EZN = np.abs(other_loss_EZN - loss_ZN)
    max_difference_EZN = MAX_DIFFERENCE_OF_COPIES * np.minimum(other_loss_EZN, loss_ZN)
    # Other noise in the weights changes the bytes of a copy and hardly its losses; two trainings differ in some of
    # them.
    same_losses_E = (difference_EZN <= max_difference_EZN).all(axis=(1, 2))

    answer_A = np.asarray(expert.answers)
    other_answer_EA = np.asarray([other.answers for other in others])
    error = np.square(answer_A).mean()
    other_error_E = np.square(other_answer_EA).mean(1)
    difference_E = np.square(other_answer_EA - answer_A).mean(1)
    max_difference_E = MAX_ANSWER_DIFFERENCE_OF_COPIES * np.minimum(error, other_error_E)
    are_the_same_E = same_losses_E | (difference_E < max_difference_E)
    if expert.base is None:
        return np.asarray(are_the_same_E)
    # Experts that start from one base are alike: what each learned since then must be alike as well.
    from_base_E = np.full(len(others), expert.base.difference)
    for index, other in enumerate(others):
        if other.base is not None:
            from_base_E[index] = min(from_base_E[index], other.base.difference)
    learned_the_same_E = difference_E <= MAX_SHARE_OF_DIFFERENCE_FROM_BASE * from_base_E
    return np.asarray(are_the_same_E & learned_the_same_E)


def _in_band(band: tuple[float, float]) -> str:
    return f"at t {band[0]:g}-{band[1]:g}"
