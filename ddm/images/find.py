"""Finds the files of a data set: below a folder, in a table, or one file of many images; opens none but the table.

A folder may have a table of its own, volumes.csv: it says what belongs to the files below the folder, and names all of
them or some.
"""

import os
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddm.errors import DataError, MissingFileError
from ddm.images.reasons import Reason
from ddm.images.table import Columns, Row, is_table, read_table

FOLDER_TABLE = "volumes.csv"
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


def find_files(data: Path, columns: Columns) -> Iterator[Entry]:
    """Yield the files of a data set; what cannot be read is yielded with its reason, never left out.

    Links to files are followed, links to folders are not.

    Args:
        data: a folder of any depth, which may hold a table of its own; a table; or a file of one or many images.
        columns: other names of the table's columns.

    Raises:
        MissingFileError: nothing at `data`.
        DataError: a table that does not parse, or without a column of paths; or neither a file nor a folder.
    """
    require_data(data)
    if data.is_dir() and (data / FOLDER_TABLE).is_file():
        yield from _with_table(data, columns)
    elif data.is_dir():
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
                yield replace(_entry(path, _Names(())), row=row)
    elif data.is_file():
        yield _entry(str(data), _Names(os.listdir(data.parent)))  # noqa: PTH208 - names alone
    else:
        raise DataError("data", expected=_EXPECTED, got="a special file")


def require_data(data: Path) -> None:
    """Refuse a path at which there is nothing.

    Raises:
        MissingFileError: says what may be there.
    """
    if not data.exists():
        raise MissingFileError(str(data), expected=_EXPECTED, got="nothing there")


def _with_table(data: Path, columns: Columns) -> Iterator[Entry]:
    """Yield the files below a folder with what its table says of them, then rows that lead to no file."""
    table, rows = data / FOLDER_TABLE, dict[str, Row]()
    for row in read_table(table, columns):
        path = os.path.normpath(data / row.path)
        if path in rows:
            yield Entry(path, row=row, reason=Reason.REPEATED)
        rows.setdefault(path, row)
    for entry in _below(str(data)):
        path = os.path.normpath(entry.path)
        if path != os.path.normpath(table):
            yield replace(entry, row=rows.pop(path, None))
    for path, row in rows.items():
        yield Entry(path, row=row, reason=Reason.MISSING)


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
        names = _Names(item.name for item in items)
        pending.extend(item.path for item in reversed(items) if item.is_dir(follow_symlinks=False))
        for item in items:
            if item.is_dir(follow_symlinks=False) or names.belongs_to_another(item.name):
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


class _Names:
    """The names in one folder, looked through once: which of them are read together with others.

    Attributes:
        parts: of one array, in their order.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._all = frozenset(names)
        found = ["images.npy"] if "images.npy" in self._all else sorted(filter(_is_part, self._all))
        self.parts, self._further = found, frozenset([*found[1:], *_COLUMNS] if found else [])

    def belongs_to_another(self, name: str) -> bool:
        """Whether a file is read with another one: labels beside idx images, columns and parts beside an npy."""
        if _IDX_LABELS in name:
            return name.replace(_IDX_LABELS, _IDX_IMAGES).replace("idx1", "idx3") in self._all
        return name in self._further

    def beside(self, name: str) -> list[str]:
        """Return what is read with a file."""
        if _IDX_IMAGES in name:
            labels = name.replace("images-idx3", "labels-idx1")
            return [labels] if labels != name and labels in self._all else []
        if name == "images.npy" or _is_part(name):
            return [each for each in (*self.parts[1:], *_COLUMNS) if each in self._all]
        return []


def _is_part(name: str) -> bool:
    return name.startswith("images-") and name.endswith(".npy")


def _entry(path: str, names: _Names) -> Entry:
    folder, name = os.path.split(path)
    beside = names.beside(name)
    files = (path, *(f"{folder}{os.sep}{each}" for each in beside))
    stats, stated_ns = [], time.time_ns()
    for file in files:
        try:
            status = os.stat(file)  # noqa: PTH116 - a Path takes as long as the call
        except OSError as error:
            reason = Reason.MISSING if isinstance(error, FileNotFoundError) else Reason.FORBIDDEN
            return Entry(path, reason=reason, detail=os.strerror(error.errno or 0))
        if not stat.S_ISREG(status.st_mode):
            return Entry(path, reason=Reason.SPECIAL)
        stats.append((status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return Entry(path, files, tuple(stats), stated_ns)
