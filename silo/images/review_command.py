"""`silo review --images`: a page on which a person decides about images, or the same by names of files or numbers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from ddm.errors import MissingFileError
from ddm.system.console import say, table
from silo.config import Site
from silo.decisions import DecisionLog, ImagesReviewed
from silo.images.command import image_source
from silo.images.decisions import Decision, Decisions
from silo.images.memory import DATABASE, ScanMemory
from silo.images.review import ACCEPTED, WAITING, Review, ReviewPicture
from silo.images.sheet_index import SheetPicture, read_index
from silo.images.source import ImageSource

_VIEWERS = 2  # processes that decode for the page


def review_images(
    site: Path | None,
    data: Path | None,
    private: Path | None,
    *,
    clear: list[Path],
    leave_out: list[Path],
    listed: bool,
) -> None:
    """Let a person clear flagged images or leave them out: on a page of this machine, or by the names of files.

    Args:
        site: the site whose configuration names the images, where `data` is None.
        data: the images.
        private: where the scan remembers results.
        clear: files and folders whose waiting images are cleared, or numbers on the last preview sheet.
        leave_out: files and folders whose images are left out, accepted ones too, or numbers on that sheet.
        listed: print what waits.

    Raises:
        SetupError: neither a site nor data.
        MissingFileError: nothing was scanned yet, or there is no image at a path or number; nothing was decided.
        BusyError: a scan is at work.
        DecisionLogError: the site's log of decisions is damaged; nothing was decided.
        KeyboardInterrupt: Ctrl-C while the page is served.
    """
    source = image_source(site, data, private)
    folder = source.folder
    if not (folder / DATABASE).is_file():
        remedy = (
            "Scan first: `silo scan SITE`; or, without a site, `silo scan --data PATH --private "
            "DIR`."
        )
        raise MissingFileError(
            str(folder),
            expected="the result of a scan",
            got="no scan",
            remedy=remedy,
        )
    with Decisions.opened(folder) as decisions:
        # Closed before the page is served: it holds the lock of scans, and a person may look at images for hours.
        with ScanMemory.opened(folder, "") as memory:
            sheet = read_index(folder)
            review = Review.of(memory, decisions, sheet)
            key = memory.key
            # All names are looked up before anything is decided: a name that is wrong changes nothing.
            to_clear = [_named(review, memory, sheet, name, Decision.CLEAR) for name in clear]
            to_leave_out = [
                _named(review, memory, sheet, name, Decision.LEAVE_OUT) for name in leave_out
            ]
            review.include_copies(memory, chain.from_iterable(to_leave_out))
        log = None
        # Other images than the site's are none of its log's business.
        if site is not None and data is None and private is None:
            log = DecisionLog(Site(site))
        with _logged(log, review, decisions):
            # One decision for each name, since each can be undone by itself on the page.
            for numbers in to_clear:
                review.decide(numbers, Decision.CLEAR)
            for numbers in to_leave_out:
                review.decide(numbers, Decision.LEAVE_OUT)
            if listed:
                pictures = [review.pictures[number] for number in review.listed(WAITING)]
                rows = [_row(picture) for picture in pictures]
                say(table(rows, ("file", "image", "waits because of")))
            elif not (clear or leave_out) and review.pictures:
                _serve(review, source, key)
        waiting, cleared, left_out = review.counts.values()
        say(
            f"{waiting} images wait, {cleared} are cleared, {left_out} left out. The next scan uses these decisions."
        )


@contextmanager
def _logged(
    log: DecisionLog | None,
    review: Review,
    decisions: Decisions,
) -> Iterator[None]:
    """Write decisions into the site's log, also those of an earlier run that are missing there, even after an error."""

    def note() -> None:
        if log is not None:
            waiting, cleared, left_out = review.counts.values()
            log.notice_images(
                ImagesReviewed(
                    num_waiting=waiting,
                    num_cleared=cleared,
                    num_left_out=left_out,
                    decisions_digest=decisions.digest,
                )
            )

    note()
    try:
        yield
    finally:
        note()


def _serve(
    review: Review,
    source: ImageSource,
    key: bytes,
) -> None:
    from silo.images.server import serve_review
    from silo.images.viewer import Viewer

    def announce(url: str) -> None:
        say(f"Open in a browser on this machine: {url}")
        say(
            "Anyone with this address can see the images. Ctrl-C ends the page; decisions are saved."
        )

    num_processes = min(_VIEWERS, source.num_processes)
    with Viewer(source.limits, num_processes, key) as viewer:
        serve_review(review, viewer, announce)


def _named(
    review: Review,
    memory: ScanMemory,
    sheet: Sequence[SheetPicture],
    name: Path,
    decision: Decision,
) -> list[int]:
    """Return the pictures that a decision is about, by a name on the command line.

    A picture that a person left out is never cleared in this way.

    Args:
        review: takes in accepted pictures that are to be left out.
        memory: of the last scan.
        sheet: the pictures of the last preview sheet.
        name: the name of a file or a folder, or a number on that sheet.
        decision: to be made.

    Raises:
        MissingFileError: no picture there that can be decided about so.
    """
    if str(name).isascii() and str(name).isdigit():
        numbers = [review.on_sheet(sheet, int(str(name)))]
    elif decision is Decision.LEAVE_OUT:
        numbers = review.include(memory, name)
    else:
        numbers = review.below(name)
    if decision is Decision.LEAVE_OUT:
        states: tuple[str, ...] = (WAITING, Decision.CLEAR, ACCEPTED)
        expected = "images of the last scan that are not left out yet"
    else:
        states = (WAITING,)
        expected = "images that wait for a person"
    numbers = [number for number in numbers if review.state(number) in states]
    if not numbers:
        raise MissingFileError(
            str(name),
            expected=expected,
            got="none there",
            remedy=(
                "Name a picture that `silo review SITE --images --list` shows, a file of the last scan, "
                "or a number on the last preview sheet. To accept pictures that were left out, use the "
                "page: `silo review SITE --images`."
            ),
        )
    return numbers


def _row(picture: ReviewPicture) -> tuple[str, str, str]:
    flags = ", ".join(picture.record.flags)
    return picture.path, str(picture.place), flags
