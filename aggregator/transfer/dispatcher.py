"""Messages to silos and their answers: one line a silo, each in a thread of its own.

Whoever fetches an answer waits until its last byte was sent. So a silo that sends slowly, or announces an answer and
never sends it, holds up its own line and no other. Flower itself is behind `Carrier`.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from aggregator.transfer.delivery import SiloDelivery
from aggregator.transfer.pacing import Pace
from ddm.errors import ArchipelagoError
from ddm.system.backoff import Backoff
from ddm.transport.messages import Ask, Envelope, Pull, Reply, Request

IN_FLIGHT = 3
_TTL_S = 40.0
# The slowest uplink that a message's time to live allows for.
_BYTES_PER_S = 250_000
_TICK_S, _IDLE_TICK_S = 0.5, 1.0
# A silo answers in the order of its requests; one that was lost on the way must not hide the others for long.
_LOOK_AT_ALL_S = 3.0
_NODES_EVERY_S = 2.0
_LONGEST_WAIT_S = 30.0
# Flower holds a message in memory about three times while it puts it together: for half a gibibyte in all.
_MEMORY_BYTES = 160 * 1024 * 1024
_LEAST_PULL_BYTES = 1024 * 1024
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Node:
    """A connected node; `session` changes whenever its SuperNode connects anew."""

    node_id: int
    session: str


class Carrier(Protocol):
    """What Flower does; used by several threads at once."""

    def nodes(self) -> Mapping[bytes, Node]:
        """The connected nodes, by public key."""

    def send(self, node: Node, request: Envelope[Request], ttl_s: float) -> str | None:
        """Send a request; return what its answer will be known by."""

    def fetch(self, message_id: str) -> Envelope[Reply] | None:
        """Fetch the answer to a request, None while there is none; an `ArchipelagoError` for one that is of no use."""


@dataclass(frozen=True)
class _Sent:
    """A request without an answer yet."""

    request: Request
    node: Node
    deadline: float


class Line:
    """One silo: its conversation, what is under way, and when to try again after a failure.

    Args:
        carrier: Flower.
        delivery: what the silo needs and owes.
        pull_bytes: most bytes of a submission in one message, given how many silos send one now.
        in_flight: most messages under way.
        paces: the caps that hold for this silo.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        carrier: Carrier,
        delivery: SiloDelivery,
        *,
        pull_bytes: Callable[[], int],
        in_flight: int = IN_FLIGHT,
        paces: Sequence[Pace] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.delivery = delivery
        self._carrier, self._pull_bytes, self._in_flight = carrier, pull_bytes, in_flight
        self._paces, self._clock = paces, clock
        self._sent: dict[str, _Sent] = {}
        self._failures = Backoff(longest_s=_LONGEST_WAIT_S, clock=clock)
        self._not_before = self._next_look = 0.0

    @property
    def done(self) -> bool:
        """Whether nothing is left to send or to wait for, but what the silo may still say of its own accord."""
        return self.delivery.done and self.idle

    @property
    def idle(self) -> bool:
        """Whether nothing is under way but a question that the silo may take its time to answer."""
        return all(isinstance(sent.request, Ask) for sent in self._sent.values())

    def step(self, node: Node | None) -> None:
        """Send what may be sent, take what has come.

        Args:
            node: the silo's, None while it is away.
        """
        self._give_up(node)
        if node is not None and self._clock() >= self._not_before:
            self._send(node)
        # One at a time, because an answer may be as large as a shard; each look costs the SuperLink as much as a page.
        look_at_all = self._clock() >= self._next_look
        if look_at_all:
            self._next_look = self._clock() + _LOOK_AT_ALL_S
        unanswered: list[str] = []
        for message_id, sent in list(self._sent.items()):
            if self._receive(message_id, sent):
                self._overtaken(unanswered)
                continue
            unanswered.append(message_id)
            if not look_at_all:
                break

    def _send(self, node: Node) -> None:
        under_way = [sent.request for sent in self._sent.values()]
        most = self._pull_bytes()
        for pace in self._paces:
            most = pace.piece_bytes(most)
        found = self.delivery.next_requests(
            under_way, self._in_flight - len(under_way), pull_bytes=most
        )
        # One SuperNode answers one message after the other, so later ones live longer.
        for envelope in found:
            if isinstance(envelope.message, Pull) and not all(pace.open() for pace in self._paces):
                return
            ttl_s = _ttl_s(envelope) * (len(self._sent) + 1)
            message_id = self._carrier.send(node, envelope, ttl_s)
            if message_id:
                self._sent[message_id] = _Sent(envelope.message, node, self._clock() + ttl_s)
                if isinstance(envelope.message, Pull):
                    for pace in self._paces:
                        pace.take(sum(span.num_bytes for span in envelope.message.spans))

    def _give_up(self, node: Node | None) -> None:
        """Forget requests that are too old, or that a SuperNode took along when it died."""
        for message_id, sent in list(self._sent.items()):
            reconnected = node is not None and node.session != sent.node.session
            if reconnected or self._clock() > sent.deadline:
                _log.info(
                    "no answer from silo %s to %s; asking again",
                    self.delivery.silo_id,
                    sent.request.kind,
                )
                del self._sent[message_id]

    def _overtaken(self, message_ids: Sequence[str]) -> None:
        """A later request was answered, so these are lost in all likelihood: wait for them a little longer only."""
        soon = self._clock() + _TTL_S
        for message_id in message_ids:
            sent = self._sent[message_id]
            self._sent[message_id] = replace(sent, deadline=min(sent.deadline, soon))

    def _receive(self, message_id: str, sent: _Sent) -> bool:
        """Take the answer to one request; False while there is none."""
        silo_id, kind = self.delivery.silo_id, sent.request.kind
        try:
            answer = self._carrier.fetch(message_id)
            if answer is None:
                return False
            code = self.delivery.take(sent.request, answer)
            if code:
                _log.warning("silo %s answered %s with code %d", silo_id, kind, code)
        except ArchipelagoError as error:
            code = error.exit_code
            _log.warning("silo %s, answer to %s: %s", silo_id, kind, error)
        except OSError as error:  # a full disk; what was asked for is asked for again
            code = ArchipelagoError.exit_code
            _log.warning(
                "silo %s, answer to %s could not be kept: %s", silo_id, kind, error.strerror
            )
        del self._sent[message_id]
        if code:
            self._failures.count()
            self._not_before = self._clock() + self._failures.delay_s()
        else:
            self._failures.reset()
        return True


