"""Gathers what a person must know before a submission leaves: its files, its numbers, their cost, and what is new."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddm.errors import ApprovalError, ArchipelagoError
from ddm.io.files import read_bounded
from ddm.protocol.base import MAX_DOCUMENT_BYTES, sha256_file
from ddm.protocol.plan import Plan
from ddm.protocol.submission import Submission, submission_path
from ddm.protocol.weight_privacy import DpSgdPrivacy, NoWeightPrivacy
from ddm.statistics.of_plan import statistics_of
from silo.audit.document import AuditReport, read_report
from silo.config import Site
from silo.decisions import DecisionLog, describe_decisions
from silo.plan.acceptance import AcceptedPlan, load_accepted
from silo.plan.workspace import open_workspace
from silo.privacy.account import Account, account
from silo.worker.approval import load_draft, review_folder
from silo.worker.stages import open_ledger
from silo.worker.state import load_state, state_path

MOST_PREVIOUS, MOST_DECISIONS = 5, 12
DRAFT = "draft.json"
NO_DP = "no differential privacy"
REHEARSAL = (
    "This plan only tries the federation out: its experts draw noise, and nothing of it should be published. Weights "
    "and statistics leave all the same, and what they cost is spent."
)


@dataclass(frozen=True)
class Leaving:
    """One file that would leave.

    Attributes:
        path: as it is called in the outbox.
        local: where its bytes lie now.
        bytes: its length.
        digest: sha256.
        what: it is, in words.
        privacy: what protects the images in it.
    """

    path: str
    local: Path
    bytes: int
    digest: str
    what: str
    privacy: str


@dataclass(frozen=True)
class Number:
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
class Noise:
    """How much noise a statistic holds, in words."""

    kind: str
    epsilon: float
    delta: float
    level: str


@dataclass(frozen=True)
class Facts:
    """Everything that `silo review` shows.

    Attributes:
        draft: that waits.
        accepted: its plan.
        files: that would leave.
        numbers: of the document, beside those of the submission before it.
        noises: of each statistic.
        budget: what the ledger says was spent, and is left.
        audit: the leak audit's report; None where it cannot be read.
        previous: earlier submissions of this site, newest first.
        decisions: the last decisions about this site, newest first: time, user, words.
    """

    draft: Submission
    accepted: AcceptedPlan
    files: tuple[Leaving, ...]
    numbers: tuple[Number, ...]
    noises: tuple[Noise, ...]
    budget: Account
    audit: AuditReport | None
    previous: tuple[Submission, ...]
    decisions: tuple[tuple[str, str, str], ...]

    @property
    def plan(self) -> Plan:
        """The draft's plan."""
        return self.accepted.plan

    @property
    def rehearsal(self) -> str:
        """What a person must know where the plan is a rehearsal; else empty."""
        return REHEARSAL if self.plan.rehearsal else ""


def gather(site: Site) -> Facts:
    """Read the draft that waits and all that belongs to it, and check that its files have the digests that it lists.

    Raises:
        ApprovalError: a file is not the one that the draft lists.
        LedgerError, DecisionLogError: the ledger or the log of decisions is damaged.
        DigestError: the site's copy of the plan has changed.
    """
    draft, state = load_draft(site), load_state(state_path(site.private))
    accepted = load_accepted(site, draft.plan_id, state.plan_digest or "")
    previous = tuple(_previous(site, draft))
    report = None
    with suppress(ArchipelagoError):  # the verdict stands in the draft
        report = read_report(open_workspace(site, draft.plan_id).audit_path)
    decisions = describe_decisions(DecisionLog(site).entries)[: -MOST_DECISIONS - 1 : -1]
    return Facts(
        draft=draft,
        accepted=accepted,
        files=tuple(_files(site, draft)),
        numbers=tuple(_numbers(draft, previous[0] if previous else None)),
        noises=tuple(_noises(accepted.plan)),
        budget=account(open_ledger(site, site.policy())),
        audit=report,
        previous=previous,
        decisions=tuple(decisions),
    )


def _files(site: Site, draft: Submission) -> Iterator[Leaving]:
    folder = review_folder(site)
    data = draft.encode()
    path = submission_path(draft.silo_id)
    what = "the document below; the approval and its time are added to it"
    yield Leaving(path, folder / DRAFT, len(data), draft.digest, what, "see each number")
    listed = [
        (each.file, f"weights of expert {each.expert_id}", _weights(each.privacy))
        for each in draft.experts
    ]
    listed += [
        (each.file, f"statistic {each.kind}", _cost(each.epsilon, each.delta))
        for each in draft.statistics
    ]
    for file, what, privacy in listed:
        local = folder / file.path
        if not local.is_file() or (found := sha256_file(local)) != file.digest:
            got = f"sha256 {found}" if local.is_file() else "no file"
            remedy = "Restore private/ from backup, or give the plan up: silo withdraw."
            raise ApprovalError(
                file.path, expected=f"the draft's, sha256 {file.digest}", got=got, remedy=remedy
            )
        yield Leaving(file.path, local, file.bytes, file.digest, what, privacy)


