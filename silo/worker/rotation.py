"""Replaces this silo's signing key: the old key announces the new one in a record that both seal.

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
        BusyError: a plan is in progress, whose submission the present key must sign; or the worker is running.
    """
    with locked(site.private, "worker"):
        state = load_state(state_path(site.private))
        if state.state not in IDLE:
            raise BusyError(
                "key of the silo",
                expected="no plan in progress, since its submission needs the present key",
                got=f"state {state.state}",
                remedy=(
                    "Rotate the key after the receipt of this plan, or give the plan up first: `silo "
                    "withdraw SITE`."
                ),
            )
        # Kept under a name of its own until all is recorded: a second call continues with the same new key.
        new_key_path = site.private / "silo-next.key"
        if not new_key_path.exists():
            SigningKey.generate().save(new_key_path, passphrase)
        new_key = SigningKey.load(new_key_path, passphrase)
        _record_rotation(site, key, new_key)
        DecisionLog(site).add(
            KeyRotated(old=key.public.fingerprint, new=new_key.public.fingerprint)
        )
        # Last, since the record needs the old key: whatever is interrupted before this is done again with both.
        new_key_path.replace(site.key_path)
        sync_folder(site.private)
        return new_key


def _record_rotation(site: Site, old_key: SigningKey, new_key: SigningKey) -> None:
    """Write the record that both keys seal, unless an interrupted rotation wrote it already."""
    records = rotations(site)
    # A second record for the same key would break the chain: each begins with the key that the last one ends with.
    if records and open_rotation(records[-1]).new_key == str(new_key.public):
        return
    rotation = KeyRotation(
        root_digest=site.root_digest,
        silo_id=site.settings().silo_id,
        number=len(records) + 1,
        old_key=str(old_key.public),
        new_key=str(new_key.public),
        at=now_utc(),
    )
    path = _folder(site) / f"{rotation.number}.json"
    write_atomic(path, seal_rotation(rotation, old_key, new_key))


def rotations(site: Site) -> list[bytes]:
    """Read the sealed rotations of this silo's key, in order.

    Raises:
        DocumentError: one is missing or damaged.
    """
    numbers = sorted(
        int(path.stem) for path in _folder(site).glob("[1-9]*.json") if path.stem.isdigit()
    )
    if numbers != list(range(1, len(numbers) + 1)):
        raise DocumentError(
            "private/rotations",
            expected="every rotation from the first on",
            got=f"{len(numbers)} others",
            remedy="Restore private/rotations/ from backup.",
        )
    return [
        read_bounded(_folder(site) / f"{number}.json", MAX_ROTATION_BYTES) for number in numbers
    ]


def published_rotations(site: Site) -> tuple[str, ...]:
    """Return the newest rotations, as many as the aggregator accepts."""
    return tuple(data.decode() for data in rotations(site)[-MAX_ROTATIONS:])


def _folder(site: Site) -> Path:
    return site.private / "rotations"
