"""Decides once what is at a path, and lists its files: below a folder, in a table, or one file of many images.

Silo and aggregator use the same code for this. Nothing is opened but tables, and the headers of arrays. What holds no
image is listed with its reason, never left out silently.
"""

import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import numpy as np

from ddm.errors import DataError, MissingFileError
from ddm.images.array_files import ARRAYS, KINDS, ImageArrays, open_arrays
from ddm.images.idx import is_idx
from ddm.images.names import (
    SPREADSHEET_SUFFIXES,
    FolderNames,
    is_clutter,
    is_clutter_folder,
    is_document,
)
from ddm.images.reasons import Reason
from ddm.images.table import Columns, Table, TableRow, is_table
from ddm.images.table_paths import (
    FOLDER_TABLE,
    TablePaths,
    find_folder_table,
    notes_on_unused_tables,
)

MAX_ROWS_IN_MEMORY = 2_000_000
MAX_CHARACTERS_IN_MEMORY = 1 << 28
_EXPECTED = "a folder of images, a CSV or Parquet table with a column path, or a file of images"
_PICTURES_REMEDY = (
    "A folder of pictures in files of their own needs a plan with a table [transform]."
)


class DataKind(StrEnum):
    """What is at a path, as `[data] kind` in policy.toml calls it."""

    ARRAYS = "arrays"
    LATENTS = "latents"
    PICTURES = "pictures"


@dataclass(frozen=True)
class ImageFile:
    """A file of the data set, and what a table says about it. All of it is for private memory alone.

    Attributes:
        path: the file, as the file system spells it; undecodable bytes are escaped as Python does.
        files: the file itself, and those that are read with it: parts of one array, columns, labels.
        stats: the file statistics of each of these: bytes, and when its content and its entry in the folder last
            changed, ns.
        stated_ns: when `stats` were taken.
        row: what the table says about it.
        reason: why nothing is read.
        detail: more about the reason.
    """

    path: str
    files: tuple[str, ...] = ()
    stats: tuple[tuple[int, int, int], ...] = ()
    stated_ns: int = 0
    row: TableRow | None = field(default=None, repr=False)
    reason: Reason | None = None
    detail: str = ""

    @property
    def num_bytes(self) -> int:
        """The bytes of all files."""
        return sum(size for size, _, _ in self.stats)

    @property
    def is_clutter(self) -> bool:
        """Whether its name is not that of an image, such as a README or a PDF: public files like this are skipped."""
        return self.reason in (Reason.CLUTTER, Reason.UNKNOWN)


@dataclass(frozen=True)
class DataSet:
    """What is at a path.

    Attributes:
        path: its path.
        kind: arrays in a type and shape that a plan without a transform can take, latents, or pictures: anything that
            is decoded image by image.
        arrays: the opened arrays; None where there are none. Arrays of other types or shapes are here too, though
            their kind is pictures.
        arrays_error: why what looks like arrays cannot be opened as such; None where `arrays` are open, or where
            nothing looks like arrays.
        table: the table that names the files, or says what belongs to them.
        table_paths: leads the table's paths to files.
        notes: what a person should know about how the data were found.
        outside: whether links and paths may lead out of the data folder.
    """

    path: Path
    kind: DataKind
    arrays: ImageArrays | None = None
    arrays_error: DataError | None = None
    table: Table | None = None
    table_paths: TablePaths | None = None
    notes: tuple[str, ...] = ()
    outside: bool = False

    @property
    def looks_like_arrays(self) -> bool:
        """Whether there are arrays, also such as cannot be opened."""
        return self.arrays is not None or self.arrays_error is not None

    def require_arrays(self) -> ImageArrays:
        """Return the opened arrays.

        Raises:
            DataError: why they cannot be opened; or there is something else.
        """
        if self.arrays is not None:
            return self.arrays
        if self.arrays_error is not None:
            raise self.arrays_error
        raise DataError("data", expected=KINDS, got="pictures", remedy=_PICTURES_REMEDY)

    def files(self) -> Iterator[ImageFile]:
        """Yield the files in the order of their names, or of the table; what cannot be read comes with its reason.

        Raises:
            DataError: a table that does not parse, or that has more rows than the bounds allow.
        """
        is_folder = self.path.is_dir()
        folder = self.path
        if not is_folder:
            folder = self.path.parent
        boundary = _Boundary(folder, self.outside)
        if self.table is not None and self.table_paths is not None:
            self.table_paths.reset_counts()
            rows = _TableRows(self.table, self.table_paths, boundary)
            if is_folder:
                yield from rows.with_folder(self.path)
            else:
                yield from rows.without_folder()
        elif is_folder:
            yield from _below(str(self.path), boundary)
        else:
            names = FolderNames(os.listdir(self.path.parent))  # noqa: PTH208 - names alone
            yield _image_file(str(self.path), names, boundary)

    def remarks(self) -> list[str]:
        """Return what a person should know about how the data were found; complete once `files` came to its end."""
        remarks = list(self.notes)
        if self.table is not None:
            remarks += self.table.remarks()
        if self.table_paths is not None:
            remarks += self.table_paths.remarks()
        return remarks


