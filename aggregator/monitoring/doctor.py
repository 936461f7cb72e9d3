"""What is wrong with a federation, or soon will be: rules over facts that `watch.facts` gathered, no I/O here."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from aggregator.config import FederationSettings
from aggregator.runtime.processes import Process, Processes
from aggregator.runtime.proxy import is_loopback
from ddm.errors import ArchipelagoError
from ddm.system.console import human_bytes, human_seconds
from ddm.trust.health import RoleHealth

NGINX_VERSION = (1, 19, 5)
# So long before something expires, somebody should know.
NOTICE = timedelta(days=30)
# Times are compared between machines and file systems; a clock that signs plans should be far better.
CLOCK_TOLERANCE = timedelta(minutes=5)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: what it is about, what should be, what is, what to do."""

    subject: str
    expected: str
    got: str
    remedy: str

    @classmethod
    def of(cls, error: ArchipelagoError) -> "Finding":
        """Tell an error as a finding."""
        return cls(error.subject, error.expected or "something else", error.got or "nothing usable", error.remedy)


@dataclass(frozen=True)
class ServerCertificate:
    """What the certificate for silos says.

    Attributes:
        hosts: the names and addresses in it.
        signed_at: when it was made.
        expires: until when it is valid.
        by_authority: whether the authority in the invitation signed it.
    """

    hosts: tuple[str, ...]
    signed_at: datetime
    expires: datetime
    by_authority: bool


@dataclass(frozen=True)
class Trace:
    """Something that carries a time, which must lie in the past."""

    what: str
    at: datetime


@dataclass(frozen=True)
class Facts:
    """Everything that the rules look at.

    Attributes:
        now: what this machine's clock says.
        errors: what could not be read, by check.
        modes: permission bits of what must be private, by path.
        settings: federation.toml.
        dialled: the host that silos were told.
        nginx: its version; None where there is none.
        port: who holds the federation's port.
        certificate: the one that silos see.
        root_digest: sha256 of 1.root.json.
        invited_digest: the fingerprint in the invitation.
        metadata: every metadata file.
        traces: what must be older than now.
        reference: what another machine's clock says.
        disk_free_bytes: on the federation's disk.
        disk_needed_bytes: for the submissions still expected.
        memory_free_bytes: available; None where the system does not tell.
        memory_needed_bytes: for a run.
        flower: Flower's version and the versions that are supported.
        processes: what `aggregator run` started.
        orphans: programs of a run that is over.
        not_enrolled: silos that may sign for the plan, without a card.
        other_key: silos whose card names another key than the plan's metadata.
        lost_ledgers: silos with an accepted submission whose ledger was not remembered.
        leftovers: what interrupted commands left.
    """

    now: datetime
    errors: Mapping[str, tuple[ArchipelagoError, ...]]
    modes: Mapping[str, int]
    settings: FederationSettings | None
    dialled: str | None
    nginx: tuple[int, ...] | None
    port: Literal["free", "ours", "taken"]
    certificate: ServerCertificate | None
    root_digest: str | None
    invited_digest: str | None
    metadata: tuple[RoleHealth, ...]
    traces: tuple[Trace, ...]
    reference: datetime | None
    disk_free_bytes: int
    disk_needed_bytes: int
    memory_free_bytes: int | None
    memory_needed_bytes: int
    flower: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None
    processes: Processes
    orphans: tuple[Process, ...]
    not_enrolled: tuple[str, ...]
    other_key: tuple[str, ...]
    lost_ledgers: tuple[str, ...]
    leftovers: tuple[str, ...]


def examine(facts: Facts) -> Mapping[str, tuple[Finding, ...]]:
    """Apply every rule.

    Returns:
        Check to what it found; nothing where all is well.
    """
    found = {}
    for check, rule in _RULES.items():
        unread = tuple(Finding.of(error) for error in facts.errors.get(check, ()))
        found[check] = (*unread, *rule(facts))
    return found


