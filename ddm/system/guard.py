"""The guard process, which ends a program and everything it started when the process that asked for it ends.

`python -m ddm.system.guard SETTINGS -- COMMAND...` runs one command. The guard leads its own session, so a Ctrl-C
typed at the terminal reaches the process that started it only, and it ends the whole tree of its program when

- its standard input closes, because that process closed it or was killed,
- the program ends by itself (what it left behind is ended), or
- the guard receives SIGTERM.

Should the guard itself be killed, the kernel kills the program (Linux). The guard is single-threaded, which is what
makes code between fork and exec safe. Where there is no `/proc`, it knows about its program alone.

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
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ddm.system.process_table import descendants

# Set for a process that ends with its parent, see `end_with_parent`: the parent's process id.
PARENT_VARIABLE = "ARCHIPELAGO_PARENT_PID"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_IS_LINUX = sys.platform == "linux"
_KILL_TIMEOUT_S = 2.0
_PARENT_POLL_S = 1.0
# Grandchildren are adopted, so their end may come without a SIGCHLD to the guard.
_GRANDCHILD_POLL_S = 0.05
_READ_BYTES = 65536
# Reads at one time, so that a program that never stops writing cannot keep the guard from ending it.
_MAX_READS = 64


class RotatingLog:
    """A log file that never grows beyond twice its limit.

    Args:
        path: the file; when full it moves to the same name with `.1` appended.
        max_bytes: size at which it moves.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._open()

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self._path, flags, 0o600)
        self._num_bytes = os.fstat(self._fd).st_size

    def _rotate(self) -> None:
        """Begin a new file; where that is refused, the old one continues."""
        old_fd = self._fd
        with contextlib.suppress(OSError):
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._open()
            os.close(old_fd)

    def write(self, data: bytes) -> None:
        """Append; a full disk must not end the program, so errors are ignored."""
        with contextlib.suppress(OSError):
            if self._num_bytes + len(data) > self._max_bytes:
                self._rotate()
            os.write(self._fd, data)
            self._num_bytes += len(data)


def _input_pipe() -> int:
    """Read a length in 4 bytes and then as many bytes; return a pipe that holds them and ends."""
    data = _read_exactly(int.from_bytes(_read_exactly(4), "big"))
    read_fd, write_fd = os.pipe()
    # Nobody reads yet, so that this would wait for ever beyond the 64 KiB which a pipe of Linux holds.
    os.write(write_fd, data)
    os.close(write_fd)
    return read_fd


