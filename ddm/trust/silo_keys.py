"""The memory of the silos' keys: a key that changes is refused until its silo announced it or the reader consented.

The holders of `targets` name each silo's key, so they could put a key of their own in a silo's place. A reader who saw
the silo's key before notices. The rule is a pure function, `judge`; the memory is one file for all plans of a
federation, beside the versions seen (`ddm.trust.state`), and is written only after complete verification.
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
from ddm.trust.remembering import remembering

KEYS_NAME = "silos.json"
MAX_KEYS_BYTES = 4 * 1024 * 1024
MAX_SILOS = 8192
MAX_EARLIER = 256


class _Silo(Model):
    """The fingerprint of a silo's key, and of the keys that it had before."""

    key: Digest
    earlier: Annotated[tuple[Digest, ...], Field(max_length=MAX_EARLIER)] = ()


class SiloKeys(Document):
    """The keys of a federation's silos as last verified, and the silos of the release that was verified last."""

    format: Literal["archipelago/silo-keys/1"] = "archipelago/silo-keys/1"
    silos: Annotated[dict[SiloId, _Silo], Field(max_length=MAX_SILOS)] = {}
    latest: tuple[SiloId, ...] = ()


@dataclass(frozen=True)
class Found:
    """What one release says of its silos' keys.

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


def judge(before: SiloKeys, found: Found) -> tuple[SiloKeys, tuple[str, ...]]:
    """Compare a release's silos with those remembered.

    Returns:
        What to remember from now on, and what the reader should be told.

    Raises:
        SignatureError: a silo's key is neither the one remembered, nor announced by it, nor consented to.
        TrustError: more silos than can be remembered.
    """
    silos, told = dict(before.silos), []
    for silo_id, key in sorted(found.keys.items()):
        known = silos.get(silo_id)
        consented = found.accepted.get(silo_id)
        if known is None:
            if consented not in (None, key):
                raise _changed(silo_id, str(consented), key, "as you accepted with --accept-key")
            silos[silo_id] = _Silo(key=key)
            if before.silos:
                told.append(f"silo {silo_id} is new; its key is remembered from now on: {key}")
            continue
        if key == known.key:
            continue
        if _announced(known.key, key, found.rotations.get(silo_id, ())):
            told.append(
                f"silo {silo_id} changed its key, as its old key announced; from now on: {key}"
            )
        elif consented == key:
            told.append(
                f"silo {silo_id} has another key than remembered, which you accepted: {key}"
            )
        elif silo_id in found.unchanged:
            told.append(
                f"silo {silo_id} signed this with an earlier key, as you verified before: {key}"
            )
            continue
        else:
            raise _changed(
                silo_id, known.key, key, "as remembered from a release that was verified before"
            )
        # a consent to a key that was replaced is for the old release alone
        if key not in known.earlier:
            silos[silo_id] = _Silo(key=key, earlier=(*known.earlier, known.key)[-MAX_EARLIER:])
    if len(silos) > MAX_SILOS:
        raise TrustError(
            "silos",
            expected=f"at most {MAX_SILOS} in all releases of a federation",
            got=f"{len(silos)}",
        )
    here = tuple(sorted(found.keys))
    told += [
        f"silo {silo_id} is not in this release; it was in the last one"
        for silo_id in _gone(before, here)
    ]
    told += [
        f"silo {silo_id} is back; it was not in the last release"
        for silo_id in here
        if before.silos and silo_id in before.silos and silo_id not in before.latest
    ]
    return SiloKeys(silos=silos, latest=here), tuple(told)


def _gone(before: SiloKeys, here: tuple[str, ...]) -> list[str]:
    return [silo_id for silo_id in before.latest if silo_id not in here]


def _announced(old: str, new: str, rotations: tuple[KeyRotation, ...]) -> bool:
    """Whether rotations lead from one fingerprint to the other; they are a chain (`ddm.trust.key_rotation`)."""
    pairs = [
        (PublicKey.parse(each.old_key).fingerprint, PublicKey.parse(each.new_key).fingerprint)
        for each in rotations
    ]
    starts = [index for index, (before, _) in enumerate(pairs) if before == old]
    return any(after == new for start in starts for _, after in pairs[start:])


def _changed(silo_id: str, known: str, key: str, why: str) -> SignatureError:
    return SignatureError(
        f"silo {silo_id}",
        expected=f"key {group_fingerprint(known)}, {why}",
        got=f"key {group_fingerprint(key)}, which its old key did not announce",
        remedy=f"Ask the silo itself, not the aggregator, for its fingerprint. If it is this one: "
        f"--accept-key {silo_id}={key}",
    )


@dataclass(frozen=True)
class KeyMemory:
    """The memory of one federation's silos.

    Attributes:
        folder: that of `ddm.trust.state.Memory`.
    """

    folder: Path

    def check(self, found: Found) -> None:
        """Refuse a changed key; remembers nothing yet.

        Raises:
            SignatureError: see `judge`.
            DocumentError: the memory itself is damaged.
        """
        judge(self._load(), found)

    def record(self, found: Found) -> tuple[str, ...]:
        """Remember the keys of a verified release, and return what the reader should be told.

        Raises:
            SignatureError: another process has remembered another key meanwhile.
            SetupError: the folder cannot be written.
        """
        with remembering(self.folder, "a changed key cannot be noticed"):
            before = self._load()
            after, told = judge(before, found)
            if after != before:
                write_atomic(self.folder / KEYS_NAME, after.encode())
            return told

    def _load(self) -> SiloKeys:
        path = self.folder / KEYS_NAME
        if not path.exists():
            return SiloKeys()
        subject = f"state {path}"
        try:
            data = read_small(self.folder, KEYS_NAME, MAX_KEYS_BYTES, subject=subject)
            return SiloKeys.parse(data, subject=subject, limit=MAX_KEYS_BYTES)
        except DocumentError as error:
            error.remedy = "The memory is damaged. Delete this file only if you know the silos' keys otherwise."
            raise
