"""Flower's own command, run to register nodes, to submit a run, and to read its status.

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
from pathlib import Path

import tomli_w

from ddm.errors import TransportError
from ddm.io.files import write_atomic
from ddm.system.processes import program

_MAX_OUTPUT_BYTES = 1 << 20
# Each takes a second of processor time and 100 MiB; there may be hundreds of silos.
_MAX_AT_ONCE = 4
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
        timeout_s: how long commands that run side by side may take, seconds.
    """

    def __init__(
        self,
        flower: Path,
        environment: Mapping[str, str],
        *,
        address: str,
        ca_path: Path,
        timeout_s: float = 60.0,
    ) -> None:
        self._flower = flower
        self._timeout_s = timeout_s
        self._environment = dict(environment)
        connection = {"address": address, "root-certificates": str(ca_path)}
        config = {"superlink": {"default": _CONNECTION, _CONNECTION: connection}}
        for folder in ("home", "keys"):
            (flower / folder).mkdir(parents=True, exist_ok=True)
        write_atomic(flower / "home" / "config.toml", tomli_w.dumps(config).encode())

    def register(self, nodes: Mapping[str, str]) -> None:
        """Register every node key that the SuperLink does not know; a list beside its database says which it does.

        Args:
            nodes: silo id to OpenSSH public key.

        Raises:
            TransportError: the SuperLink does not take one.
        """
        known_path = self._flower / _REGISTERED
        known: set[str] = set()
        if (self._flower / "superlink.db").exists() and known_path.exists():
            # A list that cannot be read costs time alone: every node is then registered again.
            with suppress(ValueError, TypeError):
                known = set(json.loads(known_path.read_text()))
        new = [silo_id for silo_id, key in nodes.items() if key not in known]
        for first in range(0, len(new), _MAX_AT_ONCE):
            silo_ids = new[first : first + _MAX_AT_ONCE]
            commands = []
            for silo_id in silo_ids:
                path = self._flower / "keys" / f"{silo_id}.pub"
                path.write_text(nodes[silo_id] + "\n")
                commands.append(("supernode", "register", str(path), _CONNECTION))
            outputs = self._run_all(commands)
            for silo_id, output in zip(silo_ids, outputs, strict=True):
                # A node that is registered already is in the database and not in the list, as after a crash between the
                # two.
                if not _parse(output).get("success") and "already" not in output:
                    raise self._failure(f"registering silo {silo_id}", "a registered node", output)
                known.add(nodes[silo_id])
            # After every few, so that an interruption costs only these.
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
        (output,) = self._run_all([("run", str(_APP), _CONNECTION, *settings)])
        run_id = _parse(output).get("run-id")
        if not run_id:
            raise self._failure("submitting the run", "a run id", output)
        return str(run_id)

    def run_status(self, run_id: str) -> str:
        """Return the status of a run, in Flower's words; what the command printed when it names none."""
        try:
            (output,) = self._run_all([("list", _CONNECTION, "--run-id", run_id)])
        except TransportError as error:
            return str(error)
        match _parse(output).get("runs"):
            case [dict() as run, *_]:
                return str(run.get("status", ""))
            case _:
                return output.strip()

    def _run_all(self, commands: Sequence[Sequence[str]]) -> list[str]:
        """Run short commands at the same time; whatever happens, nothing that they started stays.

        Raises:
            TransportError: one does not start, does not end in time, or writes too much.
        """
        started: list[subprocess.Popen[bytes]] = []
        deadline = time.monotonic() + self._timeout_s
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
        output = bytearray()
        with selectors.DefaultSelector() as selector:
            # `Popen.communicate` would bound the time, but not what a command writes into this process's memory.
            pipe = selector.register(process.stdout, selectors.EVENT_READ).fd  # type: ignore[arg-type]  # it is a pipe
            while selector.select(max(deadline - time.monotonic(), 0.0)):
                piece = os.read(pipe, 65536)
                output += piece
                if not piece:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(max(deadline - time.monotonic(), 0.0))
                    return output.decode(errors="replace")
                if len(output) > _MAX_OUTPUT_BYTES:
                    raise self._failure(
                        "flwr",
                        f"an answer of at most {_MAX_OUTPUT_BYTES} bytes",
                        f"{len(output)} bytes",
                    )
        raise self._failure(
            "flwr", f"an answer within {self._timeout_s:.0f} s", "a command still at work"
        )

    def _start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [str(program("flwr")), *arguments, "--format", "json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            cwd=self._flower / "home",
            # Its number is then that of its group, by which `_end` reaches what the command started.
            start_new_session=True,
        )

    def _failure(self, subject: str, expected: str, output: str) -> TransportError:
        message = " ".join(str(_parse(output).get("error-message") or output).split())
        return TransportError(
            subject,
            expected=expected,
            got=message[-300:] or "no answer",
            remedy=f"Nothing is lost. Read {self._flower / 'logs'}, then run the command again.",
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
    # Flower may print a warning before the object.
    start = output.find("{")
    if start < 0:
        return {}
    try:
        document = json.loads(output[start:])
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
