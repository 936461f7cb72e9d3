"""Trains ensembles as one owner's islands: split, train each, assemble with a router, open as a reader would."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic

import numpy as np
from torch import Tensor

from ddm.images.samples import open_image_set
from ddm.io.files import write_atomic
from ddm.io.tensors import save_tensors
from ddm.islands.arrays import map_array
from ddm.islands.assemble import AssemblySettings, assemble
from ddm.islands.data import Dataset
from ddm.islands.folder import Islands
from ddm.islands.recipe import IslandsRecipe
from ddm.islands.split import island_names, split
from ddm.islands.train import train_island
from ddm.loading.ensemble import open_ensemble
from ddm.loading.plan import PlanFiles
from ddm.system.console import progress
from ddm.training.config import TrainingSettings
from ddm.training.progress import Progress
from examples.paper.tables.data import CONCENTRATION
from examples.paper.tables.models import RECORD, Made, Weights, Workshop
from examples.paper.tables.results import Cost, commit
from examples.paper.tables.sharing import alone
from examples.paper.tables.sources import Experts

# Paths and predictions that experts of one ensemble have in turn.
MIXED = (("linear", "velocity"), ("cosine_vp", "v"), ("ddpm_linear", "eps"), ("edm", "x_0"))
_PASSPHRASE = b"of a folder that is thrown away"
_BASE = "base.safetensors"
_FINE = 256  # centroids, each a group of the router: over exact counts, finer groups cost nothing
_HELD_OUT = 0.1  # of the images that a router is fitted on: judging it takes longer than fitting it


def experts(
    shop: Workshop,
    source: Experts,
    rate: float,
    seed: int,
    name: str,
    start: Weights | None = None,
) -> Made:
    """Split, train and assemble an ensemble; see `monolith`."""
    folder = shop.out / name
    islands = islands_of(shop, name)
    release = folder / "release"
    if not islands.path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        base: dict[str, object] = {}
        if start is not None:
            save_tensors(folder / _BASE, start)
            base = {"base": {"kind": "file", "file": str(folder / _BASE), "licence": "CC0-1.0"}}
        _split(shop, source, rate, seed, islands.path, base)
    if not (folder / RECORD).exists():
        seconds, flops = _train(shop, islands, source.num, name)
        started = monotonic()
        own = shop.router_flops(source.budget, source.num, source.conditional)
        _assemble(shop, islands, release, seed, name)
        training = islands.plan.expert.training
        cost = Cost(
            steps=training.num_steps,
            batch_size=training.batch_size,
            learning_rate=training.learning_rate,
            flops=flops + own,
            router_flops=own,
            seconds=seconds + monotonic() - started,
            commit=commit(),
        )
        write_atomic(folder / RECORD, cost.model_dump_json(indent=1).encode())
        for images in folder.glob("islands/*/*/images.npy"):
            images.unlink()  # a copy of the training images for every ensemble
    opened = open_ensemble(release, root=islands.root, state=folder / "state", device=shop.device)
    own_K = tuple(map_array(islands.island(k).rows).clone() for k in range(source.num))
    cost = Cost.model_validate_json((folder / RECORD).read_bytes())
    return Made(replace(opened, chunk_size=shop.preset.chunk), cost, own_K)


def islands_of(shop: Workshop, name: str) -> Islands:
    """Return the folder of an ensemble's islands."""
    return Islands(shop.out / name / "islands")


def island_of(islands: Islands, images: Tensor) -> Tensor:
    """Return the island in whose cluster each image lies, int64 (N,); of islands that are clusters."""
    files = PlanFiles.load(islands.plan, islands.bundle)
    return files.clusters.coarse_F[files.clusters.assign(files.encoder.encode(images))]


def _train(shop: Workshop, islands: Islands, num: int, name: str) -> tuple[float, float]:
    """Train all experts, and return the seconds and the operations that they took."""
    seconds = flops = 0.0
    settings = TrainingSettings(device=shop.engine.device)
    for number in range(num):
        with (
            progress(f"{name}: expert {number + 1} of {num}") as report_progress,
            shop.clock.while_training() as is_over,
        ):
            trained = train_island(
                islands,
                number,
                settings,
                on_progress=partial(_show_step, report_progress),
                should_stop=is_over,
            )
        if trained is not None:
            seconds = seconds + trained.training.seconds
            flops = flops + trained.training.flops
    return seconds, flops


