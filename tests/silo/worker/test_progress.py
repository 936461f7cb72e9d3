"""The operator's note of how long a stage will still take."""

from pathlib import Path

import pytest

from ddm.audit.effort import TRAINING_CALLS
from ddm.training.progress import Progress
from silo.worker.progress import EVALUATIONS_OF_A_STEP, ProgressMeter, read_note

PLAN = "plan-00000001"


def test_audit_says_how_long_it_will_take_before_it_has_begun(tmp_path: Path) -> None:
    meter = ProgressMeter(tmp_path)
    progress = Progress(step=100, num_steps=100, loss=0.5, steps_per_second=2.0, seconds=50.0)
    meter.train(PLAN, progress, 32)
    meter.count("auditing", PLAN, 0, 19_200)
    note = read_note(tmp_path)
    assert note is not None
    # 2 steps a second of 32 images, each worth three evaluations, are 192 evaluations a second.
    assert note.seconds_left == pytest.approx(100.0)


def test_audit_after_a_restart_says_nothing_before_it_has_a_speed(tmp_path: Path) -> None:
    meter = ProgressMeter(tmp_path)
    meter.count("auditing", PLAN, 0, 1000)
    note = read_note(tmp_path)
    assert note is not None
    assert note.seconds_left is None


def test_step_counts_as_many_evaluations_here_as_in_the_audit() -> None:
    assert EVALUATIONS_OF_A_STEP == TRAINING_CALLS
