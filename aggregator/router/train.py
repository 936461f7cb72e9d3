"""Trains the router: fits counts as the baseline and the plan's family, calibrates both and keeps the better one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from aggregator.config import Federation
from aggregator.intake.claims import refuse_overweight
from aggregator.intake.examination import public_images, refuse_outliers
from aggregator.intake.inventory import Inventory
from aggregator.router.images import training_images
from ddm.diffusion.path import Expert, path_named
from ddm.errors import MissingFileError
from ddm.io.files import write_atomic
from ddm.io.space import check_writable, require_free_space
from ddm.io.tensors import save_tensors
from ddm.loading.ensemble import on_path
from ddm.models import load_expert
from ddm.partition.layout import Layout
from ddm.protocol.base import File, sha256_hex
from ddm.protocol.calibration import Interval
from ddm.protocol.manifest import RouterFamily
from ddm.protocol.router_report import RouterReport
from ddm.protocol.routers import LearnedRouter as LearnedSettings
from ddm.protocol.routers import SamplesRouter as SamplesSettings
from ddm.publishing.contents import ROUTER_NAME
from ddm.routers.base import Progress
from ddm.routers.calibration import Calibrated, Calibration, calibrate
from ddm.routers.comparison import (
    Comparison,
    HeldOut,
    compare,
    refuse_worse_than_prior,
)
from ddm.routers.counts import CountsRouter
from ddm.routers.influence import capped_shares
from ddm.routers.learned import LearnedRouter, fit_learned, split_sketches
from ddm.routers.loading import knows_shares
from ddm.routers.public import Evidence, PublicData
from ddm.routers.residual import PublicSketches
from ddm.routers.samples import SamplesRouter, fit_samples
from ddm.sampling.expert_cache import LazyExperts
from ddm.system.devices import device_named

# Shape legend: K silos, E experts, G public groups.

_ROUTER_BYTES = 64 * 1024**2  # the largest that a recipe describes, and its report
REPORT_NAME = "report.json"

AnyRouter = CountsRouter | LearnedRouter | SamplesRouter


def router_path(federation: Federation, plan_id: str) -> Path:
    """Return the path of the router to publish."""
    return federation.plan_folder(plan_id) / "router" / ROUTER_NAME


def load_report(federation: Federation, inventory: Inventory) -> RouterReport:
    """Read the report of the router trained on exactly these submissions.

    Raises:
        MissingFileError: no router yet, or one trained on other submissions.
    """
    path = router_path(federation, inventory.plan.plan_id).with_name(REPORT_NAME)
    remedy = f"Train it: aggregator router {federation.path}"
    if not path.is_file():
        raise MissingFileError(
            "router", expected="a trained router", got="no router/report.json", remedy=remedy
        )
    report = RouterReport.parse(path.read_bytes(), subject=path.name)
    if report.submissions != _digests(inventory) or report.units != inventory.counted_units:
        trained_on = ", ".join(sorted(report.submissions))
        got = f"a router trained on earlier submissions, or with other numbers of units, of {trained_on}"
        expected = f"a router trained on the accepted submissions of {', '.join(inventory.silos)}"
        raise MissingFileError("router", expected=expected, got=got, remedy=remedy)
    file = router_path(federation, inventory.plan.plan_id)
    if not file.is_file() or File.of(ROUTER_NAME, file) != report.router:
        got = "a file with another digest" if file.is_file() else "no file"
        raise MissingFileError(
            "router", expected="the file that its report describes", got=got, remedy=remedy
        )
    return report


def train_router(
    federation: Federation, inventory: Inventory, *, seed: int, on_progress: Progress | None = None
) -> RouterReport:
    """Fit counts and the plan's family, compare them on public data, keep the one to publish and the report.

    Raises:
        RefusedError: an accepted expert stands apart from the others, or a silo holds too much of the prior, and nobody
            admitted it; or the router to publish is worse than the prior on public data, so the statistics contradict
            the plan.
    """
    home = federation.plan_folder(inventory.plan.plan_id)
    check_writable([home])
    require_free_space({home: _ROUTER_BYTES}, "the router and its report")
    refuse_outliers(federation, inventory)
    counted = list(inventory.counted_units.values())
    refuse_overweight(federation, inventory.counted_units, inventory.digests)
    plan, layout = inventory.plan, inventory.layout()
    path = path_named(plan.objective.ensemble_path)
    noisy_KG = torch.stack(list(inventory.counts().values()))
    num_units, epsilon = list(inventory.num_units.values()), plan.statistics.counts.epsilon
    share_K = capped_shares(counted, federation.settings().max_influence)
    by_silo = CountsRouter.from_counts(
        inventory.files.sketch,
        noisy_KG,
        num_units,
        epsilon,
        path_named(plan.objective.ensemble_path),
    )
    public = PublicData(
        *_public_images(federation, inventory, "holdout"),
        evidence=Evidence(noisy_KG, num_units, epsilon, layout, share_K),
        prior_E=_expert_priors(by_silo, share_K, layout),
        path=path,
        seed=seed,
    )
    chosen = counts = _Fitted.of("counts", by_silo.split(layout), public)
    comparison, reason = None, "the plan asks for the counts router"
    if plan.router.kind != "counts":
        router, held_out = _fit(federation, inventory, by_silo, share_K, seed, on_progress)
        candidate = _Fitted.of(plan.router.kind, router, public)
        comparison = compare(counts.calibrated, candidate.calibrated, public, held_out)
        fault = _fault(counts, candidate, comparison)
        reason = fault or f"{candidate.family} is nowhere worse than counts"
        chosen = counts if fault else candidate
    minus_prior = refuse_worse_than_prior(chosen.family, chosen.calibrated, public)
    target = router_path(federation, plan.plan_id)
    target.parent.mkdir(parents=True, exist_ok=True)
    save_tensors(target, chosen.router.tensors())
    priors = _expert_priors(by_silo, counted, layout)
    report = _report(
        inventory, priors, chosen, comparison, reason, minus_prior, File.of(ROUTER_NAME, target)
    )
    write_atomic(target.with_name(REPORT_NAME), report.encode())
    return report


@dataclass(frozen=True)
class _Fitted:
    """A router of the plan's experts and its temperature."""

    family: RouterFamily
    router: AnyRouter
    calibration: Calibration

    @classmethod
    def of(cls, family: RouterFamily, router: AnyRouter, public: PublicData) -> "_Fitted":
        return cls(family, router, calibrate(router, public))

    @property
    def training_prior(self) -> tuple[float, ...]:
        """All equal: every family answers likelihoods."""
        return (1.0 / self.router.num_experts,) * self.router.num_experts

    @property
    def calibrated(self) -> Calibrated:
        """The router as it would be published."""
        return self.calibration.applied(self.router)


