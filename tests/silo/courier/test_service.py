"""What a courier's service logs, and what ends it."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ddm.errors import TransportError
from ddm.transport.messages import Envelope, SiloState, Status, StatusQuery
from silo.config import Site
from silo.courier.handlers import SiteLimits, answer
from silo.courier.service import CourierWatch, watch_courier
from silo.courier.supernode import UNREACHABLE
from silo.query_note import read_unnamed_plan
from silo.worker.descriptions import Circumstances, describe_site
from silo.worker.state import State, write_courier_status


class Scripted:
    """A courier that does at each check what comes next in a list, and ends its watch after the last."""

    def __init__(self, *steps: Callable[[], str | None]) -> None:
        self.problem: str | None = None
        self._steps = iter(steps)
        self.ended = threading.Event()
        self.num_left = len(steps)
        self.num_asked = 0

    def check(self) -> None:
        self.num_left -= 1
        if not self.num_left:
            self.ended.set()
        self.problem = next(self._steps)()

    def why_unreachable(self) -> str | None:
        self.num_asked += 1
        return "the proxy says no. Ask it." if self.num_asked == 1 else None


def full_disk() -> None:
    raise OSError(28, "No space left on device")


def broken() -> None:
    raise TransportError("SuperNode", expected="a program that starts", got="none")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = threading.Event.wait
    # Who waits without a limit, as a thread's start does, needs what it waits for.
    monkeypatch.setattr(
        threading.Event, "wait", lambda event, limit=None: wait(event, limit and min(limit, 0.01))
    )


def test_reason_is_logged_once_and_a_full_disk_is_no_end(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, "silo")
    courier = Scripted(
        *2 * [lambda: "no way in"], full_disk, full_disk, *2 * [lambda: None], lambda: "no way in"
    )
    watch_courier(courier, courier.ended, Site(tmp_path))  # type: ignore[arg-type]
    assert caplog.messages == [
        "courier: no way in",
        "courier: No space left on device",
        "courier: connected",
        "courier: no way in",
    ]


@pytest.mark.parametrize("state", ["in_outbox", "accepted", "superseded", "withdrawn"])
def test_an_aggregator_that_does_not_run_is_no_alarm_between_two_plans(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, state: SiloState
) -> None:
    (tmp_path / "outbox").mkdir()
    write_courier_status(Site(tmp_path), State(state=state, plan_id="tiny-00000001"))
    caplog.set_level(logging.INFO, "silo")
    courier = Scripted(lambda: None, lambda: UNREACHABLE, lambda: UNREACHABLE)
    watch_courier(courier, courier.ended, Site(tmp_path))  # type: ignore[arg-type]
    alarms = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert alarms == (["courier: the proxy says no. Ask it."] if state == "in_outbox" else [])


def test_failure_beside_a_worker_is_raised_when_the_worker_has_ended(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    watch = CourierWatch(Scripted(lambda: None, broken, lambda: None), Site(tmp_path))  # type: ignore[arg-type]
    watch.start()
    watch.join(60.0)
    watch.close()
    with pytest.raises(TransportError):
        watch.raise_failure()
    assert "courier: SuperNode: expected a program that starts" in caplog.text


def test_missing_connection_is_explained_once_and_again_after_the_next_success(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, "silo")
    courier = Scripted(*3 * [lambda: UNREACHABLE], lambda: None, *2 * [lambda: UNREACHABLE])
    watch_courier(courier, courier.ended, Site(tmp_path))  # type: ignore[arg-type]
    assert caplog.messages == [
        "courier: the proxy says no. Ask it.",
        "courier: connected",
        f"courier: {UNREACHABLE}",
    ]
    assert courier.num_asked == 2


def test_silo_that_the_plan_does_not_name_hears_so_once_and_no_word_of_its_key(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, "silo")
    (tmp_path / "courier").mkdir()
    (tmp_path / "outbox").mkdir()
    limits = SiteLimits(tmp_path, bundle_bytes=1, shard_bytes=1, submission_bytes=1)
    ask = StatusQuery(
        plan_id="tiny-00000002",
        named=False,
        known=Status(),
        received=0,
        max_bytes=0,
        wait_s=0,
    )
    assert answer(Envelope(ask), limits).message.code == 0
    assert read_unnamed_plan(tmp_path) == "tiny-00000002"
    courier = Scripted(*3 * [lambda: None])
    watch_courier(courier, courier.ended, Site(tmp_path))  # type: ignore[arg-type]
    assert caplog.text.count("plan tiny-00000002 is in force and requires nothing") == 1
    situation = describe_site(State(), Circumstances(running=True, unnamed_plan="tiny-00000002"))
    assert "does not name this site" in situation.now and situation.person == "nobody"
    answer(Envelope(ask.model_copy(update={"named": True})), limits)
    assert read_unnamed_plan(tmp_path) is None
