"""Messages to silos and their replies: one channel for each silo, each in a thread of its own.

The thread that fetches a reply waits until its last byte was sent. A silo that sends slowly, or announces a reply and
never sends it, therefore delays its own channel and no other. Flower itself is behind `Carrier`.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from aggregator.transfer.delivery import SiloDelivery
from ddm.errors import ArchipelagoError, TransportError
from ddm.system.backoff import Backoff
from ddm.transport.messages import Envelope, Pull, Reply, Request, StatusQuery

# While one is sent, the next is made and one waits: a SuperNode that finds no message sleeps for three seconds. More
# gain nothing, since it takes one message after the other (docs/explanation/transfer.md).
MAX_IN_FLIGHT = 3
_TTL_S = 40.0
_MIN_BYTES_PER_S = 250_000
_MAX_RETRY_DELAY_S = 30.0
# A silo replies in the order of its requests; one that was lost on the way must not hide the others for long.
_FULL_CHECK_EVERY_S = 3.0
# Flower holds a message in memory about three times while it puts it together: for half a gibibyte in all.
_MEMORY_BYTES = 160 * 1024 * 1024
_MIN_PULL_BYTES = 1024 * 1024
# A message takes up the link for no longer than its share of the cap lets through in this time.
_MAX_MESSAGE_S = 10.0
# At least this many bytes in one message, since a message itself costs seconds.
_MIN_MESSAGE_BYTES = 64 * 1024
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Node:
    """A connected node; `session` changes whenever its SuperNode connects again."""

    node_id: int
    session: str


class Carrier(Protocol):
    """What Flower does; used by several threads at once."""

    def nodes(self) -> Mapping[bytes, Node]:
        """The connected nodes, by public key."""

    def send(self, node: Node, request: Envelope[Request], ttl_s: float) -> str | None:
        """Send a request; return the id by which its reply is fetched, or raise a `TransportError`."""

    def fetch(self, message_id: str) -> Envelope[Reply] | None:
        """Fetch the reply to a request, None while there is none; an `ArchipelagoError` for an unusable one."""


class RateLimit:
    """A cap on the bytes a second that silos send; silos that share one may be served by threads of their own.

    Flower moves a message as fast as the link allows. What is limited here is when the next one is requested, and its
    size: the rate holds on average over a few messages, and no message takes more than a few seconds of it.

    Args:
        bytes_per_s: the cap; None for none.
        clock: seconds that only go forward.
    """

    def __init__(
        self, bytes_per_s: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at = clock()
        self._lock = threading.Lock()

    def allows_request(self) -> bool:
        """Whether the next message may be requested now."""
        return self._bytes_per_s is None or self._clock() >= self._free_at

    def count(self, num_bytes: int) -> None:
        """Count what was requested; the next request waits for as long as this one may take."""
        if self._bytes_per_s is not None:
            with self._lock:
                self._free_at = max(self._free_at, self._clock()) + num_bytes / self._bytes_per_s

    def message_bytes(self, max_bytes: int) -> int:
        """Return the size of a message where memory allows `max_bytes`: what the cap lets through in ten seconds."""
        if self._bytes_per_s is None:
            return max_bytes
        return min(max_bytes, max(int(self._bytes_per_s * _MAX_MESSAGE_S), _MIN_MESSAGE_BYTES))


@dataclass(frozen=True)
class _SentRequest:
    """A request without a reply yet."""

    request: Request
    node: Node
    deadline: float


class SiloChannel:
    """One silo: its conversation, what is in flight, and when to try again after a failure.

    Args:
        carrier: Flower.
        delivery: what the silo needs and owes.
        pull_bytes: most bytes of a submission in one message, which depends on how many silos send one now.
        max_in_flight: most messages in flight.
        rate_limits: the caps that hold for this silo.
        min_bytes_per_s: the slowest uplink that a message's time to live allows for.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        carrier: Carrier,
        delivery: SiloDelivery,
        *,
        pull_bytes: Callable[[], int],
        max_in_flight: int = MAX_IN_FLIGHT,
        rate_limits: Sequence[RateLimit] = (),
        min_bytes_per_s: float = _MIN_BYTES_PER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.delivery = delivery
        self._carrier = carrier
        self._pull_bytes = pull_bytes
        self._max_in_flight = max_in_flight
        self._rate_limits = rate_limits
        self._min_bytes_per_s = min_bytes_per_s
        self._clock = clock
        # In the order in which they were sent, by message id.
        self._sent: dict[str, _SentRequest] = {}
        self._failures = Backoff(longest_s=_MAX_RETRY_DELAY_S, clock=clock)
        self._retry_at = 0.0
        self._full_check_at = 0.0

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to send or to wait for, except what the silo may still send without a request."""
        return self.delivery.is_finished and self.is_idle

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight except a query that the silo may answer later."""
        return all(isinstance(sent.request, StatusQuery) for sent in self._sent.values())

    def step(self, node: Node | None) -> None:
        """Send what may be sent, take what has come.

        Args:
            node: the silo's, None while it is away.
        """
        self._drop_lost_requests(node)
        if node is not None and self._clock() >= self._retry_at:
            self._send(node)
        self._receive_replies()

    def _send(self, node: Node) -> None:
        in_flight = [sent.request for sent in self._sent.values()]
        pull_bytes = self._pull_bytes()
        for limit in self._rate_limits:
            pull_bytes = limit.message_bytes(pull_bytes)
        envelopes = self.delivery.next_requests(
            in_flight, self._max_in_flight - len(in_flight), pull_bytes=pull_bytes
        )
        for envelope in envelopes:
            request = envelope.message
            is_pull = isinstance(request, Pull)
            # Only submissions are capped, since a plan and its receipts are what the aggregator itself sends.
            if is_pull and not all(limit.allows_request() for limit in self._rate_limits):
                return
            # One SuperNode answers one message after the other, so that later ones must live longer.
            ttl_s = self._ttl_s(request) * (len(self._sent) + 1)
            try:
                message_id = self._carrier.send(node, envelope, ttl_s)
            except TransportError as error:
                _log.warning("silo %s, %s: %s", self.delivery.silo_id, request.kind, error)
                self._back_off()
                return
            if not message_id:
                continue
            self._sent[message_id] = _SentRequest(request, node, self._clock() + ttl_s)
            if is_pull:
                for limit in self._rate_limits:
                    limit.count(_num_span_bytes(request))

    def _ttl_s(self, request: Request) -> float:
        """Return for how long a request may be without a reply: its bytes take time, and a silo may wait for news."""
        if isinstance(request, StatusQuery):
            return _TTL_S + request.wait_s + request.max_bytes / self._min_bytes_per_s
        return _TTL_S + _num_span_bytes(request) / self._min_bytes_per_s

    def _drop_lost_requests(self, node: Node | None) -> None:
        """Forget requests that are too old, or that a SuperNode lost when it died; they are made again."""
        for message_id, sent in list(self._sent.items()):
            # A SuperNode that started again knows nothing of the requests that its predecessor had taken.
            reconnected = node is not None and node.session != sent.node.session
            if reconnected or self._clock() > sent.deadline:
                _log.info(
                    "no answer from silo %s to %s; asking again",
                    self.delivery.silo_id,
                    sent.request.kind,
                )
                del self._sent[message_id]

    def _receive_replies(self) -> None:
        """Take the replies that are there, oldest request first.

        Replies come in the order of the requests. Each check costs the SuperLink as much as a page, so that in most
        steps the first request without a reply ends the search.
        """
        check_all = self._clock() >= self._full_check_at
        if check_all:
            self._full_check_at = self._clock() + _FULL_CHECK_EVERY_S
        unanswered: list[str] = []
        # One at a time, because a reply may be as large as a shard.
        for message_id, sent in list(self._sent.items()):
            if self._receive(message_id, sent):
                self._shorten_deadlines(unanswered)
                continue
            unanswered.append(message_id)
            if not check_all:
                break

    def _shorten_deadlines(self, message_ids: Sequence[str]) -> None:
        """Wait only a little longer for these: a later request was answered, so they are lost in all likelihood."""
        soon = self._clock() + _TTL_S
        for message_id in message_ids:
            sent = self._sent[message_id]
            self._sent[message_id] = replace(sent, deadline=min(sent.deadline, soon))

    def _receive(self, message_id: str, sent: _SentRequest) -> bool:
        """Take the reply to one request; False while there is none."""
        silo_id = self.delivery.silo_id
        kind = sent.request.kind
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
        except OSError as error:
            # A full disk perhaps. What was requested is requested again.
            code = ArchipelagoError.exit_code
            _log.warning(
                "silo %s, answer to %s could not be kept: %s", silo_id, kind, error.strerror
            )
        del self._sent[message_id]
        if code:
            self._back_off()
        else:
            self._failures.reset()
        return True

    def _back_off(self) -> None:
        """Try again ever more slowly, so that a silo with which all fails does not keep the aggregator busy."""
        self._failures.count()
        self._retry_at = self._clock() + self._failures.delay_s()


