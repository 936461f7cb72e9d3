"""A waiver waives an inconclusive audit, for one plan and until a day, and nothing else."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ddm.errors import ApprovalError, AuditError, DocumentError, SetupError
from ddm.protocol.base import now_utc, sha256_hex
from ddm.protocol.limits import Audit
from ddm.protocol.submission import Responsible, Submission, Waiver, submission_path
from silo.audit.document import AuditReport
from silo.audit.report import gate, inconclusive_report
from silo.config import AuditPolicy, Policy
from silo.plan.waiver import parse_end, with_waiver, write_waiver
from silo.worker import auditing
from silo.worker.approval import approve
from tests.support.case import case
from tests.support.commands import run_command
from tests.support.documents import to_bytes
from tests.support.errors import has_subject
from tests.support.federation import POLICY, TinyFederation, write_policy
from tests.support.parsers import submission_document

SILO = "north"
PLAN = sha256_hex(b"this plan")
OTHER = sha256_hex(b"another plan")
NOW = datetime(2026, 11, 1, tzinfo=UTC)
WHO = Responsible(role="head of data", reason="the committee decided")


def waiver(**changes: Any) -> Waiver:
    terms: dict[str, Any] = {
        "plan_digest": PLAN,
        "verdict": "inconclusive",
        "expires_at": NOW + timedelta(days=1),
    }
    return Waiver(role="head of data", reason="made up", **(terms | changes))


def report(verdict: Any = "inconclusive") -> AuditReport:
    return AuditReport(
        plan_id="digits-0000abcd", verdict=verdict, num_holdout_units=0, reason="too few"
    )


def test_waiver_of_this_plan_and_time_lets_an_inconclusive_audit_pass() -> None:
    gated = gate(report(), AuditPolicy(waiver=waiver()), plan_digest=PLAN, now=NOW)
    assert gated.verdict == "waived" and gated.waiver == waiver()


@pytest.mark.parametrize(
    ("signed", "subject"),
    [
        (None, "leak audit"),
        (waiver(plan_digest=OTHER), "audit.waiver.plan_digest"),
        (waiver(expires_at=NOW), "audit.waiver.expires_at"),
    ],
)
def test_waiver_of_another_plan_or_an_expired_one_is_refused(
    signed: Waiver | None, subject: str
) -> None:
    with pytest.raises(AuditError, check=has_subject(subject)):
        gate(report(), AuditPolicy(waiver=signed), plan_digest=PLAN, now=NOW)


def test_no_waiver_covers_an_audit_that_failed() -> None:
    assert (
        gate(report("fail"), AuditPolicy(waiver=waiver()), plan_digest=PLAN, now=NOW).verdict
        == "fail"
    )
    with pytest.raises(ValidationError, match="inconclusive"):
        waiver(verdict="fail")


@pytest.mark.parametrize(
    "changes", [{"plan_digest": None}, {"verdict": None}, {"expires_at": None}, {"role": None}]
)
def test_policy_with_a_waiver_of_everything_is_refused(changes: dict[str, None]) -> None:
    whole = waiver().model_dump(mode="json")
    incomplete = {name: value for name, value in whole.items() if name not in changes}
    with pytest.raises(ValidationError, match="Field required"):
        Policy.model_validate_json(json.dumps({"audit": {"waiver": incomplete}}))


def changed(**parts: Any) -> bytes:
    return to_bytes(submission_document() | parts)


def test_reader_refuses_a_submission_that_no_waiver_and_nobody_answers_for() -> None:
    Submission.parse(changed(), subject="submission.json")
    audit = submission_document()["audit"]
    at = submission_document()["approval"]["at"]
    failed = {"verdict": "fail", "digest": "a" * 64}
    someone = {"role": "head", "reason": "decided"}
    refused = {
        "another plan's": {"audit": audit | {"waiver": audit["waiver"] | {"plan_digest": OTHER}}},
        "an expired one": {"audit": audit | {"waiver": audit["waiver"] | {"expires_at": at}}},
        "of a failed audit": {"audit": audit | {"waiver": audit["waiver"] | {"verdict": "fail"}}},
        "no plan": {"audit": audit | {"waiver": {"role": "head", "reason": "made up"}}},
        "failed, nobody": {"audit": failed},
        "failed, policy": {
            "audit": failed,
            "approval": {"kind": "policy", "at": at, "despite_fail": someone},
        },
        "failed, waived": {"audit": failed | {"waiver": audit["waiver"]}},
        "waived and failed": {"approval": {"kind": "person", "at": at, "despite_fail": someone}},
    }
    for name, parts in refused.items():
        with case(name), pytest.raises(DocumentError):
            Submission.parse(changed(**parts), subject="submission.json")
    released = changed(audit=failed, approval={"kind": "person", "at": at, "despite_fail": someone})
    assert (
        Submission.parse(released, subject="submission.json").approval.despite_fail.role == "head"
    )


POLICIES = {
    "without": '[audit]\nrequired = true\n\n[approval]\nkind = "person"  # mine\n',
    "in the middle": '[audit]\nrequired = true\n[audit.waiver]\nrole = "x"\n\n[approval]\nkind = "policy"\n',
    "at the end": '# mine\n[approval]\nkind = "policy"\n[ audit . waiver ]  # old\nrole = "x"\n',
    "empty": "",
}


@pytest.mark.parametrize("name", POLICIES)
def test_waiver_replaces_the_one_in_the_policy_and_nothing_else(name: str) -> None:
    text = with_waiver(POLICIES[name], waiver())
    assert text.count("waiver]") == 1 and 'role = "x"' not in text
    assert [line for line in POLICIES[name].splitlines() if "mine" in line] == [
        line for line in text.splitlines() if "mine" in line
    ]
    assert with_waiver(text, waiver()) == text


def test_policy_whose_waiver_cannot_be_replaced_stays_as_it_is(
    planned_once, tmp_path: Path
) -> None:
    site = planned_once.tiny.copy(tmp_path / "copy").sites[SILO]
    path = site.path / "policy.toml"
    table = json.dumps(waiver().model_dump(mode="json")).replace('":', '"=')
    inline = f"[audit]\nwaiver = {table}\n"
    path.write_text(inline)
    assert site.policy().audit.waiver == waiver()
    with pytest.raises(SetupError, check=has_subject("policy.toml")):
        write_waiver(site, waiver(plan_digest=OTHER))
    assert path.read_text() == inline
    assert not list(site.path.glob(".policy*"))


def test_until_is_a_day_or_a_time_with_its_zone() -> None:
    assert parse_end("2027-03-31") == datetime(2027, 3, 31, 23, 59, 59, tzinfo=UTC)
    assert parse_end("2027-03-31T12:00:00Z") == datetime(2027, 3, 31, 12, tzinfo=UTC)
    for text in ("2027-03-31T12:00:00", "tomorrow", "31.3.2027", ""):
        with pytest.raises(SetupError, check=has_subject("--until")):
            parse_end(text)


def test_command_waives_for_the_plan_in_work_and_the_worker_goes_on(
    planned_once, tmp_path: Path
) -> None:
    tiny = planned_once.tiny.copy(tmp_path / "copy")
    site = tiny.sites[SILO]
    say = ("silo", "waive", site.path, "--role", "head of data", "--reason", "made up", "--until")
    assert "state waiting" in run_command(*say, "2099-01-01").err
    write_policy(site, {"approval": {"kind": "policy"}})
    with pytest.raises(AuditError, check=has_subject("leak audit")):
        tiny.work(SILO)
    assert site.ledger_path.read_bytes() == b""
    assert run_command(*say, "2020-01-01").code == 3
    result = run_command(*say, "2099-01-01")
    assert result.code == 0, result.err
    tiny.work(SILO)
    (path,) = site.outbox.glob(f"*/1/{submission_path(SILO)}")
    sent = Submission.parse(path.read_bytes(), subject="submission.json")
    assert sent.audit.waiver and sent.audit.waiver.plan_digest == sent.plan_digest
    assert "loss" not in path.read_text()


def test_waiver_that_ends_while_the_draft_waits_must_be_given_again(
    planned_once, tmp_path: Path
) -> None:
    tiny = planned_once.tiny.copy(tmp_path / "copy")
    site = tiny.sites[SILO]
    write_policy(site, POLICY | {"approval": {"kind": "person"}})
    state = tiny.work(SILO, until="awaiting_approval")
    first = str(state.submission_digest)
    plan_digest = str(state.plan_digest)
    later = waiver(plan_digest=plan_digest, expires_at=now_utc() - timedelta(seconds=1))
    for path in (site.private / "review" / "draft.json",):
        draft = Submission.parse(path.read_bytes(), subject="draft").model_dump(mode="json")
        draft["audit"]["waiver"]["expires_at"] = draft["created_at"] = "2020-01-02T00:00:00Z"
        draft["created_at"] = "2020-01-01T00:00:00Z"
        path.write_bytes(Submission.model_validate_json(json.dumps(draft)).encode())
    write_waiver(site, later)
    with pytest.raises(AuditError, check=has_subject("audit.waiver.expires_at")):
        tiny.work(SILO)
    assert not list(site.outbox.glob("*/1"))
    # Another day than the first waiver's: two drafts of the same second would otherwise have the same digest.
    write_waiver(site, waiver(plan_digest=plan_digest, expires_at=now_utc() + timedelta(days=60)))
    again = tiny.work(SILO, until="awaiting_approval").submission_digest
    assert again != first


def test_failed_audit_leaves_only_with_a_person_for_that_draft(
    planned_once, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(plan_id: str, audit: Audit, num_holdout_units: int) -> AuditReport:
        gated = inconclusive_report(plan_id, audit, num_holdout_units)
        assert gated
        return gated.model_copy(update={"verdict": "fail"})

    monkeypatch.setattr(auditing, "inconclusive_report", failing)
    tiny: TinyFederation = planned_once.tiny.copy(tmp_path / "copy")
    site = tiny.sites[SILO]
    # although the policy approves
    digest = str(tiny.work(SILO, until="awaiting_approval").submission_digest)
    with pytest.raises(AssertionError, match="stands still"):
        tiny.work(SILO)
    with pytest.raises(ApprovalError, check=has_subject("approval")):
        approve(site, digest)
    assert run_command("silo", "approve", site.path, "--digest", digest, "--role", "head").code == 3
    result = run_command("silo", "approve", site.path, "--digest", digest, "--despite-fail", "--role", WHO.role,
                   "--reason", WHO.reason)  # fmt: skip
    assert result.code == 0, result.err
    tiny.work(SILO)
    plan_id = planned_once.plan_id
    tiny.collect(SILO, plan_id)
    assert [receipt.verdict.kind for receipt in tiny.take_in()] == ["accepted"]
    (path,) = site.outbox.glob(f"*/1/{submission_path(SILO)}")
    assert (
        Submission.parse(path.read_bytes(), subject="submission.json").approval.despite_fail == WHO
    )
