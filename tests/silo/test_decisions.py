"""The log of decisions: what each command writes into it, who changes it unseen, and what a crash leaves."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ddm.errors import DataError, DecisionLogError, MissingFileError
from silo.config import Site
from silo.decisions import (
    MAX_RECORDS,
    DecisionLog,
    ImagesReviewed,
    KeyRotated,
    PolicyChanged,
    RetrainingStarted,
    SubmissionApproved,
    WorkPaused,
    WorkResumed,
    current_user,
    describe_decisions,
)
from silo.images.decisions import Decisions
from silo.worker.approval import approve
from silo.worker.pause import pause, present_pause, resume
from silo.worker.retraining import retrain
from silo.worker.rotation import rotate_key
from silo.worker.withdrawal import withdraw_from_plan
from tests.support.case import case
from tests.support.commands import run_command
from tests.support.dicom_files import tags_of, waves, write
from tests.support.federation import (
    PASSPHRASE,
    POLICY,
    PlannedFederation,
    TinyFederation,
    write_policy,
)

SILO = "north"
CODE = DecisionLogError.exit_code


@pytest.fixture
def tiny(planned_once: PlannedFederation, tmp_path: Path) -> TinyFederation:
    return planned_once.tiny.copy(tmp_path / "copy")


@pytest.fixture
def site(tiny: TinyFederation) -> Site:
    return tiny.sites[SILO]


@pytest.fixture
def decided(site: Site) -> Site:
    """A site with five decisions."""
    for step in (pause, resume, pause, resume, pause):
        step(site)
    return site


def kinds(site: Site) -> list[str]:
    return [entry.record.decision.kind for entry in DecisionLog(site).entries]


def test_every_decision_about_a_plan_is_written_down_once(tiny: TinyFederation, site: Site) -> None:
    write_policy(site, POLICY | {"approval": {"kind": "person"}})
    digest = str(tiny.work(SILO, until="awaiting_approval").submission_digest)
    for _ in range(2):  # a person who types it twice decides once
        approve(site, digest)
    write_policy(site, POLICY)
    tiny.work(SILO)  # a person's approval holds, whatever the policy says by then
    assert kinds(site) == ["policy", "plan accepted", "approved", "policy"]
    by_hand = DecisionLog(site).entries[2].record.decision
    assert isinstance(by_hand, SubmissionApproved)
    assert (by_hand.approval, by_hand.submission_digest) == ("person", digest)
    rows = describe_decisions(DecisionLog(site).entries)
    assert {row[1] for row in rows} == {current_user()} and f"uid {os.getuid()}" in current_user()
    assert rows[3][2] == "policy.toml changed: approval.kind person to policy"


def test_approval_by_the_policy_is_written_down(tiny: TinyFederation, site: Site) -> None:
    tiny.work(SILO)
    last = DecisionLog(site).entries[-1].record.decision
    assert isinstance(last, SubmissionApproved) and last.approval == "policy"


def test_withdrawal_and_new_keys_are_written_down(tiny: TinyFederation, site: Site) -> None:
    tiny.work(SILO, until="scanned")
    withdraw_from_plan(site, tiny.key(SILO))
    before = tiny.key(SILO)
    after = rotate_key(site, before, PASSPHRASE)
    assert kinds(site)[-2:] == ["withdrew", "key rotated"]
    rotated = DecisionLog(site).entries[-1].record.decision
    assert rotated == KeyRotated(old=before.public.fingerprint, new=after.public.fingerprint)


def test_training_again_is_written_down_each_time(tiny: TinyFederation, site: Site) -> None:
    tiny.work(SILO, until="plan_accepted")
    for _ in range(2):
        assert retrain(site).state == "plan_accepted"
    assert kinds(site)[-2:] == ["retrained", "retrained"]


def test_approval_given_again_is_a_second_one_only_after_training_again(site: Site) -> None:
    log = DecisionLog(site)
    plan = {"plan_id": "colours-00000000"}
    approval = SubmissionApproved(**plan, sequence=1, submission_digest="0" * 64, approval="person")
    for decision in (
        approval,
        WorkPaused(),
        approval,
        RetrainingStarted(**plan, state="awaiting_approval"),
        approval,
    ):
        log.add(decision)
    assert kinds(site) == ["approved", "paused", "retrained", "approved"]


def user_in_record(login_id: int | None = None) -> str:
    """What a process writes down about its user, whose environment lies; after a login as that user id."""
    program = "from silo.decisions import current_user\nprint(current_user())"
    if login_id is not None:
        login = f"import pathlib\npathlib.Path('/proc/self/loginuid').write_text('{login_id}')\n"
        program = login + program
    environment = os.environ | {"SUDO_USER": "ward", "SUDO_UID": "4321", "LOGNAME": "ward"}
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if login_id is not None and "PermissionError" in finished.stderr:
        pytest.skip("this kernel, or a login before, lets nobody set the login user id")
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_user_that_the_environment_names_is_not_written_down() -> None:
    user = user_in_record()
    assert f"uid {os.getuid()}" in user
    assert "ward" not in user and "4321" not in user


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux knows who logged in")
def test_user_who_logged_in_is_named_as_the_kernel_knows_them() -> None:
    user = user_in_record(54321)
    assert user.endswith("logged in as uid 54321") and "ward" not in user


def edited(old: bytes, new: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        log = folder / "decisions.jsonl"
        assert old in log.read_bytes()
        log.write_bytes(log.read_bytes().replace(old, new, 1))

    return change


def without(number: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        lines = (folder / "decisions.jsonl").read_bytes().splitlines(keepends=True)
        (folder / "decisions.jsonl").write_bytes(b"".join(lines[:number] + lines[number + 1 :]))

    return change


ATTACKS: dict[str, Callable[[Path], None]] = {
    "another person": edited(b'"by":"', b'"by":"not '),
    "another decision": edited(b'"kind":"resumed"', b'"kind":"paused"'),
    "another time": edited(b'"at":"2', b'"at":"3'),
    "a record taken out of the middle": without(2),
    "the last record taken off": without(4),
    "everything taken off": lambda folder: (folder / "decisions.jsonl").write_bytes(b"") and None,
    "the file deleted": lambda folder: (folder / "decisions.jsonl").unlink(),
    "the head deleted": lambda folder: (folder / "decisions.head").unlink(),
    "both deleted": lambda folder: (
        [(folder / f"decisions.{end}").unlink() for end in ("jsonl", "head")] and None
    ),
    "blanks": edited(b'{"at"', b'{ "at"'),
    "a field more": edited(b'"by":"', b'"and":1,"by":"'),
}


def test_log_that_was_changed_is_refused_by_whoever_would_go_on(
    decided: Site, tmp_path: Path
) -> None:
    assert kinds(decided) == ["paused", "resumed"] * 2 + ["paused"]
    for name, attack in ATTACKS.items():
        with case(attack=name):
            copy = Site(Path(shutil.copytree(decided.path, tmp_path / name.replace(" ", "-"))))
            attack(copy.private / "log")
            with pytest.raises(DecisionLogError):
                resume(copy)
            assert present_pause(copy) is not None  # what is not written down is not done
            with pytest.raises(DecisionLogError) as refused:
                kinds(copy)
            assert "Restore private/log" in refused.value.remedy
    verified = run_command("silo", "log", "verify", copy.path)
    assert (
        verified.code == CODE and "move it away" in verified.err and "Traceback" not in verified.err
    )
    key = tmp_path / "pass"
    key.write_bytes(PASSPHRASE + b"\n")
    for words in (
        ("run", copy.path, "--only", "worker", "--passphrase-file", key),
        ("pause", copy.path),
    ):
        assert run_command("silo", *words).code == CODE
    shutil.rmtree(copy.private / "log")  # as the remedy says
    assert resume(copy) and kinds(copy) == ["resumed"]


def test_whoever_noted_a_head_notices_an_older_log_put_back(decided: Site, tmp_path: Path) -> None:
    shutil.copytree(decided.private / "log", tmp_path / "older")
    resume(decided)
    head = run_command("silo", "log", "verify", decided.path).out.split()[-1]
    pause(decided)
    assert run_command("silo", "log", "verify", decided.path, "--holds", head).code == 0
    shutil.rmtree(decided.private / "log")
    shutil.copytree(tmp_path / "older", decided.private / "log")
    assert run_command("silo", "log", "verify", decided.path).code == 0
    assert run_command("silo", "log", "verify", decided.path, "--holds", head).code == CODE


KILLED = """
import os, signal, sys
from pathlib import Path
from silo.config import Site
from silo.worker.pause import pause, resume
import ddm.io.chain, silo.worker.pause
where = sys.argv[2]
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
if where == "in the line":
    real = os.fsync
    os.fsync = lambda fd: die() if os.readlink(f"/proc/self/fd/{fd}").endswith("decisions.jsonl") else real(fd)
