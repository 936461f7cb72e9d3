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

# At one submission.
MAX_ATTEMPTS = 3
# At all of a silo's submissions for one plan, each of which may cost a restart.
MAX_ATTEMPTS_OF_SILO = 6
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
        path = self._path(sequence)
        num_before = self._num_begun(path)
        num_of_silo = sum(self._num_begun(other) for other in self.folder.glob("[1-9]*"))
        if num_before >= MAX_ATTEMPTS or num_of_silo >= MAX_ATTEMPTS_OF_SILO:
            raise RefusedError(
                f"submission {sequence}",
                expected=f"fewer than {MAX_ATTEMPTS} crashed examinations, {MAX_ATTEMPTS_OF_SILO} over all submissions",
                got=f"{num_before} examinations that never ended, {num_of_silo} over all submissions",
                remedy="Read intake.log and the system log: most likely the machine ran out of memory.",
            )
        try:
            write_atomic(path, b"%d" % (num_before + 1))
            yield
        except (KeyboardInterrupt, OSError, FederationFilesError):
            # Not the submission's fault: the attempt is taken back.
            if num_before:
                write_atomic(path, b"%d" % num_before)
            else:
                self._end(path)
            raise
        # The examination came to an end, with an answer. Any other exception ends this process, and its attempt stays
        # counted.
        except ArchipelagoError:
            self._end(path)
            raise
        self._end(path)

    def _path(self, sequence: int) -> Path:
        return self.folder / f"{sequence}"

    def _num_begun(self, path: Path) -> int:
        if not path.is_file():
            return 0
        return int(read_bounded(path, _MAX_BYTES))

    def _end(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        if self.folder.is_dir():
            sync_folder(self.folder)
