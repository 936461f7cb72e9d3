"""What an operator is told: from the folders alone, the truth of signed receipts, and no crash over rubbish."""

import json
import os
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest

from aggregator.keys.removal import remove_silo
from aggregator.membership.withdrawal import withdraw_silo
from aggregator.monitoring.labels import attention_points, page_values, status_text
from aggregator.monitoring.silo_status import SiloStatus
from aggregator.monitoring.standing import (
    STANDINGS,
    Arrival,
    SiloReport,
    SiloStanding,
    SubmissionStatus,
    decide_standing,
)
from aggregator.monitoring.status import FederationStatus, read_status
from aggregator.transfer.delivery import SiloDelivery, TransferLimits, load_bundle
from ddm.io.locks import locked
from ddm.pages.render import render
from ddm.protocol.base import now_utc
from ddm.protocol.receipt import AcceptedVerdict, RefusedVerdict
from ddm.publishing.keys import load_key
from ddm.system.processes import program
from ddm.transport.messages import Envelope, Status, StatusQuery, StatusReport
from ddm.trust.keys import SigningKey
from tests.conftest import PublishedRelease
from tests.support.case import case
from tests.support.federation import PASSPHRASE
from tests.support.federation_midway import SHARD, AggregatorStandIn

LONG_AGO = 90_000.0


@pytest.fixture
def stage(published: PublishedRelease) -> AggregatorStandIn:
    return AggregatorStandIn(published.tiny.federation)


def look(stage: AggregatorStandIn, silo_id: str = "north"):  # type: ignore[no-untyped-def]
    silo = read_status(stage.federation, now_utc()).silo(silo_id)
    assert silo is not None
    return silo


def long_ago(path: Path) -> None:
    os.utime(path, (path.stat().st_mtime - LONG_AGO,) * 2)


def ended_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_published_federation_is_shown_with_receipts_router_and_release(
    published: PublishedRelease,
) -> None:
    status = read_status(published.tiny.federation, now_utc())
    assert [(silo.silo_id, silo.standing, silo.final) for silo in status.silos] == [
        ("east", "accepted", True),
        ("north", "accepted", True),
    ]
    assert status.router and status.router.silos == ("east", "north")
    (release,) = status.releases
    assert (release.version, release.plan_id, release.silos) == (
        1,
        published.plan_id,
        ("east", "north"),
    )
    assert {"plan", "certificate", "metadata timestamp", "metadata 1.root"} <= {
        one.what for one in status.expiries
    }
    assert (
        not status.processes.running and not status.problems and not list(attention_points(status))
    )


def test_command_prints_the_same_facts_as_json(published: PublishedRelease) -> None:
    command = [str(program("aggregator")), "status", str(published.tiny.federation.path)]
    process = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    printed = FederationStatus.parse(process.stdout.encode(), subject="status")
    now = read_status(published.tiny.federation, printed.at)
    assert printed.model_copy(update={"disk_free_bytes": 0}) == now.model_copy(
        update={"disk_free_bytes": 0}
    )


def test_federation_without_a_plan_is_shown(published: PublishedRelease) -> None:
    (published.tiny.federation.path / "plans" / "current.json").unlink()
    status = read_status(published.tiny.federation, now_utc())
    assert status.plan_id is None
    assert {silo.standing for silo in status.silos} == {"unnamed"}
    assert "plan none" in status_text(status)


def test_answer_without_news_counts_as_contact(stage: AggregatorStandIn) -> None:
    bundle = stage.federation.bundle(stage.plan.plan_id)
    delivery = SiloDelivery(
        stage.federation.path,
        stage.plan.plan_id,
        "north",
        index=load_bundle(bundle),
        limits=TransferLimits(shard_bytes=SHARD, max_submission_bytes=SHARD, wait_s=30),
    )
    ask = StatusQuery(
        plan_id=stage.plan.plan_id, known=Status(), max_bytes=0, received=0, wait_s=30
    )
    same = Envelope(StatusReport(status=Status(state="training", progress=7)))
    delivery.take(ask, same)
    for path in stage.incoming("north").iterdir():
        long_ago(path)
    before = look(stage).last_seen
    delivery.take(ask, same)
    assert look(stage).last_seen - before > timedelta(seconds=LONG_AGO - 60)
    assert (look(stage).state, look(stage).progress) == ("training", 7)