def _fit(
    federation: Federation,
    inventory: Inventory,
    counts: CountsRouter,
    share_K: Sequence[float],
    seed: int,
    on_progress: Progress | None,
) -> tuple[AnyRouter, HeldOut | None]:
    """Fit the plan's family; return it with the held-out sketches."""
    plan, path, layout = (
        inventory.plan,
        path_named(inventory.plan.objective.ensemble_path),
        inventory.layout(),
    )
    num_units, sketches, settings = (
        list(inventory.num_units.values()),
        inventory.sketches(),
        plan.router,
    )
    t_release = inventory.t_release()
    if isinstance(settings, LearnedSettings) and t_release is not None:
        train, sketches = split_sketches(sketches, seed)
        public = PublicSketches.of(
            *_public_images(federation, inventory, "fitted"), counts.sketch, path
        )
        learned = fit_learned(
            counts,
            train,
            num_units,
            public,
            settings,
            seed,
            on_progress,
            t_release=t_release,
            share_K=share_K,
        )
        router: AnyRouter = learned.split(layout)
    elif isinstance(settings, SamplesSettings):
        device = device_named()
        images = training_images(
            federation,
            inventory,
            settings,
            counts,
            lambda: _experts(inventory, device),
            seed,
            on_progress,
            device,
        )
        knows, told = knows_shares(plan, settings), plan.condition
        router = fit_samples(
            images,
            settings,
            path,
            seed,
            on_progress,
            condition=told,
            knows_shares=knows,
            device=device,
        )
    else:
        raise TypeError(f"expected the router learned or samples, got {plan.router.kind}")
    held_out = list(sketches.values())
    if not held_out or t_release is None:
        return router, None
    return router, HeldOut(held_out, counts.sketch.head(held_out[0].shape[1]), t_release)