def _weights(privacy: NoWeightPrivacy | DpSgdPrivacy) -> str:
    if isinstance(privacy, DpSgdPrivacy):
        return f"trained privately: {privacy}"
    return f"{NO_DP}: they may memorise single images"


def _cost(epsilon: float, delta: float) -> str:
    return f"epsilon {epsilon:g}, delta {delta:g}"


def _numbers(draft: Submission, before: Submission | None) -> Iterator[Number]:
    """Yield every number of the document, and the word or number that stood there before."""
    now, then = dict(_values(draft)), dict(_values(before)) if before else {}
    for name, (value, privacy) in now.items():
        yield Number(name, value, then.get(name, ("(none)", ""))[0] if before else None, privacy)
    for name in then.keys() - now.keys():
        yield Number(name, "(none)", then[name][0], then[name][1])


def _values(document: Submission) -> Iterator[tuple[str, tuple[str, str]]]:
    public, spent = "public", document.spent
    yield "plan", (document.plan_id, public)
    yield "plan, sha256", (document.plan_digest, public)
    yield "submission", (str(document.sequence), public)
    yield (
        "drafted at",
        (f"{document.created_at:%Y-%m-%d %H:%M:%S}Z", "tells when the training ended"),
    )
    yield f"number of {spent.unit}s", (str(document.num_units), f"{NO_DP}: exact")
    yield (
        "epsilon, weights and statistics" if _private(document) else "epsilon, all statistics",
        (f"{spent.epsilon:g} per {spent.unit}, {spent.relation}", "the plan's"),
    )
    yield (
        "delta, weights and statistics" if _private(document) else "delta, all statistics",
        (f"{spent.delta:g}", "the plan's"),
    )
    for expert in document.experts:
        name = f"expert {expert.expert_id}: "
        if expert.cluster is not None:
            yield f"{name}cluster", (str(expert.cluster), "by the noised counts")
        if expert.num_images is not None:
            yield f"{name}images", (str(expert.num_images), f"{NO_DP}: exact")
        yield f"{name}steps", (str(expert.steps), "the plan's")
        if expert.training.seconds is not None:
            yield f"{name}seconds", (f"{expert.training.seconds:.6g}", NO_DP)
        yield f"{name}operations", (f"{expert.training.flops:.6g}", "the plan's")
        yield f"{name}bytes", (str(expert.file.bytes), "the plan's")
    for each in document.statistics:
        yield f"statistic {each.kind}", (_cost(each.epsilon, each.delta), "the plan's")
    waiver = document.audit.waiver
    words = f" by {waiver.role}: {waiver.reason}" if waiver else ""
    yield (
        "leak audit",
        (document.audit.verdict + words, "published" if document.audit.digest else "the plan's"),
    )
    if document.audit.digest:
        yield "audit report, sha256", (document.audit.digest, "a digest")
    yield (
        "ledger",
        (
            f"{document.ledger.num_entries} records, head {document.ledger.head_digest[:16]}",
            "a digest of each",
        ),
    )
    yield "isolation", (document.isolation, public)
    yield (
        "later plans",
        ("may carry it over" if document.carry_over else "may not carry it over", public),
    )
    for name, version in sorted(document.software.items()):
        yield f"software {name}", (version, public)


def _private(document: Submission) -> bool:
    return any(isinstance(expert.privacy, DpSgdPrivacy) for expert in document.experts)


def _noises(plan: Plan) -> Iterator[Noise]:
    """Yield how much noise each statistic of a plan contains."""
    for statistic in statistics_of(plan.statistics).values():
        terms = plan.statistics.terms[statistic.kind]
        yield Noise(statistic.kind, terms.epsilon, terms.delta, statistic.noise_in_words())


def _previous(site: Site, draft: Submission) -> Sequence[Submission]:
    """Read the submissions that were approved before, newest first; one that cannot be read is left out."""
    found: list[Submission] = []
    for path in site.outbox.glob(f"*/*/{submission_path(draft.silo_id)}"):
        try:
            each = Submission.parse(
                read_bounded(path, MAX_DOCUMENT_BYTES), subject="submission.json"
            )
        except (ArchipelagoError, OSError):
            continue
        if (each.plan_id, each.sequence) != (draft.plan_id, draft.sequence):
            found.append(each)
    return sorted(found, key=lambda each: each.created_at, reverse=True)[:MOST_PREVIOUS]
