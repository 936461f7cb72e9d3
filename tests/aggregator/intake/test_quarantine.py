"""What screening sets aside waits for a person; whenever the aggregator is killed, nothing is lost or done twice."""

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aggregator.cli import app
from aggregator.intake import quarantine
from aggregator.intake import service as taking_in
from aggregator.intake.examination import Examination, Examiner
from aggregator.intake.inventory import take_inventory
from aggregator.intake.quarantine import (
    MAX_REASONS,
    QuarantineDecision,
    decisions_on,
    is_admitted,
    quarantined_submissions,
    read_decisions,
    record_decision,
)
from aggregator.intake.screening import ExpertFigures
from aggregator.intake.service import IntakeService
from aggregator.membership.withdrawal import remaining_silos
from aggregator.router.train import train_router
from aggregator.transfer.delivery import SiloDelivery, TransferLimits
from ddm.errors import RefusedError, SetupError
from ddm.io.files import write_atomic
from ddm.protocol.base import MAX_VALUES, now_utc, sha256_file
from ddm.protocol.submission import Submission, SubmittedExpert, submission_path
from ddm.system.console import run_app
from tests.conftest import PublishedRelease
from tests.support.errors import has_subject
from tests.support.federation import TinyFederation
from tests.support.forked import fork_process, wait_for_exit
from tests.support.submissions import SILO, Arrival


@pytest.fixture
def poisoned(arrival: Arrival) -> Arrival:
    """In perfect form, signed by its silo, and worthless."""
    weights = load_file(arrival.expert_path)
    generator = torch.Generator().manual_seed(0)
    noise = {name: torch.randn(value.shape, generator=generator) for name, value in weights.items()}
    save_file(noise, arrival.expert_path)
    arrival.rewrite(lambda document: None)
    return arrival


def answer(
    arrival: Arrival, verdict: quarantine.QuarantineVerdict, reason: str = "looked at it"
) -> None:
    record_decision(
        arrival.tiny.federation,
        QuarantineDecision(
            plan_id=arrival.plan_id,
            silo_id=SILO,
            submission_digest=waiting(arrival)[0].record.submission_digest,
            verdict=verdict,
            reason=reason,
            at=now_utc(),
        ),
    )


def waiting(arrival: Arrival) -> list[quarantine.QuarantineEntry]:
    return quarantined_submissions(arrival.tiny.federation, arrival.plan_id)


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as left:
        run_app(app, [str(argument) for argument in arguments])
    return int(left.value.code or 0)


def delivery(arrival: Arrival) -> SiloDelivery:
    fed = arrival.tiny.federation.path
    return SiloDelivery(
        fed,
        arrival.plan_id,
        SILO,
        index=(),
        limits=TransferLimits(shard_bytes=1 << 20, max_submission_bytes=1 << 24, wait_s=1),
    )


def test_plausible_expert_of_few_steps_is_accepted_at_once(arrival: Arrival) -> None:
    """The control: what is set aside below is set aside for its weights."""
    assert arrival.verdict().verdict.kind == "accepted"
    assert waiting(arrival) == []


def test_random_weights_in_perfect_form_are_neither_accepted_nor_refused(poisoned: Arrival) -> None:
    sent = sha256_file(poisoned.expert_path)
    assert poisoned.tiny.take_in() == []
    (one,) = waiting(poisoned)
    assert any("times that of answering 0" in reason for reason in one.record.reasons)
    assert set(one.record.figures) == {SILO}
    assert (
        sha256_file(
            one.submission_folder / "silos" / SILO / "experts" / SILO / "expert.safetensors"
        )
        == sent
    )
    assert not poisoned.accepted.exists() and not poisoned.receipts.exists()
    written = json.loads((one.folder / "reason.json").read_bytes())
    assert {"reasons", "figures", "at"} <= set(written)


def test_what_waits_is_not_fetched_again_and_takes_no_room_twice(poisoned: Arrival) -> None:
    assert delivery(poisoned)._last_received() == 1
    poisoned.tiny.take_in()
    assert poisoned.folder.is_dir() and not any(poisoned.folder.iterdir())
    assert delivery(poisoned)._last_received() == 1
    assert delivery(poisoned)._is_awaiting_receipt()  # so the silo is not asked: a person has time
    assert poisoned.tiny.take_in() == []
    assert len(waiting(poisoned)) == 1
    answer(poisoned, "refused")
    poisoned.tiny.take_in()
    assert not delivery(poisoned)._is_awaiting_receipt()


