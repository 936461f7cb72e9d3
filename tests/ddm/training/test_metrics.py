"""Learning curves: the numbers against those of single steps, the file against kill -9, links, damage and long runs."""

import os
import signal
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from ddm.models import build_expert
from ddm.protocol.learning import Training
from ddm.protocol.weight_privacy import DpSgd
from ddm.training.averages import averaging_weight
from ddm.training.batches import Examples
from ddm.training.config import TrainingSettings
from ddm.training.curves import (
    CHART_HEIGHT,
    CHART_WIDTH,
    MAX_POINTS,
    curve_points,
    describe_curve,
    draw_chart,
    sparkline,
)
from ddm.training.loop import TrainingRun, train
from ddm.training.metrics import (
    MAX_LINES,
    MetricsForwarder,
    MetricsRecorder,
    StepMetrics,
    line_spacing,
    read_metrics,
)
from ddm.training.objective import TrainingObjective
from ddm.training.private import make_private
from ddm.training.progress import Progress, StepInterval
from ddm.training.state import LOSS_DECAY
from tests.ddm.training.test_loop import SAVING, SHAPE, SMALL, images, settings, stop_at
from tests.support.forked import fork_process, wait_for_exit
from tests.support.jobs import SmallJob, small_task
from tests.support.threads import THREADS

LONG = {"num_steps": 120, "schedule": "cosine", "warmup_steps": 20}


def run_training(folder: Path, recipe: Training, should_stop=lambda: False, before_report=None):
    """Train with a learning curve in a folder, saving a checkpoint before every step."""
    recorder = MetricsRecorder(folder / "metrics.jsonl")

    def report(progress: Progress) -> None:
        recorder.report(progress)
        if before_report is not None:
            before_report(progress)

    train(
        build_expert(SMALL, SHAPE, seed=3),
        Examples(images(), None),
        recipe,
        TrainingObjective(),
        TrainingRun(folder, on_progress=report, should_stop=should_stop, engine=SAVING),
    )
    return read_metrics(folder / "metrics.jsonl")


def fields(curve: list[StepMetrics]) -> list[tuple[object, ...]]:
    """Everything about a curve that does not depend on the clock."""
    return [
        (one.step, one.loss, one.interval_steps, one.interval_loss, one.learning_rate)
        + (one.gradient_norm,)
        for one in curve
    ]


def line(step: int, loss: float = 0.5) -> StepMetrics:
    return StepMetrics.model_validate_json(
        f'{{"step":{step},"at":"2026-11-26T12:00:00Z","seconds":1.0,"loss":{loss},"interval_steps":10,'
        f'"interval_loss":{loss},"learning_rate":0.01,"images_per_second":100.0,"gradient_norm":1.5}}'
    )


def write_lines(path: Path, *lines: StepMetrics) -> None:
    path.write_bytes(b"".join(one.encode() for one in lines))


def progress_at(step: int, num_steps: int, interval_steps: int = 10) -> Progress:
    interval = StepInterval(interval_steps, 0.25, 0.01, 2.0, 8 * interval_steps, 0.5)
    return Progress(step, num_steps, 0.5, 20.0, step / 20, interval)


