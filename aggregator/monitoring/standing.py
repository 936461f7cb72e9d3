"""What the aggregator knows about a silo, and whether, where and how a person must act: rules without I/O.

The silo's own words for the same states are in `silo.worker.descriptions`, and a test compares the two.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from ddm.protocol.base import LocalText, Model, NaturalInt, PositiveInt, Time

Departure = Literal["removed", "withdrawn", "carried"]
SiloStanding = Literal[
    "absent",
    "offered",
    "working",
    "approval",
    "blocked",
    "declined",
    "leaving",
    "sending",
    "silent",
    "arrived",
    "quarantined",
    "refused",
    "accepted",
    "unnamed",
    Departure,
]
SubmissionVerdict = Literal[
    "arrived", "quarantined", "accepted", "refused", "withdrawn", "unreadable"
]
Person = Literal["nobody", "silo", "aggregator"]
"""Who must act before the work continues: nobody, a person at the silo, or one at the aggregator."""
Tone = Literal["ok", "busy", "idle", "warn", "bad"]


@dataclass(frozen=True)
class StandingWords:
    """A standing in words.

    Attributes:
        label: the standing.
        tone: the colour of that label.
        person: who must act.
        step: what that person does; empty where nobody must act.
    """

    label: str
    tone: Tone
    person: Person = "nobody"
    step: str = ""


# In the order of the lists: first what this operator decides, then what other people must do, then what is in progress.
STANDINGS: Mapping[SiloStanding, StandingWords] = {
    "quarantined": StandingWords(
        "quarantined: decision needed",
        "warn",
        "aggregator",
        "aggregator quarantine shows why; then aggregator admit or aggregator refuse",
    ),
    "refused": StandingWords(
        "refused",
        "bad",
        "silo",
        "its operator decides whether to send another one, see `silo status` there",
    ),
    "blocked": StandingWords(
        "needs a person there",
        "warn",
        "silo",
        "ask its operator, whose `silo status` says what to do",
    ),
    "declined": StandingWords(
        "refused the plan",
        "warn",
        "silo",
        "ask its operator, whose `silo status` says why",
    ),
    "silent": StandingWords(
        "not responding",
        "warn",
        "silo",
        "ask its operator whether `silo run` is running there",
    ),
    "absent": StandingWords(
        "not seen yet",
        "idle",
        "silo",
        "ask its operator whether `silo run` is running there",
    ),
    "approval": StandingWords(
        "awaiting approval",
        "idle",
        "silo",
        "its operator looks at the draft with `silo review` and approves it",
    ),
    "leaving": StandingWords("gave the plan up", "warn"),
    "sending": StandingWords("sending", "busy"),
    "arrived": StandingWords("being verified", "busy"),
    "working": StandingWords("working", "busy"),
    "offered": StandingWords("has not taken the plan yet", "idle"),
    "unnamed": StandingWords("enrolled, not named by this plan", "idle"),
    "accepted": StandingWords("accepted", "ok"),
    "carried": StandingWords("carried over from an earlier plan", "ok"),
    "withdrawn": StandingWords("withdrawn from this plan", "idle"),
    "removed": StandingWords("removed from the federation", "idle"),
}


class Arrival(Model):
    """A submission on its way.

    Attributes:
        sequence: its number.
        bytes_here: bytes of it on disk.
        bytes_total: bytes that the silo announced.
        bytes_per_s: since an earlier reading, else since its first file.
    """

    sequence: PositiveInt
    bytes_here: NaturalInt
    bytes_total: NaturalInt
    bytes_per_s: Annotated[float, Field(ge=0.0)]


class SubmissionStatus(Model):
    """One submission and its answer, from the signed receipt where there is one."""

    sequence: PositiveInt
    verdict: SubmissionVerdict
    code: NaturalInt | None = None
    reasons: tuple[LocalText, ...] = ()
    at: Time | None = None
    delivered: bool = False


@dataclass(frozen=True)
class SiloReport:
    """What a silo reported last, as far as it can be read.

    Attributes:
        state: the state of its work; empty where it reported none.
        progress: the progress of the training, in percent.
        sequence: the sequence of the submission that it is at; 0 where it reported none.
        code: 0 while its work continues, else the exit code of what a person there must remove.
    """

    state: str = ""
    progress: int = 0
    sequence: int = 0
    code: int = 0


def decide_standing(
    submissions: tuple[SubmissionStatus, ...],
    arrival: Arrival | None,
    report: SiloReport,
    *,
    answered: bool,
    silent: bool,
) -> SiloStanding:
    """Return a silo's standing: first what needs a person, then what is going on, then what is over.

    Args:
        submissions: those that arrived.
        arrival: the one on its way.
        report: the silo's last.
        answered: whether it ever answered.
        silent: whether it did not answer lately.
    """
    last = submissions[-1].verdict if submissions else None
    # These are over, whatever the silo reports: its report may be older than the receipt.
    if last in ("accepted", "withdrawn"):
        return last
    # The courier's word, which changes nothing: intake acts on the leave that the silo signed (docs/adr/0043).
    if report.state == "withdrawn":
        return "leaving"
    if any(submission.verdict == "quarantined" for submission in submissions):
        return "quarantined"
    if not answered:
        return "absent"
    # After a refusal, a silo that works on its next submission reports a higher number.
    is_refused = last == "refused" and report.sequence <= submissions[-1].sequence
    # A worker that ended says so with its last word, and is silent afterwards.
    if report.code and is_refused:
        return "refused"
    if report.code and report.state != "plan_refused":
        return "blocked"
    # A report of a silo that has been silent since says nothing about now.
    if silent:
        return "silent"
    if arrival is not None:
        return "sending"
    if is_refused:
        return "refused"
    if last == "arrived":
        return "arrived"
    if report.state == "plan_refused":
        return "declined"
    # It answers, and its worker has not reported anything for this plan.
    if report.state in ("", "waiting"):
        return "offered"
    if report.state == "awaiting_approval":
        return "approval"
    return "working"