def test_admitted_submission_is_accepted_with_a_receipt_that_binds_it(poisoned: Arrival) -> None:
    digest = sha256_file(poisoned.document_path)
    poisoned.tiny.take_in()
    answer(poisoned, "admitted")
    receipt = poisoned.verdict()
    assert receipt.verdict.kind == "accepted" and receipt.submission_digest == digest
    assert poisoned.accepted.is_dir() and waiting(poisoned) == []
    assert (poisoned.receipts / "final").exists() and not poisoned.folder.exists()
    assert poisoned.tiny.take_in() == []
    silo = take_inventory(poisoned.tiny.federation).silos[SILO]
    assert (silo.digest, silo.admitted) == (digest, True)
    assert "high_loss" in silo.flags[SILO]


def test_refused_submission_is_answered_with_the_reason_and_the_silo_may_try_again(
    poisoned: Arrival,
) -> None:
    poisoned.tiny.take_in()
    answer(poisoned, "refused", "the weights are noise")
    poisoned.assert_refused(RefusedError, "the weights are noise", "by a person")
    assert waiting(poisoned) == [] and not poisoned.folder.exists()
    assert not (poisoned.receipts / "final").exists()


def test_submission_altered_in_quarantine_is_not_accepted_when_admitted(poisoned: Arrival) -> None:
    poisoned.tiny.take_in()
    (one,) = waiting(poisoned)
    path = one.submission_folder / "silos" / SILO / "experts" / SILO / "expert.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    answer(poisoned, "admitted")
    assert poisoned.verdict().verdict.kind == "refused"
    assert not poisoned.accepted.exists()


def test_second_decision_about_the_same_submission_is_refused(poisoned: Arrival) -> None:
    poisoned.tiny.take_in()
    answer(poisoned, "refused")
    with pytest.raises(SetupError, check=has_subject("submission of north")):
        answer(poisoned, "admitted")
    assert [decision.verdict for decision in read_decisions(poisoned.tiny.federation)] == [
        "refused"
    ]


def killed(tiny: TinyFederation, owner: Any, name: str, *, after: bool) -> None:
    """Take in by another process that kill -9 ends before or after one step; nothing where it never gets there."""
    real = getattr(owner, name)

    def step(*arguments: Any, **named: Any) -> None:
        if after:
            real(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    def take_in_until_killed() -> None:
        setattr(owner, name, step)
        tiny.take_in()

    assert wait_for_exit(fork_process(take_in_until_killed)) in (0, -signal.SIGKILL)


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        (quarantine, "write_atomic", True),
        (taking_in, "quarantine_submission", False),
        (taking_in, "quarantine_submission", True),
        (taking_in, "empty_folder", False),
    ],
    ids=["reason written", "not yet moved", "moved", "not yet emptied"],
)
def test_kill_while_setting_aside_is_mended_by_the_next_start(
    poisoned: Arrival, owner: Any, name: str, after: bool
) -> None:
    killed(poisoned.tiny, owner, name, after=after)
    assert any(poisoned.folder.iterdir())  # it was killed before its end
    assert poisoned.tiny.take_in() == []
    (one,) = waiting(poisoned)
    assert one.submission_folder.is_dir() and not any(poisoned.folder.iterdir())
    answer(poisoned, "admitted")
    assert poisoned.verdict().verdict.kind == "accepted"


@pytest.mark.parametrize("verdict", ["admitted", "refused"])
@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("keep_accepted", False),
        ("keep_accepted", True),
        ("sign_receipt", False),
        ("sign_receipt", True),
    ],
    ids=["before the rename", "after the rename", "nothing signed", "receipt signed"],
)
def test_kill_while_carrying_out_a_decision_is_mended_with_one_receipt(
    poisoned: Arrival, name: str, after: bool, verdict: quarantine.QuarantineVerdict
) -> None:
    poisoned.tiny.take_in()
    answer(poisoned, verdict)
    killed(poisoned.tiny, IntakeService, name, after=after)
    poisoned.tiny.take_in()
    assert [path.name for path in poisoned.receipts.glob("*.json")] == ["1.json"]
    assert poisoned.accepted.is_dir() == (verdict == "admitted")
    assert waiting(poisoned) == [] and not poisoned.folder.exists()
    assert (poisoned.receipts / "final").exists() == (verdict == "admitted")


