"""What a silo's worker costs over bare training: the same expert, the same steps, in processor time.

*Bare* calls `ddm.training.loop.train`. *Worker* trains as a worker of one process does: a job in a folder, its state
saved every two seconds, the expert verified and copied. *Launched* has another process train, started by a command and
followed through the folder; both processes count. Each is run with few steps and with many, and the difference is what
counts, so that starting Python, which takes as long for a run of a week, is not in it; it stands beside it. Rounds
alternate, and the figure is the median of their ratios. Writes worker.csv beside the figures.
"""

import argparse
import csv
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from support.plan import small_plan
from support.targets import Target, report_targets

from ddm.diffusion.path import path_named
from ddm.protocol.base import sha256_hex
from ddm.training.batches import Examples
from ddm.training.config import TrainingSettings
from ddm.training.job import JobFolder
from ddm.training.jobs import TrainingTask, train_job
from ddm.training.loop import TrainingRun, train
from ddm.training.objective import TrainingObjective
from ddm.training.planned import PlannedExpert
from ddm.training.progress import Progress
from silo.worker.progress import NOTE_S
from silo.worker.state import State, save_state

SHAPE = (1, 8, 8)
FEW = 5
LAUNCHER: tuple[str, ...] = (
    sys.executable,
    "-m",
    "ddm.training",
    "{folder}",
    "--launch",
    "{launch}",
)


def processor_s() -> float:
    """Seconds of processor time of this process and of those that it waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def noting(folder: Path) -> Callable[[Progress], None]:
    """Save the state as a worker does."""
    last = 0.0

    def note(progress: Progress) -> None:
        nonlocal last
        if time.monotonic() - last >= NOTE_S:
            last = time.monotonic()
            save_state(
                folder / "state.json", State(step=progress.step, num_steps=progress.num_steps)
            )

    return note


def spent(kind: str, images: torch.Tensor, num_steps: int) -> float:
    """Return the processor time of one run."""
    plan = small_plan(SHAPE, num_steps)
    settings = TrainingSettings(device="cpu", launcher=LAUNCHER if kind == "launched" else "local")
    expert = PlannedExpert(plan, "north", 0, None, settings.engine)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = processor_s()
        if kind == "bare":
            train(
                expert.start(),
                Examples(images),
                plan.expert.training,
                TrainingObjective(path_named(plan.objective.path), plan.t_distribution),
                TrainingRun(folder, engine=settings.engine),
            )
        else:
            train_job(
                TrainingTask(expert, {"images": images}, sha256_hex(b"benchmark")),
                JobFolder(folder / "job"),
                settings,
                folder / "expert.safetensors",
                on_progress=noting(folder),
                should_stop=lambda: False,
            )
        return processor_s() - before


def main() -> None:
    """Command line: --rounds N --steps N --quick --out FOLDER."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--quick", action="store_true", help="one round of few steps, for a quick trial"
    )
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    arguments = parser.parse_args()
    rounds, steps = (1, 20) if arguments.quick else (arguments.rounds, arguments.steps)
    torch.set_num_threads(1)
    images = torch.rand(512, *SHAPE) * 2 - 1
    kinds = ("bare", "worker", "launched")
    rows = list[tuple[float, ...]]()
    spent("worker", images, 2)  # whoever comes first also pays for what torch sets up once
    for index in range(rounds):
        few, many = (
            {kind: spent(kind, images, num) for kind in kinds} for num in (FEW, FEW + steps)
        )
        taken = [many[kind] - few[kind] for kind in kinds]
        rows.append((index, *taken, *(few[kind] for kind in kinds)))
        shares = ", ".join(
            f"{kind} {took / taken[0] - 1:+.1%}"
            for kind, took in zip(kinds[1:], taken[1:], strict=True)
        )
        print(f"round {index}: {steps} steps take {taken[0]:.2f} s bare; {shares}", flush=True)
    starts = statistics.median(row[6] for row in rows) - statistics.median(row[4] for row in rows)
    print(f"a launched process starts in {starts:.1f} s of processor time, once a run")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "worker.csv").open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(
            ("round", *(f"{kind}_s" for kind in kinds), *(f"{kind}_start_s" for kind in kinds))
        )
        writer.writerows(rows)
    targets = [
        Target(
            f"{what}, processor time over bare training's",
            [row[at] / row[1] for row in rows],
            1.02,
            at_least=False,
        )
        for what, at in (("worker", 2), ("worker with a launcher", 3))
    ]
    report_targets("worker", targets, arguments)


if __name__ == "__main__":
    main()
