"""Reads what a person must know before a submission leaves: its files, its numbers, their cost, and what is new."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddm.errors import ApprovalError, ArchipelagoError
from ddm.io.files import read_bounded
from ddm.protocol.base import MAX_DOCUMENT_BYTES, File, sha256_file
from ddm.protocol.plan import REHEARSAL, Plan
from ddm.protocol.submission import Submission, SubmittedExpert, submission_path
from ddm.protocol.weight_privacy import DpSgdPrivacy, NoWeightPrivacy
from ddm.statistics.of_plan import statistics_of
from silo.audit.document import AuditReport, read_report
from silo.config import Site
from silo.decisions import DecisionLog, describe_decisions
from silo.plan.acceptance import AcceptedPlan, load_accepted
from silo.plan.workspace import open_workspace
from silo.privacy.account import Account, account
from silo.worker.approval import load_draft, review_folder
from silo.worker.curves import ExpertCurve, read_curves
from silo.worker.stages import open_ledger
from silo.worker.state import load_state, state_path

MAX_PREVIOUS = 5
MAX_DECISIONS = 12
DRAFT = "draft.json"
NO_DP = "no differential privacy"
# What a value says about images.
_PUBLIC = "public"
_OF_PLAN = "the plan's"
# In place of a value that one of two documents lacks.
_ABSENT = "(none)"
_REHEARSAL_COST = "Weights and statistics leave all the same, and what they cost is spent."


@dataclass(frozen=True)
class OutgoingFile:
    """One file that would leave.

    Attributes:
        path: as it is called in the outbox.
        local: where its bytes are now.
        bytes: its length.
        digest: sha256.
        description: of its contents, in words.
        privacy: what protects the images in it.
    """

    path: str
    local: Path
    bytes: int
    digest: str
    description: str
    privacy: str


@dataclass(frozen=True)
class DocumentValue:
    """One number or word of the document.

    Attributes:
        name: what it is.
        now: in this draft.
        before: in the submission before it; None where there is none.
        privacy: what it says about images.
    """

    name: str
    now: str
    before: str | None
    privacy: str

    @property
    def changed(self) -> bool:
        """Whether it differs from the one before."""
        return self.before is not None and self.before != self.now


@dataclass(frozen=True)
class StatisticNoise:
    """How much noise a statistic holds, in words."""

    kind: str
    epsilon: float
    delta: float
    level: str


@dataclass(frozen=True)
class ReviewFacts:
    """Everything that `silo review` shows.

    Attributes:
        draft: the draft that waits.
        accepted: its plan.
        files: the files that would leave.
        numbers: the numbers of the document, beside those of the submission before it.
        noises: the noises of each statistic.
        budget: what the ledger says was spent, and is left.
        audit: the leak audit's report; None where it cannot be read.
        previous: earlier submissions of this site, newest first.
        decisions: the last decisions about this site, newest first: time, user, words.
        curves: the learning curves of the experts, which stay here.
    """

    draft: Submission
    accepted: AcceptedPlan
    files: tuple[OutgoingFile, ...]
    numbers: tuple[DocumentValue, ...]
    noises: tuple[StatisticNoise, ...]
    budget: Account
    audit: AuditReport | None
    previous: tuple[Submission, ...]
    decisions: tuple[tuple[str, str, str], ...]
    curves: tuple[ExpertCurve, ...]

    @property
    def plan(self) -> Plan:
        """The draft's plan."""
        return self.accepted.plan

    @property
    def rehearsal(self) -> str:
        """What a person must know where the plan is a rehearsal; else empty."""
        return f"{REHEARSAL} {_REHEARSAL_COST}" if self.plan.rehearsal else ""


