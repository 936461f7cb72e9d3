"""A plan above the policy is refused, rule by rule, and the refusal names the rule."""

import json
import tomllib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import BaseModel

from ddm.errors import DocumentError, PolicyError
from ddm.protocol.base import now_utc
from ddm.protocol.limits import Audit
from ddm.protocol.plan import Plan
from silo.config import Policy
from silo.plan.policy import broken_rules, check_plan
from tests.support.case import case
from tests.support.documents import plan_document, to_bytes
from tests.support.errors import has_subject
from tests.support.policies import ordinary_policy

ALLOWED = ordinary_policy()
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "policy.md"


def plan(**changes: object) -> Plan:
    return Plan.parse(to_bytes(plan_document(**changes)), subject="plan.json")


def test_policy_lets_an_ordinary_plan_pass() -> None:
    check_plan(plan(), ALLOWED, silo_id="north", now=now_utc())


def test_policy_refuses_a_plan_that_asks_for_more() -> None:
    for section, change, subject in [
        ("privacy", {"max_epsilon": 7.9}, "epsilon"),
        ("privacy", {"max_delta": 1e-6}, "delta"),
        ("training", {"max_steps": 1499}, "training steps of all its experts"),
        ("training", {"max_batch_size": 63}, "batch size"),
        ("training", {"architectures": []}, "architecture"),
        ("training", {"max_expert_bytes": 1000}, "bytes of an expert"),
        ("training", {"max_statistic_bytes": 1000}, "bytes of a statistic"),
        ("training", {"max_train_s": 3599}, "seconds"),
        ("training", {"max_gpu_hours": 0.5}, "GPU"),
    ]:
        with case(section=section, change=change, subject=subject):
            policy = ordinary_policy(Policy.model_validate({section: change}))
            with pytest.raises(PolicyError, check=has_subject(subject)):
                check_plan(plan(), policy, silo_id="north", now=now_utc())


def test_policy_refuses_a_plan_whose_releases_have_a_licence_that_the_site_did_not_name() -> None:
    policy = ordinary_policy(Policy.model_validate({"approval": {"licences": ["CC0-1.0"]}}))
    with pytest.raises(PolicyError, check=has_subject("licence of the releases")):
        check_plan(plan(), policy, silo_id="north", now=now_utc())
    check_plan(plan(licence="CC0-1.0"), policy, silo_id="north", now=now_utc())


def test_policy_refuses_a_plan_that_does_not_name_this_silo() -> None:
    with pytest.raises(PolicyError, check=has_subject("silos")):
        check_plan(plan(), ALLOWED, silo_id="south", now=now_utc())


def test_policy_refuses_a_plan_that_expired_before_acceptance() -> None:
    with pytest.raises(PolicyError, check=has_subject("expiry")):
        check_plan(plan(), ALLOWED, silo_id="north", now=now_utc() + timedelta(days=400))


def test_policy_refuses_a_plan_without_the_audit_that_this_site_requires() -> None:
    document = plan_document()
    document["audit"]["required"] = False
    lax = Plan.parse(to_bytes(document), subject="plan.json")
    with pytest.raises(PolicyError, check=has_subject("audit")):
        check_plan(lax, ALLOWED, silo_id="north", now=now_utc())
    relaxed = ordinary_policy(Policy.model_validate({"audit": {"required": False}}))
    assert not list(broken_rules(lax, relaxed, silo_id="north", now=now_utc()))


def test_plan_whose_audit_would_let_more_pass_than_this_site_does_is_refused() -> None:
    """Else an aggregator writes the verdict: with limits of 1, an AUC of .93 with 60% found is a pass."""
    usual = Audit(required=True)
    for name, loose in {
        "max_mia_auc": 0.93,
        "max_mia_tpr": 0.6,
        "max_near_copy_rate": 1.0,
        "min_holdout_units": 299,
    }.items():
        with case(name):
            required_plan = plan(audit=usual.model_dump(mode="json") | {name: loose})
            ((allowed, got),) = rules_broken_by(required_plan).values()
            assert (
                f"{getattr(usual, name):g} (audit.{name} in policy.toml)" in allowed
                and got == f"{loose:g}"
            )
            with pytest.raises(PolicyError, match=f"plan {required_plan.plan_id}: .*leak audit"):
                check_plan(required_plan, ALLOWED, silo_id="north", now=now_utc())
            assert not rules_broken_by(
                required_plan, ordinary_policy(Policy.model_validate({"audit": {name: loose}}))
            )
    strict = {
        "required": True,
        "min_holdout_units": 301,
        "max_mia_auc": 0.5,
        "max_near_copy_rate": 0.0,
    }
    assert not rules_broken_by(plan(audit=strict))
    assert not rules_broken_by(plan(audit={"required": True})), (
        "a plan that states nothing has the policy's defaults"
    )


def test_every_example_asks_for_an_audit_that_the_default_policy_takes() -> None:
    num_audits = 0
    for path in sorted(PAGE.parents[2].joinpath("examples").rglob("*.toml")):
        if audit := tomllib.loads(path.read_text("utf-8")).get("audit"):
            with case(path.name):
                assert not rules_broken_by(plan(audit=audit))
            num_audits += 1
    assert num_audits > 5


def test_plan_with_an_unknown_architecture_does_not_parse() -> None:
    document = plan_document()
    document["expert"]["architecture"]["kind"] = "gan"
    with pytest.raises(DocumentError, check=has_subject("architecture")):
        Plan.parse(to_bytes(document), subject="plan.json")


