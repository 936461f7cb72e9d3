"""The learning curve of a training: what was measured, as lines of JSON in the file `metrics.jsonl`.

The curve depends on the images, also with private training, whose losses no epsilon covers: the loop computes them
before noise is added. So the file has mode 0600 and stays where it was written: in the job's folder, then beside the
trained expert. At a silo both are in the site's private folder, and nothing that the courier sends is made from it.

The file is bounded: a line at most every `PROGRESS_STEPS` steps, and at most `MAX_LINES` lines and one for the last
step. A run that was killed continues from a checkpoint, so that some of its steps are taken again. Their lines are
removed first, and each line says over how many steps it is a mean: a shorter one is the first after a resume.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import Field, ValidationError

from ddm.errors import ArchipelagoError
from ddm.io.files import read_bounded, write_atomic
from ddm.protocol.base import Measure, Model, PositiveInt, Seconds, Time, now_utc
from ddm.protocol.submission import MAX_LOSS
from ddm.training.progress import PROGRESS_STEPS, Progress, StepInterval

METRICS_NAME = "metrics.jsonl"
MAX_LINES = 1000
_MODE = 0o600
_MAX_BYTES = 1 << 20
_MAX_RATE = 1e12
_APPEND_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
Rate = Annotated[float, Field(ge=0.0, le=_MAX_RATE)]


class MetricsWriter(Protocol):
    """Receives the metrics of a training at the steps that its learning curve has, in ascending order."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values at a step, by the names of `StepMetrics`."""
        ...

    def close(self) -> None:
        """Write what is still in memory; nothing is written afterwards."""
        ...


class StepMetrics(Model):
    """One line of a learning curve.

    Attributes:
        step: steps taken.
        at: when.
        seconds: spent training, over all restarts.
        loss: averaged over about the last hundred steps.
        interval_steps: steps since the line before; the next fields are about them.
        interval_loss: the mean of their losses.
        learning_rate: of the last of them.
        images_per_second: that they learned from.
        gradient_norm: mean norm of the gradient before clipping; None for private training.
    """

    step: PositiveInt
    at: Time
    seconds: Seconds
    loss: Measure
    interval_steps: PositiveInt
    interval_loss: Measure
    learning_rate: Measure
    images_per_second: Rate
    gradient_norm: Measure | None = None

    @property
    def values(self) -> dict[str, float]:
        """The numbers that a `MetricsWriter` takes, by name."""
        return self.model_dump(exclude={"step", "at", "interval_steps"}, exclude_none=True)

    def encode(self) -> bytes:
        """Return the line."""
        return self.model_dump_json(exclude_none=True).encode() + b"\n"


def line_spacing(num_steps: int) -> int:
    """Return the number of steps between two lines of a run of this many steps."""
    return PROGRESS_STEPS * max(1, ceil(num_steps / (PROGRESS_STEPS * MAX_LINES)))


class MetricsRecorder:
    """Writes the learning curve of a run into a file, from the reports of its progress.

    Args:
        path: the file; lines of an earlier process stay up to the checkpoint from which this one continues.
        writers: receive the same values.
    """

    def __init__(self, path: Path, writers: Sequence[MetricsWriter] = ()) -> None:
        self._path = path
        self._writers = writers
        self._intervals: list[StepInterval] = []
        self._has_begun = False

    def report(self, progress: Progress) -> None:
        """Record a report, for `TrainingRun.on_progress`; most reports of a long run only add to the next line."""
        if progress.interval is None:
            return
        self._intervals.append(progress.interval)
        if not self._has_begun:
            self._has_begun = True
            with suppress(OSError):
                _keep_lines(self._path, progress.step - progress.interval.num_steps)
        is_last = progress.step == progress.num_steps
        if progress.step % line_spacing(progress.num_steps) and not is_last:
            return
        metrics = _combine(progress, self._intervals)
        self._intervals = []
        # A full disk costs a point of the curve, and not the training.
        with suppress(OSError):
            _append(self._path, metrics.encode())
        for writer in self._writers:
            writer.write(metrics.step, metrics.values)


class MetricsForwarder:
    """Passes the lines of a learning curve to a writer, each once, while a training writes the file.

    Args:
        writer: receives all lines, also those of an earlier process.
    """

    def __init__(self, writer: MetricsWriter) -> None:
        self._writer = writer
        self._offset = 0
        self._step = 0

    def forward(self, path: Path, *, from_start: bool = False) -> None:
        """Pass on the lines that are new.

        Args:
            path: the curve's.
            from_start: read the whole file, as when it was moved or written again.
        """
        if from_start:
            self._offset = 0
        try:
            with path.open("rb") as handle:
                handle.seek(self._offset)
                data = handle.read(_MAX_BYTES)
        except FileNotFoundError:
            return
        # What follows the last line break is still being written.
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        for metrics in _parse(complete):
            if metrics.step > self._step:
                self._step = metrics.step
                self._writer.write(metrics.step, metrics.values)


def read_metrics(path: Path) -> list[StepMetrics]:
    """Read a learning curve, by ascending steps; damaged lines are left out, and no file is an empty curve."""
    try:
        data = read_bounded(path, _MAX_BYTES)
    except (ArchipelagoError, OSError):
        return []
    return list(_parse(data))


def copy_metrics(source: Path, target: Path) -> None:
    """Copy a learning curve, of which only lines that can be read arrive; nothing where there is none."""
    curve = read_metrics(source)
    if curve:
        with suppress(OSError):
            _write(target, curve)


def _parse(data: bytes) -> Iterator[StepMetrics]:
    last_step = 0
    for line in data.splitlines():
        try:
            metrics = StepMetrics.model_validate_json(line)
        except ValidationError:
            continue
        if metrics.step > last_step:
            last_step = metrics.step
            yield metrics


def _combine(progress: Progress, intervals: Sequence[StepInterval]) -> StepMetrics:
    """Make one line of the intervals since the line before."""
    num_steps = sum(interval.num_steps for interval in intervals)
    seconds = sum(interval.seconds for interval in intervals)
    num_images = sum(interval.num_images for interval in intervals)
    loss_sum = 0.0
    norm_sum: float | None = 0.0
    for interval in intervals:
        loss_sum += interval.loss * interval.num_steps
        if interval.gradient_norm is None:
            norm_sum = None
        elif norm_sum is not None:
            norm_sum += interval.gradient_norm * interval.num_steps
    return StepMetrics(
        step=progress.step,
        at=now_utc(),
        seconds=progress.seconds,
        loss=min(progress.loss, MAX_LOSS),
        interval_steps=num_steps,
        interval_loss=min(loss_sum / num_steps, MAX_LOSS),
        learning_rate=intervals[-1].learning_rate,
        images_per_second=min(num_images / seconds, _MAX_RATE) if seconds > 0 else 0.0,
        gradient_norm=None if norm_sum is None else min(norm_sum / num_steps, MAX_LOSS),
    )


def _keep_lines(path: Path, last_step: int) -> None:
    """Remove the lines of later steps, which are taken again, and a line that was cut short."""
    if not path.exists():
        return
    valid_lines = [metrics for metrics in read_metrics(path) if metrics.step <= last_step]
    _write(path, valid_lines)


def _write(path: Path, curve: Sequence[StepMetrics]) -> None:
    write_atomic(path, b"".join(metrics.encode() for metrics in curve), mode=_MODE)


def _append(path: Path, line: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, _APPEND_FLAGS, _MODE)
    with os.fdopen(descriptor, "ab") as handle:
        # In one call, so that a process that is killed leaves whole lines.
        handle.write(line)
