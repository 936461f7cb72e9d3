"""The pictures that a person must see first: which ones wait, what is decided about each, and undoing it."""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ddm.images.reasons import Flag
from ddm.images.record import PictureRecord
from silo.images.decisions import Decision, Decisions
from silo.images.memory import Memory

WAITING = "waiting"


@dataclass(frozen=True)
class Flagged:
    """A picture that a person must see first. For this site alone.

    Attributes:
        path: of its file.
        place: of the picture in its file.
        seen: what its decoder said of it, with all of its flags.
    """

    path: str
    place: int
    seen: PictureRecord

    @property
    def together(self) -> str:
        """Names what it belongs to: its scan, where that has slices in files of their own, else its file."""
        return self.seen.slice.series if self.seen.slice else self.path


class Review:
    """All pictures of a data set that had to be seen, by number, and what was decided about them."""

    def __init__(self, decisions: Decisions, pictures: Sequence[Flagged]) -> None:
        self.pictures = pictures
        self._decisions = decisions
        self._states = [decisions.of(each.seen) for each in pictures]
        self._listed: dict[tuple[str, str], list[int]] = {}
        self._undo: list[dict[int, Decision | None]] = []

    @classmethod
    def of(cls, memory: Memory, decisions: Decisions) -> "Review":
        """Take the pictures that the last scan remembered."""
        found = (Flagged(path, place, decisions.flagged(seen)) for path, place, seen in memory.flagged())
        return cls(decisions, [each for each in found if each.seen.flags])

    def state(self, number: int) -> str:
        """Return `waiting`, or what was decided."""
        return self._states[number] or WAITING

    @property
    def counts(self) -> dict[str, int]:
        """How many pictures there are in each state."""
        return {state: len(self.listed(state)) for state in (WAITING, *Decision)}

    @property
    def can_undo(self) -> bool:
        """Whether anything was decided since this began."""
        return bool(self._undo)

    def listed(self, state: str, flag: str = "") -> list[int]:
        """Return the pictures in a state, and with a flag where one is given."""
        if (state, flag) not in self._listed:
            self._listed[state, flag] = [
                number
                for number, each in enumerate(self.pictures)
                if (self._states[number] or WAITING) == state and (not flag or flag in each.seen.flags)
            ]
        return self._listed[state, flag]

    def flags(self, state: str) -> dict[str, int]:
        """Count the pictures of a state by flag; one with two flags counts twice."""
        found = {flag.value: len(self.listed(state, flag.value)) for flag in Flag}
        return {flag: num for flag, num in found.items() if num}

    def with_others(self, number: int) -> list[int]:
        """Return a picture and the others of its scan or file that are in the same state."""
        state, together = self.state(number), self._together[self.pictures[number].together]
        return [each for each in together if self.state(each) == state]

    def below(self, path: Path) -> list[int]:
        """Return the pictures of a file, or of all files below a folder."""
        name = os.path.realpath(path)
        within = os.path.join(name, "")  # noqa: PTH118 - names of any bytes
        real = (os.path.realpath(each.path) for each in self.pictures)
        return [number for number, each in enumerate(real) if each == name or each.startswith(within)]

    def decide(self, numbers: Iterable[int], decision: Decision | None) -> None:
        """Decide about pictures; what has the same pixels may change with them.

        Args:
            numbers: of the pictures.
            decision: None lets them wait again.
        """
        chosen = list(dict.fromkeys(numbers))
        alike = self._alike(chosen)
        self._undo.append({number: self._states[number] for number in alike})
        self._record(chosen, decision)
        self._look(alike)

    def undo(self) -> None:
        """Take back the last decision that was not taken back."""
        if not self._undo:
            return
        before = self._undo.pop()
        for decision in (None, *Decision):  # leaving out comes last: it holds whatever the flags
            self._record([number for number, each in before.items() if each is decision], decision)
        self._look(before)

    def _record(self, numbers: Iterable[int], decision: Decision | None) -> None:
        self._decisions.record([self.pictures[number].seen for number in numbers], decision)

    def _alike(self, numbers: Iterable[int]) -> list[int]:
        found = (each for number in numbers for each in self._same[self.pictures[number].seen.pixels])
        return list(dict.fromkeys(found))

    def _look(self, numbers: Iterable[int]) -> None:
        self._listed.clear()
        for number in numbers:
            self._states[number] = self._decisions.of(self.pictures[number].seen)

    @cached_property
    def _same(self) -> dict[str, list[int]]:
        return self._by(each.seen.pixels for each in self.pictures)

    @cached_property
    def _together(self) -> dict[str, list[int]]:
        return self._by(each.together for each in self.pictures)

    @staticmethod
    def _by(names: Iterable[str]) -> dict[str, list[int]]:
        found = defaultdict(list)
        for number, name in enumerate(names):
            found[name].append(number)
        return found