elif where == "before the head":
    ddm.io.chain.Chain._write_head = die
elif where == "before the effect":
    silo.worker.pause.write_atomic = die
pause(Site(Path(sys.argv[1])))
"""


def test_decision_that_was_killed_on_its_way_is_taken_once_when_it_is_given_again(
    site: Site,
) -> None:
    for where in ("in the line", "before the head", "before the effect"):
        with case(killed=where):
            before = len(kinds(site)) if (site.private / "log").exists() else 0
            process = subprocess.run(
                [sys.executable, "-c", KILLED, str(site.path), where], check=False
            )
            assert process.returncode == -9 and present_pause(site) is None
            pause(site)
            assert len(kinds(site)) == before + 1 and kinds(site)[-1] == "paused"
            resume(site)


def test_half_a_line_is_removed_and_a_full_log_is_refused(
    decided: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (decided.private / "log" / "decisions.jsonl").open("ab") as handle:
        handle.write(b'{"at":"20')
    resume(decided)
    assert len(kinds(decided)) == 6
    assert MAX_RECORDS > 10_000
    log = DecisionLog(decided)
    chain_format = log._chain.format
    monkeypatch.setattr(log._chain, "format", replace(chain_format, max_records=6))
    with pytest.raises(DecisionLogError, match="at most 6 records"):
        log.add(WorkPaused())


def test_images_are_written_down_when_their_decisions_changed(site: Site) -> None:
    log = DecisionLog(site)
    some = {"num_waiting": 3, "num_cleared": 0, "num_left_out": 0}
    log.notice_images(ImagesReviewed(**some, decisions_digest="0" * 64))
    assert log.entries == ()  # nobody decided anything yet
    for digest in ("1", "1", "2"):
        log.notice_images(ImagesReviewed(**some | {"num_cleared": 2}, decisions_digest=digest * 64))
    assert kinds(site) == ["images", "images"]
    assert describe_decisions(log.entries)[0][2] == "images: 2 cleared, 0 left out, 3 wait"


def test_review_of_images_is_written_down_and_refused_with_a_broken_log(
    site: Site, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    write(tags_of(waves((48, 40)), Modality="US"), data / "a.dcm")
    toml = site.path / "silo.toml"
    toml.write_text(toml.read_text().replace(site.settings().data, str(data)))
    # nothing is accepted: one image waits
    assert run_command("silo", "scan", site.path).code == DataError.exit_code
    assert (
        "0 images wait" in run_command("silo", "review", site.path, "--images", "--clear", data).out
    )
    assert run_command("silo", "review", site.path, "--images", "--list").code == 0
    assert (
        describe_decisions(DecisionLog(site).entries)[0][2]
        == "images: 1 cleared, 0 left out, 0 wait"
        and len(kinds(site)) == 1
    )
    edited(b'"by":"', b'"by":"not ')(site.private / "log")
    assert run_command("silo", "review", site.path, "--images", "--leave-out", data).code == CODE
    with Decisions.opened(site.private / "images") as decisions:
        kept = decisions._database.execute("select decision from decisions").fetchall()
    assert kept == [("clear",)]


def test_largest_policy_fits_a_record(site: Site) -> None:
    long = "\N{CJK UNIFIED IDEOGRAPH-6F22}" * 400
    waiver = {
        "role": long,
        "plan_digest": "0" * 64,
        "verdict": "inconclusive",
        "expires_at": datetime(2099, 12, 31, tzinfo=UTC),
    }
    write_policy(site, {"audit": {"waiver": waiver | {"reason": long}}})
    DecisionLog(site).notice_policy(site.policy())
    write_policy(site, {"audit": {"waiver": waiver | {"reason": long[:-1] + "x"}}})
    DecisionLog(site).notice_policy(site.policy())
    first, second = (entry.record.decision for entry in DecisionLog(site).entries)
    assert isinstance(first, PolicyChanged) and isinstance(second, PolicyChanged)
    assert first.policy_digest != second.policy_digest
    assert "end of a long text" in describe_decisions(DecisionLog(site).entries)[1][2]


def test_show_prints_who_and_what_and_json_holds_the_chain(decided: Site) -> None:
    shown = run_command("silo", "log", "show", decided.path).out
    assert shown.count(current_user()) == 5 and "resumed the worker" in shown
    records = json.loads(run_command("silo", "log", "show", decided.path, "--json").out)
    assert [record["previous"] for record in records[1:]] == [
        record["digest"] for record in records[:-1]
    ]
    assert records[1]["decision"] == WorkResumed().model_dump()


def test_site_without_a_decision_has_no_log(site: Site) -> None:
    assert run_command("silo", "log", "show", site.path).code == MissingFileError.exit_code
    assert not (site.private / "log").exists()
