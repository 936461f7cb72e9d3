"""Slices in files of their own that together make a volume of a head, from which a face could be drawn."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ddm.images.faces import MIN_SIDE, could_hold_head, may_show_face
from ddm.images.record import PictureRecord, SliceRecord

_STEP_MM = 0.1  # slices closer than this are at one place


@dataclass
class _Stack:
    """The slices of one scan that a head could fill.

    Attributes:
        places: where they are, in steps of `_STEP_MM`.
        num_placeless: slices that state no place; each counts as one.
        head: whether a slice names a head; None where none names a part of the body.
    """

    places: set[int] = field(default_factory=set)
    num_placeless: int = 0
    head: bool | None = None

    def add(self, shape: tuple[int, ...], location: SliceRecord) -> None:
        self.head = self.head or location.head
        # Slices that name no part of the body count only if a head fits into them.
        if location.head is None and not _could_hold_head(location.sides_mm):
            return
        if min(shape[1:]) < MIN_SIDE:
            return
        if location.place_mm is None:
            self.num_placeless += 1
        else:
            place = round(location.place_mm / _STEP_MM)
            self.places.add(place)

    def shows_face(self) -> bool:
        num_slices = len(self.places) + self.num_placeless
        if num_slices < MIN_SIDE:
            return False
        if self.num_placeless:
            return may_show_face((num_slices,), None, self.head)
        num_steps = max(self.places) - min(self.places)
        span_mm = num_steps * _STEP_MM
        # From the middle of the first slice to that of the last there are num_slices - 1 steps.
        depth_mm = span_mm * num_slices / (num_slices - 1)
        return may_show_face((num_slices,), (depth_mm,), self.head)


def _could_hold_head(sides_mm: Sequence[float] | None) -> bool:
    if sides_mm is None:
        return True
    return could_hold_head(sides_mm)


class Stacks:
    """All scans of a data set, slice by slice. Memory grows with scans and places, not with pixels."""

    def __init__(self) -> None:
        self._stacks: dict[str, _Stack] = {}

    def add(self, record: PictureRecord) -> None:
        """Take a slice; other pictures count for nothing."""
        if record.slice is not None:
            stack = self._stacks.setdefault(record.slice.series, _Stack())
            stack.add(record.shape, record.slice)

    def judged(self) -> dict[str, bool]:
        """Return for each scan whether its slices together may show a face."""
        judged = {}
        for series, stack in self._stacks.items():
            judged[series] = stack.shows_face()
        return judged
