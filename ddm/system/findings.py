"""The problems that the checks of a machine found: what was expected, what was found, and what to do."""

import json
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, TypeVar

from ddm.errors import ArchipelagoError, SetupError
from ddm.system.console import say

FindingLevel = Literal["fail", "warn"]
T = TypeVar("T")
# Of the same width, so that the names of checks are in one column.
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
    level: FindingLevel = "fail"

    @classmethod
    def of(cls, error: ArchipelagoError) -> "Finding":
        """Turn an error into a finding."""
        return cls(
            error.subject,
            error.expected or "something else",
            error.got or "nothing usable",
            error.remedy,
        )

    def indented(self, num_blanks: int) -> str:
        """Return what was expected, what was found and what to do, one a line."""
        lines = (
            f"expected: {self.expected}",
            f"found:    {self.got}",
            f"to do:    {self.remedy}",
        )
        return textwrap.indent("\n".join(lines), " " * num_blanks)


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
            unreadable = SetupError(
                str(error.filename or check),
                expected="a file that can be read",
                got=str(error.strerror or error),
                remedy="Check as the user that this file belongs to, or restore it from backup.",
            )
            self.note(check, unreadable)
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
    findings = {}
    for check, rule in rules.items():
        unread = [Finding.of(error) for error in errors.get(check, ())]
        findings[check] = (*unread, *rule(facts))
    return findings


def worst(findings: tuple[Finding, ...]) -> FindingLevel | None:
    """Return the gravest level; None where nothing was found."""
    levels = {finding.level for finding in findings}
    # A failure counts before any number of warnings.
    if "fail" in levels:
        return "fail"
    return "warn" if levels else None


def print_findings(findings: Findings, *, as_json: bool) -> bool:
    """Print a line for each check with what it found, or the same for scripts.

    Returns:
        whether no check failed; one that only warns did not.
    """
    if as_json:
        document = {}
        for check, problems in findings.items():
            document[check] = [asdict(problem) for problem in problems]
        say(json.dumps(document, indent=2))
    else:
        for check, problems in findings.items():
            say(f"{_MARKS[worst(problems)]} {check}")
            for problem in problems:
                say(f"       {problem.subject}")
                say(problem.indented(9))
        num_problems = sum(map(len, findings.values()))
        say(f"{len(findings)} checks, {num_problems or 'nothing'} found.")
    return "fail" not in map(worst, findings.values())
