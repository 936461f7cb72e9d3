"""A silo that states more than it has: no number of its own buys it the ensemble, whatever statistics come with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aggregator.cli import app as aggregator_app
from aggregator.intake.inventory import take_inventory
from aggregator.intake.quarantine import QuarantineEntry, quarantined_submissions, read_decisions
from aggregator.membership.registry import enroll_silo
from aggregator.planning.sign import sign_plan
from aggregator.release.publish import publish
from aggregator.router.statistics import read_statistics
from aggregator.router.train import load_report, train_router
from ddm.cli.main import app as ddm_app
from ddm.errors import (
    MissingFileError,
    PolicyError,
    RefusedError,
    SetupError,
    TensorFileError,
    TrustError,
)
from ddm.loading.release import Release, open_release
from ddm.protocol.manifest import Manifest
from ddm.protocol.receipt import Receipt
from ddm.system.console import run_app
from silo.setup import make_card
from tests.support.dishonest_silo import DishonestSilo
from tests.support.errors import has_subject
from tests.support.federation import PASSPHRASE, TinyFederation, images, make_draft, recipe
from tests.support.publishing import (
    publish_changed_manifest,
    publish_short_pages,
    publish_unchecked,
)

HONEST = 40
CLAIMED = 340_000
AGREED = 64
SILOS = {"east": HONEST, "north": HONEST, "west": HONEST}
OTHERS = ("east", "north")
COUNTS = {"epsilon": 1.0, "num_groups": 4}
TOTAL = {"unit": "image", "total": {"epsilon": 8.0, "delta": 1e-5}, "counts": COUNTS}
SKETCH = {"epsilon": 3.0, "delta": 1e-6, "rank": 2}
LIMITS = {"expert_bytes": 1 << 20, "statistic_bytes": 1 << 22, "train_s": 600, "gpu_hours": 1.0}
SAMPLES = {"patch": 2, "hidden": 16, "depth": 1, "heads": 2, "num_steps": 5, "images_per_expert": 4}
ROUTERS: dict[str, dict[str, Any]] = {
    "counts": {"router": {"kind": "counts"}, "statistics": TOTAL},
    "learned": {
        "router": {"kind": "learned", "hidden": 8, "depth": 1, "num_steps": 5},
        "statistics": TOTAL | {"sketch": SKETCH},
    },
    "samples": {"router": {"kind": "samples", **SAMPLES}, "statistics": TOTAL},
    "clusters": {
        "router": {"kind": "counts"},
        "statistics": TOTAL,
        "partition": {"kind": "silo_cluster", "min_images": 10},
    },
    "classes": {
        "router": {"kind": "counts"},
        "condition": {"kind": "class", "num_classes": 2},
        "statistics": TOTAL | {"class_counts": {"epsilon": 1.0, "num_classes": 2}},
    },
}
COUNTED = ROUTERS["counts"]


@pytest.fixture(scope="module")
def enrolled_once(tmp_path_factory: pytest.TempPathFactory) -> TinyFederation:
    return TinyFederation.create(tmp_path_factory.mktemp("claims"), SILOS)


@pytest.fixture
def tiny(enrolled_once: TinyFederation, tmp_path: Path) -> TinyFederation:
    """Three silos, each enrolled for at most 64 images, without a plan."""
    return enrolled_once.copy(tmp_path / "copy")


def planned(tiny: TinyFederation, **tables: Any) -> str:
    return tiny.sign(recipe(limits=LIMITS, **tables))


def sent(tiny: TinyFederation, **units: int) -> dict[str, Receipt]:
    """Take in one submission of each of these silos; return the receipts."""
    for silo_id, num in units.items():
        DishonestSilo(tiny, silo_id).send(num)
    return {receipt.silo_id: receipt for receipt in tiny.take_in()}


def waiting(tiny: TinyFederation) -> list[QuarantineEntry]:
    return quarantined_submissions(tiny.federation, tiny.federation.current_plan()[0].plan_id)


def run(app: Any, *arguments: object) -> int:
    with pytest.raises(SystemExit) as left:
        run_app(app, [str(argument) for argument in arguments])
    return int(left.value.code or 0)


def admit(tiny: TinyFederation, *arguments: object, silo_id: str = "west") -> int:
    return run(
        aggregator_app,
        "admit",
        tiny.federation.path,
        silo_id,
        "--reason",
        "counted on site",
        *arguments,
    )


def shares(tiny: TinyFederation) -> list[float]:
    """Train the router; return what each accepted silo holds of the prior, by name."""
    inventory = take_inventory(tiny.federation)
    report = train_router(tiny.federation, inventory, seed=0)
    held_K = [0.0] * len(inventory.silos)
    layout = read_statistics(tiny.federation, inventory).layout
    for k, prior in zip(layout.silo_E, report.expert_priors, strict=True):
        held_K[k] += prior
    return held_K


def published(tiny: TinyFederation, out: Path) -> Release:
    train_router(tiny.federation, take_inventory(tiny.federation), seed=0)
    publish(tiny.federation, PASSPHRASE, out, rehearsal=True)
    return open_release(out, root=tiny.root, state=None)


def priors(release: Release) -> dict[str, float]:
    silos = {silo.silo_id: 0.0 for silo in release.manifest.silos}
    for expert in release.manifest.experts:
        silos[expert.silo_id] += expert.prior
    return silos


@pytest.mark.parametrize("kind", ROUTERS)
def test_claim_above_the_agreed_number_waits_for_a_person_whatever_the_statistics(
    tiny: TinyFederation, kind: str
) -> None:
    """The attack: 340,000 claimed by a silo of 40, with statistics that match; it held 99.9% of the prior."""
    plan_id = planned(tiny, **ROUTERS[kind])
    received = sent(tiny, east=AGREED, north=AGREED, west=CLAIMED)
    assert {
        silo_id: receipt.verdict.kind for silo_id, receipt in received.items()
    } == dict.fromkeys(OTHERS, "accepted")
    (one,) = waiting(tiny)
    assert (one.record.silo_id, one.record.num_units) == ("west", CLAIMED)
    assert any(
        f"states {CLAIMED} images, more than the {AGREED} agreed" in reason
        for reason in one.record.reasons
    )
    assert any("above max_influence of 50.0%" in reason for reason in one.record.reasons)
    assert not (tiny.federation.accepted / plan_id / "west").exists()
    assert not (tiny.federation.receipts / plan_id / "west").exists()
    assert admit(tiny) == 0
    assert {receipt.verdict.kind for receipt in tiny.take_in()} == {"accepted"}
    assert take_inventory(tiny.federation).counted_units == dict.fromkeys(SILOS, AGREED)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in ROUTERS])
def test_admitted_claim_holds_no_more_of_the_prior_than_was_agreed_whatever_the_router(
    tiny: TinyFederation, kind: str
) -> None:
    planned(tiny, **ROUTERS[kind])
    sent(tiny, east=AGREED, north=AGREED, west=CLAIMED)
    admit(tiny)
    tiny.take_in()
    assert shares(tiny) == pytest.approx([1 / 3] * 3)


@pytest.mark.usefixtures("short_pages")
def test_person_lowers_a_claim_and_every_reader_sees_number_and_reason(
    tiny: TinyFederation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(tiny, **COUNTED)
    sent(tiny, east=AGREED, north=AGREED, west=CLAIMED)
    assert admit(tiny, "--units", AGREED + 1) == SetupError.exit_code
    assert (
        f"at most {AGREED}: west states {CLAIMED}, and {AGREED} were agreed"
        in capsys.readouterr().err
    )
    assert admit(tiny, "--units", 32) == 0
    tiny.take_in()
    release = published(tiny, tmp_path / "release")
    assert priors(release) == pytest.approx({"east": 0.4, "north": 0.4, "west": 0.2})
    for command in ("verify", "info"):
        assert (
            run(
                ddm_app,
                command,
                tmp_path / "release",
                "--root",
                tiny.root,
                "--state",
                tmp_path / "seen",
            )
            == 0
        )
        assert (
            f"west counts as 32 of the {CLAIMED} images that it states: counted on site"
            in capsys.readouterr().out
        )


def test_decision_about_an_accepted_silo_may_only_lower_its_number_and_needs_a_new_router(
    tiny: TinyFederation,
) -> None:
    planned(tiny, **COUNTED)
    assert len(sent(tiny, east=AGREED, north=AGREED, west=AGREED)) == 3
    assert shares(tiny) == pytest.approx([1 / 3] * 3)
    assert admit(tiny) == SetupError.exit_code, "nothing is wrong with it"
    assert admit(tiny, "--units", AGREED) == SetupError.exit_code
    assert admit(tiny, "--units", 32) == 0
    with pytest.raises(MissingFileError, check=has_subject("router")):
        load_report(tiny.federation, take_inventory(tiny.federation))
    assert shares(tiny) == pytest.approx([0.4, 0.4, 0.2])
    for raised in (33, 64, 32):
        assert admit(tiny, "--units", raised) == SetupError.exit_code
    assert admit(tiny, "--units", 16) == 0
    assert take_inventory(tiny.federation).silos["west"].counted.units == 16
    assert [decision.units for decision in read_decisions(tiny.federation)] == [32, 16]


def test_number_agreed_by_mistake_still_does_not_buy_more_than_max_influence(
    tiny: TinyFederation,
) -> None:
    """The card said 340,000, and nobody looked at it."""
    site = tiny.sites["west"]
    card = tiny.path / "west.card.json"
    card.write_bytes(make_card(site, tiny.key("west"), images=CLAIMED))
    enroll_silo(tiny.federation, card)
    planned(tiny, **COUNTED)
    assert sent(tiny, west=CLAIMED) == {}
    (reason,) = waiting(tiny)[0].record.reasons
    assert (
        f"{CLAIMED} images ({CLAIMED} agreed)" in reason
        and "above max_influence of 50.0%" in reason
    )
    tiny.federation.path.joinpath("federation.toml").write_text(
        (tiny.federation.path / "federation.toml")
        .read_text()
        .replace("max_influence = 0.5", "max_influence = 1.0")
    )
    assert admit(tiny, "--units", 100) == 0
    tiny.take_in()
    assert take_inventory(tiny.federation).counted_units == {"west": 100}


def test_patients_are_bounded_by_the_number_that_each_card_states(
    tiny: TinyFederation,
) -> None:
    for silo_id, patients in {"east": AGREED, "north": AGREED, "west": 20}.items():
        card = tiny.path / f"{silo_id}.card.json"
        sealed = make_card(tiny.sites[silo_id], tiny.key(silo_id), images=AGREED, patients=patients)
        card.write_bytes(sealed)
        enroll_silo(tiny.federation, card)
    planned(tiny, router={"kind": "counts"}, statistics=TOTAL | {"unit": "patient"})
    assert sent(tiny, east=AGREED, north=AGREED + 1, west=21).keys() == {"east"}
    reasons = {entry.record.silo_id: entry.record.reasons for entry in waiting(tiny)}
    assert any(
        f"states {AGREED + 1} patients, more than the {AGREED} agreed" in reason
        for reason in reasons["north"]
    )
    assert any(
        "states 21 patients, more than the 20 agreed" in reason for reason in reasons["west"]
    )


def test_plan_drafted_before_a_card_changed_is_not_signed(tiny: TinyFederation) -> None:
    public = torch.from_numpy(images(120, 0.0, seed=90))
    draft = make_draft(tiny.federation, recipe(), public, tiny.path / "scratch")
    card = tiny.path / "west.card.json"
    card.write_bytes(make_card(tiny.sites["west"], tiny.key("west"), images=32))
    enroll_silo(tiny.federation, card)
    with pytest.raises(SetupError, check=has_subject("plan tiny-")):
        sign_plan(tiny.federation, draft, PASSPHRASE)


def test_silo_that_outweighs_the_others_by_what_they_really_brought_waits_before_the_router(
    tiny: TinyFederation, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(tiny, **COUNTED)
    assert len(sent(tiny, east=16, north=16, west=AGREED)) == 3, "each within what was agreed"
    with pytest.raises(RefusedError, check=has_subject("accepted submissions")):
        train_router(tiny.federation, take_inventory(tiny.federation), seed=0)
    assert run(aggregator_app, "quarantine", tiny.federation.path) == 0
    assert "west, accepted, but an outlier by now" in capsys.readouterr().out
    assert admit(tiny, silo_id="east") == SetupError.exit_code
    assert admit(tiny, "--units", 20) == 0
    report = train_router(tiny.federation, take_inventory(tiny.federation), seed=0)
    assert report.expert_priors == pytest.approx((16 / 52, 16 / 52, 20 / 52))


def test_share_is_not_held_against_either_of_two_silos(tiny: TinyFederation) -> None:
    """One of two always has half or more; the agreed number is what bounds it."""
    planned(tiny, **COUNTED)
    assert len(sent(tiny, east=16, west=AGREED)) == 2
    train_router(tiny.federation, take_inventory(tiny.federation), seed=0)


@pytest.mark.parametrize(
    ("kind", "statistic"),
    [("counts", "counts"), ("classes", "class_counts")],
)
def test_statistics_heavier_than_the_stated_number_are_refused(
    tiny: TinyFederation, kind: str, statistic: str
) -> None:
    planned(tiny, **ROUTERS[kind])
    DishonestSilo(tiny, "west").send(HONEST, **{statistic: CLAIMED})
    (receipt,) = tiny.take_in()
    assert receipt.verdict.kind == "refused" and receipt.verdict.code == TensorFileError.exit_code
    assert waiting(tiny) == []


def test_many_clusters_of_one_silo_hold_together_no_more_than_its_share(
    tiny: TinyFederation,
) -> None:
    planned(tiny, **ROUTERS["clusters"], clustering={"num_fine": 8, "num_coarse": 4})
    assert len(sent(tiny, east=AGREED, north=16, west=AGREED)) == 3
    inventory = take_inventory(tiny.federation).silos.items()
    assert {silo: len(accepted.submission.experts) for silo, accepted in inventory} == {
        "east": 4,
        "north": 1,
        "west": 4,
    }
    assert shares(tiny) == pytest.approx([64 / 144, 16 / 144, 64 / 144])


def test_submission_accepted_past_intake_is_not_counted_above_what_was_agreed(
    tiny: TinyFederation,
) -> None:
    """Whatever put it among the accepted ones: the inventory itself refuses it."""
    plan_id = planned(tiny, **COUNTED)
    (tiny.federation.accepted / plan_id).mkdir(parents=True)
    DishonestSilo(tiny, "west").send(CLAIMED).rename(tiny.federation.accepted / plan_id / "west")
    with pytest.raises(PolicyError, match=f"at most {AGREED}.*{CLAIMED}, which no person admitted"):
        take_inventory(tiny.federation)


def _of_west(**changes: object) -> Callable[[Manifest], Manifest]:
    def lie(manifest: Manifest) -> Manifest:
        silos = tuple(
            s.model_copy(update=changes) if s.silo_id == "west" else s for s in manifest.silos
        )
        total = sum(silo.units for silo in silos)
        units = {silo.silo_id: silo.units for silo in silos}
        experts = tuple(
            e.model_copy(update={"prior": units[e.silo_id] / total}) for e in manifest.experts
        )
        return manifest.model_copy(update={"silos": silos, "experts": experts})

    return lie


LIES = {
    "above what was agreed": (
        _of_west(units=AGREED + 1),
        "at most 64, of 340000 .* stated and 64 .* agreed, got 65",
    ),
    "as much as was stated": (_of_west(units=CLAIMED, units_reason=None), "at most 64"),
    "less without a reason": (_of_west(units=20, units_reason=None), "got 20 without a reason"),
}


@pytest.fixture(scope="module")
def lowered_once(
    enrolled_once: TinyFederation, tmp_path_factory: pytest.TempPathFactory
) -> TinyFederation:
    """West was admitted, and the router is trained."""
    tiny = enrolled_once.copy(tmp_path_factory.mktemp("lowered") / "copy")
    planned(tiny, **COUNTED)
    sent(tiny, east=AGREED, north=AGREED, west=CLAIMED)
    admit(tiny)
    tiny.take_in()
    train_router(tiny.federation, take_inventory(tiny.federation), seed=0)
    return tiny


@pytest.mark.usefixtures("short_pages")
@pytest.mark.parametrize("lie", LIES)
def test_reader_refuses_a_manifest_in_which_a_silo_counts_as(
    lowered_once: TinyFederation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lie: str
) -> None:
    """Signed by the release key: what holds is what each silo signed, and what the plan says was agreed."""
    change, words = LIES[lie]
    publish_changed_manifest(monkeypatch, change)
    publish_unchecked(monkeypatch)
    lowered = lowered_once.copy(tmp_path / "copy")
    lowered.publish_only(tmp_path / "lie")
    with pytest.raises(TrustError, match=words):
        open_release(tmp_path / "lie", root=lowered.root, state=None)
    seen = tmp_path / "seen"
    assert (
        run(ddm_app, "verify", tmp_path / "lie", "--root", lowered.root, "--state", seen)
        == TrustError.exit_code
    )


@pytest.fixture
def short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of a line, which have tests of their own."""
    publish_short_pages(monkeypatch)
