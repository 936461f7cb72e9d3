"""The real thing: a SuperLink and SuperNodes with TLS and node authentication on loopback, processes killed midway."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from aggregator.runtime import FlowerRuntime
from aggregator.tls import make_tls
from ddm.errors import BusyError
from ddm.guard import descendants
from ddm.processes import free_port
from silo.courier import Courier, make_node_key

PLAN = "digits-3f9a1c2e"
SHARD_BYTES = 300_000
TIMEOUT_S = 240.0


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def processes_below(folder):
    """Processes whose environment names the folder, wherever they hang in the process tree."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if b"FLWR_HOME=" + os.fsencode(folder) in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def make_federation(fed):
    make_tls(fed / "tls", ["127.0.0.1"])
    bundle = fed / "plans" / PLAN / "bundle"
    (bundle / "metadata").mkdir(parents=True)
    (bundle / "targets" / PLAN / "plan").mkdir(parents=True)
    (bundle / "metadata" / "1.root.json").write_bytes(os.urandom(3000))
    (bundle / "targets" / PLAN / "plan.json").write_bytes(os.urandom(2000))
    (bundle / "targets" / PLAN / "plan" / "centroids.safetensors").write_bytes(os.urandom(400_000))


def make_site(site, fed):
    for name in ("courier", "inbox", "outbox"):
        (site / name).mkdir(parents=True)
    (site / "courier" / "ca.pem").write_bytes((fed / "tls" / "ca.pem").read_bytes())
    return make_node_key(site / "courier" / "node.key")


def submit(site, silo_id):
    part = site / "outbox" / PLAN / ".1.part"
    (part / "silos" / silo_id).mkdir(parents=True)
    (part / "silos" / silo_id / "submission.json").write_bytes(os.urandom(1500))
    (part / "silos" / silo_id / "expert.safetensors").write_bytes(os.urandom(1_000_000))
    part.rename(part.with_name("1"))
    status = {"plan_id": PLAN, "state": "in_outbox", "progress": 100, "sequence": 1}
    (site / "outbox" / "status.json").write_text(json.dumps(status))


def intake(fed, silo_id):
    receipts = fed / "receipts" / PLAN / silo_id
    receipts.mkdir(parents=True)
    (receipts / "1.json").write_bytes(os.urandom(500))
    (receipts / "final").touch()


@dataclass
class Journey:
    """What happened while two silos and a stranger were connected."""

    root: Path
    finished: bool = False
    info: dict[str, object] = field(default_factory=dict)
    killed_pid: int = 0
    east: dict[str, object] = field(default_factory=dict)
    stranger_problem: str | None = None
    pids: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    stop_s: float = 0.0

    @property
    def fed(self) -> Path:
        return self.root / "fed"


class Stage:
    """Moves the silos and the aggregator's intake on as the files appear."""

    def __init__(self, journey, couriers):
        self.journey, self.couriers, self.fed = journey, couriers, journey.fed
        self.stranger = None

    def step(self):
        for silo_id in ("north", "east"):
            site = self.journey.root / silo_id
            if (site / "inbox" / PLAN / "bundle").exists() and not (site / "outbox" / PLAN).exists():
                submit(site, silo_id)
            incoming, receipts = (self.fed / name / PLAN / silo_id for name in ("incoming", "receipts"))
            if (incoming / "1").exists() and not receipts.exists():
                intake(self.fed, silo_id)
        self.kill_east_midway()
        self.invite_stranger()

    def kill_east_midway(self):
        incoming = self.fed / "incoming" / PLAN / "east"
        if not self.journey.killed_pid and any((incoming / name).exists() for name in ("1.part", "1")):
            self.journey.killed_pid = int(self.couriers["east"].info()["supernode_pid"])
            os.kill(self.journey.killed_pid, signal.SIGKILL)

    def invite_stranger(self):
        """A node with a key of its own and the right certificate, but not enrolled."""
        if self.stranger is None and (self.journey.root / "north" / "inbox" / PLAN / "bundle").exists():
            site = self.journey.root / "stranger"
            make_site(site, self.fed)
            self.stranger = Courier(site, address=self.address, max_bundle_bytes=10**9)
            self.stranger.start()
        if self.stranger is not None and self.journey.stranger_problem is None:
            self.journey.stranger_problem = self.stranger.problem
            if self.journey.stranger_problem:
                self.stranger.stop()

    def close(self):
        for courier in [*self.couriers.values(), *([self.stranger] if self.stranger else [])]:
            courier.stop()


@pytest.fixture(scope="module")
def journey(tmp_path_factory):
    done = Journey(tmp_path_factory.mktemp("transport"))
    make_federation(done.fed)
    port = free_port()
    keys, couriers = {}, {}
    for silo_id in ("north", "east"):
        keys[silo_id] = make_site(done.root / silo_id, done.fed)
        couriers[silo_id] = Courier(done.root / silo_id, address=f"127.0.0.1:{port}", max_bundle_bytes=10**9)
    stage = Stage(done, couriers)
    stage.address = f"127.0.0.1:{port}"
    runtime = FlowerRuntime(
        done.fed,
        host="127.0.0.1",
        port=port,
        plan_id=PLAN,
        nodes=keys,
        shard_bytes=SHARD_BYTES,
        max_submission_bytes=10**7,
    )
    try:
        couriers["north"].start()
        couriers["east"].start()
        with runtime:
            deadline = time.monotonic() + TIMEOUT_S
            while not runtime.finished and time.monotonic() < deadline:
                runtime.check()
                for courier in couriers.values():
                    courier.check()
                stage.step()
                time.sleep(0.2)
            done.finished, done.info, done.east = runtime.finished, runtime.info(), couriers["east"].info()
            done.pids = descendants(os.getpid())
            started = time.monotonic()
        done.stop_s = time.monotonic() - started
    finally:
        stage.close()
    done.left = processes_below(done.root)
    return done


