"""Requests that wait for the sampler: bounded, drawn together where their settings are equal, dropped by who leaves.

The event loop alone changes the queue, so that it needs no lock. One thread draws. While it draws, further requests
come together, and those with the settings of the oldest become the next call. A call that is not full waits for others
as long as they come: clients that have all just got their answers ask again at the same moment.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from ddm.serving.requests import ServiceLimits

_GATHERING_S = 0.02


class Job(Protocol):
    """What one request wants drawn."""

    @property
    def num(self) -> int:
        """How many images."""
        ...

    @property
    def settings(self) -> Any:
        """Compared: jobs with equal settings are drawn in one call."""
        ...


class Draw(Protocol):
    """Draws some jobs of equal settings, in one call of the sampler; runs in the thread of the queue."""

    def __call__(self, jobs: Sequence[Any], is_wanted: Callable[[], bool]) -> list[bytes]:
        """Return the answer of each job.

        Args:
            jobs: with equal settings.
            is_wanted: asked now and then; once it is false, nobody waits, and the call may raise anything.
        """
        ...


class QueueFullError(Exception):
    """As many requests as the server takes wait already, or it ends.

    Attributes:
        retry_s: seconds after which to try again.
    """

    def __init__(self, reason: str, retry_s: int) -> None:
        super().__init__(reason)
        self.retry_s = retry_s


@dataclass(eq=False)
class _Entry:
    """One request that waits."""

    job: Any
    answer: "asyncio.Future[bytes]"
    is_abandoned: bool = False


class SampleQueue:
    """See the module.

    Args:
        draw: see `Draw`.
        limits: of the server.

    Attributes:
        num_calls: how many calls of the sampler have ended.
        num_images: how many images these have drawn.
    """

    def __init__(self, draw: Draw, limits: ServiceLimits) -> None:
        self.num_calls = 0
        self.num_images = 0
        self._draw = draw
        self._limits = limits
        self._num_open = 0
        self._waiting: list[_Entry] = []
        self._runner: asyncio.Task[None] | None = None
        self._is_closed = False
        self._is_aborted = False
        self._last_call_s = 0.0
        # One thread: torch divides the processor among the images of one call.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sampler")

    @property
    def num_open(self) -> int:
        """How many requests wait or are answered."""
        return self._num_open

    @property
    def is_closed(self) -> bool:
        """Whether the server ends."""
        return self._is_closed

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold one of the server's places, from before a request is drawn until its answer has left.

        Raises:
            QueueFullError: all are taken, or the server ends.
        """
        self._check_open()
        if self._num_open >= self._limits.requests:
            retry_s = max(1, math.ceil(self._last_call_s))
            raise QueueFullError(f"{self._num_open} requests are waiting already", retry_s)
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    async def draw(self, job: Job) -> bytes:
        """Wait until a job is drawn; who cancels this leaves the queue.

        Raises:
            QueueFullError: the server ends.
            Exception: what drawing raises.
        """
        self._check_open()
        entry = _Entry(job, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._draw_waiting())
        try:
            return await entry.answer
        finally:
            entry.is_abandoned = True
            if entry in self._waiting:
                self._waiting.remove(entry)

    def close(self) -> None:
        """Refuse requests from now on, and those that wait; what is being drawn goes on."""
        self._is_closed = True
        for entry in self._waiting:
            if not entry.answer.done():
                entry.answer.set_exception(self._closing())

    def end(self) -> None:
        """Give up what is being drawn, if anything still is, and end the thread."""
        self._is_aborted = True
        self._thread.shutdown()

    def _check_open(self) -> None:
        if self._is_closed:
            raise self._closing()

    def _closing(self) -> QueueFullError:
        return QueueFullError("the server is ending", 1)

    async def _draw_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting and not self._is_closed:
            await self._gather_requests()
            # Every client may have left meanwhile.
            if not self._waiting or self._is_closed:
                return
            entries = self._take_entries()
            started = time.monotonic()
            answers = await loop.run_in_executor(self._thread, self._draw_entries, entries)
            self._last_call_s = time.monotonic() - started
            self.num_calls += 1
            for entry, answer in zip(entries, answers, strict=True):
                if entry.answer.done():
                    continue
                if isinstance(answer, Exception):
                    entry.answer.set_exception(answer)
                else:
                    entry.answer.set_result(answer)
                    self.num_images += entry.job.num

    async def _gather_requests(self) -> None:
        """Wait until requests fill a call, or no further one came in a moment."""
        num_before = 0
        num_images = self._num_waiting_images()
        while num_before < num_images < self._limits.images:
            await asyncio.sleep(_GATHERING_S)
            num_before = num_images
            num_images = self._num_waiting_images()

    def _num_waiting_images(self) -> int:
        return sum(entry.job.num for entry in self._waiting)

    def _take_entries(self) -> list[_Entry]:
        """Take the oldest request, and those of equal settings, in their order, as many as fit into one call."""
        settings = self._waiting[0].job.settings
        taken: list[_Entry] = []
        num_images = 0
        for entry in self._waiting:
            if entry.job.settings != settings:
                continue
            num_images += entry.job.num
            # A smaller one behind it must not overtake it again and again.
            if taken and num_images > self._limits.images:
                break
            taken.append(entry)
        self._waiting = [entry for entry in self._waiting if entry not in taken]
        return taken

    def _draw_entries(self, entries: Sequence[_Entry]) -> Sequence[bytes | Exception]:
        def is_wanted() -> bool:
            if self._is_aborted:
                return False
            return not all(entry.is_abandoned for entry in entries)

        try:
            return self._draw([entry.job for entry in entries], is_wanted)
        # Whatever is raised, the thread goes on with the next call.
        except Exception as error:
            if not is_wanted():
                return [self._closing()] * len(entries)
            if len(entries) == 1:
                return [error]
            # Alone, so that a request that cannot be drawn fails none of the others.
            return [self._draw_entries([entry])[0] for entry in entries]
