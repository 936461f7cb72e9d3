"""Reads the pictures at a path that are public, or belong to the user of the command: no picture waits for a person.

Private pictures of a site are scanned instead (`silo.images.scan`). Both ways find files by `ddm.images.find` and
decode them by `ddm.images.formats`.
"""

import os
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ddm.errors import ArchipelagoError, DataError, MissingFileError
from ddm.images.array_files import ARRAYS
from ddm.images.content import FileContent
from ddm.images.find import DataSet, ImageFile, find_data
from ddm.images.formats import decode
from ddm.images.names import has_foreign_suffix
from ddm.images.picture import DecodedPicture, DecodeLimits, Picture
from ddm.images.reasons import ImageError, Reason
from ddm.images.record import PictureRecord
from ddm.images.table import Columns, TableRow
from ddm.images.workers import DecodedImage, DecodeJob, DecoderOptions, decode_files
from ddm.system.cores import usable_cores
from ddm.system.escape import escape_control

_FEW_FILES = 64  # up to which processes take longer to start than the files to decode
_MAX_NAMED = 8  # files in one message
_KEY_BYTES = 32


def read_pictures(
    path: Path | str,
    columns: Columns | None = None,
    limits: DecodeLimits | None = None,
) -> Iterator[DecodedPicture | ImageError]:
    """Yield the pictures at a path; what cannot be read comes as its error, and the next ones follow.

    Everything is decoded in this process, bounded by `limits` alone.

    Args:
        path: a file of one or many images; a folder of any depth, maybe with a table in it; a table; or arrays.
        columns: other names of the table's columns, such as ``{"label": "finding"}``.
        limits: the most that one file may ask for.

    Yields:
        Each picture with what its file, or a table, says about it; or an `ImageError` with the reason. Files that come
        with every folder, such as Thumbs.db or a README, are skipped.

    Raises:
        MissingFileError: nothing at `path`.
    """
    try:
        data = find_readable(Path(path), columns)
        for file in data.files():
            yield from _pictures_of(file, limits)
    except MissingFileError:
        raise
    except DataError as error:
        # A spreadsheet, or a table that does not parse. The words of our errors name no value of a file.
        yield ImageError(Reason.TABLE, str(error))


def find_readable(path: Path, columns: Columns | None = None) -> DataSet:
    """Decide what is at a path; see `ddm.images.find.find_data`.

    Raises:
        MissingFileError, DataError: see there; or the operating system does not let it be read.
    """
    try:
        return find_data(path, columns)
    except OSError as error:
        got = os.strerror(error.errno or 0)
        raise DataError(
            "data",
            expected="a path that can be read",
            got=got,
            remedy="Name a file or a folder of images that this user can read.",
        ) from error


def _pictures_of(
    file: ImageFile,
    limits: DecodeLimits | None,
) -> Iterator[DecodedPicture | ImageError]:
    if file.reason is Reason.CLUTTER:
        return
    if file.reason is not None:
        yield ImageError(file.reason, file.detail)
        return
    num_pictures = 0
    try:
        for picture in decode(FileContent.of(Path(file.path)), limits):
            num_pictures += 1
            if isinstance(picture, ImageError):
                yield picture
            else:
                yield _with_row(picture, file)
    except ImageError as error:
        yield error
        return
    if not num_pictures:
        yield ImageError(Reason.NO_PIXELS)


def _with_row(picture: DecodedPicture, file: ImageFile) -> DecodedPicture:
    """Return a picture with what the table says about its file, which counts before what the file itself says."""
    row = file.row
    if row is None:
        return picture
    return picture.with_fields(
        label=row.label,
        patient=row.patient,
        split=row.split,
        caption=row.caption,
    )


@dataclass(frozen=True)
class NamedPicture:
    """A picture, and where it comes from.

    Attributes:
        name: the name of its file, below the path that was given, with the picture's number where the file has several.
        picture: its values.
        label: its class, as a table or its file says.
        caption: its text.
    """

    name: str
    picture: Picture
    label: str | None = None
    caption: str | None = None


