"""Finds the files of a data set: below a folder, in a table, or one file of many images; opens none but the table."""

import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddm.errors import DataError, MissingFileError
from ddm.imaging.reasons import Reason
from silo.images.table import Row, is_table, read_table

_IDX_IMAGES, _IDX_LABELS = "images-idx", "labels-idx"
_COLUMNS = ("labels.npy", "patients.npy", "captions.npy")
_EXPECTED = "a folder of images, a CSV or Parquet table with a column path, or a file of images"


@dataclass(frozen=True)
class Entry:
    """A file of the data set, and what a table says of it. All of it is for private memory alone.

    Attributes:
        path: the file, as the file system spells it; undecodable bytes are escaped as Python does.
        files: it, and what belongs to it.
        stats: of each file: bytes, and when its content and its entry in the folder last changed, ns.
        stated_ns: when that was asked for.
        row: what the table says of it.
        reason: why nothing is read.
        detail: more of that.
    """

    path: str
    files: tuple[str, ...] = ()
    stats: tuple[tuple[int, int, int], ...] = ()
    stated_ns: int = 0
    row: Row | None = field(default=None, repr=False)
    reason: Reason | None = None
    detail: str = ""

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(each[0] for each in self.stats)


def find_entries(data: Path, columns: dict[str, str]) -> Iterator[Entry]:
    """Yield the files of a data set; what cannot be read is yielded with its reason, never left out.

    Links to files are followed, links to folders are not.

    Args:
        data: a folder of any depth; a table; or a file of one or many images.
        columns: other names of the table's columns, such as ``{"label": "finding"}``.

    Raises:
        MissingFileError: nothing at `data`.
        DataError: a table that does not parse, or without a column of paths; or neither a file nor a folder.
    """
    if not data.exists():
        raise MissingFileError(str(data), expected=_EXPECTED, got="nothing there")
    if data.is_dir():
        if columns:
            raise DataError("--column", expected="a table as --data", got="a folder")
        yield from _below(str(data))
    elif is_table(data, columns):
        named: set[str] = set()
        for row in read_table(data, columns):
            path = os.path.normpath(data.parent / row.path)
            if path in named:
                yield Entry(path, row=row, reason=Reason.REPEATED)
            else:
                named.add(path)
                yield replace(_entry(path, frozenset()), row=row)
    elif data.is_file():
        yield _entry(str(data), frozenset(os.listdir(data.parent)))  # noqa: PTH208 - names alone
    else:
        raise DataError("data", expected=_EXPECTED, got="a special file")


def _below(root: str) -> Iterator[Entry]:
    """Go through folders without recursion, whatever their depth, each in the order of its names."""
    pending = [root]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(folder) as found:
                items = sorted(found, key=lambda item: item.name)
        except OSError as error:
            yield Entry(folder, reason=Reason.FORBIDDEN, detail=f"a folder: {error.strerror}")
            continue
        names = frozenset(item.name for item in items)
        pending.extend(item.path for item in reversed(items) if item.is_dir(follow_symlinks=False))
        for item in items:
            if item.is_dir(follow_symlinks=False) or _belongs_to_another(item.name, names):
                continue
            if item.is_symlink() and _is_folder(item):
                yield Entry(item.path, reason=Reason.FOLDER_LINK)
            else:
                yield _entry(item.path, names)


def _is_folder(item: "os.DirEntry[str]") -> bool:
    try:
        return item.is_dir()
    except OSError:  # a link in a circle
        return False


def _belongs_to_another(name: str, names: frozenset[str]) -> bool:
    """Whether a file is read with another one: labels beside idx images, columns and further parts beside an npy."""
    if _IDX_LABELS in name:
        return name.replace(_IDX_LABELS, _IDX_IMAGES).replace("idx1", "idx3") in names
    parts = _parts(names)
    return bool(parts) and (name in _COLUMNS or name in parts[1:])


def _parts(names: frozenset[str]) -> list[str]:
    return ["images.npy"] if "images.npy" in names else sorted(each for each in names if _is_part(each))


def _is_part(name: str) -> bool:
    return name.startswith("images-") and name.endswith(".npy")


def _entry(path: str, names: frozenset[str]) -> Entry:
    folder, name = os.path.split(path)
    beside: list[str] = []
    if _IDX_IMAGES in name:
        labels = name.replace("images-idx3", "labels-idx1")
        beside = [labels] if labels != name and labels in names else []
    elif name == "images.npy" or _is_part(name):
        parts = _parts(names)
        beside = [each for each in (*parts[1:], *_COLUMNS) if each in names]
    files = (path, *(f"{folder}{os.sep}{each}" for each in beside))
    stats, stated_ns = [], time.time_ns()
    for file in files:
        try:
            status = Path(file).stat()
        except OSError as error:
            reason = Reason.MISSING if isinstance(error, FileNotFoundError) else Reason.FORBIDDEN
            return Entry(path, reason=reason, detail=os.strerror(error.errno or 0))
        if not stat.S_ISREG(status.st_mode):
            return Entry(path, reason=Reason.SPECIAL)
        stats.append((status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return Entry(path, files, tuple(stats), stated_ns)
