"""The router of one owner's islands: trained on labelled images and exact counts, judged on labelled images held out.

It knows the island of every image, so that the comparisons of a federation, which weight public images by noised
counts, hold here without an assumption: each island is a group of its own, in which only its images are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ddm.diffusion.path import Path as DiffusionPath
from ddm.diffusion.path import path_named
from ddm.errors import DataError
from ddm.io.tensors import TensorSpec, load_tensors
from ddm.islands.arrays import map_array
from ddm.islands.folder import Islands
from ddm.loading.plan import PlanFiles
from ddm.partition.layout import ExpertPart, Layout
from ddm.protocol.calibration import Interval
from ddm.protocol.router_report import BandComparison
from ddm.protocol.routers import RouterKind, SamplesSettings
from ddm.protocol.statistics import EXACT
from ddm.routers.base import LossCallback
from ddm.routers.calibration import Calibration, calibrate
from ddm.routers.comparison import compare, minus_prior
from ddm.routers.counts import CountsRouter
from ddm.routers.families import family_of
from ddm.routers.family import RouterInputs, StorableRouter
from ddm.routers.labelled import Labelled
from ddm.routers.public import Evidence, PublicData
from ddm.routers.residual import PublicSketches

# Shape legend: N images, K islands that are trained, G groups of fine centroids, C classes.

_MAX_COUNTS_BYTES = 2**32
# Images times islands that a router is judged on: the bootstrap takes each 2,000 times.
_MAX_JUDGED = 1 << 18
_MIN_JUDGED_IMAGES = 1000


@dataclass(frozen=True)
class RouterFit:
    """A router of the trained islands, with how it did.

    Attributes:
        family: the plan's, or counts where the plan's is worse.
        reason: why it is this one.
        router: the router.
        calibration: its temperature.
        minus_prior: cross-entropy on images held out less that of the prior, nats, with its 95% interval.
        bands: the plan's family against counts; none where the plan asks for counts.
    """

    family: RouterKind
    reason: str
    router: StorableRouter
    calibration: Calibration
    minus_prior: Interval
    bands: tuple[BandComparison, ...]


@dataclass(frozen=True)
class RouterTraining:
    """What the routers of some islands are fitted on.

    Attributes:
        islands: the folder.
        files: the plan's tensors.
        present: the numbers of the islands that are trained, ascending.
        seed: the seed of initial weights, batches and noise.
        device: where a router on images is trained.
        on_progress: called with step, number of steps and held-out loss.
    """

    islands: Islands
    files: PlanFiles
    present: tuple[int, ...]
    seed: int
    device: torch.device | str = "cpu"
    on_progress: LossCallback | None = None

    @property
    def path(self) -> DiffusionPath:
        """The probability path of the plan."""
        return path_named(self.islands.plan.objective.ensemble_path)

    @property
    def num_units(self) -> list[int]:
        """The number of images of each trained island."""
        split_islands = self.islands.split.islands
        return [split_islands[number].num_images for number in self.present]

    @property
    def prior_K(self) -> list[float]:
        """Each trained island's share of their images."""
        total = sum(self.num_units)
        return [num / total for num in self.num_units]


@dataclass(frozen=True)
class LabelledImages:
    """Images whose islands are known, those of missing islands left out.

    Attributes:
        images: as experts see them, shape (N, ...).
        island_N: the place of each image's island among those that are trained.
        group_N: the group of each.
        condition_N: the class or the text of each; None where it was not read.
    """

    images: Tensor
    island_N: Tensor
    group_N: Tensor
    condition_N: Tensor | None = None

    @classmethod
    def read(
        cls, training: RouterTraining, part: str, *, with_conditions: bool = False
    ) -> "LabelledImages":
        """Read the images called `fitted` or `holdout`.

        Raises:
            DataError: none of them is of an island that is trained.
        """
        folder = training.islands.router
        images = map_array(folder / f"{part}.npy")
        island_N = map_array(folder / f"{part}-islands.npy")
        group_N = map_array(folder / f"{part}-groups.npy")

        num_islands = len(training.islands.split.islands)
        # The class of an island is its place among those that are trained. The others keep -1, and their images drop
        # out.
        place_of = torch.full((num_islands,), -1, dtype=torch.int64)
        place_of[list(training.present)] = torch.arange(len(training.present))
        is_present_N = place_of[island_N] >= 0
        if not bool(is_present_N.any()):
            raise DataError(
                f"{part} images",
                expected=f"some of the {len(training.present)} islands that are trained",
                got=f"{len(images)}, all of other islands",
                remedy="Train further islands: `ddm train DIR`. Then assemble again.",
            )

        condition_N = None
        if with_conditions:
            condition_N = map_array(folder / f"{part}-conditions.npy")[is_present_N]
        return cls(
            images=images[is_present_N],
            island_N=place_of[island_N[is_present_N]],
            group_N=group_N[is_present_N],
            condition_N=condition_N,
        )


