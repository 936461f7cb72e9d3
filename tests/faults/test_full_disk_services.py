"""A disk that is full from the n-th write of a service on: it says so, and goes on to the same end when there is room.

The services of one federation: `aggregator run` with all that it starts (SuperLink, superexec, ServerApp, intake,
proxy), and the worker and the courier of a silo. A service and its children are counted together.
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.test_kill import check_nothing_lost_or_doubled, check_published_once
from tests.support.faulty_disk import NEEDS_COMPILER, Fault, build_library, read_call_count
from tests.support.operators import (
    Operators,
    all_services_ended,
    serve_everything,
    set_up_federation,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), NEEDS_COMPILER]
SERVICES = {"aggregator": "fed", "north-worker": "north", "north-courier": "north"}
FULL_S = 10.0  # how long the disk stays full where nobody says so: some writes are worth no word
DOCUMENTED = {None, 0, 8, 9, 40}


@pytest.fixture
def operators(tmp_path: Path) -> Iterator[Operators]:
    operators = Operators(tmp_path)
    yield operators
    operators.stop()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("library"))


def disturb(operators: Operators, library: Path, service: str, at: int) -> None:
    """Let a service find the disk full at a call."""
    folder = operators.folder
    fault = Fault([folder / SERVICES[service]], at, folder / "full")
    variables = {"LD_PRELOAD": str(library), **fault.environment(folder / f"{service}.count")}
    operators.prefix[service] = ["env", *(f"{name}={value}" for name, value in variables.items())]


@pytest.fixture(scope="module")
def num_calls(library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How many calls each service makes where nothing happens."""
    operators = Operators(tmp_path_factory.mktemp("counting"))
    try:
        set_up_federation(operators)
        for service in SERVICES:
            disturb(operators, library, service, 0)
        serve_everything(operators)
        operators.wait_until(lambda: all_services_ended(operators), "the end")
    finally:
        operators.stop()
    return {service: read_call_count(operators.folder / f"{service}.count") for service in SERVICES}


def point_of(seed: int, num_calls: dict[str, int]) -> tuple[str, int]:
    """Return which service finds the disk full, and at which call; early calls are as likely as late ones."""
    service = list(SERVICES)[seed % len(SERVICES)]
    return service, random.Random(seed).randint(1, num_calls[service])


@pytest.mark.parametrize("seed", range(12))
def test_federation_ends_as_if_nothing_had_happened_when_a_service_finds_the_disk_full(
    seed: int, operators: Operators, library: Path, num_calls: dict[str, int]
) -> None:
    service, at = point_of(seed, num_calls)
    full = operators.folder / "full"
    count = operators.folder / f"{service}.count"
    set_up_federation(operators)
    disturb(operators, library, service, at)
    full.touch()
    serve_everything(operators)
    over = lambda: read_call_count(count) >= at or all_services_ended(operators)  # noqa: E731
    operators.wait_until(over, f"call {at} of the {service}")
    until = time.monotonic() + FULL_S
    said = lambda: "No space left" in operators.running[service].log_tail()  # noqa: E731
    operators.wait_until(lambda: said() or time.monotonic() > until, "a word about the disk")
    assert operators.running[service].returncode in DOCUMENTED, operators.logs()
    full.unlink()
    operators.wait_until(lambda: all_services_ended(operators), "the end")
    assert "Traceback" not in operators.logs()
    check_published_once(operators, check_nothing_lost_or_doubled(operators))
