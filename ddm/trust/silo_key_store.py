"""The store of the silos' keys: a key that changes is refused until its silo announced it or the reader consented.

The holders of `targets` name each silo's key, so that they could put a key of their own in a silo's place. A reader who
saw the silo's key before notices. The rules, which `compare_silo_keys` follows, are

 * a silo that was never seen before is trusted on first use, and the reader is told;
 * a new key is accepted if rotations that the old key sealed lead to it (`ddm.trust.key_rotation`), or if the reader
   consented to exactly this key (``--accept-key``);
 * an earlier key is accepted for a release that was verified with it before, and is not remembered as the newest;
 * any other key is refused.

The store is one file for all plans of a federation, beside the versions seen (`ddm.trust.version_store`), and is
written only after complete verification.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ddm.errors import DocumentError, SignatureError, TrustError
from ddm.io.files import write_atomic
from ddm.io.untrusted import read_small
from ddm.protocol.base import Digest, Document, Model, SiloId
from ddm.protocol.enrolment import KeyRotation
from ddm.trust.keys import PublicKey, group_fingerprint
from ddm.trust.state_folder import locked_state_folder

KEYS_NAME = "silos.json"
MAX_KEYS_BYTES = 4 * 1024 * 1024
MAX_SILOS = 8192
MAX_EARLIER = 256


class _SiloKeyHistory(Model):
    """The fingerprint of a silo's key, and of the keys that it had before."""

    key: Digest
    earlier: Annotated[tuple[Digest, ...], Field(max_length=MAX_EARLIER)] = ()


class SiloKeyRecord(Document):
    """The keys of a federation's silos as last verified, and the silos of the release that was verified last."""

    format: Literal["archipelago/silo-keys/1"] = "archipelago/silo-keys/1"
    silos: Annotated[dict[SiloId, _SiloKeyHistory], Field(max_length=MAX_SILOS)] = {}
    latest: tuple[SiloId, ...] = ()


@dataclass(frozen=True)
class SiloKeyClaims:
    """What one release claims of its silos' keys.

    Attributes:
        keys: silo id to the fingerprint of the key that signed for it.
        rotations: silo id to its rotations, verified and in order.
        accepted: silo id to the fingerprint that the reader consented to.
        unchanged: silos whose signed list of files is, to the byte, the one verified before of the same plan.
    """

    keys: Mapping[str, str]
    rotations: Mapping[str, tuple[KeyRotation, ...]] = field(default_factory=dict)
    accepted: Mapping[str, str] = field(default_factory=dict)
    unchanged: Collection[str] = ()


def compare_silo_keys(
    record: SiloKeyRecord, claims: SiloKeyClaims
) -> tuple[SiloKeyRecord, tuple[str, ...]]:
    """Compare the keys of a release's silos with those remembered; a pure function.

    Returns:
        What to remember from now on, and notices for the reader.

    Raises:
        SignatureError: a silo's key is neither the one remembered, nor announced by it, nor consented to.
        TrustError: more silos than can be remembered.
    """
    silos = dict(record.silos)
    notices: list[str] = []
    for silo_id, key in sorted(claims.keys.items()):
        stored = record.silos.get(silo_id)
        if stored is None:
            # Trust on first use, as for a host key of SSH.
            _check_first_key(silo_id, key, claims.accepted.get(silo_id))
            silos[silo_id] = _SiloKeyHistory(key=key)
            if record.silos:
                notices.append(f"silo {silo_id} is new; its key is remembered from now on: {key}")
        elif key != stored.key:
            notice, is_newest = _judge_changed_key(silo_id, stored.key, key, claims)
            notices.append(notice)
            # A consent to a key that was replaced is for the old release alone: the newest key stays remembered.
            if is_newest and key not in stored.earlier:
                earlier = (*stored.earlier, stored.key)[-MAX_EARLIER:]
                silos[silo_id] = _SiloKeyHistory(key=key, earlier=earlier)
    # A federation could otherwise fill the reader's disk with new silos in each release.
    if len(silos) > MAX_SILOS:
        expected = f"at most {MAX_SILOS} in all releases of a federation"
        raise TrustError("silos", expected=expected, got=f"{len(silos)}")

    latest = tuple(sorted(claims.keys))
    notices += _membership_notices(record, latest)
    return SiloKeyRecord(silos=silos, latest=latest), tuple(notices)


