"""A silo is taken out of the plan: nothing of it later, nothing more from it, and it is told, whatever breaks off."""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import aggregator.cli
import aggregator.release.publish
from aggregator.intake.inventory import take_inventory
from aggregator.intake.service import IntakeService
from aggregator.membership.withdrawal import read_withdrawal, withdraw_silo
from aggregator.router.train import train_router
from ddm.errors import (
    ArchipelagoError,
    BusyError,
    MissingFileError,
    RollbackError,
    SetupError,
)
from ddm.protocol.receipt import RECEIPT_KIND, Receipt, WithdrawnVerdict
from ddm.system.console import run_app
from ddm.trust.envelope import open_sealed, seal
from ddm.trust.keys import SigningKey
from silo.worker.worker import Worker
from tests.conftest import PublishedRelease
from tests.support.errors import has_subject
from tests.support.federation import PASSPHRASE, PlannedFederation
from tests.support.publishing import (
    copy_without_sites,
    file_digests,
    kill_at_step,
    publish_next_version,
    receipts_key,
    verify_release,
)

REASON = "consent was withdrawn"

pytestmark = pytest.mark.usefixtures("short_pages")


def take_out(published: PublishedRelease) -> None:
    withdraw_silo(published.tiny.federation, "north", REASON, receipts_key(published.tiny))


def test_withdrawn_silo_is_in_no_later_version(published: PublishedRelease, tmp_path: Path) -> None:
    tiny = published.tiny
    plan_id = published.plan_id
    take_out(published)
    record = read_withdrawal(tiny.federation, plan_id, "north")
    assert record.reason == REASON
    assert (
        record.submission_digest
        == verify_release(published, published.release)
        .verified.files["silos/north/submission.json"]
        .digest
    )
    assert (tiny.federation.withdrawn / plan_id / "north" / "submission" / "silos").is_dir()
    assert not (tiny.federation.accepted / plan_id / "north").exists()
    with pytest.raises(MissingFileError, check=has_subject("router")):
        publish_next_version(tiny, tmp_path / "too early")
    train_router(tiny.federation, take_inventory(tiny.federation), seed=0)
    manifest = publish_next_version(tiny, tmp_path / "without").manifest
    release = verify_release(published, tmp_path / "without", tmp_path / "state")
    assert (manifest.withdrawn_silos, manifest.missing_silos) == (("north",), ())
    assert {expert.silo_id for expert in manifest.experts} == set(release.submissions) == {"east"}
    assert not [name for name in file_digests(tmp_path / "without") if "north" in name]
    with pytest.raises(RollbackError):
        verify_release(published, published.release, tmp_path / "state")
    assert verify_release(published, published.release).manifest.version == 1, (
        "what was published stays as it is"
    )


