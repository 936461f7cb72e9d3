"""A plan's life from both sides at once: real worker, courier, transfer and intake, in any order that hypothesis finds.

Only training and screening are made up, which take long and decide nothing here. Messages go straight from the
aggregator's half of the transfer to the courier's. The worker is a new one at every step, as after a loss of power.
"""

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from aggregator.config import Federation
from aggregator.intake.examination import Examination, Examiner
from aggregator.intake.quarantine import (
    QuarantineDecision,
    quarantined_submissions,
    record_decision,
)
from aggregator.membership.withdrawal import withdraw_silo
from aggregator.monitoring.silo_status import SiloStatus
from aggregator.monitoring.status import read_status
from aggregator.transfer.delivery import SiloDelivery, TransferLimits, load_bundle
from ddm.errors import ApprovalError, ArchipelagoError, BudgetError, DataError
from ddm.io.files import write_atomic
from ddm.io.tensors import save_tensors
from ddm.models import build_expert
from ddm.protocol.base import now_utc
from ddm.protocol.submission import ExpertTraining
from ddm.publishing.keys import load_key
from ddm.transport.messages import StatusQuery
from silo.courier.handlers import SiteLimits, answer
from silo.plan.succession import find_successor
from silo.plan.workspace import TrainingRecord
from silo.privacy.ledger import Debit
from silo.worker import stages
from silo.worker.approval import approve
from silo.worker.descriptions import Circumstances, describe_site, situation_lines
from silo.worker.life import TRANSITIONS
from silo.worker.retraining import assess_retraining, retrain
from silo.worker.state import State, load_state, present_state, reported_code, state_path
from silo.worker.training import SiloTraining
from silo.worker.withdrawal import withdraw_from_plan
from silo.worker.worker import Worker
from tests.support.federation import PASSPHRASE, POLICY, TinyFederation, write_policy
from tools.reference.plan_life import aggregator_standing

SILO = "north"
NUM_PLANS = 2
PERSON = {"approval": {"kind": "person"}}
ROOMY: dict[str, Any] = POLICY | PERSON | {"privacy": {"budget_epsilon": 20.0}}
STRICT: dict[str, Any] = POLICY | PERSON | {"privacy": {"budget_epsilon": 20.0, "max_epsilon": 3.0}}
# What signing a plan changes.
_SIGNED = ("tuf", "plans", "log")


