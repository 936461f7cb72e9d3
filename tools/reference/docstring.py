"""Google docstrings: their text, and their sections as named entries."""

import inspect
import re
from dataclasses import dataclass, field

SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Source")
_HEADING = re.compile(rf"^({'|'.join(SECTIONS)}):$")
_ENTRY = re.compile(r"^([A-Za-z_][\w.]*(?:, [A-Za-z_][\w.]*)*): (.+)$", re.DOTALL)


@dataclass(frozen=True)
class Docstring:
    """A docstring taken apart.

    Attributes:
        text: all before the first section, as written.
        sections: the paragraphs of each section, one for each line that is not indented further.
    """

    text: str
    sections: dict[str, list[str]] = field(default_factory=dict)

    def entries(self, section: str) -> dict[str, str]:
        """Return what a section says of each name; of several before one colon, the same of each."""
        found: dict[str, str] = {}
        for paragraph in self.sections.get(section, []):
            if entry := _ENTRY.match(paragraph):
                found |= dict.fromkeys(entry[1].split(", "), entry[2])
        return found


def parse(docstring: str | None) -> Docstring:
    """Take a docstring apart."""
    text: list[str] = []
    sections: dict[str, list[str]] = {}
    now: list[str] | None = None
    for line in inspect.cleandoc(docstring or "").splitlines():
        if heading := _HEADING.match(line):
            now = sections.setdefault(heading[1], [])
        elif now is None or (line and not line.startswith(" ")):
            now = None
            text.append(line)
        elif not line.startswith("     ") and line.strip():
            now.append(line.strip())
        elif line.strip():
            now[-1] += f" {line.strip()}"
    return Docstring("\n".join(text).strip(), sections)
