"""Processes that this one starts.

There are two ways, see docs/adr/0071-two-ways-to-start-a-process.md. Neither outlives this process, however it ends:

- `spawn` runs any program under a guard (`ddm.system.guard`), which ends it and all that it started when asked, when
  the program ends, or when this process ends. `ddm.system.supervisor` starts again what ends or hangs.
- `start_tied` runs a module of ours, which has no children, in a fresh interpreter that the kernel ends with this one.

What has to outlive this process, such as the command that submits a job to a scheduler, is a `DetachedProgram`.

Where SIGTERM and Ctrl-C shall end in `finally`, and a second Ctrl-C shall change nothing:

    with stop_on_signals() as stop:
        child = spawn([...], log_path=...)
        try:
            while child.running() and not stop.wait(1.0):
                ...
        finally:
            terminate_all([child])
"""

import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddm.errors import MissingFileError, SetupError
from ddm.system.guard import PARENT_VARIABLE
from ddm.system.process_table import descendants, start_ticks
from ddm.system.signals import blocked

# Where a program works that is to find nothing of anybody's by a relative path.
NEUTRAL_FOLDER = Path("/")
_LOG_BYTES = 16 * 1024 * 1024
_POLL_S = 0.05
# For the kernel to take down what was killed, which may hold a GPU.
_KILLED_S = 10.0
_log = logging.getLogger(__name__)


class Child:
    """A program under guard.

    Attributes:
        pid: process id of the program itself.
        guard_pid: process id of its guard.
        log_path: where its output goes.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", log_path: Path, grace_s: float) -> None:
        self.log_path = log_path
        self.guard_pid = process.pid
        self._process = process
        self._grace_s = grace_s
        self.started_at = time.monotonic()
        # The guard writes the id once the program runs, and nothing where it cannot start.
        line = process.stdout.readline() if process.stdout else b""
        self.pid = int(line) if line.strip().isdigit() else process.pid

    @property
    def returncode(self) -> int | None:
        """The program's exit code, 128 + n after signal n, None while it runs."""
        return self._process.poll()

    def running(self) -> bool:
        """Whether the program, or the guard still tidying up after it, is alive."""
        if self._process.poll() is None:
            return True
        self._close()
        return False

    def request_stop(self) -> None:
        """Ask the guard to end the whole tree; returns at once."""
        if self._process.stdin and not self._process.stdin.closed:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def wait(self, timeout_s: float) -> bool:
        """Wait at most this long until the guard is gone; return whether it is."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=max(timeout_s, 0.0))
        return not self.running()

    def terminate(self) -> None:
        """End the whole tree: ask, wait as long as the guard may take, then kill by force."""
        terminate_all([self])

    def kill(self) -> None:
        """Kill the tree without asking, and wait until the kernel has taken it down."""
        tree = [self.guard_pid, *descendants(self.guard_pid)]
        # Children before parents, which could start others in their place; the guard, which comes first in the tree,
        # last.
        for pid in reversed(tree):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.guard_pid, signal.SIGKILL)
        self._process.wait()
        # Anybody who starts the program again must not meet a process of the old one that still writes.
        deadline = time.monotonic() + _KILLED_S
        while any(map(start_ticks, tree)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._close()

    def num_descendants(self) -> int | None:
        """How many living processes the program has started; None where the system does not list them."""
        return len(descendants(self.pid)) if sys.platform == "linux" else None

    def log_tail(self, max_bytes: int = 4096) -> str:
        """The end of the program's log, for messages to an operator."""
        return file_tail(self.log_path, max_bytes)

    def stop_timeout_s(self) -> float:
        """Seconds after which the guard must have ended everything."""
        # The guard waits this long for the program and again for what it left, and 2 s after SIGKILL; 2 s are to spare.
        return 2 * self._grace_s + 4.0

    def _close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                with suppress(BrokenPipeError):
                    stream.close()


