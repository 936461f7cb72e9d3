"""Trains the router: fits counts as the baseline and the plan's family, calibrates both and keeps the better one."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from aggregator.config import Federation
from aggregator.intake.claims import refuse_overweight
from aggregator.intake.examination import public_images, refuse_outliers
from aggregator.intake.inventory import Inventory
from aggregator.router.images import RouterImages
from aggregator.router.statistics import AcceptedStatistics, read_statistics
from ddm.diffusion.path import path_named
from ddm.errors import MissingFileError
from ddm.io.files import write_atomic
from ddm.io.space import check_writable, require_free_space
from ddm.io.tensors import save_tensors
from ddm.protocol.base import File, sha256_hex
from ddm.protocol.calibration import Interval
from ddm.protocol.router_report import BandComparison, RouterReport
from ddm.protocol.routers import RouterKind, SamplesSettings
from ddm.publishing.contents import ROUTER_NAME
from ddm.routers.base import LossCallback
from ddm.routers.calibration import Calibrated, Calibration, calibrate
from ddm.routers.comparison import Comparison, compare, refuse_worse_than_prior
from ddm.routers.counts import CountsRouter
from ddm.routers.families import family_of
from ddm.routers.family import FittedRouter, RouterInputs, StorableRouter
from ddm.routers.influence import capped_shares
from ddm.routers.public import Evidence, PublicData
from ddm.routers.residual import PublicSketches
from ddm.routers.samples import samples_router_specs
from ddm.system.devices import device_named
from ddm.training.checkpoints import KEPT, Checkpoints

# Shape legend: K silos, E experts, G public groups.

# A counts or learned router, and its report.
_SMALL_ROUTER_BYTES = 64 * 1024**2
# A checkpoint holds the last and the best weights, and two moments of the optimizer.
_CHECKPOINT_PER_WEIGHT = 4
REPORT_NAME = "report.json"


def router_path(federation: Federation, plan_id: str) -> Path:
    """Return the path of the router to publish."""
    return federation.plan_folder(plan_id) / "router" / ROUTER_NAME


def load_report(federation: Federation, inventory: Inventory) -> RouterReport:
    """Read the report of the router trained on exactly these submissions.

    Raises:
        MissingFileError: no router yet, or one trained on other submissions.
    """
    path = router_path(federation, inventory.plan.plan_id).with_name(REPORT_NAME)
    remedy = f"Train it: `aggregator router {federation.path}`."
    if not path.is_file():
        raise MissingFileError(
            "router", expected="a trained router", got="no router/report.json", remedy=remedy
        )
    report = RouterReport.parse(path.read_bytes(), subject=path.name)
    # Since the training a silo may have sent again, been removed, or been counted as fewer units. A release with the
    # old router would weigh experts that are not in it, or weigh them by other numbers than it states.
    if report.submissions != inventory.digests or report.units != inventory.counted_units:
        trained_on = ", ".join(sorted(report.submissions))
        got = f"a router trained on earlier submissions, or with other numbers of units, of {trained_on}"
        expected = f"a router trained on the accepted submissions of {', '.join(inventory.silos)}"
        raise MissingFileError("router", expected=expected, got=got, remedy=remedy)
    file = router_path(federation, inventory.plan.plan_id)
    # A crash between the two writes of `train_router` leaves a new router beside an old report.
    if not file.is_file() or File.of(ROUTER_NAME, file) != report.router:
        got = "a file with another digest" if file.is_file() else "no file"
        raise MissingFileError(
            "router", expected="the file that its report describes", got=got, remedy=remedy
        )
    return report


def train_router(
    federation: Federation,
    inventory: Inventory,
    *,
    seed: int,
    on_progress: LossCallback | None = None,
) -> RouterReport:
    """Fit counts and the plan's family, compare them on public data, keep the one to publish and the report.

    Raises:
        RefusedError: an accepted expert stands apart from the others, or a silo holds too much of the prior, and nobody
            admitted it; or the router to publish is worse than the prior on public data, so the statistics contradict
            the plan.
    """
    home = federation.plan_folder(inventory.plan.plan_id)
    check_writable([home])
    require_free_space({home: _needed_bytes(inventory)}, "the router and its report")
    # Both come first: training may take hours, and what they find has to be decided by a person.
    refuse_outliers(federation, inventory)
    refuse_overweight(federation, inventory.counted_units, inventory.digests)

    # Only now, since a silo that is refused above must not shape the router of the others.
    training = _RouterTraining.of(federation, inventory, seed, on_progress)
    judges = training.judging_images()
    decision = _decide(training, judges)
    minus_prior = refuse_worse_than_prior(decision.chosen.kind, decision.chosen.calibrated, judges)

    target = router_path(federation, inventory.plan.plan_id)
    target.parent.mkdir(parents=True, exist_ok=True)
    save_tensors(target, decision.chosen.router.tensors())
    report = _report(training, decision, minus_prior, File.of(ROUTER_NAME, target))
    # The report is written last. It names the router's digest, so that a router without its report is not published.
    write_atomic(target.with_name(REPORT_NAME), report.encode())
    shutil.rmtree(_checkpoints_folder(federation, report.plan_id), ignore_errors=True)
    return report


def _needed_bytes(inventory: Inventory) -> int:
    """Return the bytes that the training of the plan's router writes at most."""
    plan = inventory.plan
    if not isinstance(plan.router, SamplesSettings):
        return _SMALL_ROUTER_BYTES
    num_experts = sum(len(silo.submission.experts) for silo in inventory.silos.values())
    specs = samples_router_specs(num_experts, plan.expert_shape, plan.router, plan.condition)
    weight_bytes = sum(spec.bytes for spec in specs.values())
    # One more checkpoint is written before the oldest is removed.
    return weight_bytes + (KEPT + 1) * _CHECKPOINT_PER_WEIGHT * weight_bytes


