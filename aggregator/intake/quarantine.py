"""Keeps submissions that screening flagged until a person decides, and records the decisions.

    quarantine/<plan_id>/<silo_id>/<sequence>/reason.json   the reasons and the figures
    quarantine/<plan_id>/<silo_id>/<sequence>/submission/   the verified copy; its presence marks the quarantine
    decisions.jsonl                                         who was admitted or refused, and why; append-only

A decision is one line, carried out the next time that intake runs: so a decision is never half done.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from aggregator.config import Federation
from ddm.errors import SetupError
from ddm.io.files import move_into_place, read_bounded, write_atomic
from ddm.io.locks import locked
from ddm.protocol.base import Digest, Document, PlanId, PositiveInt, SiloId, Time
from ddm.protocol.manifest import ReasonText, ScreeningRule

MAX_DECISIONS_BYTES = 16 << 20
MAX_REASON_BYTES = 1 << 20
MAX_REASONS = 50

QuarantineVerdict = Literal["admitted", "refused"]
Rule = ScreeningRule | Literal["units", "influence"]
"""What a submission may be admitted in spite of: a rule of screening, more units than agreed, too much of the prior."""


class QuarantineRecord(Document):
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
    verdict: QuarantineVerdict
    units: PositiveInt | None = None
    shown: tuple[Rule, ...] | None = None
    reason: ReasonText
    at: Time


@dataclass(frozen=True)
class QuarantineEntry:
    """One submission in quarantine.

    Attributes:
        folder: holds the record and the verified copy.
        record: why it is there.
    """

    folder: Path
    record: QuarantineRecord

    @property
    def submission_folder(self) -> Path:
        """The verified copy; moved away once its acceptance begins."""
        return self.folder / "submission"


def quarantine_submission(federation: Federation, record: QuarantineRecord, verified: Path) -> None:
    """Move a verified submission into quarantine; the rename decides."""
    folder = federation.quarantine / record.plan_id / record.silo_id / str(record.sequence)
    write_atomic(folder / "reason.json", record.encode())
    move_into_place(verified, folder / "submission")


def quarantined_submissions(federation: Federation, plan_id: str) -> list[QuarantineEntry]:
    """List the submissions in quarantine, by silo and sequence; a half-finished move does not count."""
    decided = {decision.submission_digest for decision in read_decisions(federation)}
    entries = []
    for path in (federation.quarantine / plan_id).glob("*/[0-9]*/reason.json"):
        data = read_bounded(path, MAX_REASON_BYTES)
        record = QuarantineRecord.parse(data, subject="reason.json")
        entry = QuarantineEntry(path.parent, record)
        # Without its copy, a submission is half moved, or accepted by a decision that is being carried out.
        if entry.submission_folder.is_dir() or record.submission_digest in decided:
            entries.append(entry)
    return sorted(entries, key=lambda entry: (entry.record.silo_id, entry.record.sequence))


def read_decisions(federation: Federation) -> list[QuarantineDecision]:
    """Read every decision, oldest first."""
    if not federation.decisions.exists():
        return []
    lines = read_bounded(federation.decisions, MAX_DECISIONS_BYTES).splitlines()
    return [
        QuarantineDecision.parse(line, subject=f"decisions.jsonl, line {number}")
        for number, line in enumerate(lines, 1)
    ]


def decisions_on(federation: Federation, submission_digest: str) -> list[QuarantineDecision]:
    """Read all decisions about a submission, oldest first: the first one gave the verdict."""
    return [
        decision
        for decision in read_decisions(federation)
        if decision.submission_digest == submission_digest
    ]


def refused_before(federation: Federation, plan_id: str, silo_id: str) -> bool:
    """Whether a person refused a submission of this silo for this plan that screening had flagged."""
    return any(
        decision.plan_id == plan_id
        and decision.silo_id == silo_id
        and decision.verdict == "refused"
        for decision in read_decisions(federation)
    )


def is_admitted(decisions: Iterable[QuarantineDecision], rule: Rule | None = None) -> bool:
    """Whether a person admitted a submission in spite of a rule, or of any.

    Args:
        decisions: all decisions about the submission, see `decisions_on`.
        rule: the rule; None for any.
    """
    admissions = [decision for decision in decisions if decision.verdict == "admitted"]
    return any(_covers(admission, rule) for admission in admissions)


def _covers(decision: QuarantineDecision, rule: Rule | None) -> bool:
    """Whether an admission holds in spite of this rule; with None, in spite of any rule."""
    if decision.shown is None:
        return True
    if rule is None:
        return bool(decision.shown)
    return rule in decision.shown


def record_decision(federation: Federation, decision: QuarantineDecision) -> None:
    """Add a decision to the record. A second one may lower an admitted submission's units, or cover a further rule.

    Raises:
        SetupError: this submission was decided on before.
        BusyError: another decision is being written.
    """
    with locked(federation.path, "decisions"):
        earlier = decisions_on(federation, decision.submission_digest)
        if earlier and not _may_follow(decision, earlier):
            first = earlier[0]
            raise SetupError(
                f"submission of {decision.silo_id}",
                expected="no decision yet",
                got=f"{first.verdict} at {first.at.isoformat()}",
                remedy=(
                    "It is final; only --units may be lowered. To take a silo out: `aggregator withdraw FED "
                    "SILO --reason TEXT`."
                ),
            )
        # The whole file is written again, and takes the place of the old one in one step: a crash leaves no half line.
        lines = b""
        if federation.decisions.exists():
            lines = read_bounded(federation.decisions, MAX_DECISIONS_BYTES)
        # ASCII alone: whatever a reason holds, a decision is one line of the file.
        line = json.dumps(json.loads(decision.encode()), ensure_ascii=True).encode()
        write_atomic(federation.decisions, lines + line + b"\n")


def _may_follow(decision: QuarantineDecision, earlier: Sequence[QuarantineDecision]) -> bool:
    """Whether a decision lowers the units of a submission admitted before, or admits it in spite of a further rule."""
    if decision.verdict != "admitted" or decision.units is None:
        return False
    # The silo has the refusal in its hands, signed; nothing may contradict it.
    if any(other.verdict != "admitted" for other in earlier):
        return False
    earlier_units = [other.units for other in earlier if other.units is not None]
    if all(decision.units < units for units in earlier_units):
        return True
    if any(other.shown is None for other in earlier):
        # Every rule was covered before.
        return False
    covered_rules = {rule for other in earlier for rule in other.shown or ()}
    new_rules = set(decision.shown or ()) - covered_rules
    return bool(new_rules) and all(decision.units <= units for units in earlier_units)
