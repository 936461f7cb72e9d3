"""What one silo still needs from the aggregator, and the aggregator from it.

`SiloDelivery` knows the state of one silo from the folders alone, so a new process continues where the last one ended:

    plans/<plan_id>/bundle/**                         offered until the silo has it
    incoming/<plan_id>/<silo_id>/status.json          the last status reported
    incoming/<plan_id>/<silo_id>/seen                 its time is that of the last reply
    incoming/<plan_id>/<silo_id>/<sequence>/          a whole submission; `<sequence>.part/` while it arrives
    incoming/<plan_id>/<silo_id>/leave.json           its signed notice that it left the plan
    receipts/<plan_id>/<silo_id>/<sequence>.json      delivered, then marked with `<sequence>.delivered`
    receipts/<plan_id>/<silo_id>/<sequence>.held.json notice that a person decides; `<sequence>.held.delivered`
    receipts/<plan_id>/<silo_id>/<sequence>.unsigned  how often what arrived was not as the silo signed it
    receipts/<plan_id>/<silo_id>/final                nothing more is expected of this silo after its receipts

The node's key, which the courier holds, shows who replies here; what the silo states is signed with another key, which
the worker holds. A stolen node key may therefore delay a silo, and no more: only the submission after the last answered
one is fetched, and a submission that is not fetched does not count against the silo.

Receipts for earlier plans that did not reach the silo go first: a plan may be replaced while a silo is away, and the
silo should learn what became of its work before it gets the next plan. A silo that no longer knows that plan says so,
and this process does not send it that receipt again.
"""

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aggregator.transfer.receipts_folder import (
    HELD,
    HOLD_S,
    earlier_plans,
    is_silo_finished,
    receipt_name,
    undelivered_notices,
    undelivered_receipts,
    unsigned_for_s,
)
from ddm.errors import FormatError, MissingFileError, ReplayError
from ddm.io.files import read_bounded, write_atomic
from ddm.protocol.leave import LEAVE_NAME
from ddm.protocol.receipt import MAX_RECEIPT_BYTES
from ddm.transport.messages import (
    MAX_BUNDLE_FILES,
    MAX_SUBMISSIONS,
    BundleProgress,
    Envelope,
    IndexEntry,
    Offer,
    Pull,
    ReceiptDelivery,
    ReceiptStored,
    Reply,
    Request,
    Shards,
    Span,
    Status,
    StatusQuery,
    StatusReport,
    truncate_spans,
)
from ddm.transport.sequences import sequence_numbers
from ddm.transport.shards import PartFolder, list_folder, read_spans, whole_spans

# What a silo replies to a receipt for a plan that it no longer knows.
_UNKNOWN_PLAN = (MissingFileError.exit_code, ReplayError.exit_code)
_MAX_BUNDLE_BYTES = 2**40
# A batch is read into memory when it is offered, so no more than can be in flight.
_MAX_BATCHES = 4
_MAX_SPANS_PER_BATCH = 256
# Many silos may join at once, and each is sent a plan of its own.
_OFFER_BYTES = 4 * 1024 * 1024
# What comes along with the news of a submission: enough that a small one needs no further message.
_FIRST_BYTES = 4 * 1024 * 1024
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TransferLimits:
    """Bounds on what is sent and fetched.

    Attributes:
        shard_bytes: most bytes in one message.
        max_submission_bytes: most bytes of one submission.
        wait_s: for how long the silo may hold back a reply that has no news.
    """

    shard_bytes: int
    max_submission_bytes: int
    wait_s: int


@dataclass(frozen=True)
class _PendingReceipt:
    """A receipt that did not reach its silo yet, or a notice that a person decides (`held`)."""

    plan_id: str
    sequence: int
    held: bool = False


@dataclass(frozen=True)
class _Arrival:
    """A submission on its way."""

    sequence: int
    part: PartFolder


def load_bundle(bundle: Path) -> tuple[IndexEntry, ...]:
    """Read the index of a plan's bundle, digests included."""
    return list_folder(
        bundle, max_files=MAX_BUNDLE_FILES, max_bytes=_MAX_BUNDLE_BYTES, with_digest=True
    )


