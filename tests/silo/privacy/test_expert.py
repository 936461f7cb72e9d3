"""One debit for a private training: before its first step, once, and for one expert alone."""

from pathlib import Path

import pytest

from aggregator.intake.checks import check_privacy
from ddm.errors import BudgetError, LedgerError, PolicyError
from ddm.protocol.base import File, now_utc
from ddm.protocol.plan import Plan
from ddm.protocol.statistics import Budget
from ddm.protocol.submission import SubmittedExpert, SubmittedTraining
from ddm.protocol.weight_privacy import DpSgdMechanism, DpSgdPrivacy, NoWeightPrivacy
from ddm.statistics.cost import paid_mechanisms
from silo.config import Policy, PrivacyPolicy
from silo.plan.policy import broken_rules
from silo.privacy.account import account
from silo.privacy.expert import PaidTraining, pay_for_training, stated_privacy
from silo.privacy.ledger import Ledger, make_ledger
from silo.privacy.spending import PlannedSpending
from tests.support.case import case
from tests.support.documents import plan_document, to_bytes
from tests.support.errors import has_subject

PRIVACY = {
    "kind": "dp_sgd",
    "epsilon": 4.0,
    "delta": 5e-6,
    "units_per_step": 20,
    "images_per_unit": 2,
    "draws": 2,
}
STATISTICS = {
    "unit": "patient",
    "relation": "replace_one",
    "total": {"epsilon": 2.0, "delta": 1e-6},
    "counts": {"epsilon": 2.0, "num_groups": 32},
    "sketch": None,
    "class_counts": None,
}
NUM_UNITS = 200
DATA = "d" * 64


def plan_of(**changes: object) -> Plan:
    document = plan_document(statistics=STATISTICS, router={"kind": "counts"})
    document["expert"]["training"]["num_steps"] = 50
    document["expert"]["privacy"] = PRIVACY | changes
    document["agreed"] = dict.fromkeys(document["silos"], {"images": 1024, "patients": NUM_UNITS})
    return Plan.parse(to_bytes(document), subject="plan")


PLAN = plan_of()


def ledger_of(folder: Path, epsilon: float = 10.0) -> Ledger:
    folder.mkdir()
    if not (folder / "ledger.jsonl").exists():
        make_ledger(folder / "ledger.jsonl")
    return Ledger(
        folder / "ledger.jsonl", budget=Budget(epsilon=epsilon, delta=1e-5), unit="patient"
    )


def spending_on(dataset_digest: str, num_units: int = NUM_UNITS) -> PlannedSpending:
    return PlannedSpending(PLAN, PLAN.digest, dataset_digest, num_units)


def paid(ledger: Ledger) -> PaidTraining:
    return pay_for_training(spending_on(DATA), ledger)


def test_training_that_starts_again_spends_nothing_again(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path / "site")
    first = paid(ledger)
    spent = ledger.spent()
    again = paid(ledger)
    assert (again.debit, again.mechanism) == (first.debit, first.mechanism)
    assert len(ledger.entries) == 1
    assert ledger.spent() == spent
    assert 4.0 < spent[0] <= PLAN.spends.epsilon
    (line,) = account(ledger).lines
    assert "expert" in line.mechanisms


def test_one_debit_pays_for_one_expert(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path / "site")
    expert = tmp_path / "expert.safetensors"
    training = paid(ledger)
    training.check_undrawn()
    expert.write_bytes(b"one")
    training.record(expert)
    training.record(expert)
    assert len(ledger.entries) == 2
    with pytest.raises(LedgerError, check=has_subject("private training")):
        training.check_undrawn()
    expert.write_bytes(b"another")
    with pytest.raises(LedgerError, match="second draw"):
        training.record(expert)


def test_training_that_the_budget_does_not_hold_is_refused_before_anything_is_debited(
    tmp_path: Path,
) -> None:
    """The statistics alone would fit."""
    ledger = ledger_of(tmp_path / "site", epsilon=3.0)
    with pytest.raises(BudgetError):
        paid(ledger)
    with pytest.raises(BudgetError):
        ledger.check_affordable(PLAN.digest, DATA, paid_mechanisms(PLAN, NUM_UNITS))
    assert not ledger.entries


