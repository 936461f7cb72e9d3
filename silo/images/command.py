"""`silo scan`: from its options to a report on the terminal, or to counts for a script."""

import json
import os
import sys
from pathlib import Path

from ddm.errors import DataError, SetupError
from ddm.imaging.decoded import Limits
from ddm.system.console import progress, say
from silo.config import Site
from silo.images.entries import find_entries
from silo.images.report import report
from silo.images.scan import default_folder, scan
from silo.images.summary import Summary
from silo.images.table import COLUMNS


def scan_images(
    site: Path | None,
    data: Path | None,
    columns: list[str],
    private: Path | None,
    *,
    processes: int | None,
    memory: int,
    seconds: float,
    as_json: bool,
) -> None:
    """Scan the images of a site, or those at a path; print counts.

    Args:
        site: whose configuration names the images, where `data` is None.
        data: the images.
        columns: each NAME=COLUMN.
        private: where results are remembered.
        processes: that decode; None for one a core.
        memory: most address space of each, MiB.
        seconds: most that a file may take.
        as_json: print counts as JSON.

    Raises:
        SetupError: neither a site nor data, or a column that is not NAME=COLUMN.
        MissingFileError, DataError: no images at all, or see `silo.images.scan.scan`.
    """
    place = Site(site).require() if site is not None else None
    if data is None:
        if place is None:
            remedy = "Name them: silo scan --data PATH, or silo scan SITE."
            raise SetupError("silo scan", expected="--data, or a site", got="no images to scan", remedy=remedy)
        data = Path(place.settings().data)
    folder = private or (place.private / "images" if place else default_folder(data))
    names = _columns(columns)
    limits = Limits(seconds=seconds, memory_bytes=memory << 20)
    num = processes or len(os.sched_getaffinity(0))
    if as_json or not sys.stdout.isatty():
        summary = scan(data, folder, limits, columns=names, processes=num)
    else:
        total = sum(1 for _ in find_entries(data, names))
        with progress("Reading images") as advance:
            summary = scan(
                data,
                folder,
                limits,
                columns=names,
                processes=num,
                advance=lambda done: advance(min(done, total), total),
            )
    say(json.dumps(summary.as_json()) if as_json else report(summary, folder))
    _require_images(summary)


def _columns(given: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in given:
        name, equals, column = each.partition("=")
        if name not in COLUMNS or not equals or not column or name in found:
            expected = f"NAME=COLUMN, each name once, of {', '.join(COLUMNS)}"
            raise SetupError("--column", expected=expected, got=repr(each[:40]))
        found[name] = column
    return found


def _require_images(summary: Summary) -> None:
    """Refuse a data set of which nothing can be used."""
    if not summary.accepted:
        got = f"none accepted, {summary.quarantined} in quarantine" if summary.quarantined else "no files at all"
        remedy = "Look through the reasons above and the private list of files, and mend or clear what waits there."
        raise DataError("images", expected="at least one that can be used", got=got, remedy=remedy)
