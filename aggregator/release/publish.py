"""Publishes a release: manifest, router, pages and the silos' signed bytes unchanged, all under one signature."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from aggregator.config import Federation
from aggregator.intake.inventory import AcceptedSilo, Inventory, take_inventory
from aggregator.keys.silo_rotation import collect_key_history
from aggregator.membership.registry import card_of, signing_key
from aggregator.router.train import load_report, router_path
from ddm.errors import BusyError, PolicyError
from ddm.io.files import link_or_copy, read_bounded, write_atomic
from ddm.loading.earlier_plans import read_earlier_plans
from ddm.protocol.base import MAX_DOCUMENT_BYTES, File
from ddm.protocol.growth import standing_of
from ddm.protocol.manifest import Manifest, PublishedSilo
from ddm.protocol.plan import Plan
from ddm.protocol.router_report import RouterReport
from ddm.protocol.submission import class_counts_path, submission_path
from ddm.publishing.contents import (
    ROUTER_NAME,
    ReleaseContents,
    ReleaseMember,
    draft_manifest,
    link_plan,
)
from ddm.publishing.drawing import Progress
from ddm.publishing.pages import PAGE_NAMES
from ddm.publishing.signing import complete_version
from ddm.publishing.staging import StagedVersion, stage_version
from ddm.publishing.versions import is_current, manifest_path, newest_version, timestamp_expiry
from ddm.trust.paths import KEY_HISTORY

RENEWED_BEFORE = timedelta(days=30)  # a timestamp that expires sooner calls for a new version
ROOT_NAME = "1.root.json"


@dataclass(frozen=True)
class Publication:
    """The outcome of publishing.

    Attributes:
        manifest: of the newest version.
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
    renew: bool = False,
    on_progress: Progress | None = None,
) -> Publication:
    """Publish the next version of the ensemble, or copy the newest one out if nothing has changed since.

    The release is built aside, verified and opened as a researcher would, and becomes version n + 1 together with the
    metadata that list it; then it is copied to `out`. After an interruption the same call continues.

    Args:
        federation: the operator's folder.
        passphrase: opens its keys.
        out: a path where nothing exists.
        quorum: the minimum number of silos that the release may have; None takes it from federation.toml.
        renew: make a new version even if nothing has changed.
        on_progress: called with the batches of images drawn for the pages and the batches in all.

    Raises:
        BusyError: `out` exists, since releases are immutable; or another process signs.
        SetupError: `out` cannot be made or has too little free space; no version was made.
        MissingFileError: the router was not trained yet, or on other submissions.
        PolicyError: fewer silos than the quorum.
        TrustError: an accepted file is no longer what its silo signed; nothing was published.
    """
    with stage_version(federation, out) as version:
        # Read under the signing lock: what is accepted or withdrawn meanwhile is in the next version.
        inventory = take_inventory(federation)
        check_quorum(inventory, quorum or federation.settings().quorum)
        router = load_report(federation, inventory)
        num_bytes = link_files(federation, inventory, router, version)
        version.require_space(num_bytes)
        contents = gather_contents(federation, inventory, router, version)
        draft = draft_manifest(contents, version)
        # A version without a change would only make researchers download it again.
        if not renew:
            published = find_unchanged(federation, draft)
            if published is not None:
                return Publication(published, fresh=False)
        manifest = complete_version(version, contents, draft, passphrase, on_progress=on_progress)
        return Publication(manifest, fresh=True)


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
        remedy="Wait for more silos to answer (aggregator run), or publish with fewer knowingly: --quorum.",
    )


def link_files(
    federation: Federation, inventory: Inventory, router: RouterReport, version: StagedVersion
) -> int:
    """Put the files of a version in place, the silos' bytes as they signed them; return their size in bytes.

    Raises:
        BusyError: the router is not the one of its report, since `aggregator router` runs at the same time.
    """
    plan = inventory.plan
    targets = version.targets(plan.plan_id)
    link_plan(plan, federation.plan_targets(plan.plan_id), targets)
    # Linked, not copied: versions share the bytes of experts that did not change.
    for silo_id, silo in inventory.silos.items():
        _link_submission(plan, silo_id, silo, targets)
    history = collect_key_history(federation, inventory.silos)
    if history is not None:
        write_atomic(targets / KEY_HISTORY, history.encode())
    _link_router(federation, plan, router, targets)
    # Files of carried silos are beside the folder of this plan.
    return sum(path.stat().st_size for path in targets.parent.rglob("*") if path.is_file())