def test_files_of_a_withdrawn_silo_are_refused_where_its_host_puts_them_back(
    published: PublishedRelease, tmp_path: Path
) -> None:
    take_out(published)
    tiny = published.tiny
    train_router(tiny.federation, take_inventory(tiny.federation), seed=0)
    publish_next_version(tiny, tmp_path / "without")
    for name, _ in file_digests(published.release).items():
        if "north" in name:
            (tmp_path / "without" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(published.release / name, tmp_path / "without" / name)
    with pytest.raises(ArchipelagoError, check=has_subject("north")):
        verify_release(published, tmp_path / "without")


def test_nothing_more_is_taken_from_a_withdrawn_silo(published: PublishedRelease) -> None:
    tiny = published.tiny
    plan_id = published.plan_id
    take_out(published)
    for sequence in (2, 3):
        shutil.copytree(
            tiny.sites["north"].outbox / plan_id / "1",
            tiny.federation.incoming / plan_id / "north" / str(sequence),
        )
    verdicts = [receipt for receipt in tiny.take_in() if receipt.silo_id == "north"]
    assert {receipt.verdict.kind for receipt in verdicts} <= {"refused"}
    assert not (tiny.federation.accepted / plan_id / "north").exists()
    assert take_inventory(tiny.federation).withdrawn == ("north",)
    assert not any((tiny.federation.incoming / plan_id / "north").glob("[0-9]*"))


def test_silo_that_never_answered_can_be_withdrawn(late: PlannedFederation, tmp_path: Path) -> None:
    tiny, plan_id = late
    withdraw_silo(tiny.federation, "east", REASON, receipts_key(tiny))
    tiny.collect("east", plan_id)
    assert not [receipt for receipt in tiny.take_in() if receipt.verdict.kind == "accepted"]
    manifest = publish_next_version(tiny, tmp_path / "out").manifest
    assert (manifest.withdrawn_silos, manifest.missing_silos) == (("east",), ())


def test_withdrawal_refuses_a_strange_silo_no_reason_and_a_busy_intake(
    published: PublishedRelease,
) -> None:
    federation = published.tiny.federation
    key = receipts_key(published.tiny)
    with pytest.raises(SetupError, match="west"):
        withdraw_silo(federation, "west", REASON, key)
    for reason in ("", "  ", "x" * 401):
        with pytest.raises(SetupError, check=has_subject("--reason")):
            withdraw_silo(federation, "north", reason, key)
    with federation.signing_lock(), pytest.raises(BusyError):
        withdraw_silo(federation, "north", REASON, key)
    assert take_inventory(federation).withdrawn == ()


def test_silo_is_withdrawn_while_intake_is_at_work_and_intake_carries_it_out(
    published: PublishedRelease, tmp_path: Path
) -> None:
    tiny = published.tiny
    plan_id = published.plan_id
    desk = IntakeService(tiny.federation, receipts_key(tiny), lambda receipt: None)
    folder = tiny.federation.withdrawn / plan_id / "north"
    with desk.locked():
        desk.step()
        take_out(published)
        assert take_inventory(tiny.federation).withdrawn == ("north",), "from the record on"
        assert (tiny.federation.accepted / plan_id / "north").is_dir(), (
            "not under the hands of intake"
        )
        desk.step()
        assert (folder / "submission" / "silos").is_dir()
        assert not (tiny.federation.accepted / plan_id / "north").exists()
        late = tiny.federation.incoming / plan_id / "north" / "3"
        shutil.copytree(tiny.sites["north"].outbox / plan_id / "1", late)
        desk.step()
        assert not late.exists(), "thrown away: the notice was the last answer"
        assert not (tiny.federation.accepted / plan_id / "north").exists()
        take_out(published)
        desk.step()
    IntakeService(tiny.federation, receipts_key(tiny), lambda receipt: None).step()
    assert [receipt.verdict.kind for receipt in receipts(published)] == ["accepted", "withdrawn"]


def test_submission_accepted_while_its_silo_is_withdrawn_is_taken_out_again(
    late: PlannedFederation,
) -> None:
    """The race: the record is written when intake is in the midst of this silo's submission."""
    tiny, plan_id = late
    tiny.collect("east", plan_id)

    def withdraw_it(receipt: Receipt) -> None:
        withdraw_silo(tiny.federation, "east", REASON, receipts_key(tiny))

    desk = IntakeService(tiny.federation, receipts_key(tiny), withdraw_it)
    with desk.locked():
        desk.step()
        assert (tiny.federation.accepted / plan_id / "east").is_dir()
        desk.step()
    assert not (tiny.federation.accepted / plan_id / "east").exists()
    assert (tiny.federation.withdrawn / plan_id / "east" / "submission").is_dir()
    assert set(take_inventory(tiny.federation).silos) == {"north"}


def test_withdrawal_killed_at_any_step_and_run_again_is_complete(
    published: PublishedRelease, tmp_path: Path
) -> None:
    for step in range(1000):
        there = copy_without_sites(published, tmp_path / str(step))
        federation = there.tiny.federation
        key = receipts_key(there.tiny)
        killed = kill_at_step(step, partial(withdraw_silo, federation, "north", REASON, key))
        withdraw_silo(federation, "north", "another reason", key)
        folder = federation.withdrawn / there.plan_id / "north"
        assert {path.name for path in folder.glob("[!.]*")} == {"withdrawal.json", "submission"}
        assert read_withdrawal(federation, there.plan_id, "north").reason in (
            REASON,
            "another reason",
        )
        assert [receipt.verdict.kind for receipt in receipts(there)] == ["accepted", "withdrawn"]
        shutil.rmtree(tmp_path / str(step))
        if not killed:
            break
    assert step >= 8


def receipts(published: PublishedRelease) -> Iterator[Receipt]:
    folder = published.tiny.federation.receipts / published.plan_id / "north"
    for path in sorted(folder.glob("[0-9]*.json")):
        data, _ = open_sealed(
            path.read_bytes(), RECEIPT_KIND, receipts_key(published.tiny).public, 65536
        )
        yield Receipt.parse(data, subject="receipt")


# The silo learns of it


def test_accepted_silo_learns_that_it_was_withdrawn(published: PublishedRelease) -> None:
    tiny = published.tiny
    plan_id = published.plan_id
    take_out(published)
    tiny.deliver_receipt("north", plan_id, sequence=2)
    state = tiny.work("north", until="withdrawn")
    assert state.problem is not None
    assert REASON in state.problem.message
    assert tiny.work("north", until="withdrawn").state == "withdrawn", "it waits for the next plan"


def test_silo_that_waits_for_its_receipt_learns_that_it_was_withdrawn(
    late: PlannedFederation,
) -> None:
    tiny, plan_id = late
    withdraw_silo(tiny.federation, "east", REASON, receipts_key(tiny))
    tiny.deliver_receipt("east", plan_id)
    worker = Worker(tiny.sites["east"], tiny.key("east"), lambda state: None)
    worker.begin()
    # The worker goes on: the next plan may name the silo again.
    worker.step()
    assert worker.state.state == "withdrawn"
    assert worker.state.problem and REASON in worker.state.problem.message


def test_forged_notice_of_withdrawal_changes_nothing(published: PublishedRelease) -> None:
    """By another key, and by the right key for another silo."""
    tiny = published.tiny
    plan_id = published.plan_id
    accepted = next(receipts(published))
    notice = accepted.model_copy(update={"sequence": 2, "verdict": WithdrawnVerdict(reason=REASON)})
    other = notice.model_copy(update={"silo_id": "east"})
    path = tiny.sites["north"].inbox / plan_id / "receipts" / "2.json"
    for forged, key in ((notice, SigningKey.generate()), (other, receipts_key(tiny))):
        path.write_bytes(seal(forged.encode(), RECEIPT_KIND, key))
        with pytest.raises(AssertionError, match="stands still in state accepted"):
            tiny.work("north", until="withdrawn")
        assert not path.exists()
    path.write_bytes(seal(notice.encode(), RECEIPT_KIND, receipts_key(tiny)))
    assert tiny.work("north", until="withdrawn").state == "withdrawn"


# On the command line


def test_commands_say_aloud_who_is_missing_and_publish_the_same_once(
    late: PlannedFederation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny, _ = late
    secret = tmp_path / "secret"
    secret.write_bytes(PASSPHRASE + b"\n")

    def said(*words: object) -> str:
        with pytest.raises(SystemExit) as ended:
            run_app(
                aggregator.cli.app, [str(word) for word in (*words, "--passphrase-file", secret)]
            )
        assert ended.value.code == 0
        return capsys.readouterr().out

    fed = tiny.federation.path
    first = said("publish", fed, "--rehearsal", "--out", tmp_path / "1")
    assert "version 1" in first
    assert "PARTIAL: 1 of the plan's 2 silos" in first
    assert "without a submission: east" in first
    assert "nothing new was published" in said(
        "publish", fed, "--rehearsal", "--out", tmp_path / "2"
    )
    output = said("withdraw", fed, "east", "--reason", REASON)
    assert REASON in output
    assert "aggregator release" in output
    second = said("publish", fed, "--rehearsal", "--out", tmp_path / "3", "--quorum", 1)
    assert "version 2" in second
    assert "withdrawn: east" in second
