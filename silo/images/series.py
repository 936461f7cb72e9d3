"""Slices in files of their own that together make a volume of a head, from which a face could be drawn."""

from dataclasses import dataclass, field

from ddm.images.heads import LEAST_SIDE, as_long_as_a_head, may_show_face
from ddm.images.record import PictureRecord, SliceRecord

_STEP_MM = 0.1  # slices closer than this lie at one place


@dataclass
class _Stack:
    """What is known of the slices of one scan that a head could fill.

    Attributes:
        places: where they lie, in steps.
        placeless: how many say no place; each counts as one.
        head: whether a slice names a head, else None where one names no part of the body.
    """

    places: set[int] = field(default_factory=set)
    placeless: int = 0
    head: bool | None = None

    def add(self, shape: tuple[int, ...], found: SliceRecord) -> None:
        self.head = self.head or found.head
        small = found.head is None and found.sides_mm is not None and not as_long_as_a_head(found.sides_mm)
        if small or min(shape[1:]) < LEAST_SIDE:
            return
        if found.place_mm is None:
            self.placeless += 1
        else:
            self.places.add(round(found.place_mm / _STEP_MM))

    @property
    def shows_face(self) -> bool:
        num = len(self.places) + self.placeless
        if num < LEAST_SIDE:
            return False
        depth = None if self.placeless else (max(self.places) - min(self.places)) * _STEP_MM * num / (num - 1)
        return may_show_face((num,), None if depth is None else (depth,), self.head)


class Stacks:
    """All scans of a data set, slice by slice. Memory grows with scans and places, not with pixels."""

    def __init__(self) -> None:
        self._stacks: dict[str, _Stack] = {}

    def add(self, seen: PictureRecord) -> None:
        """Take in a slice; other pictures count for nothing."""
        if seen.slice is not None:
            self._stacks.setdefault(seen.slice.series, _Stack()).add(seen.shape, seen.slice)

    def judged(self) -> dict[str, bool]:
        """Return for each scan whether its slices together may show a face."""
        return {series: stack.shows_face for series, stack in self._stacks.items()}
