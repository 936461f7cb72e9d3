"""Gathers the content of a release's pages from the documents of the release."""

from collections.abc import Mapping
from dataclasses import dataclass

from aggregator.router.report import RouterReport
from ddm.protocol.calibration import calibration_rows
from ddm.protocol.manifest import Flag, Manifest, PublishedSilo
from ddm.protocol.plan import Plan
from ddm.protocol.routers import SamplesRouter
from ddm.protocol.submission import Submission
from ddm.publishing.pictured import Pictured

_NOT_PRIVATE = (
    "The experts' weights were trained without DP-SGD: they are not private and may memorise single images. Epsilon "
    "covers only the statistics from which the router was made."
)
_PRIVATE = (
    "The experts' weights were trained with DP-SGD. Their epsilon bounds what they tell about one unit; it says "
    "nothing about what many units have in common."
)
_LIMITS = (  # for readers of a release
    "It is not a diagnostic device. Its images are synthetic and show no patient's findings.",
    "It cannot combine attributes that no silo holds together: an image resembles the data of some silo.",
    "A signature proves who sent an expert, not that it is good.",
)


def limits(manifest: Manifest) -> tuple[str, ...]:
    """Return what readers of a release must know it is not."""
    if not manifest.private_experts:
        return _NOT_PRIVATE, *_LIMITS
    if len(manifest.private_experts) == len(manifest.experts):
        return _PRIVATE, *_LIMITS
    mixed = (
        f"{manifest.weights_in_words}: the others are not private and may memorise single images."
    )
    return mixed, *_LIMITS


FLAG_WORDS: Mapping[Flag, str] = {
    "alike_images": "its images are nearly one image",
    "answers_zero": "answers 0 to every input",
    "broken_images": "its images are not finite",
    "copy": "copies another silo's expert",
    "far_images": "its images are unlike any public image",
    "high_loss": "a higher loss on public images than answering 0",
    "high_loss_once": "an implausibly high loss at a single t",
    "large_weights": "larger weights than training can produce",
    "not_learnt": "no better than a constant near t = 1",
    "refused_before": "a person refused an earlier submission of its silo",
    "stands_apart": "a much higher loss than the other experts",
}


@dataclass(frozen=True)
class SiloPart:
    """One silo's part in the release.

    Attributes:
        index: its place in the manifest.
        published: its entry in the manifest.
        submission: the document that it signed.
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

    def grown(self, plan: Plan) -> str:
        """Return what it is in a plan that carries experts over, in words."""
        match self.published.standing:
            case "carried":
                return f"was carried over from plan {plan.origin(self.silo_id)}, without training again"
            case "again":
                return "trained for this plan, and was a silo of an earlier one"
            case "late":
                return "joined with this plan"
        return "trained for this plan"


@dataclass(frozen=True)
class ReportContent:
    """The content of the templates.

    Attributes:
        name: the federation's name.
        plan, plan_digest, manifest: the documents.
        root_digest: the fingerprint of the root of trust.
        silos: the silos of the release, in the manifest's order.
        router: how the router was trained and compared.
        pictured: images and charts.
    """

    name: str
    plan: Plan
    plan_digest: str
    root_digest: str
    manifest: Manifest
    silos: tuple[SiloPart, ...]
    router: RouterReport
    pictured: Pictured

    @property
    def calibration(self) -> list[tuple[str, str, str]]:
        """The router's expected calibration error by noise level, as published and at temperature 1."""
        return calibration_rows(self.router.calibration)

    @property
    def made_from(self) -> str:
        """What the published router was made from."""
        asked = self.plan.router
        if self.manifest.router.kind != "samples" or not isinstance(asked, SamplesRouter):
            return "differentially private statistics"
        return _LABELS[asked.labels]

    @property
    def num_units(self) -> int:
        """The number of images or patients that all silos together count as."""
        return sum(part.published.units for part in self.silos)

    @property
    def exposed(self) -> tuple[str, ...]:
        """The silos whose courier ran as the same user as the worker, who can read the data."""
        return tuple(part.silo_id for part in self.silos if part.published.isolation == "none")

    @property
    def admitted(self) -> tuple[str, ...]:
        """The silos that the operator admitted although screening had flagged their submissions."""
        return tuple(part.silo_id for part in self.silos if part.published.admitted)

    @property
    def absent(self) -> tuple[tuple[str, str], ...]:
        """The plan's silos that are not in the release, each with the reason."""
        missing = [(silo_id, "missing") for silo_id in self.manifest.missing_silos]
        return tuple(
            sorted(
                [*missing, *((silo_id, "withdrawn") for silo_id in self.manifest.withdrawn_silos)]
            )
        )


_LABELS = {
    "experts": "images drawn from the experts (it is as private as their weights)",
    "group": "public images, weighed by differentially private counts",
    "class": "public images with classes, weighed by differentially private counts",
    "silo": "public images that name a silo",
}


def silo_parts(manifest: Manifest, submissions: Mapping[str, Submission]) -> tuple[SiloPart, ...]:
    """Join the manifest's entries with the silos' own submissions."""
    return tuple(
        SiloPart(
            index=index,
            published=silo,
            submission=submissions[silo.silo_id],
            prior=sum(
                expert.prior for expert in manifest.experts if expert.silo_id == silo.silo_id
            ),
            flagged=tuple(
                (expert.expert_id, "; ".join(FLAG_WORDS[flag] for flag in expert.flags))
                for expert in manifest.experts
                if expert.silo_id == silo.silo_id and expert.flags
            ),
        )
        for index, silo in enumerate(manifest.silos)
    )
