"""The courier as a service: built from the site's settings, kept alive, its problems logged; without torch."""

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
from silo.query_note import read_unnamed_plan

_CLOSE_S = 30.0
_EXPLAIN_EVERY_S = 15.0
_NOT_RUNNING = "no connection to the aggregator, which need not run between two plans"
_log = logging.getLogger(__name__)


class CourierWatch(threading.Thread):
    """Watches the courier while the worker works; an error that ends the courier is raised by `raise_failure`."""

    def __init__(self, courier: Courier, site: Site) -> None:
        super().__init__(daemon=True)
        self._courier = courier
        self._site = site
        self._ended = threading.Event()
        self._failure: ArchipelagoError | None = None

    def run(self) -> None:
        """Watch the courier until the end."""
        try:
            watch_courier(self._courier, self._ended, self._site)
        except ArchipelagoError as error:
            self._failure = error
            _log.error("courier: %s - %s", error, error.remedy)

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()
        self.join(timeout=_CLOSE_S)

    def raise_failure(self) -> None:
        """Raise what ended the courier, if anything did."""
        if self._failure:
            raise self._failure


def watch_courier(courier: Courier, ended: threading.Event, site: Site) -> None:
    """Check once a second; log why there is no connection, each reason once, and when there is one again.

    Between two plans the aggregator need not run, so that no warning is logged if it does not answer then.
    """
    logged_problem: str | None = None
    logged_plan: str | None = None
    explanation = ""
    explained_at = -math.inf
    while not ended.wait(1.0):
        try:
            courier.check()
            problem = courier.problem
            # No warning while nothing is expected of the aggregator.
            if problem == UNREACHABLE and between_plans(site):
                problem = _NOT_RUNNING
            elif problem in (UNREACHABLE, REFUSED):
                # An explanation costs a connection of its own.
                if time.monotonic() - explained_at > _EXPLAIN_EVERY_S:
                    explanation = courier.why_unreachable() or problem
                    explained_at = time.monotonic()
                problem = explanation
            else:
                explained_at = -math.inf
            unnamed_plan = read_unnamed_plan(site.path)
        except OSError as error:
            # A full disk perhaps. The next second tries again.
            problem = error.strerror or type(error).__name__
            unnamed_plan = None
        # The courier is looked at once a second, for weeks: only a change is worth a line.
        if problem != logged_problem:
            level = logging.WARNING
            if problem in (None, _NOT_RUNNING):
                level = logging.INFO
            _log.log(level, "courier: %s", problem or "connected")
            logged_problem = problem
        if unnamed_plan is not None and unnamed_plan != logged_plan:
            _log.info(
                "courier: plan %s is in force and requires nothing of this silo, which waits for the next plan",
                unnamed_plan,
            )
        logged_plan = unnamed_plan


def between_plans(site: Site) -> bool:
    """Whether the worker has the answer to its last plan and waits for the next one, by its status in the outbox."""
    try:
        data = read_bounded(site.outbox / "status.json", MAX_STATUS_BYTES)
        status = StatusFile.model_validate_json(data)
    except (ArchipelagoError, ValidationError):
        return False
    return status.state in ("accepted", "superseded", "withdrawn")


def make_courier(site: Site) -> Courier:
    """Build the courier of a site, and tidy its inbox.

    Raises:
        DiskError: the courier cannot write to its folders.
        MissingFileError: it has no root to verify plans by.
    """
    settings = site.settings()
    # Before it starts: a courier that cannot write would fail at the first message, hours later.
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
        watch_courier(courier, threading.Event(), site)
