"""Measures the routers' quality against epsilon, for every family, with error bars.

Draws privacy.png, prints the table of targets, writes privacy.csv, targets.csv and README.md to --out. A run that was
stopped goes on with the seeds that are not done yet.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from pydantic import ValidationError

from ddm.protocol.base import sha256_hex
from ddm.routers.base import Router
from examples.paper.privacy.attacking import empirical_epsilons, reidentification_rates
from examples.paper.privacy.families import (
    Fitted,
    RouterTerms,
    as_published,
    fit_exact,
    fit_family,
    fit_from_samples,
)
from examples.paper.privacy.figure import draw_figure
from examples.paper.privacy.measure import TIMES, RouterMeasurements, measure
from examples.paper.privacy.public import PublicParts, fit_public_parts
from examples.paper.privacy.reference import Bench
from examples.paper.privacy.report import write_report
from examples.paper.privacy.results import FamilyRecord, Presets, SeedResult, presets_for
from examples.paper.privacy.shares import Sampler, train_experts
from examples.paper.privacy.targets import BOTH, ELIGIBLE, REFERENCES, check_targets
from examples.paper.privacy.worlds import DATASETS, PrivateWorld, make_world
from examples.paper.tables.results import commit

Say = Callable[[str], None]


def main() -> int:
    """Command line; returns the exit status."""
    arguments = parse(sys.argv[1:])
    presets = presets_for(arguments.dataset, quick=arguments.quick)
    (arguments.out / "runs").mkdir(parents=True, exist_ok=True)
    try:
        results = run_seeds(arguments, presets)
    except KeyboardInterrupt:
        print(
            f"Stopped; the same command goes on from what is in {arguments.out / 'runs'}.",
            file=sys.stderr,
        )
        return 130
    targets = check_targets(arguments.dataset, results)
    draw_figure(results, arguments.out / "privacy.png", arguments.dataset)
    write_report(arguments.out, arguments.dataset, presets, results, targets, quick=arguments.quick)
    print((arguments.out / "README.md").read_text("utf-8"))
    missed = [target for target in targets if not target.met]
    if arguments.check and missed:
        print(f"{len(missed)} of {len(targets)} targets missed.", file=sys.stderr)
        return 1
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", choices=sorted(DATASETS), default="digits")
    parser.add_argument(
        "--data", type=Path, help="folder of the data set's files; digits need none"
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=3,
        help="number of splits, each with its encoder and statistics (default: 3)",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the figure, tables and unfinished runs"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with status 1 if a target is missed"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few steps, for a quick trial; the numbers have no meaning",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="number of seeds at the same time, each with one thread (default: 1)",
    )
    arguments = parser.parse_args(argv)
    if arguments.check and arguments.quick:
        parser.error("--check: not with --quick, whose numbers mean nothing")
    if arguments.seeds < 1 or arguments.jobs < 1:
        parser.error("--seeds and --jobs: at least 1")
    return arguments


def run_seeds(arguments: argparse.Namespace, presets: Presets) -> list[SeedResult]:
    """Measure every world, `--jobs` of them at a time."""
    if arguments.jobs == 1:
        return [run_seed(arguments, presets, seed) for seed in range(arguments.seeds)]
    with ProcessPoolExecutor(
        arguments.jobs, get_context("spawn"), torch.set_num_threads, (1,)
    ) as pool:
        try:
            return list(pool.map(partial(run_seed, arguments, presets), range(arguments.seeds)))
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise


def run_seed(arguments: argparse.Namespace, presets: Presets, seed: int) -> SeedResult:
    """Measure one world, or read what an earlier run measured at this commit under the same presets."""
    started = time.monotonic()

    def say(message: str) -> None:
        print(f"[seed {seed}, {time.monotonic() - started:5.0f} s] {message}", flush=True)

    path = arguments.out / "runs" / f"{arguments.dataset}-{seed}.json"
    if path.exists():
        earlier = read_result(path)
        if earlier and earlier.presets == presets and earlier.commit == commit():
            say(f"taken from {path}")
            return earlier
    world = make_world(DATASETS[arguments.dataset], arguments.data, seed)
    say(f"{len(world.silos)} silos of {min(world.num_units)} to {max(world.num_units)} images")
    scratch = path.with_name(f"{path.stem}-{sha256_hex(presets.model_dump_json().encode())[:8]}")
    result = measure_seed(world, presets, seed, scratch, say)
    part = path.with_suffix(".part")
    part.write_text(result.model_dump_json(indent=1) + "\n", "utf-8")
    part.replace(path)
    return result


def read_result(path: Path) -> SeedResult | None:
    """Read what an earlier run kept, None where it kept something else."""
    try:
        return SeedResult.model_validate_json(path.read_bytes())
    except ValidationError:
        return None


def measure_seed(
    world: PrivateWorld, presets: Presets, seed: int, scratch: Path, say: Say
) -> SeedResult:
    """Fit and measure everything on one world."""
    measured_commit = commit()
    prior = measure(None, world)
    records = [FamilyRecord.of("prior", None, 0, prior, prior)]
    worlds = {name: world.grouped_by(name) for name in presets.encoders}
    parts = {
        name: fit_public_parts(worlds[name], name, presets.encoder_steps, seed, say)
        for name in presets.encoders
    }
    main_parts = parts[presets.encoders[0]]
    exact = as_published(fit_exact(world, main_parts), world, main_parts, seed)
    records += references(world, exact, presets, seed, prior, say)
    routers: dict[tuple[str, float], Fitted] = {}
    for encoder, fitted in parts.items():
        first = encoder == presets.encoders[0]
        records += sweep(
            worlds[encoder], fitted, presets, seed, prior, encoder, first, routers, say
        )
    experts = train_experts(world, scratch, presets.expert_steps, seed, say)
    drawn = Fitted(
        fit_from_samples(world, experts, presets.samples_steps, seed),
        routers["counts", 1.0].evidence,
    )
    samples = as_published(drawn, world, main_parts, seed)
    measured = measure(samples, world)
    records.append(
        FamilyRecord.of("samples", None, 0, measured, prior, temperature=samples.temperature)
    )
    say(f"samples router {_mean(measured):.4f}, temperature {samples.temperature:.2f}")
    private = as_published(routers["learned", 1.0], world, main_parts, seed)
    sampler = Sampler(world, main_parts, experts, presets.num_samples, seed)
    return SeedResult(
        seed=seed,
        commit=measured_commit,
        presets=presets,
        records=tuple(records),
        shares=sampler.compare(private, exact, say) if seed == 0 else (),
        empirical=empirical_epsilons(presets, say) if seed == 0 else (),
        reidentification=reidentification_rates(world, main_parts, seed, say)
        if seed == 0
        else None,
    )


def references(
    world: PrivateWorld,
    exact: Router,
    presets: Presets,
    seed: int,
    prior: RouterMeasurements,
    say: Say,
) -> Sequence[FamilyRecord]:
    """Measure what the silos' own images allow: a tuned network, exact counts, and both together."""
    bench = Bench(world, seed)
    name, network = bench.best(presets.reference_steps, say)
    routers = {REFERENCES[0]: network, REFERENCES[1]: exact}
    routers[BOTH] = bench.beside(exact, presets.reference_steps, say)
    records = []
    for family, router in routers.items():
        measured = measure(router, world)
        records.append(
            FamilyRecord.of(
                family, None, 0, measured, prior, note=name if router is network else ""
            )
        )
        say(f"{family} {_mean(measured):.4f}, prior {_mean(prior):.4f} nats")
    return records


