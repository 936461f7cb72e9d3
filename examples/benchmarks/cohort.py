"""Measures the memory and time of each stage of a silo with a million latents of (4, 32, 32), float16 on disk.

The stages are the worker's own functions: scan (every value checked, the data set's digest), assignment by a PCA
encoder, some steps of training with batches drawn ahead, counts and noised sketches. They run in a process of their
own, one after the other. Its peak resident memory (VmHWM) is what counts: anonymous memory and mapped files together;
the largest anonymous part (RssAnon), sampled fifty times a second, stands beside it. Data are read with positioned
reads, so their pages lie in the system's page cache, belong to no process and are given up when memory is short.
What Python, torch and the packages need is included. Target: at most 1.5 GiB. Needs 9 GB of disk for a while.
Writes build/bench/cohort.csv and targets/cohort.csv.
"""

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from support.measuring import parse, report, require_space, say
from support.targets import Target, report_targets

from aggregator.config import Federation, FederationSettings
from aggregator.membership.registry import enroll_silo
from aggregator.planning.draft import draft_plan
from aggregator.planning.recipe import Recipe
from aggregator.setup import init_federation
from ddm.diffusion.path import path_named
from ddm.images.rows import select
from ddm.loading.plan import PlanFiles
from ddm.models import build_expert
from ddm.planning.networks import open_networks
from ddm.protocol.base import sha256_file
from ddm.protocol.plan import Plan
from ddm.protocol.statistics import Budget
from ddm.statistics.base import StatisticSource
from ddm.training.batches import Examples
from ddm.training.config import Engine
from ddm.training.loop import TrainingRun, train
from ddm.training.objective import TrainingObjective
from silo.config import Site
from silo.data.cohort import CohortRequest, load_cohort
from silo.images.source import FOLDER, ImageSource
from silo.privacy.ledger import Ledger, make_ledger
from silo.privacy.statistics import draw_statistic
from silo.setup import SiteSetup, init_site, make_card, read_invitation
from silo.worker.stages import assign_images, read_assignment

SHAPE = (4, 32, 32)
STEPS = 50
NUM_PUBLIC = 2048
BLOCK = 8192  # latents that are made at a time
TARGET_GIB = 1.5
PASSPHRASE = b"of a benchmark"
T = TypeVar("T")


def recipe() -> Recipe:
    """A small expert on latents; sketches of 16 dimensions."""
    training = {
        "num_steps": STEPS,
        "batch_size": 64,
        "learning_rate": 1e-3,
        "weight_decay": 0.01,
        "ema_decay": 0.99,
    }
    tables = {
        "rehearsal": True,
        "data": {"shape": list(SHAPE), "range": [-8.0, 8.0]},
        "encoder": {"kind": "pca", "dim": 32},
        "clustering": {"num_fine": 256, "num_coarse": 4},
        "sketch": {"rank": 32},
        "partition": {"kind": "silo", "min_images": 50},
        "expert": {
            "architecture": {"kind": "dit", "patch": 4, "hidden": 64, "depth": 2, "heads": 4},
            "training": training,
        },
        "statistics": {
            "unit": "image",
            "total": {"epsilon": 8.0, "delta": 1e-5},
            "counts": {"epsilon": 1.0, "num_groups": 16},
            "sketch": {"epsilon": 7.0, "delta": 1e-5, "rank": 16},
        },
        "router": {"kind": "counts"},
        "audit": {
            "required": True,
            "min_holdout_units": 300,
            "max_near_copy_rate": 0.01,
            "max_mia_auc": 0.6,
        },
        "limits": {
            "expert_bytes": 1 << 26,
            "statistic_bytes": 1 << 30,
            "train_s": 3600,
            "gpu_hours": 1.0,
        },
    }
    return Recipe.model_validate_json(json.dumps(tables))


def latents(rng: np.random.Generator, num: int) -> np.ndarray:
    """Made-up latents: smooth, of about unit deviation, within the plan's range."""
    coarse = rng.standard_normal((num, 4, 4, 4), dtype=np.float32).repeat(8, 2).repeat(8, 3)
    return np.clip(coarse + 0.3 * rng.standard_normal((num, *SHAPE), dtype=np.float32), -8, 8)


