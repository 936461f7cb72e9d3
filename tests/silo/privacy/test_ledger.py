import contextlib
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ddm.errors import BudgetError, LedgerError
from ddm.privacy.accounting import (
    DiscreteLaplaceMechanism,
    GaussianMechanism,
    adaptive_epsilon,
    gaussian_mu,
    total_epsilon,
)
from ddm.protocol.base import Unit, now_utc, sha256_hex
from ddm.protocol.statistics import Budget
from ddm.protocol.submission import LedgerHead
from silo.privacy.ledger import Debit, Ledger, LedgerEntry, make_ledger
from tests.support.bounded import slowness
from tests.support.errors import has_subject
from tests.support.fork_server import CONTEXT

PLAN = "digits-0000abcd"
COUNTS = DiscreteLaplaceMechanism(epsilon=1.0)
SKETCH = GaussianMechanism(mu=0.5)
WHOLE = {"counts": COUNTS, "sketch": SKETCH}


def digest(text: str) -> str:
    return sha256_hex(text.encode())


def open_ledger(
    folder: Path, epsilon: float = 10.0, delta: float = 1e-5, unit: Unit = "image"
) -> Ledger:
    folder.mkdir(parents=True, exist_ok=True)
    make_ledger(folder / "ledger.jsonl")
    return Ledger(folder / "ledger.jsonl", budget=Budget(epsilon=epsilon, delta=delta), unit=unit)


def spend(
    ledger: Ledger,
    plan: str = "plan 1",
    dataset: str = "data 1",
    mechanisms=None,
    unit: Unit = "image",
) -> LedgerEntry:
    return ledger.spend(PLAN, digest(plan), digest(dataset), unit, mechanisms or {"counts": COUNTS})


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """Three debits, the first of them drawn."""
    ledger = open_ledger(tmp_path)
    first = spend(ledger)
    ledger.record_draw(first, "counts", digest("file"))
    spend(ledger, "plan 2")
    spend(ledger, "plan 3")
    return ledger


def test_ledger_head_is_what_a_submission_carries(ledger: Ledger) -> None:
    head_digest, num_entries, chain = ledger.head
    LedgerHead(head_digest=head_digest, num_entries=num_entries, chain=chain)
    assert num_entries == 4
    lines = ledger.path.read_bytes().splitlines()
    assert chain == tuple(sha256_hex(line) for line in lines)
    assert [json.loads(line)["number"] for line in lines] == [1, 2, 3, 4]
    assert [json.loads(line)["previous"] for line in lines[1:]] == list(chain[:-1])


def test_ledger_only_grows_and_survives_reopening(ledger: Ledger, tmp_path: Path) -> None:
    _, _, before = ledger.head
    again = open_ledger(tmp_path)
    spend(again, "plan 4")
    assert again.head[2][: len(before)] == before
    assert again.spent() == (4.0, 1e-5)
    assert again.spent(digest("plan 4"))[0] == 1.0


def test_same_release_is_debited_once_when_a_worker_asks_again(
    ledger: Ledger, tmp_path: Path
) -> None:
    first = spend(ledger)
    assert spend(open_ledger(tmp_path)) == first
    assert ledger.head[1] == 4
    assert ledger.draw_of(first, "counts") == digest("file")


@pytest.mark.parametrize(
    "other", [{"counts": DiscreteLaplaceMechanism(epsilon=0.5)}, WHOLE, {"sketch": SKETCH}]
)
def test_same_plan_with_other_mechanisms_is_refused(ledger: Ledger, other) -> None:
    with pytest.raises(LedgerError, match="first debited"):
        spend(ledger, mechanisms=other)
    with pytest.raises(LedgerError, match="first debited"):
        spend(ledger, unit="patient")


