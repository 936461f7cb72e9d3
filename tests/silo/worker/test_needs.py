"""What the aggregator hears of a worker that ended or waits for a person: one number, as long as it is true."""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ddm.errors import AuditError, DataError
from ddm.system.console import EXIT_INTERRUPTED
from ddm.transport.messages import Status, StatusFile, StatusQuery
from silo.config import Site
from silo.courier.handlers import SiteLimits, read_status
from silo.query_note import keep_query
from silo.running import let_reply, wait_until_heard
from silo.worker.state import State, load_state, reported_code, state_path
from silo.worker.status import read_status as read_site_status
from silo.worker.worker import Worker
from tests.support.commands import TypedAnswers, run_command
from tests.support.federation import POLICY, PlannedFederation, TinyFederation, write_policy

SILO = "north"
UNWAIVED: dict[str, Any] = POLICY | {"audit": {"holdout_share": 0.25, "min_holdout_units": 10}}


@pytest.fixture
def tiny(planned_once: PlannedFederation, tmp_path: Path) -> TinyFederation:
    return planned_once.tiny.copy(tmp_path / "copy")


def stop_in(state_name: str, stopping: threading.Event) -> Any:
    def stop(state: State) -> None:
        if state.state == state_name:
            stopping.set()

    return stop


def sent(site: Site) -> dict[str, Any]:
    return json.loads((site.outbox / "status.json").read_bytes())  # type: ignore[no-any-return]


def test_worker_that_ends_with_an_error_reports_its_exit_code_and_no_text(
    tiny: TinyFederation,
) -> None:
    site = tiny.sites[SILO]
    write_policy(site, POLICY | {"training": {"min_images": 41}})
    with pytest.raises(DataError):
        Worker(site, tiny.key(SILO), lambda state: None).run()
    assert set(sent(site)) == set(StatusFile.model_fields)
    assert (sent(site)["state"], sent(site)["code"]) == ("plan_accepted", DataError.exit_code)
    shown = read_site_status(site)
    assert shown.situation.person == "silo"
    assert f"the work stopped with code {DataError.exit_code}; no worker is running" in shown.text()


def test_worker_that_is_started_again_takes_its_code_back(tiny: TinyFederation) -> None:
    site = tiny.sites[SILO]
    stopping = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        Worker(site, tiny.key(SILO), stop_in("scanned", stopping), stopping=stopping).run()
    assert reported_code(site) == EXIT_INTERRUPTED
    Worker(site, tiny.key(SILO), lambda state: None).begin()
    assert reported_code(site) == 0


def test_aggregator_hears_of_another_plan_that_a_person_is_needed_and_nothing_else(
    tiny: TinyFederation,
) -> None:
    site = tiny.sites[SILO]
    write_policy(site, POLICY | {"training": {"min_images": 41}})
    with pytest.raises(DataError):
        Worker(site, tiny.key(SILO), lambda state: None).run()
    limits = SiteLimits(site.path, bundle_bytes=1, shard_bytes=1, submission_bytes=1)
    heard = read_status("tiny-99999999", limits)
    assert (heard.state, heard.progress, heard.code) == ("waiting", 0, DataError.exit_code)


def test_attended_worker_waits_for_a_waiver_and_goes_on_when_it_is_written(
    tiny: TinyFederation,
) -> None:
    site = tiny.sites[SILO]
    write_policy(site, UNWAIVED)
    stopping = threading.Event()
    waited_in = list[str]()

    def waive(state: State) -> None:
        assert state.problem and state.problem.code == AuditError.exit_code
        assert reported_code(site) == AuditError.exit_code
        shown = read_site_status(site)
        # The lock is of this process, which is the worker.
        assert shown.circumstances.blocked and shown.situation.person == "silo"
        assert "no worker is running" not in shown.text()
        waited_in.append(state.state)
        options = ("--role", "a role", "--reason", "a reason", "--until", "2999-01-01")
        result = run_command("silo", "waive", site.path, *options)
        assert result.code == 0 and "goes on" in result.out, result.err

    worker = Worker(
        site,
        tiny.key(SILO),
        stop_in("in_outbox", stopping),
        stopping=stopping,
        on_wait=waive,
    )
    with pytest.raises(KeyboardInterrupt):
        worker.run()
    assert waited_in == ["plan_accepted"]
    state = load_state(state_path(site.private))
    assert state.state == "in_outbox" and state.problem is None
    log = run_command("silo", "log", "show", site.path).out
    assert log.count("policy") >= 2, "the policy of the start, and the one with the waiver"


