"""The queue of requests: equal settings go together in their order, places are bounded, who leaves is not drawn."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import pytest

from ddm.serving.queue import QueueFullError, SampleQueue
from ddm.serving.requests import ServiceLimits

LIMITS = ServiceLimits(images=8, steps=10, requests=6)


@dataclass(frozen=True)
class Images:
    """A job; its answer is its name."""

    name: str
    num: int = 1
    settings: str = "usual"


@dataclass
class SlowSampler:
    """Draws when it is let, and notes which jobs it was given together."""

    calls: list[list[str]] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)

    def draw(self, jobs: Sequence[Images], is_wanted: Callable[[], bool]) -> list[bytes]:
        self.calls.append([job.name for job in jobs])
        self.begun.set()
        while not self.go.wait(0.001):
            if not is_wanted():
                raise InterruptedError
        if any(job.name == "broken" for job in jobs):
            raise ValueError("broken")
        return [job.name.encode() for job in jobs]


async def draw_in_place(queue: SampleQueue, job: Images) -> bytes:
    with queue.place():
        return await queue.draw(job)


def run(act: Callable[[SampleQueue, SlowSampler], Awaitable[None]]) -> SlowSampler:
    """Act on a queue whose sampler is busy with the job `first`."""
    sampler = SlowSampler()

    async def begin_and_act() -> None:
        queue = SampleQueue(sampler.draw, LIMITS)
        first = asyncio.create_task(draw_in_place(queue, Images("first")))
        await asyncio.to_thread(sampler.begun.wait)
        try:
            await act(queue, sampler)
            await first
        finally:
            queue.end()

    asyncio.run(begin_and_act())
    return sampler


async def begin(queue: SampleQueue, *jobs: Images) -> "list[asyncio.Task[bytes]]":
    tasks = [asyncio.create_task(draw_in_place(queue, job)) for job in jobs]
    # Each task runs until it waits for its answer.
    await asyncio.sleep(0)
    return tasks


def test_requests_of_equal_settings_are_drawn_together_in_their_order_as_many_as_fit() -> None:
    async def act(queue: SampleQueue, sampler: SlowSampler) -> None:
        tasks = await begin(
            queue,
            Images("a", 3),
            Images("other", 1, "rare"),
            Images("b", 4),
            Images("large", 5),
            Images("c", 1),
        )
        sampler.go.set()
        assert await asyncio.gather(*tasks) == [b"a", b"other", b"b", b"large", b"c"]

    # `c` would fit beside `a` and `b`, but overtakes nobody of its settings.
    assert run(act).calls == [["first"], ["a", "b"], ["other"], ["large", "c"]]


def test_requests_that_reach_an_idle_server_at_the_same_moment_are_drawn_together() -> None:
    sampler = SlowSampler()
    sampler.go.set()

    async def ask_together() -> list[bytes]:
        queue = SampleQueue(sampler.draw, LIMITS)
        try:
            return await asyncio.gather(*await begin(queue, Images("a"), Images("b")))
        finally:
            queue.end()

    assert asyncio.run(ask_together()) == [b"a", b"b"]
    assert sampler.calls == [["a", "b"]]


def test_request_beyond_the_places_is_refused_and_a_place_comes_back_when_its_request_leaves() -> (
    None
):
    async def act(queue: SampleQueue, sampler: SlowSampler) -> None:
        tasks = await begin(queue, *[Images(str(number)) for number in range(5)])
        with pytest.raises(QueueFullError) as refused:
            await draw_in_place(queue, Images("late"))
        assert refused.value.retry_s >= 1
        tasks[2].cancel()
        await asyncio.wait([tasks[2]])
        assert queue.num_open == 5
        (late,) = await begin(queue, Images("late"))
        sampler.go.set()
        assert await late == b"late"

    assert run(act).calls == [["first"], ["0", "1", "3", "4", "late"]]


def test_call_that_nobody_waits_for_any_more_ends_at_once() -> None:
    sampler = SlowSampler()

    async def leave() -> bytes:
        queue = SampleQueue(sampler.draw, LIMITS)
        (task,) = await begin(queue, Images("left"))
        await asyncio.to_thread(sampler.begun.wait)
        task.cancel()
        (next_task,) = await begin(queue, Images("next"))
        # Nothing lets the first call end but that its client has left.
        while len(sampler.calls) < 2:
            await asyncio.sleep(0.001)
        sampler.go.set()
        try:
            return await next_task
        finally:
            queue.end()

    assert asyncio.run(leave()) == b"next"
    assert sampler.calls == [["left"], ["next"]]


def test_request_that_cannot_be_drawn_fails_alone() -> None:
    async def act(queue: SampleQueue, sampler: SlowSampler) -> None:
        tasks = await begin(queue, Images("a"), Images("broken"), Images("b"))
        sampler.go.set()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert [answers[0], answers[2]] == [b"a", b"b"]
        assert isinstance(answers[1], ValueError)

    assert run(act).calls[1:] == [["a", "broken", "b"], ["a"], ["broken"], ["b"]]


def test_queue_that_closes_refuses_what_waits_and_finishes_what_is_drawn() -> None:
    async def act(queue: SampleQueue, sampler: SlowSampler) -> None:
        (waiting,) = await begin(queue, Images("waiting"))
        queue.close()
        with pytest.raises(QueueFullError):
            await waiting
        with pytest.raises(QueueFullError):
            await draw_in_place(queue, Images("late"))
        sampler.go.set()

    assert run(act).calls == [["first"]]
