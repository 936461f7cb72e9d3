"""The recipes by case: each as it stands fits a site's usual policy and budget; made small, it trains on raw images."""

import csv
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel
import numpy as np
import pytest
import tomli_w
from PIL import Image

from aggregator.planning.recipe import Recipe
from ddm.io.settings import load_settings
from ddm.io.tensors import save_tensors
from ddm.models import build_expert
from ddm.privacy.accounting import adaptive_epsilon, noise_multiplier_for
from ddm.protocol.architecture import Dit
from ddm.protocol.submission import Submission, submission_path
from ddm.protocol.weight_privacy import DpSgdMechanism
from ddm.statistics.cost import mechanisms
from silo.config import Policy
from tests.support.autoencoders import SD, write_autoencoder
from tests.support.canary_files import write_dicom
from tests.support.case import case
from tests.support.commands import run_command
from tests.support.federation import PASSPHRASE, POLICY, TinyFederation

FOLDER = Path(__file__).parents[2] / "examples" / "recipes"
RECIPES = sorted(FOLDER.glob("*.toml"))
NUM = 24
PUBLIC = 100
PLANS = 5
OF_PATIENTS = ("patients", "private", "few_patients")
PRIVATE = ("private", "few_patients")
# Of a site that trains privately.
NUM_PATIENTS = {"private": 3000, "few_patients": 500}
TINY = {"kind": "dit", "patch": 2, "hidden": 16, "depth": 1, "heads": 2}
PRIVATELY = {
    "data.shape": [1, 8, 8],
    "expert.privacy.units_per_step": 4,
    "expert.privacy.draws": 1,
}
# What a test changes of a recipe so that it takes a second: sizes alone.
SMALL: dict[str, dict[str, Any]] = {
    "grey": {"data.shape": [1, 8, 8]},
    "rgb": {
        "data.shape": [3, 8, 8],
        "router.size": None,
        "router.patch": 4,
        "router.hidden": 16,
        "router.depth": 1,
        "router.heads": 2,
        "router.num_steps": 4,
    },
    "patients": {"data.shape": [1, 8, 8]},
    "private": PRIVATELY,
    "few_patients": PRIVATELY
    | {
        "base.training.num_steps": 3,
        "base.training.batch_size": 4,
    },
    "classes": {"data.shape": [1, 8, 8]},
    "volumes": {
        "data.shape": [1, 8, 8, 8],
        "expert.architecture.channels": [8, 8],
        "expert.architecture.attention": [False, True],
        "expert.architecture.head_channels": 8,
        "expert.architecture.norm_groups": 4,
    },
    "latents": {"data.shape": [3, 16, 16]},
}
ALWAYS = {
    "rehearsal": True,  # so few steps teach nothing
    "encoder.dim": 4,
    "clustering.num_fine": 8,
    "clustering.num_coarse": 2,
    "sketch.rank": 4,
    "partition.min_images": 4,
    "expert.training.num_steps": 3,
    "expert.training.batch_size": 4,
    "statistics.counts.num_groups": 4,
}


def changed(name: str, **more: Any) -> dict[str, Any]:
    """The recipe with other sizes; a field changed to None is left out."""
    tables = tomllib.loads((FOLDER / f"{name}.toml").read_text("utf-8"))
    if tables["expert"]["architecture"]["kind"] == "dit":
        tables["expert"]["architecture"] = TINY
    for path, value in {**ALWAYS, **SMALL[name], **more}.items():
        *way, field = path.split(".")
        table = tables
        for key in way:
            table = table[key]
        table[field] = value
        if value is None:
            del table[field]
    return tables


