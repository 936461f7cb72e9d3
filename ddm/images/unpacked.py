"""The one copy of a cohort's images that a folder keeps, for what cannot be read where it lies.

It is named by what it was made of, so that the same is found again and anything else is made anew; files that belong to
it have the same stem.
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
def unpacked_path(folder: Path, made_of: Iterable[object]) -> Iterator[Path]:
    """Yield the npy of what was made of exactly this, there or to be written; what was made of anything else goes.

    Until the block ends the folder is this caller's: whoever else would write there, or remove, waits.

    Args:
        folder: private to the worker.
        made_of: all that the copy depends on, as JSON can write it.
    """
    path = folder / f"{PREFIX}{sha256_hex(json.dumps([_FORMAT, *made_of]).encode())[:32]}.npy"
    folder.mkdir(parents=True, exist_ok=True)
    with lock_file(folder / _LOCK):
        for other in (*folder.glob(f"{PREFIX}*"), *folder.glob(f".{PREFIX}*.part")):
            if other.stem != path.stem:
                other.unlink()
        yield path


def stamps(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return what tells whether files changed: path, bytes and time of each."""
    return [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
