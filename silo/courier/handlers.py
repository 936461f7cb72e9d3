"""The courier's answers to the aggregator.

It writes the inbox (`silo.courier.bundles`, `silo.courier.receipts`), reads the outbox, and takes every limit from this
site's own configuration, never from the message. Whatever goes wrong becomes a number; no exception's text, path or
name leaves.

A SuperNode brings one message after the other. So a site that caps its rate needs no memory of what it gave: an answer
carries no more than the cap lets through in `_PACED_S` seconds, and is held back for as long as its bytes may take.
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
    Ask,
    Deliver,
    Delivered,
    Envelope,
    Held,
    Offer,
    Pull,
    Reply,
    Report,
    Request,
    Shards,
    Status,
    StatusFile,
    first_of,
)
from ddm.transport.sequences import sequences
from ddm.transport.shards import list_folder, read_spans, whole_spans
from silo.config import Site

_MAX_STATUS_BYTES = 4096
_SETTLE_S = 5.0
_POLL_S = 0.5
# Well below the time to live of any message.
_PACED_S = 10.0
_REPLY_TO: Mapping[type[Request], type[Reply]] = {
    Offer: Held,
    Ask: Report,
    Pull: Shards,
    Deliver: Delivered,
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
        inbox_bytes: most bytes of all that lies in the inbox.
        inbox_files: most files and folders in it.
    """

    site: Path
    bundle_bytes: int
    shard_bytes: int
    submission_bytes: int
    bytes_per_s: int = 0
    inbox_bytes: int = 1 << 62
    inbox_files: int = 1 << 31

    @classmethod
    def of(cls, node_config: Mapping[str, object]) -> "SiteLimits":
        """Read the node configuration that `silo.courier.supernode` gave the SuperNode."""
        names = (
            "bundle_bytes",
            "shard_bytes",
            "submission_bytes",
            "bytes_per_s",
            "inbox_bytes",
            "inbox_files",
        )
        return cls(
            Path(unquote(str(node_config["site"]))),
            *(int(str(node_config[name])) for name in names),
        )

    @property
    def answer_bytes(self) -> int:
        """Most bytes in one answer."""
        return (
            min(self.shard_bytes, int(self.bytes_per_s * _PACED_S))
            if self.bytes_per_s
            else self.shard_bytes
        )


def answer(
    envelope: Envelope[Request], limits: SiteLimits, *, pause: Callable[[float], None] = time.sleep
) -> Envelope[Reply]:
    """Answer one valid request, no faster than this site lets bytes leave; a failure becomes a code."""
    reply = _answer(envelope, limits)
    if limits.bytes_per_s and reply.data:
        pause(len(reply.data) / limits.bytes_per_s)
    return reply


def _answer(envelope: Envelope[Request], limits: SiteLimits) -> Envelope[Reply]:
    request, data = envelope.message, envelope.data
    try:
        match request:
            case Offer():
                return Envelope(_take_bundle(request, envelope.pieces(), limits))
            case Ask():
                return report(request, limits)
            case Pull():
                return give_shards(request, limits)
            case Deliver():
                return Envelope(_take_receipt(request, data, limits))
    except ArchipelagoError as error:
        return Envelope(_REPLY_TO[type(request)](code=error.exit_code))
    # a bug or a full disk: the aggregator learns that it failed, and nothing more
    except Exception:
        return Envelope(_REPLY_TO[type(request)](code=ArchipelagoError.exit_code))


def _take_bundle(offer: Offer, pieces: Sequence[memoryview], limits: SiteLimits) -> Held:
    # It verifies signatures, for which other messages need not wait.
    from silo.courier.bundles import take_bundle
    from silo.courier.inbox import Inbox

    inbox = Inbox(limits.site, limits.inbox_bytes, limits.inbox_files)
    return take_bundle(
        offer, pieces, inbox, bundle_bytes=limits.bundle_bytes, shard_bytes=limits.shard_bytes
    )


