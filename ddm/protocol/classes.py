"""The classes of a plan, by number and by name."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

_NUMBER = re.compile(r"(\d{1,9})(\.0*)?")  # as a table of floating point writes whole numbers


@dataclass(frozen=True)
class Classes:
    """How many classes there are, and what they are called.

    Attributes:
        num: they are numbered from 0.
        names: the name of each class, in that order; empty where they have none.
    """

    num: int
    names: tuple[str, ...] = ()

    def number(self, text: str) -> int | None:
        """Return the class that a text means: by its name, whatever its case and the blanks around it, or its number.

        Args:
            text: as a table or a person writes it.

        Returns:
            None where it means none of them.
        """
        name = normalize_name(text)
        # Names come first: where classes are called by numbers, each must be called by its own.
        if name in self._number_by_name:
            return self._number_by_name[name]
        match = _NUMBER.fullmatch(name)
        if match is None or int(match[1]) >= self.num:
            return None
        return int(match[1])

    @cached_property
    def _number_by_name(self) -> dict[str, int]:
        return {normalize_name(name): number for number, name in enumerate(self.names)}

    def name(self, number: int) -> str:
        """Return what a class is called; its number where it has no name."""
        if not self.names:
            return str(number)
        return self.names[number]

    def words(self, max_names: int = 8) -> str:
        """Return the classes for a message: their names, or their numbers."""
        if not self.names:
            return f"0 to {self.num - 1}"
        text = ", ".join(self.names[:max_names])
        if self.num > max_names:
            text += f" and {self.num - max_names} more"
        return text

    def choices(self) -> str:
        """Return for a message what a person may call a class: its name, if it has one, or its number."""
        if not self.names:
            return self.words()
        return f"{self.words()}, or a number from 0 to {self.num - 1}"


def normalize_name(name: str) -> str:
    """Return a name without case and superfluous blanks, which do not distinguish names."""
    return " ".join(name.split()).casefold()


def find_naming_fault(names: Sequence[str], num: int) -> str | None:
    """Return what is wrong with the names of classes; None where nothing is."""
    if len(names) != num:
        return f"names must be as many as num_classes, {num}, got {len(names)}"
    if any(name != name.strip() or not name.isprintable() for name in names):
        return "names must be printable text without blanks around them"
    if len({normalize_name(name) for name in names}) < num:
        return "names must differ by more than case and blanks"
    # If class 1 were called "3", the text "3" could mean class 1 by its name or class 3 by its number.
    for number, name in enumerate(names):
        match = _NUMBER.fullmatch(normalize_name(name))
        if match and (match[2] or int(match[1]) != number):
            return f"a name that is a number must be that of its class: {name!r} is not {number}"
    return None