def test_plan_is_debited_whole_before_its_first_draw(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    debit = spend(ledger, mechanisms=WHOLE)
    whole = total_epsilon(WHOLE.values(), 1e-5)
    assert whole > 1.5
    assert ledger.spent()[0] == ledger.spent(digest("plan 1"))[0] == whole  # nothing was drawn yet
    for kind in ("counts", "sketch"):
        ledger.record_draw(debit, kind, digest(kind))
    assert spend(ledger, mechanisms=dict(reversed(WHOLE.items()))) == debit
    assert ledger.spent()[0] == whole
    assert ledger.draw_of(debit, "sketch") == digest("sketch")
    assert ledger.head[1] == 3


def test_dataset_changed_by_one_image_is_debited_again(ledger: Ledger) -> None:
    before = ledger.spent()[0]
    assert spend(ledger, dataset="data 2") != spend(ledger)
    assert ledger.spent()[0] == pytest.approx(before + 1.0, rel=1e-3)


def test_budget_covers_all_plans_and_a_release_over_it_is_not_debited(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, epsilon=2.0)
    spend(ledger, "plan 1")
    spend(ledger, "plan 2")  # exactly the budget is enough
    with pytest.raises(BudgetError, match="at most 2") as caught:
        spend(ledger, "plan 3")
    assert caught.value.exit_code == 32
    assert ledger.head[1] == 2
    assert spend(ledger, "plan 1").record.number == 1  # what is paid for stays paid for


def test_what_is_left_is_what_a_further_debit_may_cost(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, epsilon=5.0)
    assert ledger.left() == 5.0
    sketch = GaussianMechanism(mu=gaussian_mu(3.0, 1e-5))
    spend(ledger, mechanisms={"sketch": sketch})
    assert ledger.spent()[0] == pytest.approx(3.0)
    # Followed by another debit, it counts at half of delta.
    left = ledger.left()
    assert left == 5.0 - total_epsilon([sketch], 1e-5 / 2)
    assert 1.8 < left < 1.95
    with pytest.raises(BudgetError):
        spend(ledger, "plan 2", mechanisms={"counts": DiscreteLaplaceMechanism(epsilon=2.0)})
    spend(ledger, "plan 2", mechanisms={"counts": DiscreteLaplaceMechanism(epsilon=left)})
    assert ledger.left() < 1e-9


def test_budget_without_delta_refuses_every_gaussian(tmp_path: Path) -> None:
    with pytest.raises(BudgetError):
        spend(open_ledger(tmp_path, delta=0.0), mechanisms={"sketch": SKETCH})


def test_total_is_that_of_plans_chosen_in_the_light_of_earlier_ones(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, epsilon=100.0)
    for plan in range(4):
        spend(ledger, str(plan), mechanisms=WHOLE)
    steps = [tuple(WHOLE.values())] * 4
    assert ledger.spent()[0] == adaptive_epsilon(steps, 1e-5)
    # as if fixed in advance
    assert ledger.spent()[0] > 1.1 * total_epsilon([m for step in steps for m in step], 1e-5)


def test_total_follows_the_order_of_debits_and_not_of_draws(tmp_path: Path) -> None:
    small = {"sketch": GaussianMechanism(mu=0.2)}
    large = {"sketch": GaussianMechanism(mu=1.5)}
    totals = []
    for name, order in (("a", (small, large)), ("b", (large, small))):
        ledger = open_ledger(tmp_path / name)
        debits = [
            spend(ledger, str(number), mechanisms=mechanisms)
            for number, mechanisms in enumerate(order)
        ]
        before = ledger.spent()[0]
        for debit in reversed(debits):
            ledger.record_draw(debit, "sketch", digest("file"))
        assert ledger.spent()[0] == before
        totals.append(before)
    steps = [(small["sketch"],), (large["sketch"],)]
    assert totals == [adaptive_epsilon(steps, 1e-5), adaptive_epsilon(steps[::-1], 1e-5)]


def test_affordable_plan_is_one_that_the_ledger_then_debits(tmp_path: Path) -> None:
    cost = adaptive_epsilon([(COUNTS,), tuple(WHOLE.values())], 1e-5)
    for number, (budget, fits) in enumerate([(cost, True), (cost * 0.999, False)]):
        ledger = open_ledger(tmp_path / str(number), epsilon=budget)
        spend(ledger, "plan 1")
        ask = (digest("plan 2"), digest("data 1"), WHOLE)
        if fits:
            ledger.check_affordable(*ask)
            spend(ledger, "plan 2", mechanisms=WHOLE)
            ledger.check_affordable(*ask)  # paid for
        else:
            with pytest.raises(BudgetError, match="with this plan"):
                ledger.check_affordable(*ask)
            with pytest.raises(BudgetError):
                spend(ledger, "plan 2", mechanisms=WHOLE)
        assert ledger.head[1] == 1 + fits


@pytest.mark.measured
def test_ledger_of_fifty_different_plans_is_checked_in_seconds(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, epsilon=1000.0)
    steps = [
        {
            "counts": DiscreteLaplaceMechanism(epsilon=0.2),
            "sketch": GaussianMechanism(mu=0.1 + 0.002 * number),
        }
        for number in range(50)
    ]
    with ledger._locked() as entries:  # as spend writes them, without weighing each one on the way
        for number, mechanisms in enumerate(steps):
            previous = entries[-1].digest if entries else sha256_hex(b"archipelago/ledger/1")
            debit = Debit(
                number=number + 1,
                previous=previous,
                at=now_utc(),
                unit="image",
                plan_id=PLAN,
                plan_digest=digest(str(number)),
                mechanisms=mechanisms,
                dataset_digest=digest("data 1"),
            )
            entries = (*entries, ledger._append(debit))
    slow = slowness()
    start = time.process_time()
    ledger.check_affordable(digest("plan 51"), digest("data 1"), WHOLE)
    assert time.process_time() - start < 6 * slow


def test_draw_is_recorded_once_and_only_for_a_debit_of_this_ledger(
    ledger: Ledger, tmp_path: Path
) -> None:
    with pytest.raises(LedgerError, match="second"):
        ledger.record_draw(spend(ledger), "counts", digest("another file"))
    with pytest.raises(LedgerError, match="no such debit"):
        ledger.record_draw(spend(ledger), "sketch", digest("file"))  # the debit is for counts alone
    foreign = spend(open_ledger(tmp_path / "other"), "plan 9")
    with pytest.raises(LedgerError, match="no such debit"):
        ledger.record_draw(foreign, "counts", digest("file"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"epsilon":1', b'"epsilon":0.1'),
        (b'"number":1', b'"number":2'),
        (b'"image"', b'"images"'),
        (b'"kind":"discrete', b'"kind": "discrete'),
        (b'"relation"', b'"extra":1,"relation"'),
    ],
)
def test_edited_line_is_refused(ledger: Ledger, old: bytes, new: bytes) -> None:
    data = ledger.path.read_bytes()
    assert old in data
    ledger.path.write_bytes(data.replace(old, new, 1))
    with pytest.raises(LedgerError) as caught:
        ledger.verify()
    assert caught.value.exit_code == 35
    with pytest.raises(LedgerError):
        spend(ledger, "plan 4")


def test_every_flipped_byte_is_refused(ledger: Ledger) -> None:
    data = ledger.path.read_bytes()
    for place in range(0, len(data), 37):
        changed = bytearray(data)
        changed[place] ^= 1
        ledger.path.write_bytes(changed)
        with pytest.raises(LedgerError):
            ledger.verify()
    ledger.path.write_bytes(data)
    ledger.verify()


def test_line_with_a_name_twice_is_refused(ledger: Ledger) -> None:
    data = ledger.path.read_bytes()
    ledger.path.write_bytes(data.replace(b'{"at"', b'{"at":"2026-01-01T00:00:00Z","at"', 1))
    with pytest.raises(LedgerError):
        ledger.verify()


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_truncated_ledger_is_refused(ledger: Ledger, keep: int) -> None:
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    ledger.path.write_bytes(b"".join(lines[:keep]))
    with pytest.raises(LedgerError, match="4 records"):
        ledger.verify()


def test_ledger_cut_within_its_last_acknowledged_line_is_refused(ledger: Ledger) -> None:
    ledger.path.write_bytes(ledger.path.read_bytes()[:-10])
    with pytest.raises(LedgerError, match="4 records"):
        ledger.verify()


def test_removed_ledger_is_refused(ledger: Ledger) -> None:
    ledger.path.unlink()
    with pytest.raises(LedgerError):
        ledger.verify()


def test_removed_head_is_refused(ledger: Ledger) -> None:
    ledger.path.with_suffix(".head").unlink()
    with pytest.raises(LedgerError, check=has_subject("head")):
        ledger.verify()


def test_ledger_and_head_removed_together_are_refused_because_its_draws_remain(
    ledger: Ledger,
) -> None:
    ledger.path.unlink()
    ledger.path.with_suffix(".head").unlink()
    with pytest.raises(LedgerError):
        ledger.verify()


def test_replaced_head_is_refused(ledger: Ledger, tmp_path: Path) -> None:
    other = open_ledger(tmp_path / "other")
    for plan in range(4):
        spend(other, f"other {plan}")
    ledger.path.with_suffix(".head").write_bytes(other.path.with_suffix(".head").read_bytes())
    with pytest.raises(LedgerError, check=has_subject("head")):
        ledger.verify()


def test_head_of_two_records_ago_is_refused(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    spend(ledger, "plan 1")
    old = ledger.path.with_suffix(".head").read_bytes()
    spend(ledger, "plan 2")
    spend(ledger, "plan 3")
    ledger.path.with_suffix(".head").write_bytes(old)
    with pytest.raises(LedgerError, match="got 3 records"):
        ledger.verify()


def test_crash_between_line_and_head_counts_as_spent(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    spend(ledger, "plan 1")
    head = ledger.path.with_suffix(".head")
    old = head.read_bytes()
    spend(ledger, "plan 2")
    head.write_bytes(old)  # as if the power went before the head was written
    assert ledger.spent()[0] == pytest.approx(2.0, rel=1e-3)
    assert json.loads(head.read_bytes())["num_entries"] == 2


@pytest.mark.parametrize("torn", [b'{"at":"2026', b"\0" * 200])
def test_half_line_behind_the_head_is_removed_because_no_noise_was_drawn_for_it(
    ledger: Ledger, torn: bytes
) -> None:
    data = ledger.path.read_bytes()
    ledger.path.write_bytes(data + torn)
    ledger.verify()
    assert ledger.path.read_bytes() == data
    spend(ledger, "plan 4")
    ledger.verify()


def test_whole_foreign_line_behind_the_head_is_refused(ledger: Ledger) -> None:
    ledger.path.write_bytes(ledger.path.read_bytes() + b"garbage\n")
    with pytest.raises(LedgerError):
        ledger.verify()


def test_ledger_by_patient_refuses_releases_by_image_and_one_by_image_counts_both(
    tmp_path: Path,
) -> None:
    ledger = open_ledger(tmp_path)
    spend(ledger, "plan 1", unit="patient")
    open_ledger(tmp_path, unit="patient").verify()  # so far only patients' releases
    spend(ledger, "plan 2", unit="image")
    assert ledger.spent()[0] == 2.0
    with pytest.raises(LedgerError, check=has_subject("ledger record 2")) as caught:
        open_ledger(tmp_path, unit="patient").verify()
    assert "privacy.unit back to image" in caught.value.remedy


def test_plan_by_image_is_never_debited_to_a_ledger_by_patient(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path, unit="patient")
    with pytest.raises(LedgerError, check=has_subject("plan")):
        spend(ledger, unit="image")
    assert ledger.path.read_bytes() == b""
    assert spend(ledger, unit="patient").record.unit == "patient"


def test_failed_write_is_refused_and_leaves_a_ledger_that_verifies(
    ledger: Ledger, monkeypatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(LedgerError, match="durable"):
            spend(ledger, "plan 4")
    ledger.verify()
    assert ledger.head[1] in (4, 5)
    assert spend(ledger, "plan 4").record.number == 5


def _spend_many(folder: str, worker: int, barrier) -> None:
    ledger = open_ledger(Path(folder), epsilon=1000.0)
    barrier.wait(60)
    for plan in range(8):
        spend(ledger, f"worker {worker} plan {plan}")
        spend(ledger, f"shared plan {plan}")


def test_two_processes_that_spend_at_once_lose_nothing_and_pay_shared_releases_once(
    tmp_path: Path,
) -> None:
    barrier = CONTEXT.Barrier(2)
    workers = [
        CONTEXT.Process(target=_spend_many, args=(str(tmp_path), worker, barrier))
        for worker in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    ledger = open_ledger(tmp_path, epsilon=1000.0)
    ledger.verify()
    assert ledger.head[1] == 24  # 8 of each worker and 8 shared
    assert ledger.spent()[0] == pytest.approx(24.0)


def test_ledger_that_several_make_at_once_is_made_once(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(20)]
    barrier = threading.Barrier(4)

    def make(_: int) -> None:
        for folder in folders:
            barrier.wait(60)
            spend(open_ledger(folder))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(make, range(4)))
    assert [open_ledger(folder).head[1] for folder in folders] == [1] * len(folders)


def _spend_last(folder: str, worker: int, barrier, refused) -> None:
    ledger = open_ledger(Path(folder), epsilon=1.0)
    barrier.wait(60)
    try:
        spend(ledger, f"worker {worker}")
    except BudgetError:
        with refused.get_lock():
            refused.value += 1


def test_two_processes_cannot_both_spend_the_last_of_the_budget(tmp_path: Path) -> None:
    barrier = CONTEXT.Barrier(2)
    refused = CONTEXT.Value("i", 0)
    workers = [
        CONTEXT.Process(target=_spend_last, args=(str(tmp_path), worker, barrier, refused))
        for worker in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert refused.value == 1
    assert open_ledger(tmp_path).head[1] == 1


def _spend_on(folder: str, acknowledge: Connection) -> None:
    ledger = open_ledger(Path(folder), epsilon=1e3)
    for plan in range(4000):
        spend(ledger, f"plan {plan}")
        acknowledge.send(plan)


def test_killed_spender_leaves_every_acknowledged_debit(tmp_path: Path) -> None:
    receive, acknowledge = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_spend_on, args=(str(tmp_path), acknowledge))
    process.start()
    acknowledge.close()
    acknowledged = -1
    with contextlib.suppress(EOFError):
        while True:
            acknowledged = receive.recv()
            if acknowledged == 7:
                process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    ledger = open_ledger(tmp_path, epsilon=1e3)
    ledger.verify()
    assert 8 <= acknowledged + 1 <= ledger.head[1] <= acknowledged + 2