def _read_exactly(num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        piece = os.read(sys.stdin.fileno(), num_bytes - len(data))
        if not piece:
            break
        data += piece
    return data


class _Guard:
    """One program, its output pipe, and the standard input that ties it to the process that asked for it."""

    def __init__(self, command: list[str], log: RotatingLog, grace_s: float, input_fd: int) -> None:
        self._log = log
        self._grace_s = grace_s
        self._is_stopping = False
        self._returncode: int | None = None
        # `select` wakes up at a signal because the signal's number is written into this pipe.
        self._wake_fd, wake_write_fd = os.pipe()
        os.set_blocking(wake_write_fd, False)
        signal.set_wakeup_fd(wake_write_fd)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        self._output_fd, write_fd = os.pipe()
        os.set_blocking(self._output_fd, False)
        guard_pid = os.getpid()
        self._program = subprocess.Popen(
            command,
            stdin=input_fd,
            stdout=write_fd,
            stderr=write_fd,
            preexec_fn=lambda: _let_kernel_end_with(guard_pid),
        )
        if input_fd >= 0:
            os.close(input_fd)
        os.close(write_fd)

    def _on_signal(self, *_: object) -> None:
        self._is_stopping = True

    def run(self) -> int:
        """Wait for the program or the order to stop, end the whole tree, return the exit code."""
        # `Child` waits for this line. Nothing else may be written to standard output, which nobody reads afterwards.
        os.write(sys.stdout.fileno(), f"{self._program.pid}\n".encode())
        self._pump_until(
            lambda: self._is_stopping or self._returncode is not None, watch_input=True
        )
        if self._returncode is None:
            self._signal([self._program.pid], signal.SIGTERM)
            self._pump_until(lambda: self._returncode is not None, timeout_s=self._grace_s)
        # What the program left behind gets a polite signal first, then one that cannot be ignored.
        for number, timeout_s in (
            (signal.SIGTERM, self._grace_s),
            (signal.SIGKILL, _KILL_TIMEOUT_S),
        ):
            if self._remaining_pids():
                self._signal(self._remaining_pids(), number)
                self._pump_until(lambda: not self._remaining_pids(), timeout_s=timeout_s)
        self._drain()
        if self._returncode is None:
            return 128 + signal.SIGKILL
        # As a shell states an end by a signal.
        if self._returncode < 0:
            return 128 - self._returncode
        return self._returncode

    def _remaining_pids(self) -> list[int]:
        """The processes that are left of the program's tree."""
        if _IS_LINUX:
            return descendants(os.getpid())
        if self._returncode is not None:
            return []
        return [self._program.pid]

    def _signal(self, pids: list[int], number: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def _pump_until(
        self,
        condition: Callable[[], bool],
        *,
        timeout_s: float | None = None,
        watch_input: bool = False,
    ) -> None:
        """Copy output into the log until a condition holds, or for this long."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        input_fd = sys.stdin.fileno()
        watched = [self._wake_fd]
        poll_s: float | None = _GRANDCHILD_POLL_S
        if watch_input:
            watched.append(input_fd)
            poll_s = None
        while True:
            self._reap()
            if condition() or (deadline is not None and time.monotonic() > deadline):
                return
            ready, _, _ = select.select([*watched, self._output_fd], [], [], poll_s)
            if self._output_fd in ready:
                self._drain()
            if self._wake_fd in ready:
                os.read(self._wake_fd, 4096)
            if input_fd in ready and not os.read(input_fd, 4096):
                self._is_stopping = True

    def _drain(self) -> None:
        for _ in range(_MAX_READS):
            try:
                data = os.read(self._output_fd, _READ_BYTES)
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
                # Any child: adopted grandchildren that nobody collects would stay in the table of processes.
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._program.pid:
                    self._returncode = self._program.returncode = os.waitstatus_to_exitcode(status)


def end_with_parent() -> None:
    """End this process when its parent ends, however that ends; nothing where the parent did not ask for it.

    The parent asks by `PARENT_VARIABLE` in the environment, as `ddm.system.processes.start_tied` does.

    On Linux the kernel kills it, even while it hangs in a library; elsewhere a thread looks every second.
    """
    # Removed, so that processes that this one starts are not taken for children of its parent.
    text = os.environ.pop(PARENT_VARIABLE, None)
    if text is None:
        return
    parent_pid = int(text)
    if _IS_LINUX:
        _let_kernel_end_with(parent_pid)
    else:
        threading.Thread(target=_watch_parent, args=(parent_pid,), daemon=True).start()


def _let_kernel_end_with(parent_pid: int) -> None:
    if not _IS_LINUX:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the kernel was told.
    if os.getppid() != parent_pid:
        os._exit(1)


def _watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_PARENT_POLL_S)
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
    # arguments[1] is `--`.
    command = arguments[2:]
    if _IS_LINUX:
        # Grandchildren whose parent has ended become children of the guard, which can then end them.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    log = RotatingLog(Path(settings["log_path"]), int(settings["log_bytes"]))
    try:
        input_fd = subprocess.DEVNULL
        if settings["input"]:
            input_fd = _input_pipe()
        guard = _Guard(command, log, float(settings["grace_s"]), input_fd)
    except OSError as error:
        log.write(f"cannot start {command[0]}: {error.strerror}\n".encode())
        return 127
    return guard.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
