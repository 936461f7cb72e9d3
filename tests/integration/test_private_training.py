"""A federation whose experts are trained privately, up to a release that says how private each of them is."""

from pathlib import Path

import pytest

from ddm.loading.release import Release, open_release
from ddm.privacy.accounting import total_epsilon
from ddm.protocol.weight_privacy import DpSgdMechanism, DpSgdPrivacy
from ddm.statistics.cost import mechanisms
from silo.audit.holdout import num_holdout_units
from silo.config import Site
from silo.privacy.holder import open_ledger
from silo.privacy.ledger import Debit, NoiseDraw
from tests.support.commands import run_command
from tests.support.federation import POLICY, TinyFederation, recipe, write_policy

SIZES = {"east": 60, "north": 90}
EPSILON = 4.0
DELTA = 5e-6
EXPERT = recipe().model_dump(mode="json")["expert"]
EXPERT["training"] |= {"num_steps": 4, "batch_size": 16}
PRIVACY = {
    "kind": "dp_sgd",
    "epsilon": EPSILON,
    "delta": DELTA,
    "units_per_step": 6,
    "images_per_unit": 2,
    "draws": 2,
}
STATISTICS = {
    "unit": "patient",
    "total": {"epsilon": 2.0, "delta": 1e-6},
    "counts": {"epsilon": 2.0, "num_groups": 4},
}
HELD_OUT = {"holdout_share": 0.1, "min_holdout_units": 2}
PRIVATE = recipe(
    expert=EXPERT | {"privacy": PRIVACY}, statistics=STATISTICS, router={"kind": "counts"}
)


def debits(site: Site) -> list[Debit]:
    entries = open_ledger(site, site.policy()).entries
    return [entry.record for entry in entries if isinstance(entry.record, Debit)]


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyFederation, Path]:
    folder = tmp_path_factory.mktemp("private")
    tiny = TinyFederation.create(folder / "tiny", SIZES, patients=True)
    for site in tiny.sites.values():
        declared = (
            site.policy().data.model_copy(update={"min_images": 40}).model_dump(exclude_none=True)
        )
        changed = {
            "privacy": {"unit": "patient"},
            "data": declared,
            "audit": POLICY["audit"] | HELD_OUT,
        }
        write_policy(site, POLICY | changed)
    tiny.complete(folder / "release", PRIVATE)
    return tiny, folder / "release"


def sites(released: tuple[TinyFederation, Path]) -> list[tuple[str, Site]]:
    return list(released[0].sites.items())


def opened(released: tuple[TinyFederation, Path]) -> Release:
    return open_release(released[1], root=released[0].root, state=None)


def test_release_states_the_epsilon_of_each_expert_as_its_silo_signed_it(
    released: tuple[TinyFederation, Path],
) -> None:
    release = opened(released)
    for expert in release.manifest.experts:
        (signed,) = release.submissions[expert.silo_id].experts
        assert expert.privacy == signed.privacy
        assert isinstance(expert.privacy, DpSgdPrivacy)
        assert (expert.privacy.epsilon, expert.privacy.delta, expert.privacy.unit) == (
            EPSILON,
            DELTA,
            "patient",
        )
        assert signed.training.seconds is None, (
            "it grows with the number of images of those who entered"
        )
    for silo in release.manifest.silos:
        assert (silo.epsilon, silo.delta) == pytest.approx((2.0 + EPSILON, 1e-6 + DELTA))
    rates = {
        expert.silo_id: expert.privacy.rate for expert in release.manifest.experts if expert.privacy
    }
    assert rates == {"east": 6 / 24, "north": 6 / 36}, "of 24 and 36 patients"
    held = {
        silo_id: num_holdout_units(24 if silo_id == "east" else 36, site.policy())
        for silo_id, site in sites(released)
    }
    assert held == {"east": 2, "north": 3}, (
        "who is held out from training counts in the rate, whose sum is public"
    )


def test_card_and_info_say_epsilon_delta_and_unit_of_each_expert(
    released: tuple[TinyFederation, Path],
) -> None:
    tiny, out = released
    card = next(out.rglob("README.md")).read_text("utf-8")
    said = run_command("ddm", "info", out, "--root", tiny.root)
    for expert in ("east", "north"):
        assert f"expert {expert}: epsilon 4, delta 5e-06 per patient, replace-one" in said.out
        assert f"expert {expert}: epsilon 4, delta 5e-06 per patient, replace-one" in card
    assert "trained with differential privacy (DP-SGD)" in said.out
    assert "not the experts' weights" not in card
    assert "silo east, expert east: trained privately; the epsilon is given in place of" in said.out
    assert "trained without DP-SGD" not in card


def test_ledger_holds_one_debit_for_statistics_and_expert_and_the_drawn_expert(
    released: tuple[TinyFederation, Path],
) -> None:
    tiny, _ = released
    release = opened(released)
    for silo_id, site in tiny.sites.items():
        (debit,) = debits(site)
        trained = debit.mechanisms["expert"]
        assert isinstance(trained, DpSgdMechanism)
        assert total_epsilon([trained], DELTA) <= EPSILON < 1.01 * total_epsilon([trained], DELTA)
        draws = {
            entry.record.kind: entry.record.draw_digest
            for entry in open_ledger(site, site.policy()).entries
            if isinstance(entry.record, NoiseDraw)
        }
        (signed,) = release.submissions[silo_id].experts
        assert draws["expert"] == signed.file.digest
        alone = total_epsilon(mechanisms(release.plan).values(), DELTA)
        assert alone < open_ledger(site, site.policy()).spent()[0] <= alone + EPSILON
        assert not list(site.private.rglob("secret")), "the secret goes once the expert is recorded"
