"""Asks witnesses to cosign the log's last checkpoint, by HTTP as C2SP's `tlog-witness` defines it.

They are asked about checkpoints that are in force only. A witness that saw one which was never committed would hold the
next one for a second history, for ever.
"""

import http.client
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from ddm.errors import ArchipelagoError, SetupError, SplitViewError, TransportError
from ddm.publishing.home import Home
from ddm.publishing.journal import Journal
from ddm.publishing.public_log import keep_cosignatures
from ddm.trust.log.checkpoint import SignedCheckpoint
from ddm.trust.log.note import COSIGNATURE, VerifierKey
from ddm.trust.log.witness import (
    MAX_ANSWER_BYTES,
    SIZE_TYPE,
    add_cosignatures,
    encode_request,
    parse_size,
)

_TIMEOUT_S = 20.0
_ATTEMPTS = 3  # it may cosign another checkpoint of this log between two requests
_BACKUP = (
    "This folder may have been restored from an old backup: restore the newest one, and publish nothing before. If "
    "not, somebody else signs with keys/log.key."
)


@dataclass(frozen=True)
class Witness:
    """A witness of the log.

    Attributes:
        url: the prefix to which `/add-checkpoint` is appended.
        key: its verifier key.

    Raises:
        SetupError: the key is not one of a witness.
    """

    url: str
    key: VerifierKey

    def __post_init__(self) -> None:
        if self.key.kind != COSIGNATURE:
            raise SetupError(
                f"key of {self.key.name}",
                expected="a witness's key, which cosigns",
                got="a log's key",
            )


@dataclass(frozen=True)
class Asked:
    """What came of asking one witness.

    Attributes:
        name: of the witness.
        problem: why it did not cosign; None where it did.
    """

    name: str
    problem: ArchipelagoError | None = None


def ask_witnesses(
    home: Home, witnesses: Sequence[Witness], *, timeout_s: float = _TIMEOUT_S
) -> list[Asked]:
    """Ask each witness to cosign the last checkpoint; add what they signed to it, and to the public log.

    Args:
        home: whose log it is; nobody may hold its signing lock here.
        witnesses: whom to ask.
        timeout_s: of each request.

    Raises:
        SetupError: the log is damaged, or was signed again meanwhile.
    """
    journal, asked = Journal.load(home), list[Asked]()
    signed = journal.signed
    if signed is None or not witnesses:
        return asked
    leaves = journal.leaves[: signed.size]
    for witness in witnesses:
        name = witness.key.name
        try:
            signed = _ask(witness, leaves, signed, timeout_s)
        except ArchipelagoError as problem:
            asked.append(Asked(name, problem))
        else:
            asked.append(Asked(name))
    with home.signing_lock():
        keep_cosignatures(home, signed)
    return asked


def _ask(
    witness: Witness, leaves: Sequence[bytes], signed: SignedCheckpoint, timeout_s: float
) -> SignedCheckpoint:
    """Return the checkpoint with the witness's cosignature."""
    subject, old_size = f"witness {witness.key.name}", 0
    for _ in range(_ATTEMPTS):
        status, kind, body = _post(
            witness, encode_request(old_size, leaves, signed), subject, timeout_s
        )
        if status == http.client.OK:
            return add_cosignatures(signed, body, witness.key, subject)
        if status != http.client.CONFLICT:
            raise _refusal(status, subject, signed)
        if old_size == signed.size or kind != SIZE_TYPE:
            raise _second_history(subject, signed)
        old_size = parse_size(body, subject)
        if old_size > signed.size:
            expected = f"a last checkpoint of at most {signed.size} entries"
            raise SplitViewError(
                subject,
                expected=expected,
                got=f"one of {old_size}, cosigned before",
                remedy=_BACKUP,
            )
    raise TransportError(
        subject, expected="a cosignature", got=f"another last size at each of {_ATTEMPTS} requests"
    )


def _post(witness: Witness, body: bytes, subject: str, timeout_s: float) -> tuple[int, str, bytes]:
    """Return status, media type and body of the answer."""
    request = urllib.request.Request(
        f"{witness.url.rstrip('/')}/add-checkpoint",
        body,
        {"Content-Type": "text/plain"},
        method="POST",
    )
    try:
        try:
            answer = urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout_s)
        except urllib.error.HTTPError as refused:
            answer = refused
        with answer:
            return (
                answer.status,
                answer.headers.get_content_type(),
                answer.read(MAX_ANSWER_BYTES + 1),
            )
    except (OSError, http.client.HTTPException, ValueError) as error:
        host = urlsplit(witness.url).netloc
        reason = str(getattr(error, "reason", None) or error or type(error).__name__)[:200]
        remedy = "The release is published all the same. Ask again: aggregator log."
        raise TransportError(
            subject, expected=f"an answer from {host}", got=reason, remedy=remedy
        ) from error


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A checkpoint goes where the operator said."""

    def redirect_request(self, *_: object) -> None:
        return None


def _refusal(status: int, subject: str, signed: SignedCheckpoint) -> ArchipelagoError:
    origin = signed.checkpoint.origin
    if status == http.client.NOT_FOUND:
        remedy = f"Ask its operator to add the log {origin}, or correct the url in federation.toml."
        return SetupError(
            subject,
            expected="a witness of this log",
            got="404, a log that it does not know",
            remedy=remedy,
        )
    if status == http.client.FORBIDDEN:
        remedy = f"Send its operator log_key of the newest root, the verifier key of {origin}."
        return SetupError(
            subject, expected="a witness that knows this log's key", got="403", remedy=remedy
        )
    if status == http.client.UNPROCESSABLE_ENTITY:
        return _second_history(subject, signed)
    return TransportError(subject, expected="200, or 409 with a size", got=f"HTTP status {status}")


def _second_history(subject: str, signed: SignedCheckpoint) -> SplitViewError:
    expected = f"a witness whose last checkpoint the log of {signed.size} entries continues"
    return SplitViewError(
        subject, expected=expected, got="one that saw another history of this log", remedy=_BACKUP
    )
