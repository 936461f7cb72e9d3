"""How does an aggregator run its side of Flower? SuperLink, SuperExec and one run of the app, tied to this process.

The SuperLink keeps its state in a database and starts no app by itself: a SuperExec of our own does, authenticated by a
secret. So a SuperLink that dies is started again and the run goes on. All progress lies in the federation's folders;
the database only has to remember the nodes.
"""

import json
import os
import secrets
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

import tomli_w

from aggregator.delivery import plan_done
from ddm.errors import BusyError, TransportError
from ddm.files import locked, require_file, write_atomic
from ddm.processes import (
    Child,
    flower_environment,
    port_in_use,
    program,
    script_command,
    spawn,
    terminate_all,
    wait_for_port,
)

_START_TIMEOUT_S = 60.0
_COMMAND_TIMEOUT_S = 60.0
_MAX_RESTARTS = 5
_MAX_RUNS = 5
_CONNECTION = "archipelago"
# One run in days needs no quick look for tasks.
_OWN = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1.0"}
# From `flwr run` until the ServerApp holds its lock; how often to ask meanwhile; how long it may be gone.
_STARTING_S = 60.0
_ASK_EVERY_S = 15.0
_MISSING_S = 3.0
_UNFINISHED = ("pending", "starting", "running")


class FlowerRuntime:
    """The aggregator's Flower programs for one plan, kept alive by calling `check` every second.

    Args:
        fed: the federation folder; `tls/` and the plan's bundle are there.
        host: address to listen on.
        port: the one port for silos and for Flower's own programs.
        plan_id: the plan to carry.
        nodes: silo id to OpenSSH public key of its node.
        shard_bytes: most bytes in one message.
        max_submission_bytes: most bytes of one submission.
        wait_s: for how long a silo without news may hold back its answer.
    """

    def __init__(
        self,
        fed: Path,
        *,
        host: str,
        port: int,
        plan_id: str,
        nodes: Mapping[str, str],
        shard_bytes: int,
        max_submission_bytes: int,
        wait_s: int = 30,
    ) -> None:
        self._fed, self._host, self._port = fed.absolute(), host, port
        self._flower = self._fed / "flower"
        self._plan_id, self._nodes = plan_id, dict(nodes)
        self._run_settings = {
            "plan_id": plan_id,
            "nodes": self._nodes,
            "shard_bytes": shard_bytes,
            "max_submission_bytes": max_submission_bytes,
            "wait_s": wait_s,
        }
        wildcard = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        self._local = wildcard.get(host, host)
        self._children: dict[str, Child] = {}
        self._num_restarts = {"superlink": 0, "superexec": 0}
        self._run_ids: list[str] = []
        self._was_alive = False
        self._submitted_at = self._ask_at = 0.0
        self._stack = ExitStack()

    def __enter__(self) -> "FlowerRuntime":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything and submit the run; takes some ten seconds.

        Raises:
            BusyError: the port is taken, or another runtime works on this folder.
            MissingFileError: a certificate or the bundle is missing, or Flower is not installed.
            TransportError: a program does not start.
        """
        require_file(self._fed / "tls" / "server.pem", "the server's certificate", remedy="Run `aggregator init`.")
        self._flower.mkdir(parents=True, exist_ok=True)
        self._stack.enter_context(locked(self._flower, "runtime"))
        if port_in_use(self._host, self._port):
            raise BusyError(
                f"port {self._port} on {self._host}",
                expected="a free port",
                got="one in use",
                remedy="Stop the program that listens there, or choose another port in federation.toml.",
            )
        self._write_files()
        self._start_superlink()
        self._start_superexec()
        self._register()
        self._submit()

    def _write_files(self) -> None:
        (self._flower / "stop").unlink(missing_ok=True)
        for folder in ("home", "logs", "keys"):
            (self._flower / folder).mkdir(exist_ok=True)
        connection = {"address": f"{self._local}:{self._port}", "root-certificates": str(self._tls("ca.pem"))}
        config = {"superlink": {"default": _CONNECTION, _CONNECTION: connection}}
        write_atomic(self._flower / "home" / "config.toml", tomli_w.dumps(config).encode())
        write_atomic(self._flower / "run.json", json.dumps(self._run_settings).encode())
        secret = self._flower / "superexec.secret"
        if not secret.exists():
            write_atomic(secret, secrets.token_bytes(32), mode=0o600)

    def _tls(self, name: str) -> Path:
        return self._fed / "tls" / name

    def _environment(self) -> dict[str, str]:
        return {**flower_environment(self._flower / "home"), **_OWN, "ARCHIPELAGO_FEDERATION": str(self._fed)}

    def _spawn(self, name: str, command: list[str]) -> None:
        log_path = self._flower / "logs" / f"{name}.log"
        self._children[name] = spawn(
            command, name=name, log_path=log_path, env=self._environment(), cwd=self._flower / "home"
        )

    def _start_superlink(self) -> None:
        command = [
            *script_command("flower-superlink"),
            *("--ssl-certfile", str(self._tls("server.pem"))),
            *("--ssl-keyfile", str(self._tls("server.key"))),
            *("--ssl-ca-certfile", str(self._tls("ca.pem"))),
            *("--isolation", "process", "--superexec-auth-secret-file", str(self._flower / "superexec.secret")),
            *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
            *("--database", str(self._flower / "superlink.db")),
            *("--host", self._host, "--port", str(self._port)),
        ]
        self._spawn("superlink", command)
        child = self._children["superlink"]
        try:
            wait_for_port(self._local, self._port, timeout_s=_START_TIMEOUT_S, alive=child.running)
        except TransportError as error:
            raise self._failure("the SuperLink", "a server that starts", child.log_tail()) from error

    def _start_superexec(self) -> None:
        command = [
            *script_command("flower-superexec"),
            *("--runtime-api-address", f"{self._local}:{self._port}"),
            *("--root-certificates", str(self._tls("ca.pem"))),
            *("--superexec-auth-secret-file", str(self._flower / "superexec.secret")),
        ]
        self._spawn("superexec", command)

    def _register(self) -> None:
        """Tell the SuperLink every node key it does not know; the list beside the database saves the question."""
        known_path = self._flower / "registered.json"
        known: set[str] = set()
        if (self._flower / "superlink.db").exists() and known_path.exists():
            with suppress(ValueError, TypeError):
                known = set(json.loads(known_path.read_text()))
        started: dict[str, subprocess.Popen[str]] = {}
        for silo_id, key in self._nodes.items():
            if key not in known:
                path = self._flower / "keys" / f"{silo_id}.pub"
                path.write_text(key + "\n")
                started[silo_id] = self._flwr("supernode", "register", str(path), _CONNECTION)
        for silo_id, output in _outputs(started).items():
            answer = _parse(output)
            if not answer.get("success") and "already" not in output:
                raise self._failure(f"registering silo {silo_id}", "a registered node", output)
            known.add(self._nodes[silo_id])
        write_atomic(known_path, json.dumps(sorted(known)).encode())

    def _submit(self) -> None:
        app = Path(__file__).parent / "flower_app"
        command = ("run", str(app), _CONNECTION, "--run-config", f'plan-id="{self._plan_id}"')
        output = _outputs({"run": self._flwr(*command)})["run"]
        run_id = _parse(output).get("run-id")
        if not run_id:
            raise self._failure("submitting the run", "a run id", output)
        self._run_ids.append(str(run_id))
        self._was_alive, self._submitted_at = False, time.monotonic()
        self._ask_at = self._submitted_at + _ASK_EVERY_S

    def _flwr(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [str(program("flwr")), *arguments, "--format", "json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment(),
            cwd=self._flower / "home",
            start_new_session=True,
        )

    @property
    def finished(self) -> bool:
        """Whether every silo of the plan has its last receipt."""
        return plan_done(self._fed, self._plan_id, list(self._nodes))

    def check(self) -> None:
        """Start again what has died, a bounded number of times; call every second.

        Raises:
            TransportError: a program or the run keeps failing.
        """
        if self.finished:
            return
        for name, start in (("superlink", self._start_superlink), ("superexec", self._start_superexec)):
            child = self._children[name]
            if child.running():
                continue
            self._num_restarts[name] += 1
            if self._num_restarts[name] > _MAX_RESTARTS:
                raise self._failure(f"the {name}", f"at most {_MAX_RESTARTS} restarts", child.log_tail())
            start()
        self._check_run()

    def _check_run(self) -> None:
        """Submit anew when no ServerApp works; a live one holds its lock, which costs nothing to see."""
        now = time.monotonic()
        if self._server_app_alive():
            self._was_alive, self._ask_at = True, now + _MISSING_S
            return
        if now < self._ask_at:
            return
        # One that worked is gone, whatever the SuperLink still believes. One that never did may only be slow.
        status = "it ended" if self._was_alive else self._run_status()
        if not self._was_alive and status.startswith(_UNFINISHED) and now < self._submitted_at + _STARTING_S:
            self._ask_at = now + _ASK_EVERY_S
            return
        if len(self._run_ids) >= _MAX_RUNS:
            raise self._failure("the Flower run", f"at most {_MAX_RUNS} attempts", f"{self._server_log()}\n{status}")
        self._submit()

    def _run_status(self) -> str:
        output = _outputs({"list": self._flwr("list", _CONNECTION, "--run-id", self._run_ids[-1])})["list"]
        runs = _parse(output).get("runs")
        return str(runs[0].get("status", "")) if isinstance(runs, list) and runs else output.strip()

    def _server_app_alive(self) -> bool:
        try:
            with locked(self._flower, "serverapp"):
                return False
        except BusyError:
            return True

    def _server_log(self) -> str:
        path = self._flower / "logs" / "serverapp.log"
        return path.read_text(errors="replace")[-2000:] if path.is_file() else ""

    def _failure(self, subject: str, expected: str, output: str) -> TransportError:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        remedy = f"Nothing is lost. Read {self._flower / 'logs'}, then run the command again."
        return TransportError(subject, expected=expected, got=lines[-1][:300] if lines else "no answer", remedy=remedy)

    def stop(self) -> None:
        """End everything within a few seconds; safe to call twice."""
        children, self._children = list(self._children.values()), {}
        if children:
            with suppress(OSError):
                (self._flower / "stop").touch()
        terminate_all(children)
        self._stack.close()

    def info(self) -> dict[str, object]:
        """What runs: process ids, the Flower run id, how often things were started again."""
        return {
            **{f"{name}_pid": child.pid for name, child in self._children.items()},
            "run_id": self._run_ids[-1] if self._run_ids else None,
            "num_runs": len(self._run_ids),
            "num_restarts": sum(self._num_restarts.values()),
            "address": f"{self._host}:{self._port}",
            "pid": os.getpid(),
        }


def _outputs(commands: Mapping[str, "subprocess.Popen[str]"]) -> dict[str, str]:
    """Wait for short commands that run at the same time; whatever happens, none of them stays."""
    try:
        return {name: process.communicate(timeout=_COMMAND_TIMEOUT_S)[0] for name, process in commands.items()}
    except subprocess.TimeoutExpired as error:
        raise TransportError("flwr", expected=f"an answer within {_COMMAND_TIMEOUT_S:.0f} s") from error
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
