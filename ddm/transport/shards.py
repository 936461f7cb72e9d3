"""Folders that travel in pieces, and arrive whole or not at all.

The sender lists a folder and reads byte ranges of it; the receiver collects ranges, in any order and across restarts,
in a `.part` folder and renames it when every byte is there. Nothing follows a symbolic link: anybody who can place one
in a folder could otherwise make the other user's process read or write any file of that user.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from ddm.errors import AbsentFileError, DigestError, FormatError, MissingFileError, UnsafePathError
from ddm.io.files import move_into_place, read_bounded, write_atomic
from ddm.io.paths import MAX_DEPTH
from ddm.io.untrusted import open_below, walk
from ddm.protocol.base import Model, NaturalInt, RelativePath
from ddm.transport.messages import MAX_SPANS, IndexEntry, Span, check_no_collisions

_Range = tuple[int, int]
"""The first byte, and the one behind the last."""
# Starts with a dot, which no path in a message may, so that no received file can replace it.
_PROGRESS = ".progress.json"
_MAX_PROGRESS_BYTES = 16 * 1024 * 1024


def list_folder(
    folder: Path,
    *,
    max_files: int,
    max_bytes: int,
    with_digest: bool = False,
) -> tuple[IndexEntry, ...]:
    """List a folder of at most this many files and bytes as an index, one entry a file, sorted by path.

    Raises:
        UnsafePathError: see `ddm.io.untrusted.walk`; or a path that may not travel.
        FormatError: too many files or bytes.
    """
    entries: list[IndexEntry] = []
    total_bytes = 0
    # Each file may be in folders of its own.
    for name, entry in walk(folder, max_entries=max_files * MAX_DEPTH):
        total_bytes += entry.bytes
        if len(entries) >= max_files or total_bytes > max_bytes:
            raise FormatError(
                "folder",
                expected=f"at most {max_files} files of {max_bytes} bytes in all",
                got=f"{total_bytes} bytes in the first {len(entries) + 1} files",
            )
        digest = None
        if with_digest:
            digest = file_digest(folder, name)
        try:
            entries.append(IndexEntry(path=name, num_bytes=entry.bytes, digest=digest))
        except ValidationError as error:
            raise UnsafePathError(
                name,
                expected="a path that may travel",
                got="a path that is too long or too deep",
            ) from error
    return tuple(sorted(entries, key=lambda entry: entry.path))


def file_digest(folder: Path, relative: str) -> str:
    """Return the lowercase sha256 hex of one file; raises as `ddm.io.untrusted.open_below`."""
    with open_below(folder, relative, relative) as (stream, _):
        return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]  # it reads into buffers


def whole_spans(files: Iterable[IndexEntry]) -> Iterator[Span]:
    """Return the ranges that make up an index: every file from its first byte to its last."""
    return (Span(path=entry.path, offset=0, num_bytes=entry.num_bytes) for entry in files)


def read_spans(folder: Path, spans: Iterable[Span]) -> bytes:
    """Read byte ranges of the files in a folder, and return them one after the other.

    Raises:
        FormatError: a range is beyond the end of its file, or the file does not exist.
        UnsafePathError: a symbolic link or a special file on the way.
    """
    parts: list[bytes] = []
    for span in spans:
        try:
            with open_below(folder, span.path, span.path) as (stream, _):
                stream.seek(span.offset)
                data = stream.read(span.num_bytes)
        except AbsentFileError as error:
            raise FormatError(
                "range",
                expected="one of a file in the folder",
                got="a range of a missing file",
            ) from error
        if len(data) != span.num_bytes:
            raise FormatError(
                "range",
                expected=f"{span.num_bytes} bytes",
                got=f"{len(data)} bytes from byte {span.offset} on",
            )
        parts.append(data)
    return b"".join(parts)


class _Progress(Model):
    """What a part folder has on disk: its index, and for every file the ranges received, merged and sorted."""

    files: tuple[IndexEntry, ...]
    ranges: dict[RelativePath, tuple[tuple[NaturalInt, NaturalInt], ...]]


class PartFolder:
    """A folder on its way in: ranges arrive in any order, survive restarts, and become visible all at once.

    A part folder of another index, or a damaged one, is deleted: nothing in it was ever used.

    Args:
        target: what the folder is called when complete; until then it is `<target>.part`.
        files: its whole index.
    """

    def __init__(self, target: Path, files: Sequence[IndexEntry]) -> None:
        # The index comes from somebody else: its files must not overwrite each other.
        check_no_collisions(files)
        self.target = target
        self.files = tuple(files)
        self._part = target.with_name(target.name + ".part")
        # Received ranges are compared with these sizes, so that none can be written beyond its file's announced end.
        self._sizes = {entry.path: entry.num_bytes for entry in files}
        progress = self._load()
        if progress is None or progress.files != self.files:
            self.discard()
            self._part.mkdir(parents=True)
            progress = _Progress(files=self.files, ranges={})
        self._ranges = {path: list(ranges) for path, ranges in progress.ranges.items()}

    def missing(self, max_span_bytes: int, *, in_flight: Iterable[Span] = ()) -> list[Span]:
        """The ranges still to come, in the index's order, each at most `max_span_bytes` long.

        Args:
            max_span_bytes: longest range.
            in_flight: ranges that are on their way, however they were cut; nothing of them is named again.

        Returns:
            At most `MAX_SPANS` ranges; an empty file is a range of length 0.
        """
        # Copies, since what is in flight is not on disk.
        covered: dict[str, list[_Range]] = {}
        for path, ranges in self._ranges.items():
            covered[path] = list(ranges)
        for span in in_flight:
            ranges = covered.setdefault(span.path, [])
            end = span.offset + span.num_bytes
            ranges.append((span.offset, end))
        missing: list[Span] = []
        for entry in self.files:
            for start, end in _gaps(covered.get(entry.path, []), entry.num_bytes):
                # An empty file is a gap of length 0, which needs one range too.
                for offset in range(start, max(end, start + 1), max_span_bytes):
                    span = Span(
                        path=entry.path,
                        offset=offset,
                        num_bytes=min(max_span_bytes, end - offset),
                    )
                    missing.append(span)
                    if len(missing) == MAX_SPANS:
                        return missing
        return missing

    def write(self, pieces: Iterable[tuple[Span, bytes | memoryview]]) -> None:
        """Store ranges durably; ranges that are there already are written again without harm.

        Raises:
            FormatError: a range is outside the index.
            OSError: the disk is full.
        """
        has_written = False
        for span, data in pieces:
            size = self._sizes.get(span.path)
            end = span.offset + span.num_bytes
            if size is None or len(data) != span.num_bytes or end > size:
                raise FormatError(
                    "range",
                    expected="the bytes of a range within an indexed file",
                    got=f"{len(data)} bytes for byte {span.offset} and on "
                    f"of a file of {size or 'no'} bytes",
                )
            with open_below(self._part, span.path, span.path, make=True) as (stream, _):
                stream.seek(span.offset)
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            ranges = [*self._ranges.get(span.path, []), (span.offset, end)]
            self._ranges[span.path] = _merge_ranges(ranges)
            has_written = True
        # After the bytes are on disk: a range that is recorded is never fetched again.
        if has_written:
            self._save()

    def finish(self) -> bool:
        """Check the digests that the index states and rename the folder to its target; False while ranges are missing.

        Raises:
            DigestError: a file is not the one in the index; the whole part folder is deleted.
        """
        if self.missing(max_span_bytes=2**50):
            return False
        for entry in self.files:
            if entry.digest is None:
                continue
            digest = file_digest(self._part, entry.path)
            if digest != entry.digest:
                # Which range is wrong is not known, so that all of them have to come again.
                self.discard()
                raise DigestError(
                    "received file",
                    expected=f"sha256 {entry.digest[:16]}...",
                    got=f"{digest[:16]}...",
                )
        # The target holds the files of the index and nothing else.
        (self._part / _PROGRESS).unlink()
        move_into_place(self._part, self.target)
        return True

    def discard(self) -> None:
        """Delete what has arrived."""
        shutil.rmtree(self._part, ignore_errors=True)

    def _load(self) -> _Progress | None:
        try:
            data = read_bounded(self._part / _PROGRESS, _MAX_PROGRESS_BYTES)
            return _Progress.model_validate_json(data)
        except (MissingFileError, FormatError, UnsafePathError, ValidationError):
            return None

    def _save(self) -> None:
        ranges = {path: tuple(file_ranges) for path, file_ranges in self._ranges.items()}
        progress = _Progress(files=self.files, ranges=ranges)
        text = progress.model_dump_json()
        write_atomic(self._part / _PROGRESS, text.encode())


def _merge_ranges(ranges: list[_Range]) -> list[_Range]:
    """Sort ranges and join those that touch or overlap."""
    merged: list[_Range] = []
    for start, end in sorted(ranges):
        # Sorted by their start, so that only the last one can touch.
        if merged and start <= merged[-1][1]:
            last_start, last_end = merged[-1]
            merged[-1] = (last_start, max(last_end, end))
        else:
            merged.append((start, end))
    return merged


def _gaps(ranges: list[_Range], size: int) -> list[_Range]:
    """Return what `ranges` leave open of [0, size); a file of which nothing came is a gap even when it is empty."""
    if not ranges:
        return [(0, size)]
    gaps = []
    position = 0
    for start, end in _merge_ranges(ranges):
        if start > position:
            gaps.append((position, start))
        position = end
    if position < size:
        gaps.append((position, size))
    return gaps
