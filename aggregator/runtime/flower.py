"""The aggregator's side of Flower: SuperLink, SuperExec, nginx and one run of the app, managed together.

The SuperLink keeps its state in a database and starts no app by itself: a SuperExec of our own does, authenticated by a
secret. So a SuperLink that dies is started again and the run continues. All progress is in the federation's folders;
the database only has to remember the nodes, and a damaged one is replaced (`aggregator.runtime.database`). Where there
is nginx, it alone listens on the federation's address (`aggregator.runtime.proxy`), and the SuperLink on a port of
loopback that changes with every start.
"""

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from aggregator.config import BUSY_PORT_REMEDY
from aggregator.runtime.database import fault_of, move_aside_if_damaged
from aggregator.runtime.flower_commands import FlowerCommands
from aggregator.runtime.proxy import (
    address_to_connect,
    answers,
    nginx_command,
    render_config,
    write_config,
)
from aggregator.transfer.receipts_folder import is_plan_finished
from aggregator.transfer.settings import RUN_SETTINGS_NAME, RunSettings
from ddm.errors import BusyError, TransportError
from ddm.io.files import require_file, write_atomic
from ddm.io.locks import is_locked, locked
from ddm.system.backoff import Backoff
from ddm.system.processes import (
    Child,
    file_tail,
    flower_environment,
    free_port,
    port_in_use,
    script_command,
    spawn,
)
from ddm.system.supervisor import MAX_PER_HOUR, HeartbeatFile, Program, Supervisor
from ddm.transport.superexec import SERVER_APP, superexec_command

_START_TIMEOUT_S = 60.0
# After how long without an answer, or without a heartbeat, a program counts as hanging.
_SUPERLINK_SILENT_S = 60.0
_NGINX_SILENT_S = 30.0
_SERVER_APP_SILENT_S = 120.0
# One run in days needs no quick look for tasks.
_OWN = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1.0"}
# From `flwr run` until the ServerApp holds its lock; how often to check meanwhile; how long it may be gone.
_STARTING_S = 60.0
_CHECK_RUN_S = 15.0
_MISSING_S = 3.0
_UNFINISHED = ("pending", "starting", "running")
_LOOPBACK = "127.0.0.1"
_DATABASE = "superlink.db"
_SECRET_NAME = "superexec.secret"  # shared by SuperLink and SuperExec
_TLS_FILES = {
    "ca.pem": "the certificate of the federation's authority",
    "server.pem": "the server's certificate",
    "server.key": "the server's key",
}
_SUPERLINK = Path(__file__).with_name("superlink.py")


