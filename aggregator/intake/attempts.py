"""Counts attempts at each submission: one that crashes intake is refused after three attempts.

    attempts/<plan_id>/<silo_id>/<sequence>   a number: attempts that began and did not end

The number is on disk before an attempt begins, and the file is deleted when the attempt ends, whatever the outcome. A
process that is killed in between leaves it behind, be it for lack of memory or because the supervisor found it hanging;
one that is asked to stop, or finds the disk full or a file of the federation damaged, takes its attempt back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aggregator.intake.own_files import FederationFilesError
from ddm.errors import ArchipelagoError, RefusedError
from ddm.io.files import read_bounded, sync_folder, write_atomic

MAX_ATTEMPTS = 3  # at one submission
MAX_ATTEMPTS_OF_SILO = (
    6  # at all of a silo's submissions for one plan, each of which may cost a restart
)
_MAX_BYTES = 20


@dataclass(frozen=True)
class SubmissionAttempts:
    """The attempts at one silo's submissions.

    Attributes:
        folder: holds their counts and nothing else.
    """

    folder: Path

    @contextmanager
    def attempt(self, sequence: int) -> Iterator[None]:
        """Count an attempt while it lasts.

        Raises:
            RefusedError: too many attempts began and never ended.
        """
        path, before = self.folder / f"{sequence}", self._begun(sequence)
        in_all = sum(self._begun(int(each.name)) for each in self._all())
        if before >= MAX_ATTEMPTS or in_all >= MAX_ATTEMPTS_OF_SILO:
            raise RefusedError(
                f"submission {sequence}",
                expected=f"fewer than {MAX_ATTEMPTS} crashed examinations, {MAX_ATTEMPTS_OF_SILO} over all submissions",
                got=f"{before} examinations that never ended, {in_all} over all submissions",
                remedy="Read intake.log and the system log: most likely the machine ran out of memory.",
            )
        try:
            write_atomic(path, b"%d" % (before + 1))
            yield
        except (KeyboardInterrupt, OSError, FederationFilesError):
            if before:
                write_atomic(path, b"%d" % before)
            else:
                self._end(path)
            raise
        except ArchipelagoError:
            self._end(path)
            raise
        self._end(path)

    def _begun(self, sequence: int) -> int:
        path = self.folder / f"{sequence}"
        return int(read_bounded(path, _MAX_BYTES)) if path.is_file() else 0

    def _all(self) -> Iterator[Path]:
        return self.folder.glob("[1-9]*")

    def _end(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        if self.folder.is_dir():
            sync_folder(self.folder)
