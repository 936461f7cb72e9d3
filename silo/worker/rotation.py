"""Replaces this silo's signing key: the old key announces the new one, so that readers need not be asked.

A rotation is three steps on disk: the new key beside the old one, the record sealed by both, the new key in the old
one's place. One that was cut short is finished by the next call.
"""

from pathlib import Path

from ddm.errors import BusyError, DocumentError
from ddm.io.files import read_bounded, sync_folder, write_atomic
from ddm.io.locks import locked
from ddm.protocol.base import now_utc
from ddm.protocol.enrolment import MAX_ROTATION_BYTES, MAX_ROTATIONS, KeyRotation
from ddm.trust.key_rotation import open_rotation, seal_rotation
from ddm.trust.keys import SigningKey
from silo.config import Site
from silo.decisions import DecisionLog, KeyRotated
from silo.worker.life import IDLE
from silo.worker.state import load_state, state_path


def rotate_key(site: Site, key: SigningKey, passphrase: bytes) -> SigningKey:
    """Replace the signing key between two plans, and return the new one.

    Args:
        site: this silo's.
        key: the present signing key.
        passphrase: opens it; encrypts the new one.

    Raises:
        BusyError: a plan is in work, whose submission the present key must sign; or the worker is running.
    """
    with locked(site.private, "worker"):
        state = load_state(state_path(site.private))
        if state.state not in IDLE:
            expected, got = (
                "no plan in work, since its submission needs the present key",
                f"state {state.state}",
            )
            remedy = "Rotate the key after the receipt of this plan, or give the plan up first: silo withdraw."
            raise BusyError("key of the silo", expected=expected, got=got, remedy=remedy)
        following = site.private / "silo-next.key"
        if not following.exists():
            SigningKey.generate().save(following, passphrase)
        new = SigningKey.load(following, passphrase)
        records = rotations(site)
        if not records or open_rotation(records[-1]).new_key != str(new.public):
            rotation = KeyRotation(
                root_digest=site.settings().root_digest,
                silo_id=site.settings().silo_id,
                number=len(records) + 1,
                old_key=str(key.public),
                new_key=str(new.public),
                at=now_utc(),
            )
            write_atomic(
                _folder(site) / f"{rotation.number}.json", seal_rotation(rotation, key, new)
            )
        DecisionLog(site).add(KeyRotated(old=key.public.fingerprint, new=new.public.fingerprint))
        following.replace(site.key_path)
        sync_folder(site.private)
        return new


def rotations(site: Site) -> list[bytes]:
    """Read the sealed rotations of this silo's key, in order.

    Raises:
        DocumentError: one is missing or damaged.
    """
    found = sorted(
        int(path.stem) for path in _folder(site).glob("[1-9]*.json") if path.stem.isdigit()
    )
    if found != list(range(1, len(found) + 1)):
        remedy = "Restore private/rotations/ from backup."
        expected = "every rotation from the first on"
        raise DocumentError(
            "private/rotations", expected=expected, got=f"{len(found)} others", remedy=remedy
        )
    return [read_bounded(_folder(site) / f"{number}.json", MAX_ROTATION_BYTES) for number in found]


def published_rotations(site: Site) -> tuple[str, ...]:
    """Return the rotations that the aggregator is given: the newest, as many as it takes."""
    return tuple(data.decode() for data in rotations(site)[-MAX_ROTATIONS:])


def _folder(site: Site) -> Path:
    return site.private / "rotations"
