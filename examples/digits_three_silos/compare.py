"""Compares the demo's routers and strategies with a reference that no federation has: a router trained without privacy.

Run it after the demo; it adds what it finds to the demo's summary.json. Unlike any silo or aggregator, it may look at
everybody's images, and it does so only here, to measure.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from summary import SILOS
from torch import Tensor

from aggregator.config import PUBLIC_NAME, Federation
from aggregator.intake.inventory import Inventory, take_inventory
from aggregator.router.statistics import AcceptedStatistics, read_statistics
from ddm.diffusion.path import LinearPath
from ddm.ensemble import Ensemble, SamplingOptions
from ddm.errors import ArchipelagoError, SetupError
from ddm.loading.ensemble import load_ensemble
from ddm.loading.release import open_release
from ddm.protocol.manifest import Manifest
from ddm.protocol.routers import LearnedSettings
from ddm.routers.base import Router, log_prior, posterior
from ddm.routers.counts import CountsRouter
from ddm.routers.evaluation import cross_entropy
from ddm.routers.learned import LearnedRouter, SiloSketches, fit_learned, split_sketches
from ddm.routers.residual import PublicSketches
from ddm.sampling.strategies import Full, Lock, Sample, Strategy, TopOne
from ddm.system.console import table

NUM_SHARES = 384
STEPS = 16
NEAR_DATA = 0.02
STRATEGIES: dict[str, Strategy] = {
    "lock(1)": Lock(1.0),
    "lock(.5)": Lock(0.5),
    "sample": Sample(),
    "full": Full(),
    "top-1 (biased)": TopOne(),
}


def main() -> int:
    """Command line: --out FOLDER, of a demo that has ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/demo"), help="the folder of a demo that has ended"
    )
    out = parser.parse_args().out
    summary_path = out / "summary.json"
    if not summary_path.is_file():
        print(
            f"error: {out} holds no summary.json: run the demo first (make demo).", file=sys.stderr
        )
        return 1
    try:
        comparison = compare(out, SILOS)
    except ArchipelagoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "\nInterrupted; nothing was changed. Start again with: make demo-compare",
            file=sys.stderr,
        )
        return 130
    summary_path.write_text(
        json.dumps(json.loads(summary_path.read_text()) | comparison, indent=2) + "\n"
    )
    print(f"\n{_text(comparison)}\n\nAll of this as JSON: {summary_path}")
    return 0


def compare(out: Path, silos: Sequence[str]) -> dict[str, object]:
    """Measure the routers on held-out images, and the strategies by the silos that their samples resemble."""
    torch.set_num_threads(2)
    release = open_release(
        out / "release", root=out / "fed" / "tuf" / "metadata" / "1.root.json", state=None
    )
    federation = Federation(out / "fed")
    inventory = take_inventory(federation)
    ensemble = load_ensemble(release)
    order = list(ensemble.expert_ids)
    if order != list(inventory.silos):
        raise SetupError(
            "release",
            expected=f"one expert of each of {', '.join(inventory.silos)}",
            got=", ".join(order),
        )
    private = [_images(out / "data" / f"{silo}.npz") for silo in order]
    statistics = read_statistics(federation, inventory)
    lessons = _lessons(federation, inventory, statistics)
    print("Training a router without privacy, to compare with (about two minutes)", flush=True)
    exact = _non_private_router(inventory, statistics, private, lessons)
    routers = _routers(inventory, statistics, release.manifest, ensemble, lessons, exact)
    held_out, owner = _evaluation_set(out, silos, order)
    print("Judging the routers, and sampling with every strategy", flush=True)
    return {
        "router": _router_table(routers, held_out, owner, ensemble.prior),
        "published_router": release.manifest.router.kind,
        "shares": _shares(ensemble, exact),
        "prior": dict(zip(order, ensemble.prior, strict=True)),
    }


def _images(path: Path) -> Tensor:
    with np.load(path, allow_pickle=False) as archive:
        return torch.from_numpy(archive["images"])


def _non_private_router(
    inventory: Inventory,
    statistics: AcceptedStatistics,
    private: Sequence[Tensor],
    lessons: PublicSketches,
) -> LearnedRouter:
    """The reference: exact histograms and exact sketches, through the same code as the private routers."""
    plan = inventory.plan
    files = statistics.files
    settings = plan.router
    if not isinstance(settings, LearnedSettings):
        settings = LearnedSettings(hidden=128, depth=3, num_steps=2000)
    num_groups = plan.statistics.counts.num_groups
    groups = [
        files.clusters.group_F[files.clusters.assign(files.encoder.encode(images))]
        for images in private
    ]
    exact_KG = torch.stack(
        [torch.bincount(group_N, minlength=num_groups) for group_N in groups]
    ).double()
    mass_KG = (exact_KG + 0.5) / (exact_KG + 0.5).sum(1, keepdim=True)
    counts = CountsRouter(files.sketch, mass_KG.log(), LinearPath())
    path = LinearPath()
    t_small = torch.tensor(NEAR_DATA, dtype=torch.float64)
    released = (
        files.sketch.head(plan.statistics.sketch.rank) if plan.statistics.sketch else files.sketch
    )
    generator = torch.Generator().manual_seed(0)
    sketches = {}
    for silo, images in zip(inventory.silos, private, strict=True):
        s_NR = released.project(images)
        noise = torch.randn(s_NR.shape, generator=generator, dtype=torch.float64)
        sketches[silo] = (
            path.alpha(t_small) * s_NR + path.sigma(t_small) / files.sketch.scale * noise
        ).float()
    train, _ = split_sketches(sketches, seed=0)
    num_units = [len(images) for images in private]
    return fit_learned(counts, SiloSketches(train, num_units, NEAR_DATA), lessons, settings, 0)


