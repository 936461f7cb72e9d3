"""Publishes a release: manifest, router, pages and the silos' signed bytes unchanged, all under one signature."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from aggregator.config import Federation, FederationSettings
from aggregator.intake.inventory import AcceptedSilo, Inventory, take_inventory
from aggregator.keys.silo_rotation import collect_key_history
from aggregator.router.train import load_report, router_path
from ddm.errors import BusyError, PolicyError
from ddm.io.files import write_atomic
from ddm.protocol.base import File
from ddm.protocol.growth import standing_of
from ddm.protocol.manifest import Manifest, PublishedSilo
from ddm.protocol.plan import Plan
from ddm.protocol.router_report import RouterReport
from ddm.protocol.submission import class_counts_path
from ddm.publishing.contents import (
    ROUTER_NAME,
    ReleaseContents,
    ReleaseMember,
    draft_manifest,
    plan_sources,
)
from ddm.publishing.pages import PAGE_NAMES
from ddm.publishing.signing import complete_version
from ddm.publishing.staging import StagedVersion, stage_version
from ddm.publishing.versions import NewestVersion
from ddm.system.progress import ProgressCallback
from ddm.trust.paths import KEY_HISTORY

RENEWED_BEFORE = timedelta(days=30)  # a timestamp that expires sooner calls for a new version


@dataclass(frozen=True)
class Publication:
    """The outcome of publishing.

    Attributes:
        manifest: the manifest of the newest version.
        fresh: whether this call made that version; otherwise nothing had changed, and the present one was copied out.
    """

    manifest: Manifest
    fresh: bool


def publish(
    federation: Federation,
    passphrase: bytes,
    out: Path,
    *,
    quorum: int | None = None,
    rehearsal: bool = False,
    renew: bool = False,
    on_progress: ProgressCallback | None = None,
) -> Publication:
    """Publish the next version of the ensemble, or copy the newest one out if nothing has changed since.

    The release is built aside, verified and opened as a researcher would, and becomes version n + 1 together with the
    metadata that list it; then it is copied to `out`. After an interruption the same call continues.

    Args:
        federation: the operator's folder.
        passphrase: opens its keys.
        out: a path where nothing exists.
        quorum: the minimum number of silos that the release may have; None takes it from federation.toml.
        rehearsal: publish a rehearsal, whose experts draw noise; any other plan is then refused.
        renew: make a new version even if nothing has changed.
        on_progress: called with the batches of images drawn for the pages and the batches in all.

    Raises:
        BusyError: `out` exists, since releases are immutable; or another process signs.
        SetupError: `out` cannot be made or has too little free space; no version was made.
        MissingFileError: the router was not trained yet, or on other submissions.
        PolicyError: fewer silos than the quorum, or a rehearsal without the consent of the operator.
        TrustError: an accepted file is no longer what its silo signed; nothing was published.
    """
    with stage_version(federation, out) as version:
        # First, since no silo that still answers would make a release of a rehearsal.
        check_rehearsal(federation.current_plan()[0], is_intended=rehearsal)
        # Read under the signing lock: what is accepted or withdrawn meanwhile is in the next version.
        inventory = take_inventory(federation)
        settings = federation.settings()
        check_quorum(inventory, quorum or settings.quorum)
        router = load_report(federation, inventory)
        link_files(federation, inventory, router, version)
        version.require_space()
        contents = describe_contents(inventory, settings, router)
        draft = draft_manifest(contents, version)
        # A version without a change would only make researchers download it again.
        if version.previous is not None and not renew and is_unchanged(version.previous, draft):
            return Publication(version.previous.manifest, fresh=False)
        manifest = complete_version(version, contents, draft, passphrase, on_progress=on_progress)
        return Publication(manifest, fresh=True)


def check_rehearsal(plan: Plan, *, is_intended: bool) -> None:
    """Refuse to publish a rehearsal unless the operator asks for exactly that.

    Raises:
        PolicyError: the plan is a rehearsal, or --rehearsal was given for a plan that is not a rehearsal.
    """
    if plan.rehearsal == is_intended:
        return
    if plan.rehearsal:
        raise PolicyError(
            "release",
            expected="experts that were trained to draw images",
            got=f"plan {plan.plan_id}, a rehearsal, whose experts draw noise",
            remedy="Sign a plan whose recipe has no rehearsal = true; or publish the rehearsal, marked as one, to try "
            "it out: --rehearsal.",
        )
    raise PolicyError(
        "--rehearsal",
        expected="a plan with rehearsal = true",
        got=f"plan {plan.plan_id}, which is not a rehearsal",
        remedy="Publish without --rehearsal.",
    )


def check_quorum(inventory: Inventory, quorum: int) -> None:
    """Refuse a release of fewer silos than the operator asks for.

    Raises:
        PolicyError: names the silos that are missing.
    """
    num_silos = len(inventory.silos)
    if num_silos >= quorum:
        return
    got = f"{num_silos}"
    absent_silos = [*inventory.missing, *inventory.withdrawn]
    if absent_silos:
        got += f", without {', '.join(absent_silos)}"
    raise PolicyError(
        "release",
        expected=f"at least {quorum} silos",
        got=got,
        remedy=(
            "Wait for more silos to answer with `aggregator run FED`, or publish with fewer knowingly: "
            "--quorum N."
        ),
    )


def link_files(
    federation: Federation, inventory: Inventory, router: RouterReport, version: StagedVersion
) -> None:
    """Put the files of a version in place, the silos' bytes as they signed them.

    Raises:
        BusyError: the router is not the one of its report, since `aggregator router` runs at the same time.
    """
    plan = inventory.plan
    sources = {}
    for silo_id, silo in inventory.silos.items():
        submission = silo.submission
        # A silo that is carried over signed for an earlier plan, whose folder its document and experts stay in.
        for file in (silo.document_file, *(expert.file for expert in submission.experts)):
            sources[f"{submission.plan_id}/{file.path}"] = silo.folder / file.path
        if submission.class_counts is not None:
            name = f"{plan.plan_id}/{class_counts_path(silo_id)}"
            sources[name] = silo.folder / submission.class_counts.path
    sources[f"{plan.plan_id}/{ROUTER_NAME}"] = router_path(federation, plan.plan_id)
    sources |= plan_sources(plan, federation.plan_targets(plan.plan_id))
    version.link_files(sources)

    targets = version.targets(plan.plan_id)
    # The router is compared after it was linked, since `aggregator router` may have replaced it meanwhile.
    if File.of(ROUTER_NAME, targets / ROUTER_NAME) != router.router:
        raise BusyError(
            "router",
            expected=f"the router of its report, sha256 {router.router.digest}",
            got="a file with another digest",
            remedy="Publish again when `aggregator router FED` has ended.",
        )
    history = collect_key_history(federation, inventory.silos)
    if history is not None:
        write_atomic(targets / KEY_HISTORY, history.encode())


def describe_contents(
    inventory: Inventory, settings: FederationSettings, router: RouterReport
) -> ReleaseContents:
    """Describe what a version of these submissions and this router states."""
    members = tuple(_describe_member(inventory, silo) for silo in inventory.silos.values())
    return ReleaseContents(
        name=settings.name,
        cite=settings.cite,
        plan=inventory.plan,
        plan_digest=inventory.plan_digest,
        members=members,
        missing_silos=inventory.missing,
        withdrawn_silos=inventory.withdrawn,
        router=router,
        earlier_plans=inventory.earlier_plans,
    )


def _describe_member(inventory: Inventory, silo: AcceptedSilo) -> ReleaseMember:
    """Describe one silo, as the manifest lists it."""
    submission = silo.submission
    silo_id = submission.silo_id
    published = PublishedSilo(
        silo_id=silo_id,
        standing=standing_of(inventory.plan, inventory.earlier_plans, silo_id),
        submission=silo.document_file,
        key_fingerprint=silo.key.fingerprint,
        epsilon=submission.spent.epsilon,
        delta=submission.spent.delta,
        audit=submission.audit.verdict,
        isolation=submission.isolation,
        admitted=silo.admitted,
        units=silo.counted.units,
        units_reason=silo.counted.reason,
    )
    return ReleaseMember(published, submission, silo.role, silo.flags)


def is_unchanged(previous: NewestVersion, draft: Manifest) -> bool:
    """Whether the version before states what the draft does, and readers accept it for long enough."""
    if previous.current_until is None:
        return False
    if previous.current_until - draft.published_at < RENEWED_BEFORE:
        return False
    published = previous.manifest
    # Version, predecessor and time always differ; the pages are made from the rest.
    same_version = draft.model_copy(
        update={
            "version": published.version,
            "supersedes_digest": published.supersedes_digest,
            "published_at": published.published_at,
        }
    )
    files = tuple(file for file in published.files if file.path not in PAGE_NAMES)
    without_pages = published.model_copy(update={"files": files})
    return same_version == without_pages
