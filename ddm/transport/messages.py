"""The messages between the aggregator and a silo's courier.

The aggregator asks, the courier answers; nothing else exists. Every message is short, can be repeated without harm and
names files by plan and relative path, never a silo: who answers is known from the node key. File contents travel
beside the document as one run of bytes, cut by `spans` in their order.

    Offer    here is the plan's bundle          ->  Held        what is still missing of it
    Ask      how far are you, what is there     ->  Report      status and the newest submission's files
    Pull     these byte ranges, please          ->  Shards      the ranges
    Deliver  a receipt for your submission,     ->  Delivered   it is on disk
             or word that a person looks at it

`code` is 0 or an exit code of `ddm.errors`; a reply with a code carries nothing else.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import Field, TypeAdapter, model_validator

from ddm.protocol.base import Digest, Model, PlanId, RelativePath
from ddm.protocol.enrolment import SealedText

MAX_BUNDLE_FILES = 256
MAX_SUBMISSION_FILES = 1024
MAX_SPANS = 1024
MAX_SUBMISSIONS = 20  # of one silo to one plan
MAX_RECEIPT_BYTES = 1024 * 1024
MAX_WAIT_S = 60

SiloState = Literal[
    "waiting",
    "plan_accepted",
    "plan_refused",
    "scanned",
    "assigned",
    "training",
    "audited",
    "released",
    "awaiting_approval",
    "in_outbox",
    "accepted",
    "refused",
    "withdrawn",
    "superseded",
]
NumBytes = Annotated[int, Field(ge=0, lt=2**50)]
Sequence = Annotated[int, Field(ge=1, le=1_000_000)]
Code = Annotated[int, Field(ge=0, le=255)]


class FileEntry(Model):
    """One file of a bundle or a submission; bundles state the digest, submissions are signed inside."""

    path: RelativePath
    num_bytes: NumBytes
    digest: Digest | None = None


class Span(Model):
    """A byte range of one file, not empty unless the file is."""

    path: RelativePath
    offset: NumBytes
    num_bytes: NumBytes


Spans = Annotated[tuple[Span, ...], Field(max_length=MAX_SPANS)]


class Status(Model):
    """What the worker reports in `outbox/status.json`; `sequence` counts submissions, 0 before the first."""

    state: SiloState = "waiting"
    progress: Annotated[int, Field(ge=0, le=100)] = 0
    sequence: Annotated[int, Field(ge=0, le=1_000_000)] = 0


class StatusFile(Status):
    """`outbox/status.json` as the worker writes it."""

    plan_id: PlanId


def first_of(spans: Iterable[Span], max_bytes: int) -> tuple[Span, ...]:
    """Return the first bytes of a run of ranges: whole ranges while they fit, then the beginning of the next one."""
    found: list[Span] = []
    for span in spans:
        length = min(span.num_bytes, max_bytes)
        if length == 0 and span.num_bytes > 0:
            break
        found.append(Span(path=span.path, offset=span.offset, num_bytes=length))
        max_bytes -= length
    return tuple(found)


def check_index(files: Iterable[FileEntry]) -> None:
    """Refuse two files that one folder cannot hold: equal names, some systems know no case, or a file and a folder.

    Raises:
        ValueError: two of them collide.
    """
    names = [entry.path.casefold() for entry in files]
    folders = {
        "/".join(name.split("/")[:depth])
        for name in names
        for depth in range(1, name.count("/") + 1)
    }
    if len(set(names)) != len(names) or folders & set(names):
        raise ValueError("paths collide")


class _Indexed(Model):
    @model_validator(mode="after")
    def _no_collisions(self) -> "_Indexed":
        check_index(getattr(self, "files", ()))
        return self


class Offer(_Indexed):
    """The plan's bundle: its whole index, and some of its bytes."""

    kind: Literal["offer"] = "offer"
    plan_id: PlanId
    files: Annotated[tuple[FileEntry, ...], Field(min_length=1, max_length=MAX_BUNDLE_FILES)]
    spans: Spans = ()


class Ask(Model):
    """Tell how far the worker is: answered when there is news beyond `known` and `received`, or after `wait_s` seconds.

    A new submission's first bytes, at most `max_bytes` of them, come along with the answer.
    """

    kind: Literal["ask"] = "ask"
    plan_id: PlanId
    known: Status
    max_bytes: NumBytes
    received: Annotated[int, Field(ge=0, le=1_000_000)]
    wait_s: Annotated[int, Field(ge=0, le=MAX_WAIT_S)]


class Pull(Model):
    """Send these ranges of one submission."""

    kind: Literal["pull"] = "pull"
    plan_id: PlanId
    sequence: Sequence
    spans: Annotated[Spans, Field(min_length=1)]


class Deliver(Model):
    """A receipt, carried as the data beside the document; its content is signed and opaque here.

    `held` marks word that the submission waits for a person at the aggregator; its receipt is still to come.
    """

    kind: Literal["deliver"] = "deliver"
    plan_id: PlanId
    sequence: Sequence
    held: bool = False
    spans: Annotated[tuple[Span, ...], Field(max_length=0)] = ()


class Held(Model):
    """Whether the bundle is complete, else the ranges that the silo still lacks (the first of them)."""

    kind: Literal["held"] = "held"
    code: Code = 0
    complete: bool = False
    missing: Spans = ()


class Report(_Indexed):
    """The worker's status and, once there is one, the newest submission without a receipt and its first ranges.

    `leave` is the silo's signed word that it gave the plan up (`ddm.protocol.leave`), opaque here.
    """

    kind: Literal["report"] = "report"
    code: Code = 0
    status: Status = Status()
    sequence: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    files: Annotated[tuple[FileEntry, ...], Field(max_length=MAX_SUBMISSION_FILES)] = ()
    spans: Spans = ()
    leave: SealedText | None = None


class Shards(Model):
    """The ranges asked for, in that order, or the beginning of them: a silo may give less than it is asked for."""

    kind: Literal["shards"] = "shards"
    code: Code = 0
    spans: Spans = ()


class Delivered(Model):
    """The receipt is on the silo's disk."""

    kind: Literal["delivered"] = "delivered"
    code: Code = 0


Request = Offer | Ask | Pull | Deliver
Reply = Held | Report | Shards | Delivered
REQUESTS: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="kind")])
REPLIES: TypeAdapter[Reply] = TypeAdapter(Annotated[Reply, Field(discriminator="kind")])
MessageT = TypeVar("MessageT", bound=Request | Reply, covariant=True)


@dataclass(frozen=True)
class Envelope(Generic[MessageT]):
    """A document and the bytes that travel beside it.

    Attributes:
        message: a request or a reply.
        data: the contents of `message.spans`, one after the other; for `Deliver`, the receipt.
    """

    message: MessageT
    data: bytes = b""

    def pieces(self) -> list[memoryview]:
        """The data, cut by the message's spans; nothing is copied."""
        cut, start, data = [], 0, memoryview(self.data)
        for span in getattr(self.message, "spans", ()):
            cut.append(data[start : start + span.num_bytes])
            start += span.num_bytes
        return cut
