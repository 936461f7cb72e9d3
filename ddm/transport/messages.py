"""The messages between the aggregator and a silo's courier.

The aggregator sends requests, the courier replies; nothing else exists. Every message is short, can be repeated without
harm and names files by plan and relative path, never a silo: who replies is known from the node key. File contents
travel beside the document as one run of bytes, cut by `spans` in their order.

    Offer            the plan's bundle, or parts of it          ->  BundleProgress  what is still missing of it
    StatusQuery      how far is the worker, what is there       ->  StatusReport    status, newest submission's files
    Pull             send these byte ranges                     ->  Shards          the ranges
    ReceiptDelivery  a receipt for a submission, or a notice    ->  ReceiptStored   it is on disk
                     that a person will decide about it

`code` is 0 or an exit code of `ddm.errors`; a reply with a code carries nothing else.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import Field, TypeAdapter, model_validator

from ddm.protocol.base import Digest, Model, PlanId, RelativePath
from ddm.protocol.enrolment import SealedText

# Bounds on what the other side sends: each entry costs memory and a look at the disk.
MAX_BUNDLE_FILES = 256
MAX_SUBMISSION_FILES = 1024
MAX_SPANS = 1024
# Of one silo to one plan.
MAX_SUBMISSIONS = 20
# A reply may be held back for this long; the message's time to live grows by it (`aggregator.transfer.dispatcher`).
MAX_WAIT_S = 60

SiloState = Literal[
    "waiting",
    "plan_accepted",
    "plan_refused",
    "scanned",
    "assigned",
    "training",
    "auditing",
    "audited",
    "released",
    "awaiting_approval",
    "in_outbox",
    "accepted",
    "refused",
    "withdrawn",
    "superseded",
]
# Strict bounds, since sums of these numbers are used as sizes and offsets.
TransferBytes = Annotated[int, Field(ge=0, lt=2**50)]
Sequence = Annotated[int, Field(ge=1, le=1_000_000)]
Code = Annotated[int, Field(ge=0, le=255)]


class IndexEntry(Model):
    """One file of a bundle or a submission; bundles state the digest, submissions are signed inside."""

    path: RelativePath
    num_bytes: TransferBytes
    digest: Digest | None = None


class Span(Model):
    """A byte range of one file, not empty unless the file is."""

    path: RelativePath
    offset: TransferBytes
    num_bytes: TransferBytes


Spans = Annotated[tuple[Span, ...], Field(max_length=MAX_SPANS)]


class Status(Model):
    """What the worker reports in `outbox/status.json`.

    Attributes:
        state: the state of the work on the plan.
        progress: the progress of the training, in percent.
        sequence: counts submissions; 0 before the first.
        code: 0 while the work continues. Else a person at the silo must act first, and this is the exit code of the
            error that the worker ended with or waits on: the number, and nothing else of it.
    """

    state: SiloState = "waiting"
    progress: Annotated[int, Field(ge=0, le=100)] = 0
    sequence: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    code: Code = 0


class StatusFile(Status):
    """`outbox/status.json` as the worker writes it; without a plan before the first one was taken."""

    plan_id: PlanId | None


def truncate_spans(spans: Iterable[Span], max_bytes: int) -> tuple[Span, ...]:
    """Return the first bytes of a run of ranges: whole ranges while they fit, then the beginning of the next one."""
    first_spans: list[Span] = []
    for span in spans:
        num_bytes = min(span.num_bytes, max_bytes)
        if num_bytes == 0 and span.num_bytes > 0:
            break
        first_spans.append(Span(path=span.path, offset=span.offset, num_bytes=num_bytes))
        max_bytes -= num_bytes
    return tuple(first_spans)


def check_no_collisions(files: Iterable[IndexEntry]) -> None:
    """Refuse files that one folder cannot hold: two of one name, or a file where another one needs a folder.

    Names that differ in case only collide as well, since some file systems know no case: the second file would
    overwrite the first one there.

    Raises:
        ValueError: two of them collide.
    """
    names = [entry.path.casefold() for entry in files]
    # Every folder that some file is in, at any depth.
    folders = set()
    for name in names:
        parts = name.split("/")
        for depth in range(1, len(parts)):
            folders.add("/".join(parts[:depth]))
    if len(set(names)) != len(names) or folders & set(names):
        raise ValueError("paths collide")


class _MessageWithFiles(Model):
    @model_validator(mode="after")
    def _no_collisions(self) -> "_MessageWithFiles":
        check_no_collisions(getattr(self, "files", ()))
        return self


class Offer(_MessageWithFiles):
    """The plan's bundle: its whole index, and some of its bytes."""

    kind: Literal["offer"] = "offer"
    plan_id: PlanId
    files: Annotated[tuple[IndexEntry, ...], Field(min_length=1, max_length=MAX_BUNDLE_FILES)]
    spans: Spans = ()