def _permissions(facts: Facts) -> Iterator[Finding]:
    for path, mode in facts.modes.items():
        if mode & 0o077:
            got = f"mode {mode:03o}"
            yield Finding(path, "readable by its owner alone", got, f"chmod go= {path}; if others had access, rotate.")


def _no_more(facts: Facts) -> Iterator[Finding]:
    """Nothing beyond what could not be read."""
    return iter(())


def _nginx(facts: Facts) -> Iterator[Finding]:
    wanted = ".".join(str(part) for part in NGINX_VERSION)
    remedy = f"Install nginx {wanted} or later (Debian: apt install nginx-light)."
    if facts.nginx is None:
        if facts.settings and not is_loopback(facts.settings.host):
            yield Finding("nginx", "nginx in front of an address that others reach", "none", remedy)
    elif facts.nginx < NGINX_VERSION:
        yield Finding("nginx", f"version {wanted} or later", ".".join(map(str, facts.nginx)), remedy)


def _port(facts: Facts) -> Iterator[Finding]:
    if not facts.settings:
        return
    address = f"{facts.settings.host}:{facts.settings.port}"
    if facts.processes.running and facts.port != "ours":
        got = "no answer" if facts.port == "free" else "an answer of something else"
        yield Finding(address, "an answer under the federation's certificate", got, "Read flower/logs/.")
    elif not facts.processes.running and facts.port != "free":
        got = "one that cannot be taken: in use, or no address of this machine"
        remedy = "Stop what listens there, or set `host` and `port` in federation.toml."
        yield Finding(address, "a free port for aggregator run", got, remedy)


def _certificate(facts: Facts) -> Iterator[Finding]:
    made = facts.certificate
    if made is None:
        return
    restore = "Restore tls/ and invitation.json from one backup: silos know the latter."
    if facts.dialled and facts.dialled not in made.hosts:
        yield Finding("tls/server.pem", f"the name {facts.dialled}, which silos dial", ", ".join(made.hosts), restore)
    if not made.by_authority:
        got = "one by another authority"
        yield Finding("tls/server.pem", "a certificate by the authority in invitation.json", got, restore)
    if made.expires - facts.now < NOTICE:
        renew = "Make a new one: aggregator rotate FED tls, then start aggregator run anew."
        yield Finding("tls/server.pem", f"{NOTICE.days} days or more left", _left(facts, made.expires), renew)


def _metadata(facts: Facts) -> Iterator[Finding]:
    for role in facts.metadata:
        if role.problem:
            yield Finding.of(role.problem)
        elif role.expires and role.expires - facts.now < NOTICE:
            remedy = "Sign it anew: aggregator rotate FED root or targets."
            if not role.name.startswith(("targets", *"123456789")):
                remedy = "Sign it anew: aggregator publish --renew, or the next aggregator plan."
            yield Finding(
                f"tuf/metadata/{role.name}",
                f"{NOTICE.days} days or more left",
                _left(facts, role.expires),
                remedy,
            )


def _left(facts: Facts, expires: datetime) -> str:
    days = (expires - facts.now).days
    return f"{days} days left" if days >= 0 else f"expired {expires:%Y-%m-%d}"


def _root(facts: Facts) -> Iterator[Finding]:
    if facts.root_digest and facts.invited_digest and facts.root_digest != facts.invited_digest:
        remedy = "Restore both from backup: silos and researchers pinned one of them."
        yield Finding("tuf/metadata/1.root.json", f"fingerprint {facts.invited_digest}", facts.root_digest, remedy)


