"""The router of one owner's islands: trained on labelled images and exact counts, judged on labelled images held out.

It knows the island of every image, so that the comparisons of a federation, which weight public images by noised
counts, hold here without an assumption: each island is a group of its own, in which only its images lie.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ddm.diffusion.path import path_named
from ddm.errors import DataError
from ddm.io.tensors import TensorSpec, load_tensors
from ddm.islands.arrays import map_array
from ddm.islands.folder import Islands
from ddm.loading.plan import PlanFiles
from ddm.partition.layout import Layout, Part
from ddm.protocol.manifest import Evaluation
from ddm.protocol.plan import EXACT, Plan
from ddm.protocol.routers import LearnedRouter as LearnedSettings
from ddm.protocol.routers import SamplesRouter as SamplesSettings
from ddm.routers.base import Progress
from ddm.routers.calibration import Calibration, calibrate
from ddm.routers.comparison import BandComparison, compare, minus_prior
from ddm.routers.counts import CountsRouter
from ddm.routers.labelled import Labelled
from ddm.routers.learned import LearnedRouter
from ddm.routers.loading import knows_shares
from ddm.routers.public import Evidence, PublicData
from ddm.routers.residual import PublicSketches, fit_residual
from ddm.routers.samples import SamplesRouter, fit_samples

# Shape legend: N images, K islands that are there, G groups of fine centroids, C classes.

_MAX_COUNTS_BYTES = 2**32
# images x islands that a router is judged on: the bootstrap takes each 2,000 times
_MOST_JUDGED = 1 << 18

AnyRouter = CountsRouter | LearnedRouter | SamplesRouter
Kind = Literal["counts", "learned", "samples"]
_PARTS = ("-islands", "-groups")


@dataclass(frozen=True)
class OwnersRouter:
    """The router to publish.

    Attributes:
        kind: its family: the plan's, or counts where the plan's is worse.
        reason: why it is this one.
        tensors: what a release stores.
        calibration: its temperature.
        evaluation: how it did on images held out.
        minus_prior: cross-entropy on these less that of the prior, nats, with its 95% interval.
        bands: the plan's family against counts; none where it is counts.
    """

    kind: Kind
    reason: str
    tensors: dict[str, Tensor]
    calibration: Calibration
    evaluation: tuple[Evaluation, ...]
    minus_prior: tuple[float, float, float]
    bands: tuple[BandComparison, ...] = ()


@dataclass(frozen=True)
class OwnersImages:
    """Images whose islands are known, those of missing islands left out.

    Attributes:
        images: as experts see them, shape (N, ...).
        island_N: the place of each image's island among those that are there.
        group_N: the group of each.
        condition_N: the class or the text of each, where it is asked for.
    """

    images: Tensor
    island_N: Tensor
    group_N: Tensor
    condition_N: Tensor | None = None

    @classmethod
    def read(
        cls, islands: Islands, name: str, present: Sequence[int], *, told: bool = False
    ) -> "OwnersImages":
        """Read the images called `fitted` or `holdout`.

        Raises:
            DataError: none of them is of an island that is there.
        """
        images, island_N, group_N = (
            map_array(islands.router / f"{name}{part}.npy") for part in ("", *_PARTS)
        )
        place_K = torch.full((len(islands.split.islands),), -1, dtype=torch.int64)
        place_K[list(present)] = torch.arange(len(present))
        kept = place_K[island_N] >= 0
        if not bool(kept.any()):
            expected = f"some of the {len(present)} islands that are trained"
            raise DataError(
                f"{name} images", expected=expected, got=f"{len(images)}, all of other islands"
            )
        condition_N = map_array(islands.router / f"{name}-conditions.npy")[kept] if told else None
        return cls(images[kept], place_K[island_N[kept]], group_N[kept], condition_N)


def fit_router(
    islands: Islands,
    files: PlanFiles,
    present: Sequence[int],
    *,
    seed: int,
    device: torch.device | str = "cpu",
    on_progress: Progress | None = None,
) -> OwnersRouter:
    """Fit counts and the plan's family on the islands that are there, and keep the better one.

    Args:
        islands: the folder.
        files: the plan's tensors.
        present: the numbers of the islands that are there, ascending.
        seed: of initial weights, batches and noise.
        device: where a router on images is trained.
        on_progress: called with step, number of steps and held-out loss.
    """
    plan = islands.plan
    path, sketch = path_named(plan.objective.ensemble_path), files.sketch
    num_units = [islands.split.islands[number].num_images for number in present]
    counts = CountsRouter.from_counts(
        sketch, exact_counts(islands)["counts"][list(present)], num_units, EXACT, path
    )
    held_out = OwnersImages.read(islands, "holdout", present)
    judged = _judged(held_out, plan, num_units, seed)
    kind: Kind = "counts"
    router: AnyRouter = counts
    reason = "the plan asks for the counts router"
    calibration = calibrate(counts, judged)
    chosen = calibration.applied(counts)
    bands: tuple[BandComparison, ...] = ()
    if isinstance(plan.router, LearnedSettings | SamplesSettings):
        candidate = _fit(islands, plan, counts, present, num_units, seed, device, on_progress)
        own = calibrate(candidate, judged)
        comparison = compare(chosen, own.applied(candidate), judged)
        bands = comparison.bands
        reason = f"{plan.router.kind} is worse than counts in {len(comparison.worse)} of {len(bands)} comparisons"
        if not comparison.worse:
            kind, router, calibration = plan.router.kind, candidate, own
            chosen, reason = own.applied(candidate), f"{kind} is nowhere worse than counts"
    gain = minus_prior(chosen, judged)
    found = [_evaluation(f"router_cross_entropy_{kind}_minus_prior_held_out_images", gain)]
    versus = f"router_cross_entropy_{plan.router.kind}_minus_counts_held_out_images"
    for band in bands:
        figure = (band.difference, band.difference_low, band.difference_high)
        found.append(_evaluation(f"{versus}_t_{band.low:.2f}_{band.high:.2f}", figure))
    found += [figure for errors in calibration.errors for figure in errors.evaluations()]
    return OwnersRouter(kind, reason, router.tensors(), calibration, tuple(found), gain, bands)


def _judged(held_out: OwnersImages, plan: Plan, num_units: Sequence[int], seed: int) -> PublicData:
    """Return the images held out as what judges routers, each island being a group in which nobody else has images."""
    num = len(num_units)
    parts = [Part(f"{number}", None, tuple(range(num))) for number in range(num)]
    layout = Layout.of(plan.partition, [[part] for part in parts])
    own_KK = torch.diag(torch.tensor(num_units))
    some = slice(max(1000, _MOST_JUDGED // num))  # they lie in random order
    return PublicData(
        held_out.images[some],
        held_out.island_N[some],
        evidence=Evidence(own_KK, num_units, EXACT, layout),
        prior_E=[n / sum(num_units) for n in num_units],
        path=path_named(plan.objective.ensemble_path),
        seed=seed,
    )


def _fit(
    islands: Islands,
    plan: Plan,
    counts: CountsRouter,
    present: Sequence[int],
    num_units: Sequence[int],
    seed: int,
    device: torch.device | str,
    on_progress: Progress | None,
) -> AnyRouter:
    """Fit the plan's family on the images that encoder and clusters were fitted on."""
    reads = isinstance(plan.router, SamplesSettings) and plan.router.conditional
    known, path = (
        OwnersImages.read(islands, "fitted", present, told=reads),
        path_named(plan.objective.ensemble_path),
    )
    if isinstance(plan.router, LearnedSettings):
        s_NR = counts.sketch.of(known.images, torch.zeros(len(known.images)), path).float()
        public = PublicSketches(s_NR, known.group_N, known.island_N)
        prior_K = torch.tensor(num_units, dtype=torch.float64) / sum(num_units)
        return LearnedRouter(
            counts, fit_residual(counts, public, prior_K, plan.router, seed, on_progress)
        )
    if not isinstance(plan.router, SamplesSettings):
        raise DataError("router", expected="learned, counts or samples", got=plan.router.kind)
    generator, most = torch.Generator().manual_seed(seed), plan.router.images_per_expert
    own = [torch.nonzero(known.island_N == k)[:, 0] for k in range(len(present))]
    rows = torch.cat([each[torch.randperm(len(each), generator=generator)[:most]] for each in own])
    told = None if known.condition_N is None else known.condition_N[rows]
    images = Labelled.of_experts(known.images[rows], known.island_N[rows], len(present), told)
    return fit_samples(
        images,
        plan.router,
        path,
        seed,
        on_progress,
        condition=plan.condition,
        knows_shares=knows_shares(plan, plan.router),
        device=device,
    )


def exact_counts(islands: Islands) -> dict[str, Tensor]:
    """Read every island's exact histograms: `counts`, shape (K, G), and with classes `class_counts`, (K, C, G)."""
    num, statistics = len(islands.plan.silos), islands.plan.statistics
    specs = {"counts": TensorSpec("I64", (num, statistics.counts.num_groups))}
    if terms := statistics.class_counts:
        specs["class_counts"] = TensorSpec(
            "I64", (num, terms.num_classes, statistics.counts.num_groups)
        )
    return load_tensors(islands.router / "counts.safetensors", specs, max_bytes=_MAX_COUNTS_BYTES)


def _evaluation(metric: str, figure: tuple[float, float, float]) -> Evaluation:
    value, low, high = figure
    return Evaluation(metric=metric, strategy=None, value=value, low=low, high=high)