def test_line_has_the_mean_and_the_smoothed_loss_of_single_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve = run_training(tmp_path / "ten", settings(**LONG))
    assert [one.step for one in curve] == list(range(10, 121, 10))
    assert all(one.interval_steps == 10 for one in curve)
    # The same run again, with a line for every step.
    monkeypatch.setattr("ddm.training.loop.PROGRESS_STEPS", 1)
    monkeypatch.setattr("ddm.training.metrics.PROGRESS_STEPS", 1)
    steps = run_training(tmp_path / "one", settings(**LONG))
    assert [one.step for one in steps] == list(range(1, 121))
    smoothed = 0.0
    for number, step in enumerate(steps, start=1):
        smoothed += (step.interval_loss - smoothed) * averaging_weight(LOSS_DECAY, number)
        if number % 10 == 0:
            one = curve[number // 10 - 1]
            ten = steps[number - 10 : number]
            mean = sum(step.interval_loss for step in ten) / 10
            mean_norm = sum(step.gradient_norm or 0.0 for step in ten) / 10
            assert one.loss == pytest.approx(smoothed, rel=1e-4)
            assert one.interval_loss == pytest.approx(mean, rel=1e-4)
            assert one.gradient_norm == pytest.approx(mean_norm, rel=1e-4)
            # The control: the mean of other steps is another number.
            assert one.interval_loss != pytest.approx(ten[0].interval_loss, rel=1e-4)
    # It rises over 20 steps, and falls along a cosine meanwhile.
    recipe = settings(**LONG)
    fallen = (1 - torch.cos(torch.tensor(torch.pi * 9 / 120)).item()) / 2
    share = 1 - (1 - recipe.final_rate) * fallen
    assert curve[0].learning_rate == pytest.approx(0.01 * 10 / 20 * share)


def test_speed_is_the_images_of_the_steps_over_their_time(tmp_path: Path) -> None:
    recorder = MetricsRecorder(tmp_path / "metrics.jsonl")
    recorder.report(progress_at(10, 100))
    (one,) = read_metrics(tmp_path / "metrics.jsonl")
    assert one.images_per_second == 160.0
    assert one.seconds == 0.5


def kill_in_training(folder: Path, recipe: Training, at_step: int) -> None:
    """Kill a process with SIGKILL right after it wrote the line of a step."""

    def kill(progress: Progress) -> None:
        if progress.step >= at_step:
            os.kill(os.getpid(), signal.SIGKILL)

    def train_until_killed() -> None:
        torch.set_num_threads(THREADS)
        run_training(folder, recipe, before_report=kill)

    assert wait_for_exit(fork_process(train_until_killed)) == -signal.SIGKILL


def test_curve_has_no_line_twice_and_no_gap_when_the_process_was_killed_twice(
    tmp_path: Path,
) -> None:
    whole = run_training(tmp_path / "whole", settings(**LONG))
    kill_in_training(tmp_path / "killed", settings(**LONG), at_step=30)
    # The last checkpoint is from before step 30, whose line is written again.
    assert [one.step for one in read_metrics(tmp_path / "killed" / "metrics.jsonl")] == [10, 20, 30]
    kill_in_training(tmp_path / "killed", settings(**LONG), at_step=70)
    curve = run_training(tmp_path / "killed", settings(**LONG))
    assert [one.step for one in curve] == [one.step for one in whole]
    for one, other in zip(curve, whole, strict=True):
        assert one.loss == other.loss
        # Only a line after a resume is about fewer steps, and says so.
        is_resumed = one.step in (30, 70)
        assert (one.interval_steps < 10) == is_resumed
        assert fields([one]) == fields([other]) or is_resumed


def test_lines_of_steps_that_are_taken_again_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, line(10), line(20), line(30), line(40))
    with path.open("ab") as handle:
        handle.write(b'{"step":50,"at":"2026-')
    # A checkpoint of step 25.
    MetricsRecorder(path).report(progress_at(30, 100, interval_steps=5))
    curve = read_metrics(path)
    assert [(one.step, one.interval_steps) for one in curve] == [(10, 10), (20, 10), (30, 5)]
    assert curve[-1].interval_loss == 0.25


def test_run_that_begins_anew_has_none_of_the_lines_of_another_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, line(10), line(20), line(30))
    MetricsRecorder(path).report(progress_at(10, 100))
    assert [one.loss for one in read_metrics(path)] == [0.5]


def test_curve_is_bounded_however_long_the_training(tmp_path: Path) -> None:
    num_steps = 123_450
    recorder = MetricsRecorder(tmp_path / "metrics.jsonl")
    for step in range(10, num_steps + 1, 10):
        recorder.report(progress_at(step, num_steps))
    curve = read_metrics(tmp_path / "metrics.jsonl")
    assert line_spacing(num_steps) == 130
    assert [one.step for one in curve] == [*range(130, num_steps, 130), num_steps]
    assert len(curve) <= MAX_LINES + 1
    assert sum(one.interval_steps for one in curve) == num_steps
    assert (tmp_path / "metrics.jsonl").stat().st_size < 1 << 20


def test_file_is_its_users_alone_and_never_written_through_a_link(tmp_path: Path) -> None:
    job = SmallJob(tmp_path / "job", task=small_task(num_steps=20))
    path = job.folder.metrics
    stranger = tmp_path / "other"
    stranger.write_text("kept")
    job.folder.path.mkdir(parents=True, mode=0o700)
    path.symlink_to(stranger)
    job()
    assert stranger.read_text() == "kept"
    assert not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.step for one in read_metrics(path)] == [10, 20]


def test_full_disk_costs_the_curve_and_not_the_training(tmp_path: Path) -> None:
    job = SmallJob(tmp_path, task=small_task(num_steps=20))
    # A folder has the file's name: writing fails, as the root user of a test too.
    job.folder.metrics.mkdir(parents=True)
    job.folder.path.chmod(0o700)
    assert job().steps == 20
    assert read_metrics(job.folder.metrics) == []


def test_private_training_records_the_loss_and_no_gradient_of_a_unit(tmp_path: Path) -> None:
    data = images()
    recipe = settings(num_steps=10)
    terms = DpSgd(epsilon=8.0, delta=1e-5, units_per_step=4, draws=2)
    recorder = MetricsRecorder(tmp_path / "metrics.jsonl")
    train(
        build_expert(SMALL, SHAPE, seed=3),
        Examples(data, None),
        recipe,
        TrainingObjective(),
        TrainingRun(tmp_path, on_progress=recorder.report, engine=SAVING),
        private=make_private(torch.arange(len(data)), terms, recipe.num_steps),
    )
    (one,) = read_metrics(tmp_path / "metrics.jsonl")
    assert one.gradient_norm is None and one.interval_loss > 0.0


