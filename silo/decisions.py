"""Who decided what about this site, and when: a log of decisions that only grows, and that nobody edits unseen.

A decision is written before it takes effect. After a crash in between, giving the command again adds no second record,
except of training again, which cannot be told from a second time.
How the file is written, verified and repaired: `ddm.io.chain`.
"""

import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from ddm.errors import DecisionLogError
from ddm.io import chain
from ddm.protocol.base import (
    Digest,
    LocalText,
    Model,
    NaturalInt,
    PlanId,
    PositiveInt,
    ShortText,
    now_utc,
    sha256_hex,
)
from ddm.system.escape import escape_control
from silo.config import Policy, Site

MAX_RECORDS = 16384
_MAX_NAME_CHARACTERS = 64
_MAX_VALUE_CHARACTERS = 120
_NO_VALUE = "(none)"
_LOGIN_USER_ID = Path("/proc/self/loginuid")
_NO_LOGIN = 2**32 - 1  # -1 as the kernel writes it


class PlanAccepted(Model):
    """The worker accepted a plan, since it fits the policy."""

    kind: Literal["plan accepted"] = "plan accepted"
    plan_id: PlanId
    plan_digest: Digest


class SubmissionApproved(Model):
    """A submission was approved, by a person or by the policy."""

    kind: Literal["approved"] = "approved"
    plan_id: PlanId
    sequence: PositiveInt
    submission_digest: Digest
    approval: Literal["person", "policy"]


class PlanWithdrawn(Model):
    """The site gave a plan up."""

    kind: Literal["withdrew"] = "withdrew"
    plan_id: PlanId
    state: ShortText


class RetrainingStarted(Model):
    """The site trains again for a plan, on the images as they are then."""

    kind: Literal["retrained"] = "retrained"
    plan_id: PlanId
    state: ShortText


class WorkPaused(Model):
    """The worker is to stop and to wait."""

    kind: Literal["paused"] = "paused"


class WorkResumed(Model):
    """The worker may continue."""

    kind: Literal["resumed"] = "resumed"


class ImagesReviewed(Model):
    """Flagged images were cleared or left out; `decisions_digest` is that of the file with each decision."""

    kind: Literal["images"] = "images"
    num_waiting: NaturalInt
    num_cleared: NaturalInt
    num_left_out: NaturalInt
    decisions_digest: Digest


class PolicyChanged(Model):
    """The policy is another one than before; `values` are those of its fields, long texts cut."""

    kind: Literal["policy"] = "policy"
    policy_digest: Digest
    values: Annotated[dict[LocalText, LocalText], Field(max_length=64)]


class KeyRotated(Model):
    """The signing key was replaced."""

    kind: Literal["key rotated"] = "key rotated"
    old: Digest
    new: Digest


SiteDecision = (
    PlanAccepted
    | SubmissionApproved
    | PlanWithdrawn
    | RetrainingStarted
    | WorkPaused
    | WorkResumed
    | ImagesReviewed
    | PolicyChanged
    | KeyRotated
)
# Decisions about one subject replace each other: one that repeats the last of its subject is not a new one.
_SUBJECTS = {
    "paused": "pause",
    "resumed": "pause",
    "plan accepted": "plan",
    "approved": "plan",
    "withdrew": "plan",
    "retrained": "plan",
}


class DecisionRecord(chain.ChainRecord):
    """A decision, and who took it: the user of this machine whose process wrote it down."""

    format: Literal["archipelago/decision/1"] = "archipelago/decision/1"
    by: ShortText
    decision: Annotated[SiteDecision, Field(discriminator="kind")]


class DecisionLogHead(chain.ChainHead):
    """The last record of the log and its number, kept beside it."""

    format: Literal["archipelago/decisions-head/1"] = "archipelago/decisions-head/1"