def read_review_facts(site: Site) -> ReviewFacts:
    """Read the draft that waits and all that belongs to it, and check that its files have the digests that it lists.

    Raises:
        ApprovalError: a file is not the one that the draft lists.
        LedgerError, DecisionLogError: the ledger or the log of decisions is damaged.
        DigestError: the site's copy of the plan has changed.
    """
    draft = load_draft(site)
    state = load_state(state_path(site.private))
    accepted = load_accepted(site, draft.plan_id, state.plan_digest or "")
    previous = _previous_submissions(site, draft)
    report = None
    # The draft states the verdict; the report only adds how it came about.
    with suppress(ArchipelagoError):
        report = read_report(open_workspace(site, draft.plan_id).audit_path)
    decisions = describe_decisions(DecisionLog(site).entries)
    newest_first = decisions[::-1]
    return ReviewFacts(
        draft=draft,
        accepted=accepted,
        files=tuple(_outgoing_files(site, draft)),
        numbers=tuple(_document_values(draft, previous[0] if previous else None)),
        noises=tuple(_statistic_noises(accepted.plan)),
        budget=account(open_ledger(site, site.policy())),
        audit=report,
        previous=tuple(previous),
        decisions=tuple(newest_first[:MAX_DECISIONS]),
        curves=read_curves(site, draft.plan_id),
    )


def _outgoing_files(site: Site, draft: Submission) -> Iterator[OutgoingFile]:
    """Yield the files in the order in which they are shown: the document, the experts, the statistics."""
    folder = review_folder(site)
    yield OutgoingFile(
        path=submission_path(draft.silo_id),
        local=folder / DRAFT,
        bytes=len(draft.encode()),
        digest=draft.digest,
        description="the document below; the approval and its time are added to it",
        privacy="see each number",
    )
    for expert in draft.experts:
        description = f"weights of expert {expert.expert_id}"
        yield _tensor_file(folder, expert.file, description, _weights(expert.privacy))
    for statistic in draft.statistics:
        cost = _cost(statistic.epsilon, statistic.delta)
        yield _tensor_file(folder, statistic.file, f"statistic {statistic.kind}", cost)


def _tensor_file(
    folder: Path,
    file: File,
    description: str,
    privacy: str,
) -> OutgoingFile:
    """Describe a file that the draft lists, whose bytes must be those that it lists.

    Raises:
        ApprovalError: they are not, or the file is gone.
    """
    local = folder / file.path
    # The approval signs the draft, which names files by their digests. A person must not inspect other bytes than
    # these.
    actual = "no file"
    if local.is_file():
        actual = f"sha256 {sha256_file(local)}"
    if actual != f"sha256 {file.digest}":
        raise ApprovalError(
            file.path,
            expected=f"the draft's, sha256 {file.digest}",
            got=actual,
            remedy="Restore private/ from backup, or give the plan up: `silo withdraw SITE`.",
        )
    return OutgoingFile(
        path=file.path,
        local=local,
        bytes=file.bytes,
        digest=file.digest,
        description=description,
        privacy=privacy,
    )


def _weights(privacy: NoWeightPrivacy | DpSgdPrivacy) -> str:
    if isinstance(privacy, DpSgdPrivacy):
        return f"trained privately: {privacy}"
    return f"{NO_DP}: they may memorise single images"


def _cost(epsilon: float, delta: float) -> str:
    return f"epsilon {epsilon:g}, delta {delta:g}"


def _document_values(draft: Submission, before: Submission | None) -> Iterator[DocumentValue]:
    """Yield every value of the document, beside that of the submission before it."""
    values = dict(_values(draft))
    values_before = dict(_values(before)) if before is not None else {}
    for name, (value, privacy) in values.items():
        value_before = None
        if before is not None:
            value_before, _ = values_before.get(name, (_ABSENT, ""))
        yield DocumentValue(name, value, value_before, privacy)
    # A value that is gone is a change too, such as an expert that this draft no longer has.
    for name in values_before.keys() - values.keys():
        value_before, privacy = values_before[name]
        yield DocumentValue(name, _ABSENT, value_before, privacy)


