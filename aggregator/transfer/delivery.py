"""What one silo still needs from the aggregator, and the aggregator from it.

`SiloDelivery` knows the state of one silo from the folders alone, so a new process continues where the last one ended:

    plans/<plan_id>/bundle/**                         offered until the silo has it
    incoming/<plan_id>/<silo_id>/status.json          the last status reported
    incoming/<plan_id>/<silo_id>/seen                 its time is that of the last answer
    incoming/<plan_id>/<silo_id>/<sequence>/          a whole submission; `<sequence>.part/` while it arrives
    incoming/<plan_id>/<silo_id>/leave.json           its signed word that it gave the plan up
    receipts/<plan_id>/<silo_id>/<sequence>.json      delivered, then marked with `<sequence>.delivered`
    receipts/<plan_id>/<silo_id>/<sequence>.held.json word that a person decides; `<sequence>.held.delivered`
    receipts/<plan_id>/<silo_id>/<sequence>.unsigned  how often what arrived was not as the silo signed it
    receipts/<plan_id>/<silo_id>/final                nothing more is expected of this silo after its receipts

Who answers here is known by its node's key, which the courier holds; the silo speaks by the key that signs. So an
answer may delay what a silo has to say, and no more: only the submission after the last one answered is fetched, and
what is not fetched is not held against the silo.

Receipts for earlier plans that did not reach the silo go first: a plan may be replaced while a silo is away, and it
should hear what became of its work before it hears of the next plan. A silo that knows that plan no more says so, and
is not told again by this process.
"""

import json
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ddm.errors import FormatError, MissingFileError, ReplayError
from ddm.io.files import read_bounded, write_atomic
from ddm.protocol.leave import LEAVE_NAME
from ddm.transport.messages import (
    MAX_BUNDLE_FILES,
    MAX_RECEIPT_BYTES,
    MAX_SUBMISSIONS,
    Ask,
    Deliver,
    Delivered,
    Envelope,
    FileEntry,
    Held,
    Offer,
    Pull,
    Reply,
    Report,
    Request,
    Shards,
    Span,
    Status,
    first_of,
)
from ddm.transport.sequences import sequences
from ddm.transport.shards import PartFolder, list_folder, read_spans

_UNSIGNED = ".unsigned"
_HELD = ".held"
# What a silo answers to a receipt for a plan that it knows no more.
_UNKNOWN_PLAN = (MissingFileError.exit_code, ReplayError.exit_code)
_MAX_COUNT_BYTES = 20
# How long what cannot be fetched is not asked for, and what was not as signed is not fetched again: twice as long each
# time.
_HOLD_S = 60.0
_LONGEST_HOLD_S = 3600.0
_MAX_BUNDLE_BYTES = 2**40
# A batch is read into memory when it is offered, so no more than can be under way.
_MAX_AT_ONCE = 4
# Many silos may join at once, and each is sent a plan of its own.
_OFFER_BYTES = 4 * 1024 * 1024
# What comes along with the news of a submission: enough that a small one needs no further message.
_FIRST_BYTES = 4 * 1024 * 1024
_log = logging.getLogger(__name__)


def load_bundle(bundle: Path) -> tuple[FileEntry, ...]:
    """Read the index of a plan's bundle, digests included."""
    return list_folder(
        bundle, max_files=MAX_BUNDLE_FILES, max_bytes=_MAX_BUNDLE_BYTES, with_digest=True
    )


