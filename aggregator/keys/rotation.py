"""Replaces a lost, stolen or old key; everything that the old key signed stays verifiable."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from aggregator.config import Federation
from aggregator.keys.ceremony import HOLDER_KEYS, conduct_ceremony
from aggregator.keys.tls import renew_server
from aggregator.membership.invitation import read_own_invitation
from ddm.errors import SetupError
from ddm.io.changes import Change
from ddm.io.files import write_atomic
from ddm.protocol.address import split_address
from ddm.protocol.base import now_utc, sha256_file, sha256_hex
from ddm.publishing.keys import MODEL_PUBLIC, key_change, load_key, make_key, make_model_signing_key
from ddm.publishing.log import stage_entries
from ddm.publishing.public_log import export_log, public_folder
from ddm.trust.ceremony import SigningRequest
from ddm.trust.drafts import Holders, log_key_of
from ddm.trust.keys import PublicKey
from ddm.trust.log.entries import KeyChanged
from ddm.trust.log.note import VerifierKey
from ddm.trust.repository import Repository

RotatedKey = Literal[
    "root", "targets", "plans", "release", "online", "receipts", "log", "model-signing", "tls"
]
ROTATED_KEYS: tuple[RotatedKey, ...] = get_args(RotatedKey)
# A rotated receipts key waits under this name for the next plan, which names it.
_NEXT_RECEIPTS = "receipts-next"


def rotate_key(
    federation: Federation, name: RotatedKey, passphrase: bytes, holders: Holders | None = None
) -> list[str]:
    """Replace one of the federation's keys with a new one.

    Args:
        federation: the operator's folder.
        name: which key.
        passphrase: opens the federation's keys, and encrypts the new one.
        holders: who holds `root` or `targets` from now on; None makes the new key here, as the old one was.

    Returns:
        The missing signatures, in words; empty when the new key is in force.

    Raises:
        BusyError: another process signs, or a change waits for signatures.
        PassphraseError: wrong passphrase.
        SetupError: holders for a key without holders, or no holders for a key that is not in this folder.
    """
    if holders is not None and name not in HOLDER_KEYS:
        raise SetupError(
            f"key {name}",
            expected="no holders for a key in the federation's folder",
            got=f"{len(holders.keys)} holders; only {' and '.join(HOLDER_KEYS)} have holders",
        )
    with federation.signing_lock():
        # Opens an existing key first, since a mistyped passphrase would encrypt the new one.
        existing_key = "online" if name == "receipts" else "receipts"
        load_key(federation, existing_key, passphrase)
        change = Change.begin(federation.path)
        if name in ("receipts", "model-signing", "tls"):
            _rotate_without_holders(federation, change, name, passphrase)
            return []
        requests = _draft_requests(federation, change, name, passphrase, holders)
        return conduct_ceremony(
            federation, change, requests, passphrase, act="renew", purpose=f"rotate the key {name}"
        )


def _rotate_without_holders(
    federation: Federation, change: Change, name: str, passphrase: bytes
) -> None:
    """Replace a key that TUF metadata do not list, so that nobody has to sign."""
    entry = _replace_key(federation, change, name, passphrase)
    log_key = log_key_of(Repository(federation.tuf).root())
    if log_key is not None:
        signing_key = load_key(federation, "log", passphrase)
        stage_entries(federation, change, log_key, signing_key, [entry])
    change.commit()
    export_log(federation, public_folder(federation))


def parse_key_name(text: str) -> RotatedKey:
    """Read the name of a key as an operator typed it.

    Raises:
        SetupError: there is no key of this name.
    """
    for name in ROTATED_KEYS:
        if text == name:
            return name
    raise SetupError(
        "KEY",
        expected=f"one of {', '.join(ROTATED_KEYS)}",
        got=ascii(text[:40]),
        remedy="Name one of these keys.",
    )


def next_receipts_key(federation: Federation) -> PublicKey:
    """Return the key that signs receipts from the next plan on."""
    path = federation.keys / f"{_NEXT_RECEIPTS}.pub"
    if not path.exists():
        path = federation.keys / "receipts.pub"
    return PublicKey.load(path)


def use_next_receipts_key(federation: Federation, change: Change) -> None:
    """Put a rotated receipts key into use with this change, which starts a plan that names it."""
    for suffix in ("key", "pub"):
        next_key = federation.keys / f"{_NEXT_RECEIPTS}.{suffix}"
        if next_key.exists():
            change.put("keys").mkdir(parents=True, exist_ok=True)
            shutil.copy2(next_key, change.put(f"keys/receipts.{suffix}"))
            change.drop(f"keys/{_NEXT_RECEIPTS}.{suffix}")


def _replace_key(
    federation: Federation, change: Change, name: str, passphrase: bytes
) -> KeyChanged:
    """Make a new key of a kind that TUF metadata do not list; return the log's entry of it."""
    if name == "tls":
        invited_host, _ = split_address(read_own_invitation(federation).address)
        renew_server(federation.path / "tls", change.put("tls"), invited_host, passphrase)
        return KeyChanged(key="tls", fingerprints=(sha256_file(change.put("tls/server.pem")),))
    if name == "model-signing":
        old = (federation.path / MODEL_PUBLIC).read_bytes()
        # Kept, since the releases that it signed are verified with it.
        write_atomic(change.put(f"model-signing-{sha256_hex(old)[:16]}.pub.pem"), old)
        make_model_signing_key(change, passphrase)
        return KeyChanged(
            key="model-signing", fingerprints=(sha256_file(change.put(MODEL_PUBLIC)),)
        )
    # A plan names its receipts key, so the new key is used from the next plan on.
    name = "receipts"
    if (federation.path / "plans" / "current.json").exists():
        name = _NEXT_RECEIPTS
    return key_change("receipts", make_key(change, name, passphrase))