def _values(document: Submission) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield each value's name, the value, and what it says about images.

    Whatever a document states must be here: a person approves what this list shows.
    """
    spent = document.spent
    yield "plan", (document.plan_id, _PUBLIC)
    yield "plan, sha256", (document.plan_digest, _PUBLIC)
    yield "submission", (str(document.sequence), _PUBLIC)
    drafted_at = f"{document.created_at:%Y-%m-%d %H:%M:%S}Z"
    yield "drafted at", (drafted_at, "tells when the training ended")
    yield f"number of {spent.unit}s", (str(document.num_units), f"{NO_DP}: exact")
    covered = "all statistics"
    if _trained_privately(document):
        covered = "weights and statistics"
    epsilon = f"{spent.epsilon:g} per {spent.unit}, {spent.relation}"
    # The plan fixes what statistics cost, and the ledger debits that much: epsilon and delta depend on no image.
    yield f"epsilon, {covered}", (epsilon, _OF_PLAN)
    yield f"delta, {covered}", (f"{spent.delta:g}", _OF_PLAN)
    for expert in document.experts:
        yield from _expert_values(expert)
    for statistic in document.statistics:
        cost = _cost(statistic.epsilon, statistic.delta)
        yield f"statistic {statistic.kind}", (cost, _OF_PLAN)
    yield from _audit_values(document)
    ledger = document.ledger
    records = f"{ledger.num_entries} records, head {ledger.head_digest[:16]}"
    yield "ledger", (records, "a digest of each")
    yield "isolation", (document.isolation, _PUBLIC)
    carry_over = "may carry it over" if document.carry_over else "may not carry it over"
    yield "later plans", (carry_over, _PUBLIC)
    base = "may start from its experts" if document.serve_as_base else "may not start from them"
    yield "as a base", (f"later plans {base}", _PUBLIC)
    for name, version in sorted(document.software.items()):
        yield f"software {name}", (version, _PUBLIC)


def _expert_values(expert: SubmittedExpert) -> Iterator[tuple[str, tuple[str, str]]]:
    name = f"expert {expert.expert_id}: "
    if expert.cluster is not None:
        yield f"{name}cluster", (str(expert.cluster), "by the noised counts")
    if expert.num_images is not None:
        yield f"{name}images", (str(expert.num_images), f"{NO_DP}: exact")
    yield f"{name}steps", (str(expert.steps), _OF_PLAN)
    if expert.training.seconds is not None:
        yield f"{name}seconds", (f"{expert.training.seconds:.6g}", NO_DP)
    yield f"{name}operations", (f"{expert.training.flops:.6g}", _OF_PLAN)
    yield f"{name}bytes", (str(expert.file.bytes), _OF_PLAN)


def _audit_values(document: Submission) -> Iterator[tuple[str, tuple[str, str]]]:
    audit = document.audit
    verdict: str = audit.verdict
    if audit.waiver is not None:
        verdict += f" by {audit.waiver.role}: {audit.waiver.reason}"
    # Of privately trained experts no verdict leaves, since it depends on the images beyond their epsilon (ADR 0059).
    if audit.digest is None:
        yield "leak audit", (verdict, _OF_PLAN)
    else:
        yield "leak audit", (verdict, "published")
        yield "audit report, sha256", (audit.digest, "a digest")


def _trained_privately(document: Submission) -> bool:
    return any(isinstance(expert.privacy, DpSgdPrivacy) for expert in document.experts)


def _statistic_noises(plan: Plan) -> Iterator[StatisticNoise]:
    """Yield how much noise each statistic of a plan contains."""
    for statistic in statistics_of(plan.statistics).values():
        terms = plan.statistics.terms[statistic.kind]
        yield StatisticNoise(statistic.kind, terms.epsilon, terms.delta, statistic.noise_in_words())


def _previous_submissions(site: Site, draft: Submission) -> list[Submission]:
    """Read the submissions that were approved before, newest first; one that cannot be read is left out."""
    # The outbox keeps each plan's submissions by number, also those that were refused or withdrawn.
    submissions: list[Submission] = []
    for path in site.outbox.glob(f"*/*/{submission_path(draft.silo_id)}"):
        try:
            data = read_bounded(path, MAX_DOCUMENT_BYTES)
            submission = Submission.parse(data, subject="submission.json")
        except (ArchipelagoError, OSError):
            continue
        is_this_one = (submission.plan_id, submission.sequence) == (draft.plan_id, draft.sequence)
        if not is_this_one:
            submissions.append(submission)
    submissions.sort(key=lambda submission: submission.created_at, reverse=True)
    return submissions[:MAX_PREVIOUS]
