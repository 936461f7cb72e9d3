"""A submission that kills intake is begun with three times, not for ever; who stops intake counts for nothing."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aggregator.intake import service as taking_in
from aggregator.intake.attempts import MAX_ATTEMPTS, MAX_ATTEMPTS_OF_SILO, SubmissionAttempts
from aggregator.intake.checks import Expectation, authenticate, verify_submission
from aggregator.runtime.running import intake_program
from ddm.errors import PolicyError, RefusedError
from ddm.protocol.receipt import RECEIPT_KIND, Receipt
from ddm.trust.envelope import open_sealed
from tests.support.errors import has_subject
from tests.support.federation import PASSPHRASE, PlannedFederation, TinyFederation
from tests.support.forked import fork_process, wait_for_exit
from tests.support.publishing import receipts_key
from tests.support.submissions import Arrival

STAYS = """
import sys, time
from aggregator.intake import service
from aggregator.runtime.intake_process import app
from ddm.system.console import run_app

def verify(signed, expected):
    print("in the midst of it", flush=True)
    time.sleep(600)

service.verify_submission = verify
run_app(app, sys.argv[1:3])
"""


@pytest.fixture(scope="module")
def both_sent_once(
    sent_once: PlannedFederation, tmp_path_factory: pytest.TempPathFactory
) -> PlannedFederation:
    """Two silos whose submissions are in their outboxes."""
    tiny = sent_once.tiny.copy(tmp_path_factory.mktemp("attempts") / "copy")
    plan_id = sent_once.plan_id
    tiny.deliver_plan("south", plan_id)
    tiny.work("south")
    return PlannedFederation(tiny, plan_id)


@pytest.fixture
def arrived(both_sent_once: PlannedFederation, tmp_path: Path) -> PlannedFederation:
    """Both have arrived; nothing was taken in."""

    tiny, plan_id = both_sent_once
    federation = type(tiny.federation)(tmp_path / "fed")
    shutil.copytree(tiny.federation.path, federation.path)
    tiny = TinyFederation(tmp_path, federation, tiny.sites)
    for silo_id in tiny.sites:
        tiny.collect(silo_id, plan_id)
    return PlannedFederation(tiny, plan_id)


def in_another_process(act: Callable[[], object]) -> int:
    """Act in a process of its own; return the signal that ended it, 0 for none."""
    code = wait_for_exit(fork_process(act))
    assert code in (0, -signal.SIGKILL)
    return -code


def deadly(
    silo_id: str | None, real: Callable[..., object] = verify_submission
) -> Callable[..., object]:
    """Verify as intake does, except that one silo's submission has the process killed, as for want of memory."""

    def verify(arrived: object, expected: Expectation) -> object:
        if expected.silo_id == silo_id:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(arrived, expected)

    return verify


def answers(tiny: TinyFederation, plan_id: str, silo_id: str) -> dict[int, Receipt]:
    receipts = {}
    for path in (tiny.federation.receipts / plan_id / silo_id).glob("[0-9]*.json"):
        data, _ = open_sealed(path.read_bytes(), RECEIPT_KIND, receipts_key(tiny).public, 65536)
        receipts[int(path.stem)] = Receipt.parse(data, subject="receipt")
    return receipts


@pytest.mark.parametrize(
    ("poison", "deaths"), [(None, 0), ("north", MAX_ATTEMPTS)], ids=["control", "poison"]
)
def test_submission_that_kills_intake_is_refused_after_three_attempts_and_the_other_silo_goes_on(
    arrived: PlannedFederation,
    monkeypatch: pytest.MonkeyPatch,
    poison: str | None,
    deaths: int,
) -> None:
    tiny, plan_id = arrived
    monkeypatch.setattr(taking_in, "verify_submission", deadly(poison))
    seen = 0
    while in_another_process(tiny.take_in):
        seen += 1
        assert seen <= deaths
    assert seen == deaths
    assert answers(tiny, plan_id, "south")[1].verdict.kind == "accepted"
    verdict = answers(tiny, plan_id, "north")[1].verdict
    if poison:
        assert verdict.kind == "refused"
        assert verdict.code == RefusedError.exit_code
        assert "got 3 examinations that never ended" in verdict.reason
    else:
        assert verdict.kind == "accepted"
        assert not list(tiny.federation.attempts.rglob("[1-9]*"))
    assert not list((tiny.federation.accepted / plan_id).glob("*.part"))