def _fault(counts: _Fitted, candidate: _Fitted, comparison: Comparison) -> str | None:
    """Return why the candidate is not published, None if it may be."""
    learned, baseline = candidate.router, counts.router
    if (
        isinstance(learned, LearnedRouter)
        and isinstance(baseline, CountsRouter)
        and not learned.differs(baseline)
    ):
        return "training moved no weight"
    if not comparison.worse:
        return None
    num_compared = len(comparison.bands) + (comparison.sketches is not None)
    return f"{candidate.family} is worse than counts in {len(comparison.worse)} of {num_compared} comparisons"


def _report(
    inventory: Inventory,
    expert_priors: Sequence[float],
    chosen: _Fitted,
    comparison: Comparison | None,
    reason: str,
    minus_prior: Interval,
    router: File,
) -> RouterReport:
    plan = inventory.plan
    return RouterReport(
        plan_id=plan.plan_id,
        submissions=_digests(inventory),
        units=dict(inventory.counted_units),
        router=router,
        candidate=plan.router.kind,
        published=chosen.family,
        reason=reason,
        judged_on="public_images",
        t_release=inventory.t_release() if chosen.family == "learned" else None,
        expert_priors=tuple(expert_priors),
        training_prior=chosen.training_prior,
        temperature=chosen.calibration.temperature,
        minus_prior=minus_prior,
        bands=comparison.bands if comparison else (),
        sketches=comparison.sketches if comparison else None,
        calibration=chosen.calibration.errors,
    )


def _expert_priors(
    counts: CountsRouter, weight_K: Sequence[float], layout: Layout
) -> tuple[float, ...]:
    """Return each expert's prior: its silo's weight times its share of the silo by the counts, normalised."""
    _, share_E = layout.split(counts.log_mass_KG.exp())
    total = sum(weight_K)
    found = [
        weight_K[k] / total * float(share) for k, share in zip(layout.silo_E, share_E, strict=True)
    ]
    return tuple(share / sum(found) for share in found)


def _experts(inventory: Inventory, device: torch.device) -> LazyExperts:
    """Return every accepted expert, in the manifest's order, with one in memory at a time."""
    plan = inventory.plan
    architecture, shape, path = (
        plan.expert.architecture,
        plan.expert_shape,
        path_named(plan.objective.ensemble_path),
    )
    sent = [
        (silo_id, each)
        for silo_id, silo in inventory.silos.items()
        for each in silo.submission.experts
    ]

    def load(number: int) -> Expert:
        silo_id, expert = sent[number]
        folder = inventory.silos[silo_id].folder
        loaded = load_expert(architecture, shape, folder, expert.file, plan.condition).to(device)
        return on_path(loaded, plan.objective.of(silo_id), path)

    sizes = [expert.file.bytes for _, expert in sent]
    return LazyExperts(load, sizes, max(sizes))


def _digests(inventory: Inventory) -> dict[str, str]:
    return {silo_id: sha256_hex(silo.document) for silo_id, silo in inventory.silos.items()}


def _public_images(
    federation: Federation, inventory: Inventory, part: Literal["fitted", "holdout"]
) -> tuple[Tensor, Tensor]:
    """Return the public images (or latents) that the plan was fitted on, or held out, and their groups."""
    plan_id, files = inventory.plan.plan_id, inventory.files
    images = public_images(federation, plan_id, part, as_latents=False)
    return public_images(federation, plan_id, part), files.clusters.groups(
        files.encoder.encode(images)
    )
