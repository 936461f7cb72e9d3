"""Several silos at once against a stand-in for Flower: whoever lies, sends twice or never, holds up nobody else."""

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from aggregator.transfer.delivery import SiloDelivery, TransferLimits, load_bundle
from aggregator.transfer.dispatcher import Dispatcher, Intervals, Node, RateLimit, SiloChannel
from ddm.errors import TransportError
from ddm.transport.messages import (
    BundleProgress,
    Envelope,
    Pull,
    Reply,
    Request,
    Shards,
    Span,
    StatusReport,
)
from silo.courier.handlers import SiteLimits, answer
from tests.support.bundles import Signer, site_settings
from tests.support.clocks import ManualClock
from tests.support.waiting import LIMIT_S

PLAN = "digits-3f9a1c2e"
SHARD = 10_000
SIZE = 60_000
Behaviour = Callable[[Envelope[Request]], Envelope[Reply] | None]


class FakeFlower:
    """Answers as soon as it is asked, through what each silo's behaviour makes of a request."""

    def __init__(self, behaviours: dict[bytes, Behaviour]) -> None:
        self._behaviours = behaviours
        self._waiting: dict[str, tuple[bytes, Envelope[Request]]] = {}
        self.sent: dict[bytes, list[Request]] = {key: [] for key in behaviours}
        self._number = 0
        self._lock = threading.Lock()

    def nodes(self) -> dict[bytes, Node]:
        return {key: Node(number, "first") for number, key in enumerate(self._behaviours)}

    def send(self, node: Node, request: Envelope[Request], ttl_s: float) -> str:
        key = list(self._behaviours)[node.node_id]
        with self._lock:
            self._number += 1
            self._waiting[str(self._number)] = (key, request)
            self.sent[key].append(request.message)
            return str(self._number)

    def fetch(self, message_id: str) -> Envelope[Reply] | None:
        key, request = self._waiting[message_id]
        return self._behaviours[key](request)