def find_data(
    path: Path,
    columns: Columns | None = None,
    *,
    outside: bool = False,
) -> DataSet:
    """Decide what is at a path.

    Args:
        path: a folder of any depth, maybe with a table in it; a table; or a file of one or many images.
        columns: other names of the table's columns.
        outside: whether links and a table's paths may lead out of the data folder.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: a table without a column of paths, a spreadsheet, or neither a file nor a folder.
    """
    columns = columns or {}
    require_data(path)
    if path.is_dir():
        return _find_in_folder(path, columns, outside)
    if not path.is_file():
        raise DataError(
            "data",
            expected=_EXPECTED,
            got="a special file",
            remedy="Name a file or a folder of images.",
        )
    if path.suffix.lower() in SPREADSHEET_SUFFIXES:
        remedy = "In the program that made it, save it as CSV (UTF-8), and name that file."
        raise DataError("data", expected=_EXPECTED, got="a spreadsheet", remedy=remedy)
    if is_table(path, columns):
        table = Table(path, columns)
        return DataSet(
            path,
            DataKind.PICTURES,
            table=table,
            table_paths=TablePaths.of(table),
            outside=outside,
        )
    if columns:
        raise DataError(
            "--column",
            expected="a table as --data",
            got="a file that is not a table",
            remedy="Leave --column out, or name the table as --data.",
        )
    if path.suffix.lower() in ARRAYS or is_idx(path):
        return _find_arrays(path, outside)
    return DataSet(path, DataKind.PICTURES, outside=outside)


def require_data(path: Path) -> None:
    """Refuse a path at which there is nothing.

    Raises:
        MissingFileError: says what may be there.
    """
    if not path.exists():
        raise MissingFileError(str(path), expected=_EXPECTED, got="nothing there")


def _find_in_folder(
    path: Path,
    columns: Columns,
    outside: bool,
) -> DataSet:
    if _holds_arrays(path) and not (path / FOLDER_TABLE).is_file():
        if columns:
            raise DataError(
                "--column",
                expected="a table as --data",
                got="a folder of arrays",
                remedy="Leave --column out, or name the table as --data.",
            )
        data = _find_arrays(path, outside)
        return replace(data, notes=notes_on_unused_tables(path))
    boundary = _Boundary(path, outside)
    folder_table = find_folder_table(path, columns, boundary.contains)
    if folder_table.table is None:
        if columns:
            expected = "a table as --data, or a table in the folder that lists its files"
            remedy = " ".join(
                [*folder_table.notes, "Use the names in the first line of the table."]
            )
            raise DataError("--column", expected=expected, got="no table that fits", remedy=remedy)
        return DataSet(path, DataKind.PICTURES, notes=folder_table.notes, outside=outside)
    table_paths = TablePaths.of(folder_table.table)
    return DataSet(
        path,
        DataKind.PICTURES,
        table=folder_table.table,
        table_paths=table_paths,
        notes=folder_table.notes,
        outside=outside,
    )


def _holds_arrays(folder: Path) -> bool:
    """Whether a folder's own files are arrays: npy in one or several parts, or nothing but Parquet."""
    names = os.listdir(folder)  # noqa: PTH208 - names alone
    if any(
        name.endswith(".npy") and name.startswith(("images.", "images-", "latents.", "latents-"))
        for name in names
    ):
        return True
    files = [name for name in names if not (is_clutter(name) or is_document(name))]
    return bool(files) and all(name.lower().endswith(".parquet") for name in files)