def test_commands_list_and_admit_what_waits(
    poisoned: Arrival, capsys: pytest.CaptureFixture[str]
) -> None:
    fed = poisoned.tiny.federation.path
    assert run("quarantine", fed) == 0
    assert "Nothing waits" in capsys.readouterr().out
    poisoned.tiny.take_in()
    assert run("quarantine", fed, "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [record["silo_id"] for record in listed["waiting"]] == [SILO] and listed["waiting"][0][
        "reasons"
    ]
    assert run("quarantine", fed) == 0
    assert "times that of answering 0" in capsys.readouterr().out
    assert run("admit", fed, SILO, "--reason", "a test\x1b[2J") == SetupError.exit_code
    assert run("admit", fed, SILO, "--reason", "known to be a test") == 0
    (decision,) = read_decisions(poisoned.tiny.federation)
    assert (decision.verdict, decision.reason) == ("admitted", "known to be a test")
    assert poisoned.verdict().verdict.kind == "accepted"
    assert run("refuse", fed, SILO, "--reason", "too late") == SetupError.exit_code
    assert "aggregator withdraw" in capsys.readouterr().err


def test_command_refuses_what_waits_and_knows_no_other_silo(poisoned: Arrival) -> None:
    fed = poisoned.tiny.federation.path
    poisoned.tiny.take_in()
    assert run("refuse", fed, "south", "--reason", "not theirs") == SetupError.exit_code
    assert run("refuse", fed, SILO, "--reason", "noise") == 0
    poisoned.assert_refused(RefusedError, "noise")


