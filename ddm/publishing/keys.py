"""A publisher's keys: makes and opens them on disk, and describes their changes as entries of the log."""

from collections.abc import Iterator, Mapping

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from ddm.errors import SetupError
from ddm.io.changes import Change
from ddm.io.files import write_atomic
from ddm.publishing.folder import PublisherFolder
from ddm.trust.drafts import Holders, holders_of, log_key_of
from ddm.trust.key_files import encrypt_private_key, open_private_key
from ddm.trust.keys import PublicKey, SigningKey
from ddm.trust.log.entries import KeyChanged, LoggedKey
from ddm.trust.log.note import VerifierKey
from ddm.trust.repository import Repository

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
    # A key that is not Ed25519, unlike the others: the OpenSSF model signature asks for it.
    write_atomic(change.put(MODEL_KEY), encrypt_private_key(key, passphrase), mode=0o600)
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    write_atomic(change.put(MODEL_PUBLIC), public)


def load_key(publisher: PublisherFolder, name: str, passphrase: bytes) -> SigningKey:
    """Open one of the publisher's keys.

    Raises:
        MissingFileError: the key is not in this folder, because holders keep it.
        PassphraseError: wrong passphrase.
    """
    return SigningKey.load(publisher.keys / f"{name}.key", passphrase)


def load_model_signing_key(
    publisher: PublisherFolder, passphrase: bytes
) -> ec.EllipticCurvePrivateKey:
    """Open the P-256 key that signs `model.sig`; its public half is `model-signing.pub.pem`.

    Raises:
        MissingFileError: the key is not in this folder.
        PassphraseError: wrong passphrase.
        SetupError: not a P-256 key.
    """
    path = publisher.path / MODEL_KEY
    key = open_private_key(path, passphrase)
    # Tools that verify `model.sig` expect ECDSA over P-256.
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise SetupError(
            path.name,
            expected="a P-256 key",
            got="a key of another algorithm",
            remedy=(
                "Restore keys/model-signing.key from backup, or make a new one: `aggregator rotate FED "
                "model-signing`."
            ),
        )
    return key


def key_changes(before: Repository | None, after: Repository) -> Iterator[KeyChanged]:
    """Yield an entry for each key that the metadata after a change name, and those before it, if any, did not."""
    old_keys: Mapping[LoggedKey, Holders] = {}
    if before is not None:
        old_keys = _keys_in_metadata(before)
    for name, holders in _keys_in_metadata(after).items():
        if old_keys.get(name) != holders:
            fingerprints = tuple(sorted(key.fingerprint for key in holders.keys))
            yield KeyChanged(key=name, fingerprints=fingerprints, threshold=holders.threshold)


def key_change(name: LoggedKey, public: PublicKey) -> KeyChanged:
    """Return the entry of one key that the metadata do not name."""
    return KeyChanged(key=name, fingerprints=(public.fingerprint,))


def _keys_in_metadata(repository: Repository) -> Mapping[LoggedKey, Holders]:
    root = repository.root()
    delegates = repository.delegates()
    root_holders = holders_of(root)
    keys: dict[LoggedKey, Holders] = {
        "root": root_holders["root"],
        "targets": root_holders["targets"],
        # The same key signs `snapshot`.
        "online": root_holders["timestamp"],
        "plans": Holders((delegates.plans,)),
        "release": Holders((delegates.release,)),
    }
    log_key = log_key_of(root)
    if log_key is not None:
        keys["log"] = Holders((VerifierKey.parse(log_key).public,))
    return keys
