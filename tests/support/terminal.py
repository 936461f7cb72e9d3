"""A program at a terminal of its own, as a person has it."""

import fcntl
import os
import pty
import select
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.support.waiting import LIMIT_S


class Terminal:
    """A program and the other end of its terminal.

    Attributes:
        process: the program.
        shown: all that it wrote so far.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", descriptor: int) -> None:
        self.process = process
        self.shown = ""
        self._descriptor = descriptor

    def wait_for(self, text: str) -> None:
        """Wait until the program has written a text."""
        deadline = time.monotonic() + LIMIT_S
        while text not in self.shown:
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"not shown: {text}\n{self.shown}"
            assert self._read(left_s), f"ended before it showed: {text}\n{self.shown}"

    def type(self, text: str) -> None:
        """Type a text."""
        os.write(self._descriptor, text.encode())

    def wait_for_end(self) -> int:
        """Read to the program's end, and return its exit code."""
        while self._read(LIMIT_S):
            pass
        return self.process.wait(LIMIT_S)

    def _read(self, timeout_s: float) -> bool:
        """Read what was written; False where nobody has the terminal open any more."""
        readable, _, _ = select.select([self._descriptor], [], [], timeout_s)
        assert readable, f"nothing more was shown\n{self.shown}"
        try:
            piece = os.read(self._descriptor, 65536)
        except OSError:
            # Linux says so by an error, once the last program has closed its side.
            return False
        # A terminal ends lines with \r\n, wherever it breaks none.
        self.shown += piece.decode(errors="replace").replace("\r\n", "\n")
        return bool(piece)


def _take_terminal() -> None:
    """Make standard input the controlling terminal of this new session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def at_terminal(command: Sequence[str]) -> Iterator[Terminal]:
    """Run a program at a terminal of its own; it is killed at the end."""
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=_take_terminal,
        ) as process:
            os.close(theirs)
            try:
                yield Terminal(process, ours)
            finally:
                process.kill()
    finally:
        os.close(ours)
