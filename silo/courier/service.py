"""The courier as a service: built as the site says, kept alive, its news told. No torch: it sees no image."""

import threading
import time

from ddm.errors import ArchipelagoError
from ddm.system.console import say
from silo.config import Site
from silo.courier.supernode import Courier

_CLOSE_S = 30.0


class CourierNews:
    """Prints why there is no connection, each reason once, and when there is one again."""

    def __init__(self, courier: Courier) -> None:
        self._courier = courier
        self._told: str | None = None

    def refused(self, error: OSError) -> None:
        """Print what the operating system refused, a full disk perhaps; the next second tries again."""
        self._tell(error.strerror or type(error).__name__)

    def tell(self) -> None:
        """Print what changed since the last time."""
        self._tell(self._courier.problem)

    def _tell(self, problem: str | None) -> None:
        if problem != self._told:
            say(f"courier: {problem}" if problem else "courier: connected")
            self._told = problem


class CourierWatch(threading.Thread):
    """Looks after the courier while the worker works; what it cannot mend is raised by `raise_failure`."""

    def __init__(self, courier: Courier) -> None:
        super().__init__(daemon=True)
        self._courier = courier
        self._ended = threading.Event()
        self._failure: ArchipelagoError | None = None

    def run(self) -> None:
        """Check once a second until the end."""
        news = CourierNews(self._courier)
        while not self._ended.wait(1.0):
            try:
                self._courier.check()
                news.tell()
            except ArchipelagoError as error:
                self._failure = error
                say(f"courier: {error} - {error.remedy}", error=True)
                return
            except OSError as error:
                news.refused(error)

    def close(self) -> None:
        """Stop looking."""
        self._ended.set()
        self.join(timeout=_CLOSE_S)

    def raise_failure(self) -> None:
        """Raise what ended the courier, if anything did."""
        if self._failure:
            raise self._failure


def make_courier(site: Site) -> Courier:
    """Build the courier of a site."""
    settings = site.settings()
    return Courier(
        site.path,
        address=settings.address,
        max_bundle_bytes=settings.max_bundle_bytes,
        max_bytes_per_s=settings.max_bytes_per_s or 0,
    )


def run_courier(site: Site) -> None:
    """Run the courier alone until a signal ends it."""
    with make_courier(site) as courier:
        say(f"courier of {site.settings().silo_id}: {courier.info()}")
        news = CourierNews(courier)
        while True:
            try:
                courier.check()
                news.tell()
            except OSError as error:
                news.refused(error)
            time.sleep(1.0)
