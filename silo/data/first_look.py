"""Looks at a site's data before there is a plan: what no plan could take, all at once, and how much there is."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ddm.errors import DataError
from ddm.images.array_files import ARRAYS, Source, open_arrays
from ddm.images.columns import check_length, num_patients, read_column
from ddm.images.find import require_data
from ddm.images.table import is_table
from silo.config import ImagesSettings
from silo.data.problems import refuse_all
from silo.images.pictures import Pictures
from silo.images.scan import scan_as_set
from silo.images.summary import Summary

_COLUMNS = frozenset({"patients", "labels", "captions"})
Advance = Callable[[int], None]


@dataclass(frozen=True)
class FirstLook:
    """What a site's data are like.

    Attributes:
        summary: of the scan; None of arrays that plans without a transform take too, which need none.
        problems: why plans without a transform do not take them.
    """

    summary: Summary | None = None
    problems: tuple[DataError, ...] = ()


def look_at(
    path: Path, folder: Path, settings: ImagesSettings | None = None, advance: Advance = lambda done: None
) -> FirstLook:
    """Look at data: of arrays at headers and columns, of anything else, by a scan, at every picture.

    Args:
        path: the site's data.
        folder: private, for what scans remember.
        settings: the site's, for its images.
        advance: called with the number of files that are done, while there is a scan.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: nothing that any plan could take: all that is wrong at once.
        SetupError: the decoders of these images are not installed.
    """
    problems = _problems(path)
    if not problems:
        return FirstLook()
    summary = scan_as_set(path, folder, settings or ImagesSettings(), advance)
    if not summary.accepted:
        _refuse(path, problems)
    summary.require_accepted()
    return FirstLook(summary, tuple(problems) if _are_arrays(path) else ())


def count_units(
    path: Path,
    *,
    patients: bool,
    folder: Path,
    settings: ImagesSettings | None = None,
    advance: Advance = lambda done: None,
) -> tuple[int, int | None]:
    """Count the images at `path`, and their patients if asked for; of what is scanned, those that are accepted.

    Args:
        path: see `look_at`, as for the rest.
        patients: whether to count them.
        folder: of scans.
        settings: the site's.
        advance: shows progress.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: no image that can be used, or patients that are not known of all images.
    """
    if problems := _problems(path):
        with Pictures.opened(path, folder, settings or ImagesSettings(), advance) as pictures:
            num, num_known = _counted(pictures, patients=patients)
        if not num:
            _refuse(path, problems)
            remedy = "`silo scan` says of each file what is the matter."
            raise DataError(
                "images", expected="at least one that can be used", got="files that a scan cannot use", remedy=remedy
            )
        return num, num_known
    source = open_arrays(path)
    return len(source), num_patients(read_column(source, "patients")) if patients else None


def _counted(pictures: Pictures, *, patients: bool) -> tuple[int, int | None]:
    num, nobody, known = 0, 0, set[str]()
    for found in pictures:
        if found.reason is None:
            num += 1
            patient = pictures.patient(found) if patients else ""
            nobody += patient is None
            known.add(patient or "")
    if nobody:
        remedy = "Give every image its patient, in a column patient of the images' table; or leave its row out."
        got = f"none for {nobody} of {num} images"
        raise DataError("patients", expected="a patient for each image", got=got, remedy=remedy)
    return num, len(known) if patients else None


def _refuse(path: Path, problems: list[DataError]) -> None:
    """Refuse arrays of which a scan can use nothing, by what is wrong with them as arrays."""
    if _are_arrays(path):
        refuse_all(problems, "Mend all of these in the data file, then run the command again.")


def needs_scan(path: Path) -> bool:
    """Whether data are anything but arrays that plans without a transform take.

    Raises:
        MissingFileError: nothing at `path`.
    """
    return bool(_problems(path))


def _problems(path: Path) -> list[DataError]:
    """Return why data are no arrays that plans without a transform take.

    Raises:
        MissingFileError: nothing at `path`.
    """
    require_data(path)
    try:
        return list(_problems_of_arrays(open_arrays(path)))
    except DataError as error:
        return [error]


def _are_arrays(path: Path) -> bool:
    if path.is_dir():
        return any(path.glob("images.npy")) or any(path.glob("images-*.npy"))
    return path.suffix.lower() in ARRAYS and not is_table(path, {})


def _problems_of_arrays(source: Source) -> Iterator[DataError]:
    dtype, shape = source.row
    if not (dtype.kind == "f" or dtype in (np.uint8, np.uint16)):
        yield DataError("image values", expected="floating point, uint8 or uint16", got=str(dtype))
    if not 1 <= len(shape) <= 4 or 0 in shape:
        yield DataError("image shape", expected="(H, W), (C, H, W) or (C, D, H, W)", got=str(shape))
    for name in sorted(source.columns & _COLUMNS):
        try:
            check_length(name, source.column_shape(name), len(source))
        except DataError as error:
            yield error
