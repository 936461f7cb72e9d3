"""The contents of a release, and the manifest that lists them: the same for a federation and for one owner."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddm.protocol.base import File
from ddm.protocol.growth import StatedBase, stated_bases
from ddm.protocol.island import Island
from ddm.protocol.manifest import Manifest, PublishedExpert, PublishedSilo, ScreeningRule
from ddm.protocol.plan import Plan
from ddm.protocol.router_report import RouterReport
from ddm.protocol.submission import Submission, class_counts_path
from ddm.protocol.weight_privacy import DpSgdPrivacy
from ddm.publishing.staging import StagedVersion
from ddm.trust.paths import KEY_HISTORY, PLAN_LOG_NAMES

ROUTER_NAME = "router.safetensors"


@dataclass(frozen=True)
class ReleaseMember:
    """A silo, or an island of one owner, whose experts are in a release.

    Attributes:
        published: its entry in the manifest.
        document: what it signed about its experts.
        role: its signed metadata, published unchanged.
        flags: the rules of screening that its experts violate, by expert id.
    """

    published: PublishedSilo
    document: Submission | Island
    role: bytes
    flags: Mapping[str, tuple[ScreeningRule, ...]] = field(default_factory=dict)

    @property
    def silo_id(self) -> str:
        """Its name."""
        return self.published.silo_id


@dataclass(frozen=True)
class DataDivision:
    """How one owner's data set was divided into islands, for the pages of a release.

    Attributes:
        sentence: how, in plain text.
        column: the column by whose values it was divided; None for clusters and random.
        values: the column's value of each island, by its name.
    """

    sentence: str
    column: str | None = None
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ReleaseContents:
    """Everything that a release states, before its files are listed in a manifest.

    Attributes:
        name: the name of the federation or of the owner's data set.
        cite: how to cite it.
        plan: the plan.
        plan_digest: sha256 of its signed bytes.
        members: the members whose experts are in it; their experts in this order are the router's classes.
        missing_silos: silos of the plan without experts.
        withdrawn_silos: silos that left the plan.
        router: the report on the router.
        division: of an owner's data set; None for a federation.
        earlier_plans: the plans from which experts are carried over, by id.
    """

    name: str
    cite: str
    plan: Plan
    plan_digest: str
    members: tuple[ReleaseMember, ...]
    missing_silos: tuple[str, ...]
    withdrawn_silos: tuple[str, ...]
    router: RouterReport
    division: DataDivision | None = None
    earlier_plans: Mapping[str, Plan] = field(default_factory=dict)

    @property
    def bases(self) -> list[StatedBase]:
        """The bases that its experts started from."""
        published_silos = {member.silo_id for member in self.members}
        return stated_bases(self.plan, self.earlier_plans, published_silos)

    @property
    def member_word(self) -> str:
        """What a member is called on pages."""
        return "silo" if self.division is None else "island"


def plan_sources(plan: Plan, bundle: Path) -> dict[str, Path]:
    """Return where the plan, its files and its proofs of the log are, by their names as signed."""
    names = ["plan.json", *(file.path for file in plan.files)]
    # Only a plan that was entered in a log has proofs.
    names += [name for name in PLAN_LOG_NAMES if (bundle / name).is_file()]
    return {f"{plan.plan_id}/{name}": bundle / name for name in names}


def draft_manifest(contents: ReleaseContents, version: StagedVersion) -> Manifest:
    """Return the manifest of a version whose files are in place, except for the pages, which are made from it."""
    plan_id = contents.plan.plan_id
    targets = version.targets(plan_id)
    supersedes_digest = None
    if version.previous is not None:
        supersedes_digest = version.previous.manifest_digest
    return Manifest(
        plan_id=plan_id,
        plan_digest=contents.plan_digest,
        version=version.number,
        supersedes_digest=supersedes_digest,
        published_at=version.created_at,
        licence=contents.plan.licence,
        cite=contents.cite,
        base=contents.plan.base,
        missing_silos=contents.missing_silos,
        withdrawn_silos=contents.withdrawn_silos,
        silos=tuple(member.published for member in contents.members),
        experts=_published_experts(contents),
        router=contents.router.published_router,
        evaluation=contents.router.evaluations(),
        files=tuple(File.of(name, targets / name) for name in _other_files(contents, targets)),
    )


def _published_experts(contents: ReleaseContents) -> tuple[PublishedExpert, ...]:
    """Describe every expert; the priors are those that the router was calibrated with, in the same order."""
    signed_experts = [
        (member, expert) for member in contents.members for expert in member.document.experts
    ]
    published = []
    # A wrong order would give an expert another one's prior; lengths that differ are an error.
    for (member, expert), prior in zip(signed_experts, contents.router.expert_priors, strict=True):
        privacy = expert.privacy if isinstance(expert.privacy, DpSgdPrivacy) else None
        published.append(
            PublishedExpert(
                expert_id=expert.expert_id,
                silo_id=member.silo_id,
                cluster=expert.cluster,
                prior=prior,
                file=expert.file,
                flags=member.flags.get(expert.expert_id, ()),
                privacy=privacy,
            )
        )
    return tuple(published)


def _other_files(contents: ReleaseContents, targets: Path) -> list[str]:
    """List the files that neither a silo's entry, nor an expert's, nor the router's names."""
    names = ["plan.json", *(file.path for file in contents.plan.files)]
    # Only where a silo has rotated its key: readers who remember the old one follow it to the new one.
    if (targets / KEY_HISTORY).exists():
        names.append(KEY_HISTORY)
    for member in contents.members:
        if member.document.class_counts is not None:
            names.append(class_counts_path(member.silo_id))
    return sorted(names)
