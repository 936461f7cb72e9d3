"""One site at work: the worker in this process, the courier beside it, both ending together."""

import json
import os
import threading
import time

from ddm.console import say
from ddm.errors import ArchipelagoError
from ddm.files import write_atomic
from ddm.trust.keys import SigningKey
from silo.config import Site
from silo.courier import Courier
from silo.state import State
from silo.worker import Worker

LINGER_S = 8.0
_CLOSE_S = 30.0


class Narrator:
    """Prints each state once, and training progress at most every few seconds."""

    def __init__(self, silo_id: str, every_s: float = 5.0) -> None:
        self._silo_id, self._every_s = silo_id, every_s
        self._last_state = ""
        self._last_at = 0.0

    def __call__(self, state: State) -> None:
        """Report one change."""
        now = time.monotonic()
        in_training = state.state == "training" and state.step > 0
        if state.state == self._last_state and not (in_training and now - self._last_at >= self._every_s):
            return
        last, self._last_state, self._last_at = self._last_state, state.state, now
        plan = f" plan {state.plan_id}" if state.state == "plan_accepted" else ""
        steps = f" {state.step}/{state.num_steps} steps" if in_training else ""
        first = "; waiting for the next plan" if state.state in ("accepted", "withdrawn") and not last else ""
        say(f"[{self._silo_id}] {state.state}{plan}{steps}{first}")
        if state.state == "awaiting_approval":
            say(f"[{self._silo_id}] what would leave: silo review; digest {state.submission_digest}")
        if state.problem:
            say(f"[{self._silo_id}] {state.problem.message}")


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


def run_worker(site: Site, key: SigningKey) -> State:
    """Run the worker alone, as a service of its own user."""
    return Worker(site, key, Narrator(site.settings().silo_id), isolation=site.isolation).run()


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


def run_both(site: Site, key: SigningKey) -> State:
    """Run worker and courier; after the receipt the courier stays a moment, so that its answer arrives."""
    with make_courier(site) as courier:
        _note_processes(site, courier)
        watch = CourierWatch(courier)
        watch.start()
        try:
            # In one process tree there is no boundary, whoever owns the folders.
            state = Worker(site, key, Narrator(site.settings().silo_id), isolation="none").run()
            time.sleep(LINGER_S)
        finally:
            watch.close()
        watch.raise_failure()
    return state


def _note_processes(site: Site, courier: Courier) -> None:
    """Leave the process ids where whoever looks after the machine finds them."""
    note = {"worker": os.getpid(), "courier": courier.info()}
    write_atomic(site.private / "processes.json", json.dumps(note).encode())