_FORM = chain.ChainFormat(
    name="decision log",
    parse_record=TypeAdapter(DecisionRecord).validate_json,
    head_model=DecisionLogHead,
    # What the first record names in the place of a record before it; the ledger's chain begins with another one.
    genesis=sha256_hex(b"archipelago/decisions/1"),
    max_records=MAX_RECORDS,
    error=DecisionLogError,
)
DecisionEntry = chain.ChainEntry[DecisionRecord]


class DecisionLog:
    """The log of decisions of one site.

    Args:
        site: the site whose private folder holds it.
    """

    def __init__(self, site: Site) -> None:
        self.folder = site.private / "log"
        self._chain = chain.Chain(self.folder / "decisions.jsonl", _FORM, self.folder / "begun")

    def add(self, decision: SiteDecision) -> None:
        """Write a decision down, durably; call it before the decision takes effect.

        One that this user took last about the same subject, such as a pause, is there already; to train again is a new
        decision each time.

        Raises:
            DecisionLogError: the log is damaged or full; the decision must not take effect.
        """
        with self._locked_entries() as entries:
            last = _last_about(entries, decision.kind)
            is_repeated = (
                # The same decision of another person is a record of its own: the log says who took it.
                last is not None and last.by == current_user() and last.decision == decision
            )
            if not is_repeated or isinstance(decision, RetrainingStarted):
                self._append(entries, decision)

    def notice_policy(self, policy: Policy) -> None:
        """Write down that the policy is another one than the log last saw, if it is.

        Raises:
            DecisionLogError: the log is damaged or full.
        """
        digest = sha256_hex(policy.model_dump_json().encode())
        with self._locked_entries() as entries:
            last = _last_about(entries, "policy")
            if last and isinstance(last.decision, PolicyChanged):
                if last.decision.policy_digest == digest:
                    return
            # For people to read; the digest above decides whether the policy is another one.
            values = {name: value[:_MAX_VALUE_CHARACTERS] for name, value in _dotted_fields(policy)}
            self._append(entries, PolicyChanged(policy_digest=digest, values=values))

    def notice_images(self, review: ImagesReviewed) -> None:
        """Write down what was decided about images, unless the log knows it; also what a crash kept from it.

        Raises:
            DecisionLogError: the log is damaged or full.
        """
        with self._locked_entries() as entries:
            last = _last_about(entries, review.kind)
            if last and isinstance(last.decision, ImagesReviewed):
                is_new = last.decision.decisions_digest != review.decisions_digest
            else:
                # A first scan whose flagged images all wait is not a decision yet.
                is_new = review.num_cleared > 0 or review.num_left_out > 0
            if is_new:
                self._append(entries, review)

    @property
    def entries(self) -> tuple[DecisionEntry, ...]:
        """Every decision, oldest first, verified.

        Raises:
            DecisionLogError: the log is damaged.
        """
        with self._locked_entries() as entries:
            return entries

    @property
    def head(self) -> tuple[str, int]:
        """The last record's digest and the number of records."""
        entries = self.entries
        return self._chain.last_digest(entries), len(entries)

    @contextmanager
    def _locked_entries(self) -> Iterator[tuple[DecisionEntry, ...]]:
        self._chain.create()
        with self._chain.locked_entries() as entries:
            yield entries

    def _append(self, entries: tuple[DecisionEntry, ...], decision: SiteDecision) -> None:
        record = DecisionRecord(
            number=len(entries) + 1,
            previous=self._chain.last_digest(entries),
            at=now_utc(),
            by=current_user(),
            decision=decision,
        )
        self._chain.append(record)


def current_user() -> str:
    """Return the user of this process, and the user who logged in, where that is another one and the kernel knows.

    The environment is not asked: anybody who starts the program sets SUDO_USER as they like. The kernel's login user id
    is set when a person logs in, `sudo` and `su` keep it, and only root can change it afterwards (pam_loginuid(8)).
    """
    user_id = os.getuid()
    text = _describe_user(user_id)
    login_id = _login_user_id()
    if login_id is not None and login_id != user_id:
        text += f", logged in as {_describe_user(login_id)}"
    # Names of users may come from a directory that others fill.
    return escape_control(text, one_line=True)


