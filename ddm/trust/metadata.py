"""TUF metadata files: strict parsing, signature checks, and signing.

A TUF file has a signed part and the signatures over it. TUF ignores what it does not know, so that bytes of a file can
change and its signatures still verify. Stricter here are

 * the encoding: the compact form that python-tuf writes, with signatures in the order of their key ids;
 * the signatures: *every* one must verify, be by a key of the role, and be there once;
 * the key ids: each is the digest of its key, so that one key under two ids cannot count twice towards a threshold.

Together they make any changed byte detectable, also in the part that is not signed.
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
from ddm.protocol.base import REWRITTEN_FILE_REMEDY, change_on_the_way, check_json
from ddm.trust.keys import PublicKey, SigningKey
from ddm.trust.schema import check_schema

T = TypeVar("T", Root, Timestamp, Snapshot, Targets)

# As in tuf.ngclient.UpdaterConfig, so that other TUF clients can read what passes here.
LIMITS = {"root": 512_000, "timestamp": 16_384, "snapshot": 2_000_000, "targets": 5_000_000}
# A timestamp's life bounds how long a freeze attack can last, and how often an idle federation has to sign.
TIMESTAMP_LIFE = timedelta(days=90)
METADATA_LIFE = timedelta(days=5 * 365)


def parse_metadata(
    data: bytes,
    kind: type[T],
    subject: str,
    *,
    limit: int | None = None,
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
    # Bounds and schema before python-tuf sees the data: it keeps unknown fields and accepts any hash and key type.
    value = check_json(data, subject=subject, limit=limit or LIMITS[kind.type])
    check_schema(value, kind.type, subject)
    if json.dumps(value, sort_keys=True, separators=(",", ":")).encode() != data:
        raise DocumentError(
            subject,
            expected="canonical metadata bytes",
            got=change_on_the_way(data) or "another encoding of the same metadata",
            remedy=REWRITTEN_FILE_REMEDY,
        )
    # One key's signature twice could count twice towards a threshold.
    keyids = [signature["keyid"] for signature in value["signatures"]]
    if keyids != sorted(set(keyids)):
        raise DocumentError(
            subject,
            expected="each key's signature once, sorted by key id",
            got="another order",
        )
    try:
        metadata = cast("Metadata[T]", Metadata.from_bytes(data))
    except DeserializationError as error:
        raise DocumentError(
            subject,
            expected=f"{kind.type} metadata",
            got=str(error.__cause__)[:120],
        ) from error
    _check_keyids(metadata.signed, subject)
    return metadata


def parse_payload(data: bytes, kind: type[T], subject: str) -> T:
    """Parse the part of a metadata file that is signed, before it has signatures.

    Raises:
        DocumentError: too large, malformed, of another kind, or not in canonical form.
    """
    # As strict as for a signed file: a holder must not sign what readers would refuse, or read in another way.
    value = check_json(data, subject=subject, limit=LIMITS[kind.type])
    check_schema(value, kind.type, subject, unsigned=True)
    try:
        signed = kind.from_dict(value)
    except (ValueError, KeyError) as error:
        raise DocumentError(
            subject,
            expected=f"{kind.type} metadata",
            got=str(error)[:120],
        ) from error
    if payload_of(signed) != data:
        raise DocumentError(
            subject,
            expected="canonical bytes",
            got=change_on_the_way(data) or "another encoding of the same metadata",
            remedy=REWRITTEN_FILE_REMEDY,
        )
    _check_keyids(signed, subject)
    return signed


def payload_of(signed: Signed) -> bytes:
    """Return the bytes that are signed."""
    return CanonicalJSONSerializer().serialize(signed)


def attach(signed: Signed, signatures: Mapping[PublicKey, bytes]) -> bytes:
    """Join metadata and signatures made elsewhere into a file that `parse_metadata` accepts."""
    signature_of = {key.tuf_key().keyid: signature.hex() for key, signature in signatures.items()}
    sorted_signatures = {
        keyid: Signature(keyid, signature_of[keyid]) for keyid in sorted(signature_of)
    }
    data = Metadata(cast("Any", signed), sorted_signatures).to_bytes()
    # A file that readers would refuse is an error here, where it can still be corrected.
    parse_metadata(data, cast("Any", type(signed)), f"new {signed.type} metadata")
    return data


def check_signatures(
    metadata: Metadata[T],
    role: str,
    delegators: Sequence[Root | Targets],
    subject: str,
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
    role_keys = _keys_of_role(role, delegators, subject)

    # TUF skips signatures that it does not need. Here each must be by a key of the role and verify, or the signatures,
    # which nothing signs, could be changed and more of them added without anybody noticing.
    for keyid, signature in metadata.signatures.items():
        if keyid not in role_keys:
            raise SignatureError(
                subject,
                expected=f"signatures by the keys of role {role}",
                got=f"a signature by key id {keyid[:16]}",
            )
        try:
            role_keys[keyid].verify_signature(signature, payload)
        except (UnverifiedSignatureError, VerificationError) as error:
            raise SignatureError(
                subject,
                expected="valid signatures only",
                got=f"a signature by key id {keyid[:16]} that does not verify",
            ) from error

    # The thresholds, by python-tuf: each delegator's on its own, since a new root needs old and new holders.
    for delegator in delegators:
        try:
            delegator.verify_delegate(role, payload, metadata.signatures)
        except UnsignedMetadataError as error:
            raise SignatureError(
                subject,
                expected="enough signatures for its role",
                got=str(error)[:200],
            ) from error


def _keys_of_role(role: str, delegators: Sequence[Root | Targets], subject: str) -> dict[str, Key]:
    """Return the keys that may sign for a role, by key id."""
    keys: dict[str, Key] = {}
    for delegator in delegators:
        try:
            for keyid in delegator.get_delegated_role(role).keyids:
                keys[keyid] = delegator.get_key(keyid)
        except ValueError as error:
            raise SignatureError(
                subject,
                expected=f"a key for role {role}",
                got=f"{delegator.type} metadata without this role",
            ) from error
    return keys


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
    # A naive time would be read as local time, and metadata could expire hours early.
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
        keys = signed.keys
        roles = signed.roles
    elif isinstance(signed, Targets) and signed.delegations is not None:
        keys = signed.delegations.keys
        roles = signed.delegations.roles or {}
    for keyid, key in keys.items():
        if not isinstance(key, SSlibKey) or public_key(key).tuf_key().keyid != keyid:
            raise DocumentError(
                subject,
                expected="key ids that are the keys' digests",
                got=f"key id {keyid[:16]}... of another key",
            )
    for name, role in roles.items():
        for keyid in role.keyids:
            if keyid not in keys:
                raise DocumentError(
                    subject,
                    expected="the key of every key id",
                    got=f"role {ascii(name[:80])} with key id {keyid[:16]}..., whose key is absent",
                )
