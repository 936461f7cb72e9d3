"""Kill -9 of any process, whenever something appears on disk: everything arrives once, unchanged.

Each seed picks a process and an event. The services are started again as a service manager would; nothing is repaired
by hand.
"""

import hashlib
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.operators import (
    SILOS,
    Operators,
    all_services_ended,
    serve_everything,
    set_up_federation,
)

VICTIMS: dict[str, tuple[str, str]] = {
    "SuperLink": ("aggregator", "runtime/superlink.py"),
    "superexec": ("aggregator", "ddm.transport.superexec"),
    "ServerApp": ("aggregator", "bin/flwr-serverapp"),
    "intake": ("aggregator", "aggregator.runtime.intake_process"),
    "SuperNode": ("north-courier", "courier/node.py"),
    "courier": ("north-courier", ""),
    "worker": ("north-worker", ""),
}
EVENTS: dict[str, str] = {
    "the plan arrived": "north/inbox/*/bundle",
    "a checkpoint was written": "north/private/checkpoints/**/*.safetensors",
    "noise was debited": "north/private/ledger.jsonl",
    "the submission may leave": "north/outbox/*/1",
    "the first shard arrived": "fed/incoming/*/north/1*",
    "the submission was taken in": "fed/accepted/*/north",
    "the receipt was signed": "fed/receipts/*/north/1.json",
}
PAIRS = [(victim, event) for victim in VICTIMS for event in EVENTS]


def pair_of(seed: int) -> tuple[str, str]:
    """Any 7 seeds in a row kill every process once; the events are shuffled."""
    order = random.Random(seed // len(VICTIMS)).sample(list(VICTIMS), len(VICTIMS))
    return order[seed % len(VICTIMS)], random.Random(seed).choice(list(EVENTS))


@pytest.fixture
def operators(tmp_path: Path) -> Iterator[Operators]:
    operators = Operators(tmp_path)
    yield operators
    operators.stop()


def kill(operators: Operators, victim: str) -> bool:
    """Kill one process and say whether it was there."""
    service, pattern = VICTIMS[victim]
    if operators.ended_well(service):
        return False
    pids = operators.pids(service, pattern) if pattern else [operators.running[service].pid]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return bool(pids)


def run_with_a_kill(operators: Operators, victim: str, event: str) -> bool:
    """Run the federation to its end, one process killed on the way; return whether it was killed."""
    set_up_federation(operators)
    serve_everything(operators)
    seen: Callable[[], bool] = lambda: next(operators.folder.glob(EVENTS[event]), None) is not None  # noqa: E731
    operators.wait_until(seen, event)
    killed = kill(operators, victim)
    operators.wait_until(
        lambda: all_services_ended(operators), f"the end after a kill of the {victim}"
    )
    return killed


def check_nothing_lost_or_doubled(operators: Operators) -> dict[str, str]:
    """Return the digest of every expert after the checks."""
    plan_id = operators.plan_id
    folder = operators.folder
    digests = {}
    for silo in SILOS:
        assert (
            json.loads((folder / silo / "private" / "state.json").read_text())["state"]
            == "accepted"
        )
        records = [
            json.loads(line)
            for line in (folder / silo / "private" / "ledger.jsonl").read_text().splitlines()
        ]
        debits = [record["number"] for record in records if record["record"] == "debit"]
        drawn = sorted(record["kind"] for record in records if record["record"] == "draw")
        assert (len(debits), drawn) == (1, ["counts", "sketch"])
        receipts = sorted(
            path.name for path in (operators.fed / "receipts" / plan_id / silo).glob("*.json")
        )
        assert receipts == ["1.json"]
        name = f"silos/{silo}/experts/{silo}/expert.safetensors"
        sent = (folder / silo / "outbox" / plan_id / "1" / name).read_bytes()
        assert (operators.fed / "accepted" / plan_id / silo / name).read_bytes() == sent
        digests[silo] = hashlib.sha256(sent).hexdigest()
    return digests


def check_published_once(operators: Operators, digests: dict[str, str]) -> None:
    operators.call("aggregator", "router", operators.fed)
    operators.call(
        "aggregator", "publish", operators.fed, "--rehearsal", "--out", operators.folder / "release"
    )
    assert sorted(
        path.name for path in (operators.fed / "releases").iterdir() if path.name.isdigit()
    ) == ["1"]
    trust = (
        "--root",
        operators.fed / "tuf" / "metadata" / "1.root.json",
        "--state",
        operators.folder / "state",
    )
    operators.call("ddm", "verify", operators.folder / "release", *trust)
    published = operators.folder / "release" / "targets" / operators.plan_id
    for silo, digest in digests.items():
        expert = (published / f"silos/{silo}/experts/{silo}/expert.safetensors").read_bytes()
        assert hashlib.sha256(expert).hexdigest() == digest


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The experts of a federation where nothing was killed."""
    operators = Operators(tmp_path_factory.mktemp("undisturbed"))
    try:
        set_up_federation(operators)
        serve_everything(operators)
        operators.wait_until(lambda: all_services_ended(operators), "the end")
        return check_nothing_lost_or_doubled(operators)
    finally:
        operators.stop()


@pytest.mark.slow  # tests/integration/test_federation.py kills intake as well, and is never left out
def test_federation_ends_as_if_nothing_had_happened_when_intake_is_killed(
    operators: Operators,
) -> None:
    assert run_with_a_kill(operators, "intake", "the first shard arrived")
    check_published_once(operators, check_nothing_lost_or_doubled(operators))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(20))
def test_federation_ends_as_if_nothing_had_happened_when_any_process_is_killed(
    seed: int, operators: Operators, undisturbed: dict[str, str]
) -> None:
    victim, event = pair_of(seed)
    assert run_with_a_kill(operators, victim, event), f"{victim} was not there when {event}"
    digests = check_nothing_lost_or_doubled(operators)
    assert digests == undisturbed
    check_published_once(operators, digests)


def test_seeds_kill_every_process() -> None:
    assert {pair_of(seed)[0] for seed in range(20)} == set(VICTIMS)
    assert len({pair_of(seed) for seed in range(20)}) > 10
