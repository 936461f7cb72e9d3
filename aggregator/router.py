"""Training the router: counts as the baseline, learned on the noised sketches, judged on public data, one kept."""

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field

from aggregator.config import Federation
from aggregator.inventory import Inventory
from ddm.console import table
from ddm.errors import MissingFileError
from ddm.files import write_atomic
from ddm.protocol.base import Digest, Document, Model, PlanId, sha256_hex
from ddm.protocol.plan import LearnedRouter as LearnedSettings
from ddm.routers.counts import CountsRouter
from ddm.routers.evaluation import BandComparison, Comparison, public_comparison
from ddm.routers.learned import LearnedRouter, fit_learned, split_sketches
from ddm.schedule import LinearPath
from ddm.tensors import save_tensors

ROUTER_NAME = "router.safetensors"
REPORT_NAME = "report.json"


class Band(Model):
    """Both routers and the prior for t in [low, high), nats; the difference is learned minus counts, 95% interval."""

    low: float
    high: float
    prior: float
    counts: float
    learned: float
    difference: float
    difference_low: float
    difference_high: float


class RouterReport(Document):
    """What was trained, how both routers did, and which one is published."""

    format: Literal["archipelago/router-report/1"] = "archipelago/router-report/1"
    plan_id: PlanId
    submissions: dict[str, Digest]
    published: Literal["counts", "learned"]
    reason: str
    t_release: Annotated[float, Field(gt=0.0, lt=1.0)]
    training_prior: tuple[float, ...]
    temperature: float
    bands: tuple[Band, ...]
    sketches: Band | None


def router_path(federation: Federation, plan_id: str) -> Path:
    """Where the router to publish lies."""
    return federation.plan_folder(plan_id) / "router" / ROUTER_NAME


def load_report(federation: Federation, inventory: Inventory) -> RouterReport:
    """Read the report of the router trained on exactly these submissions.

    Raises:
        MissingFileError: no router yet, or one trained on other submissions.
    """
    path = router_path(federation, inventory.plan.plan_id).with_name(REPORT_NAME)
    remedy = f"Train it: aggregator router {federation.path}"
    if not path.is_file():
        raise MissingFileError("router", expected="a trained router", got="none", remedy=remedy)
    report = RouterReport.parse(path.read_bytes(), subject=path.name)
    if report.submissions != _digests(inventory):
        got = "one trained on other submissions"
        raise MissingFileError("router", expected="a router of the accepted submissions", got=got, remedy=remedy)
    return report


def train_router(federation: Federation, inventory: Inventory, *, seed: int) -> RouterReport:
    """Fit both routers, compare them on public data, keep the one to publish and the report."""
    plan, path = inventory.plan, LinearPath()
    noisy_KG = torch.stack(list(inventory.counts().values()))
    num_units = list(inventory.num_units.values())
    counts = CountsRouter.from_counts(inventory.files.sketch, noisy_KG, num_units, plan.releases.counts.epsilon, path)
    chosen: CountsRouter | LearnedRouter = counts
    comparison: Comparison | None = None
    reason = "the plan asks for the counts router"
    if isinstance(plan.router, LearnedSettings):
        train, held_out = split_sketches(inventory.sketches(), seed)
        learned = fit_learned(counts, train, num_units, plan.router, path, seed, t_release=inventory.t_release())
        images = _public_holdout(federation, plan.plan_id)
        files = inventory.files
        comparison = public_comparison(
            counts,
            learned,
            images,
            files.clusters.group_F[files.clusters.assign(files.encoder.encode(images))],
            noisy_KG,
            num_units,
            held_out,
            epsilon=plan.releases.counts.epsilon,
            seed=seed,
        )
        chosen = learned if comparison.publish_learned else counts
        reason = _reason(comparison)
    report = _report(inventory, comparison, chosen, reason)
    target = router_path(federation, plan.plan_id)
    target.parent.mkdir(parents=True, exist_ok=True)
    save_tensors(target, chosen.tensors())
    write_atomic(target.with_name(REPORT_NAME), report.encode())
    return report


def describe(report: RouterReport) -> str:
    """Lay both routers side by side, cross-entropy in nats, lower is better."""
    named = [(f"t {band.low:g}-{band.high:g}", band) for band in report.bands]
    named += [(f"held-out sketches, t >= {report.t_release:.2f}", report.sketches)] if report.sketches else []
    rows = [
        (
            name,
            f"{band.prior:.4f}",
            f"{band.counts:.4f}",
            f"{band.learned:.4f}",
            f"{band.difference:+.4f} [{band.difference_low:+.4f}, {band.difference_high:+.4f}]",
        )
        for name, band in named
        if band
    ]
    header = ("public held-out images", "prior", "counts", "learned", "learned - counts, 95%")
    lines = [table(rows, header)] if rows else []
    return "\n".join([*lines, f"Published router: {report.published}, because {report.reason}."])


def _reason(comparison: Comparison) -> str:
    if comparison.publish_learned:
        return "on public data and on held-out sketches learned is nowhere worse than counts"
    if not comparison.trained:
        return "training moved no weight"
    worse = [band for band in (*comparison.bands, comparison.sketches) if band.worse]
    return f"learned is worse than counts in {len(worse)} of {len(comparison.bands) + 1} comparisons"


def _report(
    inventory: Inventory, comparison: Comparison | None, chosen: CountsRouter | LearnedRouter, reason: str
) -> RouterReport:
    num_experts = len(inventory.silos)
    return RouterReport(
        plan_id=inventory.plan.plan_id,
        submissions=_digests(inventory),
        published="learned" if isinstance(chosen, LearnedRouter) else "counts",
        reason=reason,
        t_release=inventory.t_release(),
        training_prior=(1.0 / num_experts,) * num_experts,
        temperature=1.0,
        bands=tuple(_band(band) for band in comparison.bands) if comparison else (),
        sketches=_band(comparison.sketches) if comparison else None,
    )


def _band(band: BandComparison) -> Band:
    return Band(**{name: getattr(band, name) for name in Band.model_fields})


def _digests(inventory: Inventory) -> dict[str, str]:
    return {silo_id: sha256_hex(silo.document) for silo_id, silo in inventory.silos.items()}


def _public_holdout(federation: Federation, plan_id: str) -> torch.Tensor:
    with np.load(federation.plan_folder(plan_id) / "holdout.npz", allow_pickle=False) as archive:
        return torch.from_numpy(archive["images"])