class SiloDelivery:
    """The conversation with one silo about one plan.

    Args:
        fed: the federation folder.
        plan_id: the plan.
        silo_id: whom the registered key of the node names.
        index: the bundle's index.
        shard_bytes: most bytes in one message.
        max_submission_bytes: most bytes of one submission.
        wait_s: for how long the silo may hold back an answer that has no news.
        takes_part: whether it trains for the plan; False for one that is only told of earlier plans.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        fed: Path,
        plan_id: str,
        silo_id: str,
        *,
        index: tuple[FileEntry, ...],
        shard_bytes: int,
        max_submission_bytes: int,
        wait_s: int,
        takes_part: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan_id, self.silo_id = plan_id, silo_id
        self._fed, self._takes_part = fed, takes_part
        # Of earlier plans, what this silo does not want to hear any more.
        self._declined: set[tuple[str, int]] = set()
        self._bundle = fed / "plans" / plan_id / "bundle"
        self._incoming = fed / "incoming" / plan_id / silo_id
        self._receipts = fed / "receipts" / plan_id / silo_id
        self._index, self._shard_bytes, self._wait_s = index, shard_bytes, wait_s
        self._max_submission_bytes = max_submission_bytes
        self._bundle_complete = False
        # What the silo lacks of the bundle: everything, until it says otherwise. One that has reported before has the
        # bundle in all likelihood: it is only asked.
        known = (self._incoming / "status.json").exists()
        self._lacking = (
            [] if known else [Span(path=e.path, offset=0, num_bytes=e.num_bytes) for e in index]
        )
        self._status = Status()
        self._part: tuple[int, PartFolder] | None = None
        self._clock = clock
        # An announced submission that is not fetched, and until when the silo need not tell of it again.
        self._held, self._held_until = 0, 0.0
        self._incoming.mkdir(parents=True, exist_ok=True)

    @property
    def done(self) -> bool:
        """Whether this silo needs nothing any more."""
        if not self._takes_part:
            return not self._earlier()
        return (self._receipts / "final").exists() and not _undelivered(self._receipts)

    @property
    def pulling(self) -> bool:
        """Whether a submission is on its way."""
        return self._part is not None

    def next_requests(
        self, in_flight: Sequence[Request], room: int, *, pull_bytes: int | None = None
    ) -> list[Envelope[Request]]:
        """Return what to send now.

        Args:
            in_flight: requests without an answer yet.
            room: most messages to return.
            pull_bytes: most bytes of a submission in one message; as many as in any other by default.
        """
        if self.done:
            # One whose submission was accepted may still give the plan up, while the others are at work.
            return self._ask(in_flight)[: max(room, 0)] if self._takes_part else []
        busy = {
            (one.plan_id, one.sequence, one.held) for one in in_flight if isinstance(one, Deliver)
        }
        if earlier := self._earlier():
            return [self._receipt(*each) for each in earlier if (*each, False) not in busy][
                : max(room, 0)
            ]
        own = [(self.plan_id, sequence, False) for sequence in _undelivered(self._receipts)]
        own += [(self.plan_id, sequence, True) for sequence in _untold(self._receipts)]
        found = [self._receipt(*each) for each in own if each not in busy]
        if not self._bundle_complete and len(found) < room:
            found += self._offers(
                [one for one in in_flight if isinstance(one, Offer)], room - len(found)
            )
        if self._part is not None:
            found += self._pulls(in_flight, min(pull_bytes or self._shard_bytes, self._shard_bytes))
        elif not found and not self._awaiting_receipt():
            found += self._ask(in_flight)
        return found[: max(room, 0)]

    def _ask(self, in_flight: Sequence[Request]) -> list[Envelope[Request]]:
        """Ask behind whatever is under way: a SuperNode that finds no message sleeps for three seconds."""
        if any(isinstance(request, Ask | Deliver) for request in in_flight):
            return []
        ask = Ask(
            plan_id=self.plan_id,
            known=self._status,
            received=max(self._received(), self._held if self._clock() < self._held_until else 0),
            # What arrived before a restart is on disk: the index alone is enough to go on.
            max_bytes=0
            if any(self._incoming.glob("*.part"))
            else min(self._shard_bytes, _FIRST_BYTES),
            wait_s=self._wait_s,
        )
        return [Envelope(ask)]

    def take(self, request: Request, answer: Envelope[Reply]) -> int:
        """Put the answer to one request on disk; return 0, or the silo's code when it could not do what it should.

        Raises:
            FormatError: the answer does not fit the request.
            OSError: the disk is full.
        """
        reply = answer.message
        (self._incoming / "seen").touch()
        match request, reply:
            case _, _ if reply.code:
                if (
                    isinstance(request, Deliver)
                    and request.plan_id != self.plan_id
                    and reply.code in _UNKNOWN_PLAN
                ):
                    self._declined.add((request.plan_id, request.sequence))
                if isinstance(request, Pull):
                    # What was announced may be there no longer: let the silo say anew what it has.
                    self._part = None
                return reply.code
            case Offer(), Held():
                self._bundle_complete = self._bundle_complete or reply.complete
                self._lacking = self._known_ranges(reply.missing)
            case Ask(), Report():
                self._take_report(reply, answer.pieces())
            case Pull(), Shards() if reply.spans and reply.spans == first_of(
                request.spans, len(answer.data)
            ):
                self._take_shards(request, reply.spans, answer.pieces())
            case Deliver(), Delivered():
                name = f"{request.sequence}{_HELD if request.held else ''}.delivered"
                write_atomic(
                    self._receipts.parent.parent / request.plan_id / self.silo_id / name, b""
                )
            case _:
                raise FormatError(
                    f"answer of silo {self.silo_id}",
                    expected=f"one to {request.kind}",
                    got=reply.kind,
                )
        return 0

    def _offers(self, in_flight: list[Offer], room: int) -> list[Envelope[Request]]:
        sent = {span for request in in_flight for span in request.spans}
        most = min(self._shard_bytes, _OFFER_BYTES)
        batches = self._batches(
            [span for span in self._cut(self._lacking, most) if span not in sent], most
        )
        if not batches and not in_flight:
            # Nothing is left to send, yet the silo has not said that it is complete: let it say what it holds.
            batches = [[]]
        return [self._offer(batch) for batch in batches[: min(room, _MAX_AT_ONCE)]]

    def _offer(self, spans: Sequence[Span]) -> Envelope[Request]:
        return Envelope(
            Offer(plan_id=self.plan_id, files=self._index, spans=tuple(spans)),
            read_spans(self._bundle, spans),
        )

    def _known_ranges(self, missing: Sequence[Span]) -> list[Span]:
        sizes = {entry.path: entry.num_bytes for entry in self._index}
        if any(span.offset + span.num_bytes > sizes.get(span.path, -1) for span in missing):
            raise FormatError(
                f"answer of silo {self.silo_id}",
                expected="ranges of the bundle",
                got="a range beyond",
            )
        if len(set(missing)) != len(missing) or sum(span.num_bytes for span in missing) > sum(
            sizes.values()
        ):
            # Each would be read and sent.
            raise FormatError(
                f"answer of silo {self.silo_id}",
                expected="each byte named once",
                got="overlapping ranges",
            )
        return list(missing)

    def _cut(self, spans: Sequence[Span], step: int) -> list[Span]:
        return [
            Span(path=span.path, offset=span.offset + at, num_bytes=min(step, span.num_bytes - at))
            for span in spans
            for at in range(0, max(span.num_bytes, 1), step)
        ]

    def _batches(self, spans: Sequence[Span], most: int) -> list[list[Span]]:
        """Group ranges so that a message is full, but holds at most `most` bytes."""
        batches: list[list[Span]] = []
        room = 0
        for span in spans:
            if not batches or span.num_bytes > room or len(batches[-1]) >= 256:
                batches.append([])
                room = most
            batches[-1].append(span)
            room -= span.num_bytes
        return batches

    def _pulls(self, in_flight: Sequence[Request], most: int) -> list[Envelope[Request]]:
        if self._part is None:
            return []
        sequence, part = self._part
        pulls = [
            request
            for request in in_flight
            if isinstance(request, Pull) and request.sequence == sequence
        ]
        missing = part.missing(most, coming=(span for request in pulls for span in request.spans))
        return [
            Envelope(Pull(plan_id=self.plan_id, sequence=sequence, spans=tuple(batch)))
            for batch in self._batches(missing, most)[:_MAX_AT_ONCE]
        ]

    def _take_report(self, report: Report, pieces: Sequence[memoryview]) -> None:
        if report.status != self._status or not (self._incoming / "status.json").exists():
            status = {
                "plan_id": self.plan_id,
                "silo_id": self.silo_id,
                **report.status.model_dump(),
            }
            write_atomic(self._incoming / "status.json", json.dumps(status).encode())
        self._status = report.status
        if report.leave and not (self._incoming / LEAVE_NAME).exists():
            write_atomic(self._incoming / LEAVE_NAME, report.leave.encode())
        if report.sequence <= self._received() or not report.files:
            return
        if why := self._not_to_fetch(report):
            _log.warning(
                "silo %s announces submission %d: %s; not fetched",
                self.silo_id,
                report.sequence,
                why,
            )
            return
        self._forget_parts(report.sequence)
        part = PartFolder(self._incoming / str(report.sequence), report.files)
        part.write(zip(report.spans, pieces, strict=True))
        self._part = (report.sequence, part)
        self._finish_part()

    def _forget_parts(self, sequence: int) -> None:
        """Discard what has arrived of submissions announced before: one at a time, or each would hold the disk."""
        for path in self._incoming.glob("*.part"):
            if path.name != f"{sequence}.part":
                shutil.rmtree(path)

    def _not_to_fetch(self, report: Report) -> str | None:
        """Say why an announced submission is not fetched now, and hold it for a while; None for one to fetch."""
        hold_s, why, expected = _HOLD_S, None, self._received() + 1
        num_bytes = sum(entry.num_bytes for entry in report.files)
        if report.sequence != expected or expected > MAX_SUBMISSIONS:
            why = (
                f"expected {expected}" if expected <= MAX_SUBMISSIONS else "expected no further one"
            )
        elif num_bytes > self._max_submission_bytes:
            why = f"expected at most {self._max_submission_bytes} bytes, by the plan's limits, got {num_bytes}"
        elif (hold_s := _unsigned_for_s(self._receipts, report.sequence)) > 0.0:
            why = "expected what the silo signed, got something else the last time"
        if why:
            self._held, self._held_until = report.sequence, self._clock() + hold_s
        return why

    def _take_shards(
        self, request: Pull, spans: Sequence[Span], pieces: Sequence[memoryview]
    ) -> None:
        if self._part is None or self._part[0] != request.sequence:
            return
        self._part[1].write(zip(spans, pieces, strict=True))
        self._finish_part()

    def _finish_part(self) -> None:
        if self._part is not None and self._part[1].finish():
            self._part = None

    def _received(self) -> int:
        """The highest sequence that is here whole, or has its answer."""
        return max(sequences(self._incoming) | sequences(self._receipts, ".json"), default=0)

    def _awaiting_receipt(self) -> bool:
        received = self._received()
        if received == 0 or (self._receipts / f"{received}.json").exists():
            return False
        # A person may take days, in which the silo may have something to say.
        return not (self._receipts / f"{received}{_HELD}.json").exists()

    def _receipt(self, plan_id: str, sequence: int, held: bool = False) -> Envelope[Request]:
        folder, name = (
            self._fed / "receipts" / plan_id / self.silo_id,
            f"{sequence}{_HELD if held else ''}.json",
        )
        receipt = read_bounded(folder / name, MAX_RECEIPT_BYTES)
        return Envelope(Deliver(plan_id=plan_id, sequence=sequence, held=held), receipt)

    def _earlier(self) -> list[tuple[str, int]]:
        """List the receipts for earlier plans that did not reach this silo."""
        found = [
            (plan.name, sequence)
            for plan in earlier_plans(self._fed, self.plan_id)
            for sequence in _undelivered(plan / self.silo_id)
        ]
        return [each for each in found if each not in self._declined]


def note_unsigned(receipts: Path, sequence: int) -> None:
    """Note that what arrived under this number was not as the silo signed it."""
    path = receipts / f"{sequence}{_UNSIGNED}"
    write_atomic(path, b"%d" % (_num_unsigned(path) + 1))


def forget_unsigned(receipts: Path, sequence: int) -> None:
    """Forget such notes once the silo's own submission is answered."""
    (receipts / f"{sequence}{_UNSIGNED}").unlink(missing_ok=True)