def sweep(
    world: PrivateWorld,
    parts: PublicParts,
    presets: Presets,
    seed: int,
    prior: RouterMeasurements,
    encoder: str,
    first: bool,
    routers: dict[tuple[str, float], Fitted],
    say: Say,
) -> list[FamilyRecord]:
    """Measure every family at every epsilon; with an encoder other than the first, the counts alone."""
    records = []
    for epsilon in presets.epsilons:
        counts: list[RouterMeasurements] = []
        for family in ELIGIBLE if first else ("counts",):
            label = family if first else f"{family}, {encoder}"
            for draw in range(presets.draws):
                fitted = fit_family(
                    world, parts, RouterTerms(family, epsilon, presets.learned_steps), seed
                )
                router = as_published(fitted, world, parts, seed)
                measured = measure(router, world)
                against = counts[draw] if family == "learned" else None
                records.append(
                    FamilyRecord.of(
                        label,
                        epsilon,
                        draw,
                        measured,
                        prior,
                        against=against,
                        temperature=router.temperature,
                    )
                )
                if family == "counts":
                    counts.append(measured)
                if first:
                    routers.setdefault((family, epsilon), fitted)
            say(
                f"{label} at epsilon {epsilon:g}: {_mean(measured):.4f} nats, temperature {router.temperature:.2f}"
            )
    return records


def _mean(measured: RouterMeasurements) -> float:
    return sum(measured.loss_T) / len(TIMES)
