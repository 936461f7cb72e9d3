"""Asks witnesses to cosign the log's last checkpoint, by HTTP as C2SP's `tlog-witness` defines it.

Only checkpoints that are in force are sent. A witness that cosigned one which was never committed would take the next
one for a second history, for ever.
"""

import http.client
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from ddm.errors import ArchipelagoError, SetupError, SplitViewError, TransportError
from ddm.fetching.hosts import FetchLimits, InterruptedTransfer
from ddm.fetching.web import Exchange
from ddm.publishing.folder import PublisherFolder
from ddm.publishing.log import TransparencyLog
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
        SetupError: the key is not a witness's.
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
class WitnessAnswer:
    """The answer of one witness.

    Attributes:
        name: the name of the witness.
        problem: why it did not cosign; None where it did.
    """

    name: str
    problem: ArchipelagoError | None = None


@dataclass(frozen=True)
class HttpAnswer:
    """The answer to one request.

    Attributes:
        status: the HTTP status.
        media_type: the type of the body.
        body: its bytes, at most one more than an answer may have.
    """

    status: int
    media_type: str
    body: bytes


def ask_witnesses(
    publisher: PublisherFolder, witnesses: Sequence[Witness], *, timeout_s: float = _TIMEOUT_S
) -> list[WitnessAnswer]:
    """Ask each witness to cosign the last checkpoint; add what they signed to it, and to the public log.

    Args:
        publisher: the publisher whose log it is; nobody may hold its signing lock here.
        witnesses: whom to ask.
        timeout_s: of each request.

    Raises:
        SetupError: the log is damaged, or was signed again meanwhile.
    """
    log = TransparencyLog.load(publisher)
    signed = log.signed
    if signed is None or not witnesses:
        return []
    # Entries after the checkpoint wait for the next one, and are not part of what is cosigned.
    leaves = log.leaves[: signed.size]
    answers = []
    for witness in witnesses:
        # One witness that is down must not keep the others from cosigning.
        try:
            signed = _request_cosignature(witness, leaves, signed, timeout_s)
        except ArchipelagoError as problem:
            answers.append(WitnessAnswer(witness.key.name, problem))
        else:
            answers.append(WitnessAnswer(witness.key.name))
    # Not held while witnesses are asked, so that a slow one keeps no other command waiting.
    with publisher.signing_lock():
        keep_cosignatures(publisher, signed)
    return answers


def _request_cosignature(
    witness: Witness, leaves: Sequence[bytes], signed: SignedCheckpoint, timeout_s: float
) -> SignedCheckpoint:
    """Return the checkpoint with the witness's cosignature."""
    subject = f"witness {witness.key.name}"
    # The size of the witness's last checkpoint is unknown at first; a witness that expected another one answers 409
    # with the right size, from which the next request proves that the log continues.
    old_size = 0
    for _ in range(_ATTEMPTS):
        request = encode_request(old_size, leaves, signed)
        answer = _post(witness, request, subject, timeout_s)
        if answer.status == http.client.OK:
            return add_cosignatures(signed, answer.body, witness.key, subject)
        if answer.status != http.client.CONFLICT:
            raise _refusal(answer.status, subject, signed)
        if old_size == signed.size or answer.media_type != SIZE_TYPE:
            raise _second_history(subject, signed)
        old_size = parse_size(answer.body, subject)
        if old_size > signed.size:
            raise SplitViewError(
                subject,
                expected=f"a last checkpoint of at most {signed.size} entries",
                got=f"one of {old_size}, cosigned before",
                remedy=_BACKUP,
            )
    raise TransportError(
        subject, expected="a cosignature", got=f"another last size at each of {_ATTEMPTS} requests"
    )


def _post(witness: Witness, body: bytes, subject: str, timeout_s: float) -> HttpAnswer:
    url = f"{witness.url.rstrip('/')}/add-checkpoint"
    headers = {"Content-Type": "text/plain", "Connection": "close"}
    # An answer is shorter than what must come in one window. So the witness has that time for all of it, and one that
    # sends single bytes keeps no other witness, and no command, waiting.
    limits = FetchLimits(window_s=timeout_s)
    answer_body = b""
    try:
        # Redirects are not followed: the operator named this address, and any other one could be anybody's.
        with Exchange(url, headers, limits, body) as exchange:
            for chunk in exchange.chunks():
                answer_body += chunk
                # One byte more than allowed shows that an answer is too long.
                if len(answer_body) > MAX_ANSWER_BYTES:
                    break
            response = exchange.response
            return HttpAnswer(response.status, response.headers.get_content_type(), answer_body)
    except (InterruptedTransfer, TransportError) as error:
        raise TransportError(
            subject,
            expected=f"an answer from {urlsplit(url).netloc}",
            got=error.got if isinstance(error, TransportError) else str(error),
            remedy="The release is published all the same. Ask again: `aggregator log FED`.",
        ) from error


def _refusal(status: int, subject: str, signed: SignedCheckpoint) -> ArchipelagoError:
    """Return the error that says what a status of `tlog-witness` means here."""
    origin = signed.checkpoint.origin
    match status:
        case http.client.NOT_FOUND:
            return SetupError(
                subject,
                expected="a witness of this log",
                got="404, a log that it does not know",
                remedy=f"Ask its operator to add the log {origin}, or correct the url in federation.toml.",
            )
        case http.client.FORBIDDEN:
            return SetupError(
                subject,
                expected="a witness that knows this log's key",
                got="403",
                remedy=f"Send its operator log_key of the newest root, the verifier key of {origin}.",
            )
        case http.client.UNPROCESSABLE_ENTITY:
            return _second_history(subject, signed)
    return TransportError(subject, expected="200, or 409 with a size", got=f"HTTP status {status}")


def _second_history(subject: str, signed: SignedCheckpoint) -> SplitViewError:
    return SplitViewError(
        subject,
        expected=f"a witness whose last checkpoint the log of {signed.size} entries continues",
        got="one that saw another history of this log",
        remedy=_BACKUP,
    )