def test_plan_with_an_unknown_field_does_not_parse() -> None:
    document = plan_document()
    document["statistics"]["raw_images"] = True
    with pytest.raises(DocumentError, check=has_subject("plan.json, field statistics")):
        Plan.parse(to_bytes(document), subject="plan.json")


def plan_with_statistics(**statistics: object) -> Plan:
    document = plan_document()
    document["statistics"] |= statistics
    return Plan.parse(to_bytes(document), subject="plan.json")


def rules_broken_by(required_plan: Plan, policy: Policy = ALLOWED) -> dict[str, tuple[str, str]]:
    broken = broken_rules(required_plan, policy, silo_id="north", now=now_utc())
    return {subject: (allowed, got) for subject, allowed, got in broken}


def test_policy_that_protects_patients_refuses_a_plan_that_protects_images() -> None:
    by_patient = ordinary_policy(Policy.model_validate({"privacy": {"unit": "patient"}}))
    assert "say nothing about a patient" in rules_broken_by(plan(), by_patient)["privacy unit"][1]
    of_patients = plan_with_statistics(unit="patient")
    assert not rules_broken_by(of_patients, by_patient)
    # what protects patients protects their images
    assert not rules_broken_by(of_patients)


def test_policy_refuses_a_plan_of_patients_at_a_site_whose_card_states_none() -> None:
    """It would be accepted, and stop at the first image without a patient."""
    document = plan_document()
    document["statistics"]["unit"] = "patient"
    document["agreed"]["north"] = {"images": 1024, "patients": None}
    without_patients = Plan.parse(to_bytes(document), subject="plan.json")
    assert rules_broken_by(without_patients).keys() == {"privacy unit"}


def test_plan_whose_releases_cost_more_than_it_states_is_refused_with_both_figures() -> None:
    stated = {"epsilon": 7.5, "delta": 1e-5}
    (allowed, got) = rules_broken_by(plan_with_statistics(total=stated))[
        "privacy of all statistics together"
    ]
    assert "7.5" in allowed
    assert 7.6 < float(got) < 7.75
    assert not rules_broken_by(plan_with_statistics(total={"epsilon": 7.9, "delta": 1e-5}))


def test_plan_that_asks_for_noise_alone_is_refused() -> None:
    broken = rules_broken_by(plan_with_statistics(counts={"epsilon": 1e-9, "num_groups": 32}))
    assert "noise alone" in broken["privacy of all statistics together"][0]


@pytest.mark.parametrize(
    ("partition", "most", "num"),
    [
        ({"kind": "silo", "min_images": 50}, 1, 1),
        ({"kind": "silo_cluster", "min_images": 50}, 3, 3),
        ({"kind": "random", "min_images": 50, "num_parts": 5}, 5, 5),
    ],
)
def test_policy_bounds_the_experts_of_a_silo_and_their_steps_together(
    partition: dict[str, object], most: int, num: int
) -> None:
    required_plan = plan(partition=partition)
    enough = {"max_experts": most, "max_steps": 1500 * num}
    assert not rules_broken_by(
        required_plan, ordinary_policy(Policy.model_validate({"training": enough}))
    )
    fewer_steps = ordinary_policy(
        Policy.model_validate({"training": enough | {"max_steps": 1500 * num - 1}})
    )
    assert set(rules_broken_by(required_plan, fewer_steps)) == {"training steps of all its experts"}
    if most > 1:
        fewer = ordinary_policy(
            Policy.model_validate({"training": enough | {"max_experts": most - 1}})
        )
        allowed = f"at most {most - 1} (training.max_experts in policy.toml)"
        assert rules_broken_by(required_plan, fewer) == {
            "experts of one silo": (allowed, str(most))
        }


def test_class_counts_larger_than_the_plans_own_limit_are_refused() -> None:
    classes = {"epsilon": 0.1, "num_classes": 4096}
    document = plan_document()
    document["statistics"] |= {"class_counts": classes, "total": {"epsilon": 8.0, "delta": 1e-5}}
    document["limits"]["statistic_bytes"] = 8 * 32 * 4096
    assert not rules_broken_by(Plan.parse(to_bytes(document), subject="plan.json"))
    document["limits"]["statistic_bytes"] -= 1
    assert set(rules_broken_by(Plan.parse(to_bytes(document), subject="plan.json"))) == {
        "bytes of the class counts"
    }


def leaves(settings: BaseModel, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every field of a policy by its dotted name, with its default."""
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def test_policy_page_names_exactly_the_fields_and_their_defaults() -> None:
    rows = {}
    for line in PAGE.read_text("utf-8").splitlines():
        if line.startswith("| `"):
            name, default, _ = line.strip("| ").split(" | ", 2)
            rows[name.split("`")[1]] = default.strip("`").replace(",", "")
    defaults = dict(leaves(Policy()))
    defaults["audit.waiver.role"] = defaults.pop("audit.waiver")
    assert set(rows) == set(defaults)
    units = {"GiB": 2**30, "MiB": 2**20}
    for name, value in defaults.items():
        shown = rows[name]
        if shown.split()[-1] in units:
            assert int(shown.split()[0]) * units[shown.split()[1]] == value
        elif isinstance(value, bool) or value is None:
            assert shown == {True: "true", False: "false", None: "none"}[value]
        elif isinstance(value, tuple):
            assert shown == json.dumps(list(value))
        else:
            assert type(value)(shown.strip('"')) == value  # type: ignore[call-arg]


def test_plan_with_one_release_above_its_total_does_not_parse() -> None:
    document = plan_document()
    document["statistics"]["total"]["epsilon"] = 6.5
    with pytest.raises(DocumentError, match="more than the total"):
        Plan.parse(to_bytes(document), subject="plan.json")