def fit_router(training: RouterTraining) -> RouterFit:
    """Fit counts and the plan's family on the trained islands, and keep the better one."""
    judges = judging_images(training)
    # With the epsilon `EXACT` there is no noise to allow for in the histograms.
    counts = CountsRouter.from_counts(
        training.files.sketch,
        exact_counts(training.islands)["counts"][list(training.present)],
        training.num_units,
        EXACT,
        training.path,
    )
    counts_calibration = calibrate(counts, judges)
    calibrated_counts = counts_calibration.applied(counts)

    family = training.islands.plan.router.kind
    if family == "counts":
        return RouterFit(
            family="counts",
            reason="the plan asks for the counts router",
            router=counts,
            calibration=counts_calibration,
            minus_prior=minus_prior(calibrated_counts, judges),
            bands=(),
        )

    candidate = _fit_candidate(training, counts)
    # Each with a temperature of its own, so that what is compared is what would be published.
    candidate_calibration = calibrate(candidate, judges)
    calibrated_candidate = candidate_calibration.applied(candidate)
    comparison = compare(calibrated_counts, calibrated_candidate, judges)
    # A candidate that is worse anywhere is not published: counts need no training and cannot be overfitted.
    num_worse = len(comparison.worse)
    if num_worse > 0:
        return RouterFit(
            family="counts",
            reason=f"{family} is worse than counts in {num_worse} of {len(comparison.bands)} comparisons",
            router=counts,
            calibration=counts_calibration,
            minus_prior=minus_prior(calibrated_counts, judges),
            bands=comparison.bands,
        )
    return RouterFit(
        family=family,
        reason=f"{family} is nowhere worse than counts",
        router=candidate,
        calibration=candidate_calibration,
        minus_prior=minus_prior(calibrated_candidate, judges),
        bands=comparison.bands,
    )


def judging_images(training: RouterTraining) -> PublicData:
    """Return the images held out as the data on which routers are judged.

    Each island is a group in which no other island has images, so that the exact counts weigh every image by its label.
    """
    num_islands = len(training.present)
    every_group = tuple(range(num_islands))
    parts = [[ExpertPart(f"{number}", None, every_group)] for number in range(num_islands)]
    layout = Layout.of(training.islands.plan.partition, parts)
    # Row k holds the images of island k: all of them in group k.
    own_KK = torch.diag(torch.tensor(training.num_units))

    held_out = LabelledImages.read(training, "holdout")
    # They are in random order, so that the first ones are a fair choice.
    num_judged = max(_MIN_JUDGED_IMAGES, _MAX_JUDGED // num_islands)
    return PublicData(
        held_out.images[:num_judged],
        held_out.island_N[:num_judged],
        evidence=Evidence(own_KK, training.num_units, EXACT, layout),
        prior_E=training.prior_K,
        path=training.path,
        seed=training.seed,
    )


def _fit_candidate(training: RouterTraining, counts: CountsRouter) -> StorableRouter:
    """Fit the plan's family on the images that encoder and clusters were fitted on."""
    plan = training.islands.plan
    inputs = RouterInputs(
        plan=plan,
        counts=counts,
        layout=None,
        num_units=training.num_units,
        share_K=training.prior_K,
        sketches={},
        t_release=None,
        public_sketches=lambda: _labelled_sketches(training, counts),
        labelled_images=lambda settings: _labelled_images(training, settings),
        seed=training.seed,
        on_progress=training.on_progress,
        device=training.device,
    )
    return family_of(plan.router).fit(inputs).router


def _labelled_sketches(training: RouterTraining, counts: CountsRouter) -> PublicSketches:
    labelled = LabelledImages.read(training, "fitted")
    # At t = 0 a sketch is of the image as it is: an owner's sketches carry no noise.
    t_N = torch.zeros(len(labelled.images))
    s_NR = counts.sketch.of(labelled.images, t_N, training.path).float()
    return PublicSketches(s_NR, labelled.group_N, labelled.island_N)


def _labelled_images(training: RouterTraining, settings: SamplesSettings) -> Labelled:
    """Return images of each island, at most as many as the settings say."""
    labelled = LabelledImages.read(training, "fitted", with_conditions=settings.conditional)
    num_islands = len(training.present)

    # The same number of images for each island, at most, drawn at random.
    generator = torch.Generator().manual_seed(training.seed)
    chosen_rows = []
    for island in range(num_islands):
        rows = torch.nonzero(labelled.island_N == island)[:, 0]
        order = torch.randperm(len(rows), generator=generator)
        chosen_rows.append(rows[order[: settings.images_per_expert]])
    rows_N = torch.cat(chosen_rows)

    condition_N = None
    if labelled.condition_N is not None:
        condition_N = labelled.condition_N[rows_N]
    return Labelled.of_experts(
        labelled.images[rows_N], labelled.island_N[rows_N], num_islands, condition_N
    )


def exact_counts(islands: Islands) -> dict[str, Tensor]:
    """Read every island's exact histograms: `counts`, shape (K, G), and with classes `class_counts`, (K, C, G)."""
    num_islands = len(islands.plan.silos)
    statistics = islands.plan.statistics
    num_groups = statistics.counts.num_groups
    specs = {"counts": TensorSpec("I64", (num_islands, num_groups))}
    if statistics.class_counts is not None:
        num_classes = statistics.class_counts.num_classes
        specs["class_counts"] = TensorSpec("I64", (num_islands, num_classes, num_groups))
    return load_tensors(islands.router / "counts.safetensors", specs, max_bytes=_MAX_COUNTS_BYTES)
