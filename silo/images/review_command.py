"""`silo review --images`: a page on which a person clears flagged images, or the same by the names of files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddm.errors import MissingFileError
from ddm.system.console import say, table
from silo.config import ImagesSettings, Site
from silo.decisions import DecisionLog, ImagesDecided
from silo.images.command import images_of
from silo.images.decisions import Decision, Decisions
from silo.images.memory import DATABASE, Memory
from silo.images.review import WAITING, Flagged, Review
from silo.images.scan import limits_of, processes_of

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
        site: whose configuration names the images, where `data` is None.
        data: the images.
        private: where the scan remembers results.
        clear: files and folders whose waiting images are cleared.
        leave_out: files and folders whose waiting and cleared images are left out.
        listed: print what waits.

    Raises:
        SetupError: neither a site nor data.
        MissingFileError: nothing was scanned yet, or nothing waits at a path.
        BusyError: a scan is at work.
        DecisionLogError: the site's log of decisions is damaged; nothing was decided.
        KeyboardInterrupt: Ctrl-C while the page is served.
    """
    _, folder, settings = images_of(site, data, private)
    if not (folder / DATABASE).is_file():
        remedy = "Scan first: silo scan, with the same SITE, --data and --private."
        raise MissingFileError(str(folder), expected="what a scan remembers", got="no scan", remedy=remedy)
    with Decisions.opened(folder) as decisions:
        with Memory.opened(folder, "") as memory:
            review, key = Review.of(memory, decisions), memory.key
        log = DecisionLog(Site(site)) if site is not None and data is None and private is None else None
        with _logged(log, review, decisions):
            for paths, decision in ((clear, Decision.CLEAR), (leave_out, Decision.LEAVE_OUT)):
                for path in paths:
                    review.decide(_found_at(review, path, decision), decision)
            if listed:
                rows = [_row(review.pictures[number]) for number in review.listed(WAITING)]
                say(table(rows, ("file", "image", "waits because of")))
            elif not (clear or leave_out) and review.pictures:
                _serve(review, settings, key)
        waiting, cleared, left_out = review.counts.values()
        say(f"{waiting} images wait, {cleared} are cleared, {left_out} left out. The next scan counts them so.")


@contextmanager
def _logged(log: DecisionLog | None, review: Review, decisions: Decisions) -> Iterator[None]:
    """Have the site's log of decisions say what was decided, however this ends, and what it was not told before."""

    def note() -> None:
        if log is not None:
            waiting, cleared, left_out = review.counts.values()
            log.notice_images(
                ImagesDecided(
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


def _serve(review: Review, settings: ImagesSettings, key: bytes) -> None:
    from silo.images.server import serve_review
    from silo.images.viewer import Viewer

    def announce(url: str) -> None:
        say(f"Open in a browser on this machine: {url}")
        say("Whoever has this address sees the images. Ctrl-C ends the page; what was decided is kept.")

    with Viewer(limits_of(settings), min(_VIEWERS, processes_of(settings)), key) as viewer:
        serve_review(review, viewer, announce)


def _found_at(review: Review, path: Path, decision: Decision) -> list[int]:
    """Return what a decision by name is about: nobody clears in passing what a person left out."""
    states = (WAITING, Decision.CLEAR) if decision is Decision.LEAVE_OUT else (WAITING,)
    found = [number for number in review.below(path) if review.state(number) in states]
    if not found:
        expected, got = f"images that are {' or '.join(states)}", "no such image there"
        remedy = "Name what `silo review --images --list` shows; what was left out is cleared on the page alone."
        raise MissingFileError(str(path), expected=expected, got=got, remedy=remedy)
    return found


def _row(flagged: Flagged) -> tuple[str, str, str]:
    return flagged.path, str(flagged.place), ", ".join(flagged.seen.flags)
