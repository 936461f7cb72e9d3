"""Publishing: the manifest, the silos' signed bytes unchanged, the router, all under one signed release."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from aggregator.config import Federation
from aggregator.inventory import AcceptedSilo, Inventory
from aggregator.registry import card_of, signing_key
from aggregator.router import ROUTER_NAME, RouterReport, load_report, router_path
from aggregator.setup import load_key
from ddm.artifact import load_ensemble
from ddm.errors import BusyError
from ddm.files import copy_tree_bounded, link_or_copy, sync_folder, sync_tree, write_atomic
from ddm.protocol.base import File, now_utc, sha256_hex
from ddm.protocol.manifest import Manifest, PublishedExpert, PublishedRouter, PublishedSilo
from ddm.protocol.submission import submission_path
from ddm.release import open_release
from ddm.trust.folder import MAX_FILES
from ddm.trust.repository import Repository


def publish(federation: Federation, inventory: Inventory, passphrase: bytes, out: Path) -> Manifest:
    """Publish the next version of the ensemble.

    The release is built aside, verified and opened as a researcher would, kept under `releases/<n>` and then copied to
    `out`, each by one rename.

    Raises:
        BusyError: `out` exists; releases are immutable.
        MissingFileError: the router was not trained yet.
        TrustError: an accepted file is no longer what its silo signed; nothing was published.
    """
    if out.exists():
        raise BusyError(
            str(out),
            expected="a path where nothing is yet",
            got="a release or another file",
            remedy="Choose another folder; a release is never overwritten.",
        )
    report = load_report(federation, inventory)
    plan_id = inventory.plan.plan_id
    version = 1 + max((int(path.name) for path in federation.releases.glob("[0-9]*") if path.name.isdigit()), default=0)
    part = federation.releases / f"{version}.part"
    shutil.rmtree(part, ignore_errors=True)
    targets = part / "targets" / plan_id
    _lay_out(federation, inventory, targets)
    manifest = _manifest(federation, inventory, report, targets, version)
    write_atomic(targets / "manifest.json", manifest.encode())
    _sign(federation, inventory, targets, passphrase).export_release(part)
    sync_tree(part)
    load_ensemble(open_release(part, root=(federation.tuf / "1.root.json").read_bytes(), state=None))
    part.rename(federation.releases / str(version))
    sync_folder(federation.releases)
    _copy_out(federation.releases / str(version), out)
    return manifest


def _lay_out(federation: Federation, inventory: Inventory, targets: Path) -> None:
    source = federation.plan_targets(inventory.plan.plan_id)
    for name in ("plan.json", *(file.path for file in inventory.plan.files)):
        link_or_copy(source / name, targets / name)
    for silo_id, silo in inventory.silos.items():
        for name in _published_names(silo_id, silo):
            link_or_copy(silo.folder / name, targets / name)
    link_or_copy(router_path(federation, inventory.plan.plan_id), targets / ROUTER_NAME)


def _published_names(silo_id: str, silo: AcceptedSilo) -> list[str]:
    """The document and the experts; the releases are not published."""
    return [submission_path(silo_id), *(expert.file.path for expert in silo.submission.experts)]


def _manifest(
    federation: Federation, inventory: Inventory, report: RouterReport, targets: Path, version: int
) -> Manifest:
    settings = federation.settings()
    previous = federation.releases / str(version - 1)
    old = next(previous.glob("targets/*/manifest.json"), None) if version > 1 else None
    experts = [(silo_id, expert) for silo_id, silo in inventory.silos.items() for expert in silo.submission.experts]
    named = {
        ROUTER_NAME,
        *(name for silo_id, silo in inventory.silos.items() for name in _published_names(silo_id, silo)),
    }
    listed = sorted(path.relative_to(targets).as_posix() for path in targets.rglob("*") if path.is_file())
    return Manifest(
        plan_id=inventory.plan.plan_id,
        plan_digest=inventory.plan_digest,
        version=version,
        supersedes_digest=sha256_hex(old.read_bytes()) if old else None,
        published_at=now_utc(),
        licence=settings.licence,
        cite=settings.cite,
        missing_silos=inventory.missing,
        withdrawn_silos=(),
        silos=tuple(_published_silo(federation, silo_id, silo, targets) for silo_id, silo in inventory.silos.items()),
        experts=tuple(
            PublishedExpert(
                expert_id=expert.expert_id, silo_id=silo_id, cluster=expert.cluster, prior=prior, file=expert.file
            )
            for (silo_id, expert), prior in zip(experts, report.expert_priors, strict=True)
        ),
        router=PublishedRouter(
            kind=report.published,
            t_release=report.t_release,
            training_prior=report.training_prior,
            temperature=report.temperature,
            file=File.of(ROUTER_NAME, targets / ROUTER_NAME),
        ),
        evaluation=report.evaluations(),
        files=tuple(File.of(name, targets / name) for name in listed if name not in named),
    )


def _published_silo(federation: Federation, silo_id: str, silo: AcceptedSilo, targets: Path) -> PublishedSilo:
    submission = silo.submission
    name = submission_path(silo_id)
    return PublishedSilo(
        silo_id=silo_id,
        submission=File.of(name, targets / name),
        key_fingerprint=signing_key(card_of(federation, silo_id)).fingerprint,
        epsilon=submission.spent.epsilon,
        delta=submission.spent.delta,
        audit=submission.audit.verdict,
        isolation=submission.isolation,
    )


def _sign(federation: Federation, inventory: Inventory, targets: Path, passphrase: bytes) -> Repository:
    plan_id = inventory.plan.plan_id
    names = ("manifest.json", ROUTER_NAME)
    described = {name: File.of(name, targets / name) for name in names}
    files: Mapping[str, tuple[int, str]] = {
        f"{plan_id}/{name}": (file.bytes, file.digest) for name, file in described.items()
    }
    repository = Repository(federation.tuf)
    repository.publish(
        plan_id,
        {silo_id: silo.role for silo_id, silo in inventory.silos.items()},
        files,
        release_key=load_key(federation, "release", passphrase),
        online_key=load_key(federation, "online", passphrase),
        now=now_utc(),
    )
    return repository


def _copy_out(release: Path, out: Path) -> None:
    """Copy durably, not link: what happens to the published folder must not reach the federation's own files."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    copy_tree_bounded(release, part, max_bytes=sum(path.stat().st_size for path in release.rglob("*")), most=MAX_FILES)
    part.rename(out)
    sync_folder(out.parent)
