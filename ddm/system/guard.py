"""The guard process, which ends a program and everything it started when its supervisor ends.

`python -m ddm.system.guard SETTINGS -- COMMAND...` runs one command. The guard leads its own session, so a Ctrl-C
typed at the terminal reaches the supervisor only, and it ends the whole tree of its program when

- the supervisor closes the pipe on its standard input, on purpose or because it was killed,
- the program ends by itself (what it left behind is ended), or
- the guard receives SIGTERM.

Should the guard itself be killed, the kernel kills the program (Linux). The guard is single-threaded, which is what
makes code between fork and exec safe. On systems without Linux's `/proc` it falls back to the process group.

`python -m ddm.system.guard --script PATH ARGS...` runs a Python script and ends the process when the script's main
thread ends, also if it left threads behind that would keep a useless process alive.
"""

import contextlib
import ctypes
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_NUM_THREADS = 17  # among the fields of /proc/PID/stat after the name
_IS_LINUX = sys.platform == "linux"
_KILL_TIMEOUT_S = 2.0


def descendants(pid: int) -> list[int]:
    """List every living process below one process, read from `/proc`.

    Args:
        pid: the process at the top; it is not in the list.

    Returns:
        Process ids, parents before children; empty where there is no `/proc`.
    """
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name in parentheses may hold spaces and parentheses; the fields after the last one are state, ppid.
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
            # A process whose main thread has ended shows as a zombie while its other threads go on.
            if fields[0] not in ("Z", "X") or int(fields[_NUM_THREADS]) > 1:
                children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found[1:]


class RotatingLog:
    """A log file that never grows beyond twice its limit.

    Args:
        path: the file; when full it moves to the same name with `.1` appended.
        max_bytes: size at which it moves.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._open()

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._num_bytes = os.fstat(self._fd).st_size

    def _rotate(self) -> None:
        """Begin a new file; where that is refused, the old one goes on."""
        old = self._fd
        with contextlib.suppress(OSError):
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._open()
            os.close(old)

    def write(self, data: bytes) -> None:
        """Append; a full disk must not end the program, so errors are swallowed."""
        with contextlib.suppress(OSError):
            if self._num_bytes + len(data) > self._max_bytes:
                self._rotate()
            os.write(self._fd, data)
            self._num_bytes += len(data)


def _input_pipe() -> int:
    """Read a length in 4 bytes, then so many bytes, from the supervisor; return a pipe that holds them and ends."""
    data = _read_exactly(int.from_bytes(_read_exactly(4), "big"))
    read_fd, write_fd = os.pipe()
    os.write(write_fd, data)
    os.close(write_fd)
    return read_fd


def _read_exactly(num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes and (piece := os.read(0, num_bytes - len(data))):
        data += piece
    return data


class _Guard:
    """One program, its output pipe and the pipe that ties it to the supervisor."""

    def __init__(self, command: list[str], log: RotatingLog, grace_s: float, input_fd: int) -> None:
        self._log, self._grace_s = log, grace_s
        self._stopping = False
        self._wake_fd, wake_write_fd = os.pipe()
        os.set_blocking(wake_write_fd, False)
        signal.set_wakeup_fd(wake_write_fd)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        self._output_fd, write_fd = os.pipe()
        os.set_blocking(self._output_fd, False)
        self._program = subprocess.Popen(
            command,
            stdin=input_fd,
            stdout=write_fd,
            stderr=write_fd,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )
        if input_fd >= 0:
            os.close(input_fd)
        os.close(write_fd)
        self._returncode: int | None = None

    def _on_signal(self, *_: object) -> None:
        self._stopping = True

    def run(self) -> int:
        """Wait for the program or the order to stop, end the whole tree, return the exit code."""
        os.write(1, f"{self._program.pid}\n".encode())
        self._pump_until(
            lambda: self._stopping or self._returncode is not None, watch_supervisor=True
        )
        if self._returncode is None:
            self._signal([self._program.pid], signal.SIGTERM)
            self._pump_until(lambda: self._returncode is not None, timeout_s=self._grace_s)
        for number, timeout_s in (
            (signal.SIGTERM, self._grace_s),
            (signal.SIGKILL, _KILL_TIMEOUT_S),
        ):
            if self._rest():
                self._signal(self._rest(), number)
                self._pump_until(lambda: not self._rest(), timeout_s=timeout_s)
        self._drain()
        code = self._returncode if self._returncode is not None else -signal.SIGKILL
        return code if code >= 0 else 128 - code

    def _rest(self) -> list[int]:
        if _IS_LINUX:
            return descendants(os.getpid())
        return [] if self._returncode is not None else [self._program.pid]

    def _signal(self, pids: list[int], number: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def _pump_until(
        self,
        condition: Callable[[], bool],
        *,
        timeout_s: float | None = None,
        watch_supervisor: bool = False,
    ) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        # Waiting for grandchildren needs a poll: they are adopted, so their end may come without a SIGCHLD here.
        tick_s = None if watch_supervisor else 0.05
        while True:
            self._reap()
            if condition() or (deadline is not None and time.monotonic() > deadline):
                return
            watched = [self._wake_fd, self._output_fd, *([0] if watch_supervisor else [])]
            ready, _, _ = select.select(watched, [], [], tick_s)
            if self._output_fd in ready:
                self._drain()
            if self._wake_fd in ready:
                os.read(self._wake_fd, 4096)
            if 0 in ready and not os.read(0, 4096):
                self._stopping = True

    def _drain(self) -> None:
        # Bounded, so that a program that never stops writing cannot keep the guard from ending it.
        for _ in range(64):
            try:
                data = os.read(self._output_fd, 65536)
            except BlockingIOError:
                return
            if not data:
                # Every writer is gone: an empty pipe would otherwise count as readable for ever.
                self._output_fd, write_fd = os.pipe()
                os.set_blocking(self._output_fd, False)
                self._spare_fd = write_fd
                return
            self._log.write(data)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._program.pid:
                    self._returncode = self._program.returncode = os.waitstatus_to_exitcode(status)


def end_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent dies, and end it where that has happened; Linux only."""
    if _IS_LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:
            os._exit(1)


def _run_script(arguments: list[str]) -> NoReturn:
    sys.argv = arguments
    code: object = 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as exit_request:
        code = exit_request.code
    if isinstance(code, str):
        sys.stderr.write(code + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def main(arguments: list[str]) -> int:
    """Run one command under guard, or one script that may leave threads behind."""
    if arguments[0] == "--script":
        _run_script(arguments[1:])
    settings = json.loads(arguments[0])
    if _IS_LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    log = RotatingLog(Path(settings["log_path"]), int(settings["log_bytes"]))
    try:
        input_fd = _input_pipe() if settings["input"] else subprocess.DEVNULL
        guard = _Guard(arguments[2:], log, float(settings["grace_s"]), input_fd)
    except OSError as error:
        log.write(f"cannot start {arguments[2]}: {error.strerror}\n".encode())
        return 127
    return guard.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
