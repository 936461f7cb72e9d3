"""Gathers the doctor's facts from the federation's folder and this machine, without changing anything."""

import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from aggregator.config import Federation, FederationSettings
from aggregator.intake.limits import bytes_to_come
from aggregator.membership.registry import KnownLedger, cards
from aggregator.monitoring.doctor import FederationFacts, RecordedTime, ServerCertificate
from aggregator.monitoring.machine import (
    PortState,
    check_database,
    clock_of,
    nginx_version,
    port_state,
)
from aggregator.runtime.processes import Process, Processes, read_processes
from ddm.errors import FormatError, SetupError
from ddm.io.files import read_bounded
from ddm.io.locks import is_locked
from ddm.protocol.base import MAX_DOCUMENT_BYTES, sha256_hex
from ddm.protocol.enrolment import Invitation
from ddm.protocol.plan import Plan
from ddm.system.findings import Attempts
from ddm.system.memory import available_bytes
from ddm.system.requirements import check_packages
from ddm.trust.paths import split_silo_role
from ddm.trust.repository_check import MetadataStatus, check_repository_files

_MAX_SMALL_BYTES = 1 << 20
# `aggregator.keys.tls` backdates certificates by this much.
_BACKDATED = timedelta(days=1)
# Peaks of one silo's transfer in MiB, by examples/benchmarks/{intake_size,transfer}.py (Flower 1.41.0, Linux, x86-64):
#   whatever the shards: intake 468, superexec 128, aggregator run 53, four guards 52, nginx 36; 737 in all
#   shards of 16 MiB:    SuperLink 331, ServerApp 221
#   shards of 64 MiB:    SuperLink 432, ServerApp 372; and 727, 476 where 512 MiB came in eight of them
# So these two grow by 5.25 bytes a byte of a shard; the longer transfer took 867 MiB more than that. With 737: 1604.
_RUN_BYTES = 1604 << 20
_RUN_BYTES_PER_SHARD_BYTE = 5.25


def run_memory_bytes(shard_bytes: int) -> int:
    """Return the memory that `aggregator run` and all programs it starts need together, for shards of this size."""
    return _RUN_BYTES + int(_RUN_BYTES_PER_SHARD_BYTE * shard_bytes)


