"""What a look at a machine found: by check, each with what was expected, what was found and what to do."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, TypeVar

from ddm.errors import ArchipelagoError, SetupError
from ddm.system.console import say

Level = Literal["fail", "warn"]
T = TypeVar("T")
_MARKS = {None: "ok  ", "warn": "WARN", "fail": "FAIL"}


@dataclass(frozen=True)
class Finding:
    """One problem: its subject, what was expected, what was found, what to do.

    Attributes:
        level: whether work fails because of it, or only may.
    """

    subject: str
    expected: str
    got: str
    remedy: str
    level: Level = "fail"

    @classmethod
    def of(cls, error: ArchipelagoError) -> "Finding":
        """Turn an error into a finding."""
        return cls(
            error.subject,
            error.expected or "something else",
            error.got or "nothing usable",
            error.remedy,
        )


Findings = Mapping[str, tuple[Finding, ...]]


class Attempts:
    """Reads facts; whatever cannot be read becomes an error of its check instead."""

    def __init__(self) -> None:
        self._errors: dict[str, list[ArchipelagoError]] = defaultdict(list)

    def read(self, check: str, read: Callable[[], T]) -> T | None:
        """Return what `read` returns; None where it fails."""
        try:
            return read()
        except ArchipelagoError as error:
            self.note(check, error)
        except OSError as error:
            subject, got = str(error.filename or check), str(error.strerror or error)
            remedy = "Check as the user that this file belongs to, or restore it from backup."
            self.note(
                check,
                SetupError(subject, expected="a file that can be read", got=got, remedy=remedy),
            )
        return None

    def note(self, check: str, error: ArchipelagoError) -> None:
        """Add an error."""
        self._errors[check].append(error)

    @property
    def errors(self) -> Mapping[str, tuple[ArchipelagoError, ...]]:
        """What could not be read, by check."""
        return {check: tuple(errors) for check, errors in self._errors.items()}


def apply(
    rules: Mapping[str, Callable[[T], Iterable[Finding]]],
    facts: T,
    errors: Mapping[str, Sequence[ArchipelagoError]],
) -> Findings:
    """Return what every rule finds in the facts, after what could not be read for it; empty where all is well."""
    unread = {check: tuple(map(Finding.of, errors.get(check, ()))) for check in rules}
    return {check: (*unread[check], *rule(facts)) for check, rule in rules.items()}


def worst(findings: tuple[Finding, ...]) -> Level | None:
    """Return the gravest level; None where nothing was found."""
    levels = {finding.level for finding in findings}
    return "fail" if "fail" in levels else "warn" if levels else None


def tell(found: Findings, *, as_json: bool) -> bool:
    """Print a line for each check with what it found, or the same for scripts.

    Returns:
        whether no check failed; one that only warns did not.
    """
    if as_json:
        say(
            json.dumps(
                {check: [asdict(each) for each in findings] for check, findings in found.items()},
                indent=2,
            )
        )
    else:
        for check, findings in found.items():
            say(f"{_MARKS[worst(findings)]} {check}")
            for finding in findings:
                say(f"       {finding.subject}")
                say(f"         expected: {finding.expected}")
                say(f"         found:    {finding.got}")
                say(f"         to do:    {finding.remedy}")
        say(f"{len(found)} checks, {sum(map(len, found.values())) or 'nothing'} found.")
    return "fail" not in map(worst, found.values())
