"""Reads a federation's status from its folders alone, whether `aggregator run` is running or not.

The status may be shown on a screen: it holds no key, no passphrase and nothing that a silo keeps private.
"""

import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from cryptography import x509
from pydantic import Field

from aggregator.config import Federation
from aggregator.membership.registry import member_cards, read_cards, read_removals
from aggregator.membership.withdrawal import withdrawn_silos
from aggregator.monitoring.silo_status import EarlierArrival, SiloStatus, read_silo, unnamed_silo
from aggregator.monitoring.standing import Departure
from aggregator.runtime.processes import Processes, read_processes
from ddm.errors import ArchipelagoError
from ddm.io.files import read_bounded
from ddm.protocol.base import (
    MAX_DOCUMENT_BYTES,
    Document,
    LocalText,
    Model,
    NaturalInt,
    PlanId,
    PositiveInt,
    SiloId,
    Time,
    check_json,
)
from ddm.protocol.manifest import Manifest
from ddm.protocol.plan import Plan
from ddm.protocol.router_report import RouterReport
from ddm.protocol.routers import RouterKind
from ddm.publishing.folder import MAX_TUF_BYTES
from ddm.publishing.versions import manifest_path, newest_version

_MAX_RELEASES = 20


class RouterStatus(Model):
    """The trained router, and the silos on whose submissions it was trained."""

    family: RouterKind
    silos: tuple[SiloId, ...]


class ReleaseStatus(Model):
    """One published version."""

    version: PositiveInt
    plan_id: PlanId
    published_at: Time
    silos: tuple[SiloId, ...]
    missing_silos: tuple[SiloId, ...]
    withdrawn_silos: tuple[SiloId, ...]
    router: RouterKind


class Expiry(Model):
    """The end of an item's validity."""

    what: LocalText
    at: Time


class FederationStatus(Document):
    """The status of a federation for its operator.

    Attributes:
        federation: its name.
        address: where silos reach it.
        at: when this was gathered.
        plan_id: the current plan; None if none is signed, or if it cannot be read: see `problems`.
        processes: programs started by `aggregator run`.
        silos: the status of each silo of the plan, then of each that is enrolled and not named by it.
        router: the plan's router, once it is trained.
        releases: published versions, the newest first, at most 20.
        disk_free_bytes: free on the federation's disk.
        disk_total_bytes: size of that disk.
        expiries: when plan, certificate and metadata expire, the earliest first.
        problems: files that could not be read, and why.
    """

    format: Literal["archipelago/status/1"] = "archipelago/status/1"
    federation: LocalText
    address: LocalText
    at: Time
    plan_id: PlanId | None
    processes: Processes
    silos: tuple[SiloStatus, ...]
    router: RouterStatus | None
    releases: Annotated[tuple[ReleaseStatus, ...], Field(max_length=_MAX_RELEASES)]
    disk_free_bytes: NaturalInt
    disk_total_bytes: NaturalInt
    expiries: tuple[Expiry, ...]
    problems: tuple[LocalText, ...]

    def silo(self, silo_id: str) -> SiloStatus | None:
        """Return one silo's status."""
        return next((silo for silo in self.silos if silo.silo_id == silo_id), None)


def read_status(
    federation: Federation, now: datetime, earlier: FederationStatus | None = None
) -> FederationStatus:
    """Read a federation's folders.

    Args:
        federation: the operator's folder.
        now: the present.
        earlier: an earlier status, to compute the rates of arriving submissions.

    Returns:
        Its status; files that cannot be read are named in `problems` and left out.

    Raises:
        SetupError: federation.toml cannot be read.
    """
    settings = federation.settings()
    problems: list[str] = []
    plan = None
    try:
        plan, _ = federation.current_plan()
    except ArchipelagoError as error:
        # A status is called for when something is broken, so that it shows the rest.
        problems.append(_short(error))
    processes = read_processes(federation)
    silos: tuple[SiloStatus, ...] = ()
    router = None
    if plan is not None:
        silos = _silos(federation, plan, processes, now, earlier, problems)
        router = _router(federation, plan, problems)
    silos += _unnamed_silos(federation, plan, problems)
    disk = shutil.disk_usage(federation.path)
    expiries = sorted(_expiries(federation, plan, problems), key=lambda expiry: expiry.at)
    return FederationStatus(
        federation=settings.name,
        address=f"{settings.host}:{settings.port}",
        at=now,
        plan_id=plan.plan_id if plan else None,
        processes=processes,
        silos=silos,
        router=router,
        releases=tuple(_releases(federation, problems)),
        disk_free_bytes=disk.free,
        disk_total_bytes=disk.total,
        expiries=tuple(expiries),
        # Two readers of one damaged file say the same.
        problems=tuple(dict.fromkeys(problems)),
    )


