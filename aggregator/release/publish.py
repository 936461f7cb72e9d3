"""Publishes a release: manifest, router, pages and the silos' signed bytes unchanged, all under one signature."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from aggregator.config import Federation
from aggregator.intake.inventory import AcceptedSilo, Inventory, take_inventory
from aggregator.keys.silo_rotation import key_history
from aggregator.membership.registry import card_of, signing_key
from aggregator.pages.write import PAGE_NAMES, PageInput, write_pages
from aggregator.router.report import RouterReport
from aggregator.router.train import ROUTER_NAME, load_report, router_path
from ddm.errors import BusyError, PolicyError
from ddm.io.changes import Change
from ddm.io.files import link_or_copy, read_bounded, write_atomic
from ddm.io.space import require_free_space
from ddm.loading.ensemble import build_ensemble
from ddm.loading.plan_documents import read_earlier
from ddm.protocol.base import MAX_DOCUMENT_BYTES, File, now_utc, sha256_hex
from ddm.protocol.growth import standing_of
from ddm.protocol.manifest import Manifest, PublishedExpert, PublishedRouter, PublishedSilo
from ddm.protocol.plan import Plan
from ddm.protocol.submission import class_counts_path, submission_path
from ddm.protocol.weight_privacy import DpSgdPrivacy
from ddm.publishing.publish import lay_out_plan, next_version, with_pages
from ddm.publishing.version import Version, memory_for, sign_version
from ddm.publishing.versions import (
    is_current,
    manifest_digest,
    manifest_path,
    newest_version,
    timestamp_expiry,
)
from ddm.trust.paths import KEY_HISTORY

OnProgress = Callable[[int, int], None]
_PAGES_BYTES = 64 * 1024**2  # report, card and metadata of a version
RENEWED_BEFORE = timedelta(days=30)  # a timestamp that expires sooner calls for a new version


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
    on_progress: OnProgress | None = None,
) -> Publication:
    """Publish the next version of the ensemble, or copy the newest one out if nothing has changed since.

    The release is built aside, verified and opened as a researcher would, and becomes version n + 1 together with the
    metadata that list it; then it is copied to `out`. After an interruption the same call continues.

    Args:
        federation: the operator's folder.
        passphrase: opens its keys.
        out: a path where nothing exists.
        quorum: fewest silos that the release may have; None takes it from federation.toml.
        renew: make a new version even if nothing has changed.
        on_progress: called with the batches of images drawn for the pages and the batches in all.

    Raises:
        BusyError: `out` exists, since releases are immutable; or another process signs.
        SetupError: `out` cannot be made or has too little free space; no version was made.
        MissingFileError: the router was not trained yet, or on other submissions.
        PolicyError: fewer silos than the quorum.
        TrustError: an accepted file is no longer what its silo signed; nothing was published.
    """
    with next_version(federation, out) as (change, reserved):
        inventory = take_inventory(federation)
        _check_quorum(inventory, quorum or federation.settings().quorum)
        source = _Source(federation, inventory, load_report(federation, inventory))
        return _next_version(
            source, change, reserved, passphrase, renew=renew, on_progress=on_progress
        )


@dataclass(frozen=True)
class _Source:
    """The sources of a version; `publish` holds the signing lock while it reads them."""

    federation: Federation
    inventory: Inventory
    report: RouterReport

    @property
    def plan_id(self) -> str:
        return self.inventory.plan.plan_id

    @property
    def root(self) -> bytes:
        return (self.federation.tuf / "1.root.json").read_bytes()


def _next_version(
    source: _Source,
    change: Change,
    reserved: Path,
    passphrase: bytes,
    *,
    renew: bool,
    on_progress: OnProgress | None,
) -> Publication:
    version = newest_version(source.federation) + 1
    release = change.put(f"releases/{version}")
    targets = release / "targets" / source.plan_id
    _lay_out(source, targets)
    size = sum(path.stat().st_size for path in targets.parent.rglob("*") if path.is_file())
    require_free_space(
        {reserved.parent: size + _PAGES_BYTES, source.federation.path: _PAGES_BYTES}, "a release"
    )
    draft = _manifest(source, targets, version)
    present = None if renew else _published_already(source.federation, draft)
    if present is not None:
        return Publication(present, fresh=False)
    _write_pages(source, draft, targets, on_progress)
    manifest = with_pages(draft, PAGE_NAMES, targets)
    roles = {silo_id: silo.role for silo_id, silo in source.inventory.silos.items()}
    sign_version(
        Version(source.federation, change, release, manifest, roles), passphrase, now_utc()
    )
    return Publication(manifest, fresh=True)


def _check_quorum(inventory: Inventory, quorum: int) -> None:
    if len(inventory.silos) < quorum:
        without = ", ".join((*inventory.missing, *inventory.withdrawn))
        raise PolicyError(
            "release",
            expected=f"at least {quorum} silos",
            got=f"{len(inventory.silos)}" + (f", without {without}" if without else ""),
            remedy="Wait for more silos to answer (aggregator run), or publish with fewer knowingly: --quorum.",
        )


def _lay_out(source: _Source, targets: Path) -> None:
    inventory, bundle = source.inventory, source.federation.plan_targets(source.plan_id)
    lay_out_plan(inventory.plan, bundle, targets)
    for silo_id, silo in inventory.silos.items():
        for name in _published_names(silo_id, silo):
            link_or_copy(silo.folder / name, _home(inventory.plan, targets, silo_id) / name)
        if counts := silo.submission.class_counts:
            link_or_copy(silo.folder / counts.path, targets / class_counts_path(silo_id))
    if history := key_history(source.federation, inventory.silos):
        write_atomic(targets / KEY_HISTORY, history.encode())
    link_or_copy(router_path(source.federation, source.plan_id), targets / ROUTER_NAME)
    if File.of(ROUTER_NAME, targets / ROUTER_NAME) != source.report.router:
        remedy = "Publish again when `aggregator router` has ended."
        expected = f"the router of its report, sha256 {source.report.router.digest}"
        raise BusyError(
            "router", expected=expected, got="a file with another digest", remedy=remedy
        )


def _home(plan: Plan, targets: Path, silo_id: str) -> Path:
    """Return the folder of the plan for which a silo signed: that of an earlier plan lies beside the present one's."""
    return targets.parent / plan.origin(silo_id)


