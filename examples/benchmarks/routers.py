"""Measures what routers and the strategy lock cost with 8, 64 and 256 tiny experts, and what grows with their number.

All is done in one process and one thread. Rounds go over all numbers of experts and all routers in turn, so that a
noisy machine slows all alike; figures are medians of the rounds, of processor time. Experts are untrained, which costs
the same, and equally likely. Four parts:

- evaluation: one call of each router on a batch, as a ratio to one expert's call on the same batch, and how much the
  memory of the process rises in it; and what the router itself takes.
- opening: a genuine signed release of one owner's islands is verified and loaded, as a ratio to reading and hashing
  its files once.
- lock: images a second from pure noise, as a ratio to one dense model of the same size. The experts share the images,
  so with more experts each is given fewer at once, down to one; more images at once restore the ratio.
- training: steps of the samples router in bf16 and in fp32, side by side, and the held-out losses of both.

Writes build/bench/routers.csv, routers_open.csv, routers_lock.csv and routers_training.csv.
"""

import ctypes
import gc
import hashlib
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.measuring import parse, report, say
from torch import Tensor

from ddm.diffusion.path import LinearPath
from ddm.diffusion.solver import integrate, uniform_times
from ddm.ensemble import Ensemble, SamplingOptions
from ddm.io.files import write_atomic
from ddm.io.tensors import save_tensors
from ddm.islands.assemble import assemble
from ddm.islands.data import Dataset
from ddm.islands.folder import Islands, TrainedIsland
from ddm.islands.recipe import IslandsRecipe
from ddm.islands.split import split
from ddm.loading.ensemble import open_ensemble
from ddm.models import build_expert
from ddm.models.token_router import TokenRouter
from ddm.protocol.architecture import Dit
from ddm.protocol.base import File
from ddm.protocol.routers import SamplesSettings
from ddm.protocol.submission import ExpertTraining, expert_path
from ddm.routers.base import Router
from ddm.routers.counts import CountsRouter
from ddm.routers.labelled import Labelled
from ddm.routers.learned import LearnedRouter
from ddm.routers.residual import Residual
from ddm.routers.samples import SamplesRouter, fit_samples
from ddm.routers.sketch import Sketch

NUMBERS = (8, 64, 256)
SHAPE = (1, 16, 16)
ARCHITECTURE = Dit(patch=2, hidden=64, depth=3, heads=4)
RANK = 32
NUM_GROUPS = 128
BATCH = 64
# Routers that are trained: shape of an image, width, depth, heads, batch.
TRAINED = {"tiny": ((1, 16, 16), 64, 3, 4, 64), "small": ((3, 32, 32), 256, 4, 4, 8)}
IMAGES_EACH = 12
NUM_JUDGED = 48
STEPS = 2
PASSPHRASE = b"benchmark"


def routers(num: int) -> dict[str, Router]:
    """A router of each family for so many experts, on one sketch, with random contents."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8 * NUM_GROUPS, *SHAPE, generator=generator)
    sketch = Sketch.fit(images, torch.arange(len(images)) % NUM_GROUPS, RANK, NUM_GROUPS)
    path = LinearPath()
    mass_KG = torch.rand(num, NUM_GROUPS, generator=generator, dtype=torch.float64)
    counts = CountsRouter(sketch, (mass_KG / mass_KG.sum(1, keepdim=True)).log(), path)
    residual = Residual(sketch, num, 128, 3, path)
    with torch.no_grad():
        list(residual.layers.parameters())[-1].copy_(torch.linspace(-1, 1, num))
    net = TokenRouter(ARCHITECTURE, SHAPE, num)
    return {
        "counts": counts,
        "learned": LearnedRouter(counts, residual),
        "samples": SamplesRouter(net, path),
    }


def stored_bytes(router: Any) -> int:
    """The bytes of what a release stores of a router."""
    return sum(tensor.numel() * tensor.element_size() for tensor in router.tensors().values())


def seconds(work: Callable[[], object]) -> float:
    """Processor seconds of some work."""
    started = time.process_time()
    work()
    return time.process_time() - started


def per_call(work: Callable[[], object], least_s: float = 0.02) -> float:
    """Processor seconds of one call, of as many calls as take long enough to be timed."""
    num = 0
    spent = 0.0
    while spent < least_s:
        spent += seconds(work)
        num += 1
    return spent / num


def risen(work: Callable[[], object]) -> int:
    """How many bytes the resident memory rises at most while some work is done."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    before = _status("VmRSS")
    work()
    return max(_status("VmHWM") - before, 0)


def _status(name: str) -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )
    return int(line.split()[1]) * 1024


