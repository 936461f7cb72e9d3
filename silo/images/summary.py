"""Counts of what a scan found, file by file; names, paths and patients are not among them."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from ddm.errors import DataError
from ddm.images.record import PictureRecord
from silo.images.alike import near_duplicates

TINY_CLASS = 10  # images: fewer than these teach a model the images themselves
_MOST_REASONS = 8  # in one message
_TWELVE_BITS = 4095.0


@dataclass
class Intensities:
    """The values of all accepted pictures of one type."""

    num: int = 0
    low: float = float("inf")
    high: float = float("-inf")
    total: float = 0.0
    constant: int = 0

    def add(self, seen: PictureRecord) -> None:
        """Count one picture."""
        self.num += 1
        self.low, self.high = min(self.low, seen.low), max(self.high, seen.high)
        self.total += seen.mean
        self.constant += seen.low == seen.high


@dataclass
class Summary:
    """Everything that a report says. Accepted pictures alone count in all but the first three.

    Attributes:
        accepted: pictures.
        quarantined: pictures that wait for a person, files that give none, and rows of a table that lead to none.
        reasons: of these, one each; their counts add up to `quarantined`.
        labels: pictures of each class.
        splits: pictures of each part of the data set.
        shapes: pictures of each size, HxW or DxHxW.
        channels: pictures with so many channels.
        kinds: pictures of each kind of file.
        duplicates: pictures with the same pixels as another one that is not counted.
        intensities: by type.
        unknown_patients: pictures of nobody.
        unlabelled: pictures without a class.
        read: files whose content was looked at in this scan.
        decoded: of these, files that were decoded.
    """

    accepted: int = 0
    quarantined: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    labels: Counter[str] = field(default_factory=Counter)
    splits: Counter[str] = field(default_factory=Counter)
    shapes: Counter[str] = field(default_factory=Counter)
    channels: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0
    intensities: dict[str, Intensities] = field(default_factory=lambda: defaultdict(Intensities))
    unknown_patients: int = 0
    unlabelled: int = 0
    read: int = 0
    decoded: int = 0
    _pixels: set[bytes] = field(default_factory=set, repr=False)
    _hashes: list[str] = field(default_factory=list, repr=False)
    _patients: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set), repr=False)

    def quarantine(self, reason: str) -> None:
        """Count one that is not accepted."""
        self.quarantined += 1
        self.reasons[reason] += 1

    def accept(
        self, seen: PictureRecord, label: str | None, split: str | None, patient: tuple[str, str] | None
    ) -> None:
        """Count an accepted picture.

        Args:
            seen: the picture.
            label: its class.
            split: its part of the data set.
            patient: the pseudonyms of the patient whom it belongs to.
        """
        self.accepted += 1
        self.kinds[seen.kind] += 1
        self.channels[seen.shape[0]] += 1
        self.shapes["x".join(map(str, seen.shape[1:]))] += 1
        self.intensities[seen.dtype].add(seen)
        if label:
            self.labels[label] += 1
        else:
            self.unlabelled += 1
        if split:
            self.splits[split] += 1
        if patient is None:
            self.unknown_patients += 1
        else:
            self._patients[patient[1]].add(patient[0])
        pixels = bytes.fromhex(seen.pixels)
        if pixels in self._pixels:
            self.duplicates += 1
            return
        self._pixels.add(pixels)
        if seen.hash is not None:
            self._hashes.append(seen.hash)

    @property
    def patients(self) -> int:
        """How many patients there are, each spelling counted."""
        return sum(map(len, self._patients.values()))

    @property
    def alike_patients(self) -> int:
        """How many patients' identifiers differ from another one's by spelling alone."""
        return sum(len(spellings) for spellings in self._patients.values() if len(spellings) > 1)

    def near_duplicates(self) -> int:
        """Count near duplicates among pictures that are not equal."""
        return near_duplicates(self._hashes)

    @property
    def tiny_classes(self) -> int:
        """How many classes have fewer than `TINY_CLASS` images."""
        return sum(num < TINY_CLASS for num in self.labels.values())

    def require_accepted(self) -> None:
        """Refuse a data set of which nothing can be used.

        Raises:
            DataError: nothing was accepted.
        """
        if not self.accepted:
            most = ", ".join(f"{num} {reason}" for reason, num in self.reasons.most_common(_MOST_REASONS))
            got = f"none accepted, {self.quarantined} in quarantine ({most})" if self.quarantined else "no files at all"
            remedy = "silo scan --data PATH says what is the matter, and where the private list of files lies."
            raise DataError("images", expected="at least one that can be used", got=got, remedy=remedy)

    def as_json(self) -> dict[str, object]:
        """Return what `silo scan --json` prints."""
        return {
            "accepted": self.accepted,
            "quarantined": self.quarantined,
            "reasons": _ordered(self.reasons),
            "patients": self.patients,
            "labels": _ordered(self.labels),
            "shapes": _ordered(self.shapes),
            "duplicates": self.duplicates,
        }

    def remarks(self) -> list[str]:
        """Return what a person should look at before any of this is trained on."""
        found = []
        if (sixteen := self.intensities.get("uint16")) and sixteen.high <= _TWELVE_BITS:
            found.append(f"16-bit images hold at most {sixteen.high:g}: twelve bits or fewer. Map them by a window.")
        if constant := sum(each.constant for each in self.intensities.values()):
            found.append(f"{constant} images have one value everywhere.")
        if self.tiny_classes:
            found.append(f"{self.tiny_classes} classes have fewer than {TINY_CLASS} images.")
        if self.alike_patients:
            found.append(
                f"{self.alike_patients} patients have identifiers that differ in case, blanks or leading zeros alone; "
                "mend them, or each spelling counts as a patient."
            )
        if self._patients and self.unknown_patients:
            found.append(f"{self.unknown_patients} images have no patient, others have one.")
        if self.labels and self.unlabelled:
            found.append(f"{self.unlabelled} images have no label, others have one.")
        if len(self.channels) > 1:
            found.append(f"Images have different numbers of channels: {', '.join(map(str, sorted(self.channels)))}.")
        return found


def _ordered(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
