"""Counts of what a scan found; names, paths and patients are not among them."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from ddm.errors import DataError
from ddm.images.names import SPREADSHEET_SUFFIXES, TABLE_SUFFIXES
from ddm.images.ranges import (
    DECLARED_AT_FIRST,
    RangeCounter,
    ValueKind,
    range_of_type,
    range_remarks,
)
from ddm.images.reasons import Reason
from ddm.images.record import PictureRecord
from silo.images.alike import near_duplicates
from silo.images.scanned_image import ScannedImage

TINY_CLASS = 10  # images: fewer than these teach a model the images themselves
_MAX_REASONS = 8  # in one message
_ARRAY_KINDS = frozenset({"npz", "npy", "idx", "Parquet"})


@dataclass
class Intensities:
    """The values of all accepted pictures of one type."""

    num: int = 0
    low: float = float("inf")
    high: float = float("-inf")
    total_of_means: float = 0.0
    num_constant: int = 0
    range: RangeCounter = field(default_factory=RangeCounter, repr=False)

    def add(self, record: PictureRecord) -> None:
        """Count one picture."""
        self.num += 1
        self.low = min(self.low, record.low)
        self.high = max(self.high, record.high)
        self.total_of_means += record.mean
        self.range.add(record.low, record.high)
        if record.low == record.high:
            self.num_constant += 1


@dataclass
class Summary:
    """Everything that a report says. Only accepted pictures count from `labels` on.

    Attributes:
        accepted: pictures that are used.
        quarantined: pictures that wait for a person, files that give none, and rows of a table that lead to none.
        reasons: why they are quarantined, one each; the counts add up to `quarantined`.
        other_parts: pictures of each part of the data set that is not used.
        labels: pictures of each class.
        parts: pictures of each part of the data set.
        shapes: pictures of each size, HxW or DxHxW.
        channels: pictures by number of channels.
        kinds: pictures of each format.
        duplicates: pictures with the same pixels as another one, which is not counted.
        intensities: by type.
        unknown_patients: pictures without a patient.
        unlabelled: pictures without a class.
        table_remarks: how the table was read.
        declared_range: that policy.toml declares of arrays in floating point, or would at first.
        num_skipped: other files, such as a README.
        num_unused_tables: the number of these that are tables and spreadsheets, from which somebody may expect labels
            and patients.
        num_read: files whose content was read in this scan.
        num_decoded: the number of these files that were decoded.
    """

    accepted: int = 0
    quarantined: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    other_parts: Counter[str] = field(default_factory=Counter)
    labels: Counter[str] = field(default_factory=Counter)
    parts: Counter[str] = field(default_factory=Counter)
    shapes: Counter[str] = field(default_factory=Counter)
    channels: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0
    intensities: dict[str, Intensities] = field(default_factory=lambda: defaultdict(Intensities))
    unknown_patients: int = 0
    unlabelled: int = 0
    table_remarks: list[str] = field(default_factory=list)
    declared_range: tuple[float, float] = DECLARED_AT_FIRST
    num_skipped: int = 0
    num_unused_tables: int = 0
    num_read: int = 0
    num_decoded: int = 0
    _pixels: set[bytes] = field(default_factory=set, repr=False)
    _hashes: list[str] = field(default_factory=list, repr=False)
    # For each pseudonym that similar spellings share: the patients, each with the first picture.
    _patients: dict[str, dict[str, ScannedImage]] = field(
        default_factory=lambda: defaultdict(dict), repr=False
    )

    def add(self, image: ScannedImage, patient: tuple[str, str] | None = None) -> None:
        """Count a picture, or a file that gives none.

        Args:
            image: the picture.
            patient: the pseudonyms of its patient; see `silo.images.scan.ScannedImages.pseudonyms`.
        """
        if image.reason == Reason.CLUTTER:
            self.num_skipped += 1
            suffix = PurePath(image.path).suffix.lower()
            if suffix in TABLE_SUFFIXES or suffix in SPREADSHEET_SUFFIXES:
                self.num_unused_tables += 1
        elif image.reason == Reason.OTHER_PART:
            self.other_parts[image.part or ""] += 1
        elif image.reason is not None:
            self.quarantined += 1
            self.reasons[image.reason] += 1
        elif image.record is not None:
            self._accept(image, image.record, patient)

    def _accept(
        self,
        image: ScannedImage,
        record: PictureRecord,
        patient: tuple[str, str] | None,
    ) -> None:
        self.accepted += 1
        self.kinds[record.kind] += 1
        self.channels[record.shape[0]] += 1
        sides = "x".join(str(side) for side in record.shape[1:])
        self.shapes[sides] += 1
        self.intensities[record.dtype].add(record)
        if image.label:
            self.labels[image.label] += 1
        else:
            self.unlabelled += 1
        if image.part:
            self.parts[image.part] += 1
        if patient is None:
            self.unknown_patients += 1
        else:
            exact, similar = patient
            self._patients[similar].setdefault(exact, image)
        self._count_duplicate(record)

    def _count_duplicate(self, record: PictureRecord) -> None:
        # As bytes, half as long as the text, because there may be millions.
        pixels = bytes.fromhex(record.pixels)
        if pixels in self._pixels:
            self.duplicates += 1
            return
        self._pixels.add(pixels)
        if record.hash is not None:
            self._hashes.append(record.hash)

    @property
    def patients(self) -> int:
        """How many patients there are; similar spellings count as several."""
        return sum(map(len, self._patients.values()))

    @property
    def look_alike_patients(self) -> int:
        """How many patients have an identifier that differs from another one by its spelling alone."""
        return sum(len(group) for group in self.look_alikes())

    def look_alikes(self) -> list[list[tuple[str, ScannedImage]]]:
        """Return groups of patients whose identifiers look alike: the pseudonym and the first picture of each."""
        groups = []
        for spellings in self._patients.values():
            if len(spellings) > 1:
                groups.append(list(spellings.items()))
        return groups

    def near_duplicates(self) -> int:
        """Count near duplicates among pictures that are not equal."""
        return near_duplicates(self._hashes)

    @property
    def tiny_classes(self) -> int:
        """How many classes have fewer than `TINY_CLASS` images."""
        return sum(num < TINY_CLASS for num in self.labels.values())

    def require_accepted(self, *, is_reported: bool = False) -> None:
        """Refuse a data set of which nothing can be used.

        Args:
            is_reported: whether the report of this scan was printed, which says what to do.

        Raises:
            DataError: nothing was accepted.
        """
        if self.accepted:
            return
        got = "no files at all"
        remedy = (
            "See what is wrong, and where the private list of files is: `silo scan --data PATH`."
        )
        if is_reported:
            remedy = "Do what the report says, then scan again."
        if self.quarantined:
            counts = [f"{num} {reason}" for reason, num in self.reasons.most_common(_MAX_REASONS)]
            got = f"none accepted, {self.quarantined} in quarantine ({', '.join(counts)})"
        elif self.other_parts:
            got = f"{self.other_parts.total()} in parts of the data set that are not used"
        else:
            remedy = "Name the folder, the table or the file that holds the images."
            if self.num_skipped:
                got = f"no images; skipped: {self._skipped_text()}"
        raise DataError(
            "images",
            expected="at least one that can be used",
            got=got,
            remedy=remedy,
        )

    def _skipped_text(self) -> str:
        return (
            f"{counted(self.num_skipped, 'other file')}, such as a README or a thumbnail database"
        )

    def as_json(self) -> dict[str, object]:
        """Return what `silo scan --json` prints."""
        return {
            "accepted": self.accepted,
            "quarantined": self.quarantined,
            "reasons": _by_count(self.reasons),
            "other_parts": _by_count(self.other_parts),
            "patients": self.patients,
            "labels": _by_count(self.labels),
            "shapes": _by_count(self.shapes),
            "duplicates": self.duplicates,
        }

    def _range_remarks(self) -> list[str]:
        """Return what uses a small part of its range: whole numbers of all files, and arrays in floating point.

        Floating point of other files has units of its own, such as Hounsfield units, which a plan maps.
        """
        remarks: list[str] = []
        for dtype, intensities in sorted(self.intensities.items()):
            type_range = range_of_type(dtype)
            subject = f"{dtype} values"
            if type_range is not None:
                remarks += range_remarks(
                    intensities.range.use(),
                    type_range,
                    ValueKind.WHOLE,
                    subject=subject,
                )
            elif dtype == "float32" and self.kinds.keys() <= _ARRAY_KINDS:
                use = intensities.range.use()
                remarks += range_remarks(
                    use,
                    self.declared_range,
                    ValueKind.FLOATS,
                    subject=subject,
                )
        return remarks

    def remarks(self) -> list[str]:
        """Return what a person should look at before training."""
        remarks = list(self.table_remarks)
        if self.num_skipped:
            remarks.append(f"Skipped: {self._skipped_text()}.")
        if self.num_unused_tables:
            remarks.append(
                f"Tables and spreadsheets among the skipped files: {self.num_unused_tables}; they were not used. "
                "A table beside images is used if it is a CSV at the top of the folder and its paths lead to these "
                "images. Name any other CSV itself as --data; save a spreadsheet as CSV (UTF-8) first."
            )
        remarks += self._range_remarks()
        nums_constant = [values.num_constant for values in self.intensities.values()]
        num_constant = sum(nums_constant)
        if num_constant:
            remarks.append(f"{num_constant} images have one value everywhere.")
        if self.tiny_classes:
            remarks.append(f"{self.tiny_classes} classes have fewer than {TINY_CLASS} images.")
        if self.look_alike_patients:
            remarks.append(
                f"{self.look_alike_patients} patients have identifiers that differ in leading zeros or accents "
                "alone. Each counts as a patient of its own: look-alikes.csv lists them. If they are the same people, "
                'correct the identifiers, or set patients = "digits" under [data] in policy.toml.'
            )
        if self.accepted and not self._patients:
            remarks.append(
                "No image has a patient. A site whose policy.toml protects patients, which is the default, needs one "
                "for each: in a table, the column patient, or the one that --column patient=NAME names."
            )
        if self._patients and self.unknown_patients:
            remarks.append(f"{self.unknown_patients} images have no patient, others have one.")
        if self.labels and self.unlabelled:
            remarks.append(f"{self.unlabelled} images have no label, others have one.")
        if len(self.channels) > 1:
            numbers = ", ".join(map(str, sorted(self.channels)))
            remarks.append(f"Images have different numbers of channels: {numbers}.")
        return remarks


def counted(num: int, noun: str) -> str:
    """Return a number with its noun, such as `1 file` and `2 files`."""
    if num == 1:
        return f"1 {noun}"
    return f"{num} {noun}s"


def _by_count(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts, the largest first, equal ones by name."""
    largest_first = sorted(counts, key=lambda name: (-counts[name], name))
    ordered = {}
    for name in largest_first:
        ordered[name] = counts[name]
    return ordered
