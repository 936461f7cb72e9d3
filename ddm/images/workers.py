"""Decodes files in processes of their own, and yields what they find in the order of the files.

Decoders are libraries in C that read what strangers wrote. A process that one of them crashes, hangs or fills with
memory is replaced; the file that it had in hand then has a reason, and the other files continue.

A file has `DecodeLimits.seconds`, and one second more for each of its MB. Only the time counts in which this process
listens to the decoder. A decoder that waits for a processor or for the disk, as on a busy machine, may take `_BUSY`
times as long.

Several processes work ahead of the file whose turn it is. What they send meanwhile waits in buffers of bounded size.
"""

import json
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from typing import IO, Any, cast

import numpy as np

from ddm.errors import SetupError
from ddm.images.patients import DIGEST_CHARACTERS, PatientRule
from ddm.images.picture import DecodeLimits, Picture
from ddm.images.reasons import Reason
from ddm.images.record import PictureRecord
from ddm.images.types import Bounds, Values
from ddm.images.worker import HEADER, READY
from ddm.protocol.base import Model
from ddm.system.process_table import processor_use
from ddm.system.processes import start_tied

_MAX_QUEUED_JOBS = 16  # requests that wait in the pipe of one decoder
# Their size in all: less than a pipe holds, so that neither end waits for the other.
_MAX_QUEUED_BYTES = 1 << 15
_POLL_S = 0.5
_START_S = 120.0  # until a new process must be ready for its first file
_MAX_FAILED_STARTS = 3  # in a row, before the machine is to blame
_EXIT_S = 10.0  # between the end of a decoder's answers and its own end
_MAX_TICK_S = 1.0  # counted between two looks, so that a suspended machine costs no file its time
_BUSY = 20
_READ_BYTES = 1 << 20
_MAX_BUFFERED_BYTES = 1 << 27  # answers of later files, over all decoders
_MAX_JSON_BYTES = 1 << 16
_MAX_VALUE_BYTES = 8  # of one value of a picture
_MAX_DETAIL_CHARACTERS = 512
_RECORD_PREFIX = b'{"shape":'  # how the record of a picture without values begins


_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # Freed memory is kept for the next picture: returning it and asking for it again costs as much as decoding.
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 27),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
    "MALLOC_TOP_PAD_": str(1 << 24),
}


@dataclass(frozen=True)
class DecodeJob:
    """A file to be decoded.

    Attributes:
        path: the file.
        files: the file, and what belongs to it, such as labels in a file beside it.
        num_bytes: the number of bytes of all of them.
        known_digest: the digest of the content that an earlier scan decoded; the same content is not decoded again.
    """

    path: str
    files: tuple[str, ...]
    num_bytes: int
    known_digest: str = ""


@dataclass(frozen=True)
class DecodedImage:
    """One picture of a job.

    Attributes:
        job: its file.
        record: what a scan keeps of it.
        picture: its values, if the options ask for them.
        order: secret rank of its patient (see `ddm.images.patients.order_of`), if the options ask for it and the file
            names a patient.
    """

    job: DecodeJob
    record: PictureRecord
    picture: Picture | None = field(default=None, repr=False)
    order: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class DecodedFile:
    """The end of a job, after all of its pictures.

    Attributes:
        job: the file.
        digest: the digest of its content; empty if it could not be read.
        unchanged: the content has the known digest, and was not decoded again.
        reason: why it gives no picture, or no more pictures.
        detail: more about the reason.
    """

    job: DecodeJob
    digest: str = ""
    unchanged: bool = False
    reason: Reason | None = None
    detail: str = ""


@dataclass(frozen=True)
class DecoderOptions:
    """How files are decoded.

    Attributes:
        limits: for each file.
        key: secret of the pseudonyms and fingerprints in records.
        num_processes: the number of processes that decode.
        with_values: whether pictures come with their values.
        order_key: secret of the order of patients; empty if that order is not needed.
        patient_rule: which characters of an identifier distinguish patients.
    """

    limits: DecodeLimits
    key: bytes = field(repr=False)
    num_processes: int = 1
    with_values: bool = False
    order_key: bytes = field(default=b"", repr=False)
    patient_rule: PatientRule = "spelling"