def _clock(facts: Facts) -> Iterator[Finding]:
    remedy = "Set the clock (timedatectl set-ntp true). Before that, sign nothing."
    newest = max(facts.traces, key=lambda trace: trace.at, default=None)
    if newest and newest.at - facts.now > CLOCK_TOLERANCE:
        behind = human_seconds((newest.at - facts.now).total_seconds())
        expected = f"a time after {newest.at:%Y-%m-%d %H:%M}Z, the time of {newest.what}"
        yield Finding("clock", expected, f"{facts.now:%Y-%m-%d %H:%M}Z, {behind} before it", remedy)
    if facts.reference and abs(facts.reference - facts.now) > CLOCK_TOLERANCE:
        expected = f"{facts.reference:%Y-%m-%d %H:%M}Z, as the other machine says"
        yield Finding("clock", expected, f"{facts.now:%Y-%m-%d %H:%M}Z", remedy)


def _disk(facts: Facts) -> Iterator[Finding]:
    if facts.disk_free_bytes < facts.disk_needed_bytes:
        expected = f"{human_bytes(facts.disk_needed_bytes)} for the submissions that the plan still expects"
        got = f"{human_bytes(facts.disk_free_bytes)} free"
        yield Finding("disk", expected, got, "Make room, or move the federation to a larger disk before it runs.")


def _memory(facts: Facts) -> Iterator[Finding]:
    free = facts.memory_free_bytes
    if free is not None and not facts.processes.running and free < facts.memory_needed_bytes:
        expected = f"{human_bytes(facts.memory_needed_bytes)} for a run"
        remedy = "End other programs, or set a smaller shard_bytes in federation.toml."
        yield Finding("memory", expected, f"{human_bytes(free)} available", remedy)


def _flower(facts: Facts) -> Iterator[Finding]:
    if facts.flower is None:
        yield Finding("flwr", "an installed Flower", "none", "Install Archipelago again (make setup).")
        return
    version, low, high = (".".join(map(str, each)) for each in facts.flower)
    if not facts.flower[1] <= facts.flower[0] < facts.flower[2]:
        remedy = "Install Archipelago again (make setup): it brings the version that it was tested with."
        yield Finding("flwr", f"{low} or later, before {high}", version, remedy)


def _processes(facts: Facts) -> Iterator[Finding]:
    if facts.processes.running:
        for program in facts.processes.programs:
            if not program.alive:
                remedy = "aggregator run starts it again within seconds; look again, then read flower/logs/."
                if program.name == "aggregator run":
                    remedy = "Something it started still holds flower/.runtime.lock: end that process, run again."
                yield Finding(program.name, "a living process", f"process {program.pid or 0}, which has ended", remedy)
    for program in facts.orphans:
        got = f"process {program.pid}, still alive"
        yield Finding(program.name, "none without aggregator run", got, f"End it: kill {program.pid}")


def _silos(facts: Facts) -> Iterator[Finding]:
    for silo_id in facts.not_enrolled:
        remedy = "Restore registry/ from backup, or take the silo out: aggregator remove."
        yield Finding(f"silo {silo_id}", "the card of a silo of the plan", "none in registry/", remedy)
    for silo_id in facts.other_key:
        remedy = "Its submissions would be refused. Sign another plan, or restore its card from backup."
        yield Finding(f"silo {silo_id}", "the key that the plan's metadata names", "another one on its card", remedy)


def _ledgers(facts: Facts) -> Iterator[Finding]:
    for silo_id in facts.lost_ledgers:
        remedy = "Restore registry/ledgers/ from backup: without it a reset ledger would go unnoticed."
        yield Finding(f"ledger of silo {silo_id}", "the chain of its accepted submission", "none kept", remedy)


def _leftovers(facts: Facts) -> Iterator[Finding]:
    for path in facts.leftovers:
        yield Finding(
            path, "nothing half done", "what an interrupted command left", "Run that command again, or remove it."
        )


_RULES: Mapping[str, Callable[[Facts], Iterator[Finding]]] = {
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
    "flower": _flower,
    "database": _no_more,
    "processes": _processes,
    "silos": _silos,
    "ledgers": _ledgers,
    "leftovers": _leftovers,
}
