"""Counts how often intake began with a submission and did not finish: one that kills intake is refused in the end.

    attempts/<plan_id>/<silo_id>/<sequence>   a number: attempts that were begun and are not over

The number is on disk before an attempt begins, and the file goes when the attempt is over, whatever it came to. Whoever
is killed in between leaves it, also when the memory ran out or the supervisor found that intake hangs; whoever is asked
to stop, or finds the disk full, takes the attempt back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ddm.errors import ArchipelagoError, RefusedError
from ddm.io.files import read_bounded, sync_folder, write_atomic

MOST = 3  # attempts at one submission
MOST_OF_A_SILO = 6  # attempts at all of a silo's submissions for one plan, each of which may cost a restart
_MAX_BYTES = 20


@dataclass(frozen=True)
class Attempts:
    """The attempts at one silo's submissions.

    Attributes:
        folder: theirs alone.
    """

    folder: Path

    @contextmanager
    def attempt(self, sequence: int) -> Iterator[None]:
        """Count an attempt while it lasts.

        Raises:
            RefusedError: too many were begun and never ended.
        """
        path, before = self.folder / f"{sequence}", self._begun(sequence)
        if before >= MOST or sum(self._begun(int(each.name)) for each in self._all()) >= MOST_OF_A_SILO:
            raise RefusedError(
                f"submission {sequence}",
                expected="one that can be examined",
                got=f"examinations that never ended, {before} of this one",
                remedy="Look at intake.log and the machine's own log: most likely the memory did not suffice.",
            )
        try:
            write_atomic(path, b"%d" % (before + 1))
            yield
        except (KeyboardInterrupt, OSError):
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