class Template:
    """A federation before its first plan, and what each of its plans changes: signing takes longest."""

    def __init__(self, folder: Path) -> None:
        self.tiny = TinyFederation.create(folder / "tiny", {SILO: 40})
        write_policy(self.tiny.sites[SILO], ROOMY)
        self.plans = []
        self.signed = []
        for number in range(NUM_PLANS):
            self.plans.append(self.tiny.sign())
            self.signed.append(folder / f"signed-{number}")
            for name in _SIGNED:
                shutil.copytree(self.tiny.federation.path / name, self.signed[-1] / name)

    def sign(self, federation: Federation, number: int) -> None:
        """Let a plan come into force in a copy."""
        for name in _SIGNED:
            shutil.copytree(self.signed[number] / name, federation.path / name, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return Template(tmp_path_factory.mktemp("template"))


def make_experts(training: SiloTraining, **_: Any) -> None:
    """In the place of training: an expert that follows from the images alone."""
    plan = training.plan
    cohort = training.cohort
    work = training.work
    silo = training.silo_id
    if work.record_path(silo).exists():
        return
    seed = int(cohort.digest[:6], 16)
    made = build_expert(plan.expert.architecture, plan.expert_shape, seed=seed).state_dict()
    work.expert_path(silo).parent.mkdir(parents=True, exist_ok=True)
    save_tensors(
        work.expert_path(silo), {name: tensor.contiguous() for name, tensor in made.items()}
    )
    record = TrainingRecord(
        plan_id=plan.plan_id,
        expert_id=silo,
        num_units=cohort.num_units,
        num_images=len(cohort.images),
        steps=plan.expert.training.num_steps,
        training=ExpertTraining(loss=0.5, seconds=1.0, flops=1e6),
    )
    write_atomic(work.record_path(silo), record.encode())


class Both:
    """One silo and the aggregator."""

    def __init__(self, template: Template, monkeypatch: pytest.MonkeyPatch) -> None:
        self.template = template
        self.folder = Path(tempfile.mkdtemp(prefix="life-"))
        shutil.rmtree(self.folder)
        self.tiny = template.tiny.copy(self.folder)
        self.site = self.tiny.sites[SILO]
        self.federation = self.tiny.federation
        self.plan = 0
        self.key = self.tiny.key(SILO)
        self.suspicious = False
        self.limits = SiteLimits(
            self.site.path, bundle_bytes=1 << 26, shard_bytes=1 << 22, submission_bytes=1 << 26
        )
        monkeypatch.setattr("silo.worker.training.train_experts", make_experts)
        monkeypatch.setattr(
            Examiner,
            "examine",
            lambda self, silo, submission, digest, *_: Examination(silo, digest, ()),
        )
        monkeypatch.setattr(Examiner, "accepted", lambda self: {})
        monkeypatch.setattr(Examiner, "ratios", lambda self, examination: {})
        monkeypatch.setattr(
            Examiner, "faults", lambda *_: ["looks like noise"] if self.suspicious else []
        )
        template.sign(self.federation, 0)

    @property
    def plan_id(self) -> str:
        return self.template.plans[self.plan]

    @property
    def state(self) -> State:
        return load_state(state_path(self.site.private))

    def debits(self) -> list[str]:
        """The plans that were paid for, in order."""
        if not self.site.ledger_path.exists():
            return []
        entries = stages.open_ledger(self.site, self.site.policy()).entries
        return [entry.record.plan_id for entry in entries if isinstance(entry.record, Debit)]

    def work(self, most: int = 16) -> ArchipelagoError | None:
        """`silo run` for a while; spends nothing on a plan of whose end this site could know."""
        worker = Worker(self.site, self.key, lambda state: None)
        worker.begin()
        for _ in range(most):
            before = worker.state
            paid = self.debits()
            over = before.plan_id and find_successor(self.site, before.plan_id)
            try:
                worker.step()
            except ArchipelagoError as error:
                worker.keep_problem(error)
                return error
            finally:
                new = self.debits()[len(paid) :]
                assert not (over and before.plan_id in new), (
                    "epsilon was spent on a plan that was over"
                )
            if worker.state == before:
                break
        return None

    def exchange(self) -> None:
        """Let the transfer run until there is nothing more to say."""
        delivery = SiloDelivery(
            self.federation.path,
            self.plan_id,
            SILO,
            index=load_bundle(self.federation.bundle(self.plan_id)),
            limits=TransferLimits(shard_bytes=1 << 22, max_submission_bytes=1 << 26, wait_s=0),
        )
        num_queries = 0
        for _ in range(60):
            for envelope in delivery.next_requests([], 4):
                num_queries += isinstance(envelope.message, StatusQuery)
                delivery.take(envelope.message, answer(envelope, self.limits))
            if num_queries >= 2:
                return
            if not delivery.next_requests([], 4):  # a receipt is being made
                return

    def settle(self) -> None:
        """Let both sides hear everything that the other has to say."""
        for _ in range(4):
            self.exchange()
            self.work()
            self.exchange()
            self.tiny.take_in()

    def aggregator(self) -> SiloStatus:
        status = read_status(self.federation, now_utc()).silo(SILO)
        assert status
        return status

    def check_agreement(self) -> None:
        """Both sides' status say the same, in the words of docs/reference/plan-life.md."""
        state = present_state(self.site)
        seen = self.aggregator()
        if seen.standing == "withdrawn" and state.state == "plan_refused":
            return  # a plan that this site never took: it has no key by which to believe the aggregator's notice
        if state.state not in ("waiting", "superseded"):
            assert state.plan_id == self.plan_id
        if state.state == "withdrawn":
            state = state.model_copy(update={"confirmed": True})
        assert seen.standing == aggregator_standing(state, reported_code(self.site)), (state, seen)

    def check_remedies(self) -> None:
        """Every command that a message names can be typed now."""
        state = present_state(self.site)
        circumstances = Circumstances(running=False)
        situation = describe_site(state, circumstances)
        said = " ".join(situation_lines(situation, state, circumstances))
        for verb in set(re.findall(r"`?silo (run|review|approve|retrain|withdraw)\b", said)):
            if verb in ("review", "approve"):
                assert state.state == "awaiting_approval", said
            elif verb != "run":
                assert (state.state, verb) in TRANSITIONS, said
                if verb == "retrain":
                    assess_retraining(self.site)

    def mend_images(self) -> None:
        """Change a pixel, in a file of a new name."""
        path = Path(self.site.settings().data)
        with np.load(path) as archive:
            arrays = {name: archive[name].copy() for name in archive.files}
        arrays["images"][0, 0, 0, 0] *= 0.99
        changed = path.with_name(f"{path.stem}x.npz")
        np.savez(changed, **arrays)
        settings_file = self.site.path / "silo.toml"
        settings_file.write_text(settings_file.read_text().replace(str(path), str(changed)))

    def decide(self, verdict: Any) -> None:
        for entry in quarantined_submissions(self.federation, self.plan_id):
            decision = QuarantineDecision(
                plan_id=self.plan_id,
                silo_id=SILO,
                submission_digest=entry.record.submission_digest,
                verdict=verdict,
                reason="a test",
                at=now_utc(),
            )
            record_decision(self.federation, decision)
        self.suspicious = False


class Life(RuleBasedStateMachine):
    """Whatever either side may do, in any order."""

    both: Both

    @rule()
    def one_step(self) -> None:
        self.both.work(most=1)

    @rule()
    def run_silo(self) -> None:
        self.both.work()

    @rule()
    def exchange(self) -> None:
        self.both.exchange()

    @rule()
    def take_in(self) -> None:
        self.both.tiny.take_in()

    @precondition(lambda self: self.both.state.state == "awaiting_approval")
    @rule()
    def approve(self) -> None:
        state = self.both.state
        site = self.both.site
        over = find_successor(site, state.plan_id or "")
        try:
            approve(site, str(state.submission_digest))
            assert not over
        except ApprovalError:
            assert over

    @precondition(lambda self: self.both.plan + 1 < NUM_PLANS)
    @rule()
    def sign_another_plan(self) -> None:
        self.both.plan += 1
        self.both.template.sign(self.both.federation, self.both.plan)

    @rule()
    def give_up(self) -> None:
        before = self.both.state
        paid = self.both.debits()
        try:
            assert withdraw_from_plan(self.both.site, self.both.key).state == "withdrawn"
        except ApprovalError:
            assert before.state in ("waiting", "superseded")
        assert self.both.debits() == paid

    @rule()
    def train_again(self) -> None:
        before = self.both.state
        try:
            assert retrain(self.both.site).state == "plan_accepted"
        except ApprovalError:
            assert (before.state, "retrain") not in TRANSITIONS or find_successor(
                self.both.site, before.plan_id or ""
            )
        except (BudgetError, DataError):
            assert self.both.state == before

    @rule()
    def mend_images(self) -> None:
        self.both.mend_images()

    @rule()
    def tighten_policy(self) -> None:
        write_policy(self.both.site, STRICT)

    @rule()
    def loosen_policy(self) -> None:
        write_policy(self.both.site, ROOMY)

    @rule()
    def suspect(self) -> None:
        self.both.suspicious = True

    @rule()
    def admit(self) -> None:
        self.both.decide("admitted")

    @rule()
    def refuse(self) -> None:
        self.both.decide("refused")

    @rule()
    def withdraw_silo(self) -> None:
        federation = self.both.federation
        withdraw_silo(federation, SILO, "a test", load_key(federation, "receipts", PASSPHRASE))

    @rule()
    def settle(self) -> None:
        self.both.settle()
        self.both.check_agreement()

    @invariant()
    def every_remedy_works(self) -> None:
        self.both.check_remedies()

    def teardown(self) -> None:
        try:
            self.settle()
        finally:
            shutil.rmtree(self.both.folder, ignore_errors=True)


@pytest.fixture
def both(template: Template, monkeypatch: pytest.MonkeyPatch) -> Iterator[Both]:
    made = Both(template, monkeypatch)
    yield made
    shutil.rmtree(made.folder, ignore_errors=True)


def walk(template: Template, monkeypatch: pytest.MonkeyPatch, *, examples: int, steps: int) -> None:
    def begin() -> Life:
        machine = Life()
        machine.both = Both(template, monkeypatch)
        return machine

    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(begin, settings=chosen)


def test_both_sides_agree_whatever_happens_and_nothing_is_spent_in_vain(
    template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk(template, monkeypatch, examples=4, steps=10)


@pytest.mark.slow
def test_both_sides_agree_on_many_long_walks(
    template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk(template, monkeypatch, examples=60, steps=30)
