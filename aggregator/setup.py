"""How a federation begins: folders, keys, TLS, the TUF repository, the invitation."""

import shutil

from aggregator.config import KEY_NAMES, Federation, FederationSettings
from aggregator.tls import make_tls
from ddm.errors import BusyError
from ddm.files import write_atomic
from ddm.protocol.base import now_utc, sha256_hex
from ddm.protocol.enrolment import Invitation
from ddm.settings import save_settings
from ddm.trust.keys import SigningKey
from ddm.trust.repository import Repository

HEADING = "This federation: its name, the address that silos reach, the size of a transfer's shards."


def init_federation(federation: Federation, settings: FederationSettings, passphrase: bytes) -> Invitation:
    """Make a federation's folder.

    Args:
        federation: a folder that is none yet.
        settings: written as federation.toml.
        passphrase: encrypts every private key.

    Returns:
        The invitation for silos; also written as invitation.json.

    Raises:
        BusyError: the folder is a federation already.
    """
    if (federation.path / "federation.toml").exists() or federation.keys.exists():
        raise BusyError(
            str(federation.path),
            expected="a folder that is no federation yet",
            got="one with keys",
            remedy="Choose another folder; keys are never overwritten.",
        )
    # Built aside, so that an init that is cut short leaves no half of a federation behind.
    part = Federation(federation.path / ".part")
    shutil.rmtree(part.path, ignore_errors=True)
    invitation = _build(part, settings, passphrase)
    for entry in sorted(part.path.iterdir(), key=lambda entry: entry.name == "federation.toml"):
        entry.rename(federation.path / entry.name)
    part.path.rmdir()
    return invitation


def _build(federation: Federation, settings: FederationSettings, passphrase: bytes) -> Invitation:
    for folder in (federation.registry, federation.incoming, federation.accepted, federation.receipts):
        folder.mkdir(parents=True)
    federation.keys.mkdir(mode=0o700)
    keys = {name: SigningKey.generate() for name in KEY_NAMES}
    for name, key in keys.items():
        key.save(federation.keys / f"{name}.key", passphrase)
        write_atomic(federation.keys / f"{name}.pub", f"{key.public}\n".encode())
    make_tls(federation.path / "tls", [settings.host], passphrase=passphrase)
    Repository.create(
        federation.tuf,
        root=[keys["root"]],
        root_threshold=1,
        targets=[keys["targets"]],
        targets_threshold=1,
        online=keys["online"],
        plans=keys["plans"],
        release=keys["release"],
        now=now_utc(),
    )
    invitation = _invitation(federation, settings)
    write_atomic(federation.path / "invitation.json", invitation.encode())
    save_settings(settings, federation.path / "federation.toml", HEADING)
    return invitation


def _invitation(federation: Federation, settings: FederationSettings) -> Invitation:
    root = (federation.tuf / "1.root.json").read_bytes()
    return Invitation(
        federation=settings.name,
        address=f"{settings.host}:{settings.port}",
        ca_certificate=(federation.path / "tls" / "ca.pem").read_text("ascii"),
        root=root.decode("utf-8"),
        root_digest=sha256_hex(root),
    )


def load_key(federation: Federation, name: str, passphrase: bytes) -> SigningKey:
    """Open one of the federation's keys.

    Raises:
        PassphraseError: wrong passphrase.
    """
    return SigningKey.load(federation.keys / f"{name}.key", passphrase)
