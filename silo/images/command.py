"""`silo scan`: from its options to a report on the terminal, or to counts for a script."""

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from ddm.errors import SetupError
from ddm.images.table import COLUMNS, ColumnName
from ddm.system.console import progress, say
from silo.config import ImagesSettings, Site
from silo.images.preview import PreviewSheet
from silo.images.report import report
from silo.images.scan import scan
from silo.images.scanned_image import ScannedImage
from silo.images.source import FOLDER, ImageSource, default_folder
from silo.images.summary import Summary


def scan_images(
    source: ImageSource,
    *,
    of_site: bool,
    as_json: bool,
    review_command: str,
    preview: Path | None = None,
    plan: Path | None = None,
) -> None:
    """Scan images; print counts.

    Args:
        source: the images.
        of_site: whether they are those of a site, whose worker reads them as its configuration says.
        as_json: print counts as JSON.
        review_command: what to type to look at these images; see `review_command_of`.
        preview: PNG of accepted images before and after a transform.
        plan: the recipe or the plan that has the transform.

    Raises:
        SetupError: a preview without a transform.
        MissingFileError, DataError: no images at all, or see `silo.images.scan.scan`.
    """
    if (preview is None) != (plan is None):
        expected = "--preview FILE.png and --plan FILE together"
        remedy = (
            "Add the other one: the sheet shows images before and "
            "after the table [transform] of a recipe or a plan."
        )
        raise SetupError("silo scan", expected=expected, got="one without the other", remedy=remedy)
    sheet = None
    if preview is not None and plan is not None:
        sheet = PreviewSheet(plan, preview, source)

    def observe(image: ScannedImage) -> None:
        if sheet is not None:
            sheet.take(image)

    bar: AbstractContextManager[Callable[[int], None]] = files_progress(source)
    if as_json or not sys.stdout.isatty():
        bar = nullcontext(lambda num_files: None)
    with bar as advance:
        summary = scan(source, advance, observe)
    if as_json:
        say(json.dumps(summary.as_json()))
    else:
        text = report(summary, source.folder, of_site=of_site, review_command=review_command)
        say(text)
    # After the report, which says why nothing was accepted and what to do.
    summary.require_accepted(is_reported=not as_json)
    if sheet is not None:
        reasons = sheet.write()
        if not as_json:
            leave_out = f"To leave out a picture by its number: {review_command} --leave-out NUMBER"
            say("\n".join([f"\nPreview sheet, only for this site: {preview}", leave_out, *reasons]))


def image_source(
    site: Path | None,
    data: Path | None,
    private: Path | None,
    given_settings: Mapping[str, object] | None = None,
) -> ImageSource:
    """Return the images of a site, or those at a path.

    Args:
        site: the site whose configuration says what is not given.
        data: the images.
        private: where scans are remembered.
        given_settings: settings that take precedence over the site's, unless they are None.

    Raises:
        SetupError: neither a site nor data.
    """
    if site is not None:
        opened_site = Site(site).require()
        # A scan is remembered in the site, unless another folder is named.
        if private is None:
            opened_site.require_owner()
        source = ImageSource.of_site(opened_site)
    elif data is not None:
        source = ImageSource(data.absolute(), default_folder(data))
    else:
        remedy = "Name them with --data PATH, or name the SITE."
        raise SetupError(
            "images",
            expected="--data or a SITE",
            got="no images named",
            remedy=remedy,
        )
    settings = given_settings or {}
    changes = {name: value for name, value in settings.items() if value is not None}
    if data is not None:
        # Columns that silo.toml names are those of the site's own table.
        changes.setdefault("columns", {})
        # A later command may run in another folder, and finds pictures by the paths that a scan remembers.
        source = replace(source, data=data.absolute())
    if private is not None:
        source = replace(source, folder=private)
    changed = source.settings.model_copy(update=changes)
    return replace(source, settings=changed)


def review_command_of(
    site: Path | None,
    data: Path | None,
    private: Path | None,
) -> str:
    """Return the command that shows the images of the same options as a person types it."""
    words = ["silo", "review"]
    if site is not None:
        words.append(str(site))
    words.append("--images")
    if data is not None:
        words += ["--data", str(data)]
    if private is not None:
        words += ["--private", str(private)]
    return shlex.join(words)


@contextmanager
def files_progress(source: ImageSource) -> Iterator[Callable[[int], None]]:
    """Show a bar of finished files, from the first call of the function that is yielded, called with their number."""
    total = 0

    def show_files(num_finished: int) -> None:
        nonlocal total
        if not total:
            total = sum(1 for _ in source.find().files())
        # Files that are added during the scan are finished too, but were not counted.
        advance(min(num_finished, total), total)

    with progress("Reading images") as advance:
        yield show_files


def show(summary: Summary, site: Site) -> None:
    """Print what a scan of a site found."""
    review_command = review_command_of(site.path, None, None)
    folder = site.private / FOLDER
    text = report(summary, folder, of_site=True, review_command=review_command)
    say(text)


def read_columns(options: list[str]) -> dict[ColumnName, str]:
    """Read names of columns, each NAME=COLUMN.

    Raises:
        SetupError: an option that is not of this form.
    """
    columns: dict[ColumnName, str] = {}
    for option in options:
        text, equals, column = option.partition("=")
        name = next((known for known in COLUMNS if known == text), None)
        if name is None or not equals or not column or name in columns:
            expected = f"NAME=COLUMN, each name once, of {', '.join(COLUMNS)}"
            remedy = "Write the name from this list before the equals sign, such as --column label=finding."
            got = repr(option[:40])
            raise SetupError("--column", expected=expected, got=got, remedy=remedy)
        columns[name] = column
    return columns


def images_settings(columns: list[str], *, outside: bool) -> ImagesSettings:
    """Return the settings of a new site's images.

    Args:
        columns: other names of a table's columns; see `read_columns`.
        outside: whether links and paths may lead out of the data folder.
    """
    return ImagesSettings(columns=read_columns(columns), outside=outside)
