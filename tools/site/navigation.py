"""The navigation of the site, as the pages state it: docs/README.md lists the sections, and each lists its pages."""

import posixpath
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
HOME = "docs/README.md"
SECTIONS = (
    "docs/start.md",
    "docs/hospital.md",
    "docs/aggregator.md",
    "docs/research.md",
    "docs/security.md",
    "docs/measurements.md",
    "docs/reference.md",
    "docs/develop.md",
)
_ENTRY = re.compile(r"^ *- \[([^\]]+)\]\(([^)#\s]+\.(?:md|ipynb))\)", re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """A page in a list of pages.

    Attributes:
        title: the text of its link.
        path: the page, relative to the repository.
    """

    title: str
    path: str


def listed_pages(page: str, text: str) -> tuple[Entry, ...]:
    """Return the pages that the lists of a page name, each once: items that begin with a link to another page.

    Args:
        page: the page, relative to the repository.
        text: what it holds.
    """
    folder = posixpath.dirname(page)
    entries: dict[str, Entry] = {}
    for title, link in _ENTRY.findall(text):
        path = posixpath.normpath(posixpath.join(folder, link))
        entries.setdefault(path, Entry(title, path))
    return tuple(entries.values())


def navigation_of(page: str, text: str) -> str:
    """Return the directive that makes the pages listed by a page its children; nothing for an ordinary page."""
    if page != HOME and page not in SECTIONS:
        return ""
    lines = ["", "", "```{toctree}", ":hidden:", ""]
    for entry in listed_pages(page, text):
        document = entry.path.removesuffix(".md").removesuffix(".ipynb")
        lines.append(f"{entry.title} </{document}>")
    lines.append("```")
    return "\n".join(lines) + "\n"
