"""The entries of a federation's log: what is recorded, each in one canonical line of JSON.

An entry has no time and no random part. An entry that repeats the last one on the same key, silo, plan or version is
therefore the same bytes, and is not added a second time.
"""

from collections.abc import Iterable
from typing import Annotated, Literal

import rfc8785
from pydantic import Field, TypeAdapter, ValidationError

from ddm.errors import DocumentError, TrustError
from ddm.protocol.base import Digest, Model, PlanId, PositiveInt, ShortText, SiloId, check_json

MAX_ENTRY_BYTES = 8192  # an entry bundle of C2SP has room for 65,535
# A reader checks the whole log in memory.
MAX_ENTRIES = 65_536

LoggedKey = Literal[
    "root", "targets", "plans", "release", "online", "receipts", "log", "model-signing", "tls"
]


class FederationOpened(Model):
    """The federation was opened: its name, and the sha256 of its 1.root.json."""

    kind: Literal["opened"] = "opened"
    federation: ShortText
    root_digest: Digest


class KeyChanged(Model):
    """A key of the federation is in force from here on: whose fingerprints, and how many of them must sign."""

    kind: Literal["key"] = "key"
    key: LoggedKey
    fingerprints: Annotated[tuple[Digest, ...], Field(min_length=1, max_length=64)]
    threshold: PositiveInt = 1


class SiloEnrolled(Model):
    """A silo was enrolled with this key."""

    kind: Literal["silo_enrolled"] = "silo_enrolled"
    silo_id: SiloId
    key_fingerprint: Digest


class SiloRemoved(Model):
    """A silo was removed from the federation, and this key with it."""

    kind: Literal["silo_removed"] = "silo_removed"
    silo_id: SiloId
    key_fingerprint: Digest


class SiloKeyChanged(Model):
    """A silo has another key in place of its old one."""

    kind: Literal["silo_rotated"] = "silo_rotated"
    silo_id: SiloId
    old_fingerprint: Digest
    key_fingerprint: Digest


class PlanSigned(Model):
    """A plan was signed: the sha256 of its plan.json."""

    kind: Literal["plan"] = "plan"
    plan_id: PlanId
    plan_digest: Digest


class SiloWithdrawn(Model):
    """A silo was withdrawn from a plan, with the submission that it had sent, if any."""

    kind: Literal["withdrawn"] = "withdrawn"
    plan_id: PlanId
    silo_id: SiloId
    submission_digest: Digest | None


class VersionPublished(Model):
    """A version was published: the sha256 of its manifest.json, and that of the manifest before."""

    kind: Literal["release"] = "release"
    plan_id: PlanId
    version: PositiveInt
    manifest_digest: Digest
    supersedes_digest: Digest | None


# The kind decides the class, so that a line is read as exactly one of them.
LogEntry = Annotated[
    FederationOpened
    | KeyChanged
    | SiloEnrolled
    | SiloRemoved
    | SiloKeyChanged
    | PlanSigned
    | SiloWithdrawn
    | VersionPublished,
    Field(discriminator="kind"),
]
_ENTRY: TypeAdapter[LogEntry] = TypeAdapter(LogEntry)


def encode_entry(entry: LogEntry) -> bytes:
    """Return the canonical line, without a newline: the leaf of the tree."""
    return rfc8785.dumps(entry.model_dump(mode="json"))


def parse_entry(data: bytes, subject: str) -> LogEntry:
    """Parse a line of the log.

    Raises:
        DocumentError: too long, not JSON, of no known kind, or not in canonical form.
    """
    check_json(data, subject=subject, limit=MAX_ENTRY_BYTES)
    # The text of the library's error is not repeated: it quotes what was received.
    try:
        entry = _ENTRY.validate_json(data)
    except ValidationError as error:
        got = f"{error.error_count()} fields that do not fit"
        raise DocumentError(subject, expected="an entry of a federation's log", got=got) from error
    # The leaf is a hash of these bytes: with two encodings of one entry, two logs of the same content would differ.
    if encode_entry(entry) != data:
        raise DocumentError(
            subject,
            expected="canonical bytes",
            got="another encoding of the same entry",
        )
    return entry


def entry_subject(entry: LogEntry) -> tuple[object, ...]:
    """Return what an entry is about; an entry equal to the last one on its subject adds nothing to the log."""
    match entry:
        case KeyChanged():
            return ("key", entry.key)
        case SiloEnrolled() | SiloRemoved() | SiloKeyChanged():
            return ("silo", entry.silo_id)
        case PlanSigned():
            return ("plan", entry.plan_id)
        case SiloWithdrawn():
            return ("withdrawn", entry.plan_id, entry.silo_id)
        case VersionPublished():
            return ("release", entry.version)
        case FederationOpened():
            return ("opened",)


def check_history(entries: Iterable[LogEntry]) -> None:
    """Check that the versions in a log follow each other: each number once, and each manifest after the one before.

    Raises:
        TrustError: a version was published twice, left out, or does not continue the one before.
    """
    next_version = 1
    last_digest = None
    for entry in entries:
        if not isinstance(entry, VersionPublished):
            continue
        # The attack: a version is published a second time with other content, or withdrawn as if it had never been.
        if (entry.version, entry.supersedes_digest) != (next_version, last_digest):
            last_text = f"{last_digest[:16]}..." if last_digest else "no version"
            raise TrustError(
                "releases in the log",
                expected=f"version {next_version} after {last_text}",
                got=f"version {entry.version} after {(entry.supersedes_digest or 'no version')[:16]}",
                remedy="The log contains a rewritten or a missing version. "
                "Show it to the operator and to other readers.",
            )
        next_version = entry.version + 1
        last_digest = entry.manifest_digest
