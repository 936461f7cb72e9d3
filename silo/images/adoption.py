"""Decisions about images that were made before there was a site, carried over into it with all that they rest on.

Decisions are about fingerprints of pixels, which only the key of the same scans gives again: so the key goes with them,
and what these scans remember, which then need not decode the images once more.
"""

import os
import sqlite3
from pathlib import Path

from ddm.io.files import read_bounded, write_atomic
from ddm.io.locks import locked
from ddm.io.modes import private_folder
from silo.images import decisions
from silo.images.decisions import Decisions
from silo.images.memory import DATABASE, KEY_BYTES, KEY_FILE
from silo.images.sheet_index import FILE


def adopt_decisions(source_folder: Path, folder: Path) -> int:
    """Copy the decisions of scans outside of a site into the private folder of a new site's scans.

    The source stays as it is. Nothing is copied where nothing was decided, or where the site has a key or decisions of
    its own, which it then keeps.

    Args:
        source_folder: of the scans that were made before.
        folder: the folder of the site's scans.

    Returns:
        How many pictures, by their pixels, were decided about.

    Raises:
        BusyError: a scan is at work in the source.
        SetupError: the decisions there are damaged.
        OSError: something cannot be read or written.
    """
    has_decisions = (source_folder / decisions.FILE).is_file()
    has_key = (source_folder / KEY_FILE).is_file()
    if not (has_decisions and has_key):
        return 0
    private_folder(folder)
    with locked(source_folder, "scan"):
        with Decisions.opened(source_folder) as source_decisions:
            counts = source_decisions.counts()
        num_decided = sum(counts.values())
        key = read_bounded(source_folder / KEY_FILE, KEY_BYTES)
        key_path = folder / KEY_FILE
        # After an interruption between the key and the decisions, the key is there already.
        has_other_key = key_path.exists() and read_bounded(key_path, KEY_BYTES) != key
        has_own_decisions = (folder / decisions.FILE).exists()
        if not num_decided or has_other_key or has_own_decisions:
            return 0
        # The key comes first: decisions without their key count as damaged.
        write_atomic(key_path, key, mode=0o600)
        if (source_folder / FILE).is_file():
            _copy(source_folder / FILE, folder / FILE)
        for name in (DATABASE, decisions.FILE):
            if (source_folder / name).is_file():
                _copy_database(source_folder / name, folder / name)
    return num_decided


def _copy(source: Path, target: Path) -> None:
    write_atomic(target, source.read_bytes(), mode=0o600)


def _copy_database(source: Path, target: Path) -> None:
    """Copy a database, complete or not at all."""
    partial = target.with_name(f"{target.name}.partial")
    partial.unlink(missing_ok=True)
    # Made here, because SQLite would make it by the umask.
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(partial, flags, 0o600)
    os.close(descriptor)
    reader = sqlite3.connect(source)
    try:
        writer = sqlite3.connect(partial)
        try:
            # Unlike a copy of the file, this includes what a journal beside it still holds.
            reader.backup(writer)
        finally:
            writer.close()
    finally:
        reader.close()
    partial.replace(target)
