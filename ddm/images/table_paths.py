"""Where the paths of a table lead, and which table in a folder names the files below it.

A path is taken as it is written, relative to the table; a backslash is a separator where no file has it in its name.
Nothing else is substituted: a name that differs in case is another name, and said.
"""

import os
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

from ddm.errors import DataError
from ddm.images.names import TABLE_SUFFIXES, is_clutter_folder, is_hidden
from ddm.images.table import Columns, Table

FOLDER_TABLE = "volumes.csv"
_SAMPLE_ROWS = 200
_MAX_BASES = 256
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


class TablePaths:
    """Leads the paths of one table to files.

    Args:
        folder: the folder that the paths are relative to.

    Attributes:
        num_backslashes: paths whose backslashes were read as separators.
        num_other_case: paths that lead to no file, where the name of a file differs in case alone.
        is_moved: whether the paths are relative to another folder than the table's own.
    """

    def __init__(self, folder: str, is_moved: bool = False) -> None:
        self._folder = folder
        self.is_moved = is_moved
        self.num_backslashes = 0
        self.num_other_case = 0
        self._folded_names = lru_cache(maxsize=64)(_folded_names)
        self._folded_stems = lru_cache(maxsize=64)(_folded_stems)

    @classmethod
    def of(cls, table: Table) -> "TablePaths":
        """Return what leads a table's paths: from its own folder, else from the one other folder that fits.

        Tables often name files without the folder that they are in, or begin with the name of the table's own folder.
        """
        folder = str(table.path.parent)
        paths = _sample(table)
        own = cls(folder)
        if not paths or own.num_there(paths):
            return own
        others = [cls(base, is_moved=True) for base in _other_bases(folder, paths)]
        fitting = [base for base in others if 2 * base.num_there(paths) >= len(paths)]
        # Several folders may hold different files of the same names: then no reading is certain.
        if len(fitting) == 1:
            return fitting[0]
        return own

    def resolve(self, text: str) -> str:
        """Return the path of a file, which may not exist, as the file system spells it."""
        path = self._joined(text)
        if "\\" in text and not self.problem(text) and not os.path.lexists(path):
            self.num_backslashes += 1
            path = self._joined(text.replace("\\", os.sep))
        return os.path.normpath(path)

    def reset_counts(self) -> None:
        """Count from the beginning."""
        self.num_backslashes = 0
        self.num_other_case = 0

    def num_there(self, texts: Sequence[str]) -> int:
        """Count the paths that lead to something."""
        usable = [text for text in texts if not self.problem(text)]
        return sum(os.path.lexists(self.resolve(text)) for text in usable)

    def _joined(self, text: str) -> str:
        if text.startswith(os.sep):
            return text
        return f"{self._folder}{os.sep}{text}"

    def problem(self, text: str) -> str:
        """Return why a path can lead nowhere on this machine; blank for any other."""
        if "\0" in text:
            return "a character that no path can contain"
        if _DRIVE.match(text):
            return "a path with a Windows drive: write paths relative to the table"
        if text.startswith(("\\\\", "//")):
            return "a path on a server: write paths relative to the table"
        if _ADDRESS.match(text):
            return "a URL: copy the files into the table's folder"
        return ""

    def hint(self, path: str) -> str:
        """Return what may be wrong with a path that leads to no file; blank where there is no sign of it."""
        folder, name = os.path.split(path)
        if _folded(name) in self._folded_stems(folder):
            return (
                "a file of this name with an ending, such as .png, is there: write the whole name"
            )
        while folder and name and not os.path.isdir(folder):  # noqa: PTH112 - a Path takes as long as the call
            folder, name = os.path.split(folder)
        if _folded(name) not in self._folded_names(folder):
            return ""
        self.num_other_case += 1
        return "a file whose name differs only in case, or in how accents are encoded, exists"

    def remarks(self) -> list[str]:
        """Return what a person should know about where the paths led, once all of them were led."""
        remarks = []
        if self.is_moved:
            remarks.append(
                "The paths of the table are not relative to its folder: they were read from another folder that fits."
            )
        if self.num_backslashes:
            remarks.append(
                f"{self.num_backslashes} paths of the table have backslashes, which were read as separators of folders."
            )
        if self.num_other_case:
            remarks.append(
                f"{self.num_other_case} paths of the table lead to no file, but names there differ in case alone: "
                "correct the table."
            )
        return remarks


