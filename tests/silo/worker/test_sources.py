"""One silo's data as npz, npy and Parquet: the same digest, assignment, statistics and expert, in bounded memory."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ddm.encoders import PcaEncoder
from ddm.images.array_files import read_images
from ddm.images.rows import select
from ddm.io.settings import save_settings
from ddm.loading.plan import PlanFiles
from ddm.models import build_expert
from ddm.partition.clustering import Clusters
from ddm.protocol.architecture import Dit
from ddm.protocol.data import DataSpec
from ddm.protocol.learning import Training
from ddm.routers.sketch import Sketch
from ddm.statistics.base import StatisticSource
from ddm.training.batches import Examples
from ddm.training.config import Engine
from ddm.training.loop import TrainingRun, train
from ddm.training.objective import TrainingObjective
from silo.config import Site
from silo.privacy.statistics import draw_statistic
from silo.worker.stages import assign_images
from tests.silo.privacy.test_statistics import PLAN, make_source, open_ledger
from tests.support.bounded import attempt
from tests.support.case import case
from tests.support.cohorts import cohort_at
from tests.support.federation import TinyFederation
from tests.support.seeded import SeededNoise


def as_npz(path: Path, folder: Path) -> Path:
    return path


def as_packed_npz(path: Path, folder: Path) -> Path:
    with np.load(path) as arrays:
        np.savez_compressed(folder / "packed.npz", **arrays)
    return folder / "packed.npz"


def as_folder(path: Path, folder: Path) -> Path:
    with np.load(path) as arrays:
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
    return folder


def as_parquet(path: Path, folder: Path) -> Path:
    with np.load(path) as arrays:
        images = pa.FixedShapeTensorArray.from_numpy_ndarray(arrays["images"])
        pq.write_table(pa.table({"image": images, "label": arrays["labels"]}), folder / "a.parquet")
    return folder


SOURCES: list[Callable[[Path, Path], Path]] = [as_npz, as_packed_npz, as_folder, as_parquet]


def bring(site: Site, data: Path) -> None:
    save_settings(
        site.settings().model_copy(update={"data": str(data)}), site.path / "silo.toml", ""
    )


def test_worker_sends_the_same_expert_and_spends_on_the_same_data_set_from_every_source(
    tmp_path: Path,
) -> None:
    tiny = TinyFederation.create(tmp_path / "tiny", {"north": 60})
    plan_id = tiny.sign()
    tiny.deliver_plan("north", plan_id)
    results = {}
    for make in SOURCES:
        copied = tiny.copy(tmp_path / make.__name__)
        site = copied.sites["north"]
        folder = tmp_path / f"{make.__name__}.data"
        folder.mkdir()
        bring(site, make(tiny.path / "north.npz", folder))
        state = copied.work("north")
        expert = next((site.outbox / plan_id).rglob("expert.safetensors")).read_bytes()
        table = pd.read_parquet(site.private / "cohort.parquet")
        results[make.__name__] = (state.dataset_digest, expert, table.to_numpy().tolist())
        unpacked = len(list(site.private.glob("unpacked-*.npy")))
        assert unpacked == (make in (as_packed_npz, as_parquet))
    for name, result in results.items():
        with case(source=name):
            assert result == results["as_npz"]


def test_statistics_are_the_same_to_the_bit_from_files_and_from_memory(tmp_path: Path) -> None:
    in_memory = make_source()
    np.save(tmp_path / "a.npy", in_memory.images[:].numpy())
    spec = DataSpec(shape=(1, 4, 4), range=(-9.0, 9.0))
    options = {"min_images": 1, "salt": b"s" * 32, "unit": "image", "num_classes": None}
    from_file = cohort_at(tmp_path / "a.npy", spec, folder=tmp_path, **options).images  # type: ignore[arg-type]
    drawn = [
        draw_statistic(
            "sketch",
            make_source(images=images),
            open_ledger(tmp_path / name),
            tmp_path / name,
            noise=SeededNoise(3),
        )
        for name, images in (("memory", in_memory.images), ("file", from_file))
    ]
    assert drawn[0].read_bytes() == drawn[1].read_bytes()
    assert not isinstance(from_file, torch.Tensor)


SIDE = 32
NUM = 1 << 16
SPEC = DataSpec(shape=(1, SIDE, SIDE), range=(-1.0, 1.0))


def through_all_stages(path: Path, folder: Path) -> None:
    """Scan, assign, train on a half, draw sketches."""
    public = torch.rand(64, *SPEC.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    encoder = PcaEncoder.fit(public, 4)
    sketch = Sketch.fit(public, torch.zeros(64, dtype=torch.int64), 4, 1)
    cell = torch.zeros(2, dtype=torch.int64)
    files = PlanFiles(encoder, Clusters(encoder.encode(public[:2]), cell, cell), sketch)
    cohort = cohort_at(
        path, SPEC, min_images=1, salt=b"s", unit="image", num_classes=None, folder=folder
    )
    assign_images(cohort, files, folder / "cohort.parquet", lambda num_done, total: None)
    settings = Training(
        num_steps=4,
        batch_size=8,
        learning_rate=1e-3,
        weight_decay=0.0,
        ema_decay=0.9,
    )
    train(
        build_expert(Dit(patch=8, hidden=16, depth=1, heads=2), SPEC.shape),
        Examples(select(cohort.images, torch.arange(0, len(cohort.images), 2))),
        settings,
        TrainingObjective(),
        TrainingRun(folder / "checkpoints", engine=Engine(device="cpu")),
    )
    plan = PLAN.model_copy(update={"data": SPEC})
    source = StatisticSource(
        plan,
        "0" * 64,
        sketch,
        cohort.images,
        cell[:1].expand(len(cohort.images)),
        cohort.unit_N,
        None,
        cohort.digest,
    )
    draw_statistic("sketch", source, open_ledger(folder), folder)


def save_copies(path: Path, num: int) -> Path:
    """Write one random image `num` times."""
    handle = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(num, SIDE, SIDE))
    handle[:] = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE), dtype=np.uint8)
    handle.flush()
    return path


@pytest.mark.measured
def test_cohort_goes_through_all_stages_in_a_fraction_of_its_memory(tmp_path: Path) -> None:
    few = save_copies(tmp_path / "few.npy", 64)
    (first := tmp_path / "first").mkdir()
    through_all_stages(few, first)  # what is imported at the first use is not the cohort's memory
    many = save_copies(tmp_path / "many.npy", NUM)
    (folder := tmp_path / "private").mkdir()
    outcome = attempt(lambda: through_all_stages(many, folder), mib=120, cpu_s=60)
    assert (outcome.error, outcome.message) == (None, "")
    assert outcome.mib < 120  # as float32 it is 256 MiB
    control = attempt(lambda: read_images(many, SPEC), mib=120, cpu_s=60)
    assert control.mib > 200
    shutil.rmtree(tmp_path)
