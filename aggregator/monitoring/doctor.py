"""Finds what is wrong with a federation, or soon will be: rules over the facts of `monitoring.probes`, without I/O."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from aggregator.config import BUSY_PORT_REMEDY, FederationSettings
from aggregator.runtime.processes import Process, Processes
from aggregator.runtime.proxy import is_loopback
from ddm.errors import ArchipelagoError
from ddm.system.console import human_bytes, human_seconds
from ddm.system.findings import Finding, Findings, apply
from ddm.trust.repository_check import MetadataStatus

NGINX_VERSION = (1, 19, 5)
# Permissions of everybody but the owner.
_NOT_OWNER = 0o077
# How long before an expiry to warn of it.
NOTICE = timedelta(days=30)
# Allows for differences between machines and file systems; a clock that signs plans should be far better.
CLOCK_TOLERANCE = timedelta(minutes=5)


@dataclass(frozen=True)
class ServerCertificate:
    """The contents of the server certificate.

    Attributes:
        hosts: the names and addresses in it.
        signed_at: when it was made.
        expires: the end of its validity.
        by_authority: whether the authority in the invitation signed it.
    """

    hosts: tuple[str, ...]
    signed_at: datetime
    expires: datetime
    by_authority: bool


@dataclass(frozen=True)
class RecordedTime:
    """A recorded time, which must be in the past."""

    what: str
    at: datetime


@dataclass(frozen=True)
class FederationFacts:
    """Everything that the rules examine.

    Attributes:
        now: the time by this machine's clock.
        errors: what could not be read, by check.
        modes: permission bits of files that must be private, by path.
        settings: federation.toml.
        invited_host: the host in the invitation, to which silos connect.
        nginx: its version; None if it is not installed.
        port: who holds the federation's port.
        certificate: the server certificate that silos see.
        root_digest: sha256 of 1.root.json.
        invited_digest: the fingerprint in the invitation.
        metadata: every metadata file.
        traces: recorded times, which must be before now.
        reference: the time by another machine's clock.
        disk_free_bytes: on the federation's disk.
        disk_needed_bytes: for the submissions still expected.
        memory_free_bytes: available.
        memory_needed_bytes: for a run.
        packages: faults in the versions of Python and of the installed packages.
        processes: programs started by `aggregator run`.
        orphans: programs of a run that has ended.
        not_enrolled: silos that may sign for the plan, without a card.
        other_key: silos whose card names a different key than the plan's metadata.
        lost_ledgers: silos with an accepted submission whose ledger was not recorded.
        leftovers: files left by interrupted commands.
    """

    now: datetime
    errors: Mapping[str, tuple[ArchipelagoError, ...]]
    modes: Mapping[str, int]
    settings: FederationSettings | None
    invited_host: str | None
    nginx: tuple[int, ...] | None
    port: Literal["free", "ours", "taken"]
    certificate: ServerCertificate | None
    root_digest: str | None
    invited_digest: str | None
    metadata: tuple[MetadataStatus, ...]
    traces: tuple[RecordedTime, ...]
    reference: datetime | None
    disk_free_bytes: int
    disk_needed_bytes: int
    memory_free_bytes: int
    memory_needed_bytes: int
    packages: tuple[Finding, ...]
    processes: Processes
    orphans: tuple[Process, ...]
    not_enrolled: tuple[str, ...]
    other_key: tuple[str, ...]
    lost_ledgers: tuple[str, ...]
    leftovers: tuple[str, ...]


def examine(facts: FederationFacts) -> Findings:
    """Apply every rule.

    Returns:
        The findings of each check; empty where all is well.
    """
    return apply(_RULES, facts, facts.errors)


def _permissions(facts: FederationFacts) -> Iterator[Finding]:
    for path, mode in facts.modes.items():
        if mode & _NOT_OWNER:
            yield Finding(
                path,
                expected="readable by its owner alone",
                got=f"mode {mode:03o}",
                remedy=f"chmod go= {path}; if others had access, rotate the key.",
            )


def _no_more(facts: FederationFacts) -> Iterator[Finding]:
    """Report nothing: the check consists of reading."""
    return iter(())


def _nginx(facts: FederationFacts) -> Iterator[Finding]:
    required = _dotted(NGINX_VERSION)
    remedy = f"Install nginx {required} or later (Debian: apt install nginx-light)."
    if facts.nginx is None:
        # On loopback, Flower answers without nginx in front of it.
        if facts.settings and not is_loopback(facts.settings.host):
            yield Finding(
                "nginx",
                expected="nginx in front of an address that others reach",
                got="no nginx installed",
                remedy=remedy,
            )
    elif facts.nginx < NGINX_VERSION:
        yield Finding(
            "nginx",
            expected=f"version {required} or later",
            got=_dotted(facts.nginx),
            remedy=remedy,
        )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


def _port(facts: FederationFacts) -> Iterator[Finding]:
    if not facts.settings:
        return
    address = f"{facts.settings.host}:{facts.settings.port}"
    # A port that answers is not enough: it must answer with the certificate that silos check.
    if facts.processes.running and facts.port != "ours":
        got = "an answer of another program"
        if facts.port == "free":
            got = "no answer"
        yield Finding(
            address,
            expected="an answer with the federation's certificate",
            got=got,
            remedy="Read flower/logs/.",
        )
    elif not facts.processes.running and facts.port != "free":
        yield Finding(
            address,
            expected="a free port for aggregator run",
            got="a port in use, or an address that is not this machine's",
            remedy=BUSY_PORT_REMEDY,
        )


def _certificate(facts: FederationFacts) -> Iterator[Finding]:
    certificate = facts.certificate
    if certificate is None:
        return
    restore = "Restore tls/ and invitation.json from the same backup: silos have that invitation."
    # The invitation names the authority and the host that silos check when they connect.
    host = facts.invited_host
    if host and host not in certificate.hosts:
        yield Finding(
            "tls/server.pem",
            expected=f"the name {host}, to which silos connect",
            got=", ".join(certificate.hosts),
            remedy="Make a certificate that names it, `aggregator rotate FED tls`, then restart `aggregator run FED`.",
        )
    if not certificate.by_authority:
        yield Finding(
            "tls/server.pem",
            expected="a certificate signed by the authority in invitation.json",
            got="a certificate signed by another authority",
            remedy=restore,
        )
    if certificate.expires - facts.now < NOTICE:
        yield Finding(
            "tls/server.pem",
            expected=f"{NOTICE.days} days or more left",
            got=_time_left(facts, certificate.expires),
            remedy="Make a new one, `aggregator rotate FED tls`, then restart `aggregator run FED`.",
        )


def _metadata(facts: FederationFacts) -> Iterator[Finding]:
    for role in facts.metadata:
        if role.problem:
            yield Finding.of(role.problem)
        elif role.expires and role.expires - facts.now < NOTICE:
            # `targets` and the versions of root, `1.root.json` and so on, are signed by people; the rest by publishing.
            remedy = "Sign it again: `aggregator publish FED --out DIR --renew`. The next plan signs it, too."
            if role.name.startswith(("targets", *"123456789")):
                remedy = "Sign it again: `aggregator rotate FED root`, or `aggregator rotate FED targets`."
            yield Finding(
                f"tuf/metadata/{role.name}",
                expected=f"{NOTICE.days} days or more left",
                got=_time_left(facts, role.expires),
                remedy=remedy,
            )


def _time_left(facts: FederationFacts, expires: datetime) -> str:
    days = (expires - facts.now).days
    if days < 0:
        return f"expired {expires:%Y-%m-%d}"
    return f"{days} days left"


def _root(facts: FederationFacts) -> Iterator[Finding]:
    # Anybody who was invited pinned the fingerprint in the invitation, and accepts nothing that another root signed.
    if facts.root_digest and facts.invited_digest and facts.root_digest != facts.invited_digest:
        yield Finding(
            "tuf/metadata/1.root.json",
            expected=f"fingerprint {facts.invited_digest}",
            got=facts.root_digest,
            remedy="Restore both from backup: silos and researchers have pinned one of the two.",
        )


def _clock(facts: FederationFacts) -> Iterator[Finding]:
    remedy = "Set the clock (timedatectl set-ntp true), and sign nothing before that."
    present = f"{facts.now:%Y-%m-%d %H:%M}Z"
    # A recorded time ahead of this clock shows that the clock was set back, or was wrong when the file was written.
    newest = max(facts.traces, key=lambda trace: trace.at, default=None)
    if newest and newest.at - facts.now > CLOCK_TOLERANCE:
        behind = human_seconds((newest.at - facts.now).total_seconds())
        yield Finding(
            "clock",
            expected=f"a time after {newest.at:%Y-%m-%d %H:%M}Z, recorded in {newest.what}",
            got=f"{present}, {behind} before it",
            remedy=remedy,
        )
    if facts.reference and abs(facts.reference - facts.now) > CLOCK_TOLERANCE:
        yield Finding(
            "clock",
            expected=f"{facts.reference:%Y-%m-%d %H:%M}Z, as on the other machine",
            got=present,
            remedy=remedy,
        )


def _disk(facts: FederationFacts) -> Iterator[Finding]:
    if facts.disk_free_bytes < facts.disk_needed_bytes:
        needed = human_bytes(facts.disk_needed_bytes)
        yield Finding(
            "disk",
            expected=f"{needed} free for the submissions still to come",
            got=f"{human_bytes(facts.disk_free_bytes)} free",
            remedy="Free disk space, or move the federation to a larger disk.",
        )


def _memory(facts: FederationFacts) -> Iterator[Finding]:
    # A run that continues has taken its memory already.
    if not facts.processes.running and facts.memory_free_bytes < facts.memory_needed_bytes:
        yield Finding(
            "memory",
            expected=f"{human_bytes(facts.memory_needed_bytes)} for a run",
            got=f"{human_bytes(facts.memory_free_bytes)} available",
            remedy="Stop other programs, or set a smaller shard_bytes in federation.toml.",
        )


def _packages(facts: FederationFacts) -> Iterator[Finding]:
    return iter(facts.packages)


def _processes(facts: FederationFacts) -> Iterator[Finding]:
    if facts.processes.running:
        for program in facts.processes.programs:
            if program.alive:
                continue
            remedy = (
                "While `aggregator run FED` runs, it restarts this program within seconds; check again, "
                "then read flower/logs/."
            )
            if program.name == "aggregator run":
                remedy = "A process it started still holds flower/.runtime.lock: end that process, then run again."
            yield Finding(
                program.name,
                expected="a running process",
                got=f"process {program.pid or 0}, which has ended",
                remedy=remedy,
            )
    for program in facts.orphans:
        yield Finding(
            program.name,
            expected="no such process while aggregator run does not run",
            got=f"process {program.pid}, still running",
            remedy=f"End it: kill {program.pid}",
        )


def _silos(facts: FederationFacts) -> Iterator[Finding]:
    for silo_id in facts.not_enrolled:
        yield Finding(
            f"silo {silo_id}",
            expected="an enrolment card for this silo of the plan",
            got="no card in registry/",
            remedy=(
                "Restore registry/ from backup, or remove the silo: `aggregator remove FED SILO --reason "
                "TEXT`."
            ),
        )
    for silo_id in facts.other_key:
        yield Finding(
            f"silo {silo_id}",
            expected="a card with the key that the plan's metadata names",
            got="a card with another key",
            remedy="Its submissions would be refused. Sign a new plan, or restore its card from backup.",
        )


def _ledgers(facts: FederationFacts) -> Iterator[Finding]:
    for silo_id in facts.lost_ledgers:
        yield Finding(
            f"ledger of silo {silo_id}",
            expected="the ledger's chain from its accepted submission",
            got="no such chain in registry/ledgers/",
            remedy="Restore registry/ledgers/ from backup: without it a reset ledger would go unnoticed.",
        )


def _leftovers(facts: FederationFacts) -> Iterator[Finding]:
    for path in facts.leftovers:
        yield Finding(
            path,
            expected="no unfinished work",
            got="files of an interrupted command",
            remedy="Run that command again, or remove them.",
        )


_RULES: Mapping[str, Callable[[FederationFacts], Iterator[Finding]]] = {
    "configuration": _no_more,
    "permissions": _permissions,
    "nginx": _nginx,
    "port": _port,
    "certificate": _certificate,
    "metadata": _metadata,
    "root": _root,
    "clock": _clock,
    "disk": _disk,
    "memory": _memory,
    "packages": _packages,
    "database": _no_more,
    "processes": _processes,
    "silos": _silos,
    "ledgers": _ledgers,
    "leftovers": _leftovers,
}
