"""Reads the status of one silo of a plan from `incoming/`, `receipts/` and `quarantine/`.

The silo controls the contents of `incoming/`: they are bounded here, and always displayed as text.
"""

import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from aggregator.config import Federation
from aggregator.monitoring.standing import (
    STANDINGS,
    Arrival,
    Departure,
    Person,
    SiloReport,
    SiloStanding,
    SubmissionStatus,
    decide_standing,
)
from aggregator.runtime.processes import Processes, changed_at
from ddm.errors import ArchipelagoError
from ddm.io.files import read_bounded
from ddm.protocol.base import Model, SiloId, Time, check_json
from ddm.protocol.plan import Plan
from ddm.protocol.receipt import RECEIPT_KIND, AcceptedVerdict, HeldVerdict, Receipt, RefusedVerdict
from ddm.trust.envelope import open_sealed
from ddm.trust.keys import PublicKey

# An idle silo answers every half minute; after this long without an answer, several requests were lost.
SILENT_AFTER = timedelta(minutes=3)
# Bounds on what a silo may have put there.
_MAX_SMALL_BYTES = 1 << 20
_MAX_INDEX_BYTES = 16 * 1024 * 1024
_MAX_ENTRIES = 1000
_MAX_STATE = 40
_MAX_REASONS = 8

EarlierArrival = tuple[datetime, Arrival]


class SiloStatus(Model):
    """One silo.

    Attributes:
        silo_id: the silo.
        standing: its status as the aggregator sees it.
        state: the state that it reported last; empty if it never reported one.
        progress: the progress of the training, in percent, as reported.
        code: 0 while its work continues, else the exit code of what a person there must remove, as reported.
        person: who must act before the work continues.
        last_seen: when it answered last.
        arrival: the submission on its way, if any.
        submissions: those that arrived, the newest last.
        final: whether no further submission is expected.
    """

    silo_id: SiloId
    standing: SiloStanding
    state: Annotated[str, Field(max_length=_MAX_STATE)]
    progress: Annotated[int, Field(ge=0, le=100)]
    code: Annotated[int, Field(ge=0, le=255)]
    person: Person
    last_seen: Time | None
    arrival: Arrival | None
    submissions: tuple[SubmissionStatus, ...]
    final: bool


@dataclass(frozen=True)
class SiloFolders:
    """The folders that hold the files of one silo."""

    incoming: Path
    receipts: Path
    quarantine: Path

    @classmethod
    def of(cls, federation: Federation, plan_id: str, silo_id: str) -> "SiloFolders":
        """Return the folders of one silo of a plan."""
        roots = (federation.incoming, federation.receipts, federation.path / "quarantine")
        return cls(*(root / plan_id / silo_id for root in roots))


def read_silo(
    federation: Federation,
    plan: Plan,
    silo_id: str,
    *,
    processes: Processes,
    now: datetime,
    earlier: EarlierArrival | None,
    gone: Departure | None = None,
) -> SiloStatus:
    """Read the status of a silo.

    Args:
        federation: the operator's folder.
        plan: the current plan.
        silo_id: one of its silos.
        processes: the aggregator's programs; while none runs, silence says nothing about the silo.
        now: the present.
        earlier: an earlier reading of the submission on its way, to compute its rate.
        gone: whether it was removed from the federation, or withdrawn from this plan.

    Returns:
        Its standing, its last report, its submissions.
    """
    folders = SiloFolders.of(federation, plan.plan_id, silo_id)
    report = _read_report(folders.incoming / "status.json")
    last_seen = _last_seen(folders.incoming)
    arrival = _arrival(folders, now, earlier)
    submissions = tuple(_submissions(folders, PublicKey.parse(plan.receipt_key)))
    if gone is None and plan.origin(silo_id) != plan.plan_id:
        # It signed for an earlier plan, and nothing is requested of it.
        gone = "carried"
    silo_standing: SiloStanding
    if gone is not None:
        silo_standing = gone
    else:
        silo_standing = decide_standing(
            submissions,
            arrival,
            report,
            answered=last_seen is not None,
            silent=_is_silent(last_seen, processes, now),
        )
    return SiloStatus(
        silo_id=silo_id,
        standing=silo_standing,
        state=report.state,
        progress=report.progress,
        code=report.code,
        person=STANDINGS[silo_standing].person,
        last_seen=last_seen,
        arrival=arrival,
        submissions=submissions,
        # Intake writes this file with the last answer that a silo gets for the plan.
        final=gone is not None or (folders.receipts / "final").exists(),
    )


