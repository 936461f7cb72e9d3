"""When checkpoints are due by the clock, what they cost, and that several processes decide alike."""

from threading import Barrier, Thread

import pytest
import torch
from torch import Tensor

from ddm.training.saving import (
    AGREEMENT_STEPS,
    SLOW_STEP_S,
    AgreedAction,
    CheckpointSchedule,
    ProcessAgreement,
)


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def train_by_clock(
    checkpoint_s: float, *, for_s: float, save_s: float, step_s: float = 1.0
) -> tuple[list[float], float]:
    """Train so long; return when the checkpoints were begun, and the share of the time that they took."""
    clock = Clock()
    schedule = CheckpointSchedule(checkpoint_s, clock)
    saved_at: list[float] = []
    started_at = clock.now
    while clock.now - started_at < for_s:
        clock.now += step_s
        if schedule.is_due():
            saved_at.append(clock.now - started_at)
            with schedule.saving():
                clock.now += save_s
    share = len(saved_at) * save_s / (clock.now - started_at)
    return saved_at, share


def test_checkpoints_are_due_whenever_the_time_has_doubled_until_they_are_as_far_apart_as_set() -> (
    None
):
    saved_at, _ = train_by_clock(300.0, for_s=1000.0, save_s=0.0)
    assert saved_at == [10, 20, 40, 80, 160, 320, 620, 920]
    often, _ = train_by_clock(3.0, for_s=10.0, save_s=0.0)
    assert often == [3, 6, 9]


@pytest.mark.parametrize("checkpoint_s", [1.0, 300.0])
@pytest.mark.parametrize("save_s", [0.1, 3.0, 40.0])
def test_saving_takes_less_than_a_twentieth_of_the_time_however_long_a_save_is(
    checkpoint_s: float, save_s: float
) -> None:
    saved_at, share = train_by_clock(checkpoint_s, for_s=20_000.0, save_s=save_s)
    assert len(saved_at) > 10
    assert share < 0.05


def test_checkpoint_is_due_at_every_look_when_it_is_set_to_zero_seconds() -> None:
    saved_at, share = train_by_clock(0.0, for_s=10.0, save_s=1.0)
    assert saved_at == [1, 3, 5, 7, 9]
    assert share == 0.5


class SharedSum:
    """What several processes add up, each in a thread of its own."""

    def __init__(self, num_processes: int) -> None:
        self.barrier = Barrier(num_processes)
        self.values: dict[int, Tensor] = {}


class ProcessOfThread:
    """One of several processes, as `ddm.training.distributed.TrainingProcess`, that only adds."""

    device = torch.device("cpu")

    def __init__(self, rank: int, shared: SharedSum) -> None:
        self.rank = rank
        self.num_processes = shared.barrier.parties
        self.num_sums = 0
        self._shared = shared

    def total(self, value: Tensor) -> Tensor:
        self.num_sums += 1
        self._shared.values[self.rank] = value
        self._shared.barrier.wait(10)
        total = torch.stack(list(self._shared.values.values())).sum(0)
        self._shared.barrier.wait(10)
        return total


def decisions_of_two(
    *, num_steps: int, step_s: float, stop_step: int
) -> tuple[list[list[AgreedAction]], int]:
    """Let two processes take steps, the second of which is told to stop; return their decisions and agreements."""
    shared = SharedSum(2)
    processes = [ProcessOfThread(rank, shared) for rank in range(2)]
    decisions: list[list[AgreedAction]] = [[], []]

    def take_steps(process: ProcessOfThread) -> None:
        clock = Clock()
        # Of the first process alone a checkpoint is ever due.
        schedule = CheckpointSchedule(10.0 if process.rank == 0 else 86_400.0, clock)
        stops = False
        agreement = ProcessAgreement(process, lambda: stops, schedule, clock)  # type: ignore[arg-type]
        for step in range(num_steps):
            stops = process.rank == 1 and step >= stop_step
            decision = agreement.decide(step)
            decisions[process.rank].append(decision)
            if decision.save:
                with schedule.saving():
                    clock.now += 0.1
            clock.now += step_s

    threads = [Thread(target=take_steps, args=(process,)) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return decisions, processes[0].num_sums


def test_processes_save_by_the_clock_of_the_first_and_stop_for_any_of_them_at_the_same_steps() -> (
    None
):
    (first, second), _ = decisions_of_two(num_steps=60, step_s=0.4, stop_step=45)
    assert first == second
    # 10 and 20 seconds are over before steps 25 and 50, and the processes agree before every tenth.
    assert [step for step, decision in enumerate(first) if decision.save] == [30]
    assert [step for step, decision in enumerate(first) if decision.stop] == [50]


def test_processes_agree_before_every_step_when_steps_are_slow_and_seldom_when_they_are_not() -> (
    None
):
    slow, num_slow_agreements = decisions_of_two(num_steps=30, step_s=2 * SLOW_STEP_S, stop_step=23)
    assert num_slow_agreements == 30
    assert [step for step, decision in enumerate(slow[0]) if decision.stop][0] == 23
    fast, num_fast_agreements = decisions_of_two(num_steps=30, step_s=0.01, stop_step=23)
    # Before the first two steps, and then before every tenth.
    assert num_fast_agreements == 2 + 29 // AGREEMENT_STEPS
    assert not any(decision.stop for decision in fast[0])
