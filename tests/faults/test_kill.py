"""Kill -9 of any process, whenever something appears on disk: everything arrives once, unchanged.

Each seed picks a process and an event. The services are started again as a service manager would; nothing is repaired
by hand.
"""

import hashlib
import json
import os
import random
import re
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
# Of a training that goes on for some seconds.
LONG_STEPS = 800
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


def run_with_a_kill(operators: Operators, victim: str, event: str) -> None:
    """Run the federation to its end, one process killed on the way."""
    set_up_federation(operators)
    serve_everything(operators)
    seen: Callable[[], bool] = lambda: next(operators.folder.glob(EVENTS[event]), None) is not None  # noqa: E731
    operators.wait_until(seen, event)
    # On a busy machine a silo may be ahead of a program of the aggregator that is still starting.
    operators.wait_until(lambda: kill(operators, victim), f"{victim} to kill once {event}")
    operators.wait_until(
        lambda: all_services_ended(operators), f"the end after a kill of the {victim}"
    )


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
    run_with_a_kill(operators, "intake", "the first shard arrived")
    check_published_once(operators, check_nothing_lost_or_doubled(operators))


def run_long_training(operators: Operators, *, kills: bool) -> dict[str, str]:
    """Run a federation of `silo run` with both halves, and perhaps kill one in mid-training; return its experts."""
    # The clock saves: less than the ten seconds after which the first checkpoint is due by default.
    set_up_federation(operators, num_steps=LONG_STEPS, checkpoint_s=0.5)
    operators.serve("aggregator", "aggregator", "run", operators.fed)
    for silo in SILOS:
        # Named as the service that `all_services_ended` waits for.
        operators.serve(f"{silo}-worker", "silo", "run", operators.folder / silo)
    if kills:
        log = operators.folder / "logs" / "north-worker.log"
        operators.wait_until(lambda: last_saved_step(operators) > 0, "a checkpoint")
        os.kill(operators.running["north-worker"].pid, signal.SIGKILL)
        operators.running["north-worker"].wait(60)
        saved_step = last_saved_step(operators)
        num_bytes = log.stat().st_size
        # First it says again what it had reported last.
        operators.wait_until(lambda: len(steps_in(log, num_bytes)) > 1, "progress after the kill")
        assert steps_in(log, num_bytes)[1] > saved_step > 0
    operators.wait_until(lambda: all_services_ended(operators), "the end")
    return check_nothing_lost_or_doubled(operators)


def last_saved_step(operators: Operators) -> int:
    """The step of the newest checkpoint of north's training; 0 where there is none."""
    names = operators.folder.glob("north/private/checkpoints/**/step-*.json")
    return max((int(path.stem.removeprefix("step-")) for path in names), default=0)


def steps_in(log: Path, offset: int) -> list[int]:
    """The steps that a worker reported in its log from some byte on."""
    text = log.read_bytes()[offset:].decode()
    return [int(step) for step in re.findall(rf"(\d+)/{LONG_STEPS} steps", text)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_silo_run_killed_in_training_goes_on_from_its_checkpoint_when_it_is_run_again(
    operators: Operators, tmp_path: Path
) -> None:
    """The tutorial's promise, in a federation; a default test without one is in tests/test_commands.py."""
    killed = run_long_training(operators, kills=True)
    (tmp_path / "control").mkdir()
    control = Operators(tmp_path / "control")
    try:
        assert run_long_training(control, kills=False) == killed
    finally:
        control.stop()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(20))
def test_federation_ends_as_if_nothing_had_happened_when_any_process_is_killed(
    seed: int, operators: Operators, undisturbed: dict[str, str]
) -> None:
    victim, event = pair_of(seed)
    run_with_a_kill(operators, victim, event)
    digests = check_nothing_lost_or_doubled(operators)
    assert digests == undisturbed
    check_published_once(operators, digests)


def test_seeds_kill_every_process() -> None:
    assert {pair_of(seed)[0] for seed in range(20)} == set(VICTIMS)
    assert len({pair_of(seed) for seed in range(20)}) > 10