class Dispatcher:
    """All silos of one plan.

    Args:
        carrier: Flower.
        deliveries: one a silo, by the public key of its node.
        stopped: whether a stop was ordered.
        max_bytes_per_s: cap on what all silos together are asked for; None for none.
        max_silo_bytes_per_s: cap on what each silo is asked for; None for none.
    """

    def __init__(
        self,
        carrier: Carrier,
        deliveries: Mapping[bytes, SiloDelivery],
        *,
        stopped: Callable[[], bool],
        max_bytes_per_s: int | None = None,
        max_silo_bytes_per_s: int | None = None,
    ) -> None:
        self._carrier, self._stopped = carrier, stopped
        together = Pace(max_bytes_per_s)
        self._lines = {
            key: Line(
                carrier,
                delivery,
                pull_bytes=self._pull_bytes,
                paces=(together, Pace(max_silo_bytes_per_s)),
            )
            for key, delivery in deliveries.items()
        }
        self._nodes: Mapping[bytes, Node] = {}
        self._refresh_at = 0.0
        self._over = threading.Event()
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Work until every silo is done or a stop is ordered.

        Raises:
            Exception: whatever a line could not cope with; the others are left where they are.
        """
        self._refresh()
        threads = [
            threading.Thread(target=self._serve, args=item, daemon=True)
            for item in self._lines.items()
        ]
        for thread in threads:
            thread.start()
        try:
            while not (
                self._over.is_set()
                or all(line.done for line in self._lines.values())
                or self._stopped()
            ):
                if self._over.wait(_TICK_S):
                    break
                self._refresh()
        finally:
            self._over.set()
        if self._failure:
            raise self._failure
        if all(line.done for line in self._lines.values()):
            _log.info("every silo has its receipts")

    def _serve(self, key: bytes, line: Line) -> None:
        # Lines that wait for news ask less often where there are many.
        idle_s = max(_IDLE_TICK_S, _TICK_S * len(self._lines))
        try:
            while not self._over.is_set():
                try:
                    line.step(self._nodes.get(key))
                except MemoryError:  # the answer to another line holds it; this one goes on
                    _log.warning("silo %s waits for memory", line.delivery.silo_id)
                if self._over.wait(idle_s if line.idle else _TICK_S):
                    return
        except BaseException as error:
            self._failure = error
            self._over.set()

    def _refresh(self) -> None:
        if time.monotonic() < self._refresh_at:
            return
        self._refresh_at = time.monotonic() + _NODES_EVERY_S
        nodes = {key: node for key, node in self._carrier.nodes().items() if key in self._lines}
        for key in nodes.keys() ^ self._nodes.keys():
            silo_id = self._lines[key].delivery.silo_id
            _log.info("silo %s is %s", silo_id, "connected" if key in nodes else "away")
        self._nodes = nodes

    def _pull_bytes(self) -> int:
        """Memory is bounded by the shards in flight: the more silos send at once, the smaller a shard is."""
        num_pulling = sum(line.delivery.pulling for line in self._lines.values())
        return max(_MEMORY_BYTES // max(num_pulling, 1), _LEAST_PULL_BYTES)


def _ttl_s(envelope: Envelope[Request]) -> float:
    message = envelope.message
    if isinstance(message, Ask):
        return _TTL_S + message.wait_s + message.max_bytes / _BYTES_PER_S
    num_bytes: int = sum(span.num_bytes for span in message.spans)
    return _TTL_S + num_bytes / _BYTES_PER_S
