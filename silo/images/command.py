"""`silo scan`: from its options to a report on the terminal, or to counts for a script."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from ddm.errors import SetupError
from ddm.images.find import find_files
from ddm.images.table import COLUMNS
from ddm.system.console import progress, say
from silo.config import ColumnName, ImagesSettings, Site
from silo.images.preview import Sheet
from silo.images.report import report
from silo.images.scan import FOLDER, default_folder, limits_of, scan_as_set
from silo.images.summary import Summary


def scan_images(
    site: Path | None,
    data: Path | None,
    columns: list[str],
    private: Path | None,
    *,
    processes: int | None,
    memory: int | None,
    seconds: float | None,
    as_json: bool,
    preview: Path | None = None,
    plan: Path | None = None,
) -> ImagesSettings:
    """Scan the images of a site, or those at a path; print counts.

    Args:
        site: whose configuration names the images, where `data` is None.
        data: the images.
        columns: each NAME=COLUMN.
        private: where results are remembered.
        processes: that decode; None, as of the next two, for what the site's configuration says, or the default.
        memory: most address space of each, MiB.
        seconds: most that a file may take.
        as_json: print counts as JSON.
        preview: PNG of accepted images before and after a transform.
        plan: the recipe or the plan that has it.

    Returns:
        How they were decoded: as the site's configuration says, but for what was given.

    Raises:
        SetupError: neither a site nor data, a column that is not NAME=COLUMN, or a preview without a transform.
        MissingFileError, DataError: no images at all, or see `silo.images.scan.scan`.
    """
    given = {"columns": read_columns(columns), "memory_mib": memory, "seconds": seconds, "processes": processes}
    of_site = data is None
    data, folder, settings = images_of(site, data, private, given)
    if (preview is None) != (plan is None):
        expected, got = "--preview FILE.png and --plan FILE together", "one without the other"
        raise SetupError("silo scan", expected=expected, got=got)
    sheet = Sheet(plan, preview, limits_of(settings)) if plan and preview else None
    quiet = as_json or not sys.stdout.isatty()
    with files_progress(data, settings) if not quiet else nullcontext(lambda done: None) as advance:
        summary = scan_as_set(data, folder, settings, advance, also=sheet.take if sheet else lambda found: None)
    say(json.dumps(summary.as_json()) if as_json else report(summary, folder, of_site=of_site))
    summary.require_accepted()
    if sheet:
        reasons = sheet.write()
        if not as_json:
            say("\n".join([f"\nSheet in {preview}, for this site alone.", *reasons]))
    return settings


def images_of(
    site: Path | None, data: Path | None, private: Path | None, given: Mapping[str, object] | None = None
) -> tuple[Path, Path, ImagesSettings]:
    """Return where images are, where scans of them are remembered, and how they are decoded.

    Args:
        site: whose configuration says what is not given.
        data: the images.
        private: where scans are remembered.
        given: settings that hold against the site's, where they are not None.

    Raises:
        SetupError: neither a site nor data.
    """
    place, given = (Site(site).require() if site is not None else None), dict(given or {})
    settings = place.settings().images if place else ImagesSettings()
    if data is None:
        if place is None:
            remedy = "Name them with --data PATH, or name the SITE."
            raise SetupError("images", expected="--data, or a site", got="no images named", remedy=remedy)
        data, given["columns"] = Path(place.settings().data), given.get("columns") or settings.columns
    settings = settings.model_copy(update={name: value for name, value in given.items() if value is not None})
    return data, private or (place.private / FOLDER if place else default_folder(data)), settings


@contextmanager
def files_progress(data: Path, settings: ImagesSettings) -> Iterator[Callable[[int], None]]:
    """Show a bar of the files that are done, from the first call of what is yielded, called with their number."""
    total = 0

    def show_files(done: int) -> None:
        nonlocal total
        total = total or sum(1 for _ in find_files(data, settings.columns))
        advance(min(done, total), total)

    with progress("Reading images") as advance:
        yield show_files


def show(summary: Summary, site: Site) -> None:
    """Print what a scan of a site found."""
    say(report(summary, site.private / FOLDER, of_site=True))


def read_columns(given: list[str]) -> dict[ColumnName, str]:
    """Read names of columns, each NAME=COLUMN.

    Raises:
        SetupError: one that is not.
    """
    found: dict[ColumnName, str] = {}
    for each in given:
        text, equals, column = each.partition("=")
        name = next((known for known in COLUMNS if known == text), None)
        if name is None or not equals or not column or name in found:
            expected = f"NAME=COLUMN, each name once, of {', '.join(COLUMNS)}"
            raise SetupError("--column", expected=expected, got=repr(each[:40]))
        found[name] = column
    return found
