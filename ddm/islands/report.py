"""The page of a release of islands, `report.html`: samples, router, shares, islands and where all came from."""

from collections.abc import Mapping
from dataclasses import dataclass

from ddm.islands.card import absent, division
from ddm.islands.folder import Split, SplitIsland, TrainedIsland
from ddm.islands.router import OwnersRouter
from ddm.pages.render import render
from ddm.protocol.calibration import CalibrationBand
from ddm.protocol.manifest import Manifest, PublishedSilo
from ddm.protocol.plan import Plan
from ddm.publishing.drawing import Drawing
from ddm.publishing.pictured import Pictured, priors_of
from ddm.routers.comparison import BandComparison

REPORT_NAME = "report.html"
LIMITS = (  # for readers of a release
    "Neither the experts nor the router are differentially private; they may memorise single images. No leak audit was "
    "made.",
    "It is not a diagnostic device. Its images are synthetic.",
    "A signature proves who published an expert, not that it is good.",
)


@dataclass(frozen=True)
class IslandPart:
    """One island's part in the release.

    Attributes:
        index: its place in the manifest.
        published: its entry in the manifest.
        split: how it was divided off.
        trained: how its expert was trained.
        prior: its share.
    """

    index: int
    published: PublishedSilo
    split: SplitIsland
    trained: TrainedIsland
    prior: float

    @property
    def silo_id(self) -> str:
        """Its name."""
        return self.published.silo_id


@dataclass(frozen=True)
class RouterPart:
    """The router, in the words of the template that a federation's report shares.

    Attributes:
        published: its family.
        candidate: the family that the plan asks for.
        reason: why it is this one.
        minus_prior: cross-entropy less that of the prior, with its interval.
        bands: the plan's family against counts.
        temperature: of the published router.
        calibration: its errors.
        sketches: none, since images are labelled.
    """

    published: str
    candidate: str
    reason: str
    minus_prior: tuple[float, float, float]
    bands: tuple[BandComparison, ...]
    temperature: float
    calibration: tuple[CalibrationBand, ...]
    sketches: None = None


def report(
    split: Split,
    plan: Plan,
    manifest: Manifest,
    router: OwnersRouter,
    trained: Mapping[str, TrainedIsland],
    root_digest: str,
    drawing: Drawing | None,
) -> str:
    """Return the page; the same release gives the same page.

    Args:
        split: how the data set was divided.
        plan: the plan.
        manifest: as it will be published, except that it does not list the pages yet.
        router: how the router did.
        trained: the records of the islands that are there, by name.
        root_digest: the fingerprint of the root of trust.
        drawing: what the ensemble draws; None where that takes too long.
    """
    named, priors = {island.island_id: island for island in split.islands}, priors_of(manifest)
    members = tuple(
        IslandPart(index, silo, named[silo.silo_id], trained[silo.silo_id], priors[index])
        for index, silo in enumerate(manifest.silos)
    )
    part = RouterPart(
        published=router.kind,
        candidate=plan.router.kind,
        reason=router.reason,
        minus_prior=router.minus_prior,
        bands=router.bands,
        temperature=router.calibration.temperature,
        calibration=router.calibration.errors,
    )
    pictured = Pictured.of(drawing, manifest, plan.data.range, "island")
    return render(
        "ddm",
        "islands.html.jinja",
        split=split,
        plan=plan,
        m=manifest,
        members=members,
        router=part,
        way=division(split, plan),
        absent=absent(manifest),
        root_digest=root_digest,
        root_file="root.json",
        limits=LIMITS,
        **pictured.values(manifest, plan),
    )
