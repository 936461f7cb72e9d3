"""Makes and opens the federation's keys on disk."""

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from ddm.errors import PassphraseError, SetupError
from ddm.io.changes import Change
from ddm.io.files import read_bounded, write_atomic
from ddm.publishing.home import Home
from ddm.trust.keys import MAX_KEY_FILE_BYTES, PublicKey, SigningKey

MODEL_KEY = "keys/model-signing.key"
MODEL_PUBLIC = "model-signing.pub.pem"


def make_key(change: Change, name: str, passphrase: bytes) -> PublicKey:
    """Make a new key that this change puts into `keys/`; return its public half."""
    key = SigningKey.generate()
    key.save(change.put(f"keys/{name}.key"), passphrase)
    key.public.save(change.put(f"keys/{name}.pub"))
    return key.public


def make_model_signing_key(change: Change, passphrase: bytes) -> None:
    """Make a new P-256 key that signs `model.sig` once this change is in force."""
    key = ec.generate_private_key(ec.SECP256R1())
    encrypted = key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(passphrase)
    )
    write_atomic(change.put(MODEL_KEY), encrypted, mode=0o600)
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    write_atomic(change.put(MODEL_PUBLIC), public)


def load_key(home: Home, name: str, passphrase: bytes) -> SigningKey:
    """Open one of the federation's keys.

    Raises:
        MissingFileError: the key is not in this folder, because holders keep it.
        PassphraseError: wrong passphrase.
    """
    return SigningKey.load(home.keys / f"{name}.key", passphrase)


def load_model_signing_key(home: Home, passphrase: bytes) -> ec.EllipticCurvePrivateKey:
    """Open the P-256 key that signs `model.sig`; its public half is `model-signing.pub.pem`.

    Raises:
        MissingFileError: the key is not in this folder.
        PassphraseError: wrong passphrase.
        SetupError: not a P-256 key.
    """
    path = home.path / MODEL_KEY
    data = read_bounded(path.resolve(), MAX_KEY_FILE_BYTES, subject=path.name)
    try:
        key = load_pem_private_key(data, passphrase or b"\0")
    except (ValueError, TypeError) as error:
        got = "a passphrase that does not open it"
        raise PassphraseError(path.name, expected="the passphrase of this key", got=got) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        remedy = "Restore keys/model-signing.key from backup, or make a new one: aggregator rotate FED model-signing."
        raise SetupError(path.name, expected="a P-256 key", got=type(key).__name__, remedy=remedy)
    return key
