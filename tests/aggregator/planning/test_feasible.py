"""What `aggregator plan` refuses before anything is fitted or signed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from aggregator.planning import draft
from aggregator.planning.feasible import check_feasible
from aggregator.planning.recipe import Recipe
from aggregator.planning.sign import check_signable
from ddm.errors import BusyError, PolicyError, SetupError
from ddm.io.locks import locked
from ddm.protocol.base import Unit, now_utc
from ddm.protocol.enrolment import AgreedSize, Card
from ddm.protocol.policy import PolicyLimits, PrivacyLimits
from tests.conftest import PublishedRelease
from tests.support.errors import has_subject
from tests.support.federation import make_draft, recipe


def card(
    silo_id: str, images: int, patients: int | None = None, *, unit: Unit = "image", **privacy: Any
) -> Card:
    """A silo's card, with the strictest policy that the small recipe fits unless `privacy` changes it."""
    limits = PrivacyLimits(unit=unit, **{"max_epsilon": 1000.0} | privacy)
    fields: dict[str, Any] = {
        "root_digest": "f" * 64,
        "silo_id": silo_id,
        "signing_key": f"ed25519:{'0' * 64}",
        "node_key": "ecdsa-sha2-nistp256 AAAA",
        "agreed": AgreedSize(images=images, patients=patients),
        "limits": PolicyLimits(privacy=limits),
        "created_at": now_utc(),
    }
    return Card(**fields)


CARDS = {"east": card("east", 64, max_epsilon=8.0), "north": card("north", 128)}


def changed(table: str, **fields: Any) -> Recipe:
    """The small recipe with some fields of one of its tables changed."""
    tables = json.loads(recipe().model_dump_json(exclude_none=True))
    place = tables
    for name in table.split("."):
        place = place[name]
    place |= fields
    return Recipe.model_validate_json(json.dumps(tables))


def refused(chosen: Recipe) -> SetupError:
    with pytest.raises(SetupError) as raised:
        check_feasible(chosen, CARDS)
    assert raised.value.expected and raised.value.got and raised.value.remedy
    return raised.value


def test_recipe_that_can_work_passes() -> None:
    check_feasible(recipe(), CARDS)
    check_feasible(changed("expert.training", num_steps=200), CARDS)


def test_training_too_short_to_teach_anything_is_refused_unless_it_is_a_rehearsal() -> None:
    error = refused(recipe(rehearsal=False))
    assert "num_steps" in error.subject
    (number,) = re.findall(r"([0-9]+) steps", str(error.expected))
    assert "rehearsal = true" in error.remedy
    for steps, works in ((int(number) - 1, False), (int(number), True)):
        tables = json.loads(
            changed("expert.training", num_steps=steps).model_dump_json(exclude_none=True)
        )
        chosen = Recipe.model_validate_json(json.dumps(tables | {"rehearsal": False}))
        if works:
            check_feasible(chosen, CARDS)
        else:
            refused(chosen)


def test_more_images_than_a_card_allows_are_refused_with_the_silos_that_lack_them() -> None:
    error = refused(recipe(partition={"kind": "silo", "min_images": 65}))
    assert "east has at most 64" in str(error.got) and "north" not in str(error.got)
    check_feasible(recipe(partition={"kind": "silo", "min_images": 64}), CARDS)
    partition = {"kind": "random", "num_parts": 4, "min_images": 17}
    assert "68 images of each silo, 17 for each of 4 parts" in str(
        refused(recipe(partition=partition)).got
    )
    check_feasible(recipe(partition=partition | {"min_images": 16}), CARDS)