def write_data(path: Path, num: int) -> None:
    """Write a folder with latents as float16, as an autoencoder's owner may keep them; blocks repeat."""
    path.mkdir(parents=True)
    block = latents(np.random.default_rng(0), min(BLOCK, num)).astype("<f2")
    with (path / "images.npy").open("wb") as handle:
        header = {"descr": "<f2", "fortran_order": False, "shape": (num, *SHAPE)}
        np.lib.format.write_array_header_1_0(handle, header)
        for start in range(0, num, len(block)):
            handle.write(np.roll(block, start // len(block), axis=1)[: num - start].tobytes())


def make_plan(folder: Path, num: int) -> None:
    """Draft the plan of a federation of one silo that brings so many."""
    federation = Federation(folder / "fed")
    site = Site(folder / "site")
    init_federation(
        federation,
        FederationSettings(name="bench", host="127.0.0.1", port=9092, licence="CC-BY-4.0"),
        PASSPHRASE,
    )
    invitation = federation.path / "invitation.json"
    invited = read_invitation(invitation, sha256_file(invitation))
    key = init_site(site, SiteSetup("north", folder / "data"), invited, PASSPHRASE)
    (folder / "card.json").write_bytes(make_card(site, key, images=num))
    enroll_silo(federation, folder / "card.json")
    public = torch.from_numpy(latents(np.random.default_rng(1), NUM_PUBLIC))
    chosen = recipe()
    networks = open_networks(chosen)
    plan = draft_plan(federation, chosen, networks, public, folder / "plan").plan
    (folder / "plan.json").write_bytes(plan.encode())


def status(name: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


class Watch(threading.Thread):
    """Samples the anonymous part of this process's memory."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0

    def run(self) -> None:
        """Sample until the process ends."""
        while True:
            self.most = max(self.most, status("RssAnon"))
            time.sleep(0.02)


def stages(folder: Path) -> None:
    """In a process of its own: print for each stage its seconds, processor seconds and the peaks so far, as JSON."""
    torch.set_num_threads(1)
    plan = Plan.parse((folder / "plan.json").read_bytes(), subject="plan.json")
    files = PlanFiles.load(plan, folder / "plan")
    private = folder / "private"
    private.mkdir()
    (watch := Watch()).start()

    def stage(name: str, work: Callable[[], T]) -> T:
        wall = time.perf_counter()
        processor = time.process_time()
        result = work()
        seconds = time.perf_counter() - wall, time.process_time() - processor
        print(
            json.dumps(
                [name, *(round(duration, 1) for duration in seconds), status("VmHWM"), watch.most]
            ),
            flush=True,
        )
        return result

    cohort = stage(
        "scan",
        lambda: load_cohort(
            ImageSource(folder / "data", private / FOLDER),
            CohortRequest(data=plan.data, min_images=1, unit="image"),
            b"s" * 32,
            private,
        ),
    )
    stage(
        "assign",
        lambda: assign_images(cohort, files, private / "cohort.parquet", lambda done, total: None),
    )
    fine_N = read_assignment(cohort, files, private / "cohort.parquet")
    stage(
        f"train {STEPS} steps",
        lambda: train(
            build_expert(plan.expert.architecture, plan.expert_shape),
            Examples(select(cohort.images, torch.arange(1, len(cohort.images)))),
            plan.expert.training,
            TrainingObjective(path_named(plan.objective.path), plan.t_distribution),
            TrainingRun(private / "checkpoints", engine=Engine(device="cpu")),
        ),
    )
    groups = files.clusters.group_F[fine_N]
    source = StatisticSource(
        plan, plan.digest, files.sketch, cohort.images, groups, cohort.unit_N, None, cohort.digest
    )
    make_ledger(private / "ledger.jsonl")
    ledger = Ledger(private / "ledger.jsonl", budget=Budget(epsilon=10.0, delta=1e-5), unit="image")
    stage("counts", lambda: draw_statistic("counts", source, ledger, private))
    stage("sketch", lambda: draw_statistic("sketch", source, ledger, private))


def main() -> None:
    """Command line: --num N --quick --json --out FOLDER --work FOLDER."""
    if sys.argv[1:2] == ["--stages"]:
        stages(Path(sys.argv[2]))
        return
    arguments = parse(__doc__, num=1_000_000)
    num = 20_000 if arguments.quick else arguments.num
    require_space(arguments.work, 2 * num * int(np.prod(SHAPE)))
    folder = arguments.work / "cohort"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        say(f"writing {num} latents")
        write_data(folder / "data", num)
        make_plan(folder, num)
        rows = []
        command = [sys.executable, __file__, "--stages", str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            for line in child.stdout or ():
                name, wall, processor, peak, anonymous = json.loads(line)
                rows.append(
                    (name, num, wall, processor, round(peak / 2**20), round(anonymous / 2**20))
                )
                say(f"{name}: {wall} s, peak {peak >> 20} MiB")
        if child.returncode:
            sys.exit(f"the stages ended with exit code {child.returncode}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report(
        "cohort",
        ("stage", "images", "wall_s", "processor_s", "peak_mib", "peak_anonymous_mib"),
        rows,
        arguments,
    )
    gib = max(row[4] for row in rows) / 1024
    report_targets(
        "cohort",
        [Target(f"peak of a silo with {num} latents, GiB", [gib], TARGET_GIB, False)],
        arguments,
    )


if __name__ == "__main__":
    main()
