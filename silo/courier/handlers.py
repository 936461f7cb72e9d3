"""The courier's replies to the aggregator.

It writes the inbox (`silo.courier.bundles`, `silo.courier.receipts`), reads the outbox, and takes every limit from this
site's own configuration, never from the message. Every failure becomes a number: no exception's text, path or name is
sent, since any of them could contain something of the site.

A SuperNode brings one message after the other. A site that caps its rate therefore need not remember what it sent: a
reply carries no more than the cap lets through in `_PACED_S` seconds, and is delayed for as long as its bytes may take.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from pydantic import ValidationError

from ddm.errors import ArchipelagoError, DocumentError, MissingFileError, PolicyError, ReplayError
from ddm.io.files import read_bounded
from ddm.protocol.leave import LEAVE_NAME, MAX_LEAVE_BYTES
from ddm.transport.messages import (
    MAX_SUBMISSION_FILES,
    BundleProgress,
    Envelope,
    Offer,
    Pull,
    ReceiptDelivery,
    ReceiptStored,
    Reply,
    Request,
    Shards,
    Status,
    StatusFile,
    StatusQuery,
    StatusReport,
    truncate_spans,
)
from ddm.transport.sequences import sequence_numbers
from ddm.transport.shards import list_folder, read_spans, whole_spans
from silo.config import Site
from silo.query_note import keep_query

_MAX_STATUS_BYTES = 4096
_SETTLE_S = 5.0
_POLL_S = 0.5
# Well below the time to live of any message.
_PACED_S = 10.0
_REPLY_TO: Mapping[type[Request], type[Reply]] = {
    Offer: BundleProgress,
    StatusQuery: StatusReport,
    Pull: Shards,
    ReceiptDelivery: ReceiptStored,
}


@dataclass(frozen=True)
class SiteLimits:
    """Where this courier works and how much it takes and gives, from the site's own configuration.

    Attributes:
        site: the site folder.
        bundle_bytes: most bytes of one plan's bundle.
        shard_bytes: most bytes in one message, either way.
        submission_bytes: most bytes of one submission.
        bytes_per_s: most bytes a second that leave, on average over a few messages; 0 for as many as the line takes.
        inbox_bytes: most bytes of all files in the inbox.
        inbox_files: most files and folders in it.
    """

    site: Path
    bundle_bytes: int
    shard_bytes: int
    submission_bytes: int
    bytes_per_s: int = 0
    inbox_bytes: int = 1 << 62
    inbox_files: int = 1 << 31

    # Flower starts a process for each message and hands it this text alone; it comes from the site's own courier.
    @classmethod
    def from_node_config(cls, node_config: Mapping[str, object]) -> "SiteLimits":
        """Read the node configuration that `silo.courier.supernode` gave the SuperNode."""
        numbers = {
            name: int(str(node_config[name]))
            for name in (
                "bundle_bytes",
                "shard_bytes",
                "submission_bytes",
                "bytes_per_s",
                "inbox_bytes",
                "inbox_files",
            )
        }
        return cls(Path(unquote(str(node_config["site"]))), **numbers)

    @property
    def reply_bytes(self) -> int:
        """Most bytes in one reply."""
        if self.bytes_per_s == 0:
            return self.shard_bytes
        return min(self.shard_bytes, int(self.bytes_per_s * _PACED_S))


def answer(
    envelope: Envelope[Request], limits: SiteLimits, *, pause: Callable[[float], None] = time.sleep
) -> Envelope[Reply]:
    """Answer one valid request, no faster than this site lets bytes leave; a failure becomes a code."""
    reply = _answer(envelope, limits)
    # The next message waits for this one, so that a pause here limits the rate.
    if limits.bytes_per_s and reply.data:
        pause(len(reply.data) / limits.bytes_per_s)
    return reply


def _answer(envelope: Envelope[Request], limits: SiteLimits) -> Envelope[Reply]:
    request = envelope.message
    try:
        match request:
            case Offer():
                return Envelope(_take_bundle(request, envelope.pieces(), limits))
            case StatusQuery():
                return report_status(request, limits)
            case Pull():
                return send_shards(request, limits)
            case ReceiptDelivery():
                return Envelope(_take_receipt(request, envelope.data, limits))
    except ArchipelagoError as error:
        return Envelope(_REPLY_TO[type(request)](code=error.exit_code))
    # a bug or a full disk: the aggregator learns that it failed, and nothing more
    except Exception:
        return Envelope(_REPLY_TO[type(request)](code=ArchipelagoError.exit_code))


def _take_bundle(offer: Offer, pieces: Sequence[memoryview], limits: SiteLimits) -> BundleProgress:
    # Imported here, since each message starts a process, and only this one needs to verify signatures.
    from silo.courier.bundles import take_bundle
    from silo.courier.inbox import Inbox

    # Every limit comes from this site's configuration; the offer cannot raise one.
    inbox = Inbox(limits.site, limits.inbox_bytes, limits.inbox_files)
    return take_bundle(
        offer, pieces, inbox, bundle_bytes=limits.bundle_bytes, shard_bytes=limits.shard_bytes
    )


def _take_receipt(deliver: ReceiptDelivery, receipt: bytes, limits: SiteLimits) -> ReceiptStored:
    from silo.courier.receipts import take_receipt

    return take_receipt(deliver, receipt, Site(limits.site))


def report_status(query: StatusQuery, limits: SiteLimits) -> Envelope[StatusReport]:
    """Report a new submission at once, a new state after a few seconds, progress when the aggregator stops waiting.

    A message costs a second of computing here, so states that follow each other quickly share one. The reply holds the
    worker's status, the newest submission that has no receipt, and its first bytes.
    """
    keep_query(limits.site, query)
    deadline = time.monotonic() + query.wait_s
    settled_at = min(time.monotonic() + _SETTLE_S, deadline)
    # One message of the aggregator waits here for news, so that it need not ask again and again.
    while True:
        status = read_status(query.plan_id, limits)
        sequence = newest_sequence(query.plan_id, limits)
        now = time.monotonic()
        # All but the progress, which changes at every step.
        known = query.known.model_copy(update={"progress": status.progress})
        has_new_state = status != known
        # A worker that has ended has no further news to wait for, and its courier may end soon.
        has_new_code = status.code not in (0, query.known.code)
        has_settled_state = has_new_state and now >= settled_at
        has_submission = sequence > query.received
        if has_submission or has_new_code or has_settled_state or now >= deadline:
            break
        time.sleep(_POLL_S)
    leave = read_leave(query.carried_from or query.plan_id, limits)
    # A silo that left the plan sends nothing more for it.
    if sequence <= query.received or leave:
        return Envelope(StatusReport(status=status, leave=leave))
    submission = limits.site / "outbox" / query.plan_id / str(sequence)
    files = list_folder(
        submission, max_files=MAX_SUBMISSION_FILES, max_bytes=limits.submission_bytes
    )
    max_bytes = min(query.max_bytes, limits.reply_bytes)
    spans = truncate_spans(whole_spans(files), max_bytes)
    report = StatusReport(status=status, sequence=sequence, files=files, spans=spans)
    return Envelope(report, read_spans(submission, spans))


def read_status(plan_id: str, limits: SiteLimits) -> Status:
    """Read what the worker last reported about one plan; `waiting` if it reported nothing, or is at another plan.

    Raises:
        DocumentError: the file is not as it must be.
    """
    try:
        data = read_bounded(limits.site / "outbox" / "status.json", _MAX_STATUS_BYTES)
        status = StatusFile.model_validate_json(data)
    except MissingFileError:
        return Status()
    except ValidationError:
        raise DocumentError(
            "status.json", expected="a valid status", got="a document of another form"
        ) from None
    # What this site does for another plan says nothing about the one that was asked about, except that it needs a
    # person.
    if status.plan_id != plan_id:
        return Status(code=status.code)
    return Status.model_validate(status.model_dump(exclude={"plan_id"}))


def read_leave(plan_id: str, limits: SiteLimits) -> str | None:
    """Read the silo's sealed notice that it left the plan; None where it did not."""
    path = limits.site / "outbox" / plan_id / LEAVE_NAME
    try:
        return read_bounded(path, MAX_LEAVE_BYTES).decode()
    except MissingFileError:
        return None
    except UnicodeDecodeError:
        raise DocumentError(LEAVE_NAME, expected="text", got="other bytes") from None


