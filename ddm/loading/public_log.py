"""Reads and checks a whole copy of a federation's log: entries, tiles, checkpoint, and the order of its versions."""

from dataclasses import dataclass
from pathlib import Path

from ddm.errors import DigestError, DocumentError, RootError, SplitViewError
from ddm.io.untrusted import read_small
from ddm.protocol.base import sha256_hex
from ddm.protocol.federation import check_federation
from ddm.trust.log.checkpoint import SignedCheckpoint, open_checkpoint
from ddm.trust.log.checkpoint_store import CheckpointStore
from ddm.trust.log.entries import (
    MAX_ENTRIES,
    FederationOpened,
    LogEntry,
    check_history,
    parse_entry,
)
from ddm.trust.log.merkle import leaf_hash, root_hash
from ddm.trust.log.note import MAX_NOTE_BYTES, VerifierKey
from ddm.trust.log.proof import checkpoint_in
from ddm.trust.log.split_view import check_against_entries
from ddm.trust.log.tiles import MAX_BUNDLE_BYTES, layout, parse_bundle, tile_path, tiles_of
from ddm.trust.metadata import LIMITS
from ddm.trust.rules import MAX_ROOT_ROTATIONS, trusted_log_keys
from ddm.trust.version_store import VersionStore


@dataclass(frozen=True)
class PublicLog:
    """A verified copy of a log.

    Attributes:
        signed: its checkpoint.
        lines: its entries as they are hashed.
        entries: the same, parsed.
        keys: those that signed for the log so far, the newest last.
        memory: where evidence is kept.
    """

    signed: SignedCheckpoint
    lines: tuple[bytes, ...]
    entries: tuple[LogEntry, ...]
    keys: tuple[VerifierKey, ...]
    memory: CheckpointStore

    def compare(self, other: bytes, subject: str) -> None:
        """Compare with a checkpoint, of any size up to this log's, that somebody was shown.

        Raises:
            SplitViewError: two histories; both signed checkpoints are kept as evidence.
            FormatError: the checkpoint is of more entries than this copy of the log has.
        """
        signed = open_checkpoint(checkpoint_in(other, subject), self.keys, subject)
        self.check_same_history(signed, subject)

    def check_same_history(self, signed: SignedCheckpoint, subject: str) -> None:
        """Check that a checkpoint, whose signature was verified, is one of this log; keep evidence if it is not.

        Raises:
            SplitViewError: two histories.
            FormatError: the checkpoint is of more entries than this copy of the log has.
        """
        try:
            check_against_entries(signed, self.lines, subject)
        except SplitViewError as error:
            self.memory.keep_evidence(error, signed, self.signed)
            raise


def read_public_log(folder: Path, root: bytes, state: Path) -> PublicLog:
    """Read a copy of the log, check all of it, and compare it with what this state remembers.

    Args:
        folder: `checkpoint`, `tile/` and the roots, as `aggregator log` writes them.
        root: the pinned 1.root.json.
        state: where versions, roots and the log seen before are remembered; nothing new is.

    Raises:
        TrustError: the checkpoint is not signed by the log's key, a tile differs, or versions do not follow each other.
        FederationError: it is the log of another federation.
        SplitViewError: the log is not the one seen before.
        FormatError: a file does not parse, or the log has fewer entries than seen before.
    """
    memory = VersionStore.for_root(state, sha256_hex(root))
    log_keys = trusted_log_keys(_read_roots(folder, root), root, memory.roots())
    if not log_keys:
        raise RootError(
            "root", expected="the key of the federation's log, log_key", got="a root without it"
        )
    keys = tuple(VerifierKey.parse(key) for key in log_keys)
    # Only the newest key may have signed the present checkpoint; older ones vouch for earlier checkpoints alone.
    signed = open_checkpoint(
        read_small(folder, "checkpoint", MAX_NOTE_BYTES), keys[-1:], "checkpoint"
    )
    lines = _read_entries(folder, signed)
    # Versions must follow each other without a gap; `check_history` looks at all entries together.
    entries = tuple(parse_entry(line, f"entry {number}") for number, line in enumerate(lines))
    _check_opening(entries, sha256_hex(root))
    public_log = PublicLog(signed, lines, entries, keys, CheckpointStore(memory.folder))
    remembered = public_log.memory.load()
    if remembered is not None:
        public_log.check_same_history(remembered.signed, "the checkpoint seen before")
    check_history(entries)
    return public_log


def _check_opening(entries: tuple[LogEntry, ...], root_digest: str) -> None:
    """Check that the log begins with the opening of this very federation.

    The attack: a root of a stranger's names the log of a federation, whose entries would pass for the stranger's.
    """
    opened = None
    if entries and isinstance(entries[0], FederationOpened):
        opened = entries[0].root_digest
    remedy = "Ask the operator for the log of the federation whose root you pinned."
    check_federation(opened, root_digest, "entry 0 of the log", remedy)


def _read_roots(folder: Path, root: bytes) -> dict[str, bytes]:
    """Read the roots after the pinned one, by which a rotated log key is followed."""
    roots = {"1.root.json": root}
    for version in range(2, MAX_ROOT_ROTATIONS + 2):
        name = f"{version}.root.json"
        if not (folder / name).exists():
            break
        roots[name] = read_small(folder, name, LIMITS["root"])
    return roots


def _read_entries(folder: Path, signed: SignedCheckpoint) -> tuple[bytes, ...]:
    """Read the entries, which must have the root hash that is signed, and check every tile against them."""
    if signed.size > MAX_ENTRIES:
        raise DocumentError(
            "checkpoint", expected=f"at most {MAX_ENTRIES} entries", got=f"{signed.size}"
        )
    lines: list[bytes] = []
    for index, width in tiles_of(signed.size):
        name = tile_path(None, index, width)
        lines += parse_bundle(read_small(folder, name, MAX_BUNDLE_BYTES), width, name)
    computed_root = root_hash([leaf_hash(line) for line in lines])
    if computed_root != signed.root:
        raise DigestError(
            "tile/entries",
            expected=f"entries with the signed root hash {signed.root.hex()[:16]}...",
            got=f"root hash {computed_root.hex()[:16]}...",
        )
    # The tiles of hashes follow from the entries; other readers rely on them, so that they must not differ.
    for name, data in layout(lines):
        if read_small(folder, name, MAX_BUNDLE_BYTES) != data:
            raise DigestError(
                name, expected="the hashes of the entries", got="a tile that differs from them"
            )
    return tuple(lines)
