"""What the pages of a release say, gathered from the documents that the release is made of."""

from collections.abc import Mapping
from dataclasses import dataclass

from aggregator.pages import charts
from aggregator.pages.drawing import MAX_SILOS, Drawing
from aggregator.router.report import RouterReport
from ddm.protocol.manifest import Flag, Manifest, PublishedSilo
from ddm.protocol.plan import Plan
from ddm.protocol.submission import Submission

SHOWN_OWN, SHOWN_MIXED = 8, 32
LIMITS = (  # what nobody should expect of a release
    "The experts' weights were trained without DP-SGD: they are not private and may remember single images. Epsilon "
    "covers only what the router was made from.",
    "It is not a diagnostic device. Its images are made up and show nobody's findings.",
    "It cannot compose what no silo holds together: an image resembles the data of some silo.",
    "A signature says who sent an expert, not that it is good.",
)
FLAG_WORDS: Mapping[Flag, str] = {
    "answers_zero": "answers 0 to everything",
    "copy": "repeats another silo's expert",
    "high_loss": "a higher loss on public images than saying nothing",
    "large_weights": "larger weights than training makes",
    "not_learnt": "no better than a constant where all is noise",
    "stands_apart": "a much higher loss than the other experts",
}
STRATEGY_TITLES = {
    "lock": "lock (t_lock = 1): draw a silo by its share, follow its expert all the way",
    "sample": "sample: draw a silo anew at every step",
    "full": "full: follow the mixture of all experts",
    "top-1": "top-1: follow the most probable expert; biased, here as the control",
}


@dataclass(frozen=True)
class SiloPart:
    """One silo's part in the release.

    Attributes:
        index: its place in the manifest.
        published: what the manifest says of it.
        submission: what it signed.
        prior: its share.
        flagged: its experts that screening flagged, each with the reasons in words.
    """

    index: int
    published: PublishedSilo
    submission: Submission
    prior: float
    flagged: tuple[tuple[str, str], ...] = ()

    @property
    def silo_id(self) -> str:
        """Its name."""
        return self.published.silo_id


@dataclass(frozen=True)
class Sheet:
    """Images shown together.

    Attributes:
        title: where they are from.
        silo: the silo's index; None for images of the ensemble.
        pictures: the images.
    """

    title: str
    silo: int | None
    pictures: tuple[charts.Picture, ...]


@dataclass(frozen=True)
class PosteriorChart:
    """The router's answer along t on one silo's images.

    Attributes:
        silo: the silo's index.
        areas: every silo's band, its own at the bottom.
        own: the probability of the right silo, a pair (t, value) a time.
    """

    silo: int
    areas: tuple[charts.Area, ...]
    own: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class ShareChart:
    """The silos' shares under one strategy."""

    strategy: str
    title: str
    num: int
    rows: tuple[charts.Share, ...]


@dataclass(frozen=True)
class ReportContent:
    """Everything that the templates are given.

    Attributes:
        name: the federation's name.
        plan, plan_digest, manifest: the documents.
        root_digest: the fingerprint of the root of trust.
        silos: who is in, in the manifest's order.
        router: how the router was trained and compared.
        drawing: seed and steps of what was drawn; None where the experts are too large to draw from here.
        sheets: images.
        posteriors: the router along t.
        shares: the silos' shares by strategy.
    """

    name: str
    plan: Plan
    plan_digest: str
    root_digest: str
    manifest: Manifest
    silos: tuple[SiloPart, ...]
    router: RouterReport
    drawing: Drawing | None
    sheets: tuple[Sheet, ...]
    posteriors: tuple[PosteriorChart, ...]
    shares: tuple[ShareChart, ...]

    @property
    def some_silos_unshown(self) -> bool:
        """Are there more silos than have images of their own here?"""
        return len(self.silos) > MAX_SILOS

    @property
    def num_units(self) -> int:
        """How many images or patients all silos together have."""
        return sum(part.submission.num_units for part in self.silos)

    @property
    def exposed(self) -> tuple[str, ...]:
        """The silos where the process with the network ran as the user that has the data."""
        return tuple(part.silo_id for part in self.silos if part.published.isolation == "none")

    @property
    def admitted(self) -> tuple[str, ...]:
        """The silos that the operator let in although screening had flagged what they sent."""
        return tuple(part.silo_id for part in self.silos if part.published.admitted)

    @property
    def absent(self) -> tuple[tuple[str, str], ...]:
        """The plan's silos that are not in, each with the reason."""
        missing = [(silo_id, "missing") for silo_id in self.manifest.missing_silos]
        return tuple(sorted([*missing, *((silo_id, "withdrawn") for silo_id in self.manifest.withdrawn_silos)]))


def silo_parts(manifest: Manifest, submissions: Mapping[str, Submission]) -> tuple[SiloPart, ...]:
    """Join what the manifest and the silos themselves say."""
    return tuple(
        SiloPart(
            index=index,
            published=silo,
            submission=submissions[silo.silo_id],
            prior=sum(expert.prior for expert in manifest.experts if expert.silo_id == silo.silo_id),
            flagged=tuple(
                (expert.expert_id, "; ".join(FLAG_WORDS[flag] for flag in expert.flags))
                for expert in manifest.experts
                if expert.silo_id == silo.silo_id and expert.flags
            ),
        )
        for index, silo in enumerate(manifest.silos)
    )


def sheets(drawing: Drawing, silos: tuple[SiloPart, ...], value_range: tuple[float, float]) -> tuple[Sheet, ...]:
    """The images to show: of the ensemble first, then of every silo alone."""
    mixed = [
        Sheet(STRATEGY_TITLES[name], None, charts.pictures(drawn, SHOWN_MIXED, value_range))
        for name, drawn in drawing.mixed.items()
        if name in ("lock", "full")
    ]
    own = [
        Sheet(silos[k].silo_id, k, charts.pictures(drawn, SHOWN_OWN, value_range)) for k, drawn in drawing.own.items()
    ]
    return tuple(sheet for sheet in (*mixed, *own) if sheet.pictures)


def posteriors(drawing: Drawing) -> tuple[PosteriorChart, ...]:
    """A chart of the router for every silo that has images here."""
    return tuple(
        PosteriorChart(
            silo=k,
            areas=charts.stack(rows, k),
            own=tuple((n / (len(rows) - 1), row[k]) for n, row in enumerate(rows)),
        )
        for k, rows in drawing.posterior.items()
        if rows
    )


def share_charts(drawing: Drawing, silos: tuple[SiloPart, ...]) -> tuple[ShareChart, ...]:
    """The silos' shares under each strategy."""
    priors = [part.prior for part in silos]
    return tuple(
        ShareChart(name, STRATEGY_TITLES[name], len(drawn.silo_N), charts.shares(drawn, priors))
        for name, drawn in drawing.mixed.items()
    )
