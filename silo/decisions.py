"""Who decided what about this site, and when: a log of decisions that only grows, and that nobody edits unseen.

A decision is written before it takes effect. After a crash in between, giving the command again adds no second record,
except of training again, which cannot be told from a second time.
How the file is written, verified and repaired: `ddm.io.chain`.
"""

import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from ddm.errors import DecisionLogError
from ddm.io import chain
from ddm.protocol.base import (
    Digest,
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
_MAX_NAME, _MAX_VALUE = 64, 120
_NOT_THERE = "(none)"


class PlanAccepted(Model):
    """The worker accepted a plan, since it fits the policy."""

    kind: Literal["plan accepted"] = "plan accepted"
    plan_id: PlanId
    plan_digest: Digest


class Approved(Model):
    """A submission was approved, by a person or by the policy."""

    kind: Literal["approved"] = "approved"
    plan_id: PlanId
    sequence: PositiveInt
    submission_digest: Digest
    approval: Literal["person", "policy"]


class Withdrew(Model):
    """The site gave a plan up."""

    kind: Literal["withdrew"] = "withdrew"
    plan_id: PlanId
    state: ShortText


class Retrained(Model):
    """The site trains again for a plan, on the images as they are then."""

    kind: Literal["retrained"] = "retrained"
    plan_id: PlanId
    state: ShortText


class Paused(Model):
    """The worker is to stop and to wait."""

    kind: Literal["paused"] = "paused"


class Resumed(Model):
    """The worker may go on."""

    kind: Literal["resumed"] = "resumed"


class ImagesDecided(Model):
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
    values: Annotated[dict[ShortText, ShortText], Field(max_length=64)]


class KeyRotated(Model):
    """The signing key was replaced."""

    kind: Literal["key rotated"] = "key rotated"
    old: Digest
    new: Digest


Decision = (
    PlanAccepted
    | Approved
    | Withdrew
    | Retrained
    | Paused
    | Resumed
    | ImagesDecided
    | PolicyChanged
    | KeyRotated
)
# Decisions that replace each other: one that repeats the last of its subject is no new one.
_SUBJECTS = {
    **dict.fromkeys(("paused", "resumed"), "pause"),
    **dict.fromkeys(("plan accepted", "approved", "withdrew", "retrained"), "plan"),
}


class Decided(chain.ChainRecord):
    """A decision, and who took it: the user of this machine whose process wrote it down."""

    format: Literal["archipelago/decision/1"] = "archipelago/decision/1"
    by: ShortText
    decision: Annotated[Decision, Field(discriminator="kind")]


class _Head(chain.ChainHead):
    format: Literal["archipelago/decisions-head/1"] = "archipelago/decisions-head/1"


_FORM = chain.ChainFormat(
    name="decision log",
    parse_record=TypeAdapter(Decided).validate_json,
    head_model=_Head,
    genesis=sha256_hex(b"archipelago/decisions/1"),
    max_records=MAX_RECORDS,
    error=DecisionLogError,
)
Entry = chain.ChainEntry[Decided]


class DecisionLog:
    """The log of decisions of one site.

    Args:
        site: whose private folder holds it.
    """

    def __init__(self, site: Site) -> None:
        self.folder = site.private / "log"
        self._chain = chain.Chain(self.folder / "decisions.jsonl", _FORM, self.folder / "begun")

    def add(self, decision: Decision) -> None:
        """Write a decision down, durably; call it before the decision takes effect.

        One that this user took last about the same subject, such as a pause, is there already; to train again is a new
        decision each time.

        Raises:
            DecisionLogError: the log is damaged or full; the decision must not take effect.
        """
        with self._held() as entries:
            by, last = who(), _last_about(entries, decision.kind)
            if (
                isinstance(decision, Retrained)
                or last is None
                or (last.by, last.decision) != (by, decision)
            ):
                self._append(entries, by, decision)

    def notice_policy(self, policy: Policy) -> None:
        """Write down that the policy is another one than the log last saw, if it is.

        Raises:
            DecisionLogError: the log is damaged or full.
        """
        values = _flat(policy)
        digest = sha256_hex(policy.model_dump_json().encode())
        with self._held() as entries:
            last = _last_about(entries, "policy")
            known = (
                last.decision.policy_digest
                if last and isinstance(last.decision, PolicyChanged)
                else None
            )
            if known != digest:
                cut = {name: value[:_MAX_VALUE] for name, value in values.items()}
                self._append(entries, who(), PolicyChanged(policy_digest=digest, values=cut))

    def notice_images(self, decided: ImagesDecided) -> None:
        """Write down what was decided about images, unless the log knows it; also what a crash kept from it.

        Raises:
            DecisionLogError: the log is damaged or full.
        """
        with self._held() as entries:
            last = _last_about(entries, decided.kind)
            known = (
                last.decision.decisions_digest
                if last and isinstance(last.decision, ImagesDecided)
                else None
            )
            if known != decided.decisions_digest and (
                known or decided.num_cleared or decided.num_left_out
            ):
                self._append(entries, who(), decided)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every decision, oldest first, verified.

        Raises:
            DecisionLogError: the log is damaged.
        """
        with self._held() as entries:
            return entries

    @property
    def head(self) -> tuple[str, int]:
        """The last record's digest and the number of records."""
        entries = self.entries
        return self._chain.last_digest(entries), len(entries)

    @contextmanager
    def _held(self) -> Iterator[tuple[Entry, ...]]:
        self._chain.create()
        with self._chain.locked_entries() as entries:
            yield entries

    def _append(self, entries: tuple[Entry, ...], by: str, decision: Decision) -> None:
        previous = self._chain.last_digest(entries)
        self._chain.append(
            Decided(
                number=len(entries) + 1, previous=previous, at=now_utc(), by=by, decision=decision
            )
        )


def who() -> str:
    """Return the user whose process this is, as the machine knows them; with sudo, also who asked for it."""
    uid, asked = os.getuid(), os.environ.get("SUDO_USER", "")
    name = f"uid {uid}"
    with suppress(KeyError):
        name = f"{pwd.getpwuid(uid).pw_name[:_MAX_NAME]} ({name})"
    if asked and asked != "root":
        name += f", asked by {asked[:_MAX_NAME]}"
    return escape_control(name, one_line=True)


def in_words(entries: tuple[Entry, ...]) -> list[tuple[str, str, str]]:
    """Return each decision as time, user and words, oldest first."""
    rows: list[tuple[str, str, str]] = []
    policy: dict[str, str] = {}
    for entry in entries:
        record = entry.record
        match record.decision:
            case PlanAccepted(plan_id=plan_id):
                words = f"accepted plan {plan_id}"
            case Approved() as each:
                by = "" if each.approval == "person" else ", by policy"
                words = f"approved submission {each.sequence} of {each.plan_id}, {each.submission_digest[:16]}{by}"
            case Withdrew(plan_id=plan_id, state=state):
                words = f"gave up plan {plan_id} in state {state}"
            case Retrained(plan_id=plan_id, state=state):
                words = f"trains again for plan {plan_id}, in state {state}"
            case ImagesDecided() as each:
                words = f"images: {each.num_cleared} cleared, {each.num_left_out} left out, {each.num_waiting} wait"
            case PolicyChanged(values=values):
                words, policy = _changes(policy, values), values
            case KeyRotated() as each:
                words = f"rotated the signing key, {each.old[:16]} to {each.new[:16]}"
            case Paused() | Resumed() as each:
                words = f"{each.kind} the worker"
        rows.append((f"{record.at:%Y-%m-%d %H:%M:%S}Z", record.by, words))
    return rows


def _changes(before: dict[str, str], now: dict[str, str]) -> str:
    if not before:
        return "policy.toml first seen"
    changed = [
        f"{name} {before.get(name, _NOT_THERE)} to {now.get(name, _NOT_THERE)}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    return "policy.toml changed: " + ("; ".join(changed) or "the end of a long text")


def _last_about(entries: tuple[Entry, ...], kind: str) -> Decided | None:
    subject = _SUBJECTS.get(kind, kind)
    records = (entry.record for entry in reversed(entries))
    return next(
        (
            each
            for each in records
            if _SUBJECTS.get(each.decision.kind, each.decision.kind) == subject
        ),
        None,
    )


def _flat(policy: Policy) -> dict[str, str]:
    """Return every field that has a value by its dotted name, as text."""
    found: dict[str, str] = {}

    def walk(prefix: str, table: dict[str, object]) -> None:
        for name, value in table.items():
            if isinstance(value, dict):
                walk(f"{prefix}{name}.", value)
            else:
                found[prefix + name] = (
                    ", ".join(map(str, value)) if isinstance(value, list) else str(value)
                )

    walk("", policy.model_dump(mode="json", exclude_none=True))
    return found
