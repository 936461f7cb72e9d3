"""Flower's own command, run to register nodes, to submit a run, and to ask how it stands.

The command is a program that may hang, crash or write without end, like any other: its time and its output are bounded,
and whatever it does becomes an answer or an error of ours.
"""

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import tomli_w

from ddm.errors import TransportError
from ddm.io.files import write_atomic
from ddm.system.processes import program

_TIMEOUT_S = 60.0
_MAX_OUTPUT_BYTES = 1 << 20
# Each takes a second of processor time and 100 MiB; there may be hundreds of silos.
_AT_ONCE = 4
_CONNECTION = "archipelago"
_REGISTERED = "registered.json"
_APP = Path(__file__).parent / "flower_app"


class FlowerCommands:
    """The `flwr` command, pointed at one SuperLink.

    Args:
        flower: the federation's folder for Flower; FLWR_HOME is `home` in it.
        environment: of the commands.
        address: the SuperLink's, host:port.
        ca_path: the authority that signed its certificate.
    """

    def __init__(
        self, flower: Path, environment: Mapping[str, str], *, address: str, ca_path: Path
    ) -> None:
        self._flower, self._environment = flower, dict(environment)
        connection = {"address": address, "root-certificates": str(ca_path)}
        config = {"superlink": {"default": _CONNECTION, _CONNECTION: connection}}
        for folder in ("home", "keys"):
            (flower / folder).mkdir(parents=True, exist_ok=True)
        write_atomic(flower / "home" / "config.toml", tomli_w.dumps(config).encode())

    def register(self, nodes: Mapping[str, str]) -> None:
        """Tell the SuperLink every node key it does not know; a list beside its database saves the question.

        Args:
            nodes: silo id to OpenSSH public key.

        Raises:
            TransportError: the SuperLink does not take one.
        """
        known_path = self._flower / _REGISTERED
        known: set[str] = set()
        if (self._flower / "superlink.db").exists() and known_path.exists():
            with suppress(ValueError, TypeError):
                known = set(json.loads(known_path.read_text()))
        new = iter({silo_id: key for silo_id, key in nodes.items() if key not in known})
        while some := list(islice(new, _AT_ONCE)):
            paths = [self._flower / "keys" / f"{silo_id}.pub" for silo_id in some]
            for path, silo_id in zip(paths, some, strict=True):
                path.write_text(nodes[silo_id] + "\n")
            outputs = self._ask(
                [("supernode", "register", str(path), _CONNECTION) for path in paths]
            )
            for silo_id, output in zip(some, outputs, strict=True):
                if not _parse(output).get("success") and "already" not in output:
                    raise self._failure(f"registering silo {silo_id}", "a registered node", output)
                known.add(nodes[silo_id])
            write_atomic(known_path, json.dumps(sorted(known)).encode())

    def forget(self) -> None:
        """Forget which nodes the SuperLink knows: its database is new."""
        (self._flower / _REGISTERED).unlink(missing_ok=True)

    def submit(self, plan_id: str) -> str:
        """Submit the run that carries a plan; return its id.

        Raises:
            TransportError: the SuperLink does not take it.
        """
        settings = ("--run-config", f'plan-id="{plan_id}"')
        (output,) = self._ask([("run", str(_APP), _CONNECTION, *settings)])
        run_id = _parse(output).get("run-id")
        if not run_id:
            raise self._failure("submitting the run", "a run id", output)
        return str(run_id)

    def run_status(self, run_id: str) -> str:
        """Ask how a run stands, in Flower's words; what the command said when that is no answer."""
        try:
            (output,) = self._ask([("list", _CONNECTION, "--run-id", run_id)])
        except TransportError as error:
            return str(error)
        runs = _parse(output).get("runs")
        found = runs[0] if isinstance(runs, list) and runs else None
        return str(found.get("status", "")) if isinstance(found, dict) else output.strip()

    def _ask(self, commands: Sequence[Sequence[str]]) -> list[str]:
        """Run short commands at the same time; whatever happens, nothing that they started stays.

        Raises:
            TransportError: one does not start, does not end in time, or writes too much.
        """
        started: list[subprocess.Popen[bytes]] = []
        deadline = time.monotonic() + _TIMEOUT_S
        try:
            for arguments in commands:
                started.append(self._start(*arguments))
            return [self._output(process, deadline) for process in started]
        except OSError as error:
            raise self._failure("flwr", "a program that starts", str(error.strerror)) from error
        finally:
            for process in started:
                _end(process)

    def _output(self, process: "subprocess.Popen[bytes]", deadline: float) -> str:
        """Read what a command writes until it ends."""
        said = bytearray()
        with selectors.DefaultSelector() as ready:
            pipe = ready.register(process.stdout, selectors.EVENT_READ).fd  # type: ignore[arg-type]  # it is a pipe
            while ready.select(max(deadline - time.monotonic(), 0.0)):
                piece = os.read(pipe, 65536)
                said += piece
                if not piece:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(max(deadline - time.monotonic(), 0.0))
                    return said.decode(errors="replace")
                if len(said) > _MAX_OUTPUT_BYTES:
                    raise self._failure(
                        "flwr",
                        f"an answer of at most {_MAX_OUTPUT_BYTES} bytes",
                        f"{len(said)} bytes",
                    )
        raise self._failure(
            "flwr", f"an answer within {_TIMEOUT_S:.0f} s", "a command still at work"
        )

    def _start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [str(program("flwr")), *arguments, "--format", "json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            cwd=self._flower / "home",
            start_new_session=True,
        )

    def _failure(self, subject: str, expected: str, output: str) -> TransportError:
        said = " ".join(str(_parse(output).get("error-message") or output).split())
        remedy = f"Nothing is lost. Read {self._flower / 'logs'}, then run the command again."
        return TransportError(
            subject, expected=expected, got=said[-300:] or "no answer", remedy=remedy
        )


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a command that has not ended and all that it started: its group keeps its number until it is waited for."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdout:
        process.stdout.close()


def _parse(output: str) -> dict[str, object]:
    """The JSON object in a command's output, empty when there is none."""
    start = output.find("{")
    with suppress(ValueError, RecursionError):
        found = json.loads(output[start:]) if start >= 0 else {}
        return found if isinstance(found, dict) else {}
    return {}
