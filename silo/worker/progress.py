"""How far the work is, how fast and how well, for this site's operator alone: nothing here ever leaves.

The loss of a training and the number of images depend on the images, and no privacy is debited for them. So they stay
in a file of the private folder; the outbox gets the state and a percentage, see `silo.worker.worker`.
"""

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

from pydantic import Field

from ddm.errors import DocumentError
from ddm.io.files import write_atomic
from ddm.protocol.base import Document, NaturalInt, PlanId, Time, now_utc

if TYPE_CHECKING:
    from ddm.training.progress import Progress

# Time between two notes.
NOTE_S = 2.0
_MAX_BYTES = 4096
_MAX_RATE = 1e12
EVALUATIONS_OF_A_STEP = 3
"""On one image: forward, and backward at twice the cost; `ddm.audit.effort.TRAINING_CALLS`, without torch."""
Rate = Annotated[float, Field(ge=0.0, le=_MAX_RATE)]
Stage = Literal[
    "reading images",
    "assigning images",
    "encoding images",
    "encoding captions",
    "training",
    "auditing",
]


class ProgressNote(Document):
    """What the worker does at present.

    `images_per_s` and `seconds_left` are None before there is a rate; `loss` in all stages but training.
    """

    format: Literal["archipelago/progress/1"] = "archipelago/progress/1"
    stage: Stage
    plan_id: PlanId
    done: NaturalInt
    total: NaturalInt
    at: Time
    images_per_s: Rate | None = None
    seconds_left: Rate | None = None
    loss: Annotated[float, Field(ge=-1e30, le=1e30)] | None = None


class ProgressMeter:
    """Notes progress in a file, at most every `NOTE_S` seconds.

    Args:
        private: the site's private folder.
    """

    def __init__(self, private: Path) -> None:
        self._path = note_path(private)
        self._stage: Stage | None = None
        self._stage_began_at = 0.0
        # Images that were done when the stage began: an interrupted one may continue from there.
        self._first_done = 0
        self._noted_at = 0.0
        # Evaluations of the expert while it trained: the audit's speed until it has one of its own.
        self._training_evaluations_per_s = 0.0

    def count(self, stage: Stage, plan_id: str, done: int, total: int) -> None:
        """Note how many images are done, of all."""
        now = time.monotonic()
        if stage != self._stage or done < self._first_done:
            self._stage = stage
            self._stage_began_at = now
            self._first_done = done
            self._noted_at = 0.0
        # Over the whole stage, since single images may differ much in size.
        per_s = 0.0
        if now > self._stage_began_at:
            per_s = (done - self._first_done) / (now - self._stage_began_at)
        if stage == "auditing" and done == self._first_done:
            per_s = self._training_evaluations_per_s
        note = ProgressNote(
            stage=stage,
            plan_id=plan_id,
            done=done,
            total=total,
            at=now_utc(),
            **_rates(per_s, total - done),
        )
        self._write(note)

    def train(self, plan_id: str, progress: "Progress", batch_size: int) -> None:
        """Note the steps of training over all experts, with loss and speed."""
        if self._stage != "training":
            self._stage = "training"
            self._noted_at = 0.0
        left = progress.num_steps - progress.step
        image_rate = progress.steps_per_second * batch_size
        self._training_evaluations_per_s = EVALUATIONS_OF_A_STEP * image_rate
        note = ProgressNote(
            stage="training",
            plan_id=plan_id,
            done=progress.step,
            total=progress.num_steps,
            at=now_utc(),
            loss=progress.loss,
            **_rates(progress.steps_per_second, left, batch_size),
        )
        self._write(note)

    def _write(self, note: ProgressNote) -> None:
        """Write a note, unless another was written just now; the last one of a stage is always written."""
        now = time.monotonic()
        if note.done < note.total and self._noted_at and now - self._noted_at < NOTE_S:
            return
        self._noted_at = now
        with suppress(OSError):  # a hint is not worth the work of days
            write_atomic(self._path, note.encode(), mode=0o600)


class _Rates(TypedDict, total=False):
    images_per_s: float
    seconds_left: float


def _rates(per_s: float, left: int, images: int = 1) -> _Rates:
    """Return speed and time left; nothing before there is a rate.

    Args:
        per_s: steps, or images, a second.
        left: how many of these are still to do.
        images: in each step.
    """
    # Also where it is not a number.
    if not per_s > 0:
        return {}
    rates: _Rates = {"images_per_s": min(per_s * images, _MAX_RATE)}
    # While files are scanned, nobody knows yet how many there will be: then the total is 0, and less than what is done.
    if left >= 0:
        rates["seconds_left"] = min(left / per_s, _MAX_RATE)
    return rates


def note_path(private: Path) -> Path:
    """The path of the note in a site's private folder."""
    return private / "progress.json"


def read_note(private: Path) -> ProgressNote | None:
    """Read the last note; None where there is none that can be read, since it is no more than a hint."""
    try:
        return ProgressNote.parse(
            note_path(private).read_bytes(), subject="progress.json", limit=_MAX_BYTES
        )
    except (OSError, DocumentError):
        return None