def newest_sequence(plan_id: str, limits: SiteLimits) -> int:
    """Return the number of the highest submission in the outbox, 0 when it has a receipt or there is none."""
    receipts = limits.site / "inbox" / plan_id / "receipts"
    newest = max(sequence_numbers(limits.site / "outbox" / plan_id), default=0)
    if (receipts / f"{newest}.json").exists():
        return 0
    return newest


def send_shards(pull: Pull, limits: SiteLimits) -> Envelope[Shards]:
    """Read the requested ranges, or as much of them as one reply carries, from an approved submission.

    Only what a person approved is in the outbox, so that nothing else can be requested by any path.

    Raises:
        PolicyError: more bytes than this site sends in one message.
        ReplayError: there is no such submission.
    """
    num_bytes = sum(span.num_bytes for span in pull.spans)
    if num_bytes > limits.shard_bytes:
        raise PolicyError(
            "shards", expected=f"at most {limits.shard_bytes} bytes", got=f"{num_bytes}"
        )
    submission = limits.site / "outbox" / pull.plan_id / str(pull.sequence)
    if not submission.is_dir():
        raise ReplayError(
            "submission", expected="one in the outbox", got=f"number {pull.sequence}, not there"
        )
    spans = truncate_spans(pull.spans, limits.reply_bytes)
    return Envelope(Shards(spans=spans), read_spans(submission, spans))
