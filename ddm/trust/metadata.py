"""TUF metadata files: strict parsing, signature checks, and signing.

Canonical here means the compact form that python-tuf writes, with signatures in the order of their key ids. Together
with the rule that *every* signature in a file must verify, it makes any changed byte detectable, even in the unsigned
part.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar, cast

from securesystemslib.exceptions import UnverifiedSignatureError, VerificationError
from securesystemslib.signer import Key, Signature, SSlibKey
from tuf.api.exceptions import UnsignedMetadataError
from tuf.api.metadata import Metadata, Role, Root, Signed, Snapshot, Targets, Timestamp
from tuf.api.serialization import DeserializationError
from tuf.api.serialization.json import CanonicalJSONSerializer

from ddm.errors import DocumentError, ExpiredError, FormatError, SignatureError
from ddm.protocol.base import check_json
from ddm.trust.keys import PublicKey, SigningKey
from ddm.trust.schema import check_schema

T = TypeVar("T", Root, Timestamp, Snapshot, Targets)

# As in tuf.ngclient.UpdaterConfig, so that other TUF clients can read what passes here.
LIMITS = {"root": 512_000, "timestamp": 16_384, "snapshot": 2_000_000, "targets": 5_000_000}
TIMESTAMP_LIFE = timedelta(days=90)
METADATA_LIFE = timedelta(days=5 * 365)


def parse_metadata(
    data: bytes, kind: type[T], subject: str, *, limit: int | None = None
) -> Metadata[T]:
    """Parse one metadata file; its signatures are not checked yet.

    Args:
        data: the bytes as received.
        kind: the kind that it must be of.
        subject: the file, for errors.
        limit: most bytes accepted; python-tuf's own limit for the kind when None.

    Raises:
        DocumentError: too large, malformed, of another kind, or not in canonical form.
    """
    value = check_json(data, subject=subject, limit=limit or LIMITS[kind.type])
    check_schema(value, kind.type, subject)
    if json.dumps(value, sort_keys=True, separators=(",", ":")).encode() != data:
        raise DocumentError(
            subject,
            expected="canonical metadata bytes",
            got="another encoding of the same metadata",
        )
    keyids = [signature["keyid"] for signature in value["signatures"]]
    if keyids != sorted(set(keyids)):
        raise DocumentError(
            subject, expected="each key's signature once, sorted by key id", got="another order"
        )
    try:
        metadata = cast("Metadata[T]", Metadata.from_bytes(data))
    except DeserializationError as error:
        raise DocumentError(
            subject, expected=f"{kind.type} metadata", got=str(error.__cause__)[:120]
        ) from error
    _check_keyids(metadata.signed, subject)
    return metadata


def parse_payload(data: bytes, kind: type[T], subject: str) -> T:
    """Parse the part of a metadata file that is signed, before it has signatures.

    Raises:
        DocumentError: too large, malformed, of another kind, or not in canonical form.
    """
    value = check_json(data, subject=subject, limit=LIMITS[kind.type])
    check_schema(value, kind.type, subject, unsigned=True)
    try:
        signed = kind.from_dict(value)
    except (ValueError, KeyError) as error:
        raise DocumentError(
            subject, expected=f"{kind.type} metadata", got=str(error)[:120]
        ) from error
    if payload_of(signed) != data:
        raise DocumentError(
            subject, expected="canonical bytes", got="another encoding of the same metadata"
        )
    _check_keyids(signed, subject)
    return signed


def payload_of(signed: Signed) -> bytes:
    """Return the bytes that are signed."""
    return CanonicalJSONSerializer().serialize(signed)


def attach(signed: Signed, signatures: Mapping[PublicKey, bytes]) -> bytes:
    """Join metadata and signatures made elsewhere into a file that `parse_metadata` accepts."""
    made = {key.tuf_key().keyid: signature.hex() for key, signature in signatures.items()}
    listed = {keyid: Signature(keyid, made[keyid]) for keyid in sorted(made)}
    data = Metadata(cast("Any", signed), listed).to_bytes()
    parse_metadata(data, cast("Any", type(signed)), f"new {signed.type} metadata")
    return data


def check_signatures(
    metadata: Metadata[T], role: str, delegators: Sequence[Root | Targets], subject: str
) -> None:
    """Check that each delegator's threshold for `role` is met and that there are no other signatures.

    Args:
        metadata: the signed metadata.
        role: its name.
        delegators: the metadata that names the role's keys; for a new root the old one and the new one.
        subject: the file, for errors.

    Raises:
        SignatureError: too few signatures, an invalid one, or one by a key without the role.
    """
    payload = metadata.signed_bytes
    allowed: dict[str, Key] = {}
    for delegator in delegators:
        try:
            allowed |= {
                keyid: delegator.get_key(keyid)
                for keyid in delegator.get_delegated_role(role).keyids
            }
        except ValueError as error:
            got = f"{delegator.type} metadata without this role"
            raise SignatureError(subject, expected=f"a key for role {role}", got=got) from error
    for keyid, signature in metadata.signatures.items():
        if keyid not in allowed:
            expected = f"signatures by the keys of role {role}"
            raise SignatureError(
                subject, expected=expected, got=f"a signature by key id {keyid[:16]}"
            )
        try:
            allowed[keyid].verify_signature(signature, payload)
        except (UnverifiedSignatureError, VerificationError) as error:
            got = f"a signature by key id {keyid[:16]} that does not verify"
            raise SignatureError(subject, expected="valid signatures only", got=got) from error
    for delegator in delegators:
        try:
            delegator.verify_delegate(role, payload, metadata.signatures)
        except UnsignedMetadataError as error:
            raise SignatureError(
                subject, expected="enough signatures for its role", got=str(error)[:200]
            ) from error


def check_expiry(signed: Signed, now: datetime, subject: str) -> None:
    """Refuse metadata past its expiry.

    Raises:
        ExpiredError: at or after the expiry.
    """
    if signed.is_expired(now):
        raise ExpiredError(
            subject,
            expected=f"valid at {now:%Y-%m-%d %H:%M}Z",
            got=f"expired {signed.expires:%Y-%m-%d}",
        )


def sign_metadata(signed: T, keys: Sequence[SigningKey]) -> bytes:
    """Sign metadata with every key and return the canonical file, which `parse_metadata` accepts."""
    payload = payload_of(signed)
    return attach(signed, {key.public: key.sign(payload) for key in keys})


def expiry(now: datetime, life: timedelta) -> datetime:
    """Return `now + life` as TUF writes it: UTC, whole seconds.

    Raises:
        FormatError: `now` has no time zone.
    """
    if now.tzinfo is None:
        raise FormatError("time", expected="a datetime with a time zone", got="a naive datetime")
    return (now + life).astimezone(UTC).replace(microsecond=0)


def public_key(key: Key) -> PublicKey:
    """Convert a TUF key to a `PublicKey`."""
    return PublicKey(bytes.fromhex(key.keyval["public"]))


def _check_keyids(signed: Signed, subject: str) -> None:
    """Check that each key id is the key's digest, so that one key cannot count twice, and that each role's is there."""
    keys: dict[str, Key] = {}
    roles: Mapping[str, Role] = {}
    if isinstance(signed, Root):
        keys, roles = signed.keys, signed.roles
    elif isinstance(signed, Targets) and signed.delegations is not None:
        keys, roles = signed.delegations.keys, signed.delegations.roles or {}
    for keyid, key in keys.items():
        if not isinstance(key, SSlibKey) or public_key(key).tuf_key().keyid != keyid:
            raise DocumentError(
                subject,
                expected="key ids that are the keys' digests",
                got=f"key id {keyid[:16]}... of another key",
            )
    for name, role in roles.items():
        if absent := [keyid for keyid in role.keyids if keyid not in keys]:
            got = f"role {ascii(name[:80])} with key id {absent[0][:16]}..., whose key is absent"
            raise DocumentError(subject, expected="the key of every key id", got=got)
