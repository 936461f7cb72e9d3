"""Reads back everything that was accepted for the current plan, as strictly as intake did."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aggregator.config import Federation
from aggregator.intake.claims import CountedUnits, counted_units
from aggregator.intake.flags import Flags, flags_of
from aggregator.intake.quarantine import QuarantineDecision, is_admitted, read_decisions
from aggregator.membership.registry import member_cards, signing_key
from aggregator.membership.withdrawal import withdrawn_silos
from ddm.errors import DigestError, ReplayError, SetupError
from ddm.io.files import read_bounded
from ddm.loading.earlier_plans import read_earlier_plans
from ddm.protocol.base import MAX_DOCUMENT_BYTES, File, now_utc, sha256_hex
from ddm.protocol.manifest import ScreeningRule
from ddm.protocol.plan import Plan
from ddm.protocol.submission import Submission, submission_path
from ddm.trust.keys import PublicKey
from ddm.trust.silo_role import verify_silo_metadata


@dataclass(frozen=True)
class AcceptedSilo:
    """One silo's accepted submission.

    Attributes:
        submission: the parsed document.
        document: its bytes as signed.
        folder: every file as received; the document lists their digests.
        role: the signed metadata, verbatim.
        key: the silo's, which signed the metadata.
        counted: how many units its prior counts.
        admitted: whether a person admitted it although screening found it implausible.
        flags: the screening rules that its experts broke, by expert.
    """

    submission: Submission
    document: bytes
    folder: Path
    role: bytes
    key: PublicKey
    counted: CountedUnits
    admitted: bool = False
    flags: Flags = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """sha256 of the document."""
        return sha256_hex(self.document)

    @property
    def document_file(self) -> File:
        """The document, as a manifest lists it."""
        path = submission_path(self.submission.silo_id)
        return File(path=path, bytes=len(self.document), digest=self.digest)


@dataclass(frozen=True)
class Inventory:
    """Every submission that the aggregator has accepted for one plan.

    Attributes:
        plan: the current plan.
        plan_digest: its digest.
        earlier_plans: the plans from which it carries experts over, by id.
        silos: accepted submissions by silo id, sorted; their experts in this order are the router's classes.
        missing: silos of the plan without an accepted submission.
        withdrawn: silos that were removed from the plan, or from the federation.
    """

    plan: Plan
    plan_digest: str
    earlier_plans: Mapping[str, Plan]
    silos: Mapping[str, AcceptedSilo]
    missing: tuple[str, ...]
    withdrawn: tuple[str, ...] = ()

    @property
    def num_units(self) -> Mapping[str, int]:
        """The number of units that each silo stated, of which its statistics are."""
        return {silo_id: silo.submission.num_units for silo_id, silo in self.silos.items()}

    @property
    def counted_units(self) -> Mapping[str, int]:
        """The number of units that each silo counts as, beside the others: its own, or a lower one."""
        return {silo_id: silo.counted.units for silo_id, silo in self.silos.items()}

    @property
    def digests(self) -> Mapping[str, str]:
        """The digest of each silo's submission."""
        return {silo_id: silo.digest for silo_id, silo in self.silos.items()}


@dataclass(frozen=True)
class _Origin:
    """What a silo's submission must be for, by the current plan.

    Attributes:
        root_digest: the digest of the federation's first root.
        silo_id: who signed it.
        plan_id: the plan for which it was signed: the current one, or the one that it is carried from.
        plan_digest: the digest of that plan.
        submission_digest: the submission that the current plan carries over; None where the silo trains.
    """

    root_digest: str
    silo_id: str
    plan_id: str
    plan_digest: str
    submission_digest: str | None = None


@dataclass(frozen=True)
class _StoredSubmission:
    """A silo's accepted submission, as it is on disk.

    Attributes:
        folder: holds every file as received.
        role: the bytes of the silo's metadata.
        document: the bytes of its document.
    """

    folder: Path
    role: bytes
    document: bytes

    @property
    def digest(self) -> str:
        """sha256 of the document."""
        return sha256_hex(self.document)


@dataclass(frozen=True)
class _VerifiedSubmission:
    """A stored submission whose signature and document were verified.

    Attributes:
        stored: as it is on disk.
        submission: the parsed document.
        key: the silo's, which signed the metadata.
    """

    stored: _StoredSubmission
    submission: Submission
    key: PublicKey


@dataclass(frozen=True)
class _ScreeningRecord:
    """What is recorded about one submission beside its files.

    Attributes:
        decisions: of people, while it was in quarantine.
        flags: the screening rules that its experts broke, by expert; empty unless a person admitted it.
    """

    decisions: Sequence[QuarantineDecision]
    flags: Flags


def take_inventory(federation: Federation) -> Inventory:
    """Read what was accepted for the current plan.

    Raises:
        SetupError: nothing was accepted yet.
        TrustError: a document or a role is no longer what its silo signed.
    """
    plan, plan_digest = federation.current_plan()
    earlier_plans = _read_earlier_plans(federation, plan)
    cards = member_cards(federation, plan)
    withdrawn = withdrawn_silos(federation, plan)

    remaining = [silo_id for silo_id in cards if silo_id not in withdrawn]
    verified_submissions = {}
    for silo_id in remaining:
        origin = _origin_of(plan, plan_digest, silo_id)
        folder = federation.accepted / origin.plan_id / silo_id
        # The folder of a silo appears by a rename once intake has accepted its submission.
        if not folder.is_dir():
            continue
        stored = _read_stored(folder, origin)
        key = signing_key(cards[silo_id])
        # Verified again, although intake did so: a disk, a restored backup or a person may have changed the files.
        submission = _verify_stored(stored, origin, key)
        verified_submissions[silo_id] = _VerifiedSubmission(stored, submission, key)
    if not verified_submissions:
        raise SetupError(
            f"plan {plan.plan_id}",
            expected="at least one accepted submission",
            got=f"none of {len(remaining)} silos",
            remedy=(
                "Keep `aggregator run FED` running until silos have answered; `aggregator status FED` "
                "shows why one was refused."
            ),
        )
    records = _read_screening(federation, plan, verified_submissions.values())
    silos = {}
    for silo_id, verified in verified_submissions.items():
        silos[silo_id] = _assess(plan, verified, records[verified.stored.digest])
    return Inventory(
        plan=plan,
        plan_digest=plan_digest,
        earlier_plans=earlier_plans,
        silos=silos,
        missing=tuple(silo_id for silo_id in remaining if silo_id not in silos),
        withdrawn=tuple(silo_id for silo_id in plan.members if silo_id not in remaining),
    )


