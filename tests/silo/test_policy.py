"""A plan above the policy is refused, rule by rule, and the refusal names the rule."""

from datetime import timedelta

import pytest

from ddm.errors import DocumentError, PolicyError
from ddm.protocol.base import now_utc
from ddm.protocol.plan import Plan
from silo.config import Policy
from silo.policy import broken_rules, check_plan
from tests.documents import plan_document, to_bytes

ALLOWED = Policy()


def plan(**changes: object) -> Plan:
    return Plan.parse(to_bytes(plan_document(**changes)), subject="plan.json")


def test_policy_lets_an_ordinary_plan_pass() -> None:
    check_plan(plan(), ALLOWED, silo_id="north", now=now_utc())


@pytest.mark.parametrize(
    ("section", "change", "subject"),
    [
        ("privacy", {"max_epsilon": 7.9}, "epsilon"),
        ("privacy", {"max_delta": 1e-6}, "delta"),
        ("training", {"max_steps": 1499}, "steps"),
        ("training", {"max_batch_size": 63}, "batch size"),
        ("training", {"architectures": []}, "architecture"),
        ("training", {"max_expert_bytes": 1000}, "bytes of an expert"),
        ("training", {"max_release_bytes": 1000}, "bytes of a release"),
        ("training", {"max_train_s": 3599}, "seconds"),
        ("training", {"max_gpu_hours": 0.5}, "GPU"),
    ],
)
def test_policy_refuses_a_plan_that_asks_for_more(section: str, change: dict[str, object], subject: str) -> None:
    policy = Policy.model_validate({section: change})
    with pytest.raises(PolicyError, match=subject):
        check_plan(plan(), policy, silo_id="north", now=now_utc())


def test_policy_refuses_a_plan_that_does_not_name_this_silo() -> None:
    with pytest.raises(PolicyError, match="silos"):
        check_plan(plan(), ALLOWED, silo_id="south", now=now_utc())


def test_policy_refuses_a_plan_that_expired_before_acceptance() -> None:
    with pytest.raises(PolicyError, match="expiry"):
        check_plan(plan(), ALLOWED, silo_id="north", now=now_utc() + timedelta(days=400))


def test_policy_refuses_a_plan_without_the_audit_that_this_site_requires() -> None:
    document = plan_document()
    document["audit"]["required"] = False
    lax = Plan.parse(to_bytes(document), subject="plan.json")
    with pytest.raises(PolicyError, match="audit"):
        check_plan(lax, ALLOWED, silo_id="north", now=now_utc())
    relaxed = Policy.model_validate({"audit": {"required": False}})
    assert not list(broken_rules(lax, relaxed, silo_id="north", now=now_utc()))


def test_plan_with_an_unknown_architecture_does_not_parse() -> None:
    document = plan_document()
    document["expert"]["architecture"]["kind"] = "gan"
    with pytest.raises(DocumentError, match="architecture"):
        Plan.parse(to_bytes(document), subject="plan.json")


def test_plan_with_an_unknown_field_does_not_parse() -> None:
    document = plan_document()
    document["releases"]["raw_images"] = True
    with pytest.raises(DocumentError, match="raw_images"):
        Plan.parse(to_bytes(document), subject="plan.json")


def test_plan_whose_releases_exceed_its_total_does_not_parse() -> None:
    document = plan_document()
    document["releases"]["total"]["epsilon"] = 7.5
    with pytest.raises(DocumentError, match="more epsilon"):
        Plan.parse(to_bytes(document), subject="plan.json")
