"""The labels of public images on their way from the operator's file into the plan's folder, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from aggregator.intake.public_columns import CLASSES, SILOS, kept_columns
from aggregator.planning.carrying import choose_carried
from aggregator.planning.columns import names_needed, read_columns
from aggregator.planning.recipe import Recipe
from aggregator.planning.sign import sign_plan
from ddm.errors import DataError, SetupError
from ddm.footprint import token_router_size
from ddm.images.samples import open_image_set
from ddm.planning.fit import divide
from ddm.protocol.plan import Plan
from ddm.protocol.routers import SamplesSettings
from tests.conftest import PublishedRelease
from tests.support.errors import has_subject
from tests.support.federation import PASSPHRASE, images, make_draft, recipe

pytestmark = pytest.mark.usefixtures("short_pages")
SMALL = {"kind": "samples", "patch": 2, "hidden": 8, "depth": 1, "heads": 2, "num_steps": 1}


def with_labels(labels: str, **more: Any) -> Recipe:
    statistics = recipe().statistics.model_dump(mode="json")
    statistics["class_counts"] = {"epsilon": 0.5, "num_classes": 2}
    statistics["total"]["epsilon"] = 9.0
    return recipe(router=SMALL | {"labels": labels} | more, statistics=statistics)


def public_file(folder: Path, **columns: np.ndarray) -> Path:
    path = folder / "public.npz"
    np.savez(path, images=images(240, 0.1, seed=3), **columns)  # type: ignore[arg-type]
    return path


def test_size_by_name_is_that_of_the_paper_and_the_plan_holds_numbers() -> None:
    chosen = recipe(
        data={"shape": [3, 32, 32], "range": [-1.0, 1.0]},
        router={"kind": "samples", "size": "B/2", "num_steps": 5},
    ).router
    assert type(chosen) is SamplesSettings
    assert (chosen.patch, chosen.hidden, chosen.depth, chosen.heads) == (2, 768, 12, 12)
    # docs/explanation/architectures.md
    assert token_router_size(chosen, (4, 32, 32), 8).parameters == 129_529_352
    with pytest.raises(ValidationError, match="leave out hidden"):
        recipe(router={"kind": "samples", "size": "B/2", "hidden": 8, "num_steps": 5})
    with pytest.raises(ValidationError, match="S, B, L or XL"):
        recipe(router={"kind": "samples", "size": "H/14", "num_steps": 5})


def test_recipes_whose_router_cannot_learn_what_it_is_to_read_are_refused() -> None:
    with pytest.raises(ValidationError, match="class_counts"):
        recipe(router=SMALL | {"labels": "class"})
    with pytest.raises(ValidationError, match="final_rate"):
        recipe(router=SMALL | {"schedule": "constant", "final_rate": 0.1})
    with pytest.raises(ValidationError):
        recipe(router=SMALL | {"labels": "site"})


def test_plan_keeps_the_labels_of_the_images_that_it_is_fitted_on(
    published: PublishedRelease, tmp_path: Path
) -> None:
    tiny = published.tiny
    chosen = with_labels("silo")
    silos = np.array([*tiny.sites, "", "elsewhere"])[np.arange(240) % (len(tiny.sites) + 2)]
    classes = np.arange(240) % 2
    path = public_file(tmp_path, silos=silos, labels=classes)
    columns = read_columns(open_image_set(path, chosen.data, None), chosen)
    assert names_needed(chosen) == {SILOS: "silos"} and list(columns) == [SILOS]
    public = torch.from_numpy(images(240, 0.1, seed=3))
    draft = make_draft(tiny.federation, chosen, public, tmp_path / "draft", columns=columns)
    rows = divide(240, chosen.public)[0].numpy()
    assert draft.columns[SILOS].tolist() == silos[rows].tolist()
    torch.testing.assert_close(draft.images.fitted, public[rows])
    sign_plan(tiny.federation, draft, PASSPHRASE)
    plan_id = draft.plan.plan_id
    assert kept_columns(tiny.federation, plan_id)[SILOS].tolist() == silos[rows].tolist()
    parsed = Plan.parse(draft.plan.encode(), subject="plan.json")
    assert isinstance(parsed.router, SamplesSettings) and parsed.router.labels == "silo"


def test_public_images_without_the_labels_that_the_router_needs_are_refused(
    published: PublishedRelease, tmp_path: Path
) -> None:
    tiny = published.tiny
    public = torch.from_numpy(images(240, 0.1, seed=3))

    def draft(chosen: Recipe, **columns: np.ndarray) -> None:
        (tmp_path / "draft").mkdir(exist_ok=True)
        read = read_columns(
            open_image_set(public_file(tmp_path, **columns), chosen.data, None), chosen
        )
        make_draft(tiny.federation, chosen, public, tmp_path / "draft", columns=read)

    with pytest.raises(DataError):
        draft(with_labels("silo"))
    with pytest.raises(DataError, check=has_subject("column silos")):
        draft(with_labels("silo"), silos=np.array([sorted(tiny.sites)[0]] * 240))
    with pytest.raises(DataError, match="0 to 2"):
        draft(with_labels("class"), labels=np.arange(240) % 3)
    with pytest.raises(DataError, match="whole numbers"):
        draft(with_labels("class"), labels=np.linspace(0, 1, 240))
    with pytest.raises(DataError, check=has_subject("public images")):
        make_draft(tiny.federation, with_labels("class"), public, tmp_path / "draft")
    draft(with_labels("class"), labels=np.arange(240) % 2)
    draft(with_labels("group"))


def test_router_of_a_plan_that_carries_experts_needs_the_labels_of_the_plan_in_force(
    published: PublishedRelease, tmp_path: Path
) -> None:
    tiny = published.tiny
    carrying = choose_carried(tiny.federation, published.plan_id, [sorted(tiny.sites)[0]])
    with pytest.raises(SetupError, match="labels"):
        make_draft(tiny.federation, with_labels("class"), carrying, tmp_path)
    with pytest.raises(SetupError, match="silos"):
        make_draft(tiny.federation, with_labels("silo"), carrying, tmp_path)


def test_classes_are_kept_by_their_own_name() -> None:
    chosen = with_labels("class")
    assert names_needed(chosen) == {CLASSES: "labels"}