def _take_receipt(deliver: Deliver, receipt: bytes, limits: SiteLimits) -> Delivered:
    from silo.courier.receipts import take_receipt

    return take_receipt(deliver, receipt, Site(limits.site))


def report(ask: Ask, limits: SiteLimits) -> Envelope[Report]:
    """Report a new submission at once, a new state after a few seconds, progress when the aggregator stops waiting.

    A message costs a second of computing here, so states that follow each other quickly share one. The answer holds the
    worker's status, the newest submission that has no receipt, and its first bytes.
    """
    deadline = time.monotonic() + ask.wait_s
    settled = min(time.monotonic() + _SETTLE_S, deadline)
    while True:
        status, sequence = read_status(ask.plan_id, limits), newest_sequence(ask.plan_id, limits)
        now = time.monotonic()
        news = (status.state, status.sequence) != (ask.known.state, ask.known.sequence)
        if sequence > ask.received or (news and now >= settled) or now >= deadline:
            break
        time.sleep(_POLL_S)
    leave = read_leave(ask.plan_id, limits)
    if sequence <= ask.received or leave:
        return Envelope(Report(status=status, leave=leave))
    submission = limits.site / "outbox" / ask.plan_id / str(sequence)
    files = list_folder(
        submission, max_files=MAX_SUBMISSION_FILES, max_bytes=limits.submission_bytes
    )
    spans = first_of(whole_spans(files), min(ask.max_bytes, limits.answer_bytes))
    found = Report(status=status, sequence=sequence, files=files, spans=spans)
    return Envelope(found, read_spans(submission, spans))


def read_status(plan_id: str, limits: SiteLimits) -> Status:
    """Read what the worker last said about one plan; `waiting` when it said nothing, or is at another plan.

    Raises:
        DocumentError: the file is not as it must be.
    """
    try:
        found = StatusFile.model_validate_json(
            read_bounded(limits.site / "outbox" / "status.json", _MAX_STATUS_BYTES)
        )
    except MissingFileError:
        return Status()
    except ValidationError:
        raise DocumentError(
            "status.json", expected="a valid status", got="a document of another form"
        ) from None
    if found.plan_id != plan_id:
        return Status()
    return Status(state=found.state, progress=found.progress, sequence=found.sequence)


def read_leave(plan_id: str, limits: SiteLimits) -> str | None:
    """Read the silo's sealed word that it gave the plan up; None where it did not."""
    try:
        return read_bounded(limits.site / "outbox" / plan_id / LEAVE_NAME, MAX_LEAVE_BYTES).decode()
    except MissingFileError:
        return None
    except UnicodeDecodeError:
        raise DocumentError(LEAVE_NAME, expected="text", got="other bytes") from None


def newest_sequence(plan_id: str, limits: SiteLimits) -> int:
    """Return the number of the highest submission in the outbox, 0 when it has a receipt or there is none."""
    receipts = limits.site / "inbox" / plan_id / "receipts"
    newest = max(sequences(limits.site / "outbox" / plan_id), default=0)
    return 0 if (receipts / f"{newest}.json").exists() else newest


def give_shards(pull: Pull, limits: SiteLimits) -> Envelope[Shards]:
    """Read the ranges asked for, or as much of them as one answer carries, from an approved submission.

    Raises:
        PolicyError: more bytes than this site gives in one message.
        ReplayError: there is no such submission.
    """
    if (num_bytes := sum(span.num_bytes for span in pull.spans)) > limits.shard_bytes:
        raise PolicyError(
            "shards", expected=f"at most {limits.shard_bytes} bytes", got=f"{num_bytes}"
        )
    submission = limits.site / "outbox" / pull.plan_id / str(pull.sequence)
    if not submission.is_dir():
        raise ReplayError(
            "submission", expected="one in the outbox", got=f"number {pull.sequence}, not there"
        )
    spans = first_of(pull.spans, limits.answer_bytes)
    return Envelope(Shards(spans=spans), read_spans(submission, spans))
