"""How a federation begins: folders, keys, TLS, the first root of trust and who holds it."""

import shutil
from collections.abc import Mapping

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from aggregator.changes import Change
from aggregator.config import KEY_NAMES, Federation, FederationSettings
from aggregator.keys.ceremony import HOLDER_KEYS, conduct
from aggregator.keys.tls import make_tls
from ddm.errors import BusyError, PassphraseError, SetupError
from ddm.files import read_bounded, write_atomic
from ddm.protocol.base import now_utc
from ddm.settings import save_settings
from ddm.trust.ceremony import Request
from ddm.trust.drafts import Delegates, Holders, draft_root, draft_targets
from ddm.trust.keys import MAX_KEY_FILE_BYTES, PublicKey, SigningKey

HEADING = "This federation: its name, the address that silos reach, the size of a transfer's shards."
MODEL_KEY = "keys/model-signing.key"
MODEL_PUBLIC = "model-signing.pub.pem"


def init_federation(
    federation: Federation,
    settings: FederationSettings,
    passphrase: bytes,
    *,
    root: Holders | None = None,
    targets: Holders | None = None,
) -> list[str]:
    """Make a federation's folder.

    Args:
        federation: a folder that is none yet.
        settings: written as federation.toml.
        passphrase: encrypts every private key.
        root: who holds the root of trust; None makes one key here.
        targets: who decides which silos may sign; None makes one key here.

    Returns:
        Whose signatures are waited for, in words; nothing when the federation and its invitation.json are complete.

    Raises:
        BusyError: the folder is a federation already.
        SetupError: one key in two offices, or a host that is none.
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
    missing = _build(part, settings, passphrase, {"root": root, "targets": targets})
    for entry in sorted(part.path.iterdir(), key=lambda entry: entry.name == "federation.toml"):
        entry.rename(federation.path / entry.name)
    part.path.rmdir()
    return missing


def _build(
    federation: Federation, settings: FederationSettings, passphrase: bytes, asked: Mapping[str, Holders | None]
) -> list[str]:
    for folder in (federation.registry, federation.incoming, federation.accepted, federation.receipts, federation.tuf):
        folder.mkdir(parents=True)
    federation.keys.mkdir(mode=0o700)
    save_settings(settings, federation.path / "federation.toml", HEADING)
    make_tls(federation.path / "tls", [settings.host], passphrase=passphrase)
    change = Change.begin(federation.path)
    made = [name for name in KEY_NAMES if not (name in HOLDER_KEYS and asked[name])]
    public = {name: make_key(change, name, passphrase) for name in made}
    make_model_signing_key(change, passphrase)
    online = Holders((public["online"],))
    held = {name: asked[name] or Holders((public[name],)) for name in HOLDER_KEYS}
    now = now_utc()
    first_root = draft_root(1, {**held, "snapshot": online, "timestamp": online}, now)
    first_targets = draft_targets(1, Delegates(public["plans"], public["release"]), now)
    purpose = f"found the federation {settings.name}"
    requests = [
        Request.to_sign(first_root, purpose, None),
        Request.to_sign(first_targets, purpose, None, first_root),
    ]
    return conduct(federation, change, requests, passphrase, act="found", purpose=purpose)


def make_key(change: Change, name: str, passphrase: bytes) -> PublicKey:
    """Make a new key that comes to `keys/` with this change; return its public half."""
    key = SigningKey.generate()
    key.save(change.put(f"keys/{name}.key"), passphrase)
    key.public.save(change.put(f"keys/{name}.pub"))
    return key.public


def make_model_signing_key(change: Change, passphrase: bytes) -> None:
    """Make a new P-256 key that signs `model.sig` from this change on."""
    key = ec.generate_private_key(ec.SECP256R1())
    encrypted = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(passphrase))
    write_atomic(change.put(MODEL_KEY), encrypted, mode=0o600)
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    write_atomic(change.put(MODEL_PUBLIC), public)


def load_key(federation: Federation, name: str, passphrase: bytes) -> SigningKey:
    """Open one of the federation's keys.

    Raises:
        MissingFileError: it is not here: holders have it.
        PassphraseError: wrong passphrase.
    """
    return SigningKey.load(federation.keys / f"{name}.key", passphrase)


def load_model_signing_key(federation: Federation, passphrase: bytes) -> ec.EllipticCurvePrivateKey:
    """Open the P-256 key that signs `model.sig`; its public half is `model-signing.pub.pem`.

    Raises:
        MissingFileError: there is none.
        PassphraseError: wrong passphrase.
    """
    path = federation.path / MODEL_KEY
    data = read_bounded(path.resolve(), MAX_KEY_FILE_BYTES, subject=path.name)
    try:
        key = load_pem_private_key(data, passphrase or b"\0")
    except (ValueError, TypeError) as error:
        raise PassphraseError(path.name, expected="the passphrase of this key", got="another") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise SetupError(path.name, expected="a P-256 key", got="another kind of key")
    return key