def test_plan_completes_when_a_supernode_is_killed_midway(journey):
    log = journey.fed / "flower" / "logs" / "serverapp.log"
    assert journey.finished, log.read_text() if log.exists() else "no ServerApp"
    assert journey.killed_pid and journey.east["supernode_pid"] != journey.killed_pid
    assert journey.info["num_restarts"] == 0 and journey.info["num_runs"] == 1


@pytest.mark.parametrize("silo_id", ["north", "east"])
def test_bundle_submission_and_receipt_arrive_byte_identical(journey, silo_id):
    site = journey.root / silo_id
    assert contents(site / "inbox" / PLAN / "bundle") == contents(journey.fed / "plans" / PLAN / "bundle")
    assert contents(journey.fed / "incoming" / PLAN / silo_id / "1") == contents(site / "outbox" / PLAN / "1")
    receipts = journey.fed / "receipts" / PLAN / silo_id
    assert (site / "inbox" / PLAN / "receipts" / "1.json").read_bytes() == (receipts / "1.json").read_bytes()
    assert (receipts / "1.delivered").exists()


def test_node_is_refused_when_its_key_is_not_enrolled(journey):
    assert journey.stranger_problem and "does not let this node in" in journey.stranger_problem
    assert not list((journey.root / "stranger" / "inbox").iterdir())
    assert {path.name for path in (journey.fed / "incoming" / PLAN).iterdir()} == {"east", "north"}


def test_no_process_is_left_when_everything_stopped(journey):
    # A guard and a program for the SuperLink, the SuperExec and two SuperNodes, and what those started.
    assert len(journey.pids) >= 8
    assert journey.left == []
    assert journey.stop_s < 10.0


def test_nothing_of_the_aggregators_machine_is_in_what_the_silos_received(journey):
    found = (journey.root / "north" / "courier" / "flwr").rglob("*")
    received = [path for path in found if path.is_file() and path.suffix in (".toml", ".json", ".py")]
    assert {path.name for path in received} >= {"pyproject.toml", "client.py"}, "the run's code, as Flower delivered it"
    for path in received:
        assert os.fsencode(journey.fed) not in path.read_bytes()


def test_runtime_is_refused_when_its_port_is_taken(tmp_path):
    make_federation(tmp_path / "fed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        runtime = FlowerRuntime(
            tmp_path / "fed",
            host="127.0.0.1",
            port=server.getsockname()[1],
            plan_id=PLAN,
            nodes={},
            shard_bytes=1,
            max_submission_bytes=1,
        )
        with pytest.raises(BusyError, match="port"), runtime:
            pass


def test_courier_is_refused_when_another_one_works_on_the_site(tmp_path):
    make_federation(tmp_path / "fed")
    make_site(tmp_path / "site", tmp_path / "fed")
    first, second = (Courier(tmp_path / "site", address=f"127.0.0.1:{free_port()}", max_bundle_bytes=1) for _ in "ab")
    with first, pytest.raises(BusyError):
        second.start()


SUPERVISOR = """
import json, sys, time
from pathlib import Path
from aggregator.runtime import FlowerRuntime
arguments = json.loads(sys.argv[1])
with FlowerRuntime(Path(arguments.pop("fed")), **arguments) as runtime:
    while True:
        runtime.check()
        time.sleep(0.2)
"""


def wait_until(condition, *, check=lambda: None, timeout_s=150.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        check()
        time.sleep(0.1)


@pytest.mark.slow
def test_plan_completes_when_the_aggregator_and_then_its_superlink_are_killed(tmp_path):
    fed, site = tmp_path / "fed", tmp_path / "north"
    make_federation(fed)
    port = free_port()
    settings = {
        "host": "127.0.0.1",
        "port": port,
        "plan_id": PLAN,
        "nodes": {"north": make_site(site, fed)},
        "shard_bytes": SHARD_BYTES,
        "max_submission_bytes": 10**7,
    }
    incoming = fed / "incoming" / PLAN / "north"
    with Courier(site, address=f"127.0.0.1:{port}", max_bundle_bytes=10**9) as courier:
        command = [sys.executable, "-c", SUPERVISOR, json.dumps({"fed": str(fed), **settings})]
        with subprocess.Popen(command) as supervisor:
            wait_until((site / "inbox" / PLAN / "bundle").exists, check=courier.check)
            supervisor.kill()
        wait_until(lambda: not processes_below(fed))
        submit(site, "north")

        with FlowerRuntime(fed, **settings) as runtime:

            def check():
                runtime.check()
                courier.check()

            wait_until(lambda: (incoming / "1.part").exists() or (incoming / "1").exists(), check=check)
            os.kill(int(runtime.info()["superlink_pid"]), signal.SIGKILL)
            wait_until((incoming / "1").exists, check=check)
            intake(fed, "north")
            os.kill(int(runtime.info()["superexec_pid"]), signal.SIGKILL)
            wait_until(lambda: runtime.finished, check=check)
            assert runtime.info()["num_restarts"] == 2 and runtime.info()["num_runs"] == 2
    assert contents(incoming / "1") == contents(site / "outbox" / PLAN / "1")
    assert processes_below(tmp_path) == []