def unnamed_silo(
    federation: Federation,
    plan: Plan | None,
    silo_id: str,
) -> SiloStatus:
    """Return the status of a silo that is enrolled and that the plan in force, if any, does not name."""
    last_seen = None
    if plan is not None:
        # It is told so, and nothing else is requested of it.
        last_seen = _last_seen(SiloFolders.of(federation, plan.plan_id, silo_id).incoming)
    standing: SiloStanding = "unnamed"
    return SiloStatus(
        silo_id=silo_id,
        standing=standing,
        state="",
        progress=0,
        code=0,
        person=STANDINGS[standing].person,
        last_seen=last_seen,
        arrival=None,
        submissions=(),
        final=True,
    )


def _last_seen(incoming: Path) -> datetime | None:
    # `seen` has the time of the last reply of any kind (`aggregator.transfer.delivery`).
    times = [changed_at(incoming / name) for name in ("seen", "status.json")]
    return max((time for time in times if time is not None), default=None)


def _is_silent(last_seen: datetime | None, processes: Processes, now: datetime) -> bool:
    """Whether a silo that answered before has not answered for long, though requests were sent to it."""
    if last_seen is None or not processes.running:
        return False
    # Before the programs started, nothing was requested of the silo.
    waiting_since = last_seen
    if processes.started_at is not None:
        waiting_since = max(last_seen, processes.started_at)
    return now - waiting_since > SILENT_AFTER


