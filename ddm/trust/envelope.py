"""Signed envelopes: a small document with the signature over it, for cards and receipts outside TUF.

The signature covers the kind of the document as well as its bytes, so that a document of one kind is never accepted as
one of another kind (domain separation). The payload is text and kept byte for byte: what was signed is what is parsed.
"""

import re
from typing import Annotated, Literal

import rfc8785
from pydantic import StringConstraints

from ddm.errors import DocumentError, SignatureError
from ddm.protocol.base import REWRITTEN_FILE_REMEDY, Document, KeyText, change_on_the_way
from ddm.trust.keys import PublicKey, SigningKey

_KIND = r"[a-z][a-z0-9-]{0,31}"


class _Envelope(Document):
    format: Literal["archipelago/envelope/1"] = "archipelago/envelope/1"
    kind: Annotated[str, StringConstraints(pattern=f"^{_KIND}$")]
    key: KeyText
    payload: str
    signature: Annotated[str, StringConstraints(pattern="^[0-9a-f]{128}$")]


def seal(payload: bytes, kind: str, key: SigningKey) -> bytes:
    """Sign `payload` as a document of this kind.

    Args:
        payload: UTF-8 text; kept byte for byte.
        kind: its kind, so that a card is never accepted as a receipt.
        key: the signer's.

    Returns:
        The envelope's canonical bytes.

    Raises:
        DocumentError: the payload is not UTF-8, or the kind is not valid.
    """
    try:
        text = payload.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"{kind} to sign",
            expected="UTF-8 text",
            got=f"an invalid byte at {error.start}",
        ) from error
    signature = key.sign(_signed_bytes(kind, payload)).hex()
    return _Envelope(kind=kind, key=str(key.public), payload=text, signature=signature).encode()


def open_sealed(
    data: bytes,
    kind: str,
    key: PublicKey | None,
    limit: int,
) -> tuple[bytes, PublicKey]:
    """Open an envelope after checking its signature; the payload has not been parsed yet.

    Args:
        data: the bytes as received.
        kind: the kind that it must be of.
        key: the key that must have signed it; None accepts the envelope's own key, which proves possession only.
        limit: most bytes accepted.

    Returns:
        The payload's bytes and the key that signed them.

    Raises:
        DocumentError: too large, malformed, not canonical, or of another kind.
        SignatureError: signed by another key, or not over these bytes.
    """
    envelope = _Envelope.parse(data, subject=kind, limit=limit)
    if envelope.kind != kind:
        raise DocumentError(
            kind,
            expected=f"a document of kind {kind}",
            got="the name of a different kind",
        )
    # JSON can hold a lone surrogate, which no UTF-8 text can.
    try:
        payload = envelope.payload.encode("utf-8")
        canonical = envelope.encode()
    except (UnicodeEncodeError, rfc8785.CanonicalizationError) as error:
        raise DocumentError(
            kind,
            expected="UTF-8 text",
            got="text with a lone surrogate",
        ) from error
    # One content has one encoding, so that the digest of an envelope identifies it.
    if canonical != data:
        raise DocumentError(
            kind,
            expected="canonical JSON (RFC 8785)",
            got=change_on_the_way(data) or "another encoding of the same values",
            remedy=REWRITTEN_FILE_REMEDY,
        )
    signer = PublicKey.parse(envelope.key)
    # The envelope names its key itself. Only a comparison with a key that the caller trusts makes this a proof.
    if key is not None and signer != key:
        raise SignatureError(kind, expected=f"key {key}", got=f"key {signer}")
    try:
        signer.verify(bytes.fromhex(envelope.signature), _signed_bytes(kind, payload))
    except SignatureError as error:
        raise SignatureError(
            kind,
            expected=f"a valid signature by {signer}",
            got="an invalid signature",
        ) from error
    return payload, signer


def _signed_bytes(kind: str, payload: bytes) -> bytes:
    """Encode (kind, payload) unambiguously, for domain separation: no kind contains a line break."""
    if not re.fullmatch(_KIND, kind):
        raise DocumentError(
            "envelope kind",
            expected="lowercase letters, digits and hyphens",
            got=repr(kind[:80]),
        )
    return b"archipelago/envelope/1\n" + kind.encode() + b"\n" + payload