def test_worker_that_nobody_attends_takes_up_a_waiver_that_came_since_it_started(
    tiny: TinyFederation,
) -> None:
    site = tiny.sites[SILO]
    write_policy(site, UNWAIVED)
    stopping = threading.Event()
    stop = stop_in("in_outbox", stopping)

    def waive_once_the_plan_is_accepted(state: State) -> None:
        stop(state)
        if state.state == "plan_accepted" and site.policy().audit.waiver is None:
            options = ("--role", "a role", "--reason", "a reason", "--until", "2999-01-01")
            result = run_command("silo", "waive", site.path, *options)
            assert result.code == 0 and "when the audit needs it" in result.out, result.err

    with pytest.raises(KeyboardInterrupt):
        Worker(site, tiny.key(SILO), waive_once_the_plan_is_accepted, stopping=stopping).run()
    assert load_state(state_path(site.private)).state == "in_outbox"


def test_worker_that_nobody_attends_ends_without_a_waiver(tiny: TinyFederation) -> None:
    site = tiny.sites[SILO]
    write_policy(site, UNWAIVED)
    with pytest.raises(AuditError):
        Worker(site, tiny.key(SILO), lambda state: None).run()
    assert reported_code(site) == AuditError.exit_code


def test_one_command_waives_for_several_sites_and_asks_for_what_no_option_says(
    tiny: TinyFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, digest = tiny.federation.current_plan()
    other = next(silo_id for silo_id in tiny.sites if silo_id != SILO)
    tiny.deliver_plan(other, plan.plan_id)
    for silo_id in (SILO, other):
        write_policy(tiny.sites[silo_id], UNWAIVED)
        with pytest.raises(AuditError):
            Worker(tiny.sites[silo_id], tiny.key(silo_id), lambda state: None).run()
    answers = ["head of data", "made up", "31.12.2999", "2999-12-31"]
    monkeypatch.setattr(sys, "stdin", TypedAnswers(*answers))
    result = run_command("silo", "waive", tiny.sites[SILO].path, tiny.sites[other].path)
    assert result.code == 0, result.err
    for silo_id in (SILO, other):
        waiver = tiny.sites[silo_id].policy().audit.waiver
        assert waiver and (waiver.role, waiver.plan_digest) == ("head of data", digest)


class BusyCourier:
    """Answers the aggregator until it was looked at twice."""

    num_looks = 0

    @property
    def is_answering(self) -> bool:
        self.num_looks += 1
        return self.num_looks <= 2


def test_courier_stays_until_its_reply_has_left_however_busy_the_machine_is() -> None:
    courier = BusyCourier()
    let_reply(courier, threading.Event(), linger_s=0.0)  # type: ignore[arg-type]
    assert courier.num_looks == 3
    stopped = threading.Event()
    stopped.set()
    let_reply(courier, stopped)  # type: ignore[arg-type]
    assert courier.num_looks == 4


def test_courier_stays_until_the_aggregator_knows_the_code_and_no_longer_than_it_may(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    (tmp_path / "courier").mkdir()
    stop = threading.Event()
    query = StatusQuery(
        plan_id="tiny-00000001",
        known=Status(code=0),
        received=0,
        max_bytes=0,
        wait_s=0,
    )
    keep_query(tmp_path, query)
    assert not wait_until_heard(site, DataError.exit_code, stop, limit_s=0.01)
    keep_query(tmp_path, query.model_copy(update={"known": Status(code=DataError.exit_code)}))
    assert wait_until_heard(site, DataError.exit_code, stop)
    stop.set()
    assert not wait_until_heard(site, AuditError.exit_code, stop)
