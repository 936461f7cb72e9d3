"""A network that fails for longer than any message lives: the transfer goes on where it was."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.test_kill import check_nothing_lost_or_doubled, check_published_once
from tests.support.operators import (
    SILOS,
    Operators,
    all_services_ended,
    serve_everything,
    set_up_federation,
)

CUT_S = 90.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("nginx"),
        reason="needs root and iproute2 for network namespaces, and nginx to serve beyond loopback",
    ),
]


class Cable:
    """Two hosts, joined by one cable: the aggregator's, with an address, and the silos'."""

    host = "10.213.7.1"

    def __init__(self) -> None:
        self.ends = {name: f"arch{os.getpid()}{name}" for name in ("a", "s")}

    def lay(self) -> None:
        for name in self.ends.values():
            self._ip("netns", "add", name)
            self._ip("-n", name, "link", "set", "lo", "up")
        a, s = self.ends.values()
        self._ip(
            "link",
            "add",
            "cable0",
            "netns",
            a,
            "type",
            "veth",
            "peer",
            "name",
            "cable0",
            "netns",
            s,
        )
        for name, address in ((a, self.host), (s, "10.213.7.2")):
            self._ip("-n", name, "address", "add", f"{address}/24", "dev", "cable0")
            self._ip("-n", name, "link", "set", "cable0", "up")

    def plug(self, state: str) -> None:
        """Pull the plug (`down`) or put it back (`up`)."""
        self._ip("-n", self.ends["a"], "link", "set", "cable0", state)

    def remove(self) -> None:
        for name in self.ends.values():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def inside(self, end: str) -> list[str]:
        """What a command begins with that runs on that host."""
        return ["ip", "netns", "exec", self.ends[end]]

    @staticmethod
    def _ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def cable() -> Iterator[Cable]:
    network_cable = Cable()
    try:
        network_cable.lay()
        yield network_cable
    finally:
        network_cable.remove()


@pytest.fixture
def operators(tmp_path: Path, cable: Cable) -> Iterator[Operators]:
    couriers = {f"{silo}-courier": cable.inside("s") for silo in SILOS}
    operators = Operators(tmp_path, {"aggregator": cable.inside("a"), **couriers})
    yield operators
    operators.stop()


def test_transfer_goes_on_after_the_network_was_cut_for_90_seconds(
    operators: Operators, cable: Cable
) -> None:
    set_up_federation(operators, host=cable.host)
    serve_everything(operators)
    arriving = lambda: next(operators.fed.glob("incoming/*/*/1*"), None) is not None  # noqa: E731
    operators.wait_until(arriving, "the first shard")
    cable.plug("down")
    over = time.monotonic() + CUT_S
    operators.wait_until(lambda: time.monotonic() > over, "the end of the cut")
    assert not all_services_ended(operators)
    cable.plug("up")
    operators.wait_until(lambda: all_services_ended(operators), "the end")
    check_published_once(operators, check_nothing_lost_or_doubled(operators))
