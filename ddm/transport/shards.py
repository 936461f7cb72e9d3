"""How does a folder travel in pieces, and how does it arrive whole or not at all?

The sender lists a folder and reads byte ranges of it; the receiver collects ranges, in any order and across restarts,
in a `.part` folder and renames it when every byte is there. Nothing follows a symbolic link.
"""

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedIOBase
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from ddm.errors import DigestError, FormatError, MissingFileError, UnsafePathError
from ddm.io.files import read_bounded, sync_folder, write_atomic
from ddm.io.paths import MAX_PATH_LENGTH
from ddm.protocol.base import Model, NaturalInt, RelativePath
from ddm.transport.messages import MAX_SPANS, FileEntry, Span, check_index

_PATH: TypeAdapter[str] = TypeAdapter(RelativePath)
# Starts with a dot, which no path on the wire may.
_PROGRESS = ".progress.json"
_MAX_PROGRESS_BYTES = 16 * 1024 * 1024


def list_folder(folder: Path, *, max_files: int, max_bytes: int, with_digest: bool = False) -> tuple[FileEntry, ...]:
    """List a folder as an index, sorted by path.

    Args:
        folder: the folder; it exists.
        max_files: most files it may hold.
        max_bytes: most bytes, all files together.
        with_digest: whether to hash every file.

    Returns:
        One entry a file.

    Raises:
        UnsafePathError: a symbolic link, a special file, or a name that may not travel.
        FormatError: too many files or bytes.
    """
    entries: list[FileEntry] = []
    total = 0
    for root, names, files in os.walk(folder, followlinks=False):
        for name in [*names, *files]:
            path = Path(root, name)
            if len(path.relative_to(folder).as_posix()) > MAX_PATH_LENGTH:
                raise UnsafePathError("folder", expected="plain file names", got="a name that may not travel")
            mode = path.lstat().st_mode
            if stat.S_ISDIR(mode):
                continue
            if not stat.S_ISREG(mode):
                raise UnsafePathError("folder", expected="regular files", got="a link or a special file")
            total += path.lstat().st_size
            if len(entries) >= max_files or total > max_bytes:
                raise FormatError("folder", expected=f"{max_files} files, {max_bytes} bytes at most", got="more")
            entries.append(_entry(folder, path.relative_to(folder).as_posix(), with_digest))
    return tuple(sorted(entries, key=lambda entry: entry.path))


def _entry(folder: Path, relative: str, with_digest: bool) -> FileEntry:
    try:
        _PATH.validate_python(relative)
    except ValidationError:
        raise UnsafePathError("folder", expected="plain file names", got="a name that may not travel") from None
    digest = file_digest(folder, relative) if with_digest else None
    return FileEntry(path=relative, num_bytes=(folder / relative).lstat().st_size, digest=digest)


def file_digest(folder: Path, relative: str) -> str:
    """Lowercase sha256 hex of one file.

    Args:
        folder: where to look.
        relative: a path below it.

    Returns:
        The digest.

    Raises:
        UnsafePathError: a symbolic link or a special file on the way.
    """
    with _open_below(folder, relative) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def whole_spans(files: Iterable[FileEntry]) -> Iterator[Span]:
    """The ranges that make up an index: every file from its first byte to its last.

    Args:
        files: the index.

    Yields:
        One range a file.
    """
    return (Span(path=entry.path, offset=0, num_bytes=entry.num_bytes) for entry in files)


def read_spans(folder: Path, spans: Iterable[Span]) -> bytes:
    """Read byte ranges, one after the other.

    Args:
        folder: where the files are.
        spans: the ranges.

    Returns:
        Their bytes, concatenated.

    Raises:
        FormatError: a range lies beyond the end of its file, or the file does not exist.
        UnsafePathError: a symbolic link or a special file on the way.
    """
    parts: list[bytes] = []
    for span in spans:
        try:
            with _open_below(folder, span.path) as stream:
                stream.seek(span.offset)
                parts.append(stream.read(span.num_bytes))
        except FileNotFoundError:
            raise FormatError("range", expected="a listed file", got="none") from None
        if len(parts[-1]) != span.num_bytes:
            raise FormatError("range", expected=f"{span.num_bytes} bytes", got=str(len(parts[-1])))
    return b"".join(parts)


@contextmanager
def _open_below(folder: Path, relative: str, flags: int = os.O_RDONLY) -> Iterator[BufferedIOBase]:
    """Open a regular file, refusing symbolic links in every step below `folder`."""
    *parents, name = relative.split("/")
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for parent in parents:
            if flags & os.O_CREAT:
                with suppress(FileExistsError):
                    os.mkdir(parent, dir_fd=at)
            below = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = below
        # Non-blocking, or a named pipe would hang the open.
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644, dir_fd=at)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise UnsafePathError("path", expected="plain folders and files", got="a link or a socket") from None
        raise
    finally:
        os.close(at)
    with os.fdopen(descriptor, "r+b") if flags & os.O_RDWR else os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnsafePathError("path", expected="a regular file", got="a special file")
        yield stream


