"""When a run saves a checkpoint and when it stops; with several processes, all of them do both at the same step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ddm.training.distributed import TrainingProcess

# Between two checkpoints the run trains this many times as long as the last one took, so that saving takes less than
# 5% of the time, whatever the expert's size and the disk's speed.
MIN_TRAINING_PER_SAVE = 20.0
# From the start of a run to its first checkpoint.
FIRST_PAUSE_S = 10.0
# Agreeing costs time: processes that take many steps a second agree before every tenth.
AGREEMENT_STEPS = 10
# A step that takes longer is slow, and processes agree before each of them: ten might outlast the two minutes that a
# scheduler leaves between its signal and the end.
SLOW_STEP_S = 1.0


class CheckpointSchedule:
    """Says when the next checkpoint is due, by the clock of one process.

    The first one is due ten seconds after the process has begun, and the next ones whenever that time has doubled,
    until they are `checkpoint_s` apart. So a short run that is killed loses half of its work at most.

    Args:
        checkpoint_s: most seconds between two checkpoints, unless saving would then take more than 5% of the time; with
            0 one is always due.
        clock: returns seconds.
    """

    def __init__(self, checkpoint_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._checkpoint_s = checkpoint_s
        self._clock = clock
        self._started_at = clock()
        self._saved_at = self._started_at
        self._last_save_s = 0.0

    def is_due(self) -> bool:
        """Whether to save now."""
        now = self._clock()
        return now - self._saved_at >= self._pause_s(now - self._started_at)

    def _pause_s(self, trained_s: float) -> float:
        """Return the least time since the last checkpoint, in a process that began this long ago."""
        if self._checkpoint_s == 0:
            return 0.0
        pause_s = min(self._checkpoint_s, max(FIRST_PAUSE_S, trained_s / 2))
        return max(pause_s, MIN_TRAINING_PER_SAVE * self._last_save_s)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure how long the block takes to save a checkpoint."""
        began_at = self._clock()
        yield
        self._saved_at = self._clock()
        self._last_save_s = self._saved_at - began_at


@dataclass(frozen=True)
class AgreedAction:
    """What all processes do before a step.

    Attributes:
        stop: whether they end, with a checkpoint.
        save: whether they save a checkpoint and continue.
    """

    stop: bool = False
    save: bool = False


class ProcessAgreement:
    """Lets all processes of a run stop and save at the same steps.

    Args:
        process: this one, and how many there are.
        should_stop: of this process; True in one of them is enough.
        schedule: the schedule of the first process, whose clock decides for all.
        clock: returns seconds.
    """

    def __init__(
        self,
        process: TrainingProcess,
        should_stop: Callable[[], bool],
        schedule: CheckpointSchedule,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._process = process
        self._should_stop = should_stop
        self._schedule = schedule
        self._clock = clock
        # Until the first steps were timed.
        self._steps_are_slow = True
        self._agreed_step: int | None = None
        self._agreed_at = clock()

    def decide(self, step: int) -> AgreedAction:
        """Return what to do before step number `step`; all processes must call it for every step."""
        if self._process.num_processes == 1:
            return AgreedAction(stop=self._should_stop(), save=self._schedule.is_due())
        if step % AGREEMENT_STEPS and not self._steps_are_slow:
            return AgreedAction()
        is_first = self._process.rank == 0
        votes = torch.tensor(
            [
                float(self._should_stop()),
                float(is_first and self._schedule.is_due()),
                float(is_first and self._is_slow_since_agreement(step)),
            ],
            device=self._process.device,
        )
        # All processes reach the same sums, so that none waits in a step or a checkpoint that another one leaves out.
        stop, save, slow = self._process.total(votes).tolist()
        self._steps_are_slow = bool(slow)
        self._agreed_step = step
        self._agreed_at = self._clock()
        return AgreedAction(stop=bool(stop), save=bool(save))

    def _is_slow_since_agreement(self, step: int) -> bool:
        if self._agreed_step is None:
            return True
        elapsed_s = self._clock() - self._agreed_at
        return elapsed_s > SLOW_STEP_S * (step - self._agreed_step)
