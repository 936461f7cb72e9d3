"""What a reader remembers of a federation's log: the newest checkpoint, and evidence where two histories were shown."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ddm.errors import DocumentError, SplitViewError
from ddm.io.files import write_atomic
from ddm.io.untrusted import read_small
from ddm.protocol.base import Document, sha256_hex
from ddm.trust.log.checkpoint import Checkpoint, SignedCheckpoint
from ddm.trust.log.history import View, check_same_history
from ddm.trust.log.note import MAX_NOTE_BYTES, Note
from ddm.trust.log.proof import MAX_CONSISTENCY_BYTES, Consistency
from ddm.trust.remembering import remembering

MAX_LOG_STATE_BYTES = MAX_CONSISTENCY_BYTES + 2 * MAX_NOTE_BYTES


class LogRecord(Document):
    """The newest checkpoint seen, as it was signed, and the proofs that came with it."""

    format: Literal["archipelago/log-state/1"] = "archipelago/log-state/1"
    checkpoint: Annotated[str, Field(max_length=MAX_NOTE_BYTES)]
    consistency: Consistency


@dataclass(frozen=True)
class LogMemory:
    """The memory of one federation's log.

    Attributes:
        folder: where it is kept: that of `ddm.trust.state.Memory`.
    """

    folder: Path

    def seen(self) -> View | None:
        """Return what was seen last; its signature was verified then.

        Raises:
            DocumentError: the memory itself is damaged.
        """
        path = self.folder / "log.json"
        if not path.exists():
            return None
        subject = f"state {path}"
        try:
            data = read_small(self.folder, path.name, MAX_LOG_STATE_BYTES, subject=subject)
            record = LogRecord.parse(data, subject=subject)
            note = Note.parse(record.checkpoint.encode(), subject)
            return View(
                SignedCheckpoint(Checkpoint.parse(note.text, subject), note), record.consistency
            )
        except DocumentError as error:
            error.remedy = "The memory is damaged. Delete this file only if you know that the log is the right one."
            raise

    def check(self, shown: View, subject: str) -> None:
        """Refuse a log that is not the one seen before; keep both signed checkpoints as evidence.

        Raises:
            SplitViewError: two histories.
            DocumentError: the memory itself is damaged.
        """
        seen = self.seen()
        if seen is not None:
            self.compare(seen, shown, subject)

    def compare(self, seen: View, shown: View, subject: str) -> None:
        """Compare two views; where they are of two histories, keep both signed checkpoints as evidence.

        Raises:
            SplitViewError: two histories.
        """
        try:
            check_same_history(seen, shown, subject)
        except SplitViewError as error:
            self.keep_evidence(error, seen.signed, shown.signed)
            raise

    def keep_evidence(
        self, error: SplitViewError, seen: SignedCheckpoint, shown: SignedCheckpoint
    ) -> None:
        """Write both signed checkpoints into a folder of their own, and tell so in the error, which stands without."""
        both = sha256_hex(seen.encode() + shown.encode())
        folder = self.folder / f"split-view-{both[:16]}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomic(folder / "seen.checkpoint", seen.encode())
            write_atomic(folder / "shown.checkpoint", shown.encode())
            error.remedy = f"{error.default_remedy} Both signed checkpoints are in {folder}."
        except OSError as fault:
            error.remedy = f"{error.default_remedy} Keep a copy of what you were shown: {folder} cannot be written."
            error.add_note(f"{fault.strerror}")

    def record(self, shown: View, subject: str) -> None:
        """Remember a view that is not smaller than the one remembered, after checking it again under the lock.

        Raises:
            SplitViewError: another process has meanwhile seen another history.
            SetupError: the folder cannot be written.
        """
        with remembering(self.folder, "a second history cannot be noticed"):
            self.check(shown, subject)
            seen = self.seen()
            if seen is None or shown.signed.size > seen.signed.size:
                record = LogRecord(
                    checkpoint=shown.signed.encode().decode(), consistency=shown.proofs
                )
                write_atomic(self.folder / "log.json", record.encode())
