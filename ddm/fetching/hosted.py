"""A release on a host, of which the cache holds what was fetched; experts come when they are needed."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddm.fetching.cache import FileCache, default_cache_folder
from ddm.fetching.hosts import FetchLimits, Host
from ddm.io.space import require_free_space
from ddm.protocol.submission import is_expert_path
from ddm.trust.rules import SignedFile

OnProgress = Callable[[int, int], None]
"""Called with the bytes that are there, and those that will be."""


def no_progress(num_bytes: int, total_bytes: int) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class FetchOptions:
    """How a release is fetched.

    Attributes:
        cache: the folder in which fetched files are kept.
        state: where versions are remembered; an older release than the one remembered is refused before its files are
            fetched. None remembers nothing.
        archived: accept an expired timestamp, and only that.
        limits: how long the host may take.
    """

    cache: Path = field(default_factory=default_cache_folder)
    state: Path | None = None
    archived: bool = False
    limits: FetchLimits = FetchLimits()


class HostedRelease:
    """A release on a host, whose metadata are verified.

    Args:
        host: where it is.
        cache: of its federation.
        folder: in the cache, laid out as a release; holds what was fetched.
        files: the signed files by their paths below ``targets/``.
        limits: how long the host may take.
    """

    def __init__(
        self,
        host: Host,
        cache: FileCache,
        folder: Path,
        files: Mapping[str, SignedFile],
        limits: FetchLimits,
    ) -> None:
        self.folder = folder
        self._host = host
        self._cache = cache
        self._files = files
        self._limits = limits
        self._fetched: set[str] = set()

    def fetch_documents(self, on_progress: OnProgress = no_progress) -> None:
        """Fetch all files but the experts; see `fetch_experts`."""
        self._fetch([path for path in self._files if not _is_expert(path)], on_progress)

    def fetch_experts(
        self, paths: Iterable[str] | None = None, on_progress: OnProgress = no_progress
    ) -> None:
        """Fetch experts that are not here yet.

        Args:
            paths: their paths below ``targets/``; all experts where omitted.
            on_progress: see `OnProgress`.

        Raises:
            DigestError: the host has other bytes than were signed.
            AbsentFileError, TransportError: see `ddm.fetching.download.fetch_file`.
            DiskError: too little free space.
        """
        if paths is None:
            paths = [path for path in self._files if _is_expert(path)]
        self._fetch(paths, on_progress)

    def _fetch(self, paths: Iterable[str], on_progress: OnProgress) -> None:
        # What was fetched once is not read again: an expert that is loaded at every step would be hashed each time.
        wanted = [path for path in paths if path not in self._fetched]
        if not wanted:
            return
        missing_bytes = sum(self._cache.missing_bytes(self._files[path]) for path in wanted)
        require_free_space({self._cache.folder: missing_bytes}, "the files of the release")
        total_bytes = sum(self._files[path].bytes for path in wanted)
        num_bytes = 0

        def count(more_bytes: int) -> None:
            nonlocal num_bytes
            num_bytes += more_bytes
            on_progress(num_bytes, total_bytes)

        for path in wanted:
            signed = self._files[path]
            cached = self._cache.fetch(self._host, f"targets/{path}", signed, self._limits, count)
            self._cache.place(cached, self.folder / "targets" / path)
            self._fetched.add(path)


def _is_expert(path: str) -> bool:
    return is_expert_path(path.partition("/")[2])