def test_silo_that_sends_poison_again_and_again_uses_up_few_restarts(
    arrived: PlannedFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: every submission kills intake, until its supervisor has no restart left for the other silos."""
    tiny, plan_id = arrived
    monkeypatch.setattr(taking_in, "verify_submission", deadly("north"))
    deaths = 0
    for sequence in range(1, 6):
        while in_another_process(tiny.take_in):
            deaths += 1
        assert answers(tiny, plan_id, "north")[sequence].verdict.kind == "refused"
        folder = tiny.federation.incoming / plan_id / "north" / str(sequence + 1)
        shutil.copytree(tiny.sites["north"].outbox / plan_id / "1", folder)
        Arrival(tiny, plan_id, folder, tiny.key("north")).rewrite(
            lambda document: None, version=sequence + 1
        )
    assert deaths == MAX_ATTEMPTS_OF_SILO
    plan, _ = tiny.federation.current_plan()
    program = intake_program(tiny.federation, plan, PASSPHRASE)
    assert program.max_per_hour > 2 * MAX_ATTEMPTS_OF_SILO * len(plan.silos), (
        "though all silos do so, or others for them"
    )


def test_poison_that_nobody_is_known_to_have_signed_uses_up_few_restarts_and_refuses_nothing(
    arrived: PlannedFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, plan_id = arrived
    monkeypatch.setattr(taking_in, "authenticate", deadly("north", authenticate))
    deaths = 0
    for _ in range(3):
        while in_another_process(tiny.take_in):
            deaths += 1
        assert not (tiny.federation.incoming / plan_id / "north" / "1").exists()
        shutil.copytree(
            tiny.sites["north"].outbox / plan_id / "1",
            tiny.federation.incoming / plan_id / "north" / "1",
        )
    assert deaths == MAX_ATTEMPTS
    assert answers(tiny, plan_id, "north") == {}
    assert answers(tiny, plan_id, "south")[1].verdict.kind == "accepted"


@contextmanager
def stays_at_work(tiny: TinyFederation, plan_id: str) -> "Iterator[subprocess.Popen[bytes]]":
    """A real intake process in the midst of verifying."""
    command = [sys.executable, "-c", STAYS, str(tiny.federation.path), plan_id]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdin
            assert process.stdout
            process.stdin.write(PASSPHRASE)
            process.stdin.close()
            assert process.stdout.readline() == b"in the midst of it\n"
            yield process
        finally:
            process.kill()


def test_intake_that_is_asked_to_stop_ends_at_once_and_counts_no_attempt(
    arrived: PlannedFederation,
) -> None:
    """Neither as a failed one nor as a good one: what a killed process left before, the control, is left still."""
    tiny, plan_id = arrived
    kept = tiny.federation.attempts / plan_id / "north" / "1"
    for how, begun in ((signal.SIGKILL, b"1"), (signal.SIGTERM, b"2")):
        with stays_at_work(tiny, plan_id) as process:
            assert kept.read_bytes() == begun
            process.send_signal(how)
            assert process.wait(20) == (0 if how == signal.SIGTERM else -signal.SIGKILL)
        assert kept.read_bytes() == b"1"


def test_attempt_that_ends_in_any_verdict_or_on_a_full_disk_is_not_counted(tmp_path: Path) -> None:
    attempts = SubmissionAttempts(tmp_path)
    for _ in range(2 * MAX_ATTEMPTS):
        with pytest.raises(PolicyError), attempts.attempt(1):
            raise PolicyError("submission", expected="one thing", got="another")
        with pytest.raises(OSError, match="space"), attempts.attempt(1):
            raise OSError(errno.ENOSPC, "no space left")
        with attempts.attempt(1):
            assert (tmp_path / "1").read_bytes() == b"1"
    assert not list(tmp_path.iterdir())
    for _ in range(MAX_ATTEMPTS):  # the control: an end that nobody foresaw
        with pytest.raises(MemoryError), attempts.attempt(1):
            raise MemoryError
    with pytest.raises(RefusedError, check=has_subject("submission 1")), attempts.attempt(1):
        raise AssertionError("begun once more")