def _link_submission(plan: Plan, silo_id: str, silo: AcceptedSilo, targets: Path) -> None:
    """Link a silo's document, its experts and its class counts."""
    signed_folder = _signed_folder(plan, targets, silo_id)
    names = [submission_path(silo_id), *(expert.file.path for expert in silo.submission.experts)]
    for name in names:
        link_or_copy(silo.folder / name, signed_folder / name)
    class_counts = silo.submission.class_counts
    if class_counts is not None:
        link_or_copy(silo.folder / class_counts.path, targets / class_counts_path(silo_id))


def _link_router(federation: Federation, plan: Plan, router: RouterReport, targets: Path) -> None:
    link_or_copy(router_path(federation, plan.plan_id), targets / ROUTER_NAME)
    # The file is compared after it was linked, since `aggregator router` may have replaced it meanwhile.
    if File.of(ROUTER_NAME, targets / ROUTER_NAME) != router.router:
        raise BusyError(
            "router",
            expected=f"the router of its report, sha256 {router.router.digest}",
            got="a file with another digest",
            remedy="Publish again when `aggregator router` has ended.",
        )


def _signed_folder(plan: Plan, targets: Path, silo_id: str) -> Path:
    """Return the folder of the plan for which a silo signed; that of an earlier plan is beside the present one's."""
    return targets.parent / plan.origin(silo_id)


def gather_contents(
    federation: Federation, inventory: Inventory, router: RouterReport, version: StagedVersion
) -> ReleaseContents:
    """Describe a version whose files are in place."""
    plan = inventory.plan
    settings = federation.settings()
    targets = version.targets(plan.plan_id)
    earlier_plans = read_earlier_plans(
        plan, lambda file: read_bounded(targets / file.path, MAX_DOCUMENT_BYTES)
    )
    members = []
    for silo_id, silo in inventory.silos.items():
        name = submission_path(silo_id)
        submission = silo.submission
        published = PublishedSilo(
            silo_id=silo_id,
            standing=standing_of(plan, earlier_plans, silo_id),
            submission=File.of(name, _signed_folder(plan, targets, silo_id) / name),
            key_fingerprint=signing_key(card_of(federation, silo_id)).fingerprint,
            epsilon=submission.spent.epsilon,
            delta=submission.spent.delta,
            audit=submission.audit.verdict,
            isolation=submission.isolation,
            admitted=silo.admitted,
            units=silo.counted.units,
            units_reason=silo.counted.reason,
        )
        members.append(ReleaseMember(published, submission, silo.role, silo.flags))
    return ReleaseContents(
        name=settings.name,
        licence=settings.licence,
        cite=settings.cite,
        root_name=ROOT_NAME,
        plan=plan,
        plan_digest=inventory.plan_digest,
        members=tuple(members),
        missing_silos=inventory.missing,
        withdrawn_silos=inventory.withdrawn,
        router=router,
    )


def find_unchanged(federation: Federation, draft: Manifest) -> Manifest | None:
    """Return the newest version's manifest if it equals the draft and its timestamp stays valid for long enough."""
    newest = newest_version(federation)
    path = manifest_path(federation, newest)
    # Metadata signed since, as by a key rotation, reach researchers only with a new version.
    if path is None or not is_current(federation, newest):
        return None
    # Researchers refuse a release whose timestamp has expired.
    if timestamp_expiry(federation, newest) - draft.published_at < RENEWED_BEFORE:
        return None
    published = Manifest.parse(read_bounded(path, MAX_DOCUMENT_BYTES), subject=path.name)

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
    return published if same_version == without_pages else None
