"""One site at work: the worker in this process, the courier beside it, both ending together."""

import json
import logging
import os
import threading
import time
from contextlib import ExitStack

from ddm.errors import ArchipelagoError
from ddm.io.files import write_atomic
from ddm.system.signals import stop_on_signals
from ddm.trust.keys import SigningKey
from silo.config import Site
from silo.courier.service import CourierWatch, make_courier
from silo.courier.supernode import Courier
from silo.guide import guide_at_terminal
from silo.query_note import read_query_note
from silo.worker.descriptions import describe_state
from silo.worker.progress import read_note
from silo.worker.state import State
from silo.worker.worker import Worker

# Seconds for which the courier continues after the worker's end, for a question that the aggregator has already asked.
LINGER_S = 8.0
# Seconds that a finished reply takes to leave.
_SENDING_S = 2.0
# Seconds for which it continues at most: after an error, until the aggregator knows about it; on a busy machine, until
# the reply to the receipt is ready.
MAX_REPORT_S = 60.0
_LOOK_S = 0.5
_log = logging.getLogger(__name__)


class Narrator:
    """Logs each state once, and how far training and audit are at most every few seconds."""

    def __init__(self, site: Site, every_s: float = 5.0) -> None:
        self._silo_id = site.settings().silo_id
        self._site_path = site.path
        self._private = site.private
        self._every_s = every_s
        self._last_state = ""
        self._last_at = 0.0

    def __call__(self, state: State) -> None:
        """Report one change."""
        now = time.monotonic()
        is_long = state.state in ("training", "auditing") and state.step > 0
        is_due = is_long and now - self._last_at >= self._every_s
        name = f"{state.state}, held" if state.held else state.state
        # Training reports each step, and an audit each block: a log of weeks must stay readable.
        if name == self._last_state and not is_due:
            return
        # A worker that starts with its plan finished would log one word and then nothing for days.
        is_first = not self._last_state
        self._last_state = name
        self._last_at = now
        text: str = state.state
        if state.state == "plan_accepted":
            text += f" plan {state.plan_id}"
        if is_first and state.state == "training":
            # The state was saved after the last checkpoint: its step may be further than where the training continues.
            text += ", from the last checkpoint if there is one"
        elif is_long:
            text += self._progress(state)
        if state.held or state.state == "superseded":
            text += f": {describe_state(state)}"
        if is_first and state.state in ("accepted", "withdrawn"):
            text += "; waiting for the next plan"
        _log.info("[%s] %s", self._silo_id, text)
        if state.state == "awaiting_approval":
            _log.info(
                "[%s] what would leave: silo review %s; digest %s",
                self._silo_id,
                self._site_path,
                state.submission_digest,
            )
        if state.problem:
            _log.warning("[%s] %s - %s", self._silo_id, state.problem.message, state.problem.remedy)

    def _progress(self, state: State) -> str:
        """Return how far it is: training counts steps, an audit the evaluations of the experts."""
        note = read_note(self._private)
        if note is not None and note.stage == "auditing" and state.state == "auditing":
            return f" {note.done / max(note.total, 1):.0%}"
        if state.state == "training":
            return f" {state.step}/{state.num_steps} steps"
        return ""


def run_worker(site: Site, key: SigningKey, *, wait: bool = False) -> State:
    """Run the worker alone, as a service of its own user; with `wait` it waits for a waiver without a terminal too."""
    with stop_on_signals() as stop, guide_at_terminal(site, always=wait) as guide:
        worker = Worker(site, key, Narrator(site), site.isolation, stop, on_wait=guide)
        return worker.run()


def run_both(site: Site, key: SigningKey, *, wait: bool = False) -> State:
    """Run worker and courier; after the receipt the courier stays a moment, so that its answer arrives.

    Args:
        site: the silo's folder.
        key: its signing key.
        wait: whether to wait for a waiver without a terminal too, instead of ending.
    """
    # The courier comes first: it may fail for want of a key or of rights, which should show before the worker begins.
    with make_courier(site) as courier, stop_on_signals() as stop, ExitStack() as stack:
        # Before signals act again: a second Ctrl-C changes nothing.
        stack.callback(courier.stop)
        _note_processes(site, courier)
        watch = CourierWatch(courier, site)
        watch.start()
        try:
            # In one process tree there is no boundary, regardless of who owns the folders.
            with guide_at_terminal(site, always=wait) as guide:
                worker = Worker(site, key, Narrator(site), "none", stop, on_wait=guide)
                state = _run_to_end(worker, courier, stop)
        finally:
            watch.close()
        # After the worker's own end: experts that were approved are in the outbox, whatever became of the courier.
        watch.raise_failure()
    return state


def _run_to_end(worker: Worker, courier: Courier, stop: threading.Event) -> State:
    """Run the worker; the courier has a moment more for its reply to the receipt, or for the code of an error."""
    try:
        state = worker.run()
    except ArchipelagoError:
        if worker.code:
            _log.info(
                "the work stopped; the aggregator learns this within a minute (Ctrl-C ends at once)"
            )
            wait_until_heard(worker.site, worker.code, stop)
        raise
    let_reply(courier, stop)
    return state


def let_reply(courier: Courier, stop: threading.Event, linger_s: float = LINGER_S) -> None:
    """Wait until the courier has replied: without its reply to the receipt, `aggregator run` waits for this silo.

    Args:
        courier: answers the aggregator.
        stop: ends the wait.
        linger_s: the time to wait in any case.
    """
    deadline = time.monotonic() + MAX_REPORT_S
    stop.wait(linger_s)
    was_answering = False
    while courier.is_answering and time.monotonic() < deadline and not stop.is_set():
        was_answering = True
        stop.wait(_LOOK_S)
    if was_answering:
        stop.wait(_SENDING_S)


def wait_until_heard(
    site: Site,
    code: int,
    stop: threading.Event,
    limit_s: float = MAX_REPORT_S,
) -> bool:
    """Wait until the aggregator's questions show that it knows a code; return whether they do.

    Args:
        site: the silo's folder.
        code: the code that the worker reported.
        stop: ends the wait.
        limit_s: the time after which it ends too, since the aggregator may be away.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and not stop.is_set():
        note = read_query_note(site.path)
        if note is not None and note.code == code:
            return True
        stop.wait(_LOOK_S)
    return False


def _note_processes(site: Site, courier: Courier) -> None:
    """Write the process ids where the operator of the machine finds them."""
    note = {"worker": os.getpid(), "courier": courier.info()}
    write_atomic(site.private / "processes.json", json.dumps(note).encode())
