"""Measures what each step of a federation costs as the number of its silos grows, from `enroll` to `ddm sample`.

Sixteen to 1,024 silos, the most that a plan may have, each with a tiny expert of random weights; only training and the
transfer are left out. Cards, statistics, signatures, screening, router, release and samples are genuine. Every step
runs in a process of its own, so that its peak memory is its own too; a step with `one by one` repeats what an operator
does for each silo. `per silo` is the processor time of a step over the number of silos, and `growth` that of the size
over that of 64 silos. Target: at most 1.5. Writes build/bench/many_silos.csv.
"""

import argparse
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from support.federation import PASSPHRASE, SHAPE, TINY, expert_bytes, recipe
from support.made_up_silos import MadeUpSilo, train_common_expert
from support.measuring import parse, report, say

from aggregator.config import Federation, FederationSettings
from aggregator.intake.inventory import take_inventory
from aggregator.intake.service import IntakeService
from aggregator.membership.registry import CardFile, enroll_silos
from aggregator.planning.draft import draft_plan
from aggregator.planning.recipe import Recipe
from aggregator.planning.sign import sign_plan
from aggregator.release.publish import publish
from aggregator.router.train import train_router
from aggregator.setup import init_federation
from ddm.cli.main import app as ddm_program
from ddm.io.files import write_atomic
from ddm.loading.ensemble import open_ensemble
from ddm.loading.plan import PlanFiles
from ddm.loading.release import open_release
from ddm.planning.networks import open_networks
from ddm.publishing.keys import load_key

SIZES = "16,64,256,1024"
REFERENCE_SIZE = 64
TARGET_GROWTH = 1.5
NUM_IMAGES = 40
NUM_PUBLIC_IMAGES = 400
NUM_SAMPLES = 16
COLUMNS = ("silos", "step", "cpu_s", "cpu_ms_per_silo", "growth", "peak_mib", "written_mib")


@dataclass(frozen=True)
class Workplace:
    """The folder of one size: a federation, its silos, and what it published."""

    path: Path
    num_silos: int

    @property
    def federation(self) -> Federation:
        """The operator's folder."""
        return Federation(self.path / "fed")

    @property
    def release(self) -> Path:
        """The published release."""
        return self.path / "release"

    @property
    def root(self) -> Path:
        """The root of trust that a reader pins."""
        return self.federation.tuf / "1.root.json"

    @property
    def silos(self) -> list[MadeUpSilo]:
        """Every silo."""
        return [MadeUpSilo(number, NUM_IMAGES) for number in range(self.num_silos)]

    @property
    def card_paths(self) -> list[Path]:
        """Every silo's card."""
        return [self.path / "cards" / f"{silo.silo_id}.json" for silo in self.silos]


def prepare_federation(place: Workplace) -> None:
    """Make the federation, and the card of every silo."""
    settings = FederationSettings(name="bench", host="127.0.0.1", port=9092, licence="CC-BY-4.0")
    init_federation(place.federation, settings, PASSPHRASE)
    root_digest = place.federation.root_digest
    for silo, path in zip(place.silos, place.card_paths, strict=True):
        write_atomic(path, silo.card(root_digest), is_durable=False)


def enroll(place: Workplace) -> None:
    """Enroll every silo with one command."""
    enroll_silos(place.federation, [CardFile(path) for path in place.card_paths])


def recipe_of_many() -> Recipe:
    """Return the smallest recipe whose training can teach an expert, so that screening applies all of its rules."""
    chosen = recipe()
    training = chosen.expert.training.model_copy(
        update={"learning_rate": 0.01, "num_steps": 100, "warmup_steps": 1}
    )
    expert = chosen.expert.model_copy(update={"training": training})
    return chosen.model_copy(update={"expert": expert})


def plan(place: Workplace) -> None:
    """Draft a plan for every silo, and sign it."""
    values = np.random.default_rng(0).uniform(-1, 1, (NUM_PUBLIC_IMAGES, *SHAPE))
    public = torch.from_numpy(values.astype(np.float32))
    chosen = recipe_of_many()
    scratch = place.path / "scratch"
    draft = draft_plan(place.federation, chosen, open_networks(chosen), public, scratch)
    limits = draft.plan.limits.model_copy(update={"expert_bytes": expert_bytes(TINY)})
    sign_plan(
        place.federation,
        replace(draft, plan=draft.plan.model_copy(update={"limits": limits})),
        PASSPHRASE,
    )


def prepare_submissions(place: Workplace) -> None:
    """Put every silo's submission where the ServerApp writes it."""
    current_plan, _ = place.federation.current_plan()
    files = PlanFiles.load(current_plan, place.federation.plan_targets(current_plan.plan_id))
    weights = train_common_expert(current_plan)
    incoming = place.federation.incoming / current_plan.plan_id
    for silo in place.silos:
        silo.write_submission(incoming / silo.silo_id / "1", current_plan, files, weights)


def take_in(place: Workplace) -> None:
    """Verify, screen and answer every submission."""
    key = load_key(place.federation, "receipts", PASSPHRASE)
    service = IntakeService(place.federation, key, on_verdict=lambda receipt: None)
    with service.locked():
        num_answered = service.step()
    if num_answered != place.num_silos:
        sys.exit(f"intake: expected {place.num_silos} receipts, got {num_answered}")


