"""What the names in one folder say: which files are read together with another one, and which hold no image at all."""

import re
from collections.abc import Iterable

from ddm.images.column_names import is_known_column
from ddm.images.npy_folder import npy_folder
from ddm.images.reasons import ImageError

_IDX_IMAGES = "images-idx"
_IDX_LABELS = "labels-idx"

TABLE_SUFFIXES = (".csv", ".tsv")
SPREADSHEET_SUFFIXES = (".xlsx", ".xls", ".xlsm", ".xlsb", ".ods", ".numbers")

# Files that operating systems, viewers on DICOM discs and people leave beside images.
_CLUTTER_NAMES = frozenset(
    {"thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "dicomdir", "autorun.inf"}
)
_CLUTTER_STEMS = re.compile(
    r"(readme|licen[cs]es?|copying|notice|changelog|citation|authors|contributing|terms|md5sums?|sha\d*sums?)"
    r"([-_. ].*)?",
    re.DOTALL,
)
_CLUTTER_SUFFIXES = frozenset(
    {".md5", ".sha1", ".sha256", ".sha512", *TABLE_SUFFIXES, *SPREADSHEET_SUFFIXES}
)
# Endings that no format of images has. Anybody who left such a file may have meant something by it, so that a person is
# shown it among the files that are not images.
_DOCUMENT_SUFFIXES = frozenset(
    {
        *(
            ".txt",
            ".md",
            ".rst",
            ".pdf",
            ".rtf",
            ".doc",
            ".docx",
            ".odt",
            ".ppt",
            ".pptx",
            ".log",
            ".bib",
            ".tex",
        ),
        *(".html", ".htm", ".css", ".js", ".url", ".lnk", ".webloc"),
        *(".json", ".jsonl", ".xml", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf", ".inf"),
        *(".py", ".pyc", ".ipynb", ".sh", ".bat", ".ps1", ".exe", ".dll", ".jar"),
        *(".asc", ".sig", ".db", ".sqlite", ".bak", ".tmp", ".crdownload"),
    }
)
# A name of one of these formats is never clutter by its beginning: a picture may be called "version 2.png".
_IMAGE_SUFFIXES = frozenset(
    {
        *(
            ".png",
            ".jpg",
            ".jpeg",
            ".jpe",
            ".jfif",
            ".tif",
            ".tiff",
            ".webp",
            ".bmp",
            ".gif",
            ".jp2",
            ".j2k",
        ),
        *(
            ".dcm",
            ".dicom",
            ".ima",
            ".nii",
            ".gz",
            ".mgh",
            ".mgz",
            ".npy",
            ".npz",
            ".parquet",
            ".tar",
        ),
    }
)
_CLUTTER_FOLDERS = frozenset(
    {"__macosx", "__pycache__", "$recycle.bin", "system volume information", "@eadir"}
)


def is_hidden(name: str) -> bool:
    """Whether Unix hides a file of this name; macOS writes such files (``._scan.png``) beside every copied one."""
    return name.startswith(".")


def is_clutter(name: str) -> bool:
    """Whether a file of this name is one of those that come with every folder: skipped without a word but a count."""
    lowered = name.lower()
    if is_hidden(lowered) or lowered in _CLUTTER_NAMES:
        return True
    suffix = _suffix(lowered)
    if suffix in _CLUTTER_SUFFIXES:
        return True
    return suffix not in _IMAGE_SUFFIXES and _CLUTTER_STEMS.fullmatch(lowered) is not None


def is_document(name: str) -> bool:
    """Whether a file of this name is not an image, by its ending."""
    return _suffix(name.lower()) in _DOCUMENT_SUFFIXES


def has_foreign_suffix(name: str) -> bool:
    """Whether a name has an ending, and that of no format of images."""
    return "." in name and _suffix(name.lower()) not in _IMAGE_SUFFIXES


def _suffix(lowered: str) -> str:
    return f".{lowered.rpartition('.')[2]}"


def is_clutter_folder(name: str) -> bool:
    """Whether nothing below a folder of this name is looked at."""
    return is_hidden(name) or name.lower() in _CLUTTER_FOLDERS


class FolderNames:
    """The names in one folder: which of them are read together with others.

    Attributes:
        array_files: names of the files that hold the rows of the folder's array, in their order; empty where there is
            none.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self.array_files: tuple[str, ...] = ()
        self._array_columns: tuple[str, ...] = ()
        try:
            folder = npy_folder(self._names)
        except ImageError:
            # It is unknown which files are one array. The decoder of the first file reports the reason.
            array_files = sorted(name for name in self._names if _is_array_part(name))
            self.array_files = tuple(array_files)
            return
        if folder is not None:
            self.array_files = folder.parts
            for column, files in folder.columns.items():
                if is_known_column(column):
                    self._array_columns += files

    def belongs_to_another(self, name: str) -> bool:
        """Whether a file is read with another one: labels beside idx images, columns and parts beside an npy."""
        if _IDX_LABELS in name:
            return name.replace(_IDX_LABELS, _IDX_IMAGES).replace("idx1", "idx3") in self._names
        return name in self.array_files[1:] or name in self._array_columns

    def is_clutter(self, name: str) -> bool:
        """Whether a file holds no image: by its name alone, or as an array beside the folder's array of images."""
        if self.array_files and name.endswith(".npy"):
            return name not in self.array_files
        return is_clutter(name)

    def companions(self, name: str) -> list[str]:
        """Return the files that are read with a file."""
        if _IDX_IMAGES in name:
            labels = name.replace("images-idx3", "labels-idx1")
            if labels != name and labels in self._names:
                return [labels]
            return []
        if self.array_files and name == self.array_files[0]:
            return [*self.array_files[1:], *self._array_columns]
        return []


def _is_array_part(name: str) -> bool:
    return name == "images.npy" or (name.startswith("images-") and name.endswith(".npy"))
