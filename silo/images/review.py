"""The pictures that a person looks at: which ones wait, what is decided about each, and undoing it."""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ddm.errors import MissingFileError
from ddm.images.reasons import Flag
from ddm.images.record import PictureRecord
from silo.images.decisions import Decision, Decisions
from silo.images.memory import ScanMemory
from silo.images.sheet_index import SheetPicture

_States = list[Decision | None]
_StatesByNumber = dict[int, Decision | None]
WAITING = "waiting"
ACCEPTED = "accepted"  # nothing is the matter with it, but a person may leave it out


@dataclass(frozen=True)
class ReviewPicture:
    """A picture that a person looks at. For this site alone.

    Attributes:
        path: the path of its file.
        place: the place of the picture in its file.
        record: what its decoder said about it, with all of its flags.
    """

    path: str
    place: int
    record: PictureRecord

    @property
    def group(self) -> str:
        """Names what it belongs to: its scan, where that has slices in files of their own, else its file."""
        if self.record.slice is not None:
            return self.record.slice.series
        return self.path


class Review:
    """Pictures of a data set by number, and what was decided about them.

    These are all pictures that a person must see first, those that were left out, and those of the last preview sheet.
    Others are accepted, and are taken in when they are named: see `include`.

    Attributes:
        pictures: in the order of their numbers.
    """

    def __init__(self, decisions: Decisions) -> None:
        self.pictures: list[ReviewPicture] = []
        self._decisions = decisions
        self._states: _States = []
        self._numbers: dict[tuple[str, int], int] = {}  # by path and place
        # The answers of `listed`, by state and flag.
        self._listed: dict[tuple[str, str], list[int]] = {}
        # What each decision replaced, by number.
        self._undo: list[_StatesByNumber] = []

    @classmethod
    def of(
        cls,
        memory: ScanMemory,
        decisions: Decisions,
        sheet: Sequence[SheetPicture] = (),
    ) -> "Review":
        """Take the pictures that the last scan remembered.

        Args:
            memory: of the last scan.
            decisions: about its pictures.
            sheet: the pictures of the last preview sheet.
        """
        review = cls(decisions)
        for path, place, record in memory.flagged():
            flagged = decisions.flagged(record)
            if flagged.flags:
                review._add(ReviewPicture(path, place, flagged))
        for path, place, record in memory.with_pixels(decisions.left_out()):
            review._add(ReviewPicture(path, place, record))
        for picture in sheet:
            shown_record = memory.picture(picture.path, picture.place)
            # A picture that changed since the sheet was drawn is not the one that the person saw there.
            if shown_record is not None and shown_record.pixels == picture.pixels:
                flagged = decisions.flagged(shown_record)
                review._add(ReviewPicture(picture.path, picture.place, flagged))
        return review

    def _add(self, picture: ReviewPicture) -> int:
        """Give a picture a number, unless it has one."""
        name = (picture.path, picture.place)
        if name not in self._numbers:
            self._numbers[name] = len(self.pictures)
            self.pictures.append(picture)
            self._states.append(self._decisions.of(picture.record))
        return self._numbers[name]

    def include(self, memory: ScanMemory, path: Path) -> list[int]:
        """Take in the accepted pictures of a file, or of all files below a folder, and return the numbers of all there.

        What was computed of the pictures before this is not brought up to date: include everything first.
        """
        # Both sides are resolved, because the person and the scan may have come to a file by different links.
        name = os.path.realpath(path)
        # With the separator at its end, or the folder `a` would also stand for what is in `ab`.
        within = os.path.join(name, "")  # noqa: PTH118 - names of any bytes
        numbers = self.below(path)
        for file_path in memory.paths():
            real_path = os.path.realpath(file_path)
            if real_path != name and not real_path.startswith(within):
                continue
            for place, record in memory.pictures_of(file_path):
                # Pictures that the decoder refused are not used anyway, so that there is nothing to decide.
                if record.reason is None:
                    flagged = self._decisions.flagged(record)
                    picture = ReviewPicture(file_path, place, flagged)
                    numbers.append(self._add(picture))
        return sorted(set(numbers))

    def include_copies(self, memory: ScanMemory, numbers: Iterable[int]) -> None:
        """Take in the pictures with the same pixels as these, about which a decision is made with them."""
        pixels = set()
        for number in numbers:
            record = self.pictures[number].record
            pixels.add(record.pixels)
        for path, place, record in memory.with_pixels(pixels):
            if record.reason is None:
                flagged = self._decisions.flagged(record)
                self._add(ReviewPicture(path, place, flagged))

    def on_sheet(self, sheet: Sequence[SheetPicture], number: int) -> int:
        """Return the number in this review of a picture by its number on a preview sheet.

        Raises:
            MissingFileError: there is no such number, or the picture changed since the sheet was drawn.
        """
        subject = f"picture {number} of the last preview sheet"
        if not 1 <= number <= len(sheet):
            if sheet:
                got = f"a sheet of {len(sheet)} pictures"
                remedy = f"Take a number from 1 to {len(sheet)}."
            else:
                got = "no sheet"
                remedy = "Draw one: `silo scan SITE --preview FILE.png --plan FILE`."
            raise MissingFileError(
                subject,
                expected="a picture with this number",
                got=got,
                remedy=f"{remedy} If the name of a file is a number, write its whole path.",
            )
        picture = sheet[number - 1]
        name = (picture.path, picture.place)
        if name not in self._numbers:
            raise MissingFileError(
                subject,
                expected="the picture that was drawn",
                got="a picture that has changed or no longer exists",
                remedy="Draw the sheet again: `silo scan SITE --preview FILE.png --plan FILE`.",
            )
        return self._numbers[name]

    def state(self, number: int) -> str:
        """Return what was decided; `waiting` or `accepted` where nothing was."""
        decision = self._states[number]
        if decision is not None:
            return decision
        if self.pictures[number].record.flags:
            return WAITING
        return ACCEPTED

    @property
    def counts(self) -> dict[str, int]:
        """How many pictures wait, are cleared and are left out."""
        states = (WAITING, *Decision)
        return {state: len(self.listed(state)) for state in states}

    @property
    def can_undo(self) -> bool:
        """Whether anything was decided since this began."""
        return bool(self._undo)

    def listed(self, state: str, flag: str = "") -> list[int]:
        """Return the pictures in a state, and with a flag where one is given."""
        query = (state, flag)
        if query in self._listed:
            return self._listed[query]
        numbers = []
        for number, picture in enumerate(self.pictures):
            has_flag = not flag or flag in picture.record.flags
            if has_flag and self.state(number) == state:
                numbers.append(number)
        self._listed[query] = numbers
        return numbers

    def flags(self, state: str) -> dict[str, int]:
        """Count the pictures of a state by flag; one with two flags counts twice."""
        counts = {}
        for flag in Flag:
            num_pictures = len(self.listed(state, flag.value))
            if num_pictures:
                counts[flag.value] = num_pictures
        return counts

    def with_others(self, number: int) -> list[int]:
        """Return a picture and the others of its scan or file that are in the same state."""
        state = self.state(number)
        group_name = self.pictures[number].group
        group = self._groups[group_name]
        return [other for other in group if self.state(other) == state]

    def below(self, path: Path) -> list[int]:
        """Return the pictures of a file, or of all files below a folder, as far as they have numbers."""
        name = os.path.realpath(path)
        within = os.path.join(name, "")  # noqa: PTH118 - names of any bytes
        numbers = []
        for number, picture in enumerate(self.pictures):
            real_path = os.path.realpath(picture.path)
            if real_path == name or real_path.startswith(within):
                numbers.append(number)
        return numbers

    def decide(self, numbers: Iterable[int], decision: Decision | None) -> None:
        """Decide about pictures; what has the same pixels may change with them.

        Args:
            numbers: the numbers of the pictures.
            decision: None takes back what was decided.
        """
        chosen = list(dict.fromkeys(numbers))
        # A decision is kept by pixels and so changes copies elsewhere too; undoing must restore all of them.
        copies = self._copies_of(chosen)
        states_before = {number: self._states[number] for number in copies}
        self._undo.append(states_before)
        self._record(chosen, decision)
        self._read_states(copies)

    def undo(self) -> None:
        """Take back the last decision that was not taken back."""
        if not self._undo:
            return
        before = self._undo.pop()
        # Leaving out comes last: it holds whatever the flags.
        for decision in (None, *Decision):
            numbers = [number for number, state in before.items() if state is decision]
            self._record(numbers, decision)
        self._read_states(before)

    def _record(self, numbers: Iterable[int], decision: Decision | None) -> None:
        records = [self.pictures[number].record for number in numbers]
        if decision is Decision.CLEAR:
            # Without a flag there is nothing to clear: the picture is accepted again.
            unflagged = [record for record in records if not record.flags]
            self._decisions.record(unflagged, None)
            records = [record for record in records if record.flags]
        self._decisions.record(records, decision)

    def _copies_of(self, numbers: Iterable[int]) -> list[int]:
        """Return the pictures that have the same pixels as these, themselves among them."""
        copies: list[int] = []
        for number in numbers:
            pixels = self.pictures[number].record.pixels
            copies += self._by_pixels[pixels]
        # Each once, in this order.
        return list(dict.fromkeys(copies))

    def _read_states(self, numbers: Iterable[int]) -> None:
        self._listed.clear()
        for number in numbers:
            record = self.pictures[number].record
            self._states[number] = self._decisions.of(record)

    @cached_property
    def _by_pixels(self) -> dict[str, list[int]]:
        return _numbers_by(picture.record.pixels for picture in self.pictures)

    @cached_property
    def _groups(self) -> dict[str, list[int]]:
        return _numbers_by(picture.group for picture in self.pictures)


def _numbers_by(names: Iterable[str]) -> dict[str, list[int]]:
    numbers = defaultdict(list)
    for number, name in enumerate(names):
        numbers[name].append(number)
    return numbers