def _unsigned_for_s(receipts: Path, sequence: int) -> float:
    """Return for how many seconds more a submission is not fetched again, after it was not as signed."""
    path = receipts / f"{sequence}{_UNSIGNED}"
    times = _num_unsigned(path)
    if times == 0:
        return 0.0
    delay_s = min(_HOLD_S * 2.0 ** min(times - 1, 16), _LONGEST_HOLD_S)
    # A clock that was set back must not hold it for longer.
    return min(path.stat().st_mtime + delay_s - time.time(), delay_s)


def _num_unsigned(path: Path) -> int:
    if not path.is_file():
        return 0
    text = read_bounded(path, _MAX_COUNT_BYTES)
    return int(text) if text.isdigit() else 1


def plan_done(fed: Path, plan_id: str, silo_ids: Sequence[str]) -> bool:
    """Whether every silo of a plan has its last receipt, and nothing is left to do."""
    for silo_id in silo_ids:
        receipts = fed / "receipts" / plan_id / silo_id
        if not (receipts / "final").exists() or _undelivered(receipts):
            return False
    return True


def earlier_plans(fed: Path, plan_id: str) -> list[Path]:
    """List the folders of receipts for other plans than this one."""
    folder = fed / "receipts"
    return (
        sorted(each for each in folder.iterdir() if each.name != plan_id) if folder.is_dir() else []
    )


def still_to_hear(fed: Path, plan_id: str, silo_id: str) -> bool:
    """Whether a receipt for an earlier plan did not reach a silo."""
    return any(_undelivered(plan / silo_id) for plan in earlier_plans(fed, plan_id))


def _untold(receipts: Path) -> list[int]:
    """List the submissions that wait for a person without the silo's knowledge."""
    told = sequences(receipts, f"{_HELD}.delivered") | sequences(receipts, ".json")
    return sorted(sequences(receipts, f"{_HELD}.json") - told)


def _undelivered(receipts: Path) -> list[int]:
    return sorted(sequences(receipts, ".json") - sequences(receipts, ".delivered"))