def _checkpoints_folder(federation: Federation, plan_id: str) -> Path:
    return router_path(federation, plan_id).with_name("checkpoints")


@dataclass(frozen=True)
class _CalibratedFit:
    """A router of the plan's experts and its temperature."""

    kind: RouterKind
    router: StorableRouter
    calibration: Calibration

    @classmethod
    def of(cls, kind: RouterKind, router: StorableRouter, judges: PublicData) -> "_CalibratedFit":
        # Each router gets its own temperature before the two are compared, since that is how either would be published.
        return cls(kind, router, calibrate(router, judges))

    @property
    def training_prior(self) -> tuple[float, ...]:
        """All equal: every family answers likelihoods."""
        return (1.0 / self.router.num_experts,) * self.router.num_experts

    @property
    def calibrated(self) -> Calibrated:
        """The router as it would be published."""
        return self.calibration.applied(self.router)


@dataclass(frozen=True)
class _Decision:
    """Which router is published.

    Attributes:
        chosen: the router.
        reason: why it is this one.
        comparison: of the plan's family with counts; None where the plan asks for counts.
    """

    chosen: _CalibratedFit
    reason: str
    comparison: Comparison | None


@dataclass(frozen=True)
class _RouterTraining:
    """What the routers of the accepted silos are fitted to.

    Attributes:
        federation: the operator's folder.
        inventory: what was accepted.
        statistics: what the accepted silos drew.
        counts: the counts router of the silos.
        share_K: the weight of each silo, capped, in what is fitted to all of them together.
        seed: the seed of initial weights, batches and noise.
        on_progress: called with step, number of steps and held-out loss.
    """

    federation: Federation
    inventory: Inventory
    statistics: AcceptedStatistics
    counts: CountsRouter
    share_K: tuple[float, ...]
    seed: int
    on_progress: LossCallback | None

    @classmethod
    def of(
        cls,
        federation: Federation,
        inventory: Inventory,
        seed: int,
        on_progress: LossCallback | None,
    ) -> "_RouterTraining":
        plan = inventory.plan
        statistics = read_statistics(federation, inventory)
        counts = CountsRouter.from_counts(
            statistics.files.sketch,
            statistics.noisy_KG,
            list(inventory.num_units.values()),
            plan.statistics.counts.epsilon,
            path_named(plan.objective.ensemble_path),
        )
        counted_units = list(inventory.counted_units.values())
        # A silo states its own number of units, so that its weight in what all share is capped.
        share_K = capped_shares(counted_units, federation.settings().max_influence)
        return cls(federation, inventory, statistics, counts, share_K, seed, on_progress)

    def judging_images(self) -> PublicData:
        """Return the public images held out, on which routers are compared."""
        plan = self.inventory.plan
        images, group_N = self._public_images("holdout")
        evidence = Evidence(
            self.statistics.noisy_KG,
            list(self.inventory.num_units.values()),
            plan.statistics.counts.epsilon,
            self.statistics.layout,
            self.share_K,
        )
        return PublicData(
            images,
            group_N,
            evidence=evidence,
            # Shares are capped here, since the choice of a router concerns all silos.
            prior_E=self.expert_priors(self.share_K),
            path=path_named(plan.objective.ensemble_path),
            seed=self.seed,
        )

    def inputs(self) -> RouterInputs:
        """Return what a family may be fitted to."""
        device = device_named()
        images = RouterImages(
            self.federation,
            self.inventory,
            self.statistics,
            self.counts,
            self.seed,
            self.on_progress,
            device,
        )
        return RouterInputs(
            plan=self.inventory.plan,
            counts=self.counts,
            layout=self.statistics.layout,
            num_units=list(self.inventory.num_units.values()),
            share_K=self.share_K,
            sketches=self.statistics.sketches,
            t_release=self.statistics.t_release,
            public_sketches=self._public_sketches,
            labelled_images=images.labelled,
            seed=self.seed,
            on_progress=self.on_progress,
            device=device,
            checkpoints=self._checkpoints(),
        )

    def expert_priors(self, weight_K: Sequence[float]) -> tuple[float, ...]:
        """Return each expert's prior: its silo's weight times its share of the silo by the counts, normalised."""
        layout = self.statistics.layout
        _, share_E = layout.split(self.counts.log_mass_KG.exp())
        total_weight = sum(weight_K)
        priors = [
            weight_K[k] / total_weight * float(share)
            for k, share in zip(layout.silo_E, share_E, strict=True)
        ]
        return tuple(prior / sum(priors) for prior in priors)

    def _checkpoints(self) -> Checkpoints:
        """Return the checkpoints of a training with this seed on exactly these submissions."""
        plan = self.inventory.plan
        trained_on = [plan.digest, dict(self.inventory.digests), self.seed]
        run = sha256_hex(json.dumps(trained_on, sort_keys=True).encode())
        return Checkpoints(_checkpoints_folder(self.federation, plan.plan_id) / run, run)

    def _public_sketches(self) -> PublicSketches:
        images, group_N = self._public_images("fitted")
        path = path_named(self.inventory.plan.objective.ensemble_path)
        return PublicSketches.of(images, group_N, self.counts.sketch, path)

    def _public_images(self, part: Literal["fitted", "holdout"]) -> tuple[Tensor, Tensor]:
        """Return the public images (or latents) that the plan was fitted on, or held out, and their groups."""
        plan_id = self.inventory.plan.plan_id
        files = self.statistics.files
        pixels = public_images(self.federation, plan_id, part, as_latents=False)
        group_N = files.clusters.groups(files.encoder.encode(pixels))
        return public_images(self.federation, plan_id, part), group_N