def pixels(seed: int, *shape: int) -> np.ndarray:
    """Values with a bright half, or third."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(30, 220, shape[-1])[:: 1 if seed % 2 else -1]
    return np.clip(ramp + 12 * rng.standard_normal(shape), 0, 255).astype(np.uint8)


def pictures(folder: Path, num: int, channels: int, size: tuple[int, int]) -> Path:
    """A folder of PNG, grey or in colour."""
    folder.mkdir()
    for number in range(num):
        values = pixels(number, channels, *size)
        Image.fromarray(values[0] if channels == 1 else np.moveaxis(values, 0, -1)).save(
            folder / f"{number:03}.png"
        )
    return folder


def table(folder: Path, column: str, cells: Callable[[int], str]) -> Path:
    """A table beside a folder of pictures."""
    with (folder.parent / f"{folder.name}.csv").open("w", newline="") as handle:
        rows = csv.writer(handle)
        rows.writerow(("path", column))
        rows.writerows(
            (f"{folder.name}/{path.name}", cells(n))
            for n, path in enumerate(sorted(folder.iterdir()))
        )
    return folder.with_suffix(".csv")


def volumes(folder: Path, num: int) -> Path:
    """A folder of NIfTI."""
    folder.mkdir()
    for number in range(num):
        values = pixels(number, 12, 10, 14).astype(np.float32)
        nibabel.save(
            nibabel.Nifti1Image(values, np.diag([2.0, 2.0, 1.5, 1.0])),
            folder / f"{number:03}.nii.gz",
        )
    return folder


def brought(name: str, folder: Path) -> Path:
    """What a hospital brings to each recipe: raw files of other sizes than the plan's."""
    match name:
        case "grey" | "latents":
            return pictures(folder, NUM, 1, (24, 20))
        case "rgb":
            return pictures(folder, NUM, 3, (24, 20))
        case "classes":
            return table(
                pictures(folder, NUM, 1, (24, 20)),
                "label",
                lambda n: ("Normal", " pneumonia", "2")[n % 3],
            )
        case "patients" | "private" | "few_patients":
            folder.mkdir()
            for number in range(NUM):
                write_dicom(folder / f"{number}.dcm", pixels(number, 24, 20), number // 2)
            return folder
    return volumes(folder, NUM)


def policy(name: str) -> dict[str, Any]:
    """The usual policy, with what the recipe says that sites have to write; and the waiver of every site of today."""
    written = POLICY | {"privacy": {"unit": "patient"}} if name in OF_PATIENTS else dict(POLICY)
    if name == "classes":
        written["data"] = {"kind": "pictures", "classes": ["normal", "pneumonia", "effusion"]}
    return written | {"training": {"architectures": ["dit", "unet"], "min_images": 4}}


def enrolled(path: Path, name: str, data: Path) -> TinyFederation:
    """A federation of one hospital."""
    tiny = TinyFederation.create(path, {})
    tiny.join_with("north", data, policy(name))
    return tiny


def public_expert(path: Path) -> Path:
    """A public expert of the small size, as `ddm train` writes one."""
    save_tensors(path, build_expert(Dit.model_validate(TINY), (1, 8, 8), seed=0).state_dict())
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", [path.stem for path in RECIPES])
def test_recipe_leads_from_raw_files_to_a_submission(name: str, tmp_path: Path) -> None:
    tiny = enrolled(tmp_path / "tiny", name, brought(name, tmp_path / "private"))
    if name == "volumes":
        public = volumes(tmp_path / "public", PUBLIC)
    else:
        public = pictures(tmp_path / "public", PUBLIC, 3 if name == "rgb" else 1, (20, 24))
    more = {}
    if name == "latents":
        more = {"latent.folder": str(tmp_path / "vae")}
        write_autoencoder(tmp_path / "vae", SD)
    if name == "private":
        more = {"base.file": str(public_expert(tmp_path / "base.safetensors"))}
    if name == "few_patients":
        more = {"base.folder": str(tmp_path / "base")}
    recipe = tmp_path / "plan.toml"
    recipe.write_bytes(tomli_w.dumps(changed(name, **more)).encode())
    (tmp_path / "pass").write_bytes(PASSPHRASE + b"\n")
    words = [tiny.federation.path, "--recipe", recipe, "--public", public]
    if name == "few_patients":
        result = run_command("aggregator", "base", *words)
        assert result.code == 0, result.out + result.err
    result = run_command(
        "aggregator", "plan", *words, "--yes", "--passphrase-file", tmp_path / "pass"
    )
    assert result.code == 0, result.out + result.err
    assert "each picture" in result.out
    plan, _ = tiny.federation.current_plan()
    tiny.take_part("north", plan.plan_id)
    sent = tiny.sites["north"].outbox / plan.plan_id / "1" / submission_path("north")
    submission = Submission.parse(sent.read_bytes(), subject="submission")
    assert submission.num_units == (NUM // 2 if name in OF_PATIENTS else NUM)
    assert submission.spent.epsilon == (8.0 if name in PRIVATE else plan.statistics.total.epsilon)
    assert submission.audit.verdict == ("bounded" if name in PRIVATE else "waived")


def test_every_case_has_a_recipe_of_which_a_usual_budget_covers_several_plans() -> None:
    assert [path.stem for path in RECIPES] == sorted(SMALL)
    usual = Policy()
    for path in RECIPES:
        with case(recipe=path.stem):
            recipe = load_settings(Recipe, path)
            assert recipe.transform
            head = path.read_text("utf-8").partition("\n\n")[0]
            assert head.startswith("# ") and f"examples/recipes/{path.name}" in head
            drawn = tuple(
                mechanisms(
                    SimpleNamespace(plan_id=path.stem, statistics=recipe.statistics)
                ).values()
            )
            steps = [drawn] * PLANS
            if terms := recipe.expert.privacy:  # as much as one plan may spend
                rate = terms.rate(NUM_PATIENTS[path.stem])
                taken = recipe.expert.training.num_steps
                noise = noise_multiplier_for(terms.epsilon, terms.delta, rate, taken)
                steps = [(*drawn, DpSgdMechanism(noise_multiplier=noise, rate=rate, steps=taken))]
                both = (
                    terms.epsilon + recipe.statistics.total.epsilon,
                    terms.delta + recipe.statistics.total.delta,
                )
                assert both == (8.0, usual.privacy.max_delta) and usual.privacy.max_epsilon == 8.0
            assert (
                adaptive_epsilon(steps, usual.privacy.budget_delta) <= usual.privacy.budget_epsilon
            )
            allowed = {"unet"} if path.stem == "volumes" else set(usual.training.architectures)
            assert recipe.expert.architecture.kind in allowed
            assert recipe.limits.train_s <= usual.training.max_train_s
            assert recipe.limits.gpu_hours <= usual.training.max_gpu_hours
