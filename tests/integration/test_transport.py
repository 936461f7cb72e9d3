"""The real thing: a SuperLink and SuperNodes with TLS and node authentication on loopback, processes killed midway."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from aggregator.keys.tls import make_tls
from aggregator.runtime.flower import FlowerRuntime
from aggregator.runtime.flower_commands import FlowerCommands
from aggregator.runtime.proxy import find_nginx
from aggregator.transfer.settings import RunSettings
from ddm.errors import BusyError, TransportError
from ddm.system.process_table import descendants
from ddm.system.processes import flower_environment, free_port
from silo.courier.supernode import Courier, make_node_key
from tests.support.bundles import Signer, site_settings
from tests.support.errors import has_subject
from tests.support.processes import is_running
from tests.support.waiting import wait_until

PLAN = "digits-3f9a1c2e"
SHARD_BYTES = 300_000
TIMEOUT_S = 600.0
NGINX = find_nginx()

needs_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def processes_below(folder):
    """Processes whose environment names the folder, wherever they hang in the process tree."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if b"FLWR_HOME=" + os.fsencode(folder) in path.read_bytes():
                pids.append(int(path.parent.name))
        except OSError:
            continue
    return pids


SIGNERS = {}


def make_federation(fed):
    make_tls(fed / "tls", ["127.0.0.1"], passphrase=b"correct horse")
    SIGNERS[fed] = Signer(fed / "tuf")
    SIGNERS[fed].sign(
        fed / "plans" / PLAN / "bundle", PLAN, {"plan/centroids.safetensors": os.urandom(400_000)}
    )


def make_site(site, fed):
    for name in ("courier", "inbox", "outbox"):
        (site / name).mkdir(parents=True)
    site_settings(site, site.name)
    (site / "courier" / "1.root.json").write_bytes(SIGNERS[fed].root)
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
    (receipts / "1.json").write_bytes(
        SIGNERS[fed].receipt(fed / "plans" / PLAN / "bundle", PLAN, silo_id)
    )
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
    killed_nginx: int = 0
    code: "Future[str] | None" = None
    pids: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    stop_s: float = 0.0

    @property
    def fed(self) -> Path:
        return self.root / "fed"


class Stage:
    """Moves the silos and the aggregator's intake on as the files appear."""

    def __init__(self, journey, couriers, port):
        self.journey = journey
        self.couriers = couriers
        self.fed = journey.fed
        self.address = f"127.0.0.1:{port}"
        self.runtime = None
        self.stranger = None
        self.pool = ThreadPoolExecutor(1)

    def step(self):
        for silo_id in ("north", "east"):
            site = self.journey.root / silo_id
            if self.nginx_was_replaced() and not (site / "outbox" / PLAN).exists():
                submit(site, silo_id)
            incoming, receipts = (
                self.fed / name / PLAN / silo_id for name in ("incoming", "receipts")
            )
            if (incoming / "1").exists() and not receipts.exists():
                intake(self.fed, silo_id)
        self.kill_east_midway()
        self.invite_stranger()
        self.submit_code_at_the_public_port()
        self.kill_nginx()

    def kill_east_midway(self):
        incoming = self.fed / "incoming" / PLAN / "east"
        if not self.journey.killed_pid and any(
            (incoming / name).exists() for name in ("1.part", "1")
        ):
            self.journey.killed_pid = int(self.couriers["east"].info()["supernode_pid"])
            os.kill(self.journey.killed_pid, signal.SIGKILL)

    def invite_stranger(self):
        """A node with a key of its own and the right certificate, but not enrolled."""
        if (
            self.stranger is None
            and (self.journey.root / "north" / "inbox" / PLAN / "bundle").exists()
        ):
            site = self.journey.root / "stranger"
            make_site(site, self.fed)
            self.stranger = Courier(site, address=self.address, max_bundle_bytes=10**9)
            self.stranger.start()
        if self.stranger is not None and self.journey.stranger_problem is None:
            problem = self.stranger.problem
            # While nginx is dead, nobody reaches anything.
            if problem and "cannot be reached" not in problem:
                self.journey.stranger_problem = problem
                self.stranger.stop()

    def submit_code_at_the_public_port(self):
        """What anybody would do who has Flower and the federation's certificate."""
        if (
            self.journey.code is None
            and (self.journey.root / "north" / "inbox" / PLAN / "bundle").exists()
        ):
            flower = self.journey.root / "anybody"
            environment = flower_environment(flower / "home")
            ca_path = self.fed / "tls" / "ca.pem"
            anybody = FlowerCommands(flower, environment, address=self.address, ca_path=ca_path)
            self.journey.code = self.pool.submit(anybody.submit, PLAN)

    def kill_nginx(self):
        """As soon as both silos have told how they stand; from then on each holds back its answer until it has news."""
        is_partly_here = all(
            any((self.fed / "incoming" / PLAN).glob(f"{silo_id}/*"))
            for silo_id in ("north", "east")
        )
        if NGINX and is_partly_here and not self.journey.killed_nginx:
            self.journey.killed_nginx = int(self.runtime.info()["nginx_pid"])
            os.kill(self.journey.killed_nginx, signal.SIGKILL)

    def nginx_was_replaced(self):
        both = all(
            (self.journey.root / silo_id / "inbox" / PLAN / "bundle").exists()
            for silo_id in ("north", "east")
        )
        return both and (not NGINX or self.runtime.num_restarts()["nginx"] == 1)

    def close(self):
        self.pool.shutdown()
        for courier in [*self.couriers.values(), *([self.stranger] if self.stranger else [])]:
            courier.stop()


