"""Changes several files as one transaction: staged aside, then moved into place; a crash leaves all old or all new.

A change is a folder below the federation's: `put/` holds new files at their relative paths, `drop/` marks files to
delete. It is named `ceremony.part` while it is staged, `ceremony` while it waits for signatures of holders, and
`ceremony.ready` once it is committed, by a single rename. Every later command finishes the move (`finish_change`),
which can be interrupted and repeated at every step.

The caller holds the federation's signing lock.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ddm.errors import BusyError, MissingFileError
from ddm.io.files import move_into_place, sync_folder, write_atomic

_STAGED = "ceremony.part"
_WAITING = "ceremony"
_COMMITTED = "ceremony.ready"


@dataclass(frozen=True)
class Change:
    """Files that are added and deleted together.

    Attributes:
        home: the federation's folder.
        folder: the change's own folder in it.
    """

    home: Path
    folder: Path

    @classmethod
    def begin(cls, home: Path, *, beside_waiting: bool = False) -> Self:
        """Begin a change.

        Args:
            home: the federation's folder.
            beside_waiting: whether another change may wait for signatures meanwhile: the two must not touch the same
                files.

        Raises:
            BusyError: another change waits for signatures.
        """
        if (home / _WAITING).exists() and not beside_waiting:
            raise BusyError(
                str(home / _WAITING),
                expected="no other change that waits for signatures",
                got="a change that waits",
                remedy=(
                    "Finish it with `aggregator complete FED`, or discard it with `aggregator complete FED "
                    "--abandon`."
                ),
            )
        # What a killed process staged never took effect.
        staged = home / _STAGED
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(mode=0o700)
        return cls(home, staged)

    @classmethod
    def waiting(cls, home: Path) -> Self:
        """Open the change that waits for signatures.

        Raises:
            MissingFileError: no change waits.
        """
        if not (home / _WAITING).is_dir():
            raise MissingFileError(
                str(home / _WAITING),
                expected="a change that waits for signatures",
                got="no such folder",
                remedy="There is nothing to complete. A command that needs signatures of holders starts such a change.",
            )
        return cls(home, home / _WAITING)

    def put(self, name: str) -> Path:
        """Return where to stage the file or folder that replaces `name`, relative to the federation's folder."""
        return self.folder / "put" / name

    def drop(self, name: str) -> None:
        """Mark the file `name` for deletion."""
        write_atomic(self.folder / "drop" / name, b"")

    def wait(self) -> Self:
        """Keep the change until it is completed."""
        move_into_place(self.folder, self.home / _WAITING)
        return type(self)(self.home, self.home / _WAITING)

    def commit(self) -> None:
        """Commit the change and move everything into place."""
        # One rename decides: before it the change is discarded after a crash, after it the change is finished.
        move_into_place(self.folder, self.home / _COMMITTED)
        finish_change(self.home)

    def abandon(self) -> None:
        """Discard the change; nothing of it has taken effect."""
        # Renamed first: a deletion that is interrupted must not leave half a change that seems to wait.
        discarded = self.home / _STAGED
        shutil.rmtree(discarded, ignore_errors=True)
        self.folder.rename(discarded)
        shutil.rmtree(discarded)


def is_unfinished(home: Path) -> bool:
    """Whether a committed change is not yet completely in place."""
    return (home / _COMMITTED).exists()


def finish_change(home: Path) -> None:
    """Finish moving a committed change into place, if there is one."""
    committed = home / _COMMITTED
    changed_folders: set[Path] = set()
    for mark in _staged_files(committed / "drop"):
        target = home / mark.relative_to(committed / "drop")
        target.unlink(missing_ok=True)
        changed_folders.add(target.parent)
    for source in _staged_files(committed / "put"):
        target = home / source.relative_to(committed / "put")
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)
        # Folders above it may be new too.
        changed_folders.update(folder for folder in target.parents if folder.is_relative_to(home))

    # All moves are durable before the change is forgotten, or a crash could leave some of them undone.
    for folder in changed_folders:
        if folder.is_dir():
            sync_folder(folder)
    shutil.rmtree(committed, ignore_errors=True)


def _staged_files(folder: Path) -> list[Path]:
    """List what was staged; not the parts that a killed process left beside it (`ddm.io.files.replacing`)."""
    files = []
    for path in folder.rglob("*"):
        names = path.relative_to(folder).parts
        if path.is_file() and not any(_is_part(name) for name in names):
            files.append(path)
    return sorted(files)


def _is_part(name: str) -> bool:
    return name.startswith(".") and name.endswith(".part")
