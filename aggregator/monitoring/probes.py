"""Reads the doctor's facts from the federation's folder and this machine, without changing anything."""

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
from aggregator.membership.invitation import read_own_invitation
from aggregator.membership.registry import KnownLedger, read_cards
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
from ddm.protocol.address import split_address
from ddm.protocol.base import MAX_DOCUMENT_BYTES
from ddm.protocol.enrolment import Invitation
from ddm.protocol.plan import Plan
from ddm.system.findings import Attempts
from ddm.system.memory import available_bytes
from ddm.system.requirements import check_packages
from ddm.trust.paths import split_silo_role
from ddm.trust.repository_check import MetadataStatus, check_repository_files

_MAX_PEM_BYTES = 1 << 16
# Files whose times must be before now.
_DATED_FILES = (
    "federation.toml",
    "flower/info.json",
    "plans/current.json",
    "incoming/*/*/seen",
    "receipts/*/*/*.json",
)
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
    """Reads facts; whatever cannot be read becomes an error of its check instead.

    Args:
        federation: the operator's folder.
        now: the time by this machine's clock.
    """

    def __init__(self, federation: Federation, now: datetime) -> None:
        self._federation = federation
        self._now = now
        self._attempts = Attempts()
        self._try = self._attempts.read

    def facts(self, against: str | None = None) -> FederationFacts:
        """Read everything.

        Args:
            against: URL of a web server whose clock to compare with.
        """
        federation = self._federation
        # Each fact by itself, since a doctor is called when something is broken: the others must still be examined.
        settings = self._try("configuration", federation.settings)
        plan = self._try("configuration", self._plan)
        processes = read_processes(federation)
        invitation = self._try("root", lambda: read_own_invitation(federation))
        invited_host = None
        invited_digest = None
        if invitation is not None:
            invited_host, _ = split_address(invitation.address)
            invited_digest = invitation.root_digest
        certificate = self._try("certificate", lambda: self._certificate(invitation))
        metadata = tuple(check_repository_files(federation.tuf))
        self._try("database", lambda: check_database(federation.path / "flower" / "superlink.db"))
        not_enrolled, other_key = self._try("silos", self._silos) or ((), ())
        reference = None
        if against is not None:
            reference = self._try("clock", lambda: clock_of(against))
        disk_needed_bytes = 0
        lost_ledgers: tuple[str, ...] = ()
        if plan is not None:
            disk_needed_bytes = bytes_to_come(federation, plan)
            lost_ledgers = tuple(self._lost_ledgers(plan))
        memory_needed_bytes = 0
        if settings is not None:
            memory_needed_bytes = run_memory_bytes(settings.shard_bytes)
        return FederationFacts(
            now=self._now,
            modes=dict(self._modes(settings)),
            settings=settings,
            invited_host=invited_host,
            nginx=self._try("nginx", nginx_version),
            port=self._port(settings, processes) or "free",
            certificate=certificate,
            root_digest=self._try("root", lambda: federation.root_digest),
            invited_digest=invited_digest,
            metadata=metadata,
            traces=tuple(self._traces(plan, certificate, metadata)),
            reference=reference,
            disk_free_bytes=shutil.disk_usage(federation.path).free,
            disk_needed_bytes=disk_needed_bytes,
            memory_free_bytes=available_bytes(),
            memory_needed_bytes=memory_needed_bytes,
            packages=tuple(check_packages()),
            processes=processes,
            orphans=tuple(self._orphans(processes)),
            not_enrolled=not_enrolled,
            other_key=other_key,
            lost_ledgers=lost_ledgers,
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

    def _modes(self, settings: FederationSettings | None) -> Iterator[tuple[str, int]]:
        folder = self._federation.path
        keys = self._federation.keys
        # Secrets, and the folders through which others would reach them.
        private = [folder, keys, *keys.glob("*.key"), *(folder / "tls").glob("*.key")]
        private.append(folder / "flower" / "superexec.secret")
        if settings and settings.passphrase_file:
            passphrase_path = Path(settings.passphrase_file)
            private.append(passphrase_path)
            if not passphrase_path.is_file():
                error = SetupError(
                    "passphrase_file",
                    expected="the file that federation.toml names",
                    got="no such file",
                )
                self._attempts.note("permissions", error)
        for path in private:
            # Some of these are written by the first `aggregator run`.
            with suppress(OSError):
                yield str(path), stat.S_IMODE(path.stat().st_mode)

    def _certificate(self, invitation: Invitation | None) -> ServerCertificate:
        authority = None
        try:
            pem = read_bounded(self._federation.path / "tls" / "server.pem", _MAX_PEM_BYTES)
            certificate = x509.load_pem_x509_certificate(pem)
            extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
            if invitation is not None:
                authority = x509.load_pem_x509_certificate(invitation.ca_certificate.encode())
        except (ValueError, x509.ExtensionNotFound) as error:
            raise FormatError(
                "tls/server.pem", expected="a server certificate", got=str(error)[:200]
            ) from error
        names = extension.value
        addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
        return ServerCertificate(
            hosts=(*names.get_values_for_type(x509.DNSName), *addresses),
            signed_at=certificate.not_valid_before_utc + _BACKDATED,
            expires=certificate.not_valid_after_utc,
            by_authority=authority is None or _is_issued_by(certificate, authority),
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
        for role in metadata:
            if role.signed_at:
                yield RecordedTime(role.name, role.signed_at)
        folder = self._federation.path
        for pattern in _DATED_FILES:
            for path in folder.glob(pattern):
                with suppress(OSError):
                    modified_at = datetime.fromtimestamp(path.stat().st_mtime, UTC)
                    yield RecordedTime(path.relative_to(folder).as_posix(), modified_at)

    def _silos(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the silos of the signed metadata without a card, and those whose card has another key."""
        enrolled = read_cards(self._federation)
        not_enrolled = []
        other_key = []
        for role, key in self._federation.delegations().items():
            name = split_silo_role(role)
            # Roles such as `plans` and `release` are delegated as well.
            if name is None:
                continue
            _, silo_id = name
            if silo_id not in enrolled:
                not_enrolled.append(silo_id)
            elif enrolled[silo_id].signing_key != key:
                other_key.append(silo_id)
        return tuple(not_enrolled), tuple(other_key)

    def _lost_ledgers(self, plan: Plan) -> Iterator[str]:
        """Yield the silos with an accepted submission whose ledger was not recorded with it.

        Intake records the ledger's chain when it accepts a submission, so as to notice a silo that begins a new ledger
        with a whole budget. Where registry/ was restored from an older backup, the record is absent or of another plan.
        """
        for silo_id in plan.silos:
            if not (self._federation.accepted / plan.plan_id / silo_id).exists():
                continue
            path = self._federation.registry / "ledgers" / f"{silo_id}.json"
            if not path.exists():
                yield silo_id
                continue
            known = self._try("ledgers", partial(_read_ledger, path))
            if known is not None and known.plan_id != plan.plan_id:
                yield silo_id

    def _orphans(self, processes: Processes) -> Iterator[Process]:
        """Yield programs of a run that has ended; a process id that was reused by another program does not count."""
        if processes.running:
            return
        folder = str(self._federation.path.absolute() / "flower").encode()
        for program in processes.programs:
            # The process may end while it is looked at.
            with suppress(OSError):
                if program.alive and folder in Path(f"/proc/{program.pid}/cmdline").read_bytes():
                    yield program

    def _leftovers(self, processes: Processes) -> Iterator[str]:
        if processes.running or is_locked(self._federation.tuf.parent, "signer"):
            return
        # A command that runs has such files too, hence the lock above.
        for pattern in ("*.part", "releases/*.part"):
            for path in sorted(self._federation.path.glob(pattern)):
                yield str(path)


def _is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _read_ledger(path: Path) -> KnownLedger:
    data = read_bounded(path, MAX_DOCUMENT_BYTES)
    return KnownLedger.parse(data, subject=f"registry/ledgers/{path.name}")