def evaluations(numbers: tuple[int, ...], rounds: int) -> list[tuple[object, ...]]:
    """Time each router on a batch beside an expert on the same batch."""
    x = torch.randn(BATCH, *SHAPE)
    t = torch.rand(BATCH)
    expert = build_expert(ARCHITECTURE, SHAPE).eval().requires_grad_(False)
    built = {num: routers(num) for num in numbers}
    ratios: dict[tuple[str, int], list[float]] = {}
    times: dict[tuple[str, int], list[float]] = {}
    with torch.inference_mode():
        for number in range(rounds + 1):
            for num in numbers:
                for name, router in built[num].items():
                    alone = per_call(lambda: expert(x, t))
                    own = per_call(partial(router.log_likelihood, x, t))
                    if number:
                        ratios.setdefault((name, num), []).append(own / alone)
                        times.setdefault((name, num), []).append(own)
        rows: list[tuple[object, ...]] = []
        for (name, num), found in ratios.items():
            router = built[num][name]
            rise = max(risen(partial(router.log_likelihood, x, t)) for _ in range(3))
            ms = statistics.median(times[name, num]) * 1e3
            kib = stored_bytes(router) / 1024
            rows.append(
                (
                    name,
                    num,
                    round(ms, 3),
                    round(statistics.median(found), 3),
                    round(kib),
                    rise // 1024,
                )
            )
    return rows


def make_release(work: Path, num: int) -> tuple[Path, bytes]:
    """Publish so many islands with untrained experts; return the release and its root."""
    rng = np.random.default_rng(0)
    island = np.repeat(np.arange(num), IMAGES_EACH)
    images = rng.uniform(-1, 1, (len(island), *SHAPE)).astype(np.float32)
    work.mkdir(parents=True)
    np.savez(work / "data.npz", images=images, site=island)
    recipe = IslandsRecipe.model_validate(
        {
            "owner": {"num_groups": 8},
            "data": {"shape": SHAPE, "range": (-1.0, 1.0)},
            "encoder": {"kind": "pca", "dim": 8},
            "clustering": {"num_fine": 8, "num_coarse": 2},
            "sketch": {"rank": 8},
            "partition": {"kind": "silo", "min_images": 2},
            "expert": {
                "architecture": ARCHITECTURE.model_dump(),
                "training": {
                    "num_steps": 1,
                    "batch_size": 1,
                    "learning_rate": 1e-3,
                    "weight_decay": 0.0,
                    "ema_decay": 0.9,
                },
            },
            "router": {"kind": "counts"},
            "public": {"holdout_share": NUM_JUDGED / len(island)},
        }
    )
    split(
        Dataset.read(work / "data.npz", recipe.data), recipe, num, "site", work / "run", PASSPHRASE
    )
    islands = Islands(work / "run")
    for number in range(num):
        folder = islands.island(number)
        name = islands.split.islands[number].island_id
        save_tensors(folder.expert, build_expert(ARCHITECTURE, SHAPE, seed=number).state_dict())
        record = TrainedIsland(
            plan_id=islands.plan.plan_id,
            num_images=IMAGES_EACH,
            steps=1,
            training=ExpertTraining(loss=1.0, seconds=1.0, flops=1),
            expert=File.of(expert_path(name, name), folder.expert),
        )
        write_atomic(folder.record, record.encode())
    assemble(islands, work / "release", PASSPHRASE)
    return work / "release", islands.root.read_bytes()


