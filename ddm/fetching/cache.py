"""The cache of fetched files: by digest, one folder for each root of trust, for this user alone.

    <cache>/<sha256 of 1.root.json>/files/<sha256>      a complete file
                                    partial/<sha256>    one that has not come to its end yet
                                    releases/<sha256 of timestamp.json>/    laid out as a release, by hard links

Versions of one federation share the files that did not change. Nothing in it is believed: a file is compared with its
digest whenever it is taken from here. So the folder may be removed at any time.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ddm.errors import ArchipelagoError
from ddm.fetching.download import OnBytes, fetch_file
from ddm.fetching.hosts import FetchLimits, Host
from ddm.io.files import name_full_disk
from ddm.io.locks import lock_file
from ddm.io.own_folder import make_own_path
from ddm.io.untrusted import check_digest
from ddm.trust.rules import SignedFile

_PARTIAL_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def default_cache_folder() -> Path:
    """Return ``$ARCHIPELAGO_CACHE``, or a folder below ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    named = os.environ.get("ARCHIPELAGO_CACHE", "")
    if named:
        return Path(named)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says that a relative path in the variable is to be ignored.
    if not base.is_absolute():
        base = Path.home() / ".cache"
    return base / "archipelago"


class FileCache:
    """The files of one federation.

    Args:
        cache: the folder of all federations; made where it is missing.
        root_digest: sha256 of the root of trust.

    Raises:
        UnsafePathError: the folder is not this user's alone, or another user could exchange it.
        OSError: it cannot be made.
    """

    def __init__(self, cache: Path, root_digest: str) -> None:
        # A file is linked into a reader's folder after it was compared with its digest: nobody may exchange it between.
        make_own_path(cache)
        self.folder = cache / root_digest
        for name in ("files", "partial", "releases"):
            (self.folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)

    def missing_bytes(self, signed: SignedFile) -> int:
        """Return how many bytes of a file are not here yet."""
        for folder in ("files", "partial"):
            path = self.folder / folder / signed.digest
            if path.is_file():
                return max(0, signed.bytes - path.stat().st_size)
        return signed.bytes

    def fetch(
        self, host: Host, path: str, signed: SignedFile, limits: FetchLimits, on_bytes: OnBytes
    ) -> Path:
        """Return a file with the signed bytes, from here or from the host.

        Raises:
            DigestError, AbsentFileError, TransportError, OSError: see `ddm.fetching.download.fetch_file`.
        """
        # Two processes that want the same file would write over each other.
        with lock_file(self.folder / "partial" / f"{signed.digest}.lock"):
            complete = self.folder / "files" / signed.digest
            if self._is_sound(signed):
                on_bytes(signed.bytes)
                return complete
            complete.unlink(missing_ok=True)
            partial = self.folder / "partial" / signed.digest
            with _open_partial(partial) as handle, name_full_disk(partial):
                fetch_file(host, path, signed, handle, limits, on_bytes)
            partial.replace(complete)
            return complete

    def place(self, data: bytes | Path, destination: Path) -> None:
        """Put bytes, or a file of this cache, at a path in it, in one piece; what is there already stays.

        Other processes may be reading the folder, in which a half-written or a hidden file would be refused.
        """
        destination.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        staged = self.folder / "partial" / f"{threading.get_native_id()}.new"
        staged.unlink(missing_ok=True)
        if isinstance(data, Path):
            if destination.exists() and destination.samefile(data):
                return
            os.link(data, staged)
        else:
            staged.write_bytes(data)
        staged.replace(destination)

    def _is_sound(self, signed: SignedFile) -> bool:
        try:
            check_digest(self.folder / "files", signed.digest, signed.bytes, signed.digest)
        except ArchipelagoError:
            return False
        return True


@contextmanager
def _open_partial(path: Path) -> Iterator[BinaryIO]:
    with os.fdopen(os.open(path, _PARTIAL_FLAGS, 0o644), "r+b") as handle:
        yield handle