def _let_stand_apart(
    published: PublishedRelease, silo_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have the figures of one accepted expert be ten times worse than those of two others."""
    federation = published.tiny.federation
    real = Examiner.examine
    accepted = take_inventory(federation).silos[silo_id]
    path = federation.screening / published.plan_id / accepted.digest / f"{silo_id}.json"
    examination = json.loads(path.read_bytes())
    examination["expert"]["losses"] = [
        [10 * loss for loss in row] for row in examination["expert"]["losses"]
    ]
    path.write_text(json.dumps(examination))

    def twice(self: Examiner, silo: str, *arguments: Any) -> Examination:
        one = real(self, silo, *arguments)
        return one if silo == silo_id else replace(one, experts=one.experts * 2)

    monkeypatch.setattr(Examiner, "examine", twice)


def test_router_waits_for_a_person_when_an_accepted_expert_stands_apart_by_now(
    published: PublishedRelease, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = published.tiny.federation
    train_router(federation, take_inventory(federation), seed=0)
    _let_stand_apart(published, "east", monkeypatch)
    assert not take_inventory(federation).silos["east"].admitted
    assert run("router", federation.path) == RefusedError.exit_code
    message = capsys.readouterr().err
    assert "east: expert east" in message and "aggregator admit" in message
    assert (
        run("admit", federation.path, "north", "--reason", "not this one") == SetupError.exit_code
    )
    assert run("admit", federation.path, "east", "--reason", "they hold other images") == 0
    digest = take_inventory(federation).silos["east"].digest
    (decision,) = decisions_on(federation, digest)
    assert decision.verdict == "admitted"
    silos = take_inventory(federation).silos
    assert {silo_id: (silo.admitted, silo.flags) for silo_id, silo in silos.items()} == {
        "east": (True, {"east": ("stands_apart",)}),
        "north": (False, {}),
    }
    train_router(federation, take_inventory(federation), seed=0)


def test_admission_covers_what_a_person_was_shown_and_nothing_else(
    published: PublishedRelease, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever lowers what a silo counts has not admitted that its expert stands apart, which shows later."""
    federation = published.tiny.federation
    units = take_inventory(federation).silos["east"].counted.units

    def admit(*words: object) -> int:
        return run("admit", federation.path, "east", "--reason", "agreed with them", *words)

    assert admit("--units", units - 1) == 0
    east = take_inventory(federation).silos["east"]
    assert (east.counted.units, east.admitted) == (units - 1, False)
    assert not is_admitted(decisions_on(federation, east.digest), "influence")
    _let_stand_apart(published, "east", monkeypatch)
    assert run("router", federation.path) == RefusedError.exit_code
    assert "stands apart" in capsys.readouterr().err
    assert admit() == 0
    assert [decision.shown for decision in read_decisions(federation)] == [(), ("stands_apart",)]
    assert take_inventory(federation).silos["east"].admitted
    assert admit() == SetupError.exit_code, "nothing waits any more"
    assert admit("--units", units - 2) == 0
    train_router(federation, take_inventory(federation), seed=0)


def many_experts(published: PublishedRelease, number: int) -> tuple[Submission, Path]:
    """North's submission as if it held its expert many times over, as one with many clusters does."""
    folder = published.tiny.federation.accepted / published.plan_id / "north"
    sent = Submission.parse(
        (folder / "silos" / "north" / "submission.json").read_bytes(), subject="submission"
    )
    (expert,) = sent.experts
    experts = tuple(expert.model_copy(update={"expert_id": f"north-{n}"}) for n in range(number))
    return sent.model_copy(update={"experts": experts}), folder


def test_accepted_submission_is_read_once_for_all_that_come_after_it_and_again_when_it_changes(
    published: PublishedRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = published.tiny.federation
    plan, _ = federation.current_plan()
    examiner = Examiner(federation, plan)
    remaining = remaining_silos(federation, plan)
    examined = list[str]()
    examine = Examiner.examine

    def count(
        self: Examiner, silo_id: str, submission: Submission, digest: str, folder: Path
    ) -> Examination:
        examined.append(silo_id)
        return examine(self, silo_id, submission, digest, folder)

    monkeypatch.setattr(Examiner, "examine", count)
    first = examiner.accepted(remaining)
    assert examiner.accepted(remaining) == first
    assert sorted(examined) == sorted(remaining)

    examined.clear()
    document = federation.accepted_folder(plan, "north") / submission_path("north")
    write_atomic(document, document.read_bytes())
    assert examiner.accepted(remaining) == first
    assert examined == ["north"]


def test_figures_of_a_silo_with_hundreds_of_experts_are_read_back_and_measured_once(
    published: PublishedRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All their losses are more values than one document may hold."""
    federation = published.tiny.federation
    examiner = Examiner(federation, federation.current_plan()[0])
    submission, folder = many_experts(published, 250)
    measured = list[str]()
    real = examiner.measure_expert("north", folder, submission.experts[0], "a" * 64)

    def figures(
        self: Examiner, silo_id: str, folder: Path, expert: SubmittedExpert, digest: str
    ) -> ExpertFigures:
        if len(measured) == 100:
            raise KeyboardInterrupt
        measured.append(expert.expert_id)
        return real.model_copy(update={"expert_id": expert.expert_id})

    monkeypatch.setattr(Examiner, "measure_expert", figures)
    with pytest.raises(KeyboardInterrupt):
        examiner.examine("north", submission, "a" * 64, folder)
    measured.clear()
    with pytest.raises(KeyboardInterrupt):
        examiner.examine("north", submission, "a" * 64, folder)
    assert measured[0] == "north-100", (
        "what was measured before it was interrupted is not measured again"
    )
    measured.clear()
    first = examiner.examine("north", submission, "a" * 64, folder)
    assert sum(len(row) for expert in first.experts for row in expert.losses) > MAX_VALUES
    monkeypatch.setattr(Examiner, "measure_expert", _never)
    assert examiner.examine("north", submission, "a" * 64, folder) == first
    with pytest.raises(AssertionError, match="again"):
        examiner.examine("north", submission, "b" * 64, folder)


def test_quarantine_of_a_silo_with_thousands_of_bad_experts_can_be_read(
    poisoned: Arrival, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: so many reasons that the file which holds them is refused, and intake ends at every start."""
    many = [f"expert north-{number} answers 0 to everything" for number in range(70_000)]
    monkeypatch.setattr(Examiner, "faults", lambda *_: many)
    assert poisoned.tiny.take_in() == []
    (one,) = waiting(poisoned)
    assert (one.record.reasons[0], one.record.reasons[-1]) == (
        many[0],
        f"and {70_000 - MAX_REASONS} more",
    )
    assert poisoned.tiny.take_in() == []


def test_expert_is_measured_once_and_again_only_when_its_figures_are_gone(
    published: PublishedRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = published.tiny.federation
    plan, _ = federation.current_plan()
    remaining = remaining_silos(federation, plan)
    first = Examiner(federation, plan).accepted(remaining)
    with monkeypatch.context() as patch:
        patch.setattr(Examiner, "measure_expert", _never)
        assert Examiner(federation, plan).accepted(remaining) == first
    shutil.rmtree(federation.path / "screening")
    assert Examiner(federation, plan).accepted(remaining) == first


def _never(*_: object) -> None:
    raise AssertionError("measured again")
