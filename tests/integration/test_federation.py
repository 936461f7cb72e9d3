"""The whole federation by its public commands: two silos, strangers, kills, real Flower, a release at the end."""

import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from aggregator.cli import app as aggregator_app
from aggregator.config import Federation
from aggregator.runtime.flower_commands import FlowerCommands
from aggregator.runtime.proxy import find_nginx
from ddm.cli.main import app as ddm_app
from ddm.errors import TransportError
from ddm.io.tensors import load_tensors
from ddm.protocol.base import sha256_file
from ddm.system.console import run_app
from ddm.system.processes import Child, flower_environment, free_port, program, spawn, terminate_all
from silo.cli import app as silo_app
from silo.courier.supernode import Courier, make_node_key
from tests.support.bundles import site_settings
from tests.support.errors import has_subject
from tests.support.federation import POLICY, images, recipe, waive, write_policy
from tests.support.processes import is_running

COMMANDS = {"silo": silo_app, "aggregator": aggregator_app, "ddm": ddm_app}
SILOS = {"north": 60, "south": 40}
PERSON = "north"
POLICED = "south"
SHARD_BYTES = 150_000
LIMIT_S = 600.0
PRIVATE_FILES = ("counts.safetensors", "sketch.safetensors")


class FederationOperators:
    """Runs commands as the operators of a federation would."""

    def __init__(self, folder: Path, output: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.output = output
        self.background: dict[str, Child] = {}
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def call(self, name: str, *arguments: object, code: int = 0) -> str:
        """Run a command to its end, in this process: torch is imported here already; return what it printed."""
        self.output.readouterr()
        with pytest.raises(SystemExit) as ended:
            run_app(COMMANDS[name], [str(argument) for argument in arguments])
        printed = self.output.readouterr()
        exit_code = ended.value.code or 0
        assert exit_code == code, f"{name} {arguments}: {printed.out}{printed.err}"
        return printed.out

    def start(self, name: str, *arguments: object) -> None:
        command = [str(program(name)), *(str(argument) for argument in arguments)]
        key = f"{name}-{Path(str(arguments[-1])).name}"
        log = self.folder / "logs" / f"{key}.log"
        self.background[key] = spawn(command, log_path=log, env=self.environment, grace_s=15.0)

    def wait_until(self, seen: Callable[[], bool], what: str) -> None:
        """Wait for something on disk, or for a command that failed; between looks, wait on a command itself."""
        deadline = time.monotonic() + LIMIT_S
        while not seen():
            assert time.monotonic() < deadline, f"not seen: {what}\n{self.logs()}"
            failed = [
                key
                for key, child in self.background.items()
                if not child.running() and child.returncode
            ]
            assert not failed, self.logs()
            next(iter(self.background.values())).wait(0.3)

    def logs(self) -> str:
        return "\n".join(f"== {key}\n{child.log_tail()}" for key, child in self.background.items())


@pytest.fixture
def operators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[FederationOperators]:
    operators = FederationOperators(tmp_path, capsys)
    yield operators
    terminate_all(operators.background.values())


def set_up(operators: FederationOperators) -> None:
    folder = operators.folder
    (folder / "pass").write_text("correct horse\n")
    address = f"127.0.0.1:{free_port()}"
    operators.call("aggregator", "init", folder / "fed", "--name", "two", "--address", address,
                   "--licence", "CC-BY-4.0", "--passphrase-file", folder / "pass")  # fmt: skip
    settings = folder / "fed" / "federation.toml"
    settings.write_text(
        settings.read_text().replace("shard_bytes = 67108864", f"shard_bytes = {SHARD_BYTES}")
    )
    invitation_digest = sha256_file(folder / "fed" / "invitation.json")
    for index, (silo, size) in enumerate(SILOS.items()):
        np.savez(folder / f"{silo}.npz", images=images(size, index - 0.5, seed=index))
        operators.call("silo", "init", folder / silo, "--id", silo, "--data", folder / f"{silo}.npz",
                       "--invitation", folder / "fed" / "invitation.json", "--code", invitation_digest,
                       "--passphrase-file", folder / "pass")  # fmt: skip
        kind = "person" if silo == PERSON else "policy"
        write_policy(site_of(folder, silo), POLICY | {"approval": {"kind": kind}})
        operators.call("silo", "enroll", folder / silo, "--out", folder / f"{silo}.card.json")
        operators.call(
            "aggregator", "enroll", "--yes", folder / "fed", folder / f"{silo}.card.json"
        )


def site_of(folder: Path, silo: str):  # type: ignore[no-untyped-def]
    from silo.config import Site

    return Site(folder / silo)


def sign_plan(operators: FederationOperators) -> None:
    folder = operators.folder
    tables = recipe().model_dump(mode="json", exclude_none=True)
    tables["expert"]["architecture"] |= {"hidden": 64, "heads": 4}
    (folder / "plan.toml").write_bytes(tomli_w.dumps(tables).encode())
    public = np.concatenate([images(120, centre, seed=90) for centre in (-0.5, 0.5)])
    np.savez(folder / "public.npz", images=public)
    operators.call("aggregator", "plan", folder / "fed", "--recipe", folder / "plan.toml",
                   "--public", folder / "public.npz", "--yes")  # fmt: skip
    for silo in SILOS:
        waive(site_of(folder, silo), Federation(folder / "fed").current_plan()[1])


def status(operators: FederationOperators, silo: str) -> dict[str, str]:
    return json.loads(operators.call("silo", "status", operators.folder / silo, "--json"))


def test_two_silos_and_an_aggregator_make_a_verified_release(
    operators: FederationOperators,
) -> None:
    folder = operators.folder
    set_up(operators)
    sign_plan(operators)
    operators.start("aggregator", "run", folder / "fed")
    for silo in SILOS:
        operators.start("silo", "run", folder / silo)
    arrived = folder / "fed" / "incoming" / plan_of(folder) / POLICED
    operators.wait_until(lambda: any(arrived.glob("1*")), "a submission on its way")
    killed = kill_supernode(folder, POLICED)
    with stranger_at(folder) as stranger:
        # On busy cores its first attempts may find nobody who answers in time: what counts is what it is told then.
        message = "does not let this node in"
        operators.wait_until(lambda: message in str(stranger.problem), "what a stranger is told")
        assert not list((folder / "stranger" / "inbox").iterdir())
    submit_code_as_anybody(folder)
    state = folder / PERSON / "private" / "state.json"
    waiting = lambda: state.exists() and b"awaiting_approval" in state.read_bytes()  # noqa: E731
    operators.wait_until(waiting, "a submission that waits for its person")
    kill_intake(folder)
    digest = status(operators, PERSON)["submission_digest"]
    assert digest in operators.call("silo", "review", folder / PERSON)
    operators.call("silo", "approve", folder / PERSON, "--digest", "0" * 64, code=34)
    operators.call("silo", "approve", folder / PERSON, "--digest", digest)
    operators.wait_until(
        lambda: not any(c.running() for c in operators.background.values()), "the end"
    )
    assert {key: child.returncode for key, child in operators.background.items()} == dict.fromkeys(
        operators.background, 0
    )
    assert all(status(operators, silo)["state"] == "accepted" for silo in SILOS)
    said = operators.background["aggregator-fed"].log_tail()
    assert all(f"[{silo}] submission 1 accepted" in said for silo in SILOS)
    assert "[intake] ended or hung, and was started again" in said
    check_nothing_left(folder)
    # whatever came and went afterwards, the receipt at least, had a new one
    assert not is_running(killed)
    assert {path.name for path in arrived.parent.iterdir()} == set(SILOS)

    operators.call("aggregator", "router", folder / "fed")
    operators.call(
        "aggregator", "publish", folder / "fed", "--rehearsal", "--out", folder / "release"
    )
    root = folder / "fed" / "tuf" / "metadata" / "1.root.json"
    trust = ("--root", root, "--state", folder / "state")
    assert "none unlisted" in operators.call("ddm", "verify", folder / "release", *trust)
    check_bytes_unchanged(folder)
    operators.call("ddm", "sample", folder / "release", *trust, "--num", "9", "--steps", "4",
                   "--strategy", "sample", "--out", folder / "samples.npz")  # fmt: skip
    with np.load(folder / "samples.npz") as drawn:
        assert drawn["images"].shape == (9, 1, 4, 4)
        assert np.isfinite(drawn["images"]).all()


def plan_of(folder: Path) -> str:
    return str(json.loads((folder / "fed" / "plans" / "current.json").read_text())["plan_id"])


def courier_of(folder: Path, silo: str) -> dict[str, int]:
    noted: dict[str, int] = json.loads((folder / silo / "private" / "processes.json").read_text())[
        "courier"
    ]
    return noted


def kill_supernode(folder: Path, silo: str) -> int:
    pid = courier_of(folder, silo)["supernode_pid"]
    os.kill(pid, signal.SIGKILL)
    return pid


def address_of(folder: Path) -> str:
    settings = Federation(folder / "fed").settings()
    return f"{settings.host}:{settings.port}"


@contextmanager
def stranger_at(folder: Path) -> Iterator[Courier]:
    """Start a node that has a key of its own and the right certificate, and is not enrolled."""
    site = folder / "stranger"
    for name in ("courier", "inbox", "outbox"):
        (site / name).mkdir(parents=True)
    site_settings(site, "stranger")
    for name in ("1.root.json", "ca.pem"):
        shutil.copy(folder / PERSON / "courier" / name, site / "courier")
    make_node_key(site / "courier" / "node.key")
    with Courier(site, address=address_of(folder), max_bundle_bytes=10**9) as stranger:
        yield stranger


def submit_code_as_anybody(folder: Path) -> None:
    """Do what anybody would who has Flower and the federation's certificate; nginx alone keeps them out."""
    if find_nginx():
        anybody = folder / "anybody"
        ca_path = folder / "fed" / "tls" / "ca.pem"
        home = flower_environment(anybody / "home")
        with pytest.raises(TransportError, check=has_subject("submitting the run")):
            FlowerCommands(anybody, home, address=address_of(folder), ca_path=ca_path).submit(
                "digits-3f9a1c2e"
            )


def kill_intake(folder: Path) -> None:
    info = json.loads((folder / "fed" / "flower" / "info.json").read_text())
    os.kill(info["intake_pid"], signal.SIGKILL)


def check_nothing_left(folder: Path) -> None:
    info = json.loads((folder / "fed" / "flower" / "info.json").read_text())
    assert info["restarts"]["intake"] == 1 and sum(info["restarts"].values()) == 1
    pids = [info["pid"], *(pid for name, pid in info.items() if name.endswith("_pid"))]
    assert len(pids) == (5 if find_nginx() else 4)
    for silo in SILOS:
        note = json.loads((folder / silo / "private" / "processes.json").read_text())
        pids += [note["worker"], note["courier"]["supernode_pid"], note["courier"]["guard_pid"]]
    logs = folder / "fed" / "flower" / "logs"
    if find_nginx():
        # A courier that cannot connect asks for the time at `/`, and gets it with its refusal.
        lines = (logs / "nginx.log").read_text().splitlines()
        refused = [line for line in lines if " 403 " in line and " 403 / " not in line]
        assert refused and all(" 403 /v1/control/" in line for line in refused)
    assert (logs / "superlink.log").read_text().count("/v1/control/start-run") == 1, (
        "the aggregator's own"
    )
    assert not [pid for pid in pids if is_running(pid)]


def check_bytes_unchanged(folder: Path) -> None:
    """What a silo put in its outbox is what is published, byte for byte; each expert came in several shards."""
    plan_id = plan_of(folder)
    for silo in SILOS:
        sent = folder / silo / "outbox" / plan_id / "1"
        published = folder / "release" / "targets" / plan_id
        for name in (
            f"silos/{silo}/submission.json",
            f"silos/{silo}/experts/{silo}/expert.safetensors",
        ):
            assert (sent / name).read_bytes() == (published / name).read_bytes()
        expert = sent / "silos" / silo / "experts" / silo / "expert.safetensors"
        assert expert.stat().st_size > 2 * SHARD_BYTES
        assert load_tensors(expert, None, max_bytes=1 << 22)
        role = f"{plan_id}.{silo}.json"
        assert (sent / "metadata" / role).read_bytes() == (
            folder / "release" / "metadata" / role
        ).read_bytes()
        kept = {hashlib.sha256((sent / name).read_bytes()).hexdigest() for name in PRIVATE_FILES}
        everything = (
            path.read_bytes() for path in (folder / "release").rglob("*") if path.is_file()
        )
        assert not kept & {hashlib.sha256(data).hexdigest() for data in everything}