@dataclass(frozen=True)
class FolderTable:
    """The table in a folder of images.

    Attributes:
        table: the table that is used; None where there is none, or where several fit.
        notes: what a person should know about it.
    """

    table: Table | None = None
    notes: tuple[str, ...] = ()


def find_folder_table(
    folder: Path,
    columns: Columns,
    is_inside: Callable[[str], bool],
) -> FolderTable:
    """Return the table of the files below a folder: volumes.csv, else the one CSV whose paths lead to files there.

    Args:
        folder: the folder of images; tables in folders below it are not looked at.
        columns: other names of the table's columns.
        is_inside: whether a path leads into the folder; a table elsewhere, behind a link, is not opened.
    """
    fitting: list[Table] = []
    notes: list[str] = []
    for path in _tables(folder):
        if not is_inside(str(path)):
            notes.append(
                f"{path.name} beside the images was not used: it is a link that leads outside."
            )
            continue
        if path.name == FOLDER_TABLE:
            return FolderTable(Table(path, columns))
        table = Table(path, columns)
        try:
            paths = [row.path for row in islice(table.rows(), _SAMPLE_ROWS)]
        except DataError as error:
            if table.names_paths():
                notes.append(f"{path.name} beside the images was not used: {error}.")
            continue
        if paths and 2 * TablePaths.of(table).num_there(paths) >= len(paths):
            fitting.append(table)
    if len(fitting) == 1:
        name = fitting[0].path.name
        return FolderTable(
            fitting[0], (f"{name} beside the images lists them and was used.", *notes)
        )
    if fitting:
        names = ", ".join(table.path.name for table in fitting)
        notes.append(
            f"Several tables beside the images list them, so that none was used: {names}. Give one as --data."
        )
    return FolderTable(None, tuple(notes))


def notes_on_unused_tables(folder: Path) -> tuple[str, ...]:
    """Return a note if a folder of arrays has tables, which say nothing about arrays."""
    names = [path.name for path in _tables(folder)]
    if not names:
        return ()
    return (
        f"Tables beside arrays are not used: {', '.join(names)}. Save columns as labels.npy and the like.",
    )


def _tables(folder: Path) -> list[Path]:
    """Return the tables at the top of a folder, the one that always counts first."""
    paths = [
        path
        for path in folder.iterdir()
        if path.suffix.lower() in TABLE_SUFFIXES and not is_hidden(path.name)
    ]
    return sorted(
        (path for path in paths if path.is_file()),
        key=lambda path: (path.name != FOLDER_TABLE, path.name),
    )


def _sample(table: Table) -> list[str]:
    """Return the first paths of a table; none of one that does not parse, which is reported when its rows are read."""
    try:
        return [row.path for row in islice(table.rows(), _SAMPLE_ROWS)]
    except DataError:
        return []


def _other_bases(folder: str, paths: Sequence[str]) -> list[str]:
    """Return the folders below, and the one above if all paths begin with the name of the table's folder."""
    with os.scandir(folder) as items:
        bases = [
            item.path
            for item in items
            if item.is_dir(follow_symlinks=False) and not is_clutter_folder(item.name)
        ]
    bases = sorted(bases)[:_MAX_BASES]
    real_folder = Path(folder).resolve()
    first_folders = {re.split(r"[\\/]", path, maxsplit=1)[0] for path in paths}
    # Paths that all begin with the name of the folder were written beside it.
    if first_folders <= {real_folder.name}:
        bases.append(str(real_folder.parent))
    return bases


def _folded_names(folder: str) -> frozenset[str]:
    try:
        return frozenset(_folded(name) for name in os.listdir(folder or os.curdir))  # noqa: PTH208 - names alone
    except OSError:
        return frozenset()


def _folded_stems(folder: str) -> frozenset[str]:
    """Return the names in a folder without their endings, as tables of many public data sets name images."""
    # The stem of `scan.nii.gz` is `scan`.
    stems = set()
    for name in _folded_names(folder):
        stem, dot, _ = name.removesuffix(".gz").rpartition(".")
        if dot:
            stems.add(stem)
    return frozenset(stems)


def _folded(name: str) -> str:
    # macOS decomposes the accents in names of files, tables do not.
    return unicodedata.normalize("NFC", name).casefold()
