"""What `aggregator plan` finds in a draft before it signs, pair by pair."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aggregator.cli import app
from aggregator.planning.contradictions import DraftedPlan, find_contradictions
from aggregator.planning.cost import Cost
from ddm.errors import SetupError
from ddm.io.settings import save_settings
from ddm.limits import rules_of_limits
from ddm.planning.devices import DEVICES, MIN_STEP_S, UTILISATION
from ddm.planning.estimates import estimate_on_devices, estimate_work
from ddm.protocol.base import now_utc
from ddm.protocol.enrolment import Card
from ddm.protocol.plan import Plan
from ddm.protocol.policy import PolicyLimits
from ddm.system.console import run_app
from ddm.system.findings import Finding, FindingLevel
from silo.config import Policy
from silo.plan.policy import broken_rules
from tests.conftest import PublishedRelease
from tests.support.case import case
from tests.support.documents import plan_document, to_bytes
from tests.support.federation import PASSPHRASE, images, recipe

SIZE = {"images": 8192, "patients": None}
HOUR_S = 3600.0


def document(**changes: Any) -> dict[str, Any]:
    """A plan of three silos of equal size, in which nothing contradicts anything."""
    silos = changes.pop("silos", ["east", "north", "west"])
    plain = plan_document(silos=silos, agreed=dict.fromkeys(silos, SIZE))
    for path, value in changes.items():
        part = plain
        *tables, field = path.split("__")
        for table in tables:
            part = part[table]
        part[field] = value
    return plain


def card_of(plan: Plan, silo_id: str, **limits: Any) -> Card:
    fields = {"privacy": {"unit": "image"}} | limits
    return Card(
        root_digest="f" * 64,
        silo_id=silo_id,
        signing_key=f"ed25519:{'0' * 64}",
        node_key="ecdsa-sha2-nistp256 AAAA",
        agreed=plan.agreed[silo_id],
        limits=PolicyLimits.model_validate_json(json.dumps(fields)),
        created_at=now_utc(),
    )


def cost_of(plan: Plan, train_s: float = HOUR_S / 2) -> Cost:
    work = estimate_work(plan)
    return Cost(
        t_release=None,
        epsilon=1.0,
        expert_bytes=1,
        parameters=1,
        forward_flops=1,
        training_flops=1,
        work=work,
        sampling_bytes=1,
        num_experts=1,
        train_s=train_s,
        audit_s=0.0,
        timed=True,
        on_devices=estimate_on_devices(work),
    )


def drafted(plan_fields: dict[str, Any] | None = None, **limits: Any) -> DraftedPlan:
    plan = Plan.parse(to_bytes(plan_fields or document()), subject="plan.json")
    cards = {silo_id: card_of(plan, silo_id, **limits) for silo_id in plan.silos}
    return DraftedPlan(plan, cards, max_influence=0.5, cost=cost_of(plan))


def levels(draft: DraftedPlan) -> dict[str, FindingLevel]:
    return {finding.subject: finding.level for finding in find_contradictions(draft)}


def only(draft: DraftedPlan) -> Finding:
    (finding,) = find_contradictions(draft)
    assert finding.expected and finding.got and finding.remedy
    return finding


def test_plan_whose_numbers_agree_has_no_finding() -> None:
    assert find_contradictions(drafted()) == ()


def test_plan_is_refused_with_the_silos_whose_cards_it_exceeds_by_any_limit() -> None:
    for limits, subject in [
        ({"sizes": {"max_memory_bytes": 10**6}}, "bytes of memory of a training step"),
        ({"sizes": {"max_parameters": 1000}}, "parameters of an expert"),
        ({"privacy": {"unit": "image", "max_delta": 1e-7}}, "delta of the plan"),
        ({"training": {"max_steps": 1499}}, "training steps of all its experts"),
        ({"training": {"max_train_s": 3599}}, "seconds of training"),
        ({"training": {"architectures": ["unet"]}}, "architecture"),
        ({"audit": {"min_holdout_units": 301}}, "held-out units that the leak audit needs"),
        ({"licences": ["CC0-1.0"]}, "licence of the releases"),
    ]:
        with case(subject):
            draft = drafted()
            strict = card_of(draft.plan, "north", **limits)
            draft = replace(draft, cards={**draft.cards, "north": strict})
            findings = {finding.subject: finding for finding in find_contradictions(draft)}
            assert findings[subject].level == "fail"
            assert "north" in findings[subject].got and "east" not in findings[subject].got


def test_plan_of_more_memory_than_a_card_allows_passes_where_its_machine_divides_a_batch() -> None:
    whole = estimate_work(drafted().plan).memory_bytes
    limits = {"sizes": {"max_memory_bytes": int(whole * 0.9)}}
    assert levels(drafted(**limits)) == {"bytes of memory of a training step": "fail"}
    assert levels(drafted(**limits, batch_parts=2)) == {}


def test_aggregator_and_silo_find_the_same_broken_limits() -> None:
    """What a card states is all that the silo compares but for its declared data."""
    policy = Policy.model_validate(
        {
            "privacy": {"unit": "image", "max_epsilon": 1.0},
            "training": {"max_batch_size": 1, "architectures": []},
            "sizes": {"max_layer_values": 1},
            "audit": {"max_mia_auc": 0.5},
            "approval": {"licences": ["CC0-1.0"]},
        }
    )
    plan = drafted().plan
    by_card = set(rules_of_limits(plan, policy.public_limits(batch_parts=1), "north"))
    by_silo = set(broken_rules(plan, policy, silo_id="north", now=now_utc()))
    assert len(by_card) == 6
    assert by_card < by_silo
    assert {rule.subject for rule in by_silo - by_card} <= {"fewest images", "kind of the data"}


def test_card_states_nothing_of_a_policy_that_only_the_site_needs() -> None:
    policy = Policy.model_validate(
        {"privacy": {"budget_epsilon": 7.25}, "data": {"captions": True}}
    )
    stated = policy.public_limits(batch_parts=1).model_dump_json()
    assert "7.25" not in stated and "budget" not in stated and "captions" not in stated


def test_silo_that_surely_holds_more_than_max_influence_is_refused() -> None:
    fields = document()
    fields["agreed"] = dict.fromkeys(fields["silos"], {"images": 4096, "patients": None})
    fields["agreed"]["north"] = {"images": 400_000, "patients": None}
    fields["statistics"] |= {"sketch": None, "total": {"epsilon": 1.0, "delta": 0.0}}
    fields["router"] = {"kind": "counts"}
    finding = only(drafted(fields))
    assert finding.subject == "max_influence" and finding.level == "fail"
    assert "north with up to 98%" in finding.got
    assert levels(replace(drafted(fields), max_influence=0.99)) == {}


def test_silo_that_holds_more_than_max_influence_only_if_it_brings_all_it_may_is_a_warning() -> (
    None
):
    fields = document()
    # 60% if it brings 24,576, and 43% if it brings half of it.
    fields["agreed"]["north"] = {"images": 24_576, "patients": None}
    assert levels(drafted(fields)) == {"max_influence": "warn"}


def test_one_of_two_silos_with_nearly_all_units_is_a_warning_since_none_would_wait() -> None:
    fields = document(silos=["east", "north"])
    assert levels(drafted(fields)) == {}
    fields["agreed"]["north"] = {"images": 400_000, "patients": None}
    fields["statistics"] |= {"sketch": None, "total": {"epsilon": 1.0, "delta": 0.0}}
    fields["router"] = {"kind": "counts"}
    assert levels(drafted(fields)) == {"max_influence": "warn"}


def test_training_longer_than_the_plan_allows_is_refused_where_no_device_is_faster() -> None:
    slow = 1000 * HOUR_S
    draft = drafted(document(limits__train_s=int(3 * HOUR_S)))
    assert levels(replace(draft, cost=cost_of(draft.plan, slow))) == {"limits.train_s": "warn"}
    # A thousand times as many steps: no device of the table trains them in the second that is left.
    long = drafted(document(limits__train_s=1, expert__training__num_steps=1_000_000))
    found = levels(replace(long, cost=cost_of(long.plan, slow)))
    assert found["limits.train_s"] == "fail"


def test_gpu_hours_below_those_of_the_fastest_gpu_are_a_warning_and_none_stated_is_not() -> None:
    fields = document(expert__training__num_steps=1_000_000, limits__train_s=int(99 * HOUR_S))
    fields["limits"]["gpu_hours"] = 1e-4
    assert levels(drafted(fields)) == {"limits.gpu_hours": "warn"}
    fields["limits"]["gpu_hours"] = 0.0
    assert levels(drafted(fields)) == {}


def test_audit_that_a_silo_cannot_decide_is_a_warning_that_names_the_silo() -> None:
    fields = document()
    fields["agreed"]["west"] = {"images": 1024, "patients": None}
    finding = only(drafted(fields))
    assert finding.subject == "audit.min_holdout_units" and finding.level == "warn"
    assert "west holds out 0 of 1024" in finding.got and "silo waive" in finding.remedy
    assert levels(drafted(fields, audit={"max_holdout_share": 0.4})) == {}


def test_delta_that_would_allow_to_publish_a_unit_is_a_warning() -> None:
    fields = document()
    fields["agreed"] = dict.fromkeys(fields["silos"], {"images": 131_072, "patients": None})
    assert levels(drafted(fields)) == {"statistics.total.delta": "warn"}


def test_histogram_with_more_noise_than_units_in_a_cell_is_a_warning() -> None:
    fields = document(statistics__counts={"epsilon": 0.01, "num_groups": 64})
    assert levels(drafted(fields)) == {"statistics.counts": "warn"}


def test_private_step_of_more_units_than_a_silo_has_is_a_warning() -> None:
    fields = document(statistics__total={"epsilon": 7.9, "delta": 1e-5})
    fields["statistics"]["sketch"] = None
    fields["statistics"]["total"] = {"epsilon": 1.0, "delta": 1e-6}
    fields["router"] = {"kind": "counts"}
    fields["limits"]["train_s"] = int(99 * HOUR_S)
    fields["limits"]["gpu_hours"] = 0.0
    fields["expert"]["privacy"] = {
        "kind": "dp_sgd",
        "epsilon": 4.0,
        "delta": 1e-6,
        "units_per_step": 8192,
        "images_per_unit": 1,
        "draws": 1,
    }
    assert levels(drafted(fields)) == {"expert.privacy.units_per_step": "warn"}
    fields["expert"]["privacy"]["units_per_step"] = 8191
    assert levels(drafted(fields)) == {}


def test_estimates_on_devices_follow_from_the_table_and_the_precision_of_the_training() -> None:
    batch = {"expert__training__batch_size": 65_536}
    plain = estimate_work(drafted(document(**batch)).plan)
    in_bf16 = estimate_work(drafted(document(**batch, expert__training__precision="bf16")).plan)
    for device, exact, fast in zip(
        DEVICES, estimate_on_devices(plain), estimate_on_devices(in_bf16), strict=True
    ):
        assert exact.train_s == pytest.approx(
            plain.training_flops / (UTILISATION * device.fp32_flops)
        )
        assert exact.train_s / fast.train_s == pytest.approx(device.bf16_flops / device.fp32_flops)


def test_small_steps_take_their_least_duration_on_every_device() -> None:
    work = estimate_work(drafted().plan)
    for estimate in estimate_on_devices(work):
        assert estimate.train_s == 1500 * MIN_STEP_S
        assert estimate.audit_s / estimate.train_s == pytest.approx(
            work.audit_flops / work.training_flops
        )


@pytest.mark.usefixtures("short_pages")
def test_command_refuses_a_contradiction_with_yes_as_well_and_signs_with_a_warning(
    published: PublishedRelease, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = published.tiny
    public = tmp_path / "public.npz"
    np.savez(public, images=images(240, 0.2, seed=1))
    passphrase = tmp_path / "pass"
    passphrase.write_bytes(PASSPHRASE + b"\n")

    def plan(**changes: Any) -> int:
        chosen = tmp_path / "recipe.toml"
        save_settings(recipe(**changes), chosen, "A recipe.")
        arguments = ["plan", tiny.federation.path, "--recipe", chosen, "--public", public, "--yes"]
        arguments += ["--passphrase-file", passphrase]
        with pytest.raises(SystemExit) as left:
            run_app(app, [str(argument) for argument in arguments])
        return int(str(left.value.code or 0))

    before = tiny.federation.current_plan()[0].plan_id
    above = recipe().limits.model_dump() | {"statistic_bytes": 2**30}
    assert plan(limits=above) == SetupError.exit_code
    assert "Refused: bytes of a statistic" in capsys.readouterr().out
    assert tiny.federation.current_plan()[0].plan_id == before
    assert plan() == 0
    assert "Warning: audit.min_holdout_units" in capsys.readouterr().out
    assert tiny.federation.current_plan()[0].plan_id != before
