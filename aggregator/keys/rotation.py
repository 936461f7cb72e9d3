"""Replaces a lost, stolen or old key; everything that the old key signed stays verifiable."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from aggregator.config import Federation
from aggregator.keys.ceremony import HOLDER_KEYS, conduct_ceremony
from aggregator.keys.tls import renew_server
from ddm.errors import SetupError
from ddm.io.changes import Change
from ddm.io.files import write_atomic
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
_NEXT = "receipts-next"


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
        got = f"{len(holders.keys)} holders; only {' and '.join(HOLDER_KEYS)} have holders"
        raise SetupError(
            f"key {name}", expected="no holders for a key in the federation's folder", got=got
        )
    with federation.signing_lock():
        # Opens an existing key first, since a mistyped passphrase would encrypt the new one.
        load_key(federation, "online" if name == "receipts" else "receipts", passphrase)
        change = Change.begin(federation.path)
        if name in ("receipts", "model-signing", "tls"):
            added = _replace(federation, change, name, passphrase)
            log_key = log_key_of(Repository(federation.tuf).root())
            if log_key is not None:
                stage_entries(
                    federation, change, log_key, load_key(federation, "log", passphrase), [added]
                )
            change.commit()
            export_log(federation, public_folder(federation))
            return []
        requests = _requests(federation, change, name, passphrase, holders)
        return conduct_ceremony(
            federation, change, requests, passphrase, act="renew", purpose=f"rotate the key {name}"
        )


def parse_key_name(text: str) -> RotatedKey:
    """Read the name of a key as an operator typed it.

    Raises:
        SetupError: there is no key of this name.
    """
    for name in ROTATED_KEYS:
        if text == name:
            return name
    raise SetupError("KEY", expected=f"one of {', '.join(ROTATED_KEYS)}", got=ascii(text[:40]))


def next_receipts_key(federation: Federation) -> PublicKey:
    """Return the key that signs receipts from the next plan on."""
    following = federation.keys / f"{_NEXT}.pub"
    return PublicKey.load(following if following.exists() else federation.keys / "receipts.pub")


def use_next_receipts_key(federation: Federation, change: Change) -> None:
    """Put a rotated receipts key into use with this change, which starts a plan that names it."""
    for kind in ("key", "pub"):
        following = federation.keys / f"{_NEXT}.{kind}"
        if following.exists():
            change.put("keys").mkdir(parents=True, exist_ok=True)
            shutil.copy2(following, change.put(f"keys/receipts.{kind}"))
            change.drop(f"keys/{_NEXT}.{kind}")


def _replace(federation: Federation, change: Change, name: str, passphrase: bytes) -> KeyChanged:
    """Make a new key of a kind that TUF metadata do not list; return the log's entry of it."""
    if name == "tls":
        renew_server(federation.path / "tls", change.put("tls"), passphrase)
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
    has_plan = (federation.path / "plans" / "current.json").exists()
    return key_change("receipts", make_key(change, _NEXT if has_plan else "receipts", passphrase))


def _requests(
    federation: Federation, change: Change, name: str, passphrase: bytes, holders: Holders | None
) -> Sequence[SigningRequest]:
    """Draft the documents that the holders of `root` and `targets` must sign."""
    repository, now, purpose = Repository(federation.tuf), now_utc(), f"rotate the key {name}"
    root, targets = repository.root(), repository.targets()
    if name in ("plans", "release"):
        delegates, public = repository.delegates(), make_key(change, name, passphrase)
        delegates = (
            replace(delegates, plans=public)
            if name == "plans"
            else replace(delegates, release=public)
        )
        return [
            SigningRequest.to_sign(repository.next_targets(delegates, now), purpose, targets, root)
        ]
    if name == "online":
        online = Holders((make_key(change, name, passphrase),))
        changed = {"snapshot": online, "timestamp": online}
    elif name == "log":
        new_root = repository.next_root(
            {}, now, _next_log_key(change, log_key_of(root), passphrase)
        )
        return [SigningRequest.to_sign(new_root, purpose, root)]
    else:
        changed = {name: holders or Holders((_own(federation, change, name, passphrase),))}
    new_root = repository.next_root(changed, now)
    requests = [SigningRequest.to_sign(new_root, purpose, root)]
    if name == "targets":
        again = repository.next_targets(repository.delegates(), now)
        requests.append(SigningRequest.to_sign(again, purpose, targets, new_root))
    if holders:
        for kind in ("key", "pub"):
            if (federation.keys / f"{name}.{kind}").exists():
                change.drop(f"keys/{name}.{kind}")
    return requests


def _next_log_key(change: Change, present: str | None, passphrase: bytes) -> str:
    """Make the log's next key; the log keeps its name, and goes on."""
    return str(
        replace(VerifierKey.parse(present or ""), public=make_key(change, "log", passphrase))
    )


def _own(federation: Federation, change: Change, name: str, passphrase: bytes) -> PublicKey:
    if not (federation.keys / f"{name}.key").exists():
        remedy = "Name every new holder with --holder, and the number of required signatures with --threshold."
        got = "no --holder, and the present key is not in this folder"
        raise SetupError(
            f"key {name}", expected="the new holders' public keys", got=got, remedy=remedy
        )
    return make_key(change, name, passphrase)
