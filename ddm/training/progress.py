"""How a training reports what it has done so far. Imports no torch."""

from dataclasses import dataclass

PROGRESS_STEPS = 10
"""Steps between two reports of a run's progress, each of which waits for the device once."""


@dataclass(frozen=True)
class StepInterval:
    """Measurements over the steps since the previous report of the same process.

    Args:
        num_steps: how many steps these are; fewer than usual right after a run was resumed.
        loss: mean of the steps' losses, of which `Progress.loss` is the smoothed value.
        learning_rate: of the last step.
        gradient_norm: mean of the gradient's norm before clipping, where a step without a finite gradient counts as 0;
            None for private training, which clips the gradient of each unit.
        num_images: images that the steps learned from, the expected number for private training.
        seconds: the seconds that these steps took, with the checkpoints between them.
    """

    num_steps: int
    loss: float
    learning_rate: float
    gradient_norm: float | None
    num_images: int
    seconds: float


@dataclass(frozen=True)
class Progress:
    """The progress of a run.

    Args:
        step: steps taken, of `num_steps`.
        num_steps: steps of the recipe.
        loss: mean squared error per value, averaged over about the last hundred steps.
        steps_per_second: since this process started or resumed the run.
        seconds: time spent training, over all restarts.
        interval: what was measured since the previous report; None where another process trains, whose sign of life
            this is.
    """

    step: int
    num_steps: int
    loss: float
    steps_per_second: float
    seconds: float
    interval: StepInterval | None = None
