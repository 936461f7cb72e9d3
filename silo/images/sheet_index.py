"""Which pictures the last preview sheet shows, by number: so that a person can leave one out by the number on it.

The index names files. It is saved beside the sheet and in the private folder of the scans, for its owner alone.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from ddm.errors import SetupError
from ddm.io.files import read_bounded, write_atomic
from ddm.io.spreadsheet import quote_cell, unquote_cell

FILE = "preview.csv"  # in the private folder
_COLUMNS = ("number", "path", "image", "pixels")
_MAX_BYTES = 1 << 22


@dataclass(frozen=True)
class SheetPicture:
    """A picture on a preview sheet.

    Attributes:
        path: the path of its file.
        place: the place of the picture in its file, from 0.
        pixels: their fingerprint when the sheet was drawn.
    """

    path: str
    place: int
    pixels: str


def write_index(pictures: Sequence[SheetPicture], *paths: Path) -> None:
    """Write the pictures of a sheet, of which the first has the number 1.

    Raises:
        OSError: a file cannot be written.
    """
    text = StringIO(newline="")
    rows = csv.writer(text)
    rows.writerow(_COLUMNS)
    for number, picture in enumerate(pictures, 1):
        path_cell = quote_cell(picture.path)
        rows.writerow((number, path_cell, picture.place, picture.pixels))
    # Names of files may hold any bytes.
    content = text.getvalue().encode("utf-8", "surrogateescape")
    for path in paths:
        write_atomic(path, content, mode=0o600)


def read_index(folder: Path) -> list[SheetPicture]:
    """Read the pictures of the last sheet of a data set, in their order; none where there was no sheet.

    Args:
        folder: private, of the data set's scans.

    Raises:
        SetupError: the file is damaged.
    """
    path = folder / FILE
    if not path.exists():
        return []
    text = read_bounded(path, _MAX_BYTES).decode("utf-8", "surrogateescape")
    rows = csv.DictReader(StringIO(text, newline=""))
    try:
        pictures = []
        for row in rows:
            file_path = unquote_cell(row["path"])
            place = int(row["image"])
            pictures.append(SheetPicture(file_path, place, row["pixels"]))
        return pictures
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        remedy = (
            "Delete it, and draw the sheet again: `silo scan SITE --preview FILE.png --plan FILE`."
        )
        raise SetupError(
            str(path),
            expected="numbers and files",
            got="a damaged file",
            remedy=remedy,
        ) from error
