"""The federation's log on disk: appends entries, and signs a checkpoint together with the change that they belong to.

`log/entries.jsonl` holds one entry a line, `log/signed-checkpoint` the last checkpoint, `log/cosigned/` those that
witnesses cosigned, by size. Entries may wait, unsigned, for
the next command that has the passphrase. A checkpoint is staged in the change that it belongs to (`ddm.io.changes`)
and comes into force with it, after its entries; a change that was never committed leaves nothing of either. Repeating
the last word on a key, a silo, a plan or a version changes nothing.

The caller holds the federation's signing lock.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from ddm.errors import SetupError
from ddm.io.changes import Change
from ddm.io.files import read_bounded, write_atomic
from ddm.publishing.home import Home
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

ENTRIES, CHECKPOINT, PUBLIC = "log/entries.jsonl", "log/signed-checkpoint", "log/public"
COSIGNED = "log/cosigned"
_RESTORE = "Restore log/ from the public copy of the log, or from the newest backup; never from an older one."


@dataclass(frozen=True)
class Journal:
    """The log as it stands.

    Attributes:
        entries: every entry, the unsigned ones last.
        signed: the last checkpoint; None before the federation is opened.
    """

    entries: tuple[bytes, ...] = ()
    signed: SignedCheckpoint | None = None

    @classmethod
    def load(cls, home: Home) -> Self:
        """Read the log, whose entries must be those that its last checkpoint describes.

        Raises:
            SetupError: entries are missing or changed.
            DocumentError: an entry or the checkpoint does not parse.
        """
        lines, path = home.path / ENTRIES, home.path / CHECKPOINT
        data = read_bounded(lines, MAX_ENTRIES * (MAX_ENTRY_BYTES + 1)) if lines.exists() else b""
        entries = tuple(data.splitlines())
        for number, entry in enumerate(entries, start=1):
            parse_entry(entry, f"{lines.name}, line {number}")
        if not path.exists():
            return cls(entries)
        note = SignedNote.parse(read_bounded(path, MAX_NOTE_BYTES), path.name)
        signed = SignedCheckpoint(Checkpoint.parse(note.text, path.name), note)
        begun = entries[: signed.size]
        if len(begun) < signed.size or root_hash(list(map(leaf_hash, begun))) != signed.root:
            expected = f"the {signed.size} entries that the last checkpoint describes"
            raise SetupError(
                str(lines),
                expected=expected,
                got=f"{len(entries)} entries, or others",
                remedy=_RESTORE,
            )
        return cls(entries, signed)

    @property
    def leaves(self) -> list[bytes]:
        """The leaf hash of each entry."""
        return [leaf_hash(entry) for entry in self.entries]

    def extended(self, added: Iterable[LogEntry]) -> Self:
        """Return the log with these entries, except those that repeat the last word on their entry_subject.

        Raises:
            SetupError: the log is full.
        """
        entries = list(self.entries)
        last = {
            entry_subject(entry): entry for entry in (parse_entry(data, "log") for data in entries)
        }
        for entry in added:
            if last.get(entry_subject(entry)) != entry:
                entries.append(encode_entry(entry))
                last[entry_subject(entry)] = entry
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
        if (
            self.signed
            and self.signed.checkpoint == checkpoint
            and self.signed.note.signatures_by(VerifierKey(name, key.public))
        ):
            return self  # which keeps the cosignatures on it
        return replace(self, signed=sign_checkpoint(checkpoint, key))

    def prove(self, entry: LogEntry, earlier: Sequence[int]) -> tuple[bytes, bytes]:
        """Return what travels with an entry of the signed log: its ``.tlog-proof``, and `log-consistency.json`.

        Args:
            entry: it must stand in the log.
            earlier: sizes of checkpoints that were given out; of a log with few entries, every size is proved.

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
        index = len(leaves) - 1 - self.entries[::-1].index(encode_entry(entry))
        proof = InclusionProof(index, tuple(inclusion_proof(leaves, index)), self.signed.encode())
        every = range(1, len(leaves) + 1)
        proofs = ConsistencyProofs.from_sizes(
            leaves, every if len(leaves) <= MAX_CONSISTENCY_PROOFS else earlier
        )
        return proof.encode(), proofs.encode()

    def encode(self) -> bytes:
        """Return the lines of all entries."""
        return b"".join(entry + b"\n" for entry in self.entries)


def append(home: Home, *entries: LogEntry) -> None:
    """Write entries down durably; the next command that signs covers them with a checkpoint."""
    before = Journal.load(home)
    after = before.extended(entries)
    if after != before:
        write_atomic(home.path / ENTRIES, after.encode())


def stage(
    home: Home, change: Change, log_key: str, key: SigningKey, entries: Iterable[LogEntry]
) -> Journal:
    """Add entries and a checkpoint of all entries to a change; return the log as it will be.

    Args:
        home: its log is the one that is continued.
        change: puts both into force.
        log_key: the verifier key that the newest root names.
        key: the log's key.
        entries: what to write down.

    Raises:
        SetupError: the key is not the one that the root names; or the log on disk is damaged, or older than its public
            copy.
    """
    verifier = VerifierKey.parse(log_key)
    if verifier.public != key.public:
        expected = f"the key that the newest root names, {verifier.public.short[:19]}"
        raise SetupError("keys/log.key", expected=expected, got=key.public.short[:19])
    journal = Journal.load(home).extended(entries)
    # before anything is signed that forks it
    check_continues(home.path / PUBLIC / "checkpoint", journal)
    journal = journal.sign(verifier.name, key)
    if journal.signed is not None:
        write_atomic(change.put(ENTRIES), journal.encode())
        write_atomic(change.put(CHECKPOINT), journal.signed.encode())
    return journal


def check_continues(path: Path, journal: Journal) -> None:
    """Refuse to replace a public checkpoint by one that does not continue it: readers would see two histories.

    Raises:
        SetupError: the log is not the continuation of the one in the public copy.
    """
    if not path.exists():
        return
    shown = Checkpoint.parse(
        SignedNote.parse(read_bounded(path, MAX_NOTE_BYTES), path.name).text, path.name
    )
    leaves = journal.leaves[: shown.size]
    if len(leaves) < shown.size or root_hash(leaves) != shown.root:
        raise SetupError(
            str(path),
            expected=f"a checkpoint that the {len(journal.entries)} entries of log/entries.jsonl continue",
            got=f"one of {shown.size} entries that they do not",
            remedy="This federation's folder was restored from an old backup, or the path is of another log. Restore "
            "the newest backup; publishing from an older one would show readers two histories.",
        )


def sizes_given_out(home: Home) -> list[int]:
    """List the sizes of the checkpoints in published releases and in the bundles of plans."""
    released = home.releases.glob("*/targets/*/manifest.tlog-proof")
    planned = (home.path / "plans").glob("*/bundle/targets/*/plan/plan.tlog-proof")
    own = home.path.glob("plan/plan/plan.tlog-proof")  # of one owner's islands
    return sorted({_size(path) for path in [*released, *planned, *own]})


def _size(path: Path) -> int:
    proof = InclusionProof.parse(read_bounded(path, 2 * MAX_NOTE_BYTES), path.name)
    return Checkpoint.parse(SignedNote.parse(proof.checkpoint, path.name).text, path.name).size
