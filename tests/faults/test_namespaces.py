"""A stranger on the network of a running federation: which ports answer, with what, and what a flood costs a silo."""

import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aggregator.runtime.proxy import find_nginx
from tests.support.case import case
from tests.support.namespaces import AVAILABLE, Switch, network_switch
from tests.support.operators import SHARD_BYTES, Operators, set_up_federation

ROOT = Path(__file__).parents[2]
ADDRESSES = {"aggregator": "10.213.8.1", "silo": "10.213.8.2", "stranger": "10.213.8.3"}
# Some 20 MB in messages of 64 KiB: more than the silo sends while it is watched.
ARCHITECTURE = {"hidden": 256, "heads": 4, "depth": 4}
# What an answer would tell a stranger about the programs, the plan or who takes part.
TELLING = (
    "flower",
    "flwr",
    "superlink",
    "uvicorn",
    "starlette",
    "python",
    "nginx/",
    "traceback",
    "north",
    "south",
    "two-",
)
NUM_MESSAGES = 3
STALLED_S = 200.0
NUM_ROUNDS = 5
# Idle and slow connections. A thousand of each at once: what one of the two does alone is less.
FLOODS = {"none": "0 0", "both": "1000 1000"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not AVAILABLE or not shutil.which("ss") or find_nginx() is None,
        reason="needs root and iproute2 for network namespaces, and nginx to serve beyond loopback",
    ),
]


class NetworkedFederation:
    """An aggregator on one host, a silo that sends its submission on another, a stranger on a third."""

    def __init__(self, operators: Operators, switch: Switch) -> None:
        self.operators = operators
        self.switch = switch

    @property
    def port(self) -> int:
        """The port that the aggregator announces."""
        address = json.loads((self.operators.fed / "invitation.json").read_text())["address"]
        return int(address.rpartition(":")[2])

    def received(self) -> int:
        """How many bytes of the submission are at the aggregator."""
        progress = next(self.operators.fed.glob("incoming/*/north/1.part/.progress.json"), None)
        if progress is None:
            return 0
        ranges = json.loads(progress.read_text())["ranges"]
        return sum(end - start for spans in ranges.values() for start, end in spans)

    def stranger(self, *arguments: object) -> list[str]:
        """The command of a stranger who does something."""
        words = [str(argument) for argument in arguments]
        return [
            *self.switch.command_prefix("stranger"),
            sys.executable,
            "-m",
            "tests.support.network_stranger",
            *words,
        ]

    def ask_stranger(self, *arguments: object) -> dict[str, Any]:
        """Let the stranger do something, and return what it found."""
        result = subprocess.run(
            self.stranger(*arguments),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=300,
        )
        return json.loads(result.stdout)  # type: ignore[no-any-return]

    def rate(self) -> float:
        """Messages of 64 KiB that arrive from the silo in a second, from one arrival to a later one."""
        first = self.arrival(self.received())
        started = time.monotonic()
        last = self.arrival(first + NUM_MESSAGES * SHARD_BYTES - 1)
        return (last - first) / SHARD_BYTES / (time.monotonic() - started)

    def arrival(self, beyond: int) -> int:
        """Wait until more than so many bytes are at the aggregator; return how many are."""
        seen = 0

        def look() -> bool:
            nonlocal seen
            seen = self.received()
            assert seen, "the submission is there: make it larger"
            return seen > beyond

        self.operators.wait_until(look, "the next message of the silo", limit_s=STALLED_S)
        return seen


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkedFederation]:
    with network_switch(ADDRESSES) as switch:
        prefix = {
            "aggregator": switch.command_prefix("aggregator"),
            "north": switch.command_prefix("silo"),
        }
        operators = Operators(tmp_path_factory.mktemp("namespaces"), prefix)
        try:
            set_up_federation(
                operators, host=ADDRESSES["aggregator"], num_steps=2, architecture=ARCHITECTURE
            )
            operators.serve("aggregator", "aggregator", "run", operators.fed)
            operators.serve("north", "silo", "run", operators.folder / "north")
            networked = NetworkedFederation(operators, switch)
            operators.wait_until(
                lambda: networked.received() > 4 * SHARD_BYTES, "the submission on its way"
            )
            yield networked
        finally:
            operators.stop()


@contextmanager
def flood(federation: NetworkedFederation) -> Iterator[Callable[[str], int]]:
    """The stranger's connections; call with numbers of idle and slow ones to get so many, and the number held."""
    command = federation.stranger("flood", ADDRESSES["aggregator"], federation.port)
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout
        stdin = process.stdin
        stdout = process.stdout

        def hold(numbers: str) -> int:
            stdin.write(f"{numbers}\n")
            stdin.flush()
            return int(stdout.readline())

        try:
            yield hold
        finally:
            process.kill()


def test_flood_of_idle_and_slow_connections_leaves_a_silo_half_its_rate(
    federation: NetworkedFederation,
) -> None:
    rates: dict[str, list[float]] = {name: [] for name in FLOODS}
    with flood(federation) as hold:
        for _ in range(NUM_ROUNDS):
            for name, numbers in FLOODS.items():
                held = hold(numbers)
                rates[name].append(federation.rate())
                print(f"{name}: {held} connections, {rates[name][-1]:.2f} messages/s")
    medians = {name: statistics.median(samples) for name, samples in rates.items()}
    print(medians)
    assert medians["both"] >= medians["none"] / 2, rates
    assert federation.operators.num_restarts == {"aggregator": 0, "north": 0}


def test_stranger_finds_one_open_port_and_none_at_the_silo(federation: NetworkedFederation) -> None:
    switch = federation.switch
    reachable = {host: switch.reachable_addresses(host) for host in ("aggregator", "silo")}
    assert all(ADDRESSES[host] in addresses for host, addresses in reachable.items())
    print(reachable)
    open_ports = federation.ask_stranger("scan", *reachable["aggregator"], *reachable["silo"])
    announced = {ADDRESSES["aggregator"]: [federation.port]}
    assert open_ports == {
        address: announced.get(address, [])
        for addresses in reachable.values()
        for address in addresses
    }
    assert [switch.sockets("aggregator", kind) for kind in ("tcp", "udp")] == [
        [f"{ADDRESSES['aggregator']}:{federation.port}"],
        [],
    ]
    assert [switch.sockets("silo", kind) for kind in ("tcp", "udp")] == [[], []]


def test_open_port_tells_a_stranger_nothing(federation: NetworkedFederation) -> None:
    answers = federation.ask_stranger("ask", ADDRESSES["aggregator"], federation.port)
    assert answers["flower"] == {}
    assert len(answers["answers"]) > 20
    for request, answer in answers["answers"].items():
        with case(request=request):
            head, _, body = answer.partition("\r\n\r\n")
            assert (
                re.match(r"HTTP/1\.1 (400|401|403|404) ", head) and "\r\nServer: nginx\r\n" in head
            )
            assert len(answer) < 600, answer
            telling_words = [word for word in TELLING if word in (head + body).lower()]
            assert not telling_words, answer