class PictureReader:
    """Reads all pictures of a data set, and collects what cannot be read, so that all of it can be said at once.

    Many files are decoded in processes of their own, on all processors: within bounds, since public files come from
    strangers. Few files and arrays are decoded in this process.

    Args:
        data: what is at the path.
        subject: what messages call the pictures.

    Attributes:
        skipped: names of files that hold no image.
    """

    def __init__(self, data: DataSet, subject: str = "images") -> None:
        self.data = data
        self.subject = subject
        self.skipped: list[str] = []
        self._paths: list[Path] = []
        self._failures: list[str] = []
        self._num_failures = 0

    def __iter__(self) -> Iterator[NamedPicture]:
        """Yield the pictures; call `require_all` afterwards."""
        files = [file for file in self.data.files() if self._can_be_decoded(file)]
        self._paths = [Path(path) for file in files for path in file.files]
        if self.data.looks_like_arrays or len(files) <= _FEW_FILES:
            yield from self._decoded_here(files)
        else:
            yield from self._decoded_by_processes(files)

    def refuse(self, name: str, error: ArchipelagoError) -> None:
        """Note that a picture cannot be used, and why."""
        self._num_failures += 1
        if len(self._failures) < _MAX_NAMED:
            why = error.got or error.subject
            if not isinstance(error, ImageError):
                why = str(error)
            self._failures.append(f"{name}: {why}")

    def require_all(self) -> None:
        """Refuse a data set with a picture that cannot be used.

        Raises:
            DataError: names the first of them.
        """
        if not self._num_failures:
            return
        got = "; ".join(self._failures)
        num_more = self._num_failures - len(self._failures)
        if num_more:
            got += f"; and {num_more} more"
        raise DataError(
            self.subject,
            expected="images that can all be used",
            got=got,
            remedy="Leave these files out, or export them again; then run the command again.",
        )

    def files(self) -> tuple[Path, ...]:
        """Return the files that hold the pictures and what belongs to them, once all pictures were read."""
        if self.data.arrays is not None:
            return self.data.arrays.files
        skipped = set(self.skipped)
        files = []
        for path in self._paths:
            if self._name(str(path)) not in skipped:
                files.append(path)
        return tuple(files)

    def remarks(self) -> list[str]:
        """Return what a person should know, once all pictures were read."""
        remarks = list(self.data.remarks())
        if self.skipped:
            names = ", ".join(sorted(self.skipped)[:_MAX_NAMED])
            more = len(self.skipped) - _MAX_NAMED
            if more > 0:
                names += f" and {more} more"
            num = len(self.skipped)
            files = "1 file that holds no image was"
            if num != 1:
                files = f"{num} files that hold no image were"
            remarks.append(f"{files} skipped: {names}.")
        return remarks

    def _can_be_decoded(self, file: ImageFile) -> bool:
        if file.reason is None:
            return True
        name = self._name(file.path)
        if file.is_clutter:
            self.skipped.append(name)
        else:
            self.refuse(name, ImageError(file.reason, file.detail))
        return False

    def _decoded_here(self, files: Iterable[ImageFile]) -> Iterator[NamedPicture]:
        for file in files:
            name = self._name(file.path)
            for place, picture in enumerate(_pictures_of(file, None)):
                if isinstance(picture, ImageError):
                    self._cannot_decode(file, place, picture)
                else:
                    picture_name = _picture_name(name, place)
                    yield NamedPicture(picture_name, picture, picture.label, picture.caption)

    def _decoded_by_processes(self, files: list[ImageFile]) -> Iterator[NamedPicture]:
        jobs = (DecodeJob(file.path, file.files, file.num_bytes) for file in files)
        # Nobody compares these digests and pseudonyms with others, so that their key is made up.
        options = DecoderOptions(
            DecodeLimits(),
            secrets.token_bytes(_KEY_BYTES),
            usable_cores(),
            with_values=True,
        )
        remaining = iter(files)
        file: ImageFile | None = None
        num_pictures = 0
        for answer in decode_files(jobs, options):
            if file is None:
                # Answers come in the order of the jobs, and the last answer of each file is its end.
                file = next(remaining)
                num_pictures = 0
            if isinstance(answer, DecodedImage):
                record = answer.record
                if answer.picture is None:
                    reason = Reason.DAMAGED
                    if record.reason:
                        reason = Reason(record.reason)
                    self._cannot_decode(file, num_pictures, ImageError(reason, record.detail))
                else:
                    name = _picture_name(self._name(file.path), num_pictures)
                    yield _named_picture(name, answer.picture, record, file.row)
                num_pictures += 1
                continue
            if answer.reason is not None:
                self._cannot_decode(file, num_pictures, ImageError(answer.reason, answer.detail))
            elif not num_pictures:
                self._cannot_decode(file, 0, ImageError(Reason.NO_PIXELS))
            file = None

    def _cannot_decode(
        self,
        file: ImageFile,
        place: int,
        error: ImageError,
    ) -> None:
        name = Path(file.path).name
        # A folder of pictures may have any other files, whose names do not say that they are pictures: notes, models.
        in_folder = self.data.path.is_dir() and file.row is None and place == 0
        is_other_file = error.reason is Reason.UNKNOWN and has_foreign_suffix(name)
        is_other_array = name.lower().endswith(ARRAYS) and not self.data.looks_like_arrays
        if in_folder and (is_other_file or is_other_array):
            self.skipped.append(self._name(file.path))
        else:
            self.refuse(_picture_name(self._name(file.path), place), error)

    def _name(self, path: str) -> str:
        """Return the name of a file below the path that was given, as a terminal may print it."""
        root = self.data.path
        if not root.is_dir():
            root = root.parent
        try:
            name = str(Path(path).relative_to(root))
        except ValueError:
            name = Path(path).name
        return escape_control(name, one_line=True)


def _named_picture(
    name: str,
    picture: Picture,
    record: PictureRecord,
    row: TableRow | None,
) -> NamedPicture:
    """Return a picture with its label and caption; what a table says takes precedence over its file."""
    label = record.label
    caption = record.caption
    if row is not None:
        label = row.label or label
        caption = row.caption or caption
    return NamedPicture(name, picture, label, caption)


def _picture_name(name: str, place: int) -> str:
    """Return the name of a picture: that of its file, with a number where it is not the first."""
    if place:
        return f"{name}, image {place + 1}"
    return name
