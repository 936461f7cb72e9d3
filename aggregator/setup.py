"""Make a federation: its folders, keys, TLS certificates and first root of trust, with its holders."""

from collections.abc import Mapping
from pathlib import Path

from aggregator.config import KEY_NAMES, SETTINGS_HEADING, Federation, FederationSettings
from aggregator.keys.ceremony import HOLDER_KEYS, conduct_ceremony
from aggregator.keys.tls import make_tls
from ddm.errors import BusyError
from ddm.io.changes import Change
from ddm.io.files import move_into_place, staging_folder
from ddm.io.modes import private_folder
from ddm.io.settings import save_settings
from ddm.protocol.base import now_utc
from ddm.publishing.keys import make_key, make_model_signing_key
from ddm.trust.ceremony import SigningRequest
from ddm.trust.drafts import Delegates, Holders, draft_root, draft_targets
from ddm.trust.log.note import VerifierKey

# Holds the finished federation between the rename that decides and the moves to where it belongs.
_READY = ".federation.ready"


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
        federation: a folder that is not a federation yet.
        settings: written as federation.toml.
        passphrase: encrypts every private key.
        root: who holds the root of trust; None makes one key here.
        targets: who decides which silos may sign; None makes one key here.

    Returns:
        Whose signatures are missing, in words; empty when the federation and its invitation.json are complete.

    Raises:
        BusyError: the folder is a federation already, or has become one now, since an earlier call was cut short.
        SetupError: one key in two roles, or a host that is neither a name nor an address.
    """
    ready = federation.path / _READY
    if ready.is_dir():
        _move_in(ready)
        raise BusyError(
            str(federation.path),
            expected="a folder that is no federation yet",
            got="a federation that an earlier init made; it was cut short, and has been finished now",
            remedy="Nothing is missing: use this federation, or remove the folder if it was made with other settings.",
        )
    if (federation.path / "federation.toml").exists() or federation.keys.exists():
        raise BusyError(
            str(federation.path),
            expected="a folder that is no federation yet",
            got="a folder with federation.toml or keys/",
            remedy="Choose another folder; keys are never overwritten.",
        )
    private_folder(federation.path)
    # One rename decides, and the next call continues, so that an init that is cut short leaves no half of a federation.
    with staging_folder(federation.path / "federation") as part:
        missing = _build(Federation(part), settings, passphrase, {"root": root, "targets": targets})
        move_into_place(part, ready)
    _move_in(ready)
    return missing


def _move_in(ready: Path) -> None:
    """Move a finished federation to where it belongs, `federation.toml` last: the other commands look for it."""
    for entry in sorted(ready.iterdir(), key=lambda entry: entry.name == "federation.toml"):
        move_into_place(entry, ready.parent / entry.name)
    ready.rmdir()


def _build(
    federation: Federation,
    settings: FederationSettings,
    passphrase: bytes,
    holders: Mapping[str, Holders | None],
) -> list[str]:
    """Make everything in a folder that nobody sees yet; return whose signatures are missing."""
    for folder in (
        federation.registry,
        federation.incoming,
        federation.accepted,
        federation.receipts,
        federation.tuf,
    ):
        folder.mkdir(parents=True)
    federation.keys.mkdir(mode=0o700)
    save_settings(settings, federation.path / "federation.toml", SETTINGS_HEADING)
    make_tls(federation.path / "tls", [settings.host], passphrase=passphrase)
    change = Change.begin(federation.path)
    public_keys = {}
    for name in KEY_NAMES:
        if name in HOLDER_KEYS and holders[name]:
            continue  # its holders made the keys on their own machines
        public_keys[name] = make_key(change, name, passphrase)
    make_model_signing_key(change, passphrase)

    root_roles = {name: holders[name] or Holders((public_keys[name],)) for name in HOLDER_KEYS}
    online = Holders((public_keys["online"],))
    root_roles |= {"snapshot": online, "timestamp": online}
    now = now_utc()
    # A name that no other federation's log has; it stays, whatever becomes of the key.
    log_name = f"archipelago/{settings.name}/{public_keys['log'].fingerprint[:16]}"
    log_key = VerifierKey(log_name, public_keys["log"])
    first_root = draft_root(1, root_roles, now, str(log_key))
    first_targets = draft_targets(1, Delegates(public_keys["plans"], public_keys["release"]), now)
    purpose = f"found the federation {settings.name}"
    requests = [
        SigningRequest.to_sign(first_root, purpose, None),
        # No root is in force yet, so that the draft goes along, which names the holders of `targets`.
        SigningRequest.to_sign(first_targets, purpose, None, first_root),
    ]
    return conduct_ceremony(federation, change, requests, passphrase, act="found", purpose=purpose)
