"""The page docs/adr/README.md: every decision record with its status, as its file states them."""

import re
from pathlib import Path

ADRS = Path(__file__).parent.parent.parent / "docs" / "adr"
_HEAD = """# Decisions

Each page records one decision, the reasons for it and the alternatives. `make docs` writes this list from the pages.

| decision | status |
| --- | --- |
"""
_PAGE = re.compile(r"# (\d{4})\. (.+)\n\n- Date: .+\n- Status: ((?:.+\n)+)")


def decision_pages() -> list[Path]:
    """Return the pages of decisions, in the order of their numbers."""
    return sorted(ADRS.glob("[0-9]*.md"))


def decisions_page() -> str:
    """Return the page."""
    rows = []
    for path in decision_pages():
        match = _PAGE.match(path.read_text("utf-8"))
        if match is None:
            raise ValueError(f"{path.name} does not begin with a number, a date and a status")
        number, title, status = match.groups()
        # A status may take several lines of its page.
        rows.append(f"| [{number}]({path.name}) {title} | {' '.join(status.split())} |\n")
    return _HEAD + "".join(rows)
