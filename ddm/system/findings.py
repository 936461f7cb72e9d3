"""What a look at a machine found: by check, each with what was expected, what was found and what to do."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from ddm.errors import ArchipelagoError
from ddm.system.console import say

Level = Literal["fail", "warn"]
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
        return cls(error.subject, error.expected or "something else", error.got or "nothing usable", error.remedy)


Findings = Mapping[str, tuple[Finding, ...]]


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
        say(json.dumps({check: [asdict(each) for each in findings] for check, findings in found.items()}, indent=2))
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