class StatusQuery(Model):
    """Report how far the worker is: at once if it is further than `known` or `received`, else after `wait_s` seconds.

    A new submission's first bytes, at most `max_bytes` of them, come along with the reply. `named` says whether the
    plan names the silo: one that was enrolled after it was signed hears so, and need not look for a fault of its own.
    `carried_from` is the earlier plan from which the plan carries the silo's experts over. The silo signed for that
    one, so that its notice that it left names that plan.
    """

    kind: Literal["status_query"] = "status_query"
    plan_id: PlanId
    named: bool = True
    carried_from: PlanId | None = None
    known: Status
    max_bytes: TransferBytes
    received: Annotated[int, Field(ge=0, le=1_000_000)]
    wait_s: Annotated[int, Field(ge=0, le=MAX_WAIT_S)]


class Pull(Model):
    """Send these ranges of one submission."""

    kind: Literal["pull"] = "pull"
    plan_id: PlanId
    sequence: Sequence
    spans: Annotated[Spans, Field(min_length=1)]


class ReceiptDelivery(Model):
    """A receipt, carried as the data beside the document; its content is signed and opaque here.

    `held` marks the notice that a person at the aggregator will decide about the submission; its receipt is still to
    come.
    """

    kind: Literal["receipt_delivery"] = "receipt_delivery"
    plan_id: PlanId
    sequence: Sequence
    held: bool = False
    spans: Annotated[tuple[Span, ...], Field(max_length=0)] = ()


class BundleProgress(Model):
    """Whether the bundle is complete, else the ranges that the silo still lacks (the first of them)."""

    kind: Literal["bundle_progress"] = "bundle_progress"
    code: Code = 0
    complete: bool = False
    missing: Spans = ()


class StatusReport(_MessageWithFiles):
    """The worker's status and, once there is one, the newest submission without a receipt and its first ranges.

    `leave` is the silo's signed notice that it left the plan (`ddm.protocol.leave`), opaque here.
    """

    kind: Literal["status_report"] = "status_report"
    code: Code = 0
    status: Status = Status()
    sequence: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    files: Annotated[tuple[IndexEntry, ...], Field(max_length=MAX_SUBMISSION_FILES)] = ()
    spans: Spans = ()
    leave: SealedText | None = None


class Shards(Model):
    """The requested ranges, in that order, or the beginning of them: a silo may send less than is requested."""

    kind: Literal["shards"] = "shards"
    code: Code = 0
    spans: Spans = ()


class ReceiptStored(Model):
    """The receipt is on the silo's disk."""

    kind: Literal["receipt_stored"] = "receipt_stored"
    code: Code = 0


Request = Offer | StatusQuery | Pull | ReceiptDelivery
Reply = BundleProgress | StatusReport | Shards | ReceiptStored
REQUESTS: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="kind")])
REPLIES: TypeAdapter[Reply] = TypeAdapter(Annotated[Reply, Field(discriminator="kind")])
MessageT = TypeVar("MessageT", bound=Request | Reply, covariant=True)


@dataclass(frozen=True)
class Envelope(Generic[MessageT]):
    """A document and the bytes that travel beside it.

    Attributes:
        message: a request or a reply.
        data: the contents of `message.spans`, one after the other; for `ReceiptDelivery`, the receipt.
    """

    message: MessageT
    data: bytes = b""

    def pieces(self) -> list[memoryview]:
        """The data, cut by the message's spans; nothing is copied."""
        # A view, since a shard has up to 128 MiB.
        data = memoryview(self.data)
        pieces = []
        start = 0
        for span in getattr(self.message, "spans", ()):
            pieces.append(data[start : start + span.num_bytes])
            start += span.num_bytes
        return pieces