def test_rate_of_an_arrival_is_what_came_between_two_looks(stage: AggregatorStandIn) -> None:
    stage.report("north", "in_outbox")
    stage.arrive("north", 1, of=4)
    first = read_status(stage.federation, now_utc())
    stage.arrive("north", 3, of=4)
    second = read_status(stage.federation, first.at + timedelta(seconds=10), first)
    assert second.silo("north").arrival == Arrival(
        sequence=1, bytes_here=8 + 3 * SHARD, bytes_total=8 + 4 * SHARD, bytes_per_s=2 * SHARD / 10
    )
    # Without an earlier look: since the first file, which came at an unknown speed and does not count.
    long_ago(stage.incoming("north") / "1.part" / "counts.safetensors")
    assert look(stage).arrival.bytes_per_s == pytest.approx(3 * SHARD / LONG_AGO, rel=0.01)
    assert look(stage).standing == "sending"


def test_refusal_is_shown_with_code_and_reason_and_a_later_acceptance_ends_it(
    stage: AggregatorStandIn,
) -> None:
    stage.report("north", "refused")
    stage.answer("north", RefusedVerdict(code=12, reason="other bytes"))
    (refused,) = look(stage).submissions
    assert (refused.verdict, refused.code, refused.reasons) == ("refused", 12, ("other bytes",))
    assert look(stage).standing == "refused"
    assert any(
        "other bytes" in text for text in attention_points(read_status(stage.federation, now_utc()))
    )
    stage.answer("north", AcceptedVerdict(), sequence=2)
    assert [one.verdict for one in look(stage).submissions] == ["refused", "accepted"]
    assert look(stage).standing == "accepted"


def test_withdrawn_and_removed_silos_have_words_of_their_own_and_their_published_experts_are_named(
    published: PublishedRelease,
) -> None:
    federation = published.tiny.federation
    assert not list(attention_points(read_status(federation, now_utc())))
    withdraw_silo(
        federation, "north", "consent was withdrawn", load_key(federation, "receipts", PASSPHRASE)
    )
    remove_silo(federation, "east", "left", PASSPHRASE)
    status = read_status(federation, now_utc())
    assert [(silo.standing, silo.final) for silo in status.silos] == [
        ("removed", True),
        ("withdrawn", True),
    ]
    shown = status_text(status)
    assert "removed from the federation" in shown and "withdrawn from this plan" in shown
    assert [text.split(":")[0] for text in attention_points(status)] == [
        "version 1 still contains east, which was removed since",
        "version 1 still contains north, which was withdrawn since",
    ]
    html = render("aggregator", "live.html.jinja", refresh_s=5, paused=False, **page_values(status))
    assert "removed from the federation" in html and "withdrawn from this plan" in html
    assert [silo["standing"] for silo in json.loads(status.model_dump_json())["silos"]] == [
        "removed",
        "withdrawn",
    ]


def test_silo_that_was_withdrawn_and_then_removed_counts_as_removed(
    published: PublishedRelease,
) -> None:
    federation = published.tiny.federation
    withdraw_silo(
        federation, "north", "consent was withdrawn", load_key(federation, "receipts", PASSPHRASE)
    )
    remove_silo(federation, "north", "left", PASSPHRASE)
    assert [silo.standing for silo in read_status(federation, now_utc()).silos] == [
        "accepted",
        "removed",
    ]


def test_receipt_by_another_key_is_not_shown_as_an_acceptance(stage: AggregatorStandIn) -> None:
    stage.answer("north", AcceptedVerdict(), key=SigningKey.generate())
    (forged,) = look(stage).submissions
    assert forged.verdict == "unreadable" and look(stage).standing == "absent"


def test_quarantine_is_shown_with_its_reasons_until_it_is_answered(
    stage: AggregatorStandIn,
) -> None:
    stage.report("north", "in_outbox")
    stage.set_aside("north", "loss 3 times that of the others")
    assert look(stage).standing == "quarantined"
    assert look(stage).submissions[0].reasons == ("loss 3 times that of the others",)
    stage.answer("north", AcceptedVerdict())
    assert look(stage).standing == "accepted"


def test_silence_is_held_against_a_silo_only_while_the_aggregator_runs(
    stage: AggregatorStandIn,
) -> None:
    stage.report("north", "training", 50)
    for path in stage.incoming("north").iterdir():
        long_ago(path)
    assert look(stage).standing == "working"
    flower = stage.federation.path / "flower"
    flower.mkdir(exist_ok=True)
    (flower / "run.json").touch()
    with locked(flower, "runtime"):
        # It has only just begun to ask.
        assert look(stage).standing == "working"
        long_ago(flower / "run.json")
        assert look(stage).standing == "silent"
        assert any(
            "north: not responding" in text
            for text in attention_points(read_status(stage.federation, now_utc()))
        )


