"""The attack: another user of the machine speaks for a silo, or submits code, at the ports of Flower's programs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aggregator.runtime.flower import FlowerRuntime
from aggregator.runtime.proxy import find_nginx
from aggregator.transfer.settings import RunSettings
from ddm.system.process_table import descendants
from ddm.system.processes import free_port
from silo.courier.supernode import Courier
from tests.integration.test_transport import PLAN, make_federation, make_site
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
STRANGER = 54321  # no process of this machine has it; nginx serves as nobody

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whose a connection is"),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user"),
]


def listening_ports(pids: list[int]) -> list[int]:
    """The TCP ports on which some processes listen."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes.add(str(descriptor.readlink()))
            except OSError:
                continue
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    return sorted({int(row[1].rpartition(":")[2], 16) for row in listening})


@contextmanager
def intruder(
    ports: list[int], pids: list[int], user: int = STRANGER
) -> Iterator["subprocess.Popen[str]"]:
    """Another user at work."""
    command = [sys.executable, "-m", "tests.support.intruder", str(user)]
    lists = [",".join(map(str, numbers)) for numbers in (ports, pids)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*command, *lists], cwd=ROOT, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("with_nginx", [True, False], ids=["behind nginx", "without nginx"])
def test_other_user_gets_nothing_from_the_programs_of_a_silo_and_its_aggregator(
    tmp_path: Path, with_nginx: bool
) -> None:
    nginx = find_nginx() if with_nginx else None
    if with_nginx and nginx is None:
        pytest.skip("nginx is not installed")
    fed = tmp_path / "fed"
    site = tmp_path / "north"
    port = free_port()
    make_federation(fed)
    key = make_site(site, fed)
    courier = Courier(site, address=f"127.0.0.1:{port}", max_bundle_bytes=10**9)
    runtime = FlowerRuntime(
        fed,
        RunSettings(
            plan_id=PLAN,
            nodes={"north": key},
            shard_bytes=300_000,
            max_submission_bytes=10**7,
            wait_s=1,
        ),
        host="127.0.0.1",
        port=port,
        nginx=nginx,
    )
    with runtime, courier:

        def check() -> None:
            runtime.check()
            courier.check()

        wait_until(lambda: courier.problem is None and courier.info()["supernode_pid"], check=check)
        pids = [int(str(courier.info()["guard_pid"]))]
        pids += [
            pid
            for name, pid in runtime.info().items()
            if name.endswith("_pid") and isinstance(pid, int)
        ]
        everything = [one for pid in pids for one in (pid, *descendants(pid))]
        wait_until(
            lambda: len(listening_ports([*everything, *descendants(pids[0])])) >= 2, check=check
        )
        ports = listening_ports([*everything, *descendants(pids[0])])
        contact = fed / "incoming" / PLAN / "north" / "seen"
        with intruder(ports, pids) as process:
            # The federation goes on meanwhile: this many answers of the silo arrive.
            wait_until(
                (site / "inbox" / PLAN / "bundle").exists, "the plan at the silo", check=check
            )
            for _ in range(3):
                last = contact.stat().st_mtime_ns if contact.exists() else 0
                wait_until(
                    lambda last=last: contact.exists() and contact.stat().st_mtime_ns > last,
                    "an answer",
                    check=check,
                )
            out, _ = process.communicate(timeout=120)
    assert json.loads(out) == {}
