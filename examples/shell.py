"""Runs an example's commands: each is printed as one would type it, and nothing that was started outlives it.

Scripts of the folders beside this file find it by `sys.path`.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType, TracebackType

from ddm.io.modes import keep_private, private_folder
from ddm.protocol.base import sha256_file
from ddm.system.processes import Child, free_port, spawn, terminate_all
from ddm.trust.comparison import CodeSubject, comparison_code
from silo.config import Site
from silo.plan.consent import read_waiting

BIN = Path(sys.executable).parent
_MARKER = ".archipelago-demo"


class DemoError(Exception):
    """A command of the demo failed."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Demo:
    """One run of the demo in one folder."""

    def __init__(self, out: Path) -> None:
        self.out = out.resolve()
        self.background: list[Child] = []
        self._read: dict[str, int] = {}

    def __enter__(self) -> "Demo":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if any(child.running() for child in self.background):
            print("Ending the demo's processes …", flush=True)
        terminate_all(self.background)

    def call(self, program: str | Path, *arguments: object) -> None:
        """Run a command to its end, its output as it comes."""
        command = self._command(program, arguments)
        self._show(command)
        # In a session of its own: Ctrl-C reaches the demo alone, which then ends the command.
        child = subprocess.Popen(command, env=self._environment(), start_new_session=True)
        try:
            code = child.wait()
        finally:
            child.terminate()
            child.wait()
        if code:
            raise DemoError(f"the command above ended with exit code {code}.", code)

    def ask(self, program: str, *arguments: object) -> str:
        """Run a command quietly and return what it printed."""
        completed = subprocess.run(
            self._command(program, arguments),
            env=self._environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if completed.returncode:
            raise DemoError(completed.stderr.strip(), completed.returncode)
        return completed.stdout

    @property
    def root(self) -> Path:
        """The federation's root of trust, which researchers compare by its code."""
        return self.out / "fed" / "tuf" / "metadata" / "1.root.json"

    @property
    def invitation(self) -> Path:
        """What every silo needs to join, which its operator compares by its code."""
        return self.out / "fed" / "invitation.json"

    def join(self, silo: str, data: Path, *options: object) -> None:
        """Join a silo, whose operator was told the code of the invitation."""
        code = comparison_code(sha256_file(self.invitation), CodeSubject.INVITATION)
        self.call("silo", "join", self.out / silo, "--data", data,
                  "--invitation", self.invitation, "--code", code,
                  "--new-passphrase-file", self.out / f"{silo}.pass", "--yes", *options)  # fmt: skip

    def enroll(self, silos: Sequence[str]) -> None:
        """Enroll silos, whose operators read out the codes of their cards."""
        cards = [self.out / f"{silo}.card.json" for silo in silos]
        options = []
        for silo in silos:
            code = comparison_code(Site(self.out / silo).card().digest, CodeSubject.CARD)
            options += ["--code", f"{silo}={code}"]
        self.call("aggregator", "enroll", self.out / "fed", *cards, *options)

    def accept(self, silos: Sequence[str]) -> None:
        """Accept the plan of each silo, which waits for a person because it contains a network."""
        for silo in silos:
            site = self.out / silo
            waiting = read_waiting(Site(site))
            while waiting is None:
                self.watch(1.0)
                waiting = read_waiting(Site(site))
            self.call("silo", "accept", site, "--digest", waiting.plan_digest)

    def waive(self, silos: Sequence[str], reason: str) -> None:
        """Sign a waiver for the current plan of each silo, since the audit of so few images is inconclusive."""
        for silo in silos:
            while self.status(silo)["state"] == "waiting":
                self.watch(1.0)
        until = (datetime.now(UTC) + timedelta(days=30)).date()
        sites = [self.out / silo for silo in silos]
        self.call(
            "silo", "waive", *sites, "--role", "demo operator", "--reason", reason, "--until", until
        )

    def status(self, silo: str) -> dict[str, object]:
        """Return what `silo status` says of a silo."""
        status: dict[str, object] = json.loads(
            self.ask("silo", "status", self.out / silo, "--json")
        )
        return status

    def start(self, program: str, *arguments: object) -> None:
        """Start a command beside this one; its output is shown by `watch` and `wait`."""
        command = self._command(program, arguments)
        self._show([*command, "&"])
        name = f"{program}-{Path(str(arguments[-1])).name}"
        log = self.out / "logs" / f"{name}.log"
        self.background.append(spawn(command, log_path=log, env=self._environment(), grace_s=15.0))

    @contextmanager
    def serve(self, program: str, *arguments: object) -> Iterator[str]:
        """Start a command that serves a page, and yield the page's address; the command ends with the block."""
        command = self._command(program, arguments)
        self._show([*command, "&"])
        with subprocess.Popen(
            command,
            env=self._environment(),
            stdout=subprocess.PIPE,
            # Read as well, so that the reason of a failure is shown, and nothing about the end of the command.
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                line = process.stdout.readline() if process.stdout else ""
                address = re.search(r"http://127\.0\.0\.1:\d+/\S*", line)
                if address is None:
                    raise DemoError(f"the command above printed no address, but: {line.strip()}")
                yield address[0]
            finally:
                process.terminate()

    def watch(self, seconds: float) -> None:
        """Show what the background commands print, for a while; fail when one of them has failed."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._check()
            time.sleep(0.2)

    def wait(self, *children: Child) -> None:
        """Wait until these commands have ended well."""
        while any(child.running() for child in children):
            self.watch(0.5)
        self._check()

    def flower_processes(self, silos: Sequence[str]) -> dict[str, object]:
        """The process ids and run id that the commands left in their folders."""
        processes: dict[str, object] = {
            "aggregator": json.loads((self.out / "fed" / "flower" / "info.json").read_text())
        }
        for silo in silos:
            processes[silo] = json.loads(
                (self.out / silo / "private" / "processes.json").read_text()
            )
        return processes

    @staticmethod
    def free_port() -> int:
        """A loopback port that nothing listens on."""
        return free_port()

    def _check(self) -> None:
        for child in self.background:
            self._echo(child)
        for child in self.background:
            if not child.running() and child.returncode:
                self._echo(child)
                log = child.log_path
                raise DemoError(f"{log.stem} ended with exit code {child.returncode}; see {log}", 1)

    def _echo(self, child: Child) -> None:
        if not child.log_path.exists():
            return
        with child.log_path.open("rb") as log:
            log.seek(self._read.get(child.log_path.stem, 0))
            whole = log.read().rpartition(b"\n")
        self._read[child.log_path.stem] = (
            self._read.get(child.log_path.stem, 0) + len(whole[0]) + len(whole[1])
        )
        for line in whole[0].decode(errors="replace").splitlines():
            print(f"  {child.log_path.stem:>16} | {line}", flush=True)

    def _command(self, program: str | Path, arguments: Sequence[object]) -> list[str]:
        path = program if isinstance(program, Path) or "/" in program else BIN / program
        return [str(path), *(str(argument) for argument in arguments)]

    def _show(self, command: Sequence[str]) -> None:
        words = [Path(command[0]).name, *(_short(word) for word in command[1:])]
        print(
            "$ " + " ".join(word if word == "&" else shlex.quote(word) for word in words),
            flush=True,
        )

    def _environment(self) -> dict[str, str]:
        """One thread a process: several trainings share this machine's cores."""
        return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _short(word: str) -> str:
    here = str(Path.cwd())
    return word.removeprefix(here + "/") if word.startswith(here + "/") else word


def run_demo(out: Path, act: Callable[[Demo], None], again: str) -> int:
    """Run a demo in a folder of its own; return the exit code.

    Args:
        out: the folder; only one that an earlier demo made is replaced.
        act: the demo.
        again: the command that starts it again, shown after an interruption.
    """
    keep_private()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminate)
    try:
        _prepare(out)
        with Demo(out) as demo:
            act(demo)
    except DemoError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return int(error.code)
    except KeyboardInterrupt as interruption:
        print(
            f"\nInterrupted; every process of the demo has ended. Start again with: {again}",
            file=sys.stderr,
        )
        return 128 + int(interruption.args[0] if interruption.args else signal.SIGINT)
    return 0


@contextmanager
def timed(stages: dict[str, float], name: str) -> Iterator[None]:
    """Measure one stage and say where we are."""
    print(f"\n== {name}", flush=True)
    started = time.monotonic()
    yield
    stages[name] = time.monotonic() - started


def _prepare(out: Path) -> None:
    if out.exists() and any(out.iterdir()):
        if not (out / _MARKER).exists():
            raise DemoError(
                f"{out} is not empty, and no earlier demo made it; name another folder with --out."
            )
        shutil.rmtree(out)
    private_folder(out)  # passphrases, keys and images lie in it
    (out / _MARKER).touch()


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signum)
