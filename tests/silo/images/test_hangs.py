"""Decoders that never begin, that end as if all were well, or that nobody listens to: nothing waits for ever."""

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddm.errors import SetupError
from ddm.images import workers
from ddm.images.picture import DecodeLimits
from ddm.images.reasons import Reason
from ddm.images.record import PictureRecord
from ddm.images.worker import HEADER, READY
from ddm.images.workers import DecodedFile, DecodeJob, DecoderOptions, decode_files
from silo.images import viewer
from silo.images.review import ReviewPicture
from silo.images.viewer import Viewer
from tests.support.errors import has_subject
from tests.support.processes import running_children
from tests.support.waiting import wait_until

KEY = b"k" * 32
SLEEPS = "import time; time.sleep(600)"
ENDS = f"""
import os
import sys
sys.stdin.buffer.readline()
sys.stdout.buffer.write({HEADER.pack(len(READY), 0) + READY!r})
sys.stdout.buffer.flush()
sys.stdin.buffer.readline()
"""


def instead(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have another program started in place of the decoder."""
    program = tmp_path / "decoder"
    program.write_text(f"#!{sys.executable}\n{code}")
    program.chmod(0o700)

    def start(module: str, **settings: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([str(program)], **settings)

    monkeypatch.setattr(workers, "start_tied", start)


def job(name: str) -> DecodeJob:
    return DecodeJob(name, (name,), 1)


def test_decoder_that_never_begins_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(SLEEPS, tmp_path, monkeypatch)
    monkeypatch.setattr(workers, "_START_S", 0.2)
    with pytest.raises(SetupError, check=has_subject("decoder")):
        list(decode_files([job("a"), job("b")], DecoderOptions(DecodeLimits(), KEY, 2)))


def test_file_with_which_a_decoder_ends_as_if_all_were_well_is_not_tried_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(ENDS, tmp_path, monkeypatch)
    answers = list(decode_files([job("a"), job("b")], DecoderOptions(DecodeLimits(), KEY)))
    ends = [
        (answer.job.path, answer.reason) for answer in answers if isinstance(answer, DecodedFile)
    ]
    assert ends == [("a", Reason.CRASHED), ("b", Reason.CRASHED)]


def test_names_that_fill_a_pipe_are_not_written_before_somebody_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(SLEEPS, tmp_path, monkeypatch)
    monkeypatch.setattr(workers, "_START_S", 0.2)
    with pytest.raises(SetupError, check=has_subject("decoder")):
        list(
            decode_files(
                [job("a" * 15_000), job("b" * 20_000)], DecoderOptions(DecodeLimits(), KEY)
            )
        )


def test_viewer_ends_although_a_decoder_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(SLEEPS, tmp_path, monkeypatch)
    before = set(running_children(os.getpid()))
    with Viewer(DecodeLimits(), 1, KEY) as shown:
        shown.request([ReviewPicture("a", 0, PictureRecord())])
        wait_until(lambda: bool(set(running_children(os.getpid())) - before), "a decoder")
        left = time.monotonic()
    assert time.monotonic() - left < 30.0


def test_picture_that_cannot_be_drawn_for_whatever_reason_is_said_not_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*arguments: object, **named: object) -> Iterator[DecodedFile]:
        raise RuntimeError("of no kind that anybody thought of")

    monkeypatch.setattr(viewer, "decode_files", broken)
    wanted = ReviewPicture("a", 0, PictureRecord())
    with Viewer(DecodeLimits(), 1, KEY) as shown:
        shown.request([wanted])
        wait_until(lambda: shown.view(wanted) is not None, "an answer")
        assert (
            (view := shown.view(wanted))
            and "RuntimeError" in view.problem
            and "thought" not in view.problem
        )


class FullDecoder:
    """A decoder whose queue takes no request before it was asked very often."""

    num_jobs = 0
    has_room = True
    has_ended = False

    def __init__(self, num_refusals: int) -> None:
        self.num_refusals = num_refusals
        self.accepted: list[str] = []

    def accept(self, job: DecodeJob) -> bool:
        if self.num_refusals:
            self.num_refusals -= 1
            return False
        self.accepted.append(job.path)
        self.has_room = False
        return True


def test_job_that_is_refused_very_often_is_still_the_next_one() -> None:
    # An iterator that is wrapped once for each refusal overflows the interpreter's stack at about 400,000.
    decoder: Any = FullDecoder(num_refusals=1_000_000)
    jobs = workers.PendingJobs(iter([job("a"), job("b")]))
    turns: Any = deque()
    while not turns:
        workers.hand_out(jobs, [decoder], turns)
    assert decoder.accepted == ["a"]
    assert jobs.take() == job("b")