def _draft_requests(
    federation: Federation, change: Change, name: str, passphrase: bytes, holders: Holders | None
) -> Sequence[SigningRequest]:
    """Draft the documents that the holders of `root` and `targets` must sign."""
    repository = Repository(federation.tuf)
    purpose = f"rotate the key {name}"
    now = now_utc()
    root = repository.root()
    targets = repository.targets()
    # `targets` delegates to these two keys, so that its holders sign, and the root stays as it is.
    if name in ("plans", "release"):
        key = make_key(change, name, passphrase)
        if name == "plans":
            delegates = replace(repository.delegates(), plans=key)
        else:
            delegates = replace(repository.delegates(), release=key)
        new_targets = repository.next_targets(delegates, now)
        return [SigningRequest.to_sign(new_targets, purpose, targets, root)]
    # The root names the log's key, so that readers learn the new one from those they trust already.
    if name == "log":
        new_root = repository.next_root(
            {}, now, _next_log_key(change, log_key_of(root), passphrase)
        )
        return [SigningRequest.to_sign(new_root, purpose, root)]

    # One key signs both roles: they are signed without a person, by the same process.
    if name == "online":
        online = Holders((make_key(change, name, passphrase),))
        changed_holders = {"snapshot": online, "timestamp": online}
    elif holders is not None:
        changed_holders = {name: holders}
    else:
        changed_holders = {name: Holders((_make_holder_key(federation, change, name, passphrase),))}
    new_root = repository.next_root(changed_holders, now)
    requests = [SigningRequest.to_sign(new_root, purpose, root)]
    if name == "targets":
        # The new holders sign the same delegations again: readers accept no signature of the old ones any more.
        new_targets = repository.next_targets(repository.delegates(), now)
        requests.append(SigningRequest.to_sign(new_targets, purpose, targets, new_root))
    if holders is not None:
        # The role moves to keys that are elsewhere, so that the key in this folder has no use any more.
        for suffix in ("key", "pub"):
            if (federation.keys / f"{name}.{suffix}").exists():
                change.drop(f"keys/{name}.{suffix}")
    return requests


def _next_log_key(change: Change, present_log_key: str | None, passphrase: bytes) -> str:
    """Make the log's next key; the log keeps its name, and continues."""
    verifier_key = VerifierKey.parse(present_log_key or "")
    return str(replace(verifier_key, public=make_key(change, "log", passphrase)))


def _make_holder_key(
    federation: Federation, change: Change, name: str, passphrase: bytes
) -> PublicKey:
    if not (federation.keys / f"{name}.key").exists():
        raise SetupError(
            f"key {name}",
            expected="the new holders' public keys",
            got="no --holder, and the present key is not in this folder",
            remedy="Name every new holder with --holder, "
            "and the number of required signatures with --threshold.",
        )
    return make_key(change, name, passphrase)
