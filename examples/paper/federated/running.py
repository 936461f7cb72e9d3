"""Runs a SuperLink, a SuperNode and a trainer for every silo and the app, and counts the bytes between them."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from ddm.errors import NumericalError, TransportError
from ddm.io.files import write_atomic
from ddm.protocol.base import Model
from ddm.system.processes import Child, flower_environment, free_port, program, spawn, terminate_all
from examples.paper.federated.counting import Relay
from examples.paper.federated.handing import trainer_folder
from examples.paper.federated.terms import DIVERGED, DONE, FAILED, LOSE, LOST, TERMS, FederatedTerms

ROOT = Path(__file__).parents[3]
_APP = Path(__file__).parent / "app"
_TRAINER = "examples.paper.federated.trainer"
_HOST = "127.0.0.1"
_CONNECTION = "paper"
COUNTED = "counted.json"
_START_S = 120.0
_POLL_S = 0.1
Check = Callable[[], object]


class TransferCounts(Model):
    """What a run took so far; over all its parts where it was stopped in between.

    Attributes:
        up: bytes from the silos to the server, as TCP carries them.
        down: the other way.
        seconds: from the first message on.
    """

    up: int = 0
    down: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class _Flower:
    """What runs, and where it logs; each silo's SuperNode and trainer."""

    folder: Path
    environment: dict[str, str]
    relay: Relay
    silos: list[list[Child]]
    servers: list[Child]
    port: int


def run(folder: Path, terms: FederatedTerms, check: Check) -> TransferCounts:
    """Run to the end, from the last round that is kept; return what it took.

    Args:
        folder: holds the silos' images or files; rounds are kept here.
        terms: of the run.
        check: called now and then; what it raises ends all processes, and another call goes on.

    Raises:
        TransportError: Flower does not start, or ends early; or a silo did not answer.
        NumericalError: training diverged.
    """
    write_atomic(folder / TERMS, terms.model_dump_json().encode())
    kept = (
        TransferCounts.model_validate_json((folder / COUNTED).read_bytes())
        if (folder / COUNTED).exists()
        else TransferCounts()
    )
    if (folder / DONE).exists():
        return kept
    for former in (LOSE, FAILED):
        (folder / former).unlink(missing_ok=True)
    with _running(folder, terms) as flower:
        before = (flower.relay.up, flower.relay.down)
        started = time.monotonic()
        rounds = terms.done(folder)
        _submit(flower)
        while True:
            over = (folder / DONE).exists()
            if over or terms.done(folder) > rounds:
                rounds = terms.done(folder)
                up = flower.relay.up - before[0]
                down = flower.relay.down - before[1]
                counted = TransferCounts(
                    up=kept.up + up, down=kept.down + down, seconds=kept.seconds + _since(started)
                )
                write_atomic(folder / COUNTED, counted.model_dump_json().encode())
            if over:
                return counted
            if (folder / LOSE).exists() and not (folder / LOST).exists():
                for child in flower.silos.pop():
                    child.kill()
                (folder / LOST).touch()
            _refuse_failure(folder)
            _alive(flower)
            check()
            time.sleep(_POLL_S)


def _refuse_failure(folder: Path) -> None:
    if (folder / FAILED).exists():
        fault = (folder / FAILED).read_text()
        if fault == DIVERGED:
            raise NumericalError(
                "federated averaging",
                expected="finite weights",
                got="a silo whose training diverged",
            )
        remedy = f"Read the logs in {folder / 'flower'}; the same command goes on."
        raise TransportError(
            "federated averaging", expected="an answer of every silo", got=fault, remedy=remedy
        )


def _since(started: float) -> float:
    return time.monotonic() - started


@contextmanager
def _running(folder: Path, terms: FederatedTerms) -> Iterator[_Flower]:
    """Run Flower without TLS on loopback, each silo's SuperNode through the relay that counts, and the trainers."""
    home = folder / "flower"
    home.mkdir(exist_ok=True)
    environment = flower_environment(home) | {
        "PYTHONPATH": str(ROOT),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1",
    }
    port = free_port()  # all of the SuperLink's interfaces
    with ExitStack() as stack:
        children: list[Child] = []
        stack.callback(lambda: terminate_all(children))

        def start(name: str, command: Sequence[str]) -> Child:
            children.append(
                spawn(command, log_path=home / f"{name}.log", env=environment, cwd=home)
            )
            return children[-1]

        def flower(name: str) -> list[str]:
            return [str(program(f"flower-{name}")), "--insecure"]

        words = [f"--port={port}", "--disable-runtime-dependency-installation"]
        server = start("superlink", [*flower("superlink"), *words])
        relay = stack.enter_context(Relay(port))
        silos = []
        for silo in range(terms.num_silos - (folder / LOST).exists()):
            words = [f"--superlink={_HOST}:{relay.port}", f"--port={free_port()}"]
            words.append(f'--node-config=silo={silo} folder="{folder.absolute()}"')
            silos.append([start(f"supernode-{silo}", [*flower("supernode"), *words])])
            if terms.method != "collect":
                own = trainer_folder(folder, silo)
                shutil.rmtree(own, ignore_errors=True)  # what an earlier run asked
                own.mkdir()
                trainer = [sys.executable, "-m", _TRAINER, str(folder.absolute()), str(silo)]
                silos[-1].append(start(f"trainer-{silo}", trainer))
        yield _Flower(folder, environment, relay, silos, [server], port)


def _submit(flower: _Flower) -> None:
    """Submit the app, as soon as the SuperLink answers."""
    home = flower.folder / "flower"
    connection = {"address": f"{_HOST}:{flower.port}", "insecure": True}
    write_atomic(
        home / "config.toml",
        tomli_w.dumps({"superlink": {"default": _CONNECTION, _CONNECTION: connection}}).encode(),
    )
    settings = f'folder="{flower.folder.absolute()}"'
    command = [
        str(program("flwr")),
        "run",
        str(_APP),
        _CONNECTION,
        "--run-config",
        settings,
        "--format",
        "json",
    ]
    started = time.monotonic()
    while True:
        try:
            answer = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                env=flower.environment,
                cwd=home,
                timeout=_START_S,
            )
        except subprocess.TimeoutExpired:
            said = ""
        else:
            said = answer.stdout + answer.stderr
            if answer.returncode == 0 and '"success": true' in answer.stdout:
                return
        _alive(flower)
        if _since(started) > _START_S:
            got = " ".join(said.split())[-300:] or "no answer"
            raise TransportError(
                "flwr run",
                expected="a run that starts",
                got=got,
                remedy=f"Read the logs in {home}.",
            )


def _alive(flower: _Flower) -> None:
    for child in [*flower.servers, *(child for silo in flower.silos for child in silo)]:
        if not child.running():
            remedy = f"Read {child.log_path}; the same command goes on."
            got = f"one that ended: {' '.join(child.log_tail(300).split())}"
            raise TransportError(
                child.log_path.stem, expected="a program that runs", got=got, remedy=remedy
            )