def run_settings(nodes):
    """What a run of these silos carries."""
    return RunSettings(
        plan_id=PLAN, nodes=nodes, shard_bytes=SHARD_BYTES, max_submission_bytes=10**7
    )


@pytest.fixture(scope="module")
def journey(tmp_path_factory):
    journey = Journey(tmp_path_factory.mktemp("transport"))
    make_federation(journey.fed)
    port = free_port()
    keys = {}
    couriers = {}
    for silo_id in ("north", "east"):
        keys[silo_id] = make_site(journey.root / silo_id, journey.fed)
        couriers[silo_id] = Courier(
            journey.root / silo_id, address=f"127.0.0.1:{port}", max_bundle_bytes=10**9
        )
    stage = Stage(journey, couriers, port)
    stage.runtime = runtime = FlowerRuntime(
        journey.fed,
        run_settings(keys),
        host="127.0.0.1",
        port=port,
        nginx=NGINX,
    )
    try:
        couriers["north"].start()
        couriers["east"].start()
        with runtime:

            def check() -> None:
                runtime.check()
                for courier in couriers.values():
                    courier.check()
                stage.step()

            with suppress(AssertionError):  # the tests say what is missing
                wait_until(
                    lambda: (
                        runtime.finished
                        and journey.code
                        and journey.code.done()
                        and journey.stranger_problem
                    ),
                    check=check,
                    limit_s=TIMEOUT_S,
                    every_s=0.2,
                )
            journey.finished = runtime.finished
            journey.info = runtime.info()
            journey.east = couriers["east"].info()
            journey.pids = descendants(os.getpid())
            started = time.monotonic()
        journey.stop_s = time.monotonic() - started
    finally:
        stage.close()
    journey.left = processes_below(journey.root)
    return journey


@pytest.mark.slow
def test_plan_completes_when_a_supernode_is_killed_midway(journey):
    log = journey.fed / "flower" / "logs" / "serverapp.log"
    assert journey.finished, log.read_text() if log.exists() else "no ServerApp"
    assert journey.killed_pid and journey.east["supernode_pid"] != journey.killed_pid
    assert journey.info["num_runs"] == 1


@pytest.mark.slow
@needs_nginx
def test_plan_completes_when_nginx_is_killed_midway(journey):
    assert journey.finished and journey.killed_nginx
    assert journey.info["nginx_pid"] != journey.killed_nginx
    assert journey.info["restarts"] == {"superlink": 0, "nginx": 1, "superexec": 0}