def _read_earlier_plans(federation: Federation, plan: Plan) -> Mapping[str, Plan]:
    folder = federation.plan_targets(plan.plan_id)
    return read_earlier_plans(
        plan, lambda file: read_bounded(folder / file.path, MAX_DOCUMENT_BYTES)
    )


def _origin_of(plan: Plan, plan_digest: str, silo_id: str) -> _Origin:
    """Return what a silo's submission must be for."""
    for carried in plan.carried:
        if carried.silo_id == silo_id:
            return _Origin(
                plan.root_digest,
                silo_id,
                carried.plan_id,
                carried.plan_digest,
                carried.submission_digest,
            )
    return _Origin(plan.root_digest, silo_id, plan.plan_id, plan_digest)


def _read_stored(folder: Path, origin: _Origin) -> _StoredSubmission:
    role_name = f"{origin.plan_id}.{origin.silo_id}.json"
    return _StoredSubmission(
        folder,
        role=read_bounded(folder / "metadata" / role_name, MAX_DOCUMENT_BYTES),
        document=read_bounded(folder / submission_path(origin.silo_id), MAX_DOCUMENT_BYTES),
    )


def _verify_stored(stored: _StoredSubmission, origin: _Origin, key: PublicKey) -> Submission:
    """Return a submission that its role lists, which the silo's key signed, and that is for the origin's plan."""
    silo_id = origin.silo_id
    plan_id = origin.plan_id
    name = submission_path(silo_id)
    signed = verify_silo_metadata(
        stored.role,
        root_digest=origin.root_digest,
        plan_id=plan_id,
        silo_id=silo_id,
        key=key,
        now=now_utc(),
    )

    num_bytes = len(stored.document)
    digest = stored.digest
    signed_size, signed_digest = signed[f"{plan_id}/{name}"]
    if num_bytes != signed_size or digest != signed_digest:
        raise DigestError(
            f"accepted {name}",
            expected=f"the document that the silo's role lists, {signed_size} bytes, sha256 {signed_digest}",
            got=f"{num_bytes} bytes, sha256 {digest}",
        )
    if origin.submission_digest is not None and digest != origin.submission_digest:
        raise DigestError(
            f"accepted {name}",
            expected=f"the submission that the plan carries over, sha256 {origin.submission_digest}",
            got=f"sha256 {digest}",
        )

    submission = Submission.parse(stored.document, subject=f"submission of {silo_id}")
    submission.check_federation(origin.root_digest, f"accepted submission of {silo_id}")
    stated = (submission.silo_id, submission.plan_id, submission.plan_digest)
    # A submission to another plan, or of another silo, is signed as well: its signature alone proves nothing here.
    if stated != (silo_id, plan_id, origin.plan_digest):
        raise ReplayError(
            f"accepted submission of {silo_id}",
            expected=f"silo {silo_id} and plan {plan_id} with digest {origin.plan_digest}",
            got=f"silo {submission.silo_id} and plan {submission.plan_id} with digest {submission.plan_digest}",
        )
    return submission


def _read_screening(
    federation: Federation,
    plan: Plan,
    submissions: Iterable[_VerifiedSubmission],
) -> Mapping[str, _ScreeningRecord]:
    """Read what is recorded about verified submissions, by their digests."""
    decisions = read_decisions(federation)
    records = {}
    for verified in submissions:
        digest = verified.stored.digest
        own_decisions = [decision for decision in decisions if decision.submission_digest == digest]
        flags: Flags = {}
        if is_admitted(own_decisions):
            # A carried submission may have been flagged for its own plan, and for this one beside other experts.
            plan_ids = {verified.submission.plan_id, plan.plan_id}
            flags = _flags_of_plans(federation, plan_ids, digest)
        records[digest] = _ScreeningRecord(own_decisions, flags)
    return records


def _assess(
    plan: Plan,
    verified: _VerifiedSubmission,
    record: _ScreeningRecord,
) -> AcceptedSilo:
    """Join a verified submission with what a person decided about it, and with the rules that flagged its experts."""
    stored = verified.stored
    return AcceptedSilo(
        submission=verified.submission,
        document=stored.document,
        folder=stored.folder,
        role=stored.role,
        key=verified.key,
        counted=counted_units(plan, verified.submission, record.decisions),
        admitted=is_admitted(record.decisions),
        flags=record.flags,
    )


def _flags_of_plans(federation: Federation, plan_ids: set[str], digest: str) -> Flags:
    """Return the rules by which a submission's experts were flagged for any of these plans."""
    flags_of_experts: dict[str, set[ScreeningRule]] = {}
    for plan_id in sorted(plan_ids):
        for expert_id, flags in flags_of(federation, plan_id, digest).items():
            flags_of_experts.setdefault(expert_id, set()).update(flags)
    return {expert_id: tuple(sorted(flags)) for expert_id, flags in flags_of_experts.items()}