def route(place: Workplace) -> None:
    """Train the router."""
    train_router(place.federation, take_inventory(place.federation), seed=0)


def publish_release(place: Workplace) -> None:
    """Publish the first version, pages included."""
    publish(place.federation, PASSPHRASE, place.release, rehearsal=True)


def verify(place: Workplace) -> None:
    """Verify the release, as `ddm verify` does."""
    open_release(place.release, root=place.root, state=place.path / "state")


def open_experts(place: Workplace) -> None:
    """Verify the release and load every expert, as a Python program does."""
    open_ensemble(place.release, root=place.root.read_bytes(), state=place.path / "state")


def sample(place: Workplace) -> None:
    """Draw a few images with `ddm sample`."""
    options = ["--root", str(place.root), "--state", str(place.path / "state"), "--num"]
    options += [str(NUM_SAMPLES), "--out", str(place.path / "samples.png")]
    ddm_program(["sample", str(place.release), *options], standalone_mode=False)


# The order in which a federation takes them. What silos do comes between, and is not measured.
PREPARATIONS: dict[str, Callable[[Workplace], None]] = {
    "prepare federation": prepare_federation,
    "prepare submissions": prepare_submissions,
}
STEPS: dict[str, Callable[[Workplace], None]] = {
    "prepare federation": prepare_federation,
    "enroll": enroll,
    "plan": plan,
    "prepare submissions": prepare_submissions,
    "intake": take_in,
    "router": route,
    "publish": publish_release,
    "verify": verify,
    "open": open_experts,
    "sample": sample,
}


@dataclass(frozen=True)
class StepCost:
    """What one step cost its process."""

    cpu_s: float
    peak_bytes: int
    written_bytes: int


def run_step(place: Workplace, name: str) -> StepCost:
    """Run one step in this process, and measure it without the start of Python."""
    torch.set_num_threads(1)
    cpu_before = _cpu_s()
    written_before = _status_number("/proc/self/io", "wchar")
    with contextlib.redirect_stdout(sys.stderr):
        STEPS[name](place)
    return StepCost(
        cpu_s=_cpu_s() - cpu_before,
        peak_bytes=_status_number("/proc/self/status", "VmHWM") * 1024,
        written_bytes=_status_number("/proc/self/io", "wchar") - written_before,
    )


def _cpu_s() -> float:
    """Return the processor time of this process and of those that it started, user and system."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _status_number(path: str, name: str) -> int:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    raise SystemExit(f"{path}: expected a line {name}, got none")


def measure_size(work: Path, num_silos: int) -> dict[str, StepCost]:
    """Run every step for so many silos, each in a process of its own; return the cost of those that are measured."""
    folder = work / f"{num_silos}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    costs = {}
    for name in STEPS:
        command = [sys.executable, __file__, "--step", name, "--silos", str(num_silos)]
        step = subprocess.run(
            [*command, "--work", str(work)],
            stdout=subprocess.PIPE,
            check=True,
            # Several threads of a tiny product only wait for each other, which counts as processor time.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        cost = StepCost(**json.loads(step.stdout))
        say(f"{num_silos} silos, {name}: {cost.cpu_s:.1f} s")
        if name not in PREPARATIONS:
            costs[name] = cost
    shutil.rmtree(folder)
    return costs


def table_rows(
    costs_by_size: dict[int, dict[str, StepCost]],
) -> list[tuple[int, str, float, float, float, float, float]]:
    """Return a row for each size and step; `growth` is 0 where the reference size was not measured."""
    reference = costs_by_size.get(REFERENCE_SIZE, {})
    rows = []
    for num_silos, costs in costs_by_size.items():
        for name, cost in costs.items():
            per_silo = cost.cpu_s / num_silos
            growth = 0.0
            if name in reference:
                growth = per_silo / (reference[name].cpu_s / REFERENCE_SIZE)
            rows.append(
                (
                    num_silos,
                    name,
                    round(cost.cpu_s, 2),
                    round(1000 * per_silo, 2),
                    round(growth, 2),
                    round(cost.peak_bytes / 2**20, 1),
                    round(cost.written_bytes / 2**20, 2),
                )
            )
    return rows


def main() -> None:
    """Command line: --silos 16,64,256,1024 --quick --json --out FOLDER --work FOLDER."""
    arguments = parse(__doc__, silos=SIZES, step="")
    if arguments.step:
        num_silos = int(arguments.silos)
        place = Workplace(arguments.work / f"{num_silos}", num_silos)
        print(json.dumps(vars(run_step(place, arguments.step))))
        return
    measure_all(arguments)


def measure_all(arguments: argparse.Namespace) -> None:
    """Measure every size, and report what grew faster than the number of silos."""
    sizes = [int(size) for size in arguments.silos.split(",")]
    if arguments.quick:
        sizes = [4, 8]
    costs_by_size = {}
    for num_silos in sizes:
        costs_by_size[num_silos] = measure_size(arguments.work / "many_silos", num_silos)
    rows = table_rows(costs_by_size)
    report("many_silos", COLUMNS, rows, arguments)
    missed = [
        f"{name} of {num_silos} ({growth})"
        for num_silos, name, _, _, growth, _, _ in rows
        if num_silos > REFERENCE_SIZE and growth > TARGET_GROWTH
    ]
    say(f"above {TARGET_GROWTH} times the cost per silo at 64: {', '.join(missed) or 'none'}")


if __name__ == "__main__":
    main()