@pytest.mark.slow
@needs_nginx
def test_code_submitted_through_the_public_port_is_refused(journey):
    assert journey.code is not None
    with pytest.raises(TransportError, match="403 Forbidden"):
        journey.code.result()
    log = (journey.fed / "flower" / "logs" / "nginx.log").read_text()
    # A courier that cannot connect asks for the time at `/`, and gets it with its refusal.
    refused = [line for line in log.splitlines() if " 403 " in line and " 403 / " not in line]
    assert refused and all(" 403 /v1/control/" in line for line in refused)
    runs = (
        (journey.fed / "flower" / "logs" / "superlink.log")
        .read_text()
        .count("/v1/control/start-run")
    )
    assert runs == 1, "the aggregator's own"


@pytest.mark.slow
@pytest.mark.parametrize("silo_id", ["north", "east"])
def test_bundle_submission_and_receipt_arrive_byte_identical(journey, silo_id):
    site = journey.root / silo_id
    assert contents(site / "inbox" / PLAN / "bundle") == contents(
        journey.fed / "plans" / PLAN / "bundle"
    )
    assert contents(journey.fed / "incoming" / PLAN / silo_id / "1") == contents(
        site / "outbox" / PLAN / "1"
    )
    receipts = journey.fed / "receipts" / PLAN / silo_id
    assert (site / "inbox" / PLAN / "receipts" / "1.json").read_bytes() == (
        receipts / "1.json"
    ).read_bytes()
    assert (receipts / "1.delivered").exists()


@pytest.mark.slow
def test_node_is_refused_when_its_key_is_not_enrolled(journey):
    assert journey.stranger_problem and "does not let this node in" in journey.stranger_problem
    assert not list((journey.root / "stranger" / "inbox").iterdir())
    assert {path.name for path in (journey.fed / "incoming" / PLAN).iterdir()} == {"east", "north"}


@pytest.mark.slow
def test_no_process_is_left_when_everything_stopped(journey):
    # A guard and a program for the SuperLink, nginx, the SuperExec and two SuperNodes, and what those started.
    assert len(journey.pids) >= (10 if NGINX else 8)
    assert journey.left == []
    assert journey.stop_s < 30.0


@pytest.mark.slow
def test_nothing_of_the_aggregators_machine_is_in_what_the_silos_received(journey):
    site = journey.root / "north"
    received = [
        path
        for folder in (site / "courier", site / "inbox")
        for path in folder.rglob("*")
        if path.is_file()
    ]
    assert site / "inbox" / PLAN / "bundle" / "targets" / PLAN / "plan.json" in received
    for path in received:
        assert os.fsencode(journey.fed) not in path.read_bytes()
        assert path.suffix != ".py", "a silo takes no code from the aggregator"


def test_runtime_is_refused_when_its_port_is_taken(tmp_path):
    make_federation(tmp_path / "fed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        runtime = FlowerRuntime(
            tmp_path / "fed",
            run_settings({}),
            host="127.0.0.1",
            port=server.getsockname()[1],
        )
        with pytest.raises(BusyError, check=has_subject("port")), runtime:
            pass


def test_courier_is_refused_when_another_one_works_on_the_site(tmp_path):
    make_federation(tmp_path / "fed")
    make_site(tmp_path / "site", tmp_path / "fed")
    first, second = (
        Courier(tmp_path / "site", address=f"127.0.0.1:{free_port()}", max_bundle_bytes=1)
        for _ in "ab"
    )
    with first, pytest.raises(BusyError):
        second.start()


SUPERVISOR = """
import json, sys, time
from pathlib import Path
from aggregator.runtime.proxy import find_nginx
from aggregator.runtime.flower import FlowerRuntime
from aggregator.transfer.settings import RunSettings
fed, settings, port = sys.argv[1:]
settings = RunSettings.model_validate_json(settings)
with FlowerRuntime(Path(fed), settings, host="127.0.0.1", port=int(port), nginx=find_nginx()) as runtime:
    while True:
        runtime.check()
        time.sleep(0.2)
"""


