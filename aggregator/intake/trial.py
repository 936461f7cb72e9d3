"""Puts an expert on trial: the same noised images for all, single times of its own, and images drawn from it."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aggregator.intake.conditions import MAX_CLASSES, Answer, ExpertCondition, choose_conditions
from aggregator.intake.drawn import (
    DRAWING_STEPS,
    DRAWN_BY_CONDITION,
    EPS_START,
    MAX_CONDITIONS,
    MAX_DRAWN,
    MIN_DRAWN,
    DrawnFigures,
    Gallery,
    drawn_images,
)
from aggregator.intake.screening import (
    MAX_LOSS_RATIO,
    MAX_ROW_RATIO,
    TRIAL_FLOPS,
    Probe,
    num_screening_images,
)
from aggregator.intake.secret import secret_stream
from aggregator.intake.sweep import (
    MIN_CLASSES,
    MIN_ROWS,
    ROWS_OF_CONDITION,
    LossLimits,
    Sweep,
    SweepSize,
    WorstRow,
    num_rows_of_all_times,
)
from ddm.diffusion.path import Path, path_named
from ddm.loading.ensemble import on_path
from ddm.protocol.architecture import Condition
from ddm.protocol.learning import ExpertObjective

NUM_ANSWERS = 256
_LARGE = 1e9


@dataclass(frozen=True)
class TrialResults:
    """The measurements of one expert in a trial; see `ExpertFigures`."""

    losses: NDArray[np.float64]
    answers: tuple[float, ...]
    worst: WorstRow
    drawn: tuple[DrawnFigures, ...]


@dataclass(frozen=True)
class Trial:
    """What experts of one objective are tested with.

    Attributes:
        secret: the aggregator's; every draw depends on it.
        plan_id: the plan.
        objective: what the experts predict, on which path.
        canonical: the ensemble's path.
        condition: the kind of condition that they take.
        images: held-out public images in the experts' space.
        mean: the mean of those that the plan was fitted on.
        gallery: public images with which drawn ones are compared.
        forward_flops: of one evaluation of one image.
    """

    secret: bytes
    plan_id: str
    objective: ExpertObjective
    canonical: Path
    condition: Condition
    images: Tensor
    mean: Tensor
    gallery: Gallery
    forward_flops: float

    @cached_property
    def probe(self) -> Probe:
        """The noised images on which all experts of the plan with this objective are compared."""
        images = self.images[: num_screening_images(self.forward_flops)]
        rng = self._stream("every expert")
        return Probe.of(images, self.mean, self._path, self.objective.prediction, rng)

    def measure(self, answer: Answer, *submission: str) -> TrialResults:
        """Test one expert.

        Args:
            answer: the expert's prediction.
            submission: names the submission and the expert; each meets its own times, noise and conditions.
        """
        # Without a condition, all experts of the plan can be compared on the same images.
        error = self.probe.error(lambda x_B, t_B: answer(x_B, t_B, None))
        size = SweepSize(
            num_rows=self._num_affordable(MIN_ROWS, num_rows_of_all_times()),
            max_conditions=self._num_affordable(MIN_CLASSES, MAX_CLASSES, ROWS_OF_CONDITION),
        )
        sweep = Sweep.of(
            self.images,
            self._path,
            self.objective.prediction,
            self.condition,
            self._stream("single times", *submission),
            size,
            LossLimits(near_noise=MAX_LOSS_RATIO, below=MAX_ROW_RATIO),
        )
        return TrialResults(
            losses=self.probe.losses_of(error),
            answers=self._chosen_errors(error),
            worst=sweep.worst(answer),
            drawn=self._figures_of_drawn(answer, self._stream("images", *submission)),
        )

    def answers(self, answer: Answer) -> tuple[float, ...]:
        """Return an expert's errors at the places where all experts of the plan are compared, and nothing else."""
        return self._chosen_errors(self.probe.error(lambda x_B, t_B: answer(x_B, t_B, None)))

    def _figures_of_drawn(
        self, answer: Answer, rng: np.random.Generator
    ) -> tuple[DrawnFigures, ...]:
        """Draw images without a condition, and some under each of a few."""
        conditions = choose_conditions(self.condition, rng, MAX_CONDITIONS)
        num_without = self._num_affordable(MIN_DRAWN, MAX_DRAWN, DRAWING_STEPS)
        if conditions:
            num = self._num_affordable(1, len(conditions), DRAWING_STEPS * DRAWN_BY_CONDITION)
            conditions = conditions[:num]
        groups = [[ExpertCondition()] * num_without]
        groups += [[condition] * DRAWN_BY_CONDITION for condition in conditions]
        # Other predictions are divided by almost 0 near t = 1, so that an honest expert would look broken there.
        start = EPS_START
        if self.objective.prediction == "velocity":
            start = 1.0
        all_conditions: list[ExpertCondition] = []
        for group in groups:
            all_conditions += group
        images = drawn_images(
            self._as_velocity(answer),
            all_conditions,
            self.images.shape[1:],
            self.canonical,
            rng,
            mean=self.mean,
            start=start,
        )
        images_of_groups = torch.split(images, [len(group) for group in groups])
        figures = []
        for group, images_of_group in zip(groups, images_of_groups, strict=True):
            words = group[0].words
            figures.append(self.gallery.figures(words, images_of_group))
        return tuple(figures)

    def _as_velocity(self, answer: Answer) -> Answer:
        """Return the expert's velocity on the ensemble's path, as samplers use it."""

        def expert(x_B: Tensor, t_B: Tensor, *c_B: Tensor) -> Tensor:
            if c_B:
                return answer(x_B, t_B, *c_B)
            return answer(x_B, t_B, None)

        # Silos may train on different paths and predictions; readers evaluate every expert on the ensemble's path.
        velocity = on_path(expert, self.objective, self.canonical)

        def velocity_answer(x_B: Tensor, t_B: Tensor, c_B: Tensor | None) -> Tensor:
            if c_B is None:
                return velocity(x_B, t_B)
            return velocity(x_B, t_B, c_B)

        return velocity_answer

    def _chosen_errors(self, error: Tensor) -> tuple[float, ...]:
        """Return some of the errors, the same places for every expert, by which copies are found."""
        errors = error.flatten()
        # The places are secret, so that a copy cannot be changed at these alone.
        num_places = min(NUM_ANSWERS, len(errors))
        places = self._stream("answers").choice(len(errors), size=num_places, replace=False)
        chosen = errors[torch.from_numpy(places)]
        # JSON has neither NaN nor infinity, and the mean square of these must stay finite.
        finite = torch.nan_to_num(chosen, nan=_LARGE, posinf=_LARGE, neginf=-_LARGE)
        bounded = finite.clamp(-_LARGE, _LARGE)
        return tuple(float(f"{value:.5g}") for value in bounded.tolist())

    @property
    def _path(self) -> Path:
        return path_named(self.objective.path)

    def _stream(self, *purpose: str) -> np.random.Generator:
        objective = (self.objective.path, self.objective.prediction)
        return secret_stream(self.secret, self.plan_id, *objective, *purpose)

    def _num_affordable(self, minimum: int, maximum: int, evaluations: int = 1) -> int:
        """Return how many samples of this many evaluations each the budget of a trial pays for."""
        affordable = TRIAL_FLOPS / (self.forward_flops * evaluations)
        return int(np.clip(affordable, minimum, maximum))
