"""A federation of real processes, run through the public commands as its operators and a service manager would."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import tomli_w

from aggregator.config import Federation
from ddm.protocol.base import sha256_file
from ddm.system.process_table import descendants
from ddm.system.processes import Child, free_port, program, spawn, terminate_all
from silo.config import Site
from tests.support.federation import POLICY, images, recipe, set_training, waive, write_policy

SILOS: Mapping[str, int] = {"north": 60, "south": 40}
SHARD_BYTES = 65536
LIMIT_S = 600.0


class Operators:
    """Runs commands to their end, and services that are started again whenever they fail.

    Args:
        folder: everything lies below it.
        prefix: what a service's command begins with, by service; a network namespace, another clock.
        programs: where our programs are installed; by default beside this interpreter.
    """

    def __init__(
        self,
        folder: Path,
        prefix: Mapping[str, Sequence[str]] | None = None,
        programs: Path | None = None,
    ) -> None:
        self.folder = folder
        self.programs = programs or program("silo").parent
        self.prefix = dict(prefix or {})
        self.services: dict[str, list[str]] = {}
        self.running: dict[str, Child] = {}
        self.num_restarts: dict[str, int] = {}
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    @property
    def fed(self) -> Path:
        """The aggregator's folder."""
        return self.folder / "fed"

    @property
    def plan_id(self) -> str:
        """Of the plan in force."""
        return str(json.loads((self.fed / "plans" / "current.json").read_text())["plan_id"])

    def call(self, name: str, *arguments: object, code: int = 0) -> str:
        """Run a command to its end; it must exit with `code`."""
        command = [
            *self.prefix.get(name, ()),
            str(self.programs / name),
            *(str(argument) for argument in arguments),
        ]
        result = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == code, (
            f"{name} {arguments}: {result.returncode}: {result.stdout}{result.stderr}"
        )
        return result.stdout + result.stderr

    def serve(self, service: str, name: str, *arguments: object) -> None:
        """Start a service."""
        self.serve_command(
            service, [str(self.programs / name), *(str(argument) for argument in arguments)]
        )

    def serve_command(self, service: str, command: Sequence[str]) -> None:
        """Start a service by the words of its command."""
        self.services[service] = [*self.prefix.get(service, ()), *command]
        self.num_restarts[service] = 0
        self._start(service)

    def _start(self, service: str) -> None:
        log = self.folder / "logs" / f"{service}.log"
        command = self.services[service]
        # A guard looks for a program by its path.
        command = [subprocess.check_output(["which", command[0]], text=True).strip(), *command[1:]]
        self.running[service] = spawn(command, log_path=log, env=self.environment, grace_s=15.0)

    def restart_failed(self) -> None:
        """Start again what failed and leave what ended well, as a service manager does."""
        for service, child in self.running.items():
            if not child.running() and child.returncode:
                self.num_restarts[service] += 1
                # Some tests kill a service again and again; 20 failures are none of theirs.
                assert self.num_restarts[service] <= 20, self.logs()
                self._start(service)

    def wait_until(self, seen: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
        """Wait for something on disk; between looks, wait on a service itself."""
        deadline = time.monotonic() + limit_s
        while not seen():
            assert time.monotonic() < deadline, f"not seen: {what}\n{self.logs()}"
            self.restart_failed()
            next(iter(self.running.values())).wait(0.2)

    def ended_well(self, service: str) -> bool:
        """Whether a service ended well."""
        return not self.running[service].running() and self.running[service].returncode == 0

    def stop(self) -> None:
        """End every service."""
        terminate_all(self.running.values())

    def logs(self) -> str:
        """What every service said last."""
        return "\n".join(f"== {name}\n{child.log_tail()}" for name, child in self.running.items())

    def pids(self, service: str, pattern: str) -> list[int]:
        """Processes that a service started whose command line holds a text."""
        pids = []
        for pid in descendants(self.running[service].pid):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:  # it has ended meanwhile
                continue
            line = words.replace(b"\0", b" ").decode(errors="replace")
            # A guard's own line holds the whole command; it is not the program.
            if pattern in line and "-m ddm.system.guard {" not in line:
                pids.append(pid)
        return pids


def set_up_federation(
    operators: Operators,
    *,
    host: str = "127.0.0.1",
    num_steps: int | None = None,
    checkpoint_s: float = 0.0,
    architecture: Mapping[str, int] | None = None,
) -> None:
    """Make the federation, its silos and a signed plan; every silo's policy approves by itself.

    Args:
        operators: who do it.
        host: the address that the aggregator announces.
        num_steps: of the training; few by default.
        checkpoint_s: most seconds between two checkpoints of a training; by default each step has one.
        architecture: numbers of the expert that differ; an expert above 1 MiB may be sent then.
    """
    folder = operators.folder
    (folder / "pass").write_text("correct horse\n")
    secret = ("--passphrase-file", folder / "pass")
    operators.call(
        "aggregator",
        "init",
        operators.fed,
        "--name",
        "two",
        "--licence",
        "CC-BY-4.0",
        "--address",
        f"{host}:{free_port()}",
        *secret,
    )
    settings = operators.fed / "federation.toml"
    settings.write_text(
        settings.read_text().replace("shard_bytes = 67108864", f"shard_bytes = {SHARD_BYTES}")
    )
    invitation_digest = sha256_file(operators.fed / "invitation.json")
    for index, (silo, size) in enumerate(SILOS.items()):
        np.savez(folder / f"{silo}.npz", images=images(size, index - 0.5, seed=index))
        operators.call("silo", "init", folder / silo, "--id", silo, "--data", folder / f"{silo}.npz",
                       "--invitation", operators.fed / "invitation.json", "--code", invitation_digest,
                       *secret)  # fmt: skip
        write_policy(Site(folder / silo), POLICY)
        set_training(Site(folder / silo), checkpoint_s=checkpoint_s)
        operators.call("silo", "enroll", folder / silo, "--out", folder / f"{silo}.card.json")
        operators.call("aggregator", "enroll", "--yes", operators.fed, folder / f"{silo}.card.json")
    tables = recipe().model_dump(mode="json", exclude_none=True)
    tables["expert"]["architecture"] |= {"hidden": 64, "heads": 4}
    if architecture:
        tables["expert"]["architecture"] |= architecture
        tables["limits"]["expert_bytes"] = 256 << 20
    if num_steps:
        tables["expert"]["training"] |= {"num_steps": num_steps}
        # Of many steps too, since `aggregator plan` refuses a training that its plan gives too little time.
        tables["limits"]["train_s"] = 86_400
    (folder / "plan.toml").write_bytes(tomli_w.dumps(tables).encode())
    np.savez(
        folder / "public.npz",
        images=np.concatenate([images(120, at, seed=90) for at in (-0.5, 0.5)]),
    )
    operators.call("aggregator", "plan", operators.fed, "--recipe", folder / "plan.toml",
                   "--public", folder / "public.npz", "--yes")  # fmt: skip
    for silo in SILOS:
        waive(Site(folder / silo), Federation(operators.fed).current_plan()[1])


def serve_everything(operators: Operators) -> None:
    """Start the aggregator, and each silo's worker and courier as services of their own."""
    operators.serve("aggregator", "aggregator", "run", operators.fed)
    for silo in SILOS:
        for part in ("worker", "courier"):
            operators.serve(
                f"{silo}-{part}", "silo", "run", operators.folder / silo, "--only", part
            )


def all_services_ended(operators: Operators) -> bool:
    """Whether the aggregator and both workers ended well."""
    return all(
        operators.ended_well(service)
        for service in ("aggregator", *(f"{silo}-worker" for silo in SILOS))
    )