class _Progress(Model):
    """What a part folder has on disk: its index, and for every file the ranges received, merged and sorted."""

    files: tuple[FileEntry, ...]
    ranges: dict[RelativePath, tuple[tuple[NaturalInt, NaturalInt], ...]]


class PartFolder:
    """A folder on its way in: ranges arrive in any order, survive restarts, and become visible all at once.

    A part folder of another index, or a damaged one, is thrown away: nothing in it was ever used.

    Args:
        target: what the folder is called when complete; until then it is `<target>.part`.
        files: its whole index.
    """

    def __init__(self, target: Path, files: Sequence[FileEntry]) -> None:
        check_index(files)
        self.target = target
        self.files = tuple(files)
        self._part = target.with_name(target.name + ".part")
        self._sizes = {entry.path: entry.num_bytes for entry in files}
        progress = self._load()
        if progress is None or progress.files != self.files:
            self.discard()
            self._part.mkdir(parents=True)
            progress = _Progress(files=self.files, ranges={})
        self._ranges = {path: list(ranges) for path, ranges in progress.ranges.items()}

    def missing(self, max_span_bytes: int, *, coming: Iterable[Span] = ()) -> list[Span]:
        """The ranges still to come, in the index's order, each at most `max_span_bytes` long.

        Args:
            max_span_bytes: longest range.
            coming: ranges that are on their way, however they were cut; nothing of them is named again.

        Returns:
            At most `MAX_SPANS` ranges; an empty file is a range of length 0.
        """
        held: dict[str, list[tuple[int, int]]] = {path: list(ranges) for path, ranges in self._ranges.items()}
        for span in coming:
            held.setdefault(span.path, []).append((span.offset, span.offset + span.num_bytes))
        found: list[Span] = []
        for entry in self.files:
            ranges = held.get(entry.path)
            for start, end in _gaps(_merged(ranges) if ranges else None, entry.num_bytes):
                for offset in range(start, max(end, start + 1), max_span_bytes):
                    length = min(max_span_bytes, end - offset)
                    found.append(Span(path=entry.path, offset=offset, num_bytes=length))
                    if len(found) == MAX_SPANS:
                        return found
        return found

    def write(self, pieces: Iterable[tuple[Span, bytes | memoryview]]) -> None:
        """Store ranges durably; ranges already held are written again without harm.

        Args:
            pieces: ranges of indexed files, with their bytes.

        Raises:
            FormatError: a range lies outside the index.
            OSError: the disk is full.
        """
        written = False
        for span, data in pieces:
            size = self._sizes.get(span.path)
            if size is None or len(data) != span.num_bytes or span.offset + span.num_bytes > size:
                raise FormatError("range", expected="a range of an indexed file", got="another")
            with _open_below(self._part, span.path, os.O_RDWR | os.O_CREAT) as stream:
                stream.seek(span.offset)
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            end = span.offset + span.num_bytes
            self._ranges[span.path] = _merged([*self._ranges.get(span.path, []), (span.offset, end)])
            written = True
        if written:
            self._save()

    def finish(self) -> bool:
        """Check the digests that the index states and rename the folder to its target.

        Returns:
            False when ranges are still missing.

        Raises:
            DigestError: a file is not the one in the index; the whole part folder is thrown away.
        """
        if self.missing(max_span_bytes=2**50):
            return False
        for entry in self.files:
            if entry.digest is not None and file_digest(self._part, entry.path) != entry.digest:
                self.discard()
                raise DigestError("received file", expected="the digest in the index", got="another")
        (self._part / _PROGRESS).unlink()
        for root, _, _ in os.walk(self._part):
            sync_folder(Path(root))
        self._part.rename(self.target)
        sync_folder(self.target.parent)
        return True

    def discard(self) -> None:
        """Throw away what has arrived."""
        shutil.rmtree(self._part, ignore_errors=True)

    def _load(self) -> _Progress | None:
        try:
            return _Progress.model_validate_json(read_bounded(self._part / _PROGRESS, _MAX_PROGRESS_BYTES))
        except (MissingFileError, FormatError, UnsafePathError, ValidationError):
            return None

    def _save(self) -> None:
        progress = _Progress(files=self.files, ranges={path: tuple(ranges) for path, ranges in self._ranges.items()})
        write_atomic(self._part / _PROGRESS, progress.model_dump_json().encode())


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _gaps(ranges: list[tuple[int, int]] | None, size: int) -> list[tuple[int, int]]:
    """What `ranges` leave open of [0, size); a file never received is a gap even when it is empty."""
    if ranges is None:
        return [(0, size)]
    gaps, at = [], 0
    for start, end in ranges:
        if start > at:
            gaps.append((at, start))
        at = end
    return gaps + ([(at, size)] if at < size else [])
