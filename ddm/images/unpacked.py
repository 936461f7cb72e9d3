"""The one copy of a cohort's images that a folder holds, for images that cannot be read in place.

It is named by what it was made of, so that the same inputs find it again and other inputs make another one; files that
belong to it have the same stem.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ddm.io.locks import lock_file
from ddm.protocol.base import sha256_hex

PREFIX = "unpacked-"
_FORMAT = 1  # of what is unpacked
_LOCK = ".unpacking.lock"


@contextmanager
def unpacked_path(folder: Path, inputs: Iterable[object]) -> Iterator[Path]:
    """Yield the path of the npy that was, or is to be, made of these inputs; what was made of others is removed.

    Until the block ends the folder is this caller's: others who would write or remove files there wait.

    Args:
        folder: private to the worker.
        inputs: all that the copy depends on, as JSON can write it.
    """
    path = folder / f"{PREFIX}{sha256_hex(json.dumps([_FORMAT, *inputs]).encode())[:32]}.npy"
    folder.mkdir(parents=True, exist_ok=True)
    with lock_file(folder / _LOCK):
        for other in (*folder.glob(f"{PREFIX}*"), *folder.glob(f".{PREFIX}*.part")):
            if other.stem != path.stem:
                other.unlink()
        yield path


def stamps(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return path, length and time of each file, which change when the file does."""
    entries = []
    for path in files:
        status = path.stat()
        entries.append((str(path.resolve()), status.st_size, status.st_mtime_ns))
    return entries
