"""Keeps submissions that screening flagged until a person decides, and records the decisions.

    quarantine/<plan_id>/<silo_id>/<sequence>/reason.json   the reasons and the figures
    quarantine/<plan_id>/<silo_id>/<sequence>/submission/   the verified copy; its presence marks the quarantine
    decisions.jsonl                                         who was admitted or refused, and why; append-only

A decision is one line, carried out the next time that intake runs: so a decision is never half done.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from aggregator.config import Federation
from ddm.errors import SetupError
from ddm.io.files import move_into_place, read_bounded, write_atomic
from ddm.io.locks import locked
from ddm.protocol.base import Digest, Document, PlanId, PositiveInt, SiloId, Time
from ddm.protocol.manifest import Flag, ReasonText

MAX_DECISIONS_BYTES = 16 << 20
MAX_REASON_BYTES = 1 << 20
MAX_REASONS = 50

Verdict = Literal["admitted", "refused"]
Rule = Flag | Literal["units", "influence"]
"""What a submission may be admitted in spite of: a rule of screening, more units than agreed, too much of the prior."""


class QuarantineReason(Document):
    """The reasons for which a submission is in quarantine.

    `num_units` is what the silo states; `figures` holds each expert's loss, by band of t, relative to the loss of
    answering 0.
    """

    format: Literal["archipelago/quarantine/1"] = "archipelago/quarantine/1"
    plan_id: PlanId
    silo_id: SiloId
    sequence: PositiveInt
    submission_digest: Digest
    num_units: PositiveInt
    reasons: Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_REASONS + 1)]
    figures: Mapping[str, tuple[float, ...]]
    at: Time


class QuarantineDecision(Document):
    """A person's decision about one submission; `units`, where it is admitted, is the most that its prior counts.

    An admission covers the rules that were `shown` and no others; none where it only lowers the units. One
    without `shown` (the record of the rules was gone) covers all.
    """

    format: Literal["archipelago/decision/1"] = "archipelago/decision/1"
    plan_id: PlanId
    silo_id: SiloId
    submission_digest: Digest
    verdict: Verdict
    units: PositiveInt | None = None
    shown: tuple[Rule, ...] | None = None
    reason: ReasonText
    at: Time


@dataclass(frozen=True)
class QuarantineEntry:
    """One submission in quarantine."""

    folder: Path
    why: QuarantineReason

    @property
    def submission(self) -> Path:
        """The verified copy; moved away once its acceptance begins."""
        return self.folder / "submission"


def quarantine_submission(federation: Federation, why: QuarantineReason, verified: Path) -> None:
    """Move a verified submission into quarantine; the rename decides."""
    folder = federation.quarantine / why.plan_id / why.silo_id / str(why.sequence)
    write_atomic(folder / "reason.json", why.encode())
    move_into_place(verified, folder / "submission")


def quarantined_submissions(federation: Federation, plan_id: str) -> list[QuarantineEntry]:
    """List the submissions in quarantine, by silo and sequence; a half-finished move does not count."""
    decided = {decision.submission_digest for decision in read_decisions(federation)}
    paths = (federation.quarantine / plan_id).glob("*/[0-9]*/reason.json")
    found = [
        QuarantineEntry(
            path.parent,
            QuarantineReason.parse(read_bounded(path, MAX_REASON_BYTES), subject="reason.json"),
        )
        for path in paths
    ]
    whole = [
        each for each in found if each.submission.is_dir() or each.why.submission_digest in decided
    ]
    return sorted(whole, key=lambda each: (each.why.silo_id, each.why.sequence))


def read_decisions(federation: Federation) -> list[QuarantineDecision]:
    """Read every decision, oldest first."""
    if not federation.decisions.exists():
        return []
    lines = read_bounded(federation.decisions, MAX_DECISIONS_BYTES).splitlines()
    return [
        QuarantineDecision.parse(line, subject=f"decisions.jsonl, line {n}")
        for n, line in enumerate(lines, 1)
    ]


def decision_on(federation: Federation, submission_digest: str) -> QuarantineDecision | None:
    """Return the decision about a submission, None if there is none; the first decision stands."""
    return next(
        (
            each
            for each in read_decisions(federation)
            if each.submission_digest == submission_digest
        ),
        None,
    )


def refused_before(federation: Federation, plan_id: str, silo_id: str) -> bool:
    """Whether a person refused a submission of this silo for this plan that screening had flagged."""
    return any(
        (each.plan_id, each.silo_id, each.verdict) == (plan_id, silo_id, "refused")
        for each in read_decisions(federation)
    )


def is_admitted(federation: Federation, submission_digest: str, rule: Rule | None = None) -> bool:
    """Whether a person admitted a submission in spite of a rule, or of any."""
    about = [
        each for each in read_decisions(federation) if each.submission_digest == submission_digest
    ]
    shown = [each.shown for each in about if each.verdict == "admitted"]
    return any(rules is None or (rule in rules if rule else bool(rules)) for rules in shown)


def record_decision(federation: Federation, decision: QuarantineDecision) -> None:
    """Add a decision to the record. A second one may lower an admitted submission's units, or cover a further rule.

    Raises:
        SetupError: this submission was decided on before.
        BusyError: another decision is being written.
    """
    with locked(federation.path, "decisions"):
        about = [
            each
            for each in read_decisions(federation)
            if each.submission_digest == decision.submission_digest
        ]
        if about and not _goes_on(decision, about):
            earlier = about[0]
            got = f"{earlier.verdict} at {earlier.at.isoformat()}"
            remedy = (
                "It stands; only --units may be lowered. To take a silo out: aggregator withdraw."
            )
            subject = f"submission of {decision.silo_id}"
            raise SetupError(subject, expected="no decision yet", got=got, remedy=remedy)
        old = (
            read_bounded(federation.decisions, MAX_DECISIONS_BYTES)
            if federation.decisions.exists()
            else b""
        )
        line = json.dumps(json.loads(decision.encode()), ensure_ascii=True).encode()
        write_atomic(federation.decisions, old + line + b"\n")


def _goes_on(decision: QuarantineDecision, earlier: Sequence[QuarantineDecision]) -> bool:
    """Whether a decision lowers the units of a submission admitted before, or admits it in spite of a further rule."""
    if {decision.verdict, *(each.verdict for each in earlier)} != {
        "admitted"
    } or decision.units is None:
        return False
    if all(each.units is None or decision.units < each.units for each in earlier):
        return True
    covered = {rule for each in earlier for rule in each.shown or ()}
    further = set(decision.shown or ()) - covered and all(
        each.shown is not None for each in earlier
    )
    return bool(further) and all(
        each.units is None or decision.units <= each.units for each in earlier
    )