def _published_names(silo_id: str, silo: AcceptedSilo) -> list[str]:
    """List the files of a silo that are published under its own signature: its document and its experts."""
    return [submission_path(silo_id), *(expert.file.path for expert in silo.submission.experts)]


def _manifest(source: _Source, targets: Path, version: int) -> Manifest:
    """Describe everything but the pages, which are made from the manifest."""
    federation, inventory, report = source.federation, source.inventory, source.report
    settings = federation.settings()
    experts = [
        (silo_id, expert)
        for silo_id, silo in inventory.silos.items()
        for expert in silo.submission.experts
    ]
    listed = ["plan.json", *(file.path for file in inventory.plan.files)]
    listed += [KEY_HISTORY] if (targets / KEY_HISTORY).exists() else []
    listed += [
        class_counts_path(silo_id)
        for silo_id, silo in inventory.silos.items()
        if silo.submission.class_counts
    ]
    return Manifest(
        plan_id=inventory.plan.plan_id,
        plan_digest=inventory.plan_digest,
        version=version,
        supersedes_digest=manifest_digest(federation, version - 1),
        published_at=now_utc(),
        licence=settings.licence,
        cite=settings.cite,
        missing_silos=inventory.missing,
        withdrawn_silos=inventory.withdrawn,
        silos=tuple(
            _published_silo(source, silo_id, silo, targets)
            for silo_id, silo in inventory.silos.items()
        ),
        experts=tuple(
            PublishedExpert(
                expert_id=expert.expert_id,
                silo_id=silo_id,
                cluster=expert.cluster,
                prior=prior,
                file=expert.file,
                flags=inventory.silos[silo_id].flags.get(expert.expert_id, ()),
                privacy=expert.privacy if isinstance(expert.privacy, DpSgdPrivacy) else None,
            )
            for (silo_id, expert), prior in zip(experts, report.expert_priors, strict=True)
        ),
        router=PublishedRouter(
            kind=report.published,
            t_release=report.t_release,
            training_prior=report.training_prior,
            temperature=report.temperature,
            file=report.router,
        ),
        evaluation=report.evaluations(),
        files=tuple(File.of(name, targets / name) for name in sorted(listed)),
    )


def _published_silo(
    source: _Source, silo_id: str, silo: AcceptedSilo, targets: Path
) -> PublishedSilo:
    submission, plan = silo.submission, source.inventory.plan
    name = submission_path(silo_id)
    earlier = read_earlier(plan, lambda file: read_bounded(targets / file.path, MAX_DOCUMENT_BYTES))
    return PublishedSilo(
        silo_id=silo_id,
        standing=standing_of(plan, earlier, silo_id),
        submission=File.of(name, _home(plan, targets, silo_id) / name),
        key_fingerprint=signing_key(card_of(source.federation, silo_id)).fingerprint,
        epsilon=submission.spent.epsilon,
        delta=submission.spent.delta,
        audit=submission.audit.verdict,
        isolation=submission.isolation,
        admitted=silo.admitted,
        units=silo.counted.units,
        units_reason=silo.counted.reason,
    )


def _published_already(federation: Federation, draft: Manifest) -> Manifest | None:
    """Return the newest version's manifest if it equals the draft and its timestamp stays valid for long enough."""
    newest = newest_version(federation)
    path = manifest_path(federation, newest)
    if path is None or not is_current(federation, newest):
        return None
    if timestamp_expiry(federation, newest) - now_utc() < RENEWED_BEFORE:
        return None
    found = Manifest.parse(read_bounded(path, MAX_DOCUMENT_BYTES), subject=path.name)
    kept = {name: getattr(found, name) for name in ("version", "supersedes_digest", "published_at")}
    files = tuple(file for file in found.files if file.path not in PAGE_NAMES)
    return (
        found
        if draft.model_copy(update=kept) == found.model_copy(update={"files": files})
        else None
    )


def _write_pages(
    source: _Source, draft: Manifest, targets: Path, on_progress: OnProgress | None
) -> None:
    plan = source.inventory.plan
    content = PageInput(
        plan=plan,
        plan_digest=source.inventory.plan_digest,
        root_digest=sha256_hex(source.root),
        name=source.federation.settings().name,
        manifest=draft,
        inventory=source.inventory,
        report=source.report,
        ensemble=build_ensemble(plan, draft, targets, memory_bytes=memory_for(draft)),
    )
    write_pages(content, targets, on_progress)
