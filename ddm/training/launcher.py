"""Starts the processes of a job: on this machine under guard, or by the operator's command, which outlives us.

What this machine starts itself never outlives this process: `ddm.system.processes` sees to that. A command, `srun` for
one, leads a session of its own, so neither Ctrl-C nor the end of this process reaches it, and whoever comes next finds
it by what `launch.json` says. Neither inherits a descriptor of this process's, and no shell reads a word.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol

from ddm.errors import SetupError
from ddm.system.processes import Child, spawn
from ddm.system.signals import blocked
from ddm.training.config import TrainingSettings, filled
from ddm.training.group import process_name
from ddm.training.job import JobFolder, Launch, RunFolder
from ddm.training.process import EXIT_STOPPED, LAUNCH_VARIABLE

_GUARD_S = 0.5  # signals do not reach the processes, so guards need not wait for long
_DYING_S = 10.0  # for the kernel to take down what was killed
_COMMAND_S = 30.0  # for a command to end what it started
Condition = Literal["running", "well", "badly", "unknown"]


class Started(Protocol):
    """The processes of one start, or the command that started them, as far as this machine sees them."""

    def condition(self) -> Condition:
        """Whether it runs, or how it ended."""
        ...

    def deaths(self) -> list[str]:
        """How processes ended that could not say why."""
        ...

    def end(self) -> None:
        """End what is left."""
        ...


class Processes:
    """The processes that this machine runs itself, each under a guard."""

    def __init__(self, folder: JobFolder, launch_id: str, num: int, threads: int) -> None:
        run, self._children = folder.run(launch_id), list[Child]()
        # They may be killed at their end, and clear nothing away by themselves.
        self._scratch = tempfile.TemporaryDirectory(
            prefix="archipelago-", ignore_cleanup_errors=True
        )
        words = [
            sys.executable,
            "-P",
            "-m",
            "ddm.training",
            str(folder.path),
            "--launch",
            launch_id,
        ]
        try:
            for rank in range(num):
                environment = (
                    _inherited() | _environment(rank, num, threads) | {"TMPDIR": self._scratch.name}
                )
                # this process alone hears signals, and tells the others by the folder
                with blocked():
                    child = spawn(words, log_path=run.log(rank), env=environment, grace_s=_GUARD_S)
                    self._children.append(child)
        except BaseException:
            self.end()
            raise

    @property
    def pids(self) -> list[int]:
        """Of the processes, in the order of their ranks."""
        return [child.pid for child in self._children]

    def condition(self) -> Condition:
        """See `Started`; one that ended badly speaks for all."""
        running = [child.running() for child in self._children]
        codes = [child.returncode for child in self._children]
        if any(code not in (None, 0, EXIT_STOPPED) for code in codes):
            return "badly"
        return "running" if any(running) else "well"

    def deaths(self) -> list[str]:
        """See `Started`."""
        num, found = len(self._children), list[str]()
        for rank, child in enumerate(self._children):
            code = child.returncode
            if code is not None and code > 128 and code != EXIT_STOPPED:
                name = (
                    signal.Signals(code - 128).name
                    if code - 128 in set(signal.Signals)
                    else f"exit code {code}"
                )
                found.append(f"{process_name(rank, num)}: {name}")
        return found

    def end(self) -> None:
        """See `Started`: at once."""
        for child in self._children:
            child.kill()
        # whoever comes next must not meet one that still writes
        deadline = time.monotonic() + _DYING_S
        while any(map(started_at, self.pids)) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._scratch.cleanup()


class Command:
    """A launcher's command, started here or found again by its process id."""

    def __init__(self, launch: Launch, process: "subprocess.Popen[bytes] | None" = None) -> None:
        self._launch, self._process = launch, process

    @property
    def returncode(self) -> int | None:
        """Its exit code, once it is known."""
        return self._launch.returned if self._process is None else self._process.poll()

    def condition(self) -> Condition:
        """See `Started`."""
        if (code := self.returncode) is not None:
            return "badly" if code else "well"
        if self._process is not None or self._lives():
            return "running"
        return "unknown"

    def deaths(self) -> list[str]:
        """See `Started`."""
        return []

    def end(self) -> None:
        """See `Started`; srun ends its job when it is told so."""
        if self.condition() != "running":
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._launch.pid, signal.SIGTERM)
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_COMMAND_S)

    def _lives(self) -> bool:
        here = self._launch.host == socket.gethostname()
        return (
            here
            and self._launch.started > 0
            and started_at(self._launch.pid) == self._launch.started
        )


def start_command(
    settings: TrainingSettings, folder: JobFolder, launch: Launch
) -> tuple[Launch, Command]:
    """Start the operator's command, and return the start with the command's process.

    Raises:
        SetupError: there is no such program.
    """
    num = "auto" if settings.processes == "auto" else str(settings.processes)
    values = {
        "folder": str(folder.path),
        "launch": launch.launch_id,
        "processes": num,
        "python": sys.executable,
    }
    words = filled(tuple(settings.launcher), values)
    found, run = shutil.which(words[0]), folder.run(launch.launch_id)
    if found is None:
        raise SetupError(
            "training.launcher",
            expected="a program on this machine",
            got=f"{words[0]}, which is not found",
            remedy="Install it, or give its whole path in silo.toml; the worker's service has a PATH of its own.",
        )
    run.path.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {LAUNCH_VARIABLE: launch.launch_id}
    with run.command_log.open("ab") as log:
        process = subprocess.Popen(
            [found, *words[1:]],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            cwd=folder.path,
            start_new_session=True,
        )
    known = launch.model_copy(update={"pid": process.pid, "started": started_at(process.pid)})
    return known, Command(known, process)


def started_at(pid: int) -> int:
    """Return when a process started, as Linux counts it, so that no later one is taken for it; 0 where nobody says."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        if fields[0] not in ("Z", "X"):
            return int(fields[19])
    return 0


def wait_for_exit(started: Started, seconds: float) -> None:
    """Wait at most so long for everything that runs."""
    deadline = time.monotonic() + seconds
    while started.condition() == "running" and time.monotonic() < deadline:
        time.sleep(0.05)


def _inherited() -> dict[str, str]:
    """This process's environment, without the meeting point of another training."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("MASTER_ADDR", "MASTER_PORT")
    }


def _environment(rank: int, num: int, threads: int) -> dict[str, str]:
    """What torchrun would tell, and that nothing leaves this machine."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num),
        "LOCAL_WORLD_SIZE": str(num),
        "OMP_NUM_THREADS": str(threads),  # else accelerate chooses one
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
    }


def last_line(run: RunFolder) -> str:
    """Return the end of what a command printed, for whoever has to mend it; it stays on this site."""
    with suppress(OSError):
        lines = run.command_log.read_bytes()[-4096:].decode("utf-8", "replace").strip().splitlines()
        return lines[-1][-200:] if lines else ""
    return ""