def _show_step(report_progress: Callable[[int, int], None], progress: Progress) -> None:
    report_progress(progress.step, progress.num_steps)


def _assemble(shop: Workshop, islands: Islands, release: Path, seed: int, name: str) -> None:
    """Fit the router and publish the ensemble; whatever an interrupted run left is published anew."""
    if release.exists():
        shutil.rmtree(release)
    with shop.clock.progress(f"{name}: router") as step:
        check = shop.clock.check
        assemble(
            islands,
            release,
            _PASSPHRASE,
            AssemblySettings(seed=seed, device=shop.device, on_router_step=step, on_draw=check),
        )


def _split(
    shop: Workshop,
    source: Experts,
    rate: float,
    seed: int,
    path: Path,
    base: Mapping[str, object],
) -> None:
    num = source.num
    images = _images(shop, source, seed)
    preset = shop.preset
    num_fine = max(num, min(_FINE, len(shop.world.train) // 16))
    batch_size = preset.batch_size
    if not source.whole:
        batch_size //= num
    training = shop.training(source.budget, batch_size, rate, seed, source.updates)
    names = island_names(num)
    others = [
        {"silo_id": island, "path": path, "prediction": prediction}
        for island, (path, prediction) in zip(names, MIXED * num, strict=False)
        if (path, prediction) != MIXED[0] and source.objectives == "mixed"
    ]
    recipe = IslandsRecipe.model_validate(
        {
            "data": shop.world.data.model_dump(),
            "public": {"seed": seed, "holdout_share": _HELD_OUT},
            "encoder": {"kind": "pca", "dim": preset.pca_dim},
            "clustering": {"num_fine": num_fine, "num_coarse": num, "balanced": True},
            "sketch": {"rank": preset.pca_dim},
            "partition": {"kind": "silo_cluster", "min_images": 2},
            "condition": shop.condition(source.conditional).model_dump(),
            "objective": {"exceptions": tuple(others)} if others else {},
            "expert": {
                "architecture": preset.network.model_dump(),
                "training": training.model_dump(),
            },
            "router": shop.router(source.budget, source.conditional).model_dump(),
            "owner": {
                "name": "paper",
                "fit_images": preset.fit_images,
                "num_groups": num_fine,
            },
            **base,
        }
    )
    known = source.partition in ("clusters", "random")
    by = source.partition if known else _column(source, seed)
    dataset = Dataset(images, shop.world.train.images, open_image_set(images, recipe.data, None))
    split(dataset, recipe, num if known else None, by, path, _PASSPHRASE, shop.clock.check)


def _images(shop: Workshop, source: Experts, seed: int) -> Path:
    """Return the folder of the training images, with their classes, and the column that divides them if one does."""
    folder = shop.out / "data"
    world = shop.world
    makers: dict[str, Callable[[], Tensor]] = {
        "images": lambda: world.train.images,
        "labels": lambda: world.train.label_N,
    }
    if source.partition == "unequal":
        makers[_column(source, seed)] = lambda: world.unequal(world.train.images)
    elif source.partition == "silos":
        makers[_column(source, seed)] = lambda: world.silos(source.num, seed, source.concentration)
    with alone(shop.out, folder.name, wait=True):
        folder.mkdir(parents=True, exist_ok=True)
        for name, make in makers.items():
            if not (folder / f"{name}.npy").exists():
                np.save(shop.out / "written.npy", make().numpy())
                (shop.out / "written.npy").replace(folder / f"{name}.npy")
    return folder


def _column(source: Experts, seed: int) -> str:
    name = f"{source.partition}{source.num}_{seed}"
    if source.concentration != CONCENTRATION:
        name += f"_{source.concentration:g}".replace(".", "p")
    return name
