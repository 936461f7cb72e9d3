"""The store of the newest log checkpoint that a reader saw, and of evidence where two histories were shown.

The attack is a split view: the log shows one reader a history without an entry, such as a withdrawal, and shows it to
everybody else. A reader who remembers its last checkpoint demands a proof that the new one continues it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ddm.errors import DocumentError, SplitViewError
from ddm.io.files import write_atomic
from ddm.io.untrusted import read_small
from ddm.protocol.base import Document, sha256_hex
from ddm.trust.log.checkpoint import Checkpoint, SignedCheckpoint
from ddm.trust.log.note import MAX_NOTE_BYTES, SignedNote
from ddm.trust.log.proof import MAX_CONSISTENCY_BYTES, ConsistencyProofs
from ddm.trust.log.split_view import ProvenCheckpoint, check_same_history
from ddm.trust.state_folder import locked_state_folder

MAX_LOG_STATE_BYTES = MAX_CONSISTENCY_BYTES + 2 * MAX_NOTE_BYTES
_RECORD_NAME = "log.json"


class LogRecord(Document):
    """The newest checkpoint seen, as it was signed, and the proofs that came with it."""

    format: Literal["archipelago/log-state/1"] = "archipelago/log-state/1"
    checkpoint: Annotated[str, Field(max_length=MAX_NOTE_BYTES)]
    consistency: ConsistencyProofs


@dataclass(frozen=True)
class CheckpointStore:
    """The newest checkpoint of one federation's log.

    Attributes:
        folder: where it is kept: that of `ddm.trust.version_store.VersionStore`.
    """

    folder: Path

    def load(self) -> ProvenCheckpoint | None:
        """Return what was seen last, None before the first visit; its signature was verified then.

        Raises:
            DocumentError: the store itself is damaged.
        """
        path = self.folder / _RECORD_NAME
        if not path.exists():
            return None
        subject = f"state {path}"
        try:
            data = read_small(self.folder, path.name, MAX_LOG_STATE_BYTES, subject=subject)
            record = LogRecord.parse(data, subject=subject)
            note = SignedNote.parse(record.checkpoint.encode(), subject)
            signed = SignedCheckpoint(Checkpoint.parse(note.text, subject), note)
            return ProvenCheckpoint(signed, record.consistency)
        except DocumentError as error:
            error.remedy = "The memory is damaged. Delete this file only if you know that the log is the right one."
            raise

    def check(self, shown: ProvenCheckpoint, subject: str) -> None:
        """Refuse a log that is not the one seen before; keep both signed checkpoints as evidence.

        Raises:
            SplitViewError: two histories.
            DocumentError: the store itself is damaged.
        """
        known = self.load()
        if known is not None:
            self.compare(known, shown, subject)

    def compare(self, known: ProvenCheckpoint, shown: ProvenCheckpoint, subject: str) -> None:
        """Compare two checkpoints; where they are of two histories, keep both as evidence.

        Raises:
            SplitViewError: two histories.
        """
        try:
            check_same_history(known, shown, subject)
        except SplitViewError as error:
            self.keep_evidence(error, known.signed, shown.signed)
            raise

    def keep_evidence(
        self,
        error: SplitViewError,
        known: SignedCheckpoint,
        shown: SignedCheckpoint,
    ) -> None:
        """Write both signed checkpoints into a folder of their own, and name the folder in the error's remedy.

        The log cannot deny its signatures: with both checkpoints anybody can see that it showed two histories.
        """
        evidence_digest = sha256_hex(known.encode() + shown.encode())
        folder = self.folder / f"split-view-{evidence_digest[:16]}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomic(folder / "seen.checkpoint", known.encode())
            write_atomic(folder / "shown.checkpoint", shown.encode())
            error.remedy = f"{error.default_remedy} Both signed checkpoints are in {folder}."
        except OSError as fault:
            # The error is about the log. A full disk must not hide it, nor suggest another state folder, which would
            # accept the second history.
            error.remedy = f"{error.default_remedy} Keep a copy of what you were shown: {folder} cannot be written."
            error.add_note(f"{fault.strerror}")

    def record(self, shown: ProvenCheckpoint, subject: str) -> None:
        """Remember a checkpoint that is larger than the one remembered, after checking it again under the lock.

        Raises:
            SplitViewError: another process has meanwhile seen another history.
            SetupError: the folder cannot be written.
        """
        with locked_state_folder(self.folder, "a second history cannot be noticed"):
            self.check(shown, subject)
            known = self.load()
            # A smaller checkpoint is of an older release, and would make the store forget entries.
            if known is None or shown.signed.size > known.signed.size:
                checkpoint = shown.signed.encode().decode()
                record = LogRecord(checkpoint=checkpoint, consistency=shown.proofs)
                write_atomic(self.folder / _RECORD_NAME, record.encode())