def _find_arrays(path: Path, outside: bool) -> DataSet:
    if not _is_inside(path, outside):
        return DataSet(path, DataKind.PICTURES, arrays_error=_outside_error(), outside=outside)
    try:
        arrays = open_arrays(path)
    except DataError as error:
        return DataSet(path, DataKind.PICTURES, arrays_error=error, outside=outside)
    return DataSet(path, _kind_of(arrays), arrays, outside=outside)


def _is_inside(path: Path, outside: bool) -> bool:
    """Whether all files of arrays, and those that are read with them, are in the data folder."""
    if path.is_dir():
        folder = path
        names = [name for name in os.listdir(path) if name.endswith((".npy", ".parquet"))]  # noqa: PTH208 - names alone
    else:
        # The file itself was named by the user of the command; what is beside it was not.
        folder = path.parent
        names = FolderNames(os.listdir(folder)).companions(path.name)  # noqa: PTH208
    boundary = _Boundary(folder, outside)
    return all(boundary.contains(str(folder / name)) for name in names)


def _kind_of(arrays: ImageArrays) -> DataKind:
    if arrays.name == "latents":
        return DataKind.LATENTS
    dtype, shape = arrays.row
    plain_type = dtype.kind == "f" or dtype in (np.uint8, np.uint16)
    plain_shape = 1 <= len(shape) <= 4 and 0 not in shape
    if plain_type and plain_shape:
        return DataKind.ARRAYS
    return DataKind.PICTURES


def _outside_error() -> DataError:
    remedy = (
        "Copy the files into the folder. A silo may also allow it: --outside, which silo.toml keeps as outside = true "
        "in the table [images]."
    )
    return DataError(
        "data",
        expected="files inside of the data folder",
        got="a link that leads outside",
        remedy=remedy,
    )


class _Boundary:
    """Decides whether a file is inside the data folder after links are followed.

    An export from elsewhere may hold a link to any file of this machine, and a table may name one: neither is read
    unless the site's own settings say so.
    """

    def __init__(self, folder: Path, outside: bool) -> None:
        self._allows_all = outside
        # The folder itself may be a link: the user of the command named it.
        self._root = os.path.realpath(folder)
        self._real_folder = lru_cache(maxsize=4096)(os.path.realpath)

    def contains(self, path: str) -> bool:
        if self._allows_all:
            return True
        folder, name = os.path.split(path)
        # Without a link in place of the file itself, its folder decides: that saves a call for each part of each path.
        real_path = f"{self._real_folder(folder)}{os.sep}{name}"
        if os.path.islink(path):  # noqa: PTH114 - a Path takes as long as the call
            real_path = os.path.realpath(path)
        return real_path.startswith(self._root.rstrip(os.sep) + os.sep)


class _TableRows:
    """The rows of a table, led to files."""

    def __init__(
        self,
        table: Table,
        paths: TablePaths,
        boundary: _Boundary,
    ) -> None:
        self._table = table
        self._paths = paths
        self._boundary = boundary

    def without_folder(self) -> Iterator[ImageFile]:
        """Yield the files that the table names, in its order."""
        # Digests, since a table of ten million rows leaves no room for their paths.
        digests: set[bytes] = set()
        for row in self._table.rows():
            path = self._paths.resolve(row.path)
            digest = blake2b(os.fsencode(path), digest_size=16).digest()
            if digest in digests:
                yield ImageFile(path, row=row, reason=Reason.REPEATED)
            else:
                digests.add(digest)
                yield self._file_of(path, row)

    def with_folder(self, folder: Path) -> Iterator[ImageFile]:
        """Yield the files below a folder with what the table says about them, then rows that lead to none of these.

        Raises:
            DataError: more rows than memory may hold; a table of its own as the data set is read row by row.
        """
        rows: dict[str, TableRow] = {}
        num_characters = 0
        for row in self._table.rows():
            path = self._paths.resolve(row.path)
            if path in rows:
                yield ImageFile(path, row=row, reason=Reason.REPEATED)
                continue
            rows[path] = row
            num_characters += len(path) + row.num_characters
            if len(rows) > MAX_ROWS_IN_MEMORY or num_characters > MAX_CHARACTERS_IN_MEMORY:
                expected = f"at most {MAX_ROWS_IN_MEMORY} rows and {MAX_CHARACTERS_IN_MEMORY} characters beside images"
                got = f"{len(rows)} rows and {num_characters} characters so far"
                remedy = "Give the table itself as --data: then it is read row by row."
                raise DataError("table", expected=expected, got=got, remedy=remedy)
        table_path = os.path.normpath(self._table.path)
        for file in _below(str(folder), self._boundary):
            path = os.path.normpath(file.path)
            if path == table_path:
                continue
            if path not in rows:
                yield file
                continue
            row = rows.pop(path)
            if file.is_clutter:
                yield self._file_of(path, row)  # the table names it on purpose
            else:
                yield replace(file, row=row)
        for path, row in rows.items():
            yield self._file_of(path, row)

    def _file_of(self, path: str, row: TableRow) -> ImageFile:
        problem = self._paths.problem(row.path)
        if problem:
            return ImageFile(
                path,
                row=row,
                reason=Reason.MISSING,
                detail=problem,
            )
        if not self._boundary.contains(path):
            return ImageFile(
                path,
                row=row,
                reason=Reason.OUTSIDE,
                detail="a path of the table",
            )
        file = _image_file(path, FolderNames(()), self._boundary)
        if file.reason is Reason.MISSING:
            hint = self._paths.hint(path)
            file = replace(file, detail=hint or file.detail)
        return replace(file, row=row)


