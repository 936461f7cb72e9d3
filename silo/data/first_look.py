"""Looks at a site's data before there is a plan: everything that no plan could take, and how much there is."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from ddm.errors import DataError
from ddm.images.array_files import ImageArrays
from ddm.images.columns import check_length, num_patients, read_column
from ddm.images.find import DataSet
from ddm.images.ranges import (
    DECLARED_AT_FIRST,
    RangeCounter,
    ValueKind,
    range_of_type,
    range_remarks,
)
from ddm.images.reasons import Reason
from ddm.protocol.base import Unit
from silo.data.problems import refuse_all
from silo.images.report import unused_parts_text
from silo.images.scan import ScannedImages, scan
from silo.images.source import ImageSource
from silo.images.summary import Summary

_COLUMNS = frozenset({"patients", "labels", "captions"})
_REMEDY = "Correct all of these in the data file, then run the command again."
_MAX_READ_BYTES = 1 << 28
ScanCallback = Callable[[int], None]


@dataclass(frozen=True)
class FirstLook:
    """A description of a site's data.

    Attributes:
        summary: the summary of the scan; None for arrays that plans without a transform take too, which need no scan.
        problems: why plans without a transform do not take them.
        remarks: what a person should know about arrays that need no scan; a summary has remarks of its own.
        num_adopted: pictures with a decision that was made before there was a site, and is carried over.
    """

    summary: Summary | None = None
    problems: tuple[DataError, ...] = ()
    remarks: tuple[str, ...] = ()
    num_adopted: int = 0


def look_at(source: ImageSource, advance: ScanCallback = lambda num_files: None) -> FirstLook:
    """Look at data: of arrays at headers, columns and some values; of anything else, by a scan, at every picture.

    Args:
        source: the site's images.
        advance: called with the number of files that are finished, while there is a scan.

    Raises:
        MissingFileError: nothing at the path.
        DataError: nothing that any plan could take; it lists everything that is wrong.
        SetupError: the decoders of these images are not installed.
    """
    data = source.find()
    problems = _problems(data)
    if not problems:
        remarks = _range_remarks(source, data)
        unused = source.unused_parts(data.require_arrays())
        if unused:
            remarks.append(unused_parts_text(unused))
        return FirstLook(remarks=tuple(remarks))
    summary = scan(source, advance)
    if not summary.accepted:
        _refuse_arrays(data, problems)
    summary.require_accepted()
    if not data.looks_like_arrays:
        # Pictures are not arrays, which is not a problem to tell anybody about.
        problems = []
    return FirstLook(summary, tuple(problems))


def _range_remarks(source: ImageSource, data: DataSet) -> list[str]:
    """Return what arrays use of the range that they are declared to have, or would be at first.

    The first rows are read, up to a bound, since a large array takes minutes; `silo scan` looks at all of them.
    """
    arrays = data.arrays
    if arrays is None or arrays.name != "images":
        return []
    counter = RangeCounter()
    num_bytes = 0
    for block in arrays.unpacked():
        counter.add_images(block)
        num_bytes += block.nbytes
        if num_bytes > _MAX_READ_BYTES:
            break
    dtype, _ = arrays.row
    subject = f"{dtype.name} values"
    # Whole numbers have the range of their type; floating point has the one that the site declares.
    type_range = range_of_type(dtype.name)
    if type_range is not None:
        return range_remarks(counter.use(), type_range, ValueKind.WHOLE, subject=subject)
    declared_range = source.declared_range or DECLARED_AT_FIRST
    return range_remarks(counter.use(), declared_range, ValueKind.FLOATS, subject=subject)


def needs_scan(source: ImageSource) -> bool:
    """Whether data are anything but arrays that plans without a transform take.

    Raises:
        MissingFileError: nothing at the path.
    """
    return bool(_problems(source.find()))


@dataclass(frozen=True)
class UnitCounts:
    """The numbers of images and patients of a site.

    Attributes:
        images: the number of images that are used.
        patients: the number of patients; None if they were not counted.
        unused_parts: images of each part of the data set that is not used.
    """

    images: int
    patients: int | None = None
    unused_parts: Counter[str] = field(default_factory=Counter)

    def units(self, unit: Unit) -> int:
        """Return how many units of this kind there are.

        Raises:
            ValueError: patients, which were not counted.
        """
        if unit == "image":
            return self.images
        if self.patients is None:
            raise ValueError("patients were not counted")
        return self.patients


def count_units(
    source: ImageSource, *, patients: bool, advance: ScanCallback = lambda num_files: None
) -> UnitCounts:
    """Count the images of a site, and its patients if requested; after a scan, those that it accepts.

    Args:
        source: the site's images.
        patients: whether to count patients.
        advance: called with the number of files that are finished, while there is a scan.

    Raises:
        MissingFileError: nothing at the path.
        DataError: no image that can be used, or patients that are not known of all images.
    """
    data = source.find()
    problems = _problems(data)
    if not problems:
        arrays = source.arrays(data)
        unused = source.unused_parts(data.require_arrays())
        if not patients:
            return UnitCounts(len(arrays), unused_parts=unused)
        num = num_patients(read_column(arrays, "patients"), source.patient_rule)
        return UnitCounts(len(arrays), num, unused)
    with ScannedImages.opened(source) as images:
        # A card states what a scan has accepted: only `silo scan` tries failed files again.
        images.update(advance, retry=False)
        counts = _count_accepted(images, patients=patients)
    if not counts.images:
        _refuse_arrays(data, problems)
        raise DataError(
            "images",
            expected="at least one that can be used",
            got="files that a scan cannot use",
            remedy="See what is wrong with each file, and correct it: `silo scan SITE`.",
        )
    return counts


def _count_accepted(images: ScannedImages, *, patients: bool) -> UnitCounts:
    num_images = 0
    num_without_patient = 0
    # Identifiers are held in memory while they are counted; only their number goes further.
    patient_ids: set[str] = set()
    unused = Counter[str]()
    for image in images:
        if image.reason == Reason.OTHER_PART and image.part is not None:
            unused[image.part] += 1
        if image.reason is not None:
            continue
        num_images += 1
        if not patients:
            continue
        patient = images.patient(image)
        if patient is None:
            num_without_patient += 1
        else:
            patient_ids.add(patient)
    if not patients:
        return UnitCounts(num_images, unused_parts=unused)
    # An image without a patient could belong to one who is counted already, so that the number would be wrong.
    if num_without_patient:
        raise DataError(
            "patients",
            expected="a patient for each image",
            got=f"none for {num_without_patient} of {num_images} images",
            remedy="Give every image its patient, in a column patient of the images' table; or leave its row out.",
        )
    return UnitCounts(num_images, len(patient_ids), unused)


def _refuse_arrays(data: DataSet, problems: list[DataError]) -> None:
    """Refuse arrays of which a scan can use nothing, by what is wrong with them as arrays."""
    if data.looks_like_arrays:
        refuse_all(problems, _REMEDY)


def _problems(data: DataSet) -> list[DataError]:
    """Return why data are not arrays that plans without a transform take."""
    try:
        return list(_array_problems(data.require_arrays()))
    except DataError as error:
        return [error]


def _array_problems(arrays: ImageArrays) -> Iterator[DataError]:
    dtype, shape = arrays.row
    if not (dtype.kind == "f" or dtype in (np.uint8, np.uint16)):
        yield DataError(
            "image values",
            expected="floating point, uint8 or uint16",
            got=str(dtype),
            remedy="Convert the images first, such as by images.astype(numpy.float32).",
        )
    if not 1 <= len(shape) <= 4 or 0 in shape:
        yield DataError(
            "image shape",
            expected="(H, W), (C, H, W) or (C, D, H, W)",
            got=str(shape),
            remedy="Save each image as a row of one of these shapes.",
        )
    for name in sorted(arrays.columns & _COLUMNS):
        try:
            check_length(name, arrays.column_shape(name), len(arrays))
        except DataError as error:
            yield error
