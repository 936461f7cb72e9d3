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

from aggregator.transfer.delivery import SiloDelivery, load_bundle
from aggregator.transfer.dispatcher import Dispatcher, Line, Node
from aggregator.transfer.pacing import Pace
from ddm.errors import TransportError
from ddm.transport.messages import Envelope, Held, Pull, Reply, Report, Request, Shards, Span
from silo.courier.handlers import SiteLimits, answer
from tests.support.bundles import Signer, site_settings
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
        self.path, self.fed = path, path / "fed"
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
            shard_bytes=SHARD,
            max_submission_bytes=10**6,
            wait_s=0,
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
    return Envelope(Report() if isinstance(request.message, Pull) else Shards())


def for_another_silo(request: Envelope[Request]) -> Envelope[Reply]:
    return Envelope(Held(missing=(Span(path="silos/south/expert", offset=0, num_bytes=10),)))


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
def test_honest_silo_is_served_when_the_other_one_is_not(
    world: World, bad: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aggregator.transfer.dispatcher._TICK_S", 0.01)
    monkeypatch.setattr("aggregator.transfer.dispatcher._IDLE_TICK_S", 0.01)
    behaviour = no_space(world.silo("south")) if bad is no_space else bad  # type: ignore[comparison-overlap]
    flower = FakeFlower({b"south": behaviour, b"north": honest(world.silo("north"))})
    deliveries = {b"south": world.delivery("south"), b"north": world.delivery("north")}
    ended = time.monotonic() + LIMIT_S
    Dispatcher(
        flower,
        deliveries,
        stopped=lambda: world.arrived("north").exists() or time.monotonic() > ended,
    ).run()
    assert world.identical("north") and not world.arrived("south").exists()


def test_post_fails_when_a_line_meets_what_nobody_foresaw(world: World) -> None:
    """The runtime starts it again; a line that ended in silence would never be missed."""

    def bug(request: Envelope[Request]) -> Envelope[Reply]:
        raise ZeroDivisionError

    dispatcher = Dispatcher(
        FakeFlower({b"north": bug}), {b"north": world.delivery("north")}, stopped=lambda: False
    )
    with pytest.raises(ZeroDivisionError):
        dispatcher.run()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def line_of(
    world: World, behaviour: Behaviour, clock: Clock, **settings: object
) -> tuple[Line, FakeFlower]:
    flower = FakeFlower({b"north": behaviour})
    settings = {"pull_bytes": lambda: SHARD, **settings}
    return Line(flower, world.delivery("north"), clock=clock, **settings), flower


def walk(
    line: Line, clock: Clock, until: Callable[[], bool], node: Node = Node(0, "first")
) -> float:
    for _ in range(4000):
        if until():
            return clock.now
        line.step(node)
        clock.now += 0.5
    raise AssertionError("it does not end")


def pulls(flower: FakeFlower) -> list[Pull]:
    return [request for request in flower.sent[b"north"] if isinstance(request, Pull)]


def test_every_byte_is_asked_for_once(world: World) -> None:
    clock = Clock()
    line, flower = line_of(world, honest(world.silo("north")), clock)
    walk(line, clock, world.arrived("north").exists)
    asked = [span.num_bytes for pull in pulls(flower) for span in pull.spans]
    assert world.identical("north") and sum(asked) == SIZE - SHARD, (
        "the first shard came with the news"
    )


def test_no_more_messages_are_under_way_than_allowed(world: World) -> None:
    clock, under_way = Clock(), []
    limits = world.silo("north")
    line, _ = line_of(world, honest(limits), clock, in_flight=2)
    while not world.arrived("north").exists():
        line._send(Node(0, "first"))
        under_way.append(len(line._sent))
        line.step(None)
        clock.now += 0.5
    assert max(under_way) == 2


def test_answers_are_smaller_when_the_silo_gives_less_and_nothing_is_fetched_twice(
    world: World,
) -> None:
    clock, given = Clock(), []
    limits = world.silo("north")

    def little(request: Envelope[Request]) -> Envelope[Reply]:
        reply = answer(
            request,
            SiteLimits(limits.site, 50_000, SHARD, 10**6, bytes_per_s=300),
            pause=lambda s: None,
        )
        given.append(len(reply.data))
        return reply

    line, _ = line_of(world, little, clock)
    walk(line, clock, world.arrived("north").exists)
    assert world.identical("north") and max(given) == 3000 and sum(given) == SIZE


@pytest.mark.parametrize("rate", [1000, 5000])
def test_shards_are_asked_for_no_faster_than_the_cap(world: World, rate: int) -> None:
    clock, free = Clock(), World(world.path / "free")
    line, _ = line_of(free, honest(free.silo("north", size=200_000)), clock)
    assert walk(line, clock, free.arrived("north").exists) < 20.0, "without a cap"
    clock = Clock()
    limits = world.silo("north", size=200_000)
    line, flower = line_of(
        world, honest(limits), clock, paces=(Pace(rate, clock), Pace(10**9, clock))
    )
    seconds = walk(line, clock, world.arrived("north").exists)
    asked = sum(span.num_bytes for pull in pulls(flower) for span in pull.spans)
    longest = max(sum(span.num_bytes for span in pull.spans) for pull in pulls(flower))
    assert (asked - longest) / rate <= seconds <= 1.2 * asked / rate


def test_lost_answer_is_asked_for_again_when_its_time_is_over(world: World) -> None:
    clock, lost = Clock(), []
    limits = world.silo("north")

    def losing(request: Envelope[Request]) -> Envelope[Reply] | None:
        if isinstance(request.message, Pull) and (not lost or lost[0] is request):
            lost.append(request)
            return None
        return answer(request, limits)

    line, flower = line_of(world, losing, clock)
    seconds = walk(line, clock, world.arrived("north").exists)
    asked = sum(span.num_bytes for pull in pulls(flower) for span in pull.spans)
    assert world.identical("north") and seconds < 200 and asked == SIZE, (
        "one shard came with the news, one twice"
    )


def test_answer_that_later_ones_overtook_is_not_waited_for_to_its_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large answer may take its time; one that was lost on the way shows by the answers that came after it."""
    monkeypatch.setattr("aggregator.transfer.dispatcher._BYTES_PER_S", SHARD / 600)
    limits = world.silo("north")

    def seconds_until_whole(lost_pull: int) -> float:
        clock, seen = Clock(), []

        def losing(request: Envelope[Request]) -> Envelope[Reply] | None:
            if isinstance(request.message, Pull) and request not in seen:
                seen.append(request)
            lost = len(seen) >= lost_pull and request is seen[lost_pull - 1]
            return None if lost else answer(request, limits)

        line, _ = line_of(world, losing, clock, in_flight=3)
        took = walk(line, clock, world.arrived("north").exists)
        assert world.identical("north")
        shutil.rmtree(world.fed / "incoming")
        return took

    overtaken, last = seconds_until_whole(lost_pull=1), seconds_until_whole(lost_pull=5)
    assert overtaken < 100 < 600 < last, (
        "nothing comes after the last shard, so it has its whole time"
    )


def test_answers_are_forgotten_when_the_supernode_connects_anew(world: World) -> None:
    clock = Clock()
    line, flower = line_of(world, never, clock)
    for _ in range(5):
        line.step(Node(0, "first"))
    before = len(flower.sent[b"north"])
    assert before == 2, "the bundle is offered, and behind it a question waits"
    for _ in range(5):
        line.step(Node(0, "second"))
    assert len(flower.sent[b"north"]) == 2 * before


def test_silo_that_fails_is_asked_ever_more_rarely(world: World) -> None:
    clock = Clock()
    line, flower = line_of(world, garbage, clock)
    for _ in range(600):
        line.step(Node(0, "first"))
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
    for line in dispatcher._lines.values():
        while not line.delivery.pulling:
            line.step(Node(names.index(line.delivery.silo_id), "first"))
    assert dispatcher._pull_bytes() == alone // 8