def _short(error: ArchipelagoError) -> str:
    return str(error)[:400]


def _silos(
    federation: Federation,
    plan: Plan,
    processes: Processes,
    now: datetime,
    earlier: FederationStatus | None,
    problems: list[str],
) -> tuple[SiloStatus, ...]:
    departures = _departures(federation, plan, problems)

    def earlier_arrival(silo_id: str) -> EarlierArrival | None:
        if earlier is None:
            return None
        silo = earlier.silo(silo_id)
        if silo is None or silo.arrival is None:
            return None
        return earlier.at, silo.arrival

    return tuple(
        read_silo(
            federation,
            plan,
            silo_id,
            processes=processes,
            now=now,
            earlier=earlier_arrival(silo_id),
            gone=departures.get(silo_id),
        )
        for silo_id in plan.members
    )


def _unnamed_silos(
    federation: Federation,
    plan: Plan | None,
    problems: list[str],
) -> tuple[SiloStatus, ...]:
    """Return the enrolled silos that the plan does not name, as one enrolled after the plan was signed."""
    named = plan.members if plan else ()
    try:
        cards = read_cards(federation)
    except ArchipelagoError as error:
        problems.append(_short(error))
        return ()
    return tuple(
        unnamed_silo(federation, plan, silo_id) for silo_id in cards if silo_id not in named
    )


def _departures(federation: Federation, plan: Plan, problems: list[str]) -> dict[str, Departure]:
    """Return the plan's silos that left it; a silo both removed and withdrawn counts as removed."""
    departures: dict[str, Departure] = {}
    for silo_id in withdrawn_silos(federation, plan):
        departures[silo_id] = "withdrawn"
    try:
        # A silo that was removed and enrolled again with its old key is a member as before.
        remaining = member_cards(federation, plan)
        for record in read_removals(federation):
            if record.silo_id not in remaining:
                departures[record.silo_id] = "removed"
    except ArchipelagoError as error:
        problems.append(_short(error))
    return departures


def _router(federation: Federation, plan: Plan, problems: list[str]) -> RouterStatus | None:
    path = federation.plan_folder(plan.plan_id) / "router" / "report.json"
    if not path.exists():
        return None
    try:
        report = RouterReport.parse(
            read_bounded(path, MAX_DOCUMENT_BYTES), subject="router/report.json"
        )
    except ArchipelagoError as error:
        problems.append(_short(error))
        return None
    return RouterStatus(family=report.published, silos=tuple(sorted(report.submissions)))


def _releases(federation: Federation, problems: list[str]) -> Iterator[ReleaseStatus]:
    newest = newest_version(federation)
    for version in range(newest, max(newest - _MAX_RELEASES, 0), -1):
        path = manifest_path(federation, version)
        # A status shows what it can read: one damaged version must not hide the others.
        if path is None:
            problems.append(f"releases/{version}: no manifest")
            continue
        try:
            manifest = Manifest.parse(
                read_bounded(path, MAX_DOCUMENT_BYTES), subject=f"releases/{version}, manifest.json"
            )
        except ArchipelagoError as error:
            problems.append(_short(error))
            continue
        yield ReleaseStatus(
            version=version,
            plan_id=manifest.plan_id,
            published_at=manifest.published_at,
            silos=tuple(silo.silo_id for silo in manifest.silos),
            missing_silos=manifest.missing_silos,
            withdrawn_silos=manifest.withdrawn_silos,
            router=manifest.router.kind,
        )


def _expiries(federation: Federation, plan: Plan | None, problems: list[str]) -> Iterator[Expiry]:
    if plan:
        yield Expiry(what="plan", at=plan.expires_at)
    try:
        certificate = x509.load_pem_x509_certificate(
            read_bounded(federation.path / "tls" / "server.pem", 65536)
        )
        yield Expiry(what="certificate", at=certificate.not_valid_after_utc)
    except (ArchipelagoError, ValueError) as error:
        problems.append(f"tls/server.pem: {error}"[:400])
    for path in sorted(federation.tuf.glob("*.json")):
        role = path.name.removesuffix(".json")
        if role.endswith(".root") and _next_root(path).exists():
            # Only the newest root must be valid; earlier ones lead to it.
            continue
        try:
            data = read_bounded(path, MAX_TUF_BYTES)
            signed = check_json(data, subject=path.name, limit=MAX_TUF_BYTES)["signed"]
            yield Expiry(what=f"metadata {role}", at=datetime.fromisoformat(signed["expires"]))
        except (ArchipelagoError, KeyError, TypeError, ValueError) as error:
            problems.append(f"{path.name}: {error}"[:400])


def _next_root(path: Path) -> Path:
    version = int(path.name.split(".")[0])
    return path.with_name(f"{version + 1}.root.json")