def test_aggregator_that_has_only_just_begun_is_shown_as_starting(
    stage: AggregatorStandIn,
) -> None:
    flower = stage.federation.path / "flower"
    flower.mkdir(exist_ok=True)
    with locked(flower, "runtime"):
        assert "processes  starting; 0 restarts" in status_text(
            read_status(stage.federation, now_utc())
        )


def test_ended_program_of_a_running_aggregator_is_named(stage: AggregatorStandIn) -> None:
    dead = ended_process()
    stage.programs(
        pid=os.getpid(), superlink_pid=dead, num_restarts=3, restarts={"superlink": 3, "nginx": 0}
    )
    with locked(stage.federation.path / "flower", "runtime"):
        status = read_status(stage.federation, now_utc())
    assert status.processes.running and status.processes.num_restarts == 3
    lives = {one.name: (one.alive, one.num_restarts) for one in status.processes.programs}
    assert lives == {"aggregator run": (True, 0), "superlink": (False, 3), "nginx": (False, 0)}
    assert any("superlink has ended" in text for text in attention_points(status))


def test_rubbish_in_the_folders_is_left_out_and_never_followed(
    stage: AggregatorStandIn, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text(json.dumps({"state": "a private word"}))
    folder = stage.incoming("north")
    (folder / "status.json").symlink_to(secret)
    (folder / "1.part").mkdir()
    (folder / "1.part" / ".progress.json").write_text(
        '{"files": [{"num_bytes": -5}], "ranges": {"a": [[0]]}}'
    )
    os.mkfifo(folder / "2.part")
    (folder / "99999999999999999999").mkdir()
    (folder / "²").mkdir()
    (stage.federation.path / "flower").mkdir(exist_ok=True)
    (stage.federation.path / "flower" / "info.json").write_text(
        '{"pid": "1; rm", "superlink_pid": -1}'
    )
    receipts = stage.federation.receipts / stage.plan.plan_id / "north"
    receipts.mkdir(parents=True)
    (receipts / "3.json").write_bytes(b"\xff" * 100)
    stage.incoming("east").joinpath("status.json").write_text(
        json.dumps({"state": "x" * 5000, "progress": 1e9})
    )
    assert look(stage).state == "" and look(stage).arrival is None
    assert [one.verdict for one in look(stage).submissions] == ["unreadable"]
    assert (look(stage, "east").state, look(stage, "east").progress) == ("x" * 40, 0)
    assert "a private word" not in read_status(stage.federation, now_utc()).model_dump_json()


def test_standing_is_what_matters_most_to_the_operator() -> None:
    for verdicts, arriving, state, silent, expected, *codes in [
        ([], False, "", None, "absent"),
        ([], False, "", False, "offered"),
        ([], False, "training", False, "working"),
        ([], False, "awaiting_approval", False, "approval"),
        ([], True, "in_outbox", False, "sending"),
        ([], True, "in_outbox", True, "silent"),
        (["arrived"], False, "in_outbox", False, "arrived"),
        (["refused"], False, "training", False, "refused"),
        (["refused"], True, "in_outbox", False, "sending"),
        (["refused", "quarantined"], False, "in_outbox", True, "quarantined"),
        (["quarantined", "withdrawn"], False, "withdrawn", False, "withdrawn"),
        (["accepted"], False, "accepted", True, "accepted"),
        # A worker that ended says so with its last word, and is silent afterwards.
        ([], False, "training", True, "blocked", 33),
        ([], False, "waiting", False, "blocked", 34),
        (["arrived"], False, "in_outbox", False, "blocked", 35),
        (["refused"], False, "refused", True, "refused", 36),
        (["quarantined"], False, "in_outbox", False, "quarantined", 35),
        ([], False, "plan_refused", False, "declined", 130),
    ]:
        with case(
            verdicts=verdicts, arriving=arriving, state=state, silent=silent, expected=expected
        ):
            submissions = tuple(
                SubmissionStatus(sequence=n, verdict=verdict)
                for n, verdict in enumerate(verdicts, 1)
            )
            arrival = (
                Arrival(sequence=9, bytes_here=1, bytes_total=2, bytes_per_s=0.0)
                if arriving
                else None
            )
            assert (
                decide_standing(
                    submissions,
                    arrival,
                    SiloReport(state=state, code=sum(codes)),
                    answered=silent is not None,
                    silent=bool(silent),
                )
                == expected
            )


def test_silo_enrolled_after_the_plan_was_signed_is_listed_and_not_counted_as_missing(
    published: PublishedRelease,
) -> None:
    published.tiny.join("west", 20, index=2)
    status = read_status(published.tiny.federation, now_utc())
    west = status.silo("west")
    assert west and (west.standing, west.person, west.final) == ("unnamed", "nobody", True)
    assert "enrolled, not named by this plan" in status_text(status)
    values = page_values(status)
    assert (values["num_accepted"], values["num_planned"]) == (2, 2)
    assert not list(attention_points(status))


def test_worker_that_ended_is_shown_with_its_code_and_as_in_need_of_a_person(
    stage: AggregatorStandIn,
) -> None:
    stage.report("north", "training", 100, code=33)
    north = look(stage)
    assert (north.standing, north.code, north.person) == ("blocked", 33, "silo")
    status = read_status(stage.federation, now_utc())
    assert "training 100%, code 33" in status_text(status)
    assert any(text.startswith("north: needs a person there") for text in attention_points(status))
    # A number of an exit code, or none at all.
    for forged in (True, 256, -1, "33", None):
        stage.report("north", "training", 100, code=forged)
        assert look(stage).code == 0


def test_damaged_card_is_named_once_and_the_rest_is_shown(published: PublishedRelease) -> None:
    (published.tiny.federation.registry / "north.json").write_bytes(b"junk")
    status = read_status(published.tiny.federation, now_utc())
    assert len(status.problems) == 1
    assert {silo.silo_id for silo in status.silos} == {"east", "north"}


NUM_MANY = 256


def many_silos(stage: AggregatorStandIn) -> FederationStatus:
    """A status of 256 silos: some in need of a person, most at work."""
    standings: list[SiloStanding] = ["working"] * NUM_MANY
    standings[7] = "quarantined"
    standings[11] = "refused"
    standings[13:40] = ["blocked"] * 27
    standings[200:240] = ["accepted"] * 40
    silos = []
    for number, standing in enumerate(standings):
        submissions: tuple[SubmissionStatus, ...] = ()
        if standing == "refused":
            submissions = (SubmissionStatus(sequence=1, verdict="refused", code=12),)
        silo = SiloStatus(
            silo_id=f"silo{number:03}",
            standing=standing,
            state="training",
            progress=50,
            code=7 if standing == "blocked" else 0,
            person=STANDINGS[standing].person,
            last_seen=now_utc(),
            arrival=None,
            submissions=submissions,
            final=False,
        )
        silos.append(silo)
    return read_status(stage.federation, now_utc()).model_copy(update={"silos": tuple(silos)})


def test_status_of_256_silos_fits_a_screen_and_begins_with_those_that_need_a_person(
    stage: AggregatorStandIn,
) -> None:
    status = many_silos(stage)
    text = status_text(status)
    assert len(text.splitlines()) < 75
    assert "256 silos; 1 for you to decide; 28 waiting for a person at the silo" in text
    positions = [text.index(name) for name in ("silo007", "silo011", "silo013", "silo000")]
    assert positions == sorted(positions)
    # 27, 187 and 40 in the same state, of which ten are listed.
    for num_hidden in (17, 177, 30):
        assert f"and {num_hidden} more" in text
    assert len(list(attention_points(status))) < 20


def test_status_of_256_silos_lists_each_when_all_are_asked_for(stage: AggregatorStandIn) -> None:
    status = many_silos(stage)
    text = status_text(status, show_all=True)
    assert all(f"\nsilo{number:03} " in text for number in range(NUM_MANY))
    assert "more" not in text
    page = render(
        "aggregator",
        "live.html.jinja",
        refresh_s=5,
        paused=False,
        **page_values(status, show_all=True),
    )
    assert page.count('class="card" id="silo-') == NUM_MANY


def test_page_of_256_silos_shows_ten_of_a_state_and_how_many_more(
    stage: AggregatorStandIn,
) -> None:
    values = page_values(many_silos(stage))
    page = render("aggregator", "live.html.jinja", refresh_s=5, paused=False, **values)
    assert page.count('class="card" id="silo-') == 32
    assert "and 177 more" in page and 'href="./?all"' in page