def _routers(
    inventory: Inventory,
    statistics: AcceptedStatistics,
    manifest: Manifest,
    ensemble: Ensemble,
    lessons: PublicSketches,
    exact: LearnedRouter,
) -> dict[str, Router]:
    num_units = list(inventory.num_units.values())
    epsilon = inventory.plan.statistics.counts.epsilon
    counts = CountsRouter.from_counts(
        statistics.files.sketch, statistics.noisy_KG, num_units, epsilon, LinearPath()
    )
    routers: dict[str, Router] = {"counts": counts}
    settings = inventory.plan.router
    if manifest.router.kind == "learned" and ensemble.router is not None:
        routers["learned"] = ensemble.router
    elif isinstance(settings, LearnedSettings):
        train, _ = split_sketches(statistics.sketches, 0)
        t_release = statistics.t_release or 1.0
        routers["learned"] = fit_learned(
            counts, SiloSketches(train, num_units, t_release), lessons, settings, 0
        )
    return routers | {"non-private": exact}


def _lessons(
    federation: Federation, inventory: Inventory, statistics: AcceptedStatistics
) -> PublicSketches:
    """The public images that the aggregator teaches its router with."""
    with np.load(
        federation.plan_folder(inventory.plan.plan_id) / PUBLIC_NAME, allow_pickle=False
    ) as archive:
        images = torch.from_numpy(archive["fitted"])
    files = statistics.files
    group_N = files.clusters.groups(files.encoder.encode(images))
    return PublicSketches.of(images, group_N, files.sketch, LinearPath())


def _evaluation_set(out: Path, silos: Sequence[str], order: Sequence[str]) -> tuple[Tensor, Tensor]:
    with np.load(out / "data" / "evaluation.npz", allow_pickle=False) as archive:
        images = torch.from_numpy(archive["images"])
        silo = archive["silo"]
    return images, torch.tensor([order.index(silos[index]) for index in silo])


def _router_table(
    routers: dict[str, Router], held_out: Tensor, owner: Tensor, prior: Sequence[float]
) -> list[dict[str, object]]:
    weights = log_prior(prior, len(prior)).exp()
    entropy = -float((weights * weights.log()).sum())
    scores = {
        name: cross_entropy(router, held_out, owner, prior) for name, router in routers.items()
    }
    rows: list[dict[str, object]] = []
    for index, band in enumerate(next(iter(scores.values()))):
        values = {name: round(figures[index].value, 4) for name, figures in scores.items()}
        errors = {
            f"{name} error": round(figures[index].error, 4) for name, figures in scores.items()
        }
        rows.append({"t": [band.low, band.high], "prior": round(entropy, 4), **values, **errors})
    return rows


def _shares(ensemble: Ensemble, exact: LearnedRouter) -> dict[str, dict[str, object]]:
    """Each strategy's samples, attributed to silos by the non-private router near t = 0."""
    rows: dict[str, dict[str, object]] = {}
    weights = log_prior(ensemble.prior, len(ensemble.experts))
    for name, strategy in STRATEGIES.items():
        drawn = ensemble.sample(
            NUM_SHARES,
            strategy=strategy,
            steps=STEPS,
            seed=1,
            options=SamplingOptions(solver="euler"),
        )
        t_N = torch.full((NUM_SHARES,), NEAR_DATA)
        w_NK = posterior(exact, drawn.images * (1 - NEAR_DATA), t_N, weights).double()
        rows[name] = {
            "attributed": [round(value, 3) for value in w_NK.mean(0).tolist()],
            "error": [round(1.96 * value / NUM_SHARES**0.5, 3) for value in w_NK.std(0).tolist()],
            "last_expert": [round(value, 3) for value in drawn.shares],
        }
    return rows


def _text(found: dict[str, object]) -> str:
    parts = []
    bands: list[dict[str, object]] = found["router"]  # type: ignore[assignment]
    names = [name for name in ("prior", "counts", "learned", "non-private") if name in bands[0]]
    rows = [
        (
            f"{row['t'][0]:g}-{row['t'][1]:g}",  # type: ignore[index]
            *(f"{row[name]:.4f}" for name in names),
        )
        for row in bands
    ]
    title = (
        f"Router cross-entropy on held-out images, nats (published: {found['published_router']})"
    )
    parts.append(f"{title}\n" + table(rows, ("t", *names)))

    prior: dict[str, float] = found["prior"]  # type: ignore[assignment]
    shares: dict[str, dict[str, list[float]]] = found["shares"]  # type: ignore[assignment]
    rows = [("prior", *(f"{value:.3f}" for value in prior.values()))]
    for name, row in shares.items():
        pairs = zip(row["attributed"], row["last_expert"], strict=True)
        rows.append((name, *(f"{attributed:.3f} ({last:.3f})" for attributed, last in pairs)))
    title = f"Silo shares of {NUM_SHARES} samples: attributed by the non-private router (by the expert followed last)"
    parts.append(f"{title}\n" + table(rows, ("strategy", *prior)))
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
