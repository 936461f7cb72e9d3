"""The keys of one owner: made when the data set is split, and kept encrypted in its folder."""

from functools import cache

from ddm.io.changes import Change
from ddm.io.files import write_atomic
from ddm.islands.folder import Islands
from ddm.protocol.base import now_utc, sha256_file, sha256_hex
from ddm.protocol.plan import Plan
from ddm.publishing.folder import PublisherFolder
from ddm.publishing.keys import (
    MODEL_PUBLIC,
    key_changes,
    load_key,
    make_key,
    make_model_signing_key,
)
from ddm.publishing.plans import sign_plan_files
from ddm.trust.drafts import Delegates, Holders, draft_root, draft_targets
from ddm.trust.keys import PublicKey, SigningKey
from ddm.trust.log.entries import FederationOpened, KeyChanged, LogEntry
from ddm.trust.log.note import VerifierKey
from ddm.trust.metadata import sign_metadata
from ddm.trust.repository import Repository

# There is no receipts key: an owner sends itself no submissions.
KEY_NAMES = ("root", "targets", "plans", "release", "online", "log", "islands")


def make_keys(publisher: PublisherFolder, passphrase: bytes) -> PublicKey:
    """Make the keys; return the public half of the one that the islands' keys follow from."""
    change = Change.begin(publisher.path)
    public = {name: make_key(change, name, passphrase) for name in KEY_NAMES}
    make_model_signing_key(change, passphrase)
    change.commit()
    return public["islands"]


def make_root(islands: Islands, name: str, passphrase: bytes) -> str:
    """Sign the root of trust, and return its digest; the plan names it.

    Args:
        islands: holds the keys.
        name: the owner's, in the name of the log.
        passphrase: opens the root's key.
    """
    public = {
        key_name: PublicKey.load(islands.keys / f"{key_name}.pub")
        for key_name in ("root", "targets", "online", "log")
    }
    log_key = VerifierKey(f"archipelago/{name}/{public['log'].fingerprint[:16]}", public["log"])
    online = Holders((public["online"],))
    # One owner holds all keys: a threshold of one for each role.
    role_holders = {
        "root": Holders((public["root"],)),
        "targets": Holders((public["targets"],)),
        "snapshot": online,
        "timestamp": online,
    }
    draft = draft_root(1, role_holders, now_utc(), str(log_key))
    root = sign_metadata(draft, [load_key(islands, "root", passphrase)])
    write_atomic(islands.root, root)
    return sha256_hex(root)


def island_key(islands: SigningKey, plan_id: str, island_id: str) -> SigningKey:
    """Return the key with which an island signs: a silo's role needs a key that no other role has."""
    # One encrypted key from which the others follow: 1,024 encrypted files would protect no more (docs/adr/0028).
    return islands.derive(f"{plan_id}.{island_id}")


def sign_first_plan(islands: Islands, plan: Plan, name: str, passphrase: bytes) -> None:
    """Write the plan, sign it under the root of trust, and open the log with both.

    Args:
        islands: holds keys, root and the plan's files.
        plan: the plan of the islands.
        name: the owner's, in the log.
        passphrase: opens the keys.
    """

    # Deriving a key from the passphrase takes long on purpose, so that each key is opened once.
    @cache
    def key(key_name: str) -> SigningKey:
        return load_key(islands, key_name, passphrase)

    write_atomic(islands.bundle / "plan.json", plan.encode())
    now = now_utc()
    change = Change.begin(islands.path)
    root = islands.root.read_bytes()
    delegates = Delegates(key("plans").public, key("release").public)
    repository = Repository.create(
        change.put("tuf/metadata"),
        root=root,
        targets=sign_metadata(draft_targets(1, delegates, now), [key("targets")]),
        plans_key=key("plans"),
        release_key=key("release"),
        online_key=key("online"),
        now=now,
    )

    # Delegated with the plan, so that no island can sign for another one.
    island_keys = {
        island_id: island_key(key("islands"), plan.plan_id, island_id).public
        for island_id in plan.silos
    }
    delegates = Delegates(key("plans").public, key("release").public, plan.plan_id, island_keys)
    targets = sign_metadata(repository.next_targets(delegates, now), [key("targets")])
    model_key = KeyChanged(
        key="model-signing", fingerprints=(sha256_file(islands.path / MODEL_PUBLIC),)
    )
    opening: tuple[LogEntry, ...] = (
        FederationOpened(federation=name, root_digest=sha256_hex(root)),
        *key_changes(None, repository),
        model_key,
    )
    sign_plan_files(islands, change, repository, islands.bundle, targets, key, opening)
    change.commit()
