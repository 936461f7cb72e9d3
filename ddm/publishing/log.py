"""The federation's log on disk: appends entries, and signs a checkpoint together with the change that they belong to.

`log/entries.jsonl` holds one entry a line, `log/signed-checkpoint` the last checkpoint, `log/cosigned/` those that
witnesses cosigned, by size. Entries may wait, unsigned, for the next command that has the passphrase. A checkpoint is
staged in the change that it belongs to (`ddm.io.changes`) and comes into force with it, after its entries; a change
that was never committed leaves nothing of either. An entry that repeats the last entry on the same key, silo, plan or
version is not written.

The caller holds the publisher's signing lock.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from ddm.errors import SetupError
from ddm.io.changes import Change
from ddm.io.files import read_bounded, write_atomic
from ddm.publishing.folder import PublisherFolder
from ddm.trust.drafts import log_key_of
from ddm.trust.keys import SigningKey
from ddm.trust.log.checkpoint import Checkpoint, SignedCheckpoint, sign_checkpoint
from ddm.trust.log.entries import (
    MAX_ENTRIES,
    MAX_ENTRY_BYTES,
    LogEntry,
    encode_entry,
    entry_subject,
    parse_entry,
)
from ddm.trust.log.merkle import inclusion_proof, leaf_hash, root_hash
from ddm.trust.log.note import MAX_NOTE_BYTES, SignedNote, VerifierKey
from ddm.trust.log.proof import MAX_CONSISTENCY_PROOFS, ConsistencyProofs, InclusionProof
from ddm.trust.repository import Repository

ENTRIES = "log/entries.jsonl"
CHECKPOINT = "log/signed-checkpoint"
PUBLIC = "log/public"
COSIGNED = "log/cosigned"
_RESTORE = "Restore log/ from the public copy of the log, or from the newest backup; never from an older one."


@dataclass(frozen=True)
class TransparencyLog:
    """The log as it is on disk.

    Attributes:
        entries: every entry, the unsigned ones last.
        signed: the last checkpoint; None before the federation is opened.
    """

    entries: tuple[bytes, ...] = ()
    signed: SignedCheckpoint | None = None

    @classmethod
    def load(cls, publisher: PublisherFolder) -> Self:
        """Read the log, whose entries must be those that its last checkpoint describes.

        Raises:
            SetupError: entries are missing or changed.
            DocumentError: an entry or the checkpoint does not parse.
        """
        entries_path = publisher.path / ENTRIES
        checkpoint_path = publisher.path / CHECKPOINT
        data = b""
        if entries_path.exists():
            data = read_bounded(entries_path, MAX_ENTRIES * (MAX_ENTRY_BYTES + 1))
        entries = tuple(data.splitlines())
        for number, entry in enumerate(entries, start=1):
            # For its error, which names the line; hashes alone would only say that something differs.
            parse_entry(entry, f"{entries_path.name}, line {number}")
        if not checkpoint_path.exists():
            return cls(entries)

        note = SignedNote.parse(read_bounded(checkpoint_path, MAX_NOTE_BYTES), checkpoint_path.name)
        signed = SignedCheckpoint(Checkpoint.parse(note.text, checkpoint_path.name), note)
        # Signing a log that lost or changed entries would show readers a second history.
        if not _continues(entries, signed.checkpoint):
            raise SetupError(
                str(entries_path),
                expected=f"the {signed.size} entries that the last checkpoint describes",
                got=f"{len(entries)} entries, or other entries",
                remedy=_RESTORE,
            )
        return cls(entries, signed)

    @property
    def leaves(self) -> list[bytes]:
        """The leaf hash of each entry."""
        return [leaf_hash(entry) for entry in self.entries]

    def extended(self, added: Iterable[LogEntry]) -> Self:
        """Return the log with these entries, except those that repeat the last entry on the same subject.

        Raises:
            SetupError: the log is full.
        """
        entries = list(self.entries)
        last_entries: dict[object, LogEntry] = {}
        for data in entries:
            entry = parse_entry(data, "log")
            last_entries[entry_subject(entry)] = entry
        for entry in added:
            # A command that is repeated after a crash must not enter the same fact again.
            subject = entry_subject(entry)
            if last_entries.get(subject) != entry:
                entries.append(encode_entry(entry))
                last_entries[subject] = entry
        if len(entries) > MAX_ENTRIES:
            raise SetupError(
                "the federation's log",
                expected=f"at most {MAX_ENTRIES} entries",
                got=f"{len(entries)}",
            )
        return replace(self, entries=tuple(entries))

    def sign(self, name: str, key: SigningKey) -> Self:
        """Return the log with a checkpoint of all its entries."""
        checkpoint = Checkpoint(name, len(self.entries), root_hash(self.leaves))
        verifier = VerifierKey(name, key.public)
        last = self.signed
        if last and last.checkpoint == checkpoint and last.note.signatures_by(verifier):
            # Signing it once more would drop the cosignatures on it.
            return self
        return replace(self, signed=sign_checkpoint(checkpoint, key))

    def prove(self, entry: LogEntry, earlier_sizes: Sequence[int]) -> tuple[bytes, bytes]:
        """Return the proofs of an entry of the signed log: its ``.tlog-proof``, and `log-consistency.json`.

        Args:
            entry: it must be in the log.
            earlier_sizes: of checkpoints that were given out; of a log with few entries, every size is proved.

        Raises:
            SetupError: the log is not signed, or not in full.
        """
        if self.signed is None or self.signed.size != len(self.entries):
            raise SetupError(
                "the federation's log",
                expected="a checkpoint of all entries",
                got="unsigned entries",
            )
        leaves = self.leaves
        # The last one of equal entries, which is the one that was just added.
        index = len(leaves) - 1 - self.entries[::-1].index(encode_entry(entry))
        proof = InclusionProof(index, tuple(inclusion_proof(leaves, index)), self.signed.encode())
        sizes = earlier_sizes
        if len(leaves) <= MAX_CONSISTENCY_PROOFS:
            sizes = range(1, len(leaves) + 1)
        return proof.encode(), ConsistencyProofs.from_sizes(leaves, sizes).encode()

    def encode(self) -> bytes:
        """Return the lines of all entries."""
        return b"".join(entry + b"\n" for entry in self.entries)


def _continues(entries: Sequence[bytes], checkpoint: Checkpoint) -> bool:
    """Whether the first entries are those that a checkpoint describes."""
    leaves = [leaf_hash(entry) for entry in entries[: checkpoint.size]]
    return len(leaves) == checkpoint.size and root_hash(leaves) == checkpoint.root


def require_log_key(publisher: PublisherFolder) -> str:
    """Return the verifier key of the log, as the newest root names it.

    Raises:
        SetupError: the root names no log.
    """
    log_key = log_key_of(Repository(publisher.tuf).root())
    if log_key is None:
        raise SetupError(
            "root", expected="the key of the federation's log, log_key", got="a root without it"
        )
    return log_key


def append_entries(publisher: PublisherFolder, *entries: LogEntry) -> None:
    """Write entries durably; the next command that signs covers them with a checkpoint."""
    before = TransparencyLog.load(publisher)
    after = before.extended(entries)
    if after != before:
        write_atomic(publisher.path / ENTRIES, after.encode())


def stage_entries(
    publisher: PublisherFolder,
    change: Change,
    log_key: str,
    key: SigningKey,
    entries: Iterable[LogEntry],
) -> TransparencyLog:
    """Add entries and a checkpoint of all entries to a change; return the log as it will be.

    Args:
        publisher: the publisher whose log is continued.
        change: puts both into force.
        log_key: the verifier key that the newest root names.
        key: the log's key.
        entries: to be written.

    Raises:
        SetupError: the key is not the one that the root names; or the log on disk is damaged, or older than its public
            copy.
    """
    verifier = VerifierKey.parse(log_key)
    # Readers take the log's key from the root: a checkpoint by any other key would be refused by all of them.
    if verifier.public != key.public:
        raise SetupError(
            "keys/log.key",
            expected=f"the key that the newest root names, {verifier.public.short[:19]}",
            got=key.public.short[:19],
        )
    log = TransparencyLog.load(publisher).extended(entries)
    # Before anything is signed: a folder that was restored from an old backup would fork the history.
    check_continues(publisher.path / PUBLIC / "checkpoint", log)
    log = log.sign(verifier.name, key)
    if log.signed is not None:
        write_atomic(change.put(ENTRIES), log.encode())
        write_atomic(change.put(CHECKPOINT), log.signed.encode())
    return log


def check_continues(path: Path, log: TransparencyLog) -> None:
    """Refuse to replace a public checkpoint by one that does not continue it: readers would see two histories.

    Raises:
        SetupError: the log is not the continuation of the one in the public copy.
    """
    if not path.exists():
        return
    note = SignedNote.parse(read_bounded(path, MAX_NOTE_BYTES), path.name)
    public_checkpoint = Checkpoint.parse(note.text, path.name)
    if not _continues(log.entries, public_checkpoint):
        raise SetupError(
            str(path),
            expected=f"a checkpoint that the {len(log.entries)} entries of log/entries.jsonl continue",
            got=f"one of {public_checkpoint.size} entries that they do not continue",
            remedy="This federation's folder was restored from an old backup, or the path is of another log. Restore "
            "the newest backup; publishing from an older one would show readers two histories.",
        )


def sizes_given_out(publisher: PublisherFolder) -> list[int]:
    """List the sizes of the checkpoints in published releases and in the bundles of plans."""
    paths = [*publisher.releases.glob("*/targets/*/manifest.tlog-proof")]
    paths += publisher.path.glob("plans/*/bundle/targets/*/plan/plan.tlog-proof")
    # One owner's islands have a single plan, whose files are in the owner's folder itself.
    paths += publisher.path.glob("plan/plan/plan.tlog-proof")
    return sorted({_checkpoint_size(path) for path in paths})


def _checkpoint_size(path: Path) -> int:
    proof = InclusionProof.parse(read_bounded(path, 2 * MAX_NOTE_BYTES), path.name)
    note = SignedNote.parse(proof.checkpoint, path.name)
    return Checkpoint.parse(note.text, path.name).size