def hash_files(folder: Path) -> None:
    """Read and hash every file once."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as handle:
            hashlib.file_digest(handle, "sha256").hexdigest()


def openings(numbers: tuple[int, ...], rounds: int, work: Path) -> list[tuple[object, ...]]:
    """Time to verify and load releases, beside hashing them."""
    shutil.rmtree(work, ignore_errors=True)
    made = {}
    for num in numbers:
        say(f"makes a release of {num} experts")
        made[num] = make_release(work / str(num), num)
    timings: dict[int, list[tuple[float, float]]] = {num: [] for num in numbers}
    for number in range(rounds + 1):
        for num, (release, root) in made.items():
            hashed = seconds(partial(hash_files, release))
            opened = seconds(
                partial(open_ensemble, release, root=root, state=work / f"state-{num}")
            )
            say(f"{num} experts: hashed in {hashed:.3f} s, opened in {opened:.3f} s")
            if number:
                timings[num].append((opened, hashed))
    rows: list[tuple[object, ...]] = []
    for num, pairs in timings.items():
        release, root = made[num]
        files = [path.stat().st_size for path in release.rglob("*") if path.is_file()]
        opened_s = statistics.median(pair[0] for pair in pairs)
        ratio = statistics.median(pair[0] / pair[1] for pair in pairs)
        rise = risen(partial(open_ensemble, release, root=root, state=work / f"state-{num}"))
        each_ms = opened_s / num * 1e3
        sizes = (len(files), round(sum(files) / 2**20, 1))
        rows.append(
            (
                num,
                *sizes,
                round(opened_s, 3),
                round(each_ms, 2),
                round(ratio, 2),
                round(rise / 2**20, 1),
            )
        )
    shutil.rmtree(work)
    return rows


def dense(model: torch.nn.Module, num: int, together: int) -> Tensor:
    """Draw with the one model alone."""
    with torch.inference_mode():
        parts = torch.split(torch.randn(num, *SHAPE), together)
        return torch.cat([integrate(model, part, uniform_times(STEPS), "euler") for part in parts])


def draws(
    numbers: tuple[int, ...], rounds: int, images: tuple[int, ...]
) -> list[tuple[object, ...]]:
    """Images a second of lock and of one dense model."""
    experts = [
        build_expert(ARCHITECTURE, SHAPE, seed=k).eval().requires_grad_(False)
        for k in range(max(numbers))
    ]
    timings: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for number in range(rounds + 1):
        for num in numbers:
            ensemble = Ensemble(experts[:num], None, [1.0] * num, SHAPE)
            for drawn in images:
                alone = seconds(partial(dense, experts[0], drawn, ensemble.chunk_size))
                euler = SamplingOptions(solver="euler")
                own = seconds(partial(ensemble.sample, drawn, steps=STEPS, options=euler))
                if number:
                    timings.setdefault((num, drawn), []).append((drawn / own, alone / own))
    return [
        (
            num,
            drawn,
            round(drawn / num, 1),
            *(round(statistics.median(p[i] for p in pairs), 3) for i in (0, 1)),
        )
        for (num, drawn), pairs in timings.items()
    ]


def trainings(rounds: int, num_steps: int) -> list[tuple[object, ...]]:
    """Processor seconds of training a samples router in bf16 and in fp32, and the losses that both end with."""
    rows: list[tuple[object, ...]] = []
    for name, (shape, hidden, depth, heads, batch) in TRAINED.items():
        generator = torch.Generator().manual_seed(0)
        centres = 2 * torch.rand(4, 1, *shape, generator=generator) - 1
        images = Labelled.drawn(centres + 0.5 * torch.randn(4, 32, *shape, generator=generator))
        sizes = {"patch": 2, "hidden": hidden, "depth": depth, "heads": heads, "batch_size": batch}
        runs: dict[str, list[tuple[float, float]]] = {"fp32": [], "bf16": []}
        for number in range(rounds + 1):
            for precision, figures in runs.items():
                settings = SamplesSettings.model_validate(
                    {**sizes, "num_steps": num_steps, "precision": precision}
                )
                losses: list[float] = []

                def note(step: int, of: int, loss: float, losses: list[float] = losses) -> None:
                    losses.append(loss)

                took = seconds(partial(fit_samples, images, settings, LinearPath(), 0, note))
                say(f"{name} in {precision}: {took:.2f} s, loss {min(losses):.4f}")
                if number:
                    figures.append((took, min(losses)))
        pairs = list(zip(runs["fp32"], runs["bf16"], strict=True))
        ratio = statistics.median(full[0] / lower[0] for full, lower in pairs)
        rows.append(
            (
                name,
                num_steps,
                round(ratio, 2),
                *(round(runs[precision_name][0][1], 4) for precision_name in ("fp32", "bf16")),
            )
        )
    return rows


def main() -> None:
    """Command line: --rounds N --parts NAME,... --quick --json --out FOLDER --work FOLDER."""
    arguments = parse(__doc__, rounds=5, parts="evaluation,opening,lock,training")
    numbers, images = ((8, 16), (16, 32)) if arguments.quick else (NUMBERS, (256, 1024))
    torch.set_num_threads(1)
    say(f"load of the machine {Path('/proc/loadavg').read_text().split()[0]}")
    parts = arguments.parts.split(",")
    rounds = arguments.rounds
    if "evaluation" in parts:
        header: tuple[str, ...] = (
            "router",
            "experts",
            "ms_a_batch",
            "of_one_expert",
            "stored_kib",
            "risen_kib",
        )
        report("routers", header, evaluations(numbers, rounds), arguments)
    if "opening" in parts:
        header = (
            "experts",
            "files",
            "mib",
            "open_cpu_s",
            "ms_an_expert",
            "of_hashing",
            "risen_mib",
        )
        report(
            "routers_open", header, openings(numbers, rounds, arguments.work / "routers"), arguments
        )
    if "lock" in parts:
        header = ("experts", "images", "images_an_expert", "lock_images_s", "of_dense")
        report("routers_lock", header, draws(numbers, rounds, images), arguments)
    if "training" in parts:
        header = ("router", "steps", "bf16_over_fp32", "loss_fp32", "loss_bf16")
        report(
            "routers_training",
            header,
            trainings(min(rounds, 3), 2 if arguments.quick else 12),
            arguments,
        )
    say(f"load of the machine {Path('/proc/loadavg').read_text().split()[0]}")


if __name__ == "__main__":
    main()
