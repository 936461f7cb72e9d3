"""Signing a plan: what the operator is shown before, what a crash leaves behind, when a plan may not be replaced."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from aggregator.commands.plan import describe_draft
from aggregator.intake.service import IntakeService
from aggregator.planning.cost import estimate_cost
from ddm.errors import BusyError, PolicyError
from ddm.loading.plan import PlanFiles
from ddm.planning.recipe import ClusteringRecipe
from ddm.privacy.accounting import (
    DiscreteLaplaceMechanism,
    GaussianMechanism,
    gaussian_mu,
    noise_multiplier_for,
    total_epsilon,
)
from ddm.publishing.keys import load_key
from ddm.system.console import human_seconds
from ddm.trust.repository import Repository
from ddm.trust.verify import verify_bundle
from tests.conftest import PublishedRelease
from tests.support.case import case
from tests.support.crashes import Crash
from tests.support.federation import PASSPHRASE, TinyFederation, images, make_draft, recipe

pytestmark = pytest.mark.usefixtures("short_pages")


def stop(*arguments: object, **named: object) -> None:
    raise Crash


@pytest.mark.parametrize("where", ["start_plan", "_write_snapshot", "export_bundle"])
def test_old_plan_works_on_when_signing_stopped_and_signing_again_leaves_nothing_behind(
    published: PublishedRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    tiny = published.tiny
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(Repository, where, stop)
        tiny.sign()
    tiny.publish(tmp_path / "next")
    shutil.rmtree(tiny.path / "scratch")
    again = tiny.sign()
    assert tiny.federation.current_plan()[0].plan_id == again
    assert (
        verify_bundle(tiny.federation.bundle(again), tiny.root.read_bytes(), state=None).plan_id
        == again
    )
    assert {path.name for path in (tiny.federation.path / "plans").iterdir()} == {
        published.plan_id,
        again,
        "current.json",
    }
    assert not list(tiny.federation.path.glob("ceremony*"))


def test_new_plan_is_current_when_signing_stopped_after_it_was_decided(
    published: PublishedRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = published.tiny
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr("ddm.io.changes.finish_change", stop)
        tiny.sign()
    plan, _ = tiny.federation.require().current_plan()
    assert plan.plan_id != published.plan_id
    assert verify_bundle(tiny.federation.bundle(plan.plan_id), tiny.root.read_bytes(), state=None)
    assert not list(tiny.federation.path.glob("ceremony*"))


def test_plan_is_not_replaced_while_intake_is_at_work(published: PublishedRelease) -> None:
    tiny = published.tiny
    desk = IntakeService(
        tiny.federation, load_key(tiny.federation, "receipts", PASSPHRASE), lambda receipt: None
    )
    with desk.locked(), pytest.raises(BusyError):
        tiny.sign()
    assert tiny.federation.current_plan()[0].plan_id == published.plan_id


def test_plan_that_costs_more_than_its_total_is_refused_with_both_numbers_before_anything_is_signed(
    published: PublishedRelease,
) -> None:
    tiny = published.tiny
    parts = {
        "unit": "image",
        "total": {"epsilon": 7.5, "delta": 1e-5},
        "counts": {"epsilon": 1.0, "num_groups": 4},
        "sketch": {"epsilon": 7.0, "delta": 1e-5, "rank": 2},
    }
    composed = total_epsilon(
        [DiscreteLaplaceMechanism(epsilon=1.0), GaussianMechanism(mu=gaussian_mu(7.0, 1e-5))], 1e-5
    )
    assert composed > 7.5
    with pytest.raises(PolicyError) as refused:
        tiny.sign(recipe(statistics=parts))
    assert "7.5" in refused.value.expected
    assert f"{composed:.4g}" in refused.value.got
    assert tiny.federation.current_plan()[0].plan_id == published.plan_id
    assert {path.name for path in (tiny.federation.path / "plans").iterdir()} == {
        published.plan_id,
        "current.json",
    }


def shown(tiny: TinyFederation, folder: Path, **changes: object) -> str:
    """What the operator is shown before signing."""
    public = torch.from_numpy(images(240, 0.2, seed=1))
    draft = make_draft(tiny.federation, recipe(**changes), public, folder)
    return describe_draft(
        draft, estimate_cost(draft.plan, draft.sketch, draft.images.expert_inputs)
    )


def test_what_becomes_of_each_picture_is_in_the_plan_and_shown_step_by_step(
    published_once: PublishedRelease, tmp_path: Path
) -> None:
    fields = {
        "range": {"kind": "values", "low": -160.0, "high": 240.0},
        "fit": {"kind": "pad"},
        "padding": 0.0,
    }
    lines = shown(published_once.tiny, tmp_path, transform=fields).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("each picture"))
    steps = [line.removeprefix("each picture").strip() for line in lines[first : first + 4]]
    assert steps == list(recipe(transform=fields).transform.words)
    assert "each picture" not in shown(published_once.tiny, tmp_path / "none")
    with pytest.raises(ValidationError, match="padding within data.range"):
        recipe(transform=fields | {"padding": 2.0})
    with pytest.raises(ValidationError, match="patient"):
        recipe(transform={"slices": {"count": 3}})


def test_shown_costs_name_the_leak_audit_and_its_share_of_the_training(
    published_once: PublishedRelease, tmp_path: Path
) -> None:
    changes = recipe().model_dump(mode="json")
    expert = changes["expert"]
    expert["training"] |= {"num_steps": 100_000}
    audit = {"required": True, "min_holdout_units": 300}
    long_training = shown(published_once.tiny, tmp_path / "long", expert=expert, audit=audit)
    (row,) = re.findall(
        r"leak audit +about .* a silo that holds out enough units, (\d+)% of the training",
        long_training,
    )
    # Batches of 8: what gives a verdict at all is more than a tenth, and the rest is kept within a quarter.
    assert 10 < int(row) <= 25
    unaudited = shown(published_once.tiny, tmp_path / "none", audit={"required": False})
    assert "leak audit" not in unaudited


def test_shown_costs_of_private_training_name_noise_chance_and_time_of_a_step(
    published_once: PublishedRelease, tmp_path: Path
) -> None:
    expert = recipe().model_dump(mode="json")["expert"]
    terms = {
        "kind": "dp_sgd",
        "epsilon": 2.0,
        "delta": 1e-6,
        "units_per_step": 32,
        "images_per_unit": 4,
        "draws": 2,
    }
    fields = expert | {"privacy": terms}
    text = shown(published_once.tiny, tmp_path, expert=fields)
    rows = dict(
        columns
        for line in text.splitlines()
        if len(columns := re.split(r"\s{2,}", line.strip(), maxsplit=1)) == 2
    )
    assert rows["its sampling"] == "32 of 128 a step, each by chance, with probability 0.25"
    noise = noise_multiplier_for(2.0, 1e-6, 0.25, expert["training"]["num_steps"])
    assert rows["its noise"].startswith(f"{noise:.3g} x clip of 1 for 128 images")
    # One image a unit, twice drawn: 64 samples, where a plain step has 8, each in a pass of its own.
    assert rows["a private step"] == (
        "about 64 samples, each 2.3 times as slow as in a plain step: 18.4 times a plain step of 8"
    )
    assert rows["all together"].startswith("epsilon 10,")


def test_shown_costs_name_every_release_with_what_it_costs_and_what_all_cost_together(
    published_once: PublishedRelease, tmp_path: Path
) -> None:
    parts = {
        "unit": "image",
        "total": {"epsilon": 9.0, "delta": 1e-5},
        "counts": {"epsilon": 1.0, "num_groups": 4},
        "class_counts": {"epsilon": 0.5, "num_classes": 3},
        "sketch": {"epsilon": 3.0, "delta": 1e-6, "rank": 2},
    }
    histograms = [DiscreteLaplaceMechanism(epsilon=1.0), DiscreteLaplaceMechanism(epsilon=0.5)]
    gaussian = GaussianMechanism(mu=gaussian_mu(3.0, 1e-6))
    composed = total_epsilon([*histograms, gaussian], 1e-5)
    text = shown(published_once.tiny, tmp_path, statistics=parts)
    lines = {
        line.split("  ")[0 if line[0] != " " else 1].strip(): line
        for line in text.splitlines()
        if line.strip()
    }
    assert "epsilon 9, delta 1e-05 per image, replace-one" in lines["total, stated"]
    assert f"epsilon {composed:.4g} at that delta" in lines["total, composed"]
    assert composed < 4.5  # composed, not added up
    assert "epsilon 1, 4 public groups" in lines["counts"]
    assert "epsilon 0.5, 3 classes" in lines["class counts"]
    assert "epsilon 3, delta 1e-06, rank 2, t 0." in lines["sketches"]
    assert "4 principal components" in lines["encoder"]
    assert lines["experts a silo"].split()[-1] == "1"


def test_shown_costs_name_no_release_that_is_not_asked_for(
    published_once: PublishedRelease, tmp_path: Path
) -> None:
    parts = {
        "unit": "image",
        "total": {"epsilon": 1.0, "delta": 1e-5},
        "counts": {"epsilon": 1.0, "num_groups": 4},
    }
    text = shown(published_once.tiny, tmp_path, statistics=parts, router={"kind": "counts"})
    assert "counts" in text
    assert not any(name in text for name in ("sketches", "class counts"))


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        ({"kind": "silo_cluster", "min_images": 10}, "at most 2, one a coarse cluster"),
        (
            {"kind": "random", "min_images": 10, "num_parts": 3},
            "at most 3, on random shares, as a control",
        ),
    ],
)
def test_shown_costs_count_the_experts_and_their_training(
    published_once: PublishedRelease,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    partition: object,
    expected: str,
) -> None:
    monkeypatch.setattr("aggregator.planning.cost.time_training", lambda plan, images: 60.0)
    text = shown(published_once.tiny, tmp_path, partition=partition)
    assert expected in text
    assert f"about {human_seconds(60.0 * int(expected.split()[2].rstrip(',')))} a silo" in text


def test_shown_costs_warn_of_an_encoder_with_random_weights(
    published_once: PublishedRelease, tmp_path: Path
) -> None:
    network = {
        "kind": "timm",
        "model": "test_resnet",
        "random_weights": True,
        "image_size": [32, 32],
    }
    text = shown(published_once.tiny, tmp_path, encoder=network)
    assert "test_resnet" in text
    assert "RANDOM WEIGHTS" in text
    assert "RANDOM" not in shown(published_once.tiny, tmp_path)


def test_plan_with_an_encoder_of_gradients_is_shown_and_opens_as_a_silo_opens_it(
    published_once: PublishedRelease, tmp_path: Path
) -> None:
    tiny = published_once.tiny
    gradients = {"kind": "hog", "dim": 3, "cells": 2, "mirrored": True}
    assert "3 principal components of their gradients in 2 x 2 cells" in shown(
        tiny, tmp_path, encoder=gradients
    )
    public = torch.from_numpy(images(120, 0.5, seed=90))
    draft = make_draft(tiny.federation, recipe(encoder=gradients), public, tmp_path / "draft")
    files = PlanFiles.load(draft.plan, tmp_path / "draft")
    torch.testing.assert_close(
        files.encoder.encode(public.flip(3)), files.encoder.encode(public), atol=1e-5, rtol=0
    )
    with pytest.raises(ValidationError, match="images of at least 9 pixels a side"):
        draft.plan.model_validate(
            draft.plan.model_dump()
            | {"encoder": draft.plan.encoder.model_copy(update={"cells": 9})}
        )


@pytest.mark.parametrize(
    ("num_images", "num_groups", "expected"),
    [(10_000, 32, 1024), (4096, 32, 1024), (4095, 32, 1023), (60, 32, 32)],
)
def test_fine_centroids_are_1024_where_public_images_allow_and_never_fewer_than_groups(
    num_images: int, num_groups: int, expected: int
) -> None:
    assert ClusteringRecipe(num_coarse=2).fine_for(num_images, num_groups) == expected
    assert ClusteringRecipe(num_fine=50, num_coarse=2).fine_for(num_images, num_groups) == 50


def test_recipe_of_pixels_far_from_the_scale_of_the_noise_is_refused_and_one_of_latents_is_not() -> (
    None
):
    data = recipe().model_dump(mode="json")["data"]
    for wrong in ([0.0, 255.0], [-10.0, 10.1], [0.0, 0.49], [-1000.0, 3000.0]):
        with (
            case(wrong),
            pytest.raises(ValidationError, match=r"map to \[-1, 1\], or scale the arrays"),
        ):
            recipe(data=data | {"range": wrong})
    for right in ([0.0, 1.0], [-10.0, 10.0], [1000.0, 1002.0], [0.0, 0.5]):
        recipe(data=data | {"range": right})
    latents = {
        "kind": "autoencoder_kl",
        "weights": "a",
        "channels": [32],
        "attention": [False],
        "latent_channels": 2,
    }
    recipe(data=data | {"range": [0.0, 255.0]}, latent=latents)
