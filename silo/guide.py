"""Guides the person at the terminal of `silo run`: says what only a person can do, and opens the review page."""

import os
import select
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

from ddm.system.console import has_terminal, say
from ddm.system.guard import PARENT_VARIABLE
from ddm.system.processes import program
from silo.config import Site
from silo.plan.consent import read_waiting
from silo.worker.approval import approval_path
from silo.worker.descriptions import Circumstances, Situation, describe_site
from silo.worker.state import State

_MAX_LINE_BYTES = 4096
_PAGE_END_S = 10.0


@contextmanager
def guide_at_terminal(site: Site, *, always: bool = False) -> Iterator["TerminalGuide | None"]:
    """Yield a guide where `silo run` has a terminal in the foreground; None for a service and a background job.

    Args:
        site: the silo's folder.
        always: whether there is a guide without a terminal too; it says what the work needs, and reads no key.
    """
    if not has_terminal() and not always:
        yield None
        return
    guide = TerminalGuide(site)
    try:
        yield guide
    finally:
        guide.close()


class TerminalGuide:
    """Says each thing once that the work needs from a person here; Enter opens the review page.

    It is called again and again while the worker waits, in the worker's own thread.

    Args:
        site: the silo's folder.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._described: Situation | None = None
        self._page: subprocess.Popen[bytes] | None = None

    def __call__(self, state: State) -> None:
        """Say what the work waits for, if that is a person here and was not said yet."""
        situation = self._describe(state)
        if situation != self._described:
            self._described = situation
            self._say(situation, state)
        if _may_review(state, situation):
            self._open_page_on_enter()

    def _describe(self, state: State) -> Situation:
        circumstances = Circumstances(
            running=True,
            # A worker keeps a problem only while it waits until that is removed.
            blocked=state.problem is not None,
            approved=approval_path(self._site).exists(),
            waiting_plan=read_waiting(self._site),
        )
        return describe_site(state, circumstances, str(self._site.path))

    def _say(self, situation: Situation, state: State) -> None:
        if situation.person != "silo":
            return
        silo_id = self._site.settings().silo_id
        say(f"[{silo_id}] waiting: {situation.now}")
        if state.problem is not None:
            say(f"  problem  {state.problem.message} (code {state.problem.code})")
        say(f"  needs    {situation.needs}")
        for command in situation.commands:
            say(f"  type in another terminal: {command}")
        if _may_review(state, situation):
            # A page that is still open shows an earlier draft.
            self.close()
            # An Enter from before this question is not an answer to it.
            termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
            say("  or press Enter to open the review page here")

    def _open_page_on_enter(self) -> None:
        if self._page is not None:
            code = self._page.poll()
            if code is None:
                return
            self._page = None
            say(f"  the page ended with exit code {code}; press Enter to open it again")
        if _has_line():
            command = [str(program("silo")), "review", str(self._site.path), "--page"]
            say("  the review page opens in a few seconds")
            # The page ends with this process, even if that is killed and cannot end it (`end_with_parent`).
            environment = os.environ | {PARENT_VARIABLE: str(os.getpid())}
            # Ctrl-C reaches the page as well, and one of the two saying so is enough.
            self._page = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
            )

    def close(self) -> None:
        """End the review page, if one is open."""
        if self._page is None:
            return
        self._page.terminate()
        try:
            self._page.wait(_PAGE_END_S)
        except subprocess.TimeoutExpired:
            self._page.kill()
            self._page.wait()
        self._page = None


def _may_review(state: State, situation: Situation) -> bool:
    return state.state == "awaiting_approval" and situation.person == "silo" and has_terminal()


def _has_line() -> bool:
    """Whether a person has pressed Enter; what they typed before it is dropped."""
    # A job that was moved to the background would be stopped by the system if it read from the terminal.
    if not has_terminal():
        return False
    descriptor = sys.stdin.fileno()
    readable, _, _ = select.select([descriptor], [], [], 0)
    if not readable:
        return False
    # Past Python's own buffer, in which `select` would not find a second line.
    return os.read(descriptor, _MAX_LINE_BYTES).endswith(b"\n")
