"""A plan's life at a site: superseded plans, plans given up, refusals tried again, images that changed in between."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from aggregator.membership.registry import record_ledger
from aggregator.membership.withdrawal import withdraw_silo
from ddm.errors import (
    ApprovalError,
    BudgetError,
    BusyError,
    DataError,
    DigestError,
    SubmissionRefusedError,
)
from ddm.io.locks import locked
from ddm.protocol.leave import LEAVE_NAME, Leave
from ddm.publishing.keys import load_key
from ddm.transport.messages import Envelope, Pull
from ddm.transport.shards import list_folder, whole_spans
from ddm.trust.keys import SigningKey
from ddm.trust.sealed_documents import open_leave_notice, seal_leave_notice
from silo.config import Site
from silo.courier.handlers import SiteLimits, answer
from silo.plan.acceptance import plan_folder
from silo.plan.succession import find_successor
from silo.worker.approval import approve
from silo.worker.descriptions import HELD, Circumstances, describe_site, describe_state
from silo.worker.life import AT_WORK, IDLE, STATES, TRANSITIONS, next_state
from silo.worker.retraining import assess_retraining, retrain
from silo.worker.state import State, load_state, save_state, state_path
from silo.worker.status import read_status
from silo.worker.withdrawal import describe_consequences, withdraw_from_plan
from silo.worker.worker import Worker
from tests.support.case import case
from tests.support.errors import has_subject
from tests.support.federation import (
    PASSPHRASE,
    POLICY,
    PlannedFederation,
    TinyFederation,
    write_policy,
)

SILO = "north"
PERSON = POLICY | {"approval": {"kind": "person"}}


@pytest.fixture(scope="module")
def replaced_once(
    planned_once: PlannedFederation, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TinyFederation, str, str]:
    """A site whose inbox holds one plan, and a federation that has signed the next one."""
    tiny = planned_once.tiny.copy(tmp_path_factory.mktemp("replaced") / "copy")
    return tiny, planned_once.plan_id, tiny.sign()


@pytest.fixture
def replaced(
    replaced_once: tuple[TinyFederation, str, str], tmp_path: Path
) -> tuple[TinyFederation, str, str]:
    tiny, first, second = replaced_once
    return tiny.copy(tmp_path / "copy"), first, second


def worker_of(tiny: TinyFederation) -> Worker:
    return Worker(tiny.sites[SILO], tiny.key(SILO), lambda state: None)


def change_images(tiny: TinyFederation) -> None:
    """Mend one pixel."""
    path = Path(tiny.sites[SILO].settings().data)
    changed = tiny.path / "mended.npz"
    with np.load(path) as archive:
        arrays = {name: archive[name].copy() for name in archive.files}
    arrays["images"][0, 0, 0, 0] += 0.01 if arrays["images"][0, 0, 0, 0] < 0 else -0.01
    np.savez(changed, **arrays)
    settings = tiny.sites[SILO].path / "silo.toml"
    settings.write_text(settings.read_text().replace(str(path), str(changed)))


def spent(site: Site) -> bytes:
    return site.ledger_path.read_bytes() if site.ledger_path.exists() else b""


@pytest.mark.parametrize(
    "state", ["plan_accepted", "assigned", "audited", "released", "awaiting_approval", "in_outbox"]
)
def test_superseded_plan_ends_in_every_state_and_spends_nothing_more(
    replaced: tuple[TinyFederation, str, str], state: str
) -> None:
    tiny, first, second = replaced
    site = tiny.sites[SILO]
    write_policy(site, POLICY if state == "in_outbox" else PERSON)
    tiny.work(SILO, until=state)
    before = spent(site)
    tiny.deliver_plan(SILO, second)
    worker = worker_of(tiny)
    worker.begin()
    worker.step()
    assert (worker.state.state, worker.state.plan_id, worker.state.successor) == (
        "superseded",
        first,
        second,
    )
    assert spent(site) == before
    assert second in describe_state(worker.state)
    worker.step()
    assert (worker.state.state, worker.state.plan_id) == ("plan_accepted", second)


def fetched_files(site: Site, plan_id: str) -> list[str]:
    """What somebody who still asks for the first submission to a plan can list and fetch."""
    limits = SiteLimits(
        site.path, bundle_bytes=1 << 26, shard_bytes=1 << 22, submission_bytes=1 << 26
    )
    files = list_folder(site.outbox / plan_id / "1", max_files=64, max_bytes=1 << 26)
    fetched = []
    for span in whole_spans(files):
        reply = answer(Envelope(Pull(plan_id=plan_id, sequence=1, spans=(span,))), limits)
        if reply.data:
            fetched.append(span.path)
    return fetched


@pytest.mark.parametrize("killed", [None, "before the outbox", "in the outbox", "before the state"])
def test_submission_to_a_superseded_plan_can_no_longer_be_fetched(
    replaced: tuple[TinyFederation, str, str], monkeypatch: pytest.MonkeyPatch, killed: str | None
) -> None:
    tiny, first, second = replaced
    site = tiny.sites[SILO]
    tiny.work(SILO)
    assert any(name.endswith(".safetensors") for name in fetched_files(site, first))
    tiny.deliver_plan(SILO, second)
    if killed:
        with monkeypatch.context() as patch:
            kill_while_ending(patch, killed)
            worker = worker_of(tiny)
            worker.begin()
            with pytest.raises(InterruptedError):
                worker.step()
        assert tiny.state_of(SILO).state == "in_outbox"
    worker = worker_of(tiny)
    worker.begin()
    worker.step()
    assert worker.state.state == "superseded"
    assert fetched_files(site, first) == []


def kill_while_ending(patch: pytest.MonkeyPatch, moment: str) -> None:
    """Have the next worker die at a moment of the end of its plan."""

    def die(*_: object, **__: object) -> None:
        raise InterruptedError(moment)

    match moment:
        case "before the outbox":
            patch.setattr("silo.worker.worker.empty_outbox", die)
        case "in the outbox":
            patch.setattr("silo.worker.withdrawal.shutil.rmtree", die)
        case "before the state":
            patch.setattr("silo.worker.worker.save_state", die)


def test_submission_that_was_sent_but_not_recorded_goes_with_its_superseded_plan(
    replaced: tuple[TinyFederation, str, str],
) -> None:
    tiny, first, second = replaced
    site = tiny.sites[SILO]
    before = tiny.work(SILO, until="awaiting_approval")
    tiny.work(SILO)
    # A worker that died after the rename into the outbox has not recorded it.
    save_state(state_path(site.private), before)
    tiny.deliver_plan(SILO, second)
    worker = worker_of(tiny)
    worker.begin()
    worker.step()
    assert worker.state.state == "superseded"
    assert fetched_files(site, first) == []


@pytest.mark.parametrize("answered", [False, True])
def test_start_empties_the_outbox_of_a_plan_that_an_earlier_version_saw_superseded(
    replaced: tuple[TinyFederation, str, str], answered: bool
) -> None:
    tiny, first, second = replaced
    site = tiny.sites[SILO]
    sent = tiny.work(SILO)
    if answered:
        tiny.collect(SILO, first)
        receipt = site.inbox / first / "receipts" / "1.json"
        receipt.parent.mkdir()
        receipt.write_bytes(b"a refusal, of which the state knew")
    save_state(state_path(site.private), sent.after("succession", successor=second))
    worker_of(tiny).begin()
    assert bool(fetched_files(site, first)) == answered


def test_receipt_that_comes_with_the_next_plan_is_heard_and_its_record_stays(
    planned_once: PlannedFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = planned_once.tiny.copy(tmp_path / "copy")
    plan_id = planned_once.plan_id
    tiny.work(SILO)
    tiny.collect(SILO, plan_id)
    tiny.take_in()

    def let_both_arrive(*_: object) -> str:
        tiny.deliver_receipt(SILO, plan_id)
        return "tiny-00000002"

    monkeypatch.setattr("silo.worker.worker.find_successor", let_both_arrive)
    worker = worker_of(tiny)
    worker.begin()
    worker.step()
    assert worker.state.state == "accepted"
    assert fetched_files(tiny.sites[SILO], plan_id)


def test_submission_of_a_silo_that_the_aggregator_left_out_can_no_longer_be_fetched(
    planned_once: PlannedFederation, tmp_path: Path
) -> None:
    tiny = planned_once.tiny.copy(tmp_path / "copy")
    plan_id = planned_once.plan_id
    tiny.work(SILO)
    receipt_key = load_key(tiny.federation, "receipts", PASSPHRASE)
    withdraw_silo(tiny.federation, SILO, "a test", receipt_key)
    tiny.deliver_receipt(SILO, plan_id)
    worker = worker_of(tiny)
    worker.begin()
    worker.step()
    assert worker.state.state == "withdrawn"
    assert fetched_files(tiny.sites[SILO], plan_id) == []


def test_training_stops_when_its_plan_is_superseded_meanwhile(
    replaced: tuple[TinyFederation, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, first, second = replaced
    tiny.work(SILO, until="training")
    worker = worker_of(tiny)
    worker.look_s = 0.0
    states = []
    should_stop = worker.should_stop

    def watch() -> bool:
        states.append(worker.state.state)
        if len(states) == 3:
            tiny.deliver_plan(SILO, second)
        return should_stop()

    monkeypatch.setattr(worker, "should_stop", watch)
    worker.begin()
    worker.step()
    assert (worker.state.state, worker.state.successor) == ("superseded", second)
    assert states == 3 * ["training"]
    assert not spent(tiny.sites[SILO])


def test_plan_is_superseded_as_soon_as_the_metadata_of_the_next_one_are_here(
    replaced: tuple[TinyFederation, str, str],
) -> None:
    tiny, first, second = replaced
    site = tiny.sites[SILO]
    part = site.inbox / second / f"{'0' * 16}.part"
    shutil.copytree(tiny.federation.bundle(second) / "metadata", part / "metadata")
    assert find_successor(site, first) is None  # the courier has not verified them
    (part / "targets").mkdir()
    assert find_successor(site, first) == second


def test_announcement_that_nobody_signed_changes_nothing(
    replaced: tuple[TinyFederation, str, str], tmp_path: Path
) -> None:
    tiny, first, second = replaced
    site = tiny.sites[SILO]
    tiny.work(SILO, until="assigned")
    stranger = TinyFederation.create(tmp_path / "stranger", {SILO: 20})
    foreign = stranger.sign()
    # another root
    shutil.copytree(stranger.federation.bundle(foreign), site.inbox / foreign / "bundle")
    renamed = site.inbox / "tiny-00000001" / "bundle"  # the plan in progress under another name
    shutil.copytree(tiny.federation.bundle(first), renamed)
    tiny.deliver_plan(SILO, second)
    metadata = site.inbox / second / "bundle" / "metadata" / "targets.json"
    genuine = metadata.read_bytes()
    metadata.write_bytes(genuine.replace(b'"version":', b'"version": '))
    assert find_successor(site, first) is None
    metadata.write_bytes(genuine)
    assert find_successor(site, first) == second  # the control: it is these bytes that announce it


def test_older_plan_sent_again_announces_nothing(replaced: tuple[TinyFederation, str, str]) -> None:
    tiny, first, second = replaced
    site = tiny.sites[SILO]
    old = shutil.move(site.inbox / first, tiny.path / "old")
    tiny.deliver_plan(SILO, second)
    assert tiny.work(SILO, until="assigned").plan_id == second
    shutil.move(old, site.inbox / first)
    assert find_successor(site, second) is None


def test_draft_of_a_superseded_plan_is_not_approved(
    replaced: tuple[TinyFederation, str, str],
) -> None:
    tiny, _, second = replaced
    site = tiny.sites[SILO]
    write_policy(site, PERSON)
    digest = tiny.work(SILO, until="awaiting_approval").submission_digest
    tiny.deliver_plan(SILO, second)
    with pytest.raises(ApprovalError, match=second):
        approve(site, str(digest))


@pytest.mark.parametrize(
    "state", ["plan_refused", "plan_accepted", "assigned", "awaiting_approval", "in_outbox"]
)
def test_site_gives_a_plan_up_in_every_state_and_says_so_with_its_key(
    replaced: tuple[TinyFederation, str, str], state: str
) -> None:
    tiny, first, second = replaced
    site = tiny.sites[SILO]
    key = tiny.key(SILO)
    small = {"privacy": {"max_epsilon": 3.0}} if state == "plan_refused" else {}
    write_policy(site, (POLICY if state == "in_outbox" else PERSON) | small)
    tiny.work(SILO, until=state)
    before = spent(site)
    assert withdraw_from_plan(site, key).state == "withdrawn"
    sealed = (site.outbox / first / LEAVE_NAME).read_bytes()
    plan = {"root_digest": tiny.federation.root_digest, "plan_id": first, "silo_id": SILO}
    assert open_leave_notice(sealed, key.public, **plan).plan_id == first
    assert json.loads((site.outbox / "status.json").read_bytes())["state"] == "withdrawn"
    assert not list((site.outbox / first).rglob("*.safetensors"))
    assert spent(site) == before
    with pytest.raises(AssertionError, match="stands still"):
        tiny.work(SILO, until="plan_accepted")  # the plan that was given up is never taken again
    write_policy(site, POLICY)
    tiny.deliver_plan(SILO, second)
    assert tiny.work(SILO, until="plan_accepted").plan_id == second


def test_site_without_a_plan_has_nothing_to_give_up(
    planned_once: PlannedFederation, tmp_path: Path
) -> None:
    tiny = planned_once.tiny.copy(tmp_path / "copy")
    with pytest.raises(ApprovalError, check=has_subject("withdrawal")):
        withdraw_from_plan(tiny.sites[SILO], tiny.key(SILO))


def refused_once(tiny: TinyFederation, plan_id: str) -> None:
    """Have the aggregator refuse the first submission, for a reason that has nothing to do with its images."""
    tiny.work(SILO)
    tiny.collect(SILO, plan_id)
    record_ledger(tiny.federation, SILO, "earlier-00000001", ("0" * 64,))
    tiny.take_in()
    (tiny.federation.registry / "ledgers" / f"{SILO}.json").unlink()
    tiny.deliver_receipt(SILO, plan_id)


def test_refusal_says_what_may_be_tried_again_and_what_it_costs(
    planned_once: PlannedFederation, tmp_path: Path
) -> None:
    tiny = planned_once.tiny.copy(tmp_path / "copy")
    refused_once(tiny, planned_once.plan_id)
    with pytest.raises(SubmissionRefusedError) as refused:
        tiny.work(SILO, until="accepted")
    said = refused.value.remedy
    assert "submission 2 of 20: no training, no epsilon" in said
    assert (
        "silo retrain" in said and "6 steps" in said and "which the budget does not cover" in said
    )
    problem = tiny.state_of(SILO).problem
    assert problem and problem.remedy == said


def test_images_mended_after_a_refusal_are_not_answered_with_the_old_expert(
    planned_once: PlannedFederation, tmp_path: Path
) -> None:
    tiny = planned_once.tiny.copy(tmp_path / "copy")
    plan_id = planned_once.plan_id
    site = tiny.sites[SILO]
    refused_once(tiny, plan_id)
    with pytest.raises(SubmissionRefusedError):
        tiny.work(SILO, until="accepted")
    expert = site.private / "checkpoints" / plan_id / "experts" / SILO / "expert.safetensors"
    old = expert.read_bytes()
    change_images(tiny)
    worker = worker_of(tiny)
    worker.begin()
    with pytest.raises(DataError) as changed:
        worker.step()
    assert "silo retrain" in changed.value.remedy and "does not cover" in changed.value.remedy
    _, price, differs = assess_retraining(site)
    assert differs and price.epsilon > price.left
    with pytest.raises(BudgetError, check=has_subject("training again")):
        retrain(site)
    assert expert.read_bytes() == old
    write_policy(site, PERSON | {"privacy": {"budget_epsilon": 20.0}})
    assert retrain(site).state == "plan_accepted"
    state = tiny.work(SILO, until="awaiting_approval")
    assert state.sequence == 2 and state.problem is None
    assert expert.read_bytes() != old


def test_what_retraining_costs_is_not_asked_while_a_worker_may_unpack(
    planned_once: PlannedFederation, tmp_path: Path
) -> None:
    tiny = planned_once.tiny.copy(tmp_path / "copy")
    tiny.work(SILO, until="plan_accepted")
    with locked(tiny.sites[SILO].private, "worker"), pytest.raises(BusyError, match="worker"):
        assess_retraining(tiny.sites[SILO])
    assess_retraining(tiny.sites[SILO])


def test_retraining_on_the_same_images_costs_no_epsilon(
    planned_once: PlannedFederation, tmp_path: Path
) -> None:
    tiny = planned_once.tiny.copy(tmp_path / "copy")
    site = tiny.sites[SILO]
    write_policy(site, PERSON)
    tiny.work(SILO, until="awaiting_approval")
    before = spent(site)
    _, price, differs = assess_retraining(site)
    assert (price.epsilon, differs) == (0.0, False)
    retrain(site)
    tiny.work(SILO, until="awaiting_approval")
    assert spent(site) == before


def test_site_says_that_a_person_at_the_aggregator_decides(
    planned_once: PlannedFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = planned_once.tiny.copy(tmp_path / "copy")
    plan_id = planned_once.plan_id
    site = tiny.sites[SILO]
    tiny.work(SILO)
    tiny.collect(SILO, plan_id)
    monkeypatch.setattr("aggregator.intake.examination.Examiner.faults", lambda *_: ["looks odd"])
    assert tiny.take_in() == []
    tiny.take_in()
    folder = tiny.federation.receipts / plan_id / SILO
    target = site.inbox / plan_id / "receipts" / "1.held.json"
    target.parent.mkdir(parents=True)
    shutil.copyfile(folder / "1.held.json", target)
    worker = worker_of(tiny)
    worker.begin()
    worker.step()
    assert worker.state.held and describe_state(worker.state) == HELD
    assert f"now      {HELD}" in read_status(site).text()


def test_problem_that_was_solved_is_gone_when_the_work_goes_on(
    planned_once: PlannedFederation, tmp_path: Path
) -> None:
    tiny = planned_once.tiny.copy(tmp_path / "copy")
    site = tiny.sites[SILO]
    write_policy(site, PERSON | {"privacy": {"budget_epsilon": 2.0}})
    worker = worker_of(tiny)
    worker.begin()
    worker.step()
    with pytest.raises(BudgetError):
        worker.step()
    worker.keep_problem(BudgetError("privacy ledger"))
    assert load_state(state_path(site.private)).problem
    write_policy(site, PERSON)
    restarted = worker_of(tiny)
    restarted.begin()
    assert restarted.state.problem is None
    restarted.step()
    assert load_state(state_path(site.private)).problem is None


def test_word_that_a_plan_was_given_up_is_believed_from_the_silos_own_key_alone(
    planned_once: PlannedFederation, tmp_path: Path
) -> None:
    tiny = planned_once.tiny.copy(tmp_path / "copy")
    plan_id = planned_once.plan_id
    arrived = tiny.federation.incoming / plan_id / SILO / LEAVE_NAME
    arrived.parent.mkdir(parents=True)
    key = tiny.key(SILO)
    plan, _ = tiny.federation.current_plan()
    notice = Leave(root_digest=plan.root_digest, plan_id=plan_id, silo_id=SILO, at=plan.created_at)

    def elsewhere(**changes: str) -> bytes:
        return seal_leave_notice(notice.model_copy(update=changes), key)

    for name, forged in {
        "another key": seal_leave_notice(notice, SigningKey.generate()),
        "another silo's key": seal_leave_notice(notice, tiny.key("south")),
        "another plan": elsewhere(plan_id="tiny-00000001"),
        "another silo": elsewhere(silo_id="south"),
        "another federation": elsewhere(root_digest="0" * 64),
        "junk": b"junk",
    }.items():
        arrived.write_bytes(forged)
        tiny.take_in()
        assert not (tiny.federation.receipts / plan_id / SILO).exists(), name
        assert not arrived.exists(), f"{name} stays in the way of the genuine word"
    arrived.write_bytes(seal_leave_notice(notice, key))
    tiny.take_in()
    assert (tiny.federation.receipts / plan_id / SILO / "final").exists()
    assert (tiny.federation.withdrawn / plan_id / SILO / "withdrawal.json").exists()


def test_every_state_can_be_left_and_no_event_leads_out_of_the_table() -> None:
    for state in STATES:
        assert any(
            before == state and step.to != state for (before, _), step in TRANSITIONS.items()
        ), state
    assert {step.to for step in TRANSITIONS.values()} == set(STATES)
    for state in AT_WORK:
        assert next_state(state, "succession") == "superseded"
        assert next_state(state, "withdraw") == "withdrawn"
    assert {state for (state, event) in TRANSITIONS if event == "accept"} == IDLE
    with pytest.raises(ApprovalError, match="expected state released, got state waiting"):
        next_state("waiting", "draft")


def test_damaged_copy_of_an_earlier_plan_is_said_once_and_keeps_nobody_from_the_next(
    replaced: tuple[TinyFederation, str, str], caplog: pytest.LogCaptureFixture
) -> None:
    tiny, first, second = replaced
    site = tiny.sites[SILO]
    tiny.work(SILO)
    damaged = plan_folder(site, first) / "targets" / first / "plan.json"
    whole = damaged.read_bytes()
    damaged.unlink()  # which may be linked with the inbox
    damaged.write_bytes(whole[:-1])
    worker = worker_of(tiny)
    worker.begin()
    with pytest.raises(DigestError):  # in progress, nothing is done without the plan
        worker.step()
    damaged.write_bytes(whole)
    withdraw_from_plan(site, tiny.key(SILO))

    spoilers: dict[str, Callable[[], object]] = {
        "changed": lambda: damaged.write_bytes(whole[:-1]),
        "gone": lambda: shutil.rmtree(plan_folder(site, first)),
    }
    for how, spoil in spoilers.items():
        with case(how=how):
            spoil()
            caplog.clear()
            restarted = worker_of(tiny)
            restarted.begin()
            restarted.step()
            restarted.step()
            assert restarted.state.state == "withdrawn" and restarted.state.problem is None
            assert caplog.text.count(f"copy of the earlier plan {first} is damaged") == 1
    tiny.deliver_plan(SILO, second)
    restarted.step()
    assert (restarted.state.state, restarted.state.plan_id) == ("plan_accepted", second)


def test_withdrawal_of_an_accepted_submission_names_the_command_of_the_aggregator() -> None:
    # The notice arrives only while both sides run, and an aggregator at a later plan confirms nothing.
    accepted = State(state="accepted", plan_id="tiny-00000000")
    assert "`aggregator withdraw`" in describe_consequences(accepted)
    situation = describe_site(accepted.after("withdraw"), Circumstances(running=True))
    assert "`aggregator withdraw`" in situation.now