@dataclass(frozen=True)
class Intervals:
    """The intervals of the dispatcher's tasks, in seconds.

    Attributes:
        tick_s: between two steps of a channel with messages in flight.
        idle_tick_s: between two steps of a channel that waits for news, at least.
        nodes_s: between two looks at which nodes are connected.
    """

    tick_s: float = 0.5
    idle_tick_s: float = 1.0
    nodes_s: float = 2.0


class Dispatcher:
    """All silos of one plan.

    Args:
        carrier: Flower.
        deliveries: one for each silo, by the public key of its node.
        stopped: whether a stop was ordered.
        max_bytes_per_s: cap on what is requested of all silos together; None for none.
        max_silo_bytes_per_s: cap on what is requested of each silo; None for none.
        max_in_flight: most messages to one silo without a reply.
        intervals: the intervals of its tasks.
    """

    def __init__(
        self,
        carrier: Carrier,
        deliveries: Mapping[bytes, SiloDelivery],
        *,
        stopped: Callable[[], bool],
        max_bytes_per_s: int | None = None,
        max_silo_bytes_per_s: int | None = None,
        max_in_flight: int = MAX_IN_FLIGHT,
        intervals: Intervals | None = None,
    ) -> None:
        self._carrier = carrier
        self._stopped = stopped
        self._intervals = intervals or Intervals()
        shared_limit = RateLimit(max_bytes_per_s)
        self._channels = {
            key: SiloChannel(
                carrier,
                delivery,
                pull_bytes=self._pull_bytes,
                max_in_flight=max_in_flight,
                rate_limits=(shared_limit, RateLimit(max_silo_bytes_per_s)),
            )
            for key, delivery in deliveries.items()
        }
        self._nodes: Mapping[bytes, Node] = {}
        self._refresh_at = 0.0
        self._ended = threading.Event()
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Work until every silo is finished or a stop is ordered.

        Raises:
            Exception: the error that ended a channel; the other channels stay as they are.
        """
        self._refresh_nodes()
        for key, channel in self._channels.items():
            threading.Thread(target=self._serve, args=(key, channel), daemon=True).start()
        try:
            while not (self._ended.is_set() or self._all_finished() or self._stopped()):
                if self._ended.wait(self._intervals.tick_s):
                    break
                self._refresh_nodes()
        finally:
            self._ended.set()
        if self._failure:
            raise self._failure
        if self._all_finished():
            _log.info("every silo has its receipts")

    def _all_finished(self) -> bool:
        return all(channel.is_finished for channel in self._channels.values())

    def _serve(self, key: bytes, channel: SiloChannel) -> None:
        """Step one channel until the end; runs in a thread of its own."""
        # Channels that wait for news check less often where there are many.
        idle_s = max(self._intervals.idle_tick_s, self._intervals.tick_s * len(self._channels))
        try:
            while not self._ended.is_set():
                try:
                    channel.step(self._nodes.get(key))
                # The process has a limit of data: a small answer may unpack to a large one
                # (docs/explanation/transfer.md).
                except MemoryError:
                    # The reply to another channel takes up the memory; this channel tries again.
                    _log.warning("silo %s waits for memory", channel.delivery.silo_id)
                delay_s = idle_s if channel.is_idle else self._intervals.tick_s
                if self._ended.wait(delay_s):
                    return
        except BaseException as error:
            # Raised again by `run`: an error in a thread would otherwise end one silo's conversation, and nobody
            # would notice.
            self._failure = error
            self._ended.set()

    def _refresh_nodes(self) -> None:
        if time.monotonic() < self._refresh_at:
            return
        self._refresh_at = time.monotonic() + self._intervals.nodes_s
        try:
            connected = self._carrier.nodes()
        except MemoryError:
            # As in `_serve`. The nodes of two seconds ago are good enough.
            _log.warning("the list of connected silos waits for memory")
            return
        nodes = {key: node for key, node in connected.items() if key in self._channels}
        for key in nodes.keys() ^ self._nodes.keys():
            silo_id = self._channels[key].delivery.silo_id
            _log.info("silo %s is %s", silo_id, "connected" if key in nodes else "away")
        # Replaced as a whole, since the channels read it from threads of their own.
        self._nodes = nodes

    def _pull_bytes(self) -> int:
        """Memory is bounded by the shards in flight: the more silos send at once, the smaller a shard is."""
        num_pulling = sum(channel.delivery.is_pulling for channel in self._channels.values())
        return max(_MEMORY_BYTES // max(num_pulling, 1), _MIN_PULL_BYTES)


def _num_span_bytes(request: Request) -> int:
    return sum(span.num_bytes for span in getattr(request, "spans", ()))
