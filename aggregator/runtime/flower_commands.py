"""What does the aggregator ask Flower's own command for? Registering nodes, submitting a run, asking how it stands."""

import json
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import tomli_w

from ddm.errors import TransportError
from ddm.files import write_atomic
from ddm.processes import program

_TIMEOUT_S = 60.0
_CONNECTION = "archipelago"
_APP = Path(__file__).parent / "flower_app"


class FlowerCommands:
    """The `flwr` command, pointed at one SuperLink.

    Args:
        flower: the federation's folder for Flower; FLWR_HOME is `home` in it.
        environment: of the commands.
        address: the SuperLink's, host:port.
        ca_path: the authority that signed its certificate.
    """

    def __init__(self, flower: Path, environment: Mapping[str, str], *, address: str, ca_path: Path) -> None:
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
        known_path = self._flower / "registered.json"
        known: set[str] = set()
        if (self._flower / "superlink.db").exists() and known_path.exists():
            with suppress(ValueError, TypeError):
                known = set(json.loads(known_path.read_text()))
        started: dict[str, subprocess.Popen[str]] = {}
        for silo_id, key in nodes.items():
            if key not in known:
                path = self._flower / "keys" / f"{silo_id}.pub"
                path.write_text(key + "\n")
                started[silo_id] = self._start("supernode", "register", str(path), _CONNECTION)
        for silo_id, output in _outputs(started).items():
            if not _parse(output).get("success") and "already" not in output:
                raise self._failure(f"registering silo {silo_id}", "a registered node", output)
            known.add(nodes[silo_id])
        write_atomic(known_path, json.dumps(sorted(known)).encode())

    def submit(self, plan_id: str) -> str:
        """Submit the run that carries a plan; return its id.

        Raises:
            TransportError: the SuperLink does not take it.
        """
        settings = ("--run-config", f'plan-id="{plan_id}"')
        output = _outputs({"run": self._start("run", str(_APP), _CONNECTION, *settings)})["run"]
        run_id = _parse(output).get("run-id")
        if not run_id:
            raise self._failure("submitting the run", "a run id", output)
        return str(run_id)

    def run_status(self, run_id: str) -> str:
        """Ask how a run stands, in Flower's words; what the command said when that is no answer."""
        try:
            output = _outputs({"list": self._start("list", _CONNECTION, "--run-id", run_id)})["list"]
        except TransportError as error:
            return str(error)
        runs = _parse(output).get("runs")
        return str(runs[0].get("status", "")) if isinstance(runs, list) and runs else output.strip()

    def _start(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [str(program("flwr")), *arguments, "--format", "json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment,
            cwd=self._flower / "home",
            start_new_session=True,
        )

    def _failure(self, subject: str, expected: str, output: str) -> TransportError:
        said = " ".join(str(_parse(output).get("error-message") or output).split())
        remedy = f"Nothing is lost. Read {self._flower / 'logs'}, then run the command again."
        return TransportError(subject, expected=expected, got=said[-300:] or "no answer", remedy=remedy)


def _outputs(commands: Mapping[str, "subprocess.Popen[str]"]) -> dict[str, str]:
    """Wait for short commands that run at the same time; whatever happens, none of them stays."""
    try:
        return {name: process.communicate(timeout=_TIMEOUT_S)[0] for name, process in commands.items()}
    except subprocess.TimeoutExpired as error:
        raise TransportError("flwr", expected=f"an answer within {_TIMEOUT_S:.0f} s") from error
    finally:
        for process in commands.values():
            if process.poll() is None:
                process.kill()
                process.communicate()


def _parse(output: str) -> dict[str, object]:
    """The JSON object in a command's output, empty when there is none."""
    start = output.find("{")
    with suppress(ValueError):
        found = json.loads(output[start:]) if start >= 0 else {}
        return found if isinstance(found, dict) else {}
    return {}