def _check_first_key(silo_id: str, key: str, consented: str | None) -> None:
    """Refuse the first key of a silo where the reader named another one."""
    if consented not in (None, key):
        raise _key_changed_error(
            silo_id,
            str(consented),
            key,
            reason="as you accepted with --accept-key",
        )


def _judge_changed_key(
    silo_id: str,
    stored_key: str,
    key: str,
    claims: SiloKeyClaims,
) -> tuple[str, bool]:
    """Accept a key in place of the one remembered; return a notice, and whether it is the silo's newest key.

    Raises:
        SignatureError: nobody announced it or consented to it.
    """
    if _rotations_lead_to(stored_key, key, claims.rotations.get(silo_id, ())):
        notice = f"silo {silo_id} changed its key, as its old key announced; from now on: {key}"
        return notice, True
    if claims.accepted.get(silo_id) == key:
        notice = f"silo {silo_id} has another key than remembered, which you accepted: {key}"
        return notice, True
    if silo_id in claims.unchanged:
        notice = f"silo {silo_id} signed this with an earlier key, as you verified before: {key}"
        return notice, False
    # The attack: the holders of `targets` sign for the silo with a key of their own.
    raise _key_changed_error(
        silo_id,
        stored_key,
        key,
        reason="as remembered from a release that was verified before",
    )


def _rotations_lead_to(
    old_fingerprint: str,
    new_fingerprint: str,
    rotations: tuple[KeyRotation, ...],
) -> bool:
    """Whether rotations lead from one key to the other; they are a chain (`ddm.trust.key_rotation`)."""
    # The chain may begin before the remembered key: rotations from then on count.
    old_key_seen = False
    for rotation in rotations:
        if PublicKey.parse(rotation.old_key).fingerprint == old_fingerprint:
            old_key_seen = True
        if old_key_seen and PublicKey.parse(rotation.new_key).fingerprint == new_fingerprint:
            return True
    return False


def _membership_notices(record: SiloKeyRecord, latest: tuple[str, ...]) -> list[str]:
    """Describe which silos are gone since the release that was verified last, and which are back."""
    notices = [
        f"silo {silo_id} is not in this release; it was in the last one"
        for silo_id in record.latest
        if silo_id not in latest
    ]
    # Unusual, and for a person to judge: a silo may have withdrawn, and be published again against its will.
    notices += [
        f"silo {silo_id} is back; it was not in the last release"
        for silo_id in latest
        if silo_id in record.silos and silo_id not in record.latest
    ]
    return notices


def _key_changed_error(
    silo_id: str,
    stored_key: str,
    key: str,
    reason: str,
) -> SignatureError:
    return SignatureError(
        f"silo {silo_id}",
        expected=f"key {group_fingerprint(stored_key)}, {reason}",
        got=f"key {group_fingerprint(key)}, which its old key did not announce",
        remedy="Ask the silo itself, not the aggregator, for its fingerprint. If it is this one: "
        f"--accept-key {silo_id}={key}",
    )


@dataclass(frozen=True)
class SiloKeyStore:
    """The keys of one federation's silos, as this reader saw them.

    Attributes:
        folder: that of `ddm.trust.version_store.VersionStore`.
    """

    folder: Path

    def check(self, claims: SiloKeyClaims) -> None:
        """Refuse a changed key; remembers nothing yet.

        Raises:
            SignatureError: see `compare_silo_keys`.
            DocumentError: the store itself is damaged.
        """
        compare_silo_keys(self._load(), claims)

    def record(self, claims: SiloKeyClaims) -> tuple[str, ...]:
        """Remember the keys of a verified release, and return notices for the reader.

        Raises:
            SignatureError: another process has remembered another key meanwhile.
            SetupError: the folder cannot be written.
        """
        with locked_state_folder(self.folder, "a changed key cannot be noticed"):
            # Compared once more under the lock: another process may have recorded a key since `check`.
            before = self._load()
            after, notices = compare_silo_keys(before, claims)
            if after != before:
                write_atomic(self.folder / KEYS_NAME, after.encode())
            return notices

    def _load(self) -> SiloKeyRecord:
        path = self.folder / KEYS_NAME
        if not path.exists():
            return SiloKeyRecord()
        subject = f"state {path}"
        try:
            data = read_small(self.folder, KEYS_NAME, MAX_KEYS_BYTES, subject=subject)
            return SiloKeyRecord.parse(data, subject=subject, limit=MAX_KEYS_BYTES)
        except DocumentError as error:
            error.remedy = (
                "The memory is damaged. Delete this file only if you know the silos' keys from "
                "another source."
            )
            raise