class World:
    """A federation with a bundle, and silos that each hold a submission."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fed = path / "fed"
        self.signer = Signer(path / "tuf")
        self.signer.sign(self.fed / "plans" / PLAN / "bundle", PLAN, {})

    def silo(self, silo_id: str, size: int = SIZE) -> SiteLimits:
        site = self.path / silo_id
        (site / "inbox").mkdir(parents=True)
        site_settings(site, silo_id)
        (site / "courier" / "1.root.json").write_bytes(self.signer.root)
        folder = site / "outbox" / PLAN / "1"
        folder.mkdir(parents=True)
        (folder / "expert").write_bytes(os.urandom(size))
        status = {"plan_id": PLAN, "state": "in_outbox", "progress": 100, "sequence": 1}
        (site / "outbox" / "status.json").write_text(json.dumps(status))
        return SiteLimits(site, bundle_bytes=50_000, shard_bytes=SHARD, submission_bytes=10**6)

    def delivery(self, silo_id: str) -> SiloDelivery:
        index = load_bundle(self.fed / "plans" / PLAN / "bundle")
        return SiloDelivery(
            self.fed,
            PLAN,
            silo_id,
            index=index,
            limits=TransferLimits(shard_bytes=SHARD, max_submission_bytes=10**6, wait_s=0),
        )

    def arrived(self, silo_id: str) -> Path:
        return self.fed / "incoming" / PLAN / silo_id / "1"

    def identical(self, silo_id: str) -> bool:
        sent = self.path / silo_id / "outbox" / PLAN / "1" / "expert"
        return (self.arrived(silo_id) / "expert").read_bytes() == sent.read_bytes()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def honest(limits: SiteLimits) -> Behaviour:
    return lambda request: answer(request, limits)


def garbage(request: Envelope[Request]) -> Envelope[Reply]:
    raise TransportError("message", expected="an answer", got="garbage")


def other_kind(request: Envelope[Request]) -> Envelope[Reply]:
    return Envelope(StatusReport() if isinstance(request.message, Pull) else Shards())


def for_another_silo(request: Envelope[Request]) -> Envelope[Reply]:
    return Envelope(
        BundleProgress(missing=(Span(path="silos/south/expert", offset=0, num_bytes=10),))
    )


def never(request: Envelope[Request]) -> None:
    return None


def stalled(request: Envelope[Request]) -> None:
    """An answer was announced, and its bytes do not come: Flower waits for them."""
    threading.Event().wait()


def no_space(limits: SiteLimits) -> Behaviour:
    """The aggregator's disk is full whenever this silo's shards come."""

    def full(request: Envelope[Request]) -> Envelope[Reply]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return lambda request: (
        full(request) if isinstance(request.message, Pull) else answer(request, limits)
    )


@pytest.mark.parametrize("bad", [garbage, other_kind, for_another_silo, never, stalled, no_space])
def test_honest_silo_is_served_when_the_other_one_is_not(world: World, bad: Behaviour) -> None:
    behaviour = no_space(world.silo("south")) if bad is no_space else bad  # type: ignore[comparison-overlap]
    flower = FakeFlower({b"south": behaviour, b"north": honest(world.silo("north"))})
    deliveries = {b"south": world.delivery("south"), b"north": world.delivery("north")}
    ended = time.monotonic() + LIMIT_S
    Dispatcher(
        flower,
        deliveries,
        stopped=lambda: world.arrived("north").exists() or time.monotonic() > ended,
        intervals=Intervals(tick_s=0.01, idle_tick_s=0.01),
    ).run()
    assert world.identical("north") and not world.arrived("south").exists()


def test_dispatcher_fails_when_a_channel_meets_an_error_that_nobody_foresaw(world: World) -> None:
    """The runtime starts it again; a channel that ended in silence would never be missed."""

    def bug(request: Envelope[Request]) -> Envelope[Reply]:
        raise ZeroDivisionError

    dispatcher = Dispatcher(
        FakeFlower({b"north": bug}), {b"north": world.delivery("north")}, stopped=lambda: False
    )
    with pytest.raises(ZeroDivisionError):
        dispatcher.run()


def test_honest_silo_is_served_when_the_superlink_refuses_what_the_other_one_is_sent(
    world: World,
) -> None:
    """The attack: a node announces what the other is about to be sent, so that the SuperLink refuses it."""

    class RefusingFlower(FakeFlower):
        def send(self, node: Node, request: Envelope[Request], ttl_s: float) -> str:
            if node.node_id == 1:
                with self._lock:
                    self.sent[b"bad"].append(request.message)
                raise TransportError("message", expected="a SuperLink that takes it", got="500")
            return super().send(node, request, ttl_s)

    flower = RefusingFlower({b"good": honest(world.silo("good")), b"bad": never})
    deliveries = {b"good": world.delivery("good"), b"bad": world.delivery("bad")}
    deadline = time.monotonic() + LIMIT_S
    dispatcher = Dispatcher(
        flower,
        deliveries,
        stopped=lambda: world.arrived("good").exists() or time.monotonic() > deadline,
        intervals=Intervals(tick_s=0.001, idle_tick_s=0.001),
    )
    dispatcher.run()
    assert world.identical("good")
    # Ever more slowly: at steps of a millisecond it would have been asked a thousand times.
    assert 0 < len(flower.sent[b"bad"]) < 10


def test_dispatcher_goes_on_when_the_list_of_nodes_does_not_fit_into_memory(world: World) -> None:
    """The attack: replies of several silos fill the memory that all channels share."""

    class CrowdedFlower(FakeFlower):
        num_calls = 0

        def nodes(self) -> dict[bytes, Node]:
            self.num_calls += 1
            if self.num_calls == 2:
                raise MemoryError
            return super().nodes()

    flower = CrowdedFlower({b"north": never})
    deadline = time.monotonic() + LIMIT_S
    Dispatcher(
        flower,
        {b"north": world.delivery("north")},
        stopped=lambda: flower.num_calls > 2 or time.monotonic() > deadline,
        intervals=Intervals(tick_s=0.001, idle_tick_s=0.001, nodes_s=0.0),
    ).run()
    assert flower.num_calls > 2


def channel_to(
    world: World, behaviour: Behaviour, clock: ManualClock, **settings: object
) -> tuple[SiloChannel, FakeFlower]:
    flower = FakeFlower({b"north": behaviour})
    settings = {"pull_bytes": lambda: SHARD, **settings}
    return SiloChannel(flower, world.delivery("north"), clock=clock, **settings), flower


def step_until(
    channel: SiloChannel,
    clock: ManualClock,
    until: Callable[[], bool],
    node: Node = Node(0, "first"),
) -> float:
    for _ in range(4000):
        if until():
            return clock.now
        channel.step(node)
        clock.now += 0.5
    raise AssertionError("it does not end")


def pulls(flower: FakeFlower) -> list[Pull]:
    return [request for request in flower.sent[b"north"] if isinstance(request, Pull)]


def test_every_byte_is_asked_for_once(world: World) -> None:
    clock = ManualClock(0.0)
    channel, flower = channel_to(world, honest(world.silo("north")), clock)
    step_until(channel, clock, world.arrived("north").exists)
    requested = [span.num_bytes for pull in pulls(flower) for span in pull.spans]
    assert world.identical("north") and sum(requested) == SIZE - SHARD, (
        "the first shard came with the news"
    )


def test_no_more_messages_are_in_flight_than_allowed(world: World) -> None:
    clock = ManualClock(0.0)
    num_in_flight = []
    limits = world.silo("north")
    channel, _ = channel_to(world, honest(limits), clock, max_in_flight=2)
    while not world.arrived("north").exists():
        channel._send(Node(0, "first"))
        num_in_flight.append(len(channel._sent))
        channel.step(None)
        clock.now += 0.5
    assert max(num_in_flight) == 2


def test_answers_are_smaller_when_the_silo_gives_less_and_nothing_is_fetched_twice(
    world: World,
) -> None:
    clock = ManualClock(0.0)
    reply_sizes: list[int] = []
    limits = world.silo("north")

    def little(request: Envelope[Request]) -> Envelope[Reply]:
        reply = answer(
            request,
            SiteLimits(limits.site, 50_000, SHARD, 10**6, bytes_per_s=300),
            pause=lambda s: None,
        )
        reply_sizes.append(len(reply.data))
        return reply

    channel, _ = channel_to(world, little, clock)
    step_until(channel, clock, world.arrived("north").exists)
    assert world.identical("north") and max(reply_sizes) == 3000 and sum(reply_sizes) == SIZE


@pytest.mark.parametrize("rate", [1000, 5000])
def test_shards_are_asked_for_no_faster_than_the_cap(world: World, rate: int) -> None:
    clock = ManualClock(0.0)
    free = World(world.path / "free")
    channel, _ = channel_to(free, honest(free.silo("north", size=200_000)), clock)
    assert step_until(channel, clock, free.arrived("north").exists) < 20.0, "without a cap"
    clock = ManualClock(0.0)
    limits = world.silo("north", size=200_000)
    channel, flower = channel_to(
        world, honest(limits), clock, rate_limits=(RateLimit(rate, clock), RateLimit(10**9, clock))
    )
    seconds = step_until(channel, clock, world.arrived("north").exists)
    requested = sum(span.num_bytes for pull in pulls(flower) for span in pull.spans)
    longest = max(sum(span.num_bytes for span in pull.spans) for pull in pulls(flower))
    assert (requested - longest) / rate <= seconds <= 1.2 * requested / rate


def test_lost_answer_is_asked_for_again_when_its_time_is_over(world: World) -> None:
    clock = ManualClock(0.0)
    lost: list[Envelope[Request]] = []
    limits = world.silo("north")

    def losing(request: Envelope[Request]) -> Envelope[Reply] | None:
        if isinstance(request.message, Pull) and (not lost or lost[0] is request):
            lost.append(request)
            return None
        return answer(request, limits)

    channel, flower = channel_to(world, losing, clock)
    seconds = step_until(channel, clock, world.arrived("north").exists)
    requested = sum(span.num_bytes for pull in pulls(flower) for span in pull.spans)
    assert world.identical("north") and seconds < 200 and requested == SIZE, (
        "one shard came with the news, one twice"
    )


def test_answer_that_later_ones_overtook_is_not_waited_for_to_its_end(world: World) -> None:
    """A large answer may take its time; one that was lost on the way shows by the answers that came after it."""
    limits = world.silo("north")

    def seconds_until_whole(lost_pull: int) -> float:
        clock = ManualClock(0.0)
        seen: list[Envelope[Request]] = []

        def losing(request: Envelope[Request]) -> Envelope[Reply] | None:
            if isinstance(request.message, Pull) and request not in seen:
                seen.append(request)
            lost = len(seen) >= lost_pull and request is seen[lost_pull - 1]
            return None if lost else answer(request, limits)

        channel, _ = channel_to(world, losing, clock, max_in_flight=3, min_bytes_per_s=SHARD / 600)
        took = step_until(channel, clock, world.arrived("north").exists)
        assert world.identical("north")
        shutil.rmtree(world.fed / "incoming")
        return took

    overtaken = seconds_until_whole(lost_pull=1)
    last = seconds_until_whole(lost_pull=5)
    assert overtaken < 100 < 600 < last, (
        "nothing comes after the last shard, so it has its whole time"
    )


def test_answers_are_forgotten_when_the_supernode_connects_again(world: World) -> None:
    clock = ManualClock(0.0)
    channel, flower = channel_to(world, never, clock)
    for _ in range(5):
        channel.step(Node(0, "first"))
    before = len(flower.sent[b"north"])
    assert before == 2, "the bundle is offered, and behind it a question waits"
    for _ in range(5):
        channel.step(Node(0, "second"))
    assert len(flower.sent[b"north"]) == 2 * before


def test_silo_that_fails_is_asked_ever_more_rarely(world: World) -> None:
    clock = ManualClock(0.0)
    channel, flower = channel_to(world, garbage, clock)
    for _ in range(600):
        channel.step(Node(0, "first"))
        clock.now += 0.5
    assert 8 <= len(flower.sent[b"north"]) <= 40


def test_shards_become_smaller_when_more_silos_send_at_once(world: World) -> None:
    names = [f"s{number}" for number in range(8)]
    limits = {name: world.silo(name) for name in names}
    flower = FakeFlower({name.encode(): honest(limits[name]) for name in names})
    dispatcher = Dispatcher(
        flower, {name.encode(): world.delivery(name) for name in names}, stopped=lambda: True
    )
    alone = dispatcher._pull_bytes()
    for channel in dispatcher._channels.values():
        while not channel.delivery.is_pulling:
            channel.step(Node(names.index(channel.delivery.silo_id), "first"))
    assert dispatcher._pull_bytes() == alone // 8
