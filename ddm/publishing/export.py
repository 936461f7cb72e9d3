"""Copies a release out of the federation's folder: durably, and under its name only once it is complete."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ddm.errors import BusyError, SetupError
from ddm.io.copying import copy_tree_bounded
from ddm.io.files import DISK_FULL_ERRNOS, move_into_place, staging_folder
from ddm.io.modes import open_to_everyone
from ddm.io.untrusted import MAX_FILES, list_files


@contextmanager
def reserve(out: Path) -> Iterator[Path]:
    """Make the folder that is renamed to `out` at the end, so that an unusable `out` fails before anything is signed.

    Raises:
        BusyError: something exists at `out`; releases are immutable.
        SetupError: no folder can be made there.
        OSError: the disk is full.
    """
    if out.exists() or out.is_symlink():
        raise BusyError(
            str(out),
            expected="a path where nothing exists",
            got="a link" if out.is_symlink() else "a folder" if out.is_dir() else "a file",
            remedy="Choose another folder; a release is never overwritten.",
        )
    with ExitStack() as stack:
        try:
            reserved = stack.enter_context(staging_folder(out))
        except OSError as error:
            if error.errno in DISK_FULL_ERRNOS:
                raise
            got = str(error.strerror)
            raise SetupError(
                f"--out {out}", expected="a path where a folder can be made", got=got
            ) from error
        yield reserved


def copy_out(release: Path, reserved: Path, out: Path) -> None:
    """Copy durably, without links: changes to the published folder must not reach the federation's own files."""
    size = sum(entry.bytes for entry in list_files(release).values())
    copy_tree_bounded(release, reserved, max_bytes=size, max_entries=MAX_FILES)
    open_to_everyone(reserved)
    move_into_place(reserved, out)