class SiloDelivery:
    """The conversation with one silo about one plan.

    Args:
        fed: the federation folder.
        plan_id: the plan.
        silo_id: the silo to which the node's key is registered.
        index: the bundle's index.
        limits: bounds on messages and submissions.
        takes_part: whether the plan names it; another one only gets receipts for earlier plans.
        carried_from: the earlier plan from which its experts are carried over; it may still take them back.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        fed: Path,
        plan_id: str,
        silo_id: str,
        *,
        index: tuple[IndexEntry, ...],
        limits: TransferLimits,
        takes_part: bool = True,
        carried_from: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan_id = plan_id
        self.silo_id = silo_id
        self._fed = fed
        self._index = index
        self._limits = limits
        self._takes_part = takes_part
        self._carried_from = carried_from
        self._clock = clock
        self._bundle = fed / "plans" / plan_id / "bundle"
        self._incoming = fed / "incoming" / plan_id / silo_id
        self._receipts = fed / "receipts" / plan_id / silo_id
        # Receipts for earlier plans that this silo no longer knows.
        self._declined: set[_PendingReceipt] = set()
        self._status = Status()
        self._arrival: _Arrival | None = None
        # An announced submission that is not fetched, and until when the silo need not announce it again.
        self._ignored_sequence = 0
        self._ignored_until = 0.0

        self._bundle_complete = False
        # The silo lacks the whole bundle, until it says otherwise. One that has reported before has the bundle in all
        # likelihood: the first offer to it is empty, and only finds out.
        self._lacking = list(whole_spans(index))
        if (self._incoming / "status.json").exists():
            self._lacking = []
        self._incoming.mkdir(parents=True, exist_ok=True)

    @property
    def is_finished(self) -> bool:
        """Whether this silo needs nothing any more."""
        if not self._takes_part:
            return not self._earlier_receipts()
        return is_silo_finished(self._receipts)

    @property
    def is_pulling(self) -> bool:
        """Whether a submission is on its way."""
        return self._arrival is not None

    def next_requests(
        self, in_flight: Sequence[Request], max_messages: int, *, pull_bytes: int | None = None
    ) -> list[Envelope[Request]]:
        """Return what to send now.

        Args:
            in_flight: requests without a reply yet.
            max_messages: most messages to return.
            pull_bytes: most bytes of a submission in one message; as many as in any other by default.
        """
        max_messages = max(max_messages, 0)
        if self.is_finished:
            # One whose submission was accepted may still leave the plan, while the others are at work. One that the
            # plan does not name hears so.
            return self._status_queries(in_flight)[:max_messages]

        earlier = self._earlier_receipts()
        if earlier:
            return self._receipt_deliveries(earlier, in_flight)[:max_messages]

        requests = self._receipt_deliveries(self._own_receipts(), in_flight)
        if not self._bundle_complete and len(requests) < max_messages:
            requests += self._offers(in_flight, max_messages - len(requests))
        if self._arrival is not None:
            max_bytes = min(pull_bytes or self._limits.shard_bytes, self._limits.shard_bytes)
            requests += self._pulls(self._arrival, in_flight, max_bytes)
        elif not requests and not self._is_awaiting_receipt():
            requests += self._status_queries(in_flight)
        return requests[:max_messages]

    def take(self, request: Request, answer: Envelope[Reply]) -> int:
        """Put the reply to one request on disk; return 0, or the silo's code when it could not do what it should.

        Raises:
            FormatError: the reply does not fit the request.
            OSError: the disk is full.
        """
        reply = answer.message
        (self._incoming / "seen").touch()
        if reply.code:
            self._take_failure(request, reply.code)
            return reply.code
        match request, reply:
            case Offer(), BundleProgress():
                self._bundle_complete = self._bundle_complete or reply.complete
                # The silo's word on what it lacks replaces what was believed: its inbox may have lost a part.
                self._lacking = self._check_missing(reply.missing)
            case StatusQuery(), StatusReport():
                self._take_report(reply, answer.pieces())
            case Pull(), Shards() if _answers_pull(request, reply, len(answer.data)):
                self._take_shards(request, reply.spans, answer.pieces())
            case ReceiptDelivery(), ReceiptStored():
                self._mark_delivered(request)
            case _:
                raise FormatError(
                    f"answer of silo {self.silo_id}",
                    expected=f"an answer to {request.kind}",
                    got=reply.kind,
                )
        return 0

    def _take_failure(self, request: Request, code: int) -> None:
        match request:
            case ReceiptDelivery() if request.plan_id != self.plan_id and code in _UNKNOWN_PLAN:
                self._declined.add(_PendingReceipt(request.plan_id, request.sequence))
            case Pull():
                # What was announced may be there no longer: let the silo announce again what it has.
                self._arrival = None

    def _mark_delivered(self, delivery: ReceiptDelivery) -> None:
        folder = self._fed / "receipts" / delivery.plan_id / self.silo_id
        write_atomic(
            folder / receipt_name(delivery.sequence, ".delivered", held=delivery.held), b""
        )

    def _status_queries(self, in_flight: Sequence[Request]) -> list[Envelope[Request]]:
        """Query behind whatever is in flight: a SuperNode that finds no message sleeps for three seconds."""
        if any(isinstance(request, StatusQuery | ReceiptDelivery) for request in in_flight):
            return []
        received = self._last_received()
        if self._clock() < self._ignored_until:
            received = max(received, self._ignored_sequence)
        max_bytes = min(self._limits.shard_bytes, _FIRST_BYTES)
        # What arrived before a restart is on disk: the index alone is enough to continue.
        if any(self._incoming.glob("*.part")):
            max_bytes = 0
        query = StatusQuery(
            plan_id=self.plan_id,
            named=self._takes_part,
            carried_from=self._carried_from,
            known=self._status,
            received=received,
            max_bytes=max_bytes,
            wait_s=self._limits.wait_s,
        )
        return [Envelope(query)]

    def _receipt_deliveries(
        self, receipts: Iterable[_PendingReceipt], in_flight: Sequence[Request]
    ) -> list[Envelope[Request]]:
        """Make a message of each receipt that is not in flight yet."""
        sent = {
            _PendingReceipt(request.plan_id, request.sequence, request.held)
            for request in in_flight
            if isinstance(request, ReceiptDelivery)
        }
        return [self._receipt_delivery(receipt) for receipt in receipts if receipt not in sent]

    def _receipt_delivery(self, receipt: _PendingReceipt) -> Envelope[Request]:
        folder = self._fed / "receipts" / receipt.plan_id / self.silo_id
        name = receipt_name(receipt.sequence, ".json", held=receipt.held)
        data = read_bounded(folder / name, MAX_RECEIPT_BYTES)
        delivery = ReceiptDelivery(
            plan_id=receipt.plan_id, sequence=receipt.sequence, held=receipt.held
        )
        return Envelope(delivery, data)

    def _earlier_receipts(self) -> list[_PendingReceipt]:
        """List the receipts for earlier plans that did not reach this silo."""
        receipts = [
            _PendingReceipt(plan.name, sequence)
            for plan in earlier_plans(self._fed, self.plan_id)
            for sequence in undelivered_receipts(plan / self.silo_id)
        ]
        return [receipt for receipt in receipts if receipt not in self._declined]

    def _own_receipts(self) -> list[_PendingReceipt]:
        """List the receipts and notices for this plan that did not reach this silo."""
        receipts = [
            _PendingReceipt(self.plan_id, number) for number in undelivered_receipts(self._receipts)
        ]
        receipts += [
            _PendingReceipt(self.plan_id, number, held=True)
            for number in undelivered_notices(self._receipts)
        ]
        return receipts

    def _offers(self, in_flight: Sequence[Request], max_messages: int) -> list[Envelope[Request]]:
        """Offer what the silo lacks of the bundle and is not in flight."""
        offers = [request for request in in_flight if isinstance(request, Offer)]
        sent: set[Span] = set()
        for offer in offers:
            sent.update(offer.spans)
        max_bytes = min(self._limits.shard_bytes, _OFFER_BYTES)
        pieces = _cut(self._lacking, max_bytes)
        unsent = [span for span in pieces if span not in sent]
        batches = _batches(unsent, max_bytes)
        if not batches and not offers:
            # Nothing is left to send, yet the silo has not said that it is complete: let it say what it has.
            batches = [[]]
        num_batches = min(max_messages, _MAX_BATCHES)
        return [self._offer(batch) for batch in batches[:num_batches]]

    def _offer(self, spans: Sequence[Span]) -> Envelope[Request]:
        offer = Offer(plan_id=self.plan_id, files=self._index, spans=tuple(spans))
        return Envelope(offer, read_spans(self._bundle, spans))

    def _pulls(
        self, arrival: _Arrival, in_flight: Sequence[Request], max_bytes: int
    ) -> list[Envelope[Request]]:
        """Request what is missing of the submission and is not in flight."""
        sequence = arrival.sequence
        requested: list[Span] = []
        for request in in_flight:
            if isinstance(request, Pull) and request.sequence == sequence:
                requested += request.spans
        missing = arrival.part.missing(max_bytes, in_flight=requested)
        pulls: list[Envelope[Request]] = []
        for batch in _batches(missing, max_bytes)[:_MAX_BATCHES]:
            pull = Pull(plan_id=self.plan_id, sequence=sequence, spans=tuple(batch))
            pulls.append(Envelope(pull))
        return pulls

    def _check_missing(self, missing: Sequence[Span]) -> list[Span]:
        """Refuse ranges that the bundle does not have, or that name a byte twice: each would be read and sent."""
        sizes = {entry.path: entry.num_bytes for entry in self._index}
        for span in missing:
            end = span.offset + span.num_bytes
            # A file that the bundle does not have is shorter than any range.
            if end <= sizes.get(span.path, -1):
                continue
            raise FormatError(
                f"answer of silo {self.silo_id}",
                expected="ranges of the bundle",
                got="a range beyond its end",
            )
        num_bytes = sum(span.num_bytes for span in missing)
        if len(set(missing)) != len(missing) or num_bytes > sum(sizes.values()):
            raise FormatError(
                f"answer of silo {self.silo_id}",
                expected="each byte named once",
                got="overlapping ranges",
            )
        return list(missing)

    def _take_report(self, report: StatusReport, pieces: Sequence[memoryview]) -> None:
        status_path = self._incoming / "status.json"
        if report.status != self._status or not status_path.exists():
            status = {
                "plan_id": self.plan_id,
                "silo_id": self.silo_id,
                **report.status.model_dump(),
            }
            write_atomic(status_path, json.dumps(status).encode())
        self._status = report.status
        is_member = self._takes_part or self._carried_from is not None
        # The first one counts. It is signed, and intake verifies it.
        if is_member and report.leave and not (self._incoming / LEAVE_NAME).exists():
            write_atomic(self._incoming / LEAVE_NAME, report.leave.encode())
        # Nothing else is taken from a silo that the plan does not name.
        if not self._takes_part:
            return
        if report.files and report.sequence > self._last_received():
            self._take_announcement(report, pieces)

    def _take_announcement(self, report: StatusReport, pieces: Sequence[memoryview]) -> None:
        """Begin to fetch an announced submission, unless it is not the one to come now."""
        reason = self._reason_not_to_fetch(report)
        if reason is not None:
            _log.warning(
                "silo %s announces submission %d: %s; not fetched",
                self.silo_id,
                report.sequence,
                reason,
            )
            return
        self._discard_other_parts(report.sequence)
        part = PartFolder(self._incoming / str(report.sequence), report.files)
        # Checked by `PartFolder` against the announced files: no path and no range outside of them is written.
        part.write(zip(report.spans, pieces, strict=True))
        self._arrival = _Arrival(report.sequence, part)
        self._finish_arrival()

    def _discard_other_parts(self, sequence: int) -> None:
        """Discard what has arrived of submissions announced before: one at a time, or each would fill the disk."""
        # Beside them may be a status that a killed process had begun to write: its file name begins with a dot.
        for path in self._incoming.glob("[0-9]*.part"):
            if path.name != f"{sequence}.part":
                shutil.rmtree(path)

    def _reason_not_to_fetch(self, report: StatusReport) -> str | None:
        """Say why an announced submission is not fetched now, and ignore it for a while; None for one to fetch.

        The attack: a thief of the node key announces submission 999, or one that fills the disk, or again and again one
        that the silo did not sign.
        """
        next_sequence = self._last_received() + 1
        num_bytes = sum(entry.num_bytes for entry in report.files)
        max_bytes = self._limits.max_submission_bytes
        ignored_for_s = HOLD_S
        if next_sequence > MAX_SUBMISSIONS:
            reason = "expected no further one"
        elif report.sequence != next_sequence:
            reason = f"expected {next_sequence}"
        elif num_bytes > max_bytes:
            reason = f"expected at most {max_bytes} bytes, by the plan's limits, got {num_bytes}"
        else:
            ignored_for_s = unsigned_for_s(self._receipts, report.sequence)
            if ignored_for_s <= 0.0:
                return None
            reason = "expected what the silo signed, got something else the last time"
        self._ignored_sequence = report.sequence
        self._ignored_until = self._clock() + ignored_for_s
        return reason

    def _take_shards(
        self, request: Pull, spans: Sequence[Span], pieces: Sequence[memoryview]
    ) -> None:
        # A late reply, to a request for a submission that is given up or complete, is dropped.
        if self._arrival is None or self._arrival.sequence != request.sequence:
            return
        self._arrival.part.write(zip(spans, pieces, strict=True))
        self._finish_arrival()

    def _finish_arrival(self) -> None:
        if self._arrival is not None and self._arrival.part.finish():
            self._arrival = None

    def _last_received(self) -> int:
        """The highest sequence that is here whole, or has its receipt."""
        numbers = sequence_numbers(self._incoming) | sequence_numbers(self._receipts, ".json")
        return max(numbers, default=0)

    def _is_awaiting_receipt(self) -> bool:
        """Whether the silo's last submission is being verified: its status says nothing new meanwhile."""
        received = self._last_received()
        if received == 0 or (self._receipts / f"{received}.json").exists():
            return False
        # A person may take days, in which the silo may have something to say.
        return not (self._receipts / f"{received}{HELD}.json").exists()