@pytest.mark.slow
def test_first_of_several_processes_writes_the_curve_of_one(tmp_path: Path) -> None:
    alone = SmallJob(tmp_path / "alone")
    alone()
    together = SmallJob(tmp_path / "together", TrainingSettings(device="cpu", processes=2))
    together()
    curve = read_metrics(together.folder.metrics)
    assert [one.step for one in curve] == list(range(10, 101, 10))
    for one, other in zip(curve, read_metrics(alone.folder.metrics), strict=True):
        assert one.interval_loss == pytest.approx(other.interval_loss, rel=1e-3)
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-3)


@dataclass
class WrittenValues:
    """A writer that keeps what it gets."""

    steps: list[int] = field(default_factory=list)
    values: list[Mapping[str, float]] = field(default_factory=list)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.append(step)
        self.values.append(values)

    def close(self) -> None:
        self.steps.append(-1)


def test_forwarder_hands_on_each_line_once_and_no_half_of_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = WrittenValues()
    forwarder = MetricsForwarder(writer)
    forwarder.forward(path)
    write_lines(path, line(10), line(20))
    half = line(30).encode()
    with path.open("ab") as handle:
        handle.write(half[:40])
        handle.flush()
        forwarder.forward(path)
        assert writer.steps == [10, 20]
        handle.write(half[40:])
    forwarder.forward(path)
    # As after the training, when the file has moved.
    forwarder.forward(path, from_start=True)
    assert writer.steps == [10, 20, 30]
    assert writer.values[0] == {
        "seconds": 1.0,
        "loss": 0.5,
        "interval_loss": 0.5,
        "learning_rate": 0.01,
        "images_per_second": 100.0,
        "gradient_norm": 1.5,
    }


def test_recorder_hands_the_same_values_to_writers(tmp_path: Path) -> None:
    writer = WrittenValues()
    recorder = MetricsRecorder(tmp_path / "metrics.jsonl", [writer])
    recorder.report(progress_at(10, 100))
    (one,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (writer.steps, writer.values) == ([10], [one.values])


def test_damaged_lines_are_left_out_of_a_curve(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        line(10).encode() + b"\xff\n[]\n" + line(5).encode() + line(20).encode() + b'{"step":30}\n'
    )
    assert [one.step for one in read_metrics(path)] == [10, 20]
    path.write_bytes(b"\n" * (1 << 21))
    assert read_metrics(path) == []


def test_curve_as_text_is_bars_by_the_logarithm_of_the_loss() -> None:
    # Each is a tenth of the one before, so that the bars fall evenly over their eight heights.
    curve = [line(10 * (power + 1), 10.0**-power) for power in range(8)]
    assert sparkline(curve) == "█▇▆▅▄▃▂▁"
    assert sparkline([line(10), line(20)]) == "▁▁"
    assert sparkline([line(10, 0.0), line(20, 1.0)]) == "▁█"
    text = describe_curve(curve, draws_bars=False)
    assert text == "loss 1e-07 at step 80, 1 at step 10"
    assert describe_curve(curve[:1], draws_bars=True) == "▁ loss 1 at step 10"


def test_curve_as_points_is_bounded_and_keeps_both_ends() -> None:
    curve = [line(10 * number, 1.0 / number) for number in range(1, 1002)]
    points = curve_points(curve)
    assert len(points) == MAX_POINTS
    assert points[0] == (10, 1.0) and points[-1] == (10_010, 1.0 / 1001)
    assert points == sorted(set(points))


def test_picture_has_the_first_loss_on_top_and_half_of_the_decades_in_the_middle() -> None:
    chart = draw_chart([line(10, 1.0), line(20, 0.1), line(40, 0.01)])
    expected = (
        f"{CHART_WIDTH / 4},0.0 {CHART_WIDTH / 2},{CHART_HEIGHT / 2} {CHART_WIDTH},{CHART_HEIGHT}"
    )
    assert chart.smoothed == chart.means == expected
    assert (chart.highest, chart.lowest, chart.last.step) == (1.0, 0.01, 40)


def test_stopped_run_goes_on_with_its_curve(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_training(tmp_path, settings(**LONG), should_stop=stop_at(34))
    curve = run_training(tmp_path, settings(**LONG))
    assert [one.step for one in curve] == list(range(10, 121, 10))
    assert [one.interval_steps for one in curve] == [10, 10, 10, 6, *[10] * 8]