class FlowerRuntime:
    """The aggregator's programs for one plan, kept alive by calling `check` every second.

    Args:
        fed: the federation folder; `tls/` and the plan's bundle are there.
        settings: the settings of the run: the plan to carry, and to whom.
        host: address to listen on.
        port: the one port that silos reach.
        nginx: the program that takes the address; without it Flower's own server does, open to anybody who reaches it.
        beside: other programs to keep alive meanwhile; they are started first.
    """

    def __init__(
        self,
        fed: Path,
        settings: RunSettings,
        *,
        host: str,
        port: int,
        nginx: Path | None = None,
        beside: Sequence[Program] = (),
    ) -> None:
        self._fed = fed.absolute()
        self._flower = self._fed / "flower"
        self._host = host
        self._port = port
        self._nginx = nginx
        self._settings = settings
        self._nodes = dict(settings.nodes)
        self._public = (address_to_connect(host), port)
        self._superlink = self._public
        self._beside = tuple(beside)
        self._heartbeat = HeartbeatFile(self._flower / "serverapp.alive")
        self._supervisor = Supervisor([*self._beside, *self._programs()])
        self._runs = Backoff(MAX_PER_HOUR)
        self._run_ids: list[str] = []
        self._was_alive = False
        self._submitted_at = 0.0
        self._check_run_at = 0.0
        self._stack = ExitStack()

    def __enter__(self) -> "FlowerRuntime":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _nginx_works(self) -> bool:
        """Whether nginx came up. Later, connections may fill it: it does not hang, and a restart helps the attacker."""
        if self._supervisor.ready("nginx"):
            return True
        return answers(*self._public, self._tls("ca.pem"))

    def _programs(self) -> list[Program]:
        ca_path = self._tls("ca.pem")
        superlink = Program(
            "superlink",
            self._start_superlink,
            lambda: answers(*self._superlink, ca_path),
            silent_s=_SUPERLINK_SILENT_S,
        )
        superexec = Program(
            "superexec",
            self._start_superexec,
            self._server_app_works,
            silent_s=_SERVER_APP_SILENT_S,
        )
        if self._nginx is None:
            return [superlink, superexec]
        nginx = Program("nginx", self._start_nginx, self._nginx_works, silent_s=_NGINX_SILENT_S)
        return [superlink, nginx, superexec]

    def start(self) -> None:
        """Start everything and submit the run; takes some ten seconds.

        Raises:
            BusyError: the port is taken, or another runtime works on this folder.
            MissingFileError: a certificate or the bundle is missing, or Flower is not installed.
            SetupError: nginx refuses its configuration.
            TransportError: a program does not start.
        """
        # Everything that may be wrong is looked at before the first program starts.
        for name, purpose in _TLS_FILES.items():
            remedy = "Restore tls/ from the backup of this federation."
            require_file(self._tls(name), purpose, remedy)
        self._flower.mkdir(parents=True, exist_ok=True)
        self._stack.enter_context(locked(self._flower, "runtime"))
        if port_in_use(self._host, self._port):
            raise BusyError(
                f"port {self._port} on {self._host}",
                expected="a free port",
                got="a port that another program listens on",
                remedy=BUSY_PORT_REMEDY,
            )
        if self._nginx:
            superlink_port = free_port(_LOOPBACK)
            self._superlink = (_LOOPBACK, superlink_port)
            config = render_config(self._host, self._port, superlink_port)
            write_config(self._nginx, self._flower, config)
        self._write_files()
        # The SuperLink comes before nginx and the SuperExec, which both connect to it.
        for program in self._beside:
            self._supervisor.start(program.name)
        self._supervisor.start("superlink", timeout_s=_START_TIMEOUT_S)
        if self._nginx:
            self._supervisor.start("nginx", timeout_s=_START_TIMEOUT_S)
        self._supervisor.start("superexec")
        self._submit()

    def _write_files(self) -> None:
        # Left by the run before; the new ServerApp would end at once.
        (self._flower / "stop").unlink(missing_ok=True)
        run_settings = self._settings.model_dump_json().encode()
        write_atomic(self._flower / RUN_SETTINGS_NAME, run_settings)
        secret = self._flower / _SECRET_NAME
        if not secret.exists():
            write_atomic(secret, secrets.token_bytes(32), mode=0o600)
        self._flwr = FlowerCommands(
            self._flower, self._environment(), address=self._address(), ca_path=self._tls("ca.pem")
        )

    def _address(self) -> str:
        return ":".join(map(str, self._superlink))

    def _tls(self, name: str) -> Path:
        return self._fed / "tls" / name

    def _environment(self) -> dict[str, str]:
        return {
            **flower_environment(self._flower / "home"),
            **_OWN,
            "ARCHIPELAGO_FEDERATION": str(self._fed),
        }

    def _spawn(self, name: str, command: list[str]) -> Child:
        log_path = self._flower / "logs" / f"{name}.log"
        return spawn(command, log_path=log_path, env=self._environment(), cwd=self._flower / "home")

    def _start_superlink(self) -> Child:
        database = self._flower / _DATABASE
        move_aside_if_damaged(database)
        if not database.exists():
            # The SuperLink makes a new one, which knows no node.
            self._flwr.forget()
        host = self._host
        if self._nginx:
            # Only nginx may reach it: Flower's own server passes on more than silos' requests.
            host = _LOOPBACK
        command = [
            *script_command(_SUPERLINK),
            *("--ssl-certfile", str(self._tls("server.pem"))),
            *("--ssl-keyfile", str(self._tls("server.key"))),
            *("--ssl-ca-certfile", str(self._tls("ca.pem"))),
            *("--isolation", "process"),
            *("--superexec-auth-secret-file", str(self._flower / _SECRET_NAME)),
            *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
            *("--database", str(database)),
            *("--host", host, "--port", str(self._superlink[1])),
        ]
        return self._spawn("superlink", command)

    def _start_superexec(self) -> Child:
        secret_path = self._flower / _SECRET_NAME
        # The secret's file is named, not its content: arguments are visible to every user of the machine.
        command = superexec_command(self._address(), self._tls("ca.pem"), secret_path, SERVER_APP)
        return self._spawn("superexec", command)

    def _start_nginx(self) -> Child:
        return self._spawn("nginx", nginx_command(self._nginx or Path("nginx"), self._flower))

    def _submit(self) -> None:
        self._runs.count()
        self._was_alive = False
        self._submitted_at = time.monotonic()
        self._check_run_at = self._submitted_at + _CHECK_RUN_S
        # A new database knows none of them.
        self._flwr.register(self._nodes)
        self._run_ids.append(self._flwr.submit(self._settings.plan_id))

    def register(self, nodes: Mapping[str, str]) -> None:
        """Let more nodes connect; the run at work sends them nothing.

        Args:
            nodes: silo id to OpenSSH public key.

        Raises:
            TransportError: the SuperLink does not take one.
        """
        self._nodes.update(nodes)
        self._flwr.register(nodes)

    @property
    def finished(self) -> bool:
        """Whether every silo of the plan has its last receipt."""
        settings = self._settings
        return is_plan_finished(self._fed, settings.plan_id, settings.silos_taking_part)

    def check(self) -> None:
        """Start again what has died or hangs, a bounded number of times; call every second.

        Raises:
            TransportError: a program or the run keeps failing.
        """
        if not self.finished:
            self._supervisor.check()
            self._check_run()

    def _check_run(self) -> None:
        """Submit the run again when no ServerApp works; a live one holds its lock, which costs nothing to check."""
        now = time.monotonic()
        if self._server_app_alive():
            self._was_alive = True
            self._check_run_at = now + max(_MISSING_S, self._runs.delay_s())
            return
        if now < self._check_run_at or not self._supervisor.ready("superlink"):
            return
        # One that worked is gone, whatever the SuperLink still believes. One that never did may only be slow.
        status = "it ended"
        if not self._was_alive:
            status = self._flwr.run_status(self._run_ids[-1])
            if status.startswith(_UNFINISHED):
                if now < self._submitted_at + _STARTING_S:
                    self._check_run_at = now + _CHECK_RUN_S
                    return
                # The SuperExec runs and starts nothing.
                self._supervisor.kill("superexec")
        self._submit_again(status)

    def _submit_again(self, status: str) -> None:
        if not self._runs.allowed():
            server_log = file_tail(self._flower / "logs" / "serverapp.log")
            lines = [line for line in f"{status}\n{server_log}".splitlines() if line.strip()]
            got = "no word about the last one"
            if lines:
                got = lines[-1][:300]
            raise TransportError(
                "the Flower run",
                expected=f"at most {MAX_PER_HOUR} attempts an hour",
                got=got,
                remedy=f"Nothing is lost. Read {self._flower / 'logs'}, then run the command again.",
            )
        # A SuperLink that has died since is started again; then the next attempt comes.
        try:
            self._submit()
        except TransportError:
            if fault_of(self._flower / _DATABASE):
                self._supervisor.kill("superlink")  # what starts it again makes a new database

    def _server_app_alive(self) -> bool:
        return is_locked(self._flower, "serverapp")

    def _server_app_works(self) -> bool:
        """Whether the ServerApp, where there is one, has touched its heartbeat since the last question."""
        return not self._server_app_alive() or self._heartbeat.beats()

    def stop(self) -> None:
        """End everything within a few seconds; safe to call twice."""
        # The ServerApp, which the SuperExec started, looks for this file and ends by itself.
        if self._supervisor.pids():
            with suppress(OSError):
                (self._flower / "stop").touch()
        self._supervisor.stop()
        self._stack.close()

    def num_restarts(self) -> dict[str, int]:
        """How often every program was started again."""
        return self._supervisor.num_restarts()

    def info(self) -> dict[str, object]:
        """What runs: process ids, the Flower run id, how often things were started again."""
        restarts = self.num_restarts()
        pids = {f"{name}_pid": pid for name, pid in self._supervisor.pids().items()}
        last_run_id = None
        if self._run_ids:
            last_run_id = self._run_ids[-1]
        return {
            **pids,
            "run_id": last_run_id,
            "num_runs": len(self._run_ids),
            "num_restarts": sum(restarts.values()),
            "restarts": restarts,
            "address": f"{self._host}:{self._port}",
            "pid": os.getpid(),
        }