def test_more_epsilon_than_a_card_lets_a_plan_spend_is_refused_with_the_silos_that_lack_it() -> (
    None
):
    usual = recipe()
    assert usual.statistics.total.epsilon == CARDS["east"].limits.privacy.max_epsilon
    private = {
        "kind": "dp_sgd",
        "epsilon": 4.0,
        "delta": 1e-6,
        "units_per_step": 4,
        "images_per_unit": 1,
        "draws": 2,
    }
    both = changed("expert", privacy=private)
    error = refused(both)
    assert "expert.privacy.epsilon" in error.subject and str(error.expected).endswith("card: 8")
    assert "12, 8 for the router and 4 for the experts" in str(
        error.got
    ) and "east allows 8" in str(error.got)
    assert "north" not in str(error.got), "whose card says nothing"
    check_feasible(both, {"east": card("east", 64), "north": card("north", 128, max_epsilon=12.0)})
    with pytest.raises(SetupError, check=has_subject("recipe, statistics.total.epsilon")):
        check_feasible(usual, {"east": card("east", 64, max_epsilon=7.9)})


def test_plan_of_images_is_refused_with_the_silos_whose_cards_say_that_they_protect_patients() -> (
    None
):
    by_image = recipe()
    by_patient = changed("statistics", unit="patient")
    assert by_image.statistics.unit == "image"
    units = {"east": "patient", "north": "image"}
    cards = {name: card(name, 64, 32, unit=unit) for name, unit in units.items()}
    with pytest.raises(SetupError, check=has_subject("recipe, statistics.unit")) as raised:
        check_feasible(by_image, cards)
    assert "east" in str(raised.value.got) and "north" not in str(raised.value.got)
    check_feasible(by_patient, cards)
    del cards["east"]
    check_feasible(by_image, cards)


def test_plan_of_patients_is_refused_with_the_silos_whose_cards_state_none() -> None:
    """Their images would count as as many patients, who do not exist, and their sites would stop at the first one."""
    by_patient = changed("statistics", unit="patient")
    cards = {"east": card("east", 64, 32), "north": card("north", 64)}
    with pytest.raises(SetupError, check=has_subject("recipe, statistics.unit")) as raised:
        check_feasible(by_patient, cards)
    assert "north" in str(raised.value.got) and "east" not in str(raised.value.got)
    assert 'statistics.unit = "image"' in raised.value.remedy
    check_feasible(changed("statistics", unit="image"), cards)
    check_feasible(by_patient, cards | {"north": card("north", 64, 64)})


def test_no_unit_is_advised_that_another_silo_lacks() -> None:
    cards = {"east": card("east", 64, 32, unit="patient"), "north": card("north", 64)}
    for unit in ("image", "patient"):
        with pytest.raises(SetupError, check=has_subject("recipe, statistics.unit")) as raised:
            check_feasible(changed("statistics", unit=unit), cards)
        assert "silo enroll SITE --out card.json --patients" in raised.value.remedy, unit
    # What the remedy says, done: the plan of patients can work.
    check_feasible(changed("statistics", unit="patient"), cards | {"north": card("north", 64, 64)})


def test_expert_that_is_larger_than_the_plan_lets_silos_send_is_refused() -> None:
    assert "limits.expert_bytes" in refused(changed("limits", expert_bytes=1000)).subject


def test_statistics_above_the_stated_total_are_refused() -> None:
    with pytest.raises(
        PolicyError, check=has_subject("recipe, statistics: all statistics together")
    ):
        check_feasible(changed("statistics.total", epsilon=7.0), CARDS)


def test_nothing_is_fitted_for_a_plan_that_cannot_work(
    published: PublishedRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft, "fit_public_parts", lambda *_: pytest.fail("fitted"))
    chosen = recipe(partition={"kind": "silo", "min_images": 10_000})
    with pytest.raises(SetupError, check=has_subject("recipe, partition.min_images")):
        make_draft(published.tiny.federation, chosen, torch.zeros(240, 1, 4, 4), tmp_path)


def test_plan_is_not_drafted_while_the_federation_runs_or_its_plan_cannot_be_replaced(
    published: PublishedRelease,
) -> None:
    federation = published.tiny.federation
    check_signable(federation)
    with (
        locked(federation.accepted, "intake"),
        pytest.raises(BusyError, check=has_subject("plan")) as busy,
    ):
        check_signable(federation)
    assert "Stop `aggregator run FED`" in busy.value.remedy
    (federation.releases / "1").rename(federation.path / "gone")
    with pytest.raises(SetupError, check=has_subject("plan tiny-")):
        check_signable(federation)
