"""Changes several files as one transaction: staged aside, then moved into place; a crash leaves all old or all new.

A change is a folder below the federation's: `put/` holds new files at their relative paths, `drop/` marks files to
delete. It is named `ceremony.part` while it is staged, `ceremony` while it waits for signatures of holders, and
`ceremony.ready` once it is committed, by a single rename. Every later command finishes the move (`settle`), which can
be interrupted and repeated at every step.

The caller holds the federation's signing lock.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ddm.errors import BusyError, MissingFileError
from ddm.io.files import move_into_place, sync_folder, write_atomic

_PART, _WAITING, _READY = "ceremony.part", "ceremony", "ceremony.ready"


@dataclass(frozen=True)
class Change:
    """Files that are added and deleted together.

    Attributes:
        home: the federation's folder.
        folder: where the change lies.
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
                remedy="Finish it with `aggregator complete`, or discard it with `aggregator complete --abandon`.",
            )
        part = home / _PART
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(mode=0o700)
        return cls(home, part)

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
                remedy="Nothing is to be completed. A command that needs signatures of holders starts such a change.",
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
        move_into_place(self.folder, self.home / _READY)
        settle(self.home)

    def abandon(self) -> None:
        """Discard the change; nothing of it has taken effect."""
        part = self.home / _PART
        shutil.rmtree(part, ignore_errors=True)
        self.folder.rename(part)
        shutil.rmtree(part)


def is_unsettled(home: Path) -> bool:
    """Whether a committed change is not yet completely in place."""
    return (home / _READY).exists()


def settle(home: Path) -> None:
    """Finish moving a committed change into place, if there is one."""
    ready = home / _READY
    touched: set[Path] = set()
    for mark in _files(ready / "drop"):
        target = home / mark.relative_to(ready / "drop")
        target.unlink(missing_ok=True)
        touched.add(target.parent)
    for source in _files(ready / "put"):
        target = home / source.relative_to(ready / "put")
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)
        touched.update(folder for folder in target.parents if folder.is_relative_to(home))
    for folder in touched:
        if folder.is_dir():
            sync_folder(folder)
    shutil.rmtree(ready, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    """List what was staged; not the parts that a killed process left beside it (`ddm.io.files.replacing`)."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(
        path for path in found if not any(_is_part(name) for name in path.relative_to(folder).parts)
    )


def _is_part(name: str) -> bool:
    return name.startswith(".") and name.endswith(".part")