def _answers_pull(request: Pull, reply: Shards, num_bytes: int) -> bool:
    """Whether shards are those that were requested: a silo may send less, but only the beginning."""
    if not reply.spans:
        return False
    return reply.spans == truncate_spans(request.spans, num_bytes)


def _cut(spans: Sequence[Span], max_bytes: int) -> list[Span]:
    """Cut ranges into pieces of at most this many bytes; an empty range stays one piece."""
    pieces = []
    for span in spans:
        # An empty file has one empty range, without which the silo would never count it as received.
        for start in range(0, max(span.num_bytes, 1), max_bytes):
            num_bytes = min(max_bytes, span.num_bytes - start)
            offset = span.offset + start
            pieces.append(Span(path=span.path, offset=offset, num_bytes=num_bytes))
    return pieces


def _batches(spans: Sequence[Span], max_bytes: int) -> list[list[Span]]:
    """Group ranges so that a message is full, but holds at most this many bytes."""
    batches: list[list[Span]] = []
    bytes_left = 0
    for span in spans:
        is_full = not batches or len(batches[-1]) >= _MAX_SPANS_PER_BATCH
        if is_full or span.num_bytes > bytes_left:
            batches.append([])
            bytes_left = max_bytes
        batches[-1].append(span)
        bytes_left -= span.num_bytes
    return batches