@pytest.mark.slow
def test_plan_completes_when_the_aggregator_and_then_its_superlink_are_killed(tmp_path):
    fed = tmp_path / "fed"
    site = tmp_path / "north"
    make_federation(fed)
    port = free_port()
    settings = run_settings({"north": make_site(site, fed)})
    incoming = fed / "incoming" / PLAN / "north"
    with Courier(site, address=f"127.0.0.1:{port}", max_bundle_bytes=10**9) as courier:
        arguments = (str(fed), settings.model_dump_json(), str(port))
        command = [sys.executable, "-c", SUPERVISOR, *arguments]
        with subprocess.Popen(command) as supervisor:
            wait_until((site / "inbox" / PLAN / "bundle").exists, check=courier.check)
            supervisor.kill()
        wait_until(lambda: not processes_below(fed))
        submit(site, "north")

        with FlowerRuntime(fed, settings, host="127.0.0.1", port=port, nginx=NGINX) as runtime:

            def check():
                runtime.check()
                courier.check()

            wait_until(
                lambda: (incoming / "1.part").exists() or (incoming / "1").exists(), check=check
            )
            os.kill(int(runtime.info()["superlink_pid"]), signal.SIGKILL)
            wait_until((incoming / "1").exists, check=check)
            intake(fed, "north")
            os.kill(int(runtime.info()["superexec_pid"]), signal.SIGKILL)
            wait_until(lambda: runtime.finished, check=check)
            assert runtime.info()["num_restarts"] == 2 and runtime.info()["num_runs"] == 2
    assert contents(incoming / "1") == contents(site / "outbox" / PLAN / "1")
    assert processes_below(tmp_path) == []


def stopped(folder, pattern):
    """Stop the processes of a federation whose command holds a text: they live on and do nothing."""
    pids = []
    for pid in processes_below(folder):
        line = (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
        if pattern in line and "ddm.system.guard {" not in line:
            os.kill(pid, signal.SIGSTOP)
            pids.append(pid)
    return pids


@contextmanager
def one_silo(folder):
    """A federation of one silo, its plan delivered; yields its folders, the runtime, and what to call every second."""
    fed = folder / "fed"
    site = folder / "north"
    port = free_port()
    make_federation(fed)
    node_key = make_site(site, fed)
    with (
        Courier(site, address=f"127.0.0.1:{port}", max_bundle_bytes=10**9) as courier,
        FlowerRuntime(
            fed,
            run_settings({"north": node_key}),
            host="127.0.0.1",
            port=port,
            nginx=NGINX,
        ) as runtime,
    ):

        def check():
            runtime.check()
            courier.check()

        wait_until((site / "inbox" / PLAN / "bundle").exists, check=check)
        yield fed, site, runtime, check


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["runtime/superlink.py", "bin/flwr-serverapp"])
def test_plan_completes_when_a_program_lives_on_without_working(pattern, tmp_path, monkeypatch):
    for name in ("_SUPERLINK_SILENT_S", "_SERVER_APP_SILENT_S"):
        monkeypatch.setattr(f"aggregator.runtime.flower.{name}", 30.0)
    with one_silo(tmp_path) as (fed, site, runtime, check):
        pids = stopped(fed / "flower" / "home", pattern)
        assert pids
        wait_until(lambda: not any(map(is_running, pids)), check=check)
        submit(site, "north")
        incoming = fed / "incoming" / PLAN / "north" / "1"
        wait_until(incoming.exists, check=check)
        intake(fed, "north")
        wait_until(lambda: runtime.finished, check=check)
        restarts = runtime.num_restarts()
        num_runs = runtime.info()["num_runs"]
    if pattern == "runtime/superlink.py":
        assert restarts["superlink"] == 1
    else:
        assert (restarts["superexec"], restarts["superlink"], num_runs) == (1, 0, 2)
    assert contents(incoming) == contents(site / "outbox" / PLAN / "1")


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_nginx
def test_plan_completes_when_nginx_is_killed_during_a_transfer(tmp_path):
    with one_silo(tmp_path) as (fed, site, runtime, check):
        submit(site, "north")
        incoming = fed / "incoming" / PLAN / "north" / "1"
        wait_until(lambda: incoming.with_suffix(".part").exists() or incoming.exists(), check=check)
        os.kill(int(runtime.info()["nginx_pid"]), signal.SIGKILL)
        # Flower keeps an answer whose sending was cut off for 180 s before it says that it is lost.
        wait_until(incoming.exists, check=check, limit_s=400.0)
        intake(fed, "north")
        wait_until(lambda: runtime.finished, check=check)
        assert runtime.num_restarts() == {"superlink": 0, "nginx": 1, "superexec": 0}
    assert contents(incoming) == contents(site / "outbox" / PLAN / "1")