def _below(root: str, boundary: _Boundary) -> Iterator[ImageFile]:
    """Go through folders without recursion, whatever their depth, files before folders, both in the order of names."""
    pending = [root]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(folder) as entries:
                items = sorted(entries, key=lambda item: item.name)
        except OSError as error:
            yield ImageFile(folder, reason=Reason.FORBIDDEN, detail=f"a folder: {error.strerror}")
            continue
        names = FolderNames(item.name for item in items)
        subfolders = []
        for item in items:
            if item.is_dir(follow_symlinks=False):
                if is_clutter_folder(item.name):
                    yield ImageFile(item.path, reason=Reason.CLUTTER, detail="a folder")
                else:
                    subfolders.append(item.path)
            elif not names.belongs_to_another(item.name):
                yield _file_in_folder(item, names, boundary)
        # In reverse, since the last one is taken first.
        pending.extend(reversed(subfolders))


def _file_in_folder(
    item: "os.DirEntry[str]",
    names: FolderNames,
    boundary: _Boundary,
) -> ImageFile:
    if names.is_clutter(item.name):
        return ImageFile(item.path, reason=Reason.CLUTTER)
    if is_document(item.name):
        return ImageFile(item.path, reason=Reason.UNKNOWN)
    if item.is_symlink():
        if _is_folder(item):
            return ImageFile(item.path, reason=Reason.FOLDER_LINK)
        if not boundary.contains(item.path):
            return ImageFile(item.path, reason=Reason.OUTSIDE, detail="a link")
    return _image_file(item.path, names, boundary)


def _is_folder(item: "os.DirEntry[str]") -> bool:
    try:
        return item.is_dir()
    except OSError:  # a link in a circle
        return False


def _image_file(
    path: str,
    names: FolderNames,
    boundary: _Boundary,
) -> ImageFile:
    """Return a file with those that are read with it, and their sizes and times."""
    name = os.path.split(path)[1]
    companions = [f"{path.removesuffix(name)}{companion}" for companion in names.companions(name)]
    if not all(boundary.contains(companion) for companion in companions):
        return ImageFile(
            path,
            reason=Reason.OUTSIDE,
            detail="a link to the other file of this image",
        )
    files = (path, *companions)
    stats = []
    # Taken before the files are examined, so that a change in between looks recent to the memory of scans.
    stated_ns = time.time_ns()
    for file in files:
        try:
            status = os.stat(file)  # noqa: PTH116 - a Path takes as long as the call
        except OSError as error:
            reason = Reason.FORBIDDEN
            if isinstance(error, FileNotFoundError):
                reason = Reason.MISSING
            return ImageFile(path, reason=reason, detail=os.strerror(error.errno or 0))
        if not stat.S_ISREG(status.st_mode):
            return ImageFile(path, reason=Reason.SPECIAL)
        stats.append((status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return ImageFile(path, files, tuple(stats), stated_ns)
