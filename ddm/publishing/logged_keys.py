"""Which keys of a federation a change replaces, as entries of its log."""

from collections.abc import Iterator, Mapping

from ddm.trust.drafts import Holders, holders_of, log_key_of
from ddm.trust.keys import PublicKey
from ddm.trust.log.entries import KeyChanged, LoggedKey
from ddm.trust.log.note import VerifierKey
from ddm.trust.repository import Repository


def key_changes(before: Repository | None, after: Repository) -> Iterator[KeyChanged]:
    """Yield an entry for each key that the metadata after a change name, and those before it, if any, did not."""
    old = _keys(before) if before else {}
    for name, holders in _keys(after).items():
        if old.get(name) != holders:
            fingerprints = tuple(sorted(key.fingerprint for key in holders.keys))
            yield KeyChanged(key=name, fingerprints=fingerprints, threshold=holders.threshold)


def key_change(name: LoggedKey, public: PublicKey) -> KeyChanged:
    """Return the entry of one key that the metadata do not name."""
    return KeyChanged(key=name, fingerprints=(public.fingerprint,))


def _keys(repository: Repository) -> Mapping[LoggedKey, Holders]:
    root, delegates = repository.root(), repository.delegates()
    held = holders_of(root)
    found: dict[LoggedKey, Holders] = {
        "root": held["root"],
        "targets": held["targets"],
        "online": held["timestamp"],
        "plans": Holders((delegates.plans,)),
        "release": Holders((delegates.release,)),
    }
    if log_key := log_key_of(root):
        found["log"] = Holders((VerifierKey.parse(log_key).public,))
    return found