def _decide(training: _RouterTraining, judges: PublicData) -> _Decision:
    """Fit the plan's family, and choose it unless the public data show that it is worse than counts."""
    settings = training.inventory.plan.router
    # The counts router is needed in any case: it is the baseline, and it is published where the candidate is worse.
    counts_router = training.counts.split(training.statistics.layout)
    counts = _CalibratedFit.of("counts", counts_router, judges)
    if settings.kind == "counts":
        return _Decision(counts, "the plan asks for the counts router", None)
    fitted = family_of(settings).fit(training.inputs())
    candidate = _CalibratedFit.of(settings.kind, fitted.router, judges)
    comparison = compare(counts.calibrated, candidate.calibrated, judges, fitted.held_out)
    fault = _fault(fitted, candidate, comparison)
    if fault:
        return _Decision(counts, fault, comparison)
    return _Decision(candidate, f"{candidate.kind} is nowhere worse than counts", comparison)


def _fault(fitted: FittedRouter, candidate: _CalibratedFit, comparison: Comparison) -> str | None:
    """Return why the candidate is not published, None if it may be."""
    # An unchanged candidate equals the counts router, whose file is smaller and whose family needs no network.
    if not fitted.is_changed:
        return "training moved no weight"
    if not comparison.worse:
        return None
    num_compared = len(comparison.bands) + (comparison.sketches is not None)
    return f"{candidate.kind} is worse than counts in {len(comparison.worse)} of {num_compared} comparisons"


def _report(
    training: _RouterTraining, decision: _Decision, minus_prior: Interval, router: File
) -> RouterReport:
    inventory = training.inventory
    chosen = decision.chosen
    bands: tuple[BandComparison, ...] = ()
    sketches = None
    if decision.comparison is not None:
        bands = decision.comparison.bands
        sketches = decision.comparison.sketches
    counted_units = dict(inventory.counted_units)
    # The counts router was made without sketches, whatever family the plan required.
    t_release = None
    if chosen.kind != "counts" and family_of(inventory.plan.router).states_t_release:
        t_release = training.statistics.t_release
    return RouterReport(
        plan_id=inventory.plan.plan_id,
        submissions=dict(inventory.digests),
        units=counted_units,
        router=router,
        candidate=inventory.plan.router.kind,
        published=chosen.kind,
        reason=decision.reason,
        judged_on="public_images",
        t_release=t_release,
        # Not the capped shares: the prior decides how often samples follow an expert, and is bounded by what was agreed
        # at enrolment instead (`ddm.routers.influence`).
        expert_priors=training.expert_priors(list(counted_units.values())),
        training_prior=chosen.training_prior,
        temperature=chosen.calibration.temperature,
        minus_prior=minus_prior,
        bands=bands,
        sketches=sketches,
        calibration=chosen.calibration.errors,
    )
