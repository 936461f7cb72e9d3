"""The courier as a service: built as the site says, kept alive, its news told. No torch: it sees no image."""

import logging
import math
import threading
import time

from pydantic import ValidationError

from ddm.errors import ArchipelagoError
from ddm.io.files import read_bounded
from ddm.io.space import check_writable
from ddm.transport.messages import StatusFile
from silo.config import Site
from silo.courier.inbox import MAX_STATUS_BYTES, Inbox
from silo.courier.supernode import REFUSED, UNREACHABLE, Courier

_CLOSE_S = 30.0
_EXPLAIN_EVERY_S = 15.0
_NOT_RUNNING = "no connection to the aggregator, which need not run between two plans"
_log = logging.getLogger(__name__)


class CourierWatch(threading.Thread):
    """Looks after the courier while the worker works; what it cannot mend is raised by `raise_failure`."""

    def __init__(self, courier: Courier, site: Site) -> None:
        super().__init__(daemon=True)
        self._courier, self._site = courier, site
        self._ended = threading.Event()
        self._failure: ArchipelagoError | None = None

    def run(self) -> None:
        """Look after the courier until the end."""
        try:
            look_after(self._courier, self._ended, self._site)
        except ArchipelagoError as error:
            self._failure = error
            _log.error("courier: %s - %s", error, error.remedy)

    def close(self) -> None:
        """Stop looking."""
        self._ended.set()
        self.join(timeout=_CLOSE_S)

    def raise_failure(self) -> None:
        """Raise what ended the courier, if anything did."""
        if self._failure:
            raise self._failure


def look_after(courier: Courier, ended: threading.Event, site: Site) -> None:
    """Check once a second; log why there is no connection, each reason once, and when there is one again.

    Between two plans the aggregator need not run: then that it does not answer is no reason to worry.
    """
    last: str | None = None
    explained, explained_at = "", -math.inf
    while not ended.wait(1.0):
        try:
            courier.check()
            problem = courier.problem
            if problem == UNREACHABLE and between_plans(site):
                problem = _NOT_RUNNING
            elif problem in (UNREACHABLE, REFUSED):
                if time.monotonic() - explained_at > _EXPLAIN_EVERY_S:
                    explained, explained_at = courier.why_unreachable() or problem, time.monotonic()
                problem = explained
            else:
                explained_at = -math.inf
        except OSError as error:  # a full disk perhaps; the next second tries again
            problem = error.strerror or type(error).__name__
        if problem != last:
            level = logging.INFO if problem in (None, _NOT_RUNNING) else logging.WARNING
            _log.log(level, "courier: %s", problem or "connected")
            last = problem


def between_plans(site: Site) -> bool:
    """Whether the worker has the answer to its last plan and waits for the next one, as it says in the outbox."""
    try:
        state = StatusFile.model_validate_json(
            read_bounded(site.outbox / "status.json", MAX_STATUS_BYTES)
        ).state
    except (ArchipelagoError, ValidationError):
        return False
    return state in ("accepted", "superseded", "withdrawn")


def make_courier(site: Site) -> Courier:
    """Build the courier of a site, and tidy its inbox.

    Raises:
        DiskError: the courier cannot write to its folders.
        MissingFileError: it has no root to verify plans by.
    """
    settings = site.settings()
    check_writable([site.courier, site.inbox])
    Inbox(site.path, settings.inbox_bytes, settings.max_inbox_files).clean()
    return Courier(
        site.path,
        address=settings.address,
        max_bundle_bytes=settings.max_bundle_bytes,
        max_inbox_bytes=settings.inbox_bytes,
        max_inbox_files=settings.max_inbox_files,
        max_bytes_per_s=settings.max_bytes_per_s or 0,
    )


def run_courier(site: Site) -> None:
    """Run the courier alone until a signal ends it."""
    with make_courier(site) as courier:
        _log.info("courier of %s: %s", site.settings().silo_id, courier.info())
        look_after(courier, threading.Event(), site)
