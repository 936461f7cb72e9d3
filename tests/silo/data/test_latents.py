"""Latents end to end: from a recipe with an autoencoder over silos that encode once to samples in pixels."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from aggregator.intake.inventory import take_inventory
from ddm import open_ensemble
from ddm.encoders.autoencoder import AutoencoderKl, Identity, build_autoencoder
from ddm.errors import DataError, DigestError
from ddm.io.tensors import save_tensors
from ddm.loading.plan import PlanFiles
from ddm.protocol.latent import AutoencoderKlLatent, AutoencoderSize
from ddm.protocol.plan import Plan
from ddm.protocol.weight_privacy import DpSgd
from silo.data.cohort import Cohort
from silo.data.latents import keep_latents, pixels_of, training_inputs
from silo.worker.stages import assign_images, read_assignment
from tests.faults.test_disk_full import small_disk
from tests.support.cohorts import cohort_at
from tests.support.errors import has_subject
from tests.support.federation import TinyFederation, recipe

SIZE = AutoencoderSize(
    channels=(8, 8), attention=(False, False), latent_channels=3, num_res_blocks=1, norm_groups=4
)
PIXELS = (1, 4, 4)
SEEN = (3, 2, 2)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyFederation, Plan, Path]:
    """A federation of two silos whose experts work on latents, published."""
    path = tmp_path_factory.mktemp("latents")
    tiny = TinyFederation.create(path, {"north": 60, "west": 40})
    weights = path / "autoencoder.safetensors"
    save_tensors(weights, build_autoencoder(SIZE, PIXELS).state_dict())
    latent_recipe = {"kind": "autoencoder_kl", "weights": str(weights)} | SIZE.model_dump(
        mode="json"
    )
    plan_id = tiny.complete(path / "release", recipe(latent=latent_recipe))
    plan = take_inventory(tiny.federation).plan
    assert plan.plan_id == plan_id
    return tiny, plan, path / "release"


def cohort_of(tiny: TinyFederation, plan: Plan) -> Cohort:
    path = tiny.path / "north.npz"
    return cohort_at(path, plan.data, min_images=1, salt=b"s" * 32, unit="image", num_classes=None)


def files_of(tiny: TinyFederation, plan: Plan) -> PlanFiles:
    return PlanFiles.load(plan, tiny.federation.bundle(plan.plan_id) / "targets" / plan.plan_id)


def test_experts_sketches_and_sampling_work_on_latents_and_what_is_drawn_is_pixels(
    federation: tuple[TinyFederation, Plan, Path],
) -> None:
    tiny, plan, release = federation
    assert plan.expert_shape == SEEN
    files = files_of(tiny, plan)
    assert files.sketch.mean_D.numel() == 12 and files.encoder.encode(
        torch.zeros(1, *PIXELS)
    ).shape == (1, 4)
    ensemble = open_ensemble(release, root=tiny.root)
    drawn = ensemble.sample(3, steps=2)
    assert drawn.latents.shape == (3, *SEEN) and drawn.images.shape == (3, *PIXELS)
    assert torch.equal(drawn.images, files.latent.decode(drawn.latents))
    undecoded = replace(ensemble, latent=Identity()).sample(3, steps=2)
    assert torch.equal(undecoded.images, drawn.latents)


def test_scale_of_a_plan_gives_public_latents_unit_deviation(
    federation: tuple[TinyFederation, Plan, Path],
) -> None:
    tiny, plan, _ = federation
    with np.load(tiny.federation.plan_folder(plan.plan_id) / "public.npz") as public:
        seen = torch.from_numpy(public["fitted_latents"])
        pixels = torch.from_numpy(public["fitted"])
    assert seen.double().std() == pytest.approx(1.0, abs=1e-5)
    assert torch.allclose(files_of(tiny, plan).latent.encode(pixels), seen, atol=1e-5)
    assert isinstance(plan.latent, AutoencoderKlLatent) and abs(plan.latent.scale - 1) > 0.01


def test_silo_encodes_once_and_no_other_images_and_no_other_plan_find_its_latents(
    federation: tuple[TinyFederation, Plan, Path], tmp_path: Path
) -> None:
    tiny, plan, _ = federation
    kept = list(tiny.sites["north"].private.glob("latents-*.npy"))
    assert [np.load(path).shape for path in kept] == [(60, *SEEN)]
    cohort = cohort_of(tiny, plan)
    calls: list[tuple[int, int]] = []
    latent = files_of(tiny, plan).latent
    for _ in range(2):
        keep_latents(
            cohort, latent, plan, tmp_path, lambda num_done, total: calls.append((num_done, total))
        )
    # Once in all.
    assert calls == [(16, 60), (32, 60), (48, 60), (60, 60)]
    assert isinstance(latent, AutoencoderKl)
    expected = latent.for_single_samples().encode(cohort.images[:])
    assert torch.equal(training_inputs(cohort, plan, tmp_path).images[:], expected)
    assert training_inputs(cohort, plan, tmp_path).digest == cohort.digest
    with pytest.raises(DataError, check=has_subject("latents")):
        training_inputs(replace(cohort, digest="0" * 64), plan, tmp_path)
    other = plan.model_copy(update={"latent": plan.latent.model_copy(update={"scale": 2.0})})
    with pytest.raises(DataError, check=has_subject("latents")):
        training_inputs(cohort, other, tmp_path)


def test_latents_of_private_training_and_of_sketches_are_encoded_one_by_one(
    federation: tuple[TinyFederation, Plan, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, plan, _ = federation
    terms = DpSgd(epsilon=8.0, delta=1e-5, clip=1.0, units_per_step=16)
    no_sketch = plan.statistics.model_copy(update={"sketch": None})
    plain = plan.model_copy(update={"statistics": no_sketch})
    private_expert = plan.expert.model_copy(update={"privacy": terms})
    private = plain.model_copy(update={"expert": private_expert})
    cohort = cohort_of(tiny, plan)
    latent = files_of(tiny, plan).latent
    assert isinstance(latent, AutoencoderKl) and latent.block > 1
    seen: set[int] = set()
    encode = latent.net.encode

    def watched(x_B: torch.Tensor) -> object:
        seen.add(len(x_B))
        return encode(x_B)

    monkeypatch.setattr(latent.net, "encode", watched)
    plans = {"private": (private, 1), "sketch": (plan, 1), "plain": (plain, latent.block)}
    for name, (encoded_plan, size) in plans.items():
        seen.clear()
        folder = tmp_path / name
        folder.mkdir()
        keep_latents(cohort, latent, encoded_plan, folder, lambda num_done, total: None)
        assert (
            seen == {size}
            and training_inputs(cohort, encoded_plan, folder).images[:].isfinite().all()
        )


def test_interrupted_encoding_leaves_no_latents_and_begins_anew(
    federation: tuple[TinyFederation, Plan, Path], tmp_path: Path
) -> None:
    tiny, plan, _ = federation
    cohort = cohort_of(tiny, plan)
    latent = files_of(tiny, plan).latent
    assert isinstance(latent, AutoencoderKl)

    def stop(num_done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        keep_latents(cohort, latent, plan, tmp_path, stop)
    with pytest.raises(DataError):
        training_inputs(cohort, plan, tmp_path)
    keep_latents(cohort, latent, plan, tmp_path, lambda num_done, total: None)
    assert len(training_inputs(cohort, plan, tmp_path).images) == 60
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_full_disk_while_images_are_encoded_is_an_error_and_not_the_end_of_the_process(
    federation: tuple[TinyFederation, Plan, Path], tmp_path: Path
) -> None:
    tiny, plan, _ = federation
    cohort = cohort_of(tiny, plan)
    latent = files_of(tiny, plan).latent
    cohort = replace(cohort, images=cohort.images[:].repeat(4, 1, 1, 1))
    (private := tmp_path / "private").mkdir()
    with (
        small_disk(private, 2 * os.sysconf("SC_PAGE_SIZE")),
        pytest.raises(OSError, match="No space left"),
    ):
        keep_latents(cohort, latent, plan, private, lambda num_done, total: None)


def test_other_autoencoder_in_place_of_the_listed_one_is_refused(
    federation: tuple[TinyFederation, Plan, Path], tmp_path: Path
) -> None:
    tiny, plan, _ = federation
    shutil.copytree(
        tiny.federation.bundle(plan.plan_id) / "targets" / plan.plan_id, tmp_path / "plan"
    )
    other = build_autoencoder(SIZE, PIXELS, seed=1)
    save_tensors(tmp_path / "plan" / "plan" / "autoencoder.safetensors", other.state_dict())
    with pytest.raises(DigestError):
        PlanFiles.load(plan, tmp_path / "plan")


def test_site_that_brings_latents_trains_on_what_its_pixels_would_be_encoded_to_and_assigns_what_they_decode_to(
    federation: tuple[TinyFederation, Plan, Path], tmp_path: Path
) -> None:
    tiny, plan, _ = federation
    files = files_of(tiny, plan)
    pixels = cohort_of(tiny, plan)
    assert isinstance(files.latent, AutoencoderKl) and isinstance(plan.latent, AutoencoderKlLatent)
    keep_latents(pixels, files.latent, plan, tmp_path, lambda num_done, total: None)
    expected = training_inputs(pixels, plan, tmp_path).images[:]
    (brought := tmp_path / "brought").mkdir()
    np.save(brought / "latents.npy", (expected * plan.latent.scale).numpy())
    request = {
        "min_images": 1,
        "salt": b"s" * 32,
        "unit": "image",
        "num_classes": None,
        "folder": tmp_path,
    }
    cohort = cohort_at(brought, plan.data, latent_shape=SEEN, **request)  # type: ignore[arg-type]
    assert cohort.latent and cohort.digest != pixels.digest
    keep_latents(cohort, files.latent, plan, tmp_path / "none", lambda num_done, total: None)
    assert not (tmp_path / "none").exists()
    inputs = training_inputs(cohort, plan, tmp_path)
    assert torch.allclose(inputs.images[:], expected, rtol=1e-6)
    shown = pixels_of(cohort, files.latent, plan)
    assert torch.allclose(
        shown[:], files.latent.decode(expected).clamp(*plan.data.range), atol=1e-4
    )
    assert pixels_of(pixels, files.latent, plan) is pixels.images
    assign_images(
        cohort, files, tmp_path / "cohort.parquet", lambda num_done, total: None, pixels=shown
    )
    assert torch.equal(
        read_assignment(cohort, files, tmp_path / "cohort.parquet"),
        files.clusters.assign(files.encoder.encode(shown[:])),
    )
    with pytest.raises(DataError, check=has_subject("data")):
        cohort_at(brought, plan.data, **request)  # type: ignore[arg-type]
