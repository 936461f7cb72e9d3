"""Image files inside a Parquet file, as Hugging Face's `datasets` keep them: decoded one by one, whatever their format.

A cell holds the bytes of a file, or a structure of `bytes` and `path`. Where there are no bytes, the path names a file
beside the Parquet file. Nothing is ever downloaded.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from ddm.images.column_names import FIELDS, MAX_CELL_BYTES, as_text, find_column, split_of_shard
from ddm.images.content import FileContent
from ddm.images.formats import decode_unchecked
from ddm.images.parquet import ParquetTable, class_name
from ddm.images.picture import DecodedPicture, DecodeLimits
from ddm.images.reasons import ImageError, Reason


def read_encoded(
    table: ParquetTable,
    column: str,
    limits: DecodeLimits,
) -> Iterator[DecodedPicture | ImageError]:
    """Yield the pictures of the image files in a column, with what the other columns say about them.

    Args:
        table: the table of a single file.
        column: see `ParquetTable.is_encoded`.
        limits: the most that one image may ask for. Its file may have as many bytes as the image values.

    Raises:
        ImageError: columns whose meaning is not certain.
        DataError: a file that is damaged.
    """
    (path,) = table.files
    siblings = [sibling.name for sibling in path.parent.glob("*.parquet")]
    split = split_of_shard(path.name, siblings)
    columns: dict[str, str] = {}
    classes: dict[str, Sequence[str]] = {}
    for field, meaning in FIELDS.items():
        name = find_column(meaning, table.names)
        if name is None:
            continue
        columns[field] = name
        names = table.class_names(name)
        if names is not None:
            classes[field] = names
    for row in table.rows([column, *columns.values()]):
        try:
            cells = {
                field: _text(row[name], field, classes.get(field))
                for field, name in columns.items()
            }
            fields: dict[str, Any] = {"split": split} | cells
            content = _content(row[column], path.parent, limits)
            for picture in decode_unchecked(content, limits):
                if isinstance(picture, ImageError):
                    yield picture
                else:
                    yield picture.with_fields(**fields)
        except ImageError as error:
            yield error


def _text(
    cell: Any,
    field: str,
    classes: Sequence[str] | None,
) -> str | None:
    """Return a cell as text.

    Raises:
        ImageError: a cell that is too long or of another type, or a class without a name.
    """
    if not cell.is_valid:
        return None
    if hasattr(cell, "as_buffer") and cell.as_buffer().size > MAX_CELL_BYTES[field]:
        raise ImageError(Reason.TOO_LARGE, f"a {field} of more than {MAX_CELL_BYTES[field]} bytes")
    value = cell.as_py()
    if not isinstance(value, str | bytes | int | float):
        raise ImageError(Reason.UNSUPPORTED, f"a {field} that is neither text nor a number")
    if classes is not None and isinstance(value, int):
        return class_name(value, classes)
    return as_text(value)


def _content(
    cell: Any,
    folder: Path,
    limits: DecodeLimits,
) -> FileContent:
    """Return the file that a cell holds or names.

    Raises:
        ImageError: none, one that is too large, or one that is not beside the Parquet file.
    """
    data = cell
    name = ""
    if cell.is_valid and hasattr(cell, "keys"):
        data = cell["bytes"]
        if "path" in cell.keys() and cell["path"].is_valid:  # noqa: SIM118 - a scalar of pyarrow looks for values
            name = str(cell["path"].as_py())
    if data.is_valid:
        # A scalar of pyarrow knows its size before anything is copied.
        if data.as_buffer().size > limits.values:
            raise ImageError(Reason.TOO_LARGE, f"an image file of more than {limits.values} bytes")
        return FileContent(data=data.as_py(), name=PurePosixPath(name).name)
    if not name:
        raise ImageError(Reason.NO_PIXELS, "a row without an image")
    return _file_beside(name, folder, limits)


def _file_beside(
    name: str,
    folder: Path,
    limits: DecodeLimits,
) -> FileContent:
    """Return a file in the folder of the Parquet file, or below it, by its path relative to that.

    Raises:
        ImageError: a URL, or a path that leads elsewhere; or no such file.
    """
    if "://" in name:
        raise ImageError(
            Reason.UNSUPPORTED,
            "an image at a URL, which is never downloaded: keep its bytes in the file",
        )
    if (
        PurePosixPath(name).is_absolute()
        or PureWindowsPath(name).drive
        or "\\" in name
        or "\0" in name
    ):
        raise ImageError(
            Reason.UNSUPPORTED, "a path that is not relative to the Parquet file, with slashes"
        )
    path = folder / name
    # Links are followed, but not out of the folder.
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ImageError(
            Reason.UNSUPPORTED, "a path that leads out of the folder of the Parquet file"
        )
    if not path.exists():
        raise ImageError(Reason.MISSING, "the file that a row names")
    if not path.is_file():
        raise ImageError(Reason.SPECIAL)
    if path.stat().st_size > limits.values:
        raise ImageError(Reason.TOO_LARGE, f"an image file of more than {limits.values} bytes")
    # Read here, so that a container among these files is refused as one inside another.
    return FileContent(data=path.read_bytes(), name=path.name)