def _describe_user(user_id: int) -> str:
    try:
        name = pwd.getpwuid(user_id).pw_name
    except KeyError:
        return f"uid {user_id}"
    return f"{name[:_MAX_NAME_CHARACTERS]} (uid {user_id})"


def _login_user_id() -> int | None:
    """Return the user id with which somebody logged in; None for a service, or without such a kernel."""
    try:
        login_id = int(_LOGIN_USER_ID.read_text("ascii"))
    except (OSError, ValueError):
        return None
    if login_id == _NO_LOGIN:
        return None
    return login_id


def describe_decisions(entries: tuple[DecisionEntry, ...]) -> list[tuple[str, str, str]]:
    """Return each decision as time, user and words, oldest first."""
    rows: list[tuple[str, str, str]] = []
    policy_values: dict[str, str] = {}
    for entry in entries:
        record = entry.record
        words = _in_words(record.decision, policy_values)
        if isinstance(record.decision, PolicyChanged):
            policy_values = record.decision.values
        rows.append((f"{record.at:%Y-%m-%d %H:%M:%S}Z", record.by, words))
    return rows


def _in_words(decision: SiteDecision, policy_values: dict[str, str]) -> str:
    """Return a decision in words; `policy_values` are those of the policy until then."""
    match decision:
        case PlanAccepted():
            return f"accepted plan {decision.plan_id}"
        case SubmissionApproved():
            submission = f"submission {decision.sequence} of {decision.plan_id}"
            text = f"approved {submission}, {decision.submission_digest[:16]}"
            if decision.approval == "policy":
                text += ", by policy"
            return text
        case PlanWithdrawn():
            return f"gave up plan {decision.plan_id} in state {decision.state}"
        case RetrainingStarted():
            return f"trains again for plan {decision.plan_id}, in state {decision.state}"
        case ImagesReviewed():
            return (
                f"images: {decision.num_cleared} cleared, {decision.num_left_out} left out, "
                f"{decision.num_waiting} wait"
            )
        case PolicyChanged():
            return _policy_change_in_words(policy_values, decision.values)
        case KeyRotated():
            return f"rotated the signing key, {decision.old[:16]} to {decision.new[:16]}"
        case WorkPaused() | WorkResumed():
            return f"{decision.kind} the worker"


def _policy_change_in_words(before: dict[str, str], now: dict[str, str]) -> str:
    if not before:
        return "policy.toml first seen"
    changes = []
    for name in sorted(before.keys() | now.keys()):
        old_value = before.get(name, _NO_VALUE)
        new_value = now.get(name, _NO_VALUE)
        if old_value != new_value:
            changes.append(f"{name} {old_value} to {new_value}")
    if not changes:
        # The digest differs all the same, and the log keeps only the beginning of long texts.
        changes = ["the end of a long text"]
    return f"policy.toml changed: {'; '.join(changes)}"


def _last_about(entries: tuple[DecisionEntry, ...], kind: str) -> DecisionRecord | None:
    """Return the last decision about the same subject as one of this kind."""
    subject = _SUBJECTS.get(kind, kind)
    for entry in reversed(entries):
        entry_kind = entry.record.decision.kind
        if _SUBJECTS.get(entry_kind, entry_kind) == subject:
            return entry.record
    return None


def _dotted_fields(policy: Policy) -> Iterator[tuple[str, str]]:
    """Yield every field that has a value by its dotted name, as text."""
    tables: list[tuple[str, dict[str, object]]] = [
        ("", policy.model_dump(mode="json", exclude_none=True))
    ]
    while tables:
        prefix, table = tables.pop()
        for name, value in table.items():
            if isinstance(value, dict):
                tables.append((f"{prefix}{name}.", value))
            elif isinstance(value, list):
                yield prefix + name, ", ".join(map(str, value))
            else:
                yield prefix + name, str(value)