class FederationFactsReader:
    """Gathers facts; whatever cannot be read becomes an error of its check instead.

    Args:
        federation: the operator's folder.
        now: the time by this machine's clock.
    """

    def __init__(self, federation: Federation, now: datetime) -> None:
        self._federation, self._now = federation, now
        self._attempts = Attempts()
        self._try = self._attempts.read

    def facts(self, against: str | None = None) -> FederationFacts:
        """Gather everything.

        Args:
            against: URL of a web server whose clock to compare with.
        """
        federation = self._federation
        settings = self._try("configuration", federation.settings)
        plan = self._try("configuration", self._plan)
        processes = read_processes(federation)
        invitation = self._try("root", self._invitation)
        certificate = self._try("certificate", lambda: self._certificate(invitation))
        metadata = tuple(check_repository_files(federation.tuf))
        root = self._try(
            "root", lambda: read_bounded(federation.tuf / "1.root.json", _MAX_SMALL_BYTES)
        )
        self._try("database", lambda: check_database(federation.path / "flower" / "superlink.db"))
        not_enrolled, other_key = self._try("silos", self._silos) or ((), ())
        return FederationFacts(
            now=self._now,
            modes=dict(self._modes(settings)),
            settings=settings,
            invited_host=invitation.address.rpartition(":")[0] if invitation else None,
            nginx=self._try("nginx", nginx_version),
            port=self._port(settings, processes) or "free",
            certificate=certificate,
            root_digest=sha256_hex(root) if root else None,
            invited_digest=invitation.root_digest if invitation else None,
            metadata=metadata,
            traces=tuple(self._traces(plan, certificate, metadata)),
            reference=self._try("clock", lambda: clock_of(against)) if against else None,
            disk_free_bytes=shutil.disk_usage(federation.path).free,
            disk_needed_bytes=bytes_to_come(federation, plan) if plan else 0,
            memory_free_bytes=available_bytes(),
            memory_needed_bytes=run_memory_bytes(settings.shard_bytes) if settings else 0,
            packages=tuple(check_packages()),
            processes=processes,
            orphans=tuple(self._orphans(processes)),
            not_enrolled=not_enrolled,
            other_key=other_key,
            lost_ledgers=tuple(self._lost_ledgers(plan)) if plan else (),
            leftovers=tuple(self._leftovers(processes)),
            errors=self._attempts.errors,
        )

    def _plan(self) -> Plan | None:
        if not (self._federation.path / "plans" / "current.json").exists():
            return None
        return self._federation.current_plan()[0]

    def _port(self, settings: FederationSettings | None, processes: Processes) -> PortState | None:
        if settings is None:
            return None
        return self._try(
            "port", lambda: port_state(self._federation, settings, running=processes.running)
        )

    def _invitation(self) -> Invitation:
        data = read_bounded(self._federation.path / "invitation.json", _MAX_SMALL_BYTES)
        return Invitation.parse(data, subject="invitation.json")

    def _modes(self, settings: FederationSettings | None) -> Iterator[tuple[str, int]]:
        path = self._federation.path
        private = [
            path,
            self._federation.keys,
            *self._federation.keys.glob("*.key"),
            *(path / "tls").glob("*.key"),
        ]
        private.append(path / "flower" / "superexec.secret")
        if settings and settings.passphrase_file:
            private.append(Path(settings.passphrase_file))
            if not private[-1].is_file():
                self._attempts.note(
                    "permissions",
                    SetupError(
                        "passphrase_file",
                        expected="the file that federation.toml names",
                        got="no such file",
                    ),
                )
        for each in private:
            with suppress(OSError):
                yield str(each), stat.S_IMODE(each.stat().st_mode)

    def _certificate(self, invitation: Invitation | None) -> ServerCertificate:
        try:
            certificate = x509.load_pem_x509_certificate(
                read_bounded(self._federation.path / "tls" / "server.pem", 65536)
            )
            names = certificate.extensions.get_extension_for_class(
                x509.SubjectAlternativeName
            ).value
            authority = (
                x509.load_pem_x509_certificate(invitation.ca_certificate.encode())
                if invitation
                else None
            )
        except (ValueError, x509.ExtensionNotFound) as error:
            raise FormatError(
                "tls/server.pem", expected="a server certificate", got=str(error)[:200]
            ) from error
        try:
            if authority:
                certificate.verify_directly_issued_by(authority)
            by_authority = True
        except (ValueError, TypeError, InvalidSignature):
            by_authority = False
        return ServerCertificate(
            hosts=(
                *names.get_values_for_type(x509.DNSName),
                *map(str, names.get_values_for_type(x509.IPAddress)),
            ),
            signed_at=certificate.not_valid_before_utc + _BACKDATED,
            expires=certificate.not_valid_after_utc,
            by_authority=by_authority,
        )

    def _traces(
        self,
        plan: Plan | None,
        certificate: ServerCertificate | None,
        metadata: tuple[MetadataStatus, ...],
    ) -> Iterator[RecordedTime]:
        if plan:
            yield RecordedTime("the plan", plan.created_at)
        if certificate:
            yield RecordedTime("the certificate", certificate.signed_at)
        yield from (RecordedTime(role.name, role.signed_at) for role in metadata if role.signed_at)
        path = self._federation.path
        for name in (
            "federation.toml",
            "flower/info.json",
            "plans/current.json",
            "incoming/*/*/seen",
            "receipts/*/*/*.json",
        ):
            for each in path.glob(name):
                with suppress(OSError):
                    at = datetime.fromtimestamp(each.stat().st_mtime, UTC)
                    yield RecordedTime(each.relative_to(path).as_posix(), at)

    def _silos(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        known = cards(self._federation)
        named = {
            name[1]: key
            for role, key in self._federation.delegations().items()
            if (name := split_silo_role(role))
        }
        missing = tuple(silo_id for silo_id in named if silo_id not in known)
        return missing, tuple(
            name for name, key in named.items() if name in known and known[name].signing_key != key
        )

    def _lost_ledgers(self, plan: Plan) -> Iterator[str]:
        for silo_id in plan.silos:
            path = self._federation.registry / "ledgers" / f"{silo_id}.json"
            accepted = (self._federation.accepted / plan.plan_id / silo_id).exists()
            if not path.exists():
                if accepted:
                    yield silo_id
                continue
            known = self._try("ledgers", partial(_read_ledger, path))
            if known and accepted and known.plan_id != plan.plan_id:
                yield silo_id

    def _orphans(self, processes: Processes) -> Iterator[Process]:
        """Yield programs of a run that has ended; a process id that was reused by another program does not count."""
        if processes.running:
            return
        folder = str(self._federation.path.absolute() / "flower").encode()
        for program in processes.programs:
            with suppress(OSError):
                if program.alive and folder in Path(f"/proc/{program.pid}/cmdline").read_bytes():
                    yield program

    def _leftovers(self, processes: Processes) -> Iterator[str]:
        path = self._federation.path
        if processes.running or is_locked(self._federation.tuf.parent, "signer"):
            return
        for pattern in ("*.part", "releases/*.part"):
            yield from sorted(str(each) for each in path.glob(pattern))


def _read_ledger(path: Path) -> KnownLedger:
    return KnownLedger.parse(
        read_bounded(path, MAX_DOCUMENT_BYTES), subject=f"registry/ledgers/{path.name}"
    )
