"""A release leaves the federation's folder: a durable copy that appears under its name whole, or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ddm.errors import BusyError, SetupError
from ddm.io.copying import copy_tree_bounded
from ddm.io.files import aside, move_into_place
from ddm.io.untrusted import MAX_FILES, scan


@contextmanager
def reserve(out: Path) -> Iterator[Path]:
    """Make the folder that is renamed to `out` at the end: an unusable `out` shows before anything is signed.

    Raises:
        BusyError: something is at `out`; releases are immutable.
        SetupError: no folder can be made there.
    """
    if out.exists() or out.is_symlink():
        raise BusyError(
            str(out),
            expected="a path where nothing is yet",
            got="a release or another file",
            remedy="Choose another folder; a release is never overwritten.",
        )
    with ExitStack() as stack:
        try:
            reserved = stack.enter_context(aside(out))
        except OSError as error:
            got = str(error.strerror)
            raise SetupError(f"--out {out}", expected="a place where a folder can be made", got=got) from error
        yield reserved


def check_room(needed_bytes: int, reserved: Path) -> None:
    """Refuse what would not fit.

    Raises:
        SetupError: too little room.
    """
    free = shutil.disk_usage(reserved).free
    if free < needed_bytes:
        subject = f"--out {reserved.parent}"
        raise SetupError(subject, expected=f"room for {needed_bytes} bytes", got=f"{free} bytes")


def copy_out(release: Path, reserved: Path, out: Path) -> None:
    """Copy durably, not link: what happens to the published folder must not reach the federation's own files."""
    size = sum(entry.bytes for entry in scan(release).values())
    copy_tree_bounded(release, reserved, max_bytes=size, most=MAX_FILES)
    move_into_place(reserved, out)
