"""Starts decoders, hands each its files, and starts another where a file kills one; that file's reason is then known.

A file has `Limits.seconds`, and a second more for each of its MB. Only time in which this process listens counts, and a
decoder that waits for a processor or the disk, as on a busy machine, may take `_BUSY` times as long.
Pictures with their values can be had in the order of their files: then what is decoded ahead waits in bounded buffers.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from ddm.errors import SetupError
from ddm.images.jobs import Done, Found, Job
from ddm.images.patients import DIGEST_CHARACTERS
from ddm.images.picture import Limits, Picture
from ddm.images.reasons import Reason
from ddm.images.record import PictureRecord
from ddm.images.worker import HEADER, READY
from ddm.system.processes import used
from ddm.system.signals import blocked

_AHEAD = 16  # requests that a decoder may have before it
_AHEAD_BYTES = 1 << 15  # of them, well within a pipe
_POLL_S = 0.5
_START_S = 120.0  # that a process has until it is ready for its first file
_STARTS = 3  # that fail before there is something wrong with this machine
_END_S = 10.0  # that a process has between the end of its answers and its own
_MOST_CLOCK_S = 1.0  # between two looks
_BUSY = 20
_READ_BYTES = 1 << 20
_WAITING_BYTES = 1 << 27  # of answers of later files, in all, while pictures come in order
_MAX_JSON_BYTES = 1 << 16
_SEEN = b'{"shape":'  # how a picture without values begins


_ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    # Freed memory is kept for the next picture: giving it back and taking it anew costs as much as decoding.
    **{"MALLOC_ARENA_MAX": "2", "MALLOC_TRIM_THRESHOLD_": str(1 << 27), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)},
    **{"MALLOC_TOP_PAD_": str(1 << 24)},
}


def decode_all(jobs: Iterable[Job], limits: Limits, key: bytes, *, num: int) -> Iterator[Found | Done]:
    """Decode files in several processes; what is seen of their pictures comes as it is found, each job's end last.

    Args:
        jobs: taken as there is room for them.
        limits: of each file.
        key: of the pseudonyms of patients.
        num: how many processes.

    Raises:
        SetupError: a decoder cannot start, or lacks the packages that a file needs.
    """
    source = iter(jobs)
    waiting = deque(islice(source, num))
    with selectors.DefaultSelector() as selector:
        decoders = [_Decoder(limits, key) for _ in waiting]  # no more than there are files
        try:
            for decoder in decoders:
                selector.register(decoder.output, selectors.EVENT_READ, decoder)
            looked = time.monotonic()
            while True:
                for decoder in decoders:
                    decoder.fill(waiting, source)
                if not any(decoder.busy for decoder in decoders):
                    return
                ready = selector.select(_POLL_S)
                now = time.monotonic()
                elapsed, looked = min(now - looked, _MOST_CLOCK_S), now
                for selected, _ in ready:
                    selected.data.listen()
                    yield from selected.data.answers()
                for decoder in decoders:
                    decoder.tick(elapsed)
                    if decoder.ended:
                        selector.unregister(decoder.output)
                        yield from decoder.bury(waiting)
                        decoder.start()
                        selector.register(decoder.output, selectors.EVENT_READ, decoder)
        finally:
            for decoder in decoders:
                decoder.stop()


def decode_in_order(
    jobs: Iterable[Job],
    limits: Limits,
    key: bytes,
    *,
    num: int,
    ended: Callable[[], bool] = lambda: False,
    order: bytes = b"",
) -> Iterator[Found | Done]:
    """Decode files in several processes; pictures come with their values, in the order of the jobs, whoever is faster.

    Each process may be ahead of the file whose turn it is by what a buffer of bounded size holds; then it waits.

    Args:
        jobs: taken as there is room for them. Their digests say nothing here: all are decoded.
        limits: of each file.
        key: of the pseudonyms of patients.
        num: how many processes.
        ended: asked now and then whether nobody waits for the rest any more.
        order: the key of the order of patients, where it is asked for.

    Raises:
        SetupError: a decoder cannot start, or lacks the packages that a file needs.
    """
    source = iter(jobs)
    first = list(islice(source, num))  # no more processes than there are files
    decoders = [_Decoder(limits, key, values=True, order=order) for _ in first]
    try:
        yield from _in_order(decoders, chain(first, source), ended)
    finally:
        for decoder in decoders:
            decoder.stop()


def _in_order(decoders: "list[_Decoder]", source: Iterator[Job], ended: Callable[[], bool]) -> Iterator[Found | Done]:
    if not decoders:
        return
    turns = deque[_Decoder]()  # whose turn it is, once for each job
    most_bytes = _WAITING_BYTES // len(decoders)
    while not ended():
        while (idlest := min(decoders, key=lambda decoder: decoder.load)).has_room:
            if (job := next(source, None)) is None:
                break
            if idlest.ended:  # while it had nothing to do
                idlest.restart()
            if not idlest.take(job):
                source = chain((job,), source)
                break
            turns.append(idlest)
        if not turns:
            return
        decoder = turns[0]
        answer = decoder.answer()
        if answer is None and decoder.ended:
            again = deque[Job]()
            answer = next(iter(decoder.bury(again)), None)
            decoder.start()
            for job in again:
                decoder.take(job)
        if isinstance(answer, Done):
            turns.popleft()
        if answer is not None:
            yield answer
        elif not decoder.ended:
            _listen(decoder, [each for each in decoders if each is decoder or each.waiting_bytes < most_bytes])


def _listen(first: "_Decoder", decoders: "list[_Decoder]") -> None:
    """Read what comes, for a moment at most; the time of the file whose turn it is counts alone, answer or not."""
    with selectors.DefaultSelector() as selector:
        for decoder in decoders:
            if not decoder.ended:
                selector.register(decoder.output, selectors.EVENT_READ, decoder)
        began = time.monotonic()
        for selected, _ in selector.select(_POLL_S):
            selected.data.listen()
    first.tick(min(time.monotonic() - began, _MOST_CLOCK_S))


class _Decoder:
    """One process, and the jobs that it has not answered yet."""

    def __init__(self, limits: Limits, key: bytes, *, values: bool = False, order: bytes = b"") -> None:
        self._limits, self._key, self._values, self._order = limits, key, values, order
        self._deaths = self._starts = 0
        self.start()

    def start(self) -> None:
        """Start the process; it bounds itself before it opens a file."""
        environment = {**os.environ, **_ENVIRONMENT}
        command = [sys.executable, "-P", "-m", "ddm.images.worker"]
        with blocked():  # a Ctrl-C at the terminal is for this process: no file is to blame for a decoder that it ends
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
            )
        keys = {"key": self._key.hex(), "order": self._order.hex()}
        settings = {"limits": asdict(self._limits), "parent": os.getpid(), **keys}
        self._jobs, self._buffer = deque[Job](), bytearray()
        self._line_bytes, self._pending_bytes = deque[int](), 0
        self._clock_s, self._spent_s, self._late, self._answered = 0.0, 0.0, False, False
        self._ready, self._retired = False, False
        self.ended = False
        self._send(json.dumps(settings).encode() + b"\n")

    def restart(self) -> None:
        """End the process, and start another."""
        self.stop()
        self.start()

    @property
    def output(self) -> int:
        """The descriptor to listen at."""
        assert self._process.stdout is not None  # noqa: S101 - for the type alone
        return self._process.stdout.fileno()

    @property
    def busy(self) -> bool:
        """Whether an answer is due."""
        return bool(self._jobs)

    @property
    def load(self) -> int:
        """How many answers are due."""
        return len(self._jobs)

    @property
    def has_room(self) -> bool:
        """Whether another request is few enough that neither end of a pipe waits for the other."""
        return not self._jobs or (len(self._jobs) < _AHEAD and self._pending_bytes < _AHEAD_BYTES)

    @property
    def waiting_bytes(self) -> int:
        """What was read of its answers and not yet taken."""
        return len(self._buffer)

    def fill(self, waiting: deque[Job], source: Iterator[Job]) -> None:
        """Hand over as many jobs as it has room for."""
        while self.has_room:
            job = waiting.popleft() if waiting else next(source, None)
            if job is None:
                return
            if not self.take(job):
                waiting.appendleft(job)
                return

    def take(self, job: Job) -> bool:
        """Hand over one job, unless its names are so long that both ends of the pipe could wait for each other."""
        request = {"path": job.path, "files": job.files, "digest": job.digest, "values": self._values}
        line = json.dumps(request).encode() + b"\n"
        if self._jobs and self._pending_bytes + len(line) > _AHEAD_BYTES:
            return False
        self._jobs.append(job)
        self._line_bytes.append(len(line))
        self._pending_bytes += len(line)
        self._send(line)
        return True

    def _send(self, data: bytes) -> None:
        with suppress(BrokenPipeError):  # then its end is read next
            assert self._process.stdin is not None  # noqa: S101 - for the type alone
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def listen(self) -> None:
        """Read some of what came; nothing is the end of the process."""
        data = os.read(self.output, _READ_BYTES)
        self.ended = not data
        self._buffer += data

    def answers(self) -> Iterator[Found | Done]:
        """Yield the answers that are complete."""
        while (answer := self.answer()) is not None:
            yield answer

    def answer(self) -> Found | Done | None:
        """Return the next answer; None before it is complete."""
        try:
            while (message := self._message()) is not None:
                if message[0] != READY:
                    self._answered = True
                    return self._parsed(*message)
                self._ready, self._clock_s, self._starts = True, 0.0, 0
        except (ValueError, KeyError, IndexError, TypeError):  # no answer of a decoder of ours: a file took it over
            self._process.kill()
            self._buffer.clear()
            self.ended = True
        return None

    def _message(self) -> tuple[bytes, bytearray] | None:
        if len(self._buffer) < HEADER.size:
            return None
        size, extra = HEADER.unpack_from(self._buffer)
        if size > _MAX_JSON_BYTES or extra > (8 * self._limits.values if self._values else 0):
            raise ValueError("an answer that is too long")
        begin, stop = HEADER.size + size, HEADER.size + size + extra
        if len(self._buffer) < stop:
            return None
        found = bytes(self._buffer[HEADER.size : begin]), self._buffer[begin:stop]
        del self._buffer[:stop]
        return found

    def _parsed(self, text: bytes, values: bytearray) -> Found | Done:
        job = self._jobs[0]
        if text.startswith(_SEEN):  # most answers: they are parsed once
            return Found(job, PictureRecord.model_validate_json(text))
        answer = json.loads(text)
        if "setup" in answer:
            expected, got = "the decoders of its images installed", str(answer["setup"])[:200]
            raise SetupError("data", expected=expected, got=got, remedy=str(answer["remedy"])[:200])
        if "end" not in answer:
            seen = PictureRecord.model_validate_json(answer["seen"])
            order = bytes.fromhex(answer.get("order") or "").hex()[:DIGEST_CHARACTERS]
            return Found(job, seen, _picture(answer["picture"], seen, values), order or None)
        reason = Reason(answer["reason"]) if "reason" in answer else None
        detail = str(answer.get("detail", ""))[:512]
        done = Done(job, str(answer["end"])[:64], answer.get("same") is True, reason, detail)
        self._retired = reason is Reason.MEMORY
        self._jobs.popleft()
        self._pending_bytes -= self._line_bytes.popleft()
        self._clock_s = 0.0
        return done

    def tick(self, elapsed_s: float) -> None:
        """Count the time of the file in hand, and kill the process when it is over."""
        if self._jobs and not self.ended:
            before, self._clock_s = self._clock_s, self._clock_s + elapsed_s
            if before <= _MOST_CLOCK_S < self._clock_s:
                self._spent_s = used(self._process.pid)[1]
            limit_s = self._limits.seconds + self._jobs[0].num_bytes / 1e6 if self._ready else _START_S
            if self._clock_s > _BUSY * limit_s or (self._clock_s > limit_s and not self._starved(limit_s)):
                self._process.kill()
                self._late = self.ended = True

    def _starved(self, limit_s: float) -> bool:
        """Whether the process would go on if it got a processor or its data, and has not had its time yet."""
        waits, spent_s = used(self._process.pid)
        return waits and spent_s - self._spent_s <= limit_s

    def bury(self, waiting: deque[Job]) -> Iterator[Done]:
        """After the process's end: say what became of the file in hand, and give back the others.

        Raises:
            SetupError: processes end before they answer anything.
        """
        code = self.stop()
        self._starts += not self._ready
        if self._starts >= _STARTS:
            raise SetupError("decoder", expected="a process that starts", got=f"one that ends with code {code}")
        if not self._ready or self._retired or not self._jobs:  # no file is to blame: it opened none, or said why
            waiting.extend(self._jobs)
            return
        self._deaths = 0 if self._answered or self._late else self._deaths + 1
        if self._deaths > len(self._jobs) + _AHEAD:
            raise SetupError("decoder", expected="a process that answers", got=f"one that ends with code {code}")
        job = self._jobs.popleft()
        waiting.extend(self._jobs)
        # Whoever kills by SIGKILL, if not this process, is the kernel that ran out of memory.
        reason = Reason.TIME if self._late else Reason.MEMORY if code == -signal.SIGKILL else Reason.CRASHED
        yield Done(job, reason=reason)

    def stop(self) -> int:
        """End the process, and return its exit code."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_END_S if self.ended else 0)
        self._process.kill()
        return self._process.wait()


def _picture(about: Mapping[str, list[float] | None], seen: PictureRecord, values: bytearray) -> Picture:
    array: NDArray[np.generic] = np.frombuffer(values, np.dtype(seen.dtype)).reshape(seen.shape)
    spacing, window, full = (tuple(found) if (found := about[name]) else None for name in ("spacing", "window", "full"))
    pair = (window[0], window[1]) if window else None
    return Picture(array, spacing, pair, (full[0], full[1]) if full else None)