def test_policy_bounds_the_epsilon_of_statistics_and_expert_together() -> None:
    for most, delta, subjects in (
        (6.0, 1e-5, set()),
        (5.9, 1e-5, {"epsilon of the plan"}),
        (8.0, 5e-6, {"delta of the plan"}),
    ):
        policy = Policy(privacy=PrivacyPolicy(max_epsilon=most, max_delta=delta))
        subjects_of_broken_rules = {
            subject for subject, *_ in broken_rules(PLAN, policy, silo_id="north", now=now_utc())
        }
        with case(most, delta):
            assert {
                subject for subject in subjects_of_broken_rules if "of the plan" in subject
            } == subjects


def test_plan_asks_for_no_private_training_that_would_promise_too_much() -> None:
    document = plan_document(statistics=STATISTICS, router={"kind": "counts"})
    expert = document["expert"] | {"privacy": PRIVACY}
    own = {"kind": "own", "plan_id": "digits-3f9a1c2f", "submissions": {}}
    refused = {
        "cannot start from": {"expert": expert | {"adaptation": own}},
        "chance alone": {"expert": expert | {"training": expert["training"] | {"order": "epochs"}}},
        "at once": {"expert": expert | {"privacy": PRIVACY | {"images_per_unit": 64}}},
        "one expert per silo": {
            "expert": expert,
            "partition": {"kind": "random", "min_images": 20, "num_parts": 2},
        },
    }
    for reason, changes in refused.items():
        with case(reason), pytest.raises(ValueError, match=reason):
            Plan.model_validate_json(to_bytes(document | changes))


def submitted(
    privacy: NoWeightPrivacy | DpSgdPrivacy, seconds: float | None = None
) -> SubmittedExpert:
    return SubmittedExpert(
        expert_id="north",
        num_images=None,
        steps=50,
        file=File(path="silos/north/experts/north/expert.safetensors", bytes=8, digest="e" * 64),
        training=SubmittedTraining(seconds=seconds, flops=1.0),
        privacy=privacy,
    )


def test_intake_refuses_an_expert_with_less_noise_or_another_guarantee_than_the_plan_asks(
    tmp_path: Path,
) -> None:
    ledger = ledger_of(tmp_path / "site")
    training = paid(ledger)
    stated = stated_privacy(spending_on(DATA), ledger)
    assert isinstance(stated, DpSgdPrivacy)
    assert stated.noise_multiplier == training.mechanism.noise_multiplier
    check_privacy(PLAN, submitted(stated), NUM_UNITS)
    lies = {
        "no guarantee": submitted(NoWeightPrivacy()),
        "epsilon 1": submitted(stated.model_copy(update={"epsilon": 1.0})),
        "rate": submitted(stated.model_copy(update={"rate": 0.5})),
        "noise multiplier": submitted(
            stated.model_copy(update={"noise_multiplier": stated.noise_multiplier / 2})
        ),
        "seconds": submitted(stated, seconds=3.0),
    }
    for lie, expert in lies.items():
        with case(lie), pytest.raises(PolicyError, match=lie):
            check_privacy(PLAN, expert, NUM_UNITS)
    plain = PLAN.model_copy(update={"expert": PLAN.expert.model_copy(update={"privacy": None})})
    with pytest.raises(PolicyError, match="as the plan asks for none"):
        check_privacy(plain, submitted(stated), NUM_UNITS)


def test_submission_states_the_noise_that_was_paid_for_on_its_own_data(tmp_path: Path) -> None:
    """Trained on A, on B, which has more units, and on A again."""
    ledger = ledger_of(tmp_path / "site", epsilon=20.0)
    first = spending_on(DATA)
    second = spending_on("e" * 64, num_units=2 * NUM_UNITS)
    trainings = [(spending, pay_for_training(spending, ledger)) for spending in (first, second)]
    assert pay_for_training(first, ledger).debit == first.debit_in(ledger)
    for spending, training in trainings:
        stated = stated_privacy(spending, ledger)
        assert isinstance(stated, DpSgdPrivacy)
        with case(spending.dataset_digest):
            assert training.debit == spending.debit_in(ledger)
            assert stated.noise_multiplier == training.mechanism.noise_multiplier
    with pytest.raises(LedgerError, check=has_subject("private training")):
        stated_privacy(spending_on("f" * 64), ledger)


def test_debit_pays_for_the_noise_of_the_number_of_units_that_there_are() -> None:
    mechanisms = [paid_mechanisms(PLAN, num)["expert"] for num in (100, NUM_UNITS, 400)]
    noise = [
        mechanism.noise_multiplier
        for mechanism in mechanisms
        if isinstance(mechanism, DpSgdMechanism)
    ]
    assert noise == sorted(noise, reverse=True)
    assert len(set(noise)) == 3
    assert paid_mechanisms(PLAN)["expert"] == mechanisms[1], "as agreed"