def spawn(
    command: Sequence[str],
    *,
    log_path: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    grace_s: float = 3.0,
    input_bytes: bytes | None = None,
) -> Child:
    """Start a program under guard, its output appended to a log file that rotates at 16 MiB.

    Args:
        command: program and arguments; the program is a path.
        log_path: the log file.
        env: its whole environment; this process's when omitted.
        cwd: its working folder; this process's when omitted.
        grace_s: seconds between the polite signal and the next harsher one.
        input_bytes: what the program reads on its standard input, a few KiB at most; it goes through pipes only,
            never through a command line, an environment or a disk. Nothing when omitted.

    Returns:
        The running child.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    settings = json.dumps(
        {
            "log_path": str(log_path.absolute()),
            "log_bytes": _LOG_BYTES,
            "grace_s": grace_s,
            "input": input_bytes is not None,
        }
    )
    process = subprocess.Popen(
        # Isolated: neither the working folder nor PYTHONPATH of the caller can put another module in the guard's place.
        [sys.executable, "-I", "-m", "ddm.system.guard", settings, "--", *command],
        # The guard takes the end of this pipe, which the kernel closes however this process ends, for the order to
        # stop.
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=dict(env) if env is not None else None,
        cwd=cwd,
        start_new_session=True,
    )
    if input_bytes is not None and process.stdin:
        # A guard that cannot start closes its end; the child then shows as ended.
        with suppress(BrokenPipeError):
            process.stdin.write(len(input_bytes).to_bytes(4, "big") + input_bytes)
            process.stdin.flush()
    child = Child(process, log_path, grace_s)
    _log.debug("started process %d, which logs to %s", child.pid, log_path.name)
    return child


def start_tied(
    module: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
    stderr: int | None = None,
    pass_fds: Sequence[int] = (),
) -> "subprocess.Popen[bytes]":
    """Start a module of ours in a fresh interpreter that ends with this process; the module calls `end_with_parent`.

    No SIGINT or SIGTERM reaches it, however early: a Ctrl-C at the terminal is for this process, which ends it. It
    searches no folder of the caller's for modules. Call this in a thread that lives as long as the process shall:
    the kernel ends it with the thread.

    Args:
        module: its name; `python -P -m MODULE` runs it.
        arguments: of the module.
        env: its whole environment; this process's when omitted.
        cwd: its working folder; this process's when omitted.
        stdin: as for `subprocess.Popen`, and so are the others; an input that is empty when omitted.
        stdout: this process's when omitted.
        stderr: this process's when omitted.
        pass_fds: descriptors that it inherits; no others.
    """
    environment = dict(os.environ if env is None else env)
    environment[PARENT_VARIABLE] = str(os.getpid())
    process = None
    try:
        with blocked():
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                cwd=cwd,
                pass_fds=pass_fds,
            )
    except BaseException:
        # A Ctrl-C that came meanwhile is raised at the end of the block, where the caller has no process to end yet.
        if process is not None:
            process.kill()
            process.wait()
        raise
    return process


class DetachedProgram:
    """A program that outlives this process: started here, or by an earlier process and known by its id.

    Args:
        pid: its process id, which leads a session of its own.
        ticks: when it started, see `start_ticks`, so that no later process of the same id is taken for it.
        process: where it was started here.
    """

    def __init__(
        self, pid: int, ticks: int, process: "subprocess.Popen[bytes] | None" = None
    ) -> None:
        self.pid = pid
        self.ticks = ticks
        self._process = process

    @classmethod
    def start(
        cls, command: Sequence[str], *, log_path: Path, env: Mapping[str, str], cwd: Path
    ) -> "DetachedProgram":
        """Start a program without a terminal and without a descriptor of this process.

        Args:
            command: program and arguments; the program is a path.
            log_path: the file that its output is appended to.
            env: its whole environment.
            cwd: its working folder.
        """
        log_path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with os.fdopen(_open_no_link(log_path, flags), "ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
            )
        return cls(process.pid, start_ticks(process.pid), process)

    @property
    def returncode(self) -> int | None:
        """Its exit code; None while it runs, and always where an earlier process started it."""
        return None if self._process is None else self._process.poll()

    def running(self) -> bool:
        """Whether it runs on this machine."""
        if self._process is not None:
            return self._process.poll() is None
        return self.ticks > 0 and start_ticks(self.pid) == self.ticks

    def wait(self, timeout_s: float) -> bool:
        """Wait at most this long until it has ended; return whether it has."""
        deadline = time.monotonic() + timeout_s
        while self.running() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return not self.running()

    def terminate(self, timeout_s: float) -> None:
        """Send SIGTERM to it and its group, and wait this long for it to end what it started elsewhere."""
        if not self.running():
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGTERM)
        self.wait(timeout_s)


def file_tail(path: Path, max_bytes: int = 4096) -> str:
    """The end of a log; nothing where there is none."""
    with suppress(OSError), os.fdopen(_open_no_link(path, os.O_RDONLY), "rb") as stream:
        num_bytes = os.fstat(stream.fileno()).st_size
        stream.seek(max(num_bytes - max_bytes, 0))
        return stream.read(max_bytes).decode("utf-8", errors="replace")
    return ""


def _open_no_link(path: Path, flags: int) -> int:
    # Non-blocking, or a named pipe would make the open wait for ever.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def terminate_all(children: Iterable[Child]) -> None:
    """End several trees at the same time, by force where a guard does not finish in time; ended ones are fine."""
    remaining = list(children)
    for child in remaining:
        child.request_stop()
    for child in remaining:
        if not child.wait(child.stop_timeout_s()):
            child.kill()


def program(name: str) -> Path:
    """Return the path of a command-line program installed beside this interpreter, e.g. ``"flower-superlink"``.

    Raises:
        MissingFileError: it is not installed there.
    """
    path = Path(sys.executable).parent / name
    if not path.is_file():
        raise MissingFileError(
            name, expected="an installed program", remedy="Install Archipelago again (make setup)."
        )
    return path


def script_command(script: str | Path) -> list[str]:
    """Return the beginning of a command that runs a Python program and ends when its main thread ends.

    Args:
        script: its path, or the name of one that is installed beside this interpreter.
    """
    path = script if isinstance(script, Path) else program(script)
    return [sys.executable, "-P", "-m", "ddm.system.guard", "--script", str(path)]


def flower_environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's programs: no telemetry, no update check, their files in `home` alone.

    A proxy of the site is for what leaves the machine: the programs reach each other on loopback without it.
    """
    bin_folder = str(Path(sys.executable).parent)
    without_proxy = ["127.0.0.1", "localhost"]
    if configured := os.environ.get("no_proxy") or os.environ.get("NO_PROXY"):
        without_proxy.insert(0, configured)
    return {
        # A setting that somebody exported for another federation would act on this one.
        **{name: value for name, value in os.environ.items() if not name.startswith("FLWR_")},
        "PATH": os.pathsep.join([bin_folder, os.environ.get("PATH", os.defpath)]),
        "no_proxy": ",".join(without_proxy),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        "OMP_NUM_THREADS": "1",
        # Otherwise each thread of a server keeps freed memory for itself: a SuperLink then takes 900 MiB, not 660.
        "MALLOC_ARENA_MAX": "2",
        "PYTHONUNBUFFERED": "1",
    }


def port_in_use(host: str, port: int) -> bool:
    """Whether something listens on a TCP port, or the port cannot be bound.

    Raises:
        SetupError: no address of this machine.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise SetupError(
            f"host {host}",
            expected="an address, or a name that this machine can resolve",
            got="a name without an address",
            remedy="Check host in federation.toml, and that this machine finds the name, in /etc/hosts or by DNS.",
        ) from error
    return any(_is_taken(family, address, host) for family, _, _, _, address in addresses)


def _is_taken(family: int, address: Any, host: str) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        # As servers do: a port in TIME_WAIT is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            listener.bind(address)
        except OSError as error:
            # Waiting would not help here, as it may where a port is taken.
            if error.errno == errno.EADDRNOTAVAIL:
                raise SetupError(
                    f"host {host}",
                    expected="an address of this machine",
                    got="an address of another machine",
                    remedy="Set host in federation.toml to one of this machine.",
                ) from error
            if error.errno == errno.EACCES:
                raise SetupError(
                    f"port {address[1]}",
                    expected="a port that this user may listen on",
                    got="a port that the system keeps for privileged programs",
                    remedy="Set port in federation.toml to one from 1024 on.",
                ) from error
            return True
    return False


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that nothing listens on now; another process may take it before the caller does."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])
