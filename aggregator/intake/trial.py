"""Puts an expert on trial: the same noised images for all, single times of its own, and images drawn from it."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aggregator.intake.conditions import MOST_CLASSES, Answer, ExpertCondition, chosen_conditions
from aggregator.intake.drawn import (
    DRAWN_TOLD,
    EPS_START,
    FEWEST_DRAWN,
    MOST_DRAWN,
    MOST_TOLD,
    STEPS,
    DrawnFigures,
    Gallery,
    drawn_images,
)
from aggregator.intake.screening import FLOPS, ROW, SANE, Probe, num_images
from aggregator.intake.secret import secret_stream
from aggregator.intake.sweep import (
    FEWEST_CLASSES,
    FEWEST_ROWS,
    ROWS_OF_CONDITION,
    Sweep,
    WorstRow,
    all_times,
)
from ddm.diffusion.path import Path, path_named
from ddm.loading.ensemble import on_path
from ddm.protocol.architecture import Condition
from ddm.protocol.learning import ExpertObjective

NUM_ANSWERS = 256
_LARGE = 1e9


@dataclass(frozen=True)
class TrialResults:
    """What a trial found out about one expert; see `ExpertFigures`."""

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
        mean: of those that the plan was fitted on.
        gallery: public images to hold drawn ones to.
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
        rng = self._stream("every expert")
        most = num_images(self.forward_flops)
        return Probe.of(self.images[:most], self.mean, self._path, self.objective.prediction, rng)

    def measure(self, answer: Answer, *submission: str) -> TrialResults:
        """Test one expert.

        Args:
            answer: the expert's prediction.
            submission: names the submission and the expert; each meets its own times, noise and conditions.
        """
        error = self.probe.error(lambda x_B, t_B: answer(x_B, t_B, None))
        slack = (SANE, ROW)
        num_rows = self._affordable(FEWEST_ROWS, all_times())
        sweep = Sweep.of(
            self.images,
            self._path,
            self.objective.prediction,
            self.condition,
            self._stream("single times", *submission),
            num_rows=num_rows,
            num_told=self._affordable(FEWEST_CLASSES, MOST_CLASSES, ROWS_OF_CONDITION),
            slack=slack,
        )
        return TrialResults(
            losses=self.probe.losses_of(error),
            answers=self._sampled(error),
            worst=sweep.worst(answer),
            drawn=self._drawn(answer, self._stream("images", *submission)),
        )

    def _drawn(self, answer: Answer, rng: np.random.Generator) -> tuple[DrawnFigures, ...]:
        """Draw images without a condition, and some under each of a few."""
        others = chosen_conditions(self.condition, rng, MOST_TOLD)
        num = self._affordable(FEWEST_DRAWN, MOST_DRAWN, STEPS)
        if others:
            others = others[: self._affordable(1, len(others), STEPS * DRAWN_TOLD)]
        groups = [[ExpertCondition()] * num, *([told] * DRAWN_TOLD for told in others)]
        told = [each for group in groups for each in group]
        start = 1.0 if self.objective.prediction == "velocity" else EPS_START
        velocity, shape = self._as_velocity(answer), self.images.shape[1:]
        images = drawn_images(
            velocity, told, shape, self.canonical, rng, mean=self.mean, start=start
        )
        parts = torch.split(images, [len(group) for group in groups])
        return tuple(
            self.gallery.figures(group[0].words, part)
            for group, part in zip(groups, parts, strict=True)
        )

    def _as_velocity(self, answer: Answer) -> Answer:
        """Return the expert as a researcher follows it, on the ensemble's path."""

        def expert(x_B: Tensor, t_B: Tensor, *c_B: Tensor) -> Tensor:
            return answer(x_B, t_B, *c_B) if c_B else answer(x_B, t_B, None)

        velocity = on_path(expert, self.objective, self.canonical)
        return lambda x_B, t_B, c_B: velocity(x_B, t_B) if c_B is None else velocity(x_B, t_B, c_B)

    def _sampled(self, error: Tensor) -> tuple[float, ...]:
        """Return some of the errors, the same places for every expert, to tell copies by."""
        flat = error.flatten()
        places = self._stream("answers").choice(
            len(flat), size=min(NUM_ANSWERS, len(flat)), replace=False
        )
        found = torch.nan_to_num(
            flat[torch.from_numpy(places)], nan=_LARGE, posinf=_LARGE, neginf=-_LARGE
        )
        return tuple(float(f"{value:.5g}") for value in found.clamp(-_LARGE, _LARGE).tolist())

    @property
    def _path(self) -> Path:
        return path_named(self.objective.path)

    def _stream(self, *purpose: str) -> np.random.Generator:
        objective = (self.objective.path, self.objective.prediction)
        return secret_stream(self.secret, self.plan_id, *objective, *purpose)

    def _affordable(self, fewest: int, most: int, evaluations: int = 1) -> int:
        return int(np.clip(FLOPS / (self.forward_flops * evaluations), fewest, most))