def decode_files(
    jobs: Iterable[DecodeJob],
    options: DecoderOptions,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[DecodedImage | DecodedFile]:
    """Decode files in several processes; for each job in turn, yield its pictures and then its end.

    Args:
        jobs: taken only when a process has room for another one.
        options: how they are decoded.
        is_cancelled: called now and then; True ends the work.

    Raises:
        SetupError: a decoder cannot start, or lacks the packages that a file needs.
    """
    remaining = iter(jobs)
    first_jobs = list(islice(remaining, options.num_processes))
    pending = PendingJobs(chain(first_jobs, remaining))
    processes: list[_DecoderProcess] = []
    try:
        # No more processes than files.
        for _ in first_jobs:
            processes.append(_DecoderProcess(options))
        yield from _decode_in_turn(processes, pending, is_cancelled)
    finally:
        for process in processes:
            process.stop()


class PendingJobs:
    """The jobs that no process has yet."""

    def __init__(self, jobs: Iterator[DecodeJob]) -> None:
        self._jobs = jobs
        self._returned: DecodeJob | None = None

    def take(self) -> DecodeJob | None:
        """Return the next job, or None at the end."""
        if self._returned is None:
            return next(self._jobs, None)
        job = self._returned
        self._returned = None
        return job

    def put_back(self, job: DecodeJob) -> None:
        """Take back the job that was taken last; it is the next one again."""
        self._returned = job


def _decode_in_turn(
    processes: "Sequence[_DecoderProcess]",
    jobs: PendingJobs,
    is_cancelled: Callable[[], bool],
) -> Iterator[DecodedImage | DecodedFile]:
    if not processes:
        return
    # The process that has each unfinished job, in the order of the jobs.
    turns = deque[_DecoderProcess]()
    max_buffered_bytes = _MAX_BUFFERED_BYTES // len(processes)
    while not is_cancelled():
        hand_out(jobs, processes, turns)
        if not turns:
            return
        current = turns[0]
        answer = current.next_answer()
        if answer is None and current.has_ended:
            answer = current.replace()
        if isinstance(answer, DecodedFile):
            turns.popleft()
        if answer is not None:
            yield answer
        elif not current.has_ended:
            others = [
                process
                for process in processes
                if process is not current and process.buffered_bytes < max_buffered_bytes
            ]
            _listen(current, others)


def hand_out(
    jobs: PendingJobs,
    processes: "Sequence[_DecoderProcess]",
    turns: "deque[_DecoderProcess]",
) -> None:
    """Give jobs to the processes with the fewest, while there is room."""
    while True:
        idlest = min(processes, key=lambda process: process.num_jobs)
        if not idlest.has_room:
            return
        job = jobs.take()
        if job is None:
            return
        if idlest.has_ended and not idlest.num_jobs:
            idlest.restart()
        if not idlest.accept(job):
            jobs.put_back(job)
            return
        turns.append(idlest)


def _listen(current: "_DecoderProcess", others: "Sequence[_DecoderProcess]") -> None:
    """Wait for answers, for a moment at most, and count that time for the files in hand."""
    alive = [process for process in (current, *others) if not process.has_ended]
    with selectors.DefaultSelector() as selector:
        for process in alive:
            selector.register(process.output, selectors.EVENT_READ, process)
        start = time.monotonic()
        for selected, _ in selector.select(_POLL_S):
            selected.data.receive()
    elapsed_s = min(time.monotonic() - start, _MAX_TICK_S)
    for process in alive:
        # Of a process with answers in its buffer it is not known here which file it has in hand.
        if process is current or not process.buffered_bytes:
            process.tick(elapsed_s)


class _DecoderProcess:
    """One process that decodes, and the jobs that it has not finished."""

    def __init__(self, options: DecoderOptions) -> None:
        self._options = options
        self._deaths = 0  # in a row, each before the process answered anything about its first file
        self._failed_starts = 0  # in a row
        self._start()

    def _start(self) -> None:
        """Start the process; it sets its own bounds before it opens a file."""
        self._process = start_tied(
            "ddm.images.worker",
            env={**os.environ, **_ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._jobs = deque[DecodeJob]()
        self._request_bytes = deque[int]()  # of each job
        self._buffer = bytearray()
        self._clock_s = 0.0  # of the file in hand
        self._processor_s = 0.0  # that the process had used when the file in hand began to be slow
        self._is_late = False
        self._has_answered = False
        self._is_ready = False
        self._is_exhausted = False
        self.has_ended = False
        settings = {
            "limits": asdict(self._options.limits),
            "key": self._options.key.hex(),
            "order": self._options.order_key.hex(),
            "patient_rule": self._options.patient_rule,
        }
        self._send(json.dumps(settings).encode() + b"\n")

    def restart(self) -> None:
        """End the process, and start another one."""
        self.stop()
        self._start()

    @property
    def output(self) -> int:
        """The descriptor to listen at."""
        # A pipe, as `_start` asks for: None in the type is for processes without one.
        return cast(IO[bytes], self._process.stdout).fileno()

    @property
    def num_jobs(self) -> int:
        """How many jobs are unfinished."""
        return len(self._jobs)

    @property
    def has_room(self) -> bool:
        """Whether the pipe has room for another request."""
        if not self._jobs:
            return True
        return len(self._jobs) < _MAX_QUEUED_JOBS and sum(self._request_bytes) < _MAX_QUEUED_BYTES

    @property
    def buffered_bytes(self) -> int:
        """Bytes that were received and not yet taken."""
        return len(self._buffer)

    def accept(self, job: DecodeJob) -> bool:
        """Hand over a job; False if its names are so long that both ends of the pipe could wait for each other."""
        request = {
            "path": job.path,
            "files": job.files,
            "digest": job.known_digest,
            "values": self._options.with_values,
        }
        line = json.dumps(request).encode() + b"\n"
        if self._jobs and sum(self._request_bytes) + len(line) > _MAX_QUEUED_BYTES:
            return False
        self._jobs.append(job)
        self._request_bytes.append(len(line))
        self._send(line)
        return True

    def _send(self, data: bytes) -> None:
        # The end of its output is read next, and says what happened.
        with suppress(BrokenPipeError):
            requests = cast(IO[bytes], self._process.stdin)
            requests.write(data)
            requests.flush()

    def receive(self) -> None:
        """Read some of its output; an end of output is the end of the process."""
        data = os.read(self.output, _READ_BYTES)
        if not data:
            self.has_ended = True
        self._buffer += data

    def next_answer(self) -> DecodedImage | DecodedFile | None:
        """Return the next answer; None before it is complete."""
        try:
            while True:
                message = self._next_message()
                if message is None:
                    return None
                text, values = message
                if text != READY:
                    self._has_answered = True
                    return self._parse(text, values)
                self._is_ready = True
                self._clock_s = 0.0
                self._failed_starts = 0
        except (ValueError, KeyError, IndexError, TypeError):
            # Our decoder does not answer like that: a file took the process over.
            self._process.kill()
            self._buffer.clear()
            self.has_ended = True
            return None

    def _next_message(self) -> tuple[bytes, bytearray] | None:
        if len(self._buffer) < HEADER.size:
            return None
        json_bytes, value_bytes = HEADER.unpack_from(self._buffer)
        max_value_bytes = 0
        if self._options.with_values:
            max_value_bytes = _MAX_VALUE_BYTES * self._options.limits.values
        if json_bytes > _MAX_JSON_BYTES or value_bytes > max_value_bytes:
            raise ValueError("an answer that is too long")
        values_start = HEADER.size + json_bytes
        end = values_start + value_bytes
        if len(self._buffer) < end:
            return None
        text = bytes(self._buffer[HEADER.size : values_start])
        values = self._buffer[values_start:end]
        del self._buffer[:end]
        return text, values

    def _parse(self, text: bytes, values: bytearray) -> DecodedImage | DecodedFile:
        job = self._jobs[0]
        if text.startswith(_RECORD_PREFIX):
            # Most answers are of this kind, which is parsed without a detour through a dictionary.
            return DecodedImage(job, PictureRecord.model_validate_json(text))
        answer = json.loads(text)
        if "setup" in answer:
            raise SetupError(
                "data",
                expected="the decoders of its images installed",
                got=str(answer["setup"])[:200],
                remedy=str(answer["remedy"])[:200],
            )
        if "end" not in answer:
            record = PictureRecord.model_validate_json(answer["record"])
            # Through bytes, so that nothing but a digest comes from a process that a file may have taken over.
            order = bytes.fromhex(answer.get("order") or "").hex()[:DIGEST_CHARACTERS]
            picture = _picture(answer["picture"], record, values)
            if answer["spacing_in_mm"] is not True:
                picture = replace(picture, spacing_in_mm=False)
            return DecodedImage(job, record, picture, order or None)
        return self._finish(job, answer)

    def _finish(self, job: DecodeJob, answer: Mapping[str, Any]) -> DecodedFile:
        if "reason" in answer:
            reason = Reason(answer["reason"])
        else:
            reason = None
        # A process whose memory ran out once ends by itself: a fresh one takes over.
        self._is_exhausted = reason is Reason.MEMORY
        self._jobs.popleft()
        self._request_bytes.popleft()
        self._clock_s = 0.0
        return DecodedFile(
            job,
            digest=str(answer["end"])[:64],
            unchanged=answer.get("same") is True,
            reason=reason,
            detail=str(answer.get("detail", ""))[:_MAX_DETAIL_CHARACTERS],
        )

    def tick(self, elapsed_s: float) -> None:
        """Count time for the file in hand, and kill the process if the file has had its time."""
        if not self._jobs or self.has_ended:
            return
        before_s = self._clock_s
        self._clock_s += elapsed_s
        # Only of a file that takes longer than a moment: most files are done before this would be worth a look at the
        # process.
        if before_s <= _MAX_TICK_S < self._clock_s:
            self._processor_s = processor_use(self._process.pid)[1]
        limit_s = _START_S
        if self._is_ready:
            limit_s = self._options.limits.seconds + self._jobs[0].num_bytes / 1e6
        if self._clock_s <= limit_s:
            return
        if self._clock_s > _BUSY * limit_s or not self._is_starved(limit_s):
            self._process.kill()
            self._is_late = True
            self.has_ended = True

    def _is_starved(self, limit_s: float) -> bool:
        """Whether the process waits for a processor or for data, and has not used its time yet."""
        waits, processor_s = processor_use(self._process.pid)
        return waits and processor_s - self._processor_s <= limit_s

    def replace(self) -> DecodedFile | None:
        """After the end of the process: start another one for its other jobs; return what became of the file in hand.

        Raises:
            SetupError: processes end before they answer anything.
        """
        jobs = deque(self._jobs)
        exit_code = self.stop()
        file_answer = self._blame(jobs, exit_code)
        self._start()
        for job in jobs:
            self.accept(job)
        return file_answer

    def _blame(self, jobs: deque[DecodeJob], exit_code: int) -> DecodedFile | None:
        """Take the file that ended the process from the jobs, and return its end; None if no file is to blame."""
        if not self._is_ready:
            self._failed_starts += 1
        if self._failed_starts >= _MAX_FAILED_STARTS:
            raise SetupError(
                "decoder",
                expected="a process that starts",
                got=f"one that ends with code {exit_code}",
            )
        if not self._is_ready or self._is_exhausted or not jobs:
            return None
        if self._has_answered or self._is_late:
            self._deaths = 0
        else:
            self._deaths += 1
        # So many files in a row hardly crash a decoder each by itself: the decoder is broken.
        if self._deaths > len(jobs) + _MAX_QUEUED_JOBS:
            raise SetupError(
                "decoder",
                expected="a process that answers",
                got=f"one that ends with code {exit_code}",
            )
        job = jobs.popleft()
        if self._is_late:
            return DecodedFile(job, reason=Reason.TIME)
        if exit_code == -signal.SIGKILL:
            # This process kills only late decoders. The other one who sends SIGKILL is a kernel without memory.
            return DecodedFile(job, reason=Reason.MEMORY)
        return DecodedFile(job, reason=Reason.CRASHED)

    def stop(self) -> int:
        """End the process, and return its exit code."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_EXIT_S if self.has_ended else 0)
        self._process.kill()
        return self._process.wait()


class _PictureFields(Model):
    """What a decoder says about a picture beside its record; see `Picture`."""

    spacing: tuple[float, ...] | None
    window: Bounds | None
    full: Bounds | None


def _picture(
    answer: object,
    record: PictureRecord,
    values: bytearray,
) -> Picture:
    # A file may have taken its decoder over, so that these fields are checked as the record is.
    fields = _PictureFields.model_validate_json(json.dumps(answer))
    flat = np.frombuffer(values, np.dtype(record.dtype))
    array: Values = flat.reshape(record.shape)
    return Picture(array, fields.spacing or None, fields.window, fields.full)
