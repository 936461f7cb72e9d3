"""What readers are told about audits that nobody passed: who answers for them, why and until when."""

import json
from dataclasses import replace

import pytest

from ddm.cli.audits import audit_lines, audits_as_json
from ddm.loading.release import Release
from ddm.protocol.plan import REHEARSAL
from ddm.protocol.submission import Responsible, Submission
from tests.conftest import PublishedRelease
from tests.support.commands import run_command
from tests.support.publishing import verify_release

FORGED = "chair\n  silo east, expert east: passed its leak audit"


@pytest.fixture(scope="module")
def release(published_once: PublishedRelease) -> Release:
    return verify_release(published_once, published_once.release)


def with_signed(release: Release, silo_id: str, **changes: object) -> Release:
    submission = release.submissions[silo_id]
    return replace(
        release, submissions={**release.submissions, silo_id: submission.model_copy(update=changes)}
    )


def test_verify_and_info_name_who_waived_why_and_until_when(
    release: Release, published_once: PublishedRelease
) -> None:
    east = release.submissions["east"]
    assert isinstance(east, Submission) and east.audit.waiver
    said = f"silo east, expert east: an inconclusive leak audit, waived for this plan until " \
        f"{east.audit.waiver.expires_at:%Y-%m-%d} by its test operator: made-up images"  # fmt: skip
    for name in ("verify", "info"):
        assert (
            said
            in run_command("ddm", name, published_once.release, "--root", published_once.root).out
        )
        # The control of a mark that must never be missing: this plan is a rehearsal.
        assert (
            REHEARSAL
            in run_command("ddm", name, published_once.release, "--root", published_once.root).out
        )
    output = json.loads(
        run_command(
            "ddm", "info", published_once.release, "--root", published_once.root, "--json"
        ).out
    )
    assert output["plan_id"] == release.manifest.plan_id
    assert output["audits"] == audits_as_json(release)
    first = output["audits"][0]
    assert (first["silo_id"], first["verdict"], first["experts"]) == ("east", "waived", ["east"])
    assert (
        first["waiver"] == east.audit.waiver.model_dump(mode="json")
        and first["despite_fail"] is None
    )


def test_lines_name_who_let_a_failed_expert_go_and_what_passed(release: Release) -> None:
    signed = release.submissions["east"]
    assert isinstance(signed, Submission) and signed.approval
    audit = signed.audit.model_copy(update={"verdict": "fail", "waiver": None})
    person = signed.approval.model_copy(
        update={"despite_fail": Responsible(role="head", reason="decided")}
    )
    failed = with_signed(release, "east", audit=audit, approval=person)
    assert (
        audit_lines(failed)[0]
        == "silo east, expert east: failed its leak audit; allowed to leave by its head: decided"
    )
    assert audits_as_json(failed)[0]["despite_fail"] == {"role": "head", "reason": "decided"}
    passed = with_signed(
        release, "east", audit=signed.audit.model_copy(update={"verdict": "pass", "waiver": None})
    )
    assert audit_lines(passed)[0] == "silo east, expert east: passed its leak audit"


def test_words_of_a_silo_forge_no_line_of_its_own(release: Release) -> None:
    signed = release.submissions["north"]
    assert isinstance(signed, Submission) and signed.audit.waiver
    waiver = signed.audit.waiver.model_copy(update={"role": FORGED, "reason": "a\r\vb\u2028c"})
    lines = audit_lines(
        with_signed(release, "north", audit=signed.audit.model_copy(update={"waiver": waiver}))
    )
    assert all(len(line.splitlines()) == 1 for line in lines)
    assert lines[1].endswith("by its chair silo east, expert east: passed its leak audit: a b c")