def _read_report(path: Path) -> SiloReport:
    # The silo controls the values and their types. A JSON boolean is an int in Python, hence the comparison of types.
    values = _read_object(path)
    progress = values.get("progress")
    if type(progress) is not int or not 0 <= progress <= 100:
        progress = 0
    sequence = values.get("sequence")
    if type(sequence) is not int:
        sequence = 0
    code = values.get("code")
    if type(code) is not int or not 0 <= code <= 255:
        code = 0
    return SiloReport(str(values.get("state", ""))[:_MAX_STATE], progress, sequence, code)


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if there is no readable one."""
    try:
        data = read_bounded(path, _MAX_SMALL_BYTES)
        value = check_json(data, subject=path.name, limit=_MAX_SMALL_BYTES)
    except ArchipelagoError:
        return {}
    return value if isinstance(value, dict) else {}


def _names(folder: Path) -> list[str]:
    with suppress(OSError):
        return [path.name for path in islice(folder.iterdir(), _MAX_ENTRIES)]
    return []


def _numbers(folder: Path, suffix: str = "") -> set[int]:
    """Return the numbers that name entries of a folder; seven digits bound what is read of a foreign name."""
    numbers = set()
    for name in _names(folder):
        stem = name.removesuffix(suffix)
        if name.endswith(suffix) and stem.isascii() and stem.isdigit() and len(stem) <= 7:
            numbers.add(int(stem))
    return numbers - {0}


def _arrival(folders: SiloFolders, now: datetime, earlier: EarlierArrival | None) -> Arrival | None:
    """Return how much of the newest submission on its way is on disk, as its part folder records it."""
    for sequence in sorted(_numbers(folders.incoming, ".part"), reverse=True):
        part = folders.incoming / f"{sequence}.part"
        try:
            return _read_arrival(part, sequence, now, earlier)
        except (ArchipelagoError, ValidationError, KeyError, TypeError, ValueError, AttributeError):
            # Being written at this moment, or not what our own code writes: a status leaves it out.
            continue
    return None


def _read_arrival(
    part: Path, sequence: int, now: datetime, earlier: EarlierArrival | None
) -> Arrival:
    data = read_bounded(part / ".progress.json", _MAX_INDEX_BYTES)
    notes = check_json(data, subject="progress", limit=_MAX_INDEX_BYTES)
    bytes_total = sum(entry["num_bytes"] for entry in notes["files"])
    bytes_here = 0
    for ranges in notes["ranges"].values():
        bytes_here += sum(end - start for start, end in ranges)

    since, bytes_before = _first_file(part, now)
    if earlier is not None:
        earlier_at, earlier_arrival = earlier
        # The same submission, and not one that was begun again since.
        if earlier_arrival.sequence == sequence and earlier_arrival.bytes_here <= bytes_here:
            since = earlier_at
            bytes_before = earlier_arrival.bytes_here
    # Two readings within a second would give a rate that is mostly chance.
    seconds = max((now - since).total_seconds(), 1.0)
    return Arrival(
        sequence=sequence,
        bytes_here=bytes_here,
        bytes_total=bytes_total,
        bytes_per_s=max(bytes_here - bytes_before, 0) / seconds,
    )


def _first_file(part: Path, now: datetime) -> tuple[datetime, int]:
    """Return when the oldest file of a part folder was written, and its size, which no rate includes."""
    times_and_sizes = [(now.timestamp(), 0)]
    # Names that begin with a dot are notes of our own.
    for path in islice(part.rglob("[!.]*"), _MAX_ENTRIES):
        with suppress(OSError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                times_and_sizes.append((status.st_mtime, status.st_size))
    written_at, size = min(times_and_sizes)
    return datetime.fromtimestamp(written_at, UTC), size


def _submissions(folders: SiloFolders, key: PublicKey) -> Iterator[SubmissionStatus]:
    """Yield every submission in order: from its receipt, else from quarantine, else as arrived."""
    # The notice that a person decides is called N.held.json, which is not a number: it answers nothing yet.
    answered = _numbers(folders.receipts, ".json")
    quarantined = _numbers(folders.quarantine)
    # A submission that is still on its way is in N.part, and gets its number once it is whole.
    arrived = _numbers(folders.incoming)
    for sequence in sorted(answered | quarantined | arrived):
        if sequence in answered:
            yield _answered(folders.receipts, sequence, key)
        elif sequence in quarantined:
            yield SubmissionStatus(
                sequence=sequence,
                verdict="quarantined",
                reasons=_reasons(folders.quarantine / f"{sequence}"),
            )
        else:
            yield SubmissionStatus(sequence=sequence, verdict="arrived")


def _answered(receipts: Path, sequence: int, key: PublicKey) -> SubmissionStatus:
    try:
        sealed = read_bounded(receipts / f"{sequence}.json", _MAX_SMALL_BYTES)
        content, _ = open_sealed(sealed, RECEIPT_KIND, key, _MAX_SMALL_BYTES)
        receipt = Receipt.parse(content, subject="receipt")
    except ArchipelagoError as error:
        return _unreadable(sequence, str(error)[:400])
    verdict = receipt.verdict
    if isinstance(verdict, HeldVerdict):
        return _unreadable(sequence, "a receipt that answers nothing")
    reasons: tuple[str, ...] = ()
    if not isinstance(verdict, AcceptedVerdict):
        reasons = (verdict.reason,)
    code = None
    if isinstance(verdict, RefusedVerdict):
        code = verdict.code
    return SubmissionStatus(
        sequence=sequence,
        verdict=verdict.kind,
        code=code,
        reasons=reasons,
        at=receipt.at,
        delivered=(receipts / f"{sequence}.delivered").exists(),
    )


def _unreadable(sequence: int, reason: str) -> SubmissionStatus:
    return SubmissionStatus(sequence=sequence, verdict="unreadable", reasons=(reason,))


def _reasons(folder: Path) -> tuple[str, ...]:
    reasons = _read_object(folder / "reason.json").get("reasons")
    if not isinstance(reasons, list):
        return ()
    return tuple(str(reason)[:400] for reason in reasons[:_MAX_REASONS])
