"""Signing a plan: what a crash leaves behind, and when a plan may not be replaced."""

from pathlib import Path

import pytest

from aggregator.setup import load_key
from aggregator.taking_in import IntakeDesk
from ddm.errors import BusyError, SetupError
from ddm.trust.repository import Repository
from ddm.trust.verify import verify_bundle
from tests.conftest import Published
from tests.federation import PASSPHRASE


class Crash(BaseException):
    """Nothing catches it, as nothing catches kill -9."""


def stop(*arguments: object, **named: object) -> None:
    raise Crash


def test_old_plan_works_on_when_signing_stopped_before_the_first_signature(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(Repository, "start_plan", stop)
        published.tiny.sign()
    published.tiny.publish(tmp_path / "next")


@pytest.mark.parametrize("where", ["_close", "export_bundle"])
def test_operator_is_told_to_sign_again_when_signing_stopped_after_the_first_signature(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    tiny = published.tiny
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(Repository, where, stop)
        tiny.sign()
    for attempt in (lambda: tiny.publish(tmp_path / "next"), tiny.take_in):
        with pytest.raises(SetupError) as refused:
            attempt()
        assert "aggregator plan" in refused.value.remedy
    again = tiny.sign()
    assert tiny.federation.current_plan()[0].plan_id == again
    assert verify_bundle(tiny.federation.bundle(again), tiny.root.read_bytes(), state=None).plan_id == again
    assert {path.name for path in (tiny.federation.path / "plans").iterdir()} == {
        published.plan_id,
        again,
        "current.json",
    }


def test_plan_is_not_replaced_while_intake_is_at_work(published: Published) -> None:
    tiny = published.tiny
    desk = IntakeDesk(tiny.federation, load_key(tiny.federation, "receipts", PASSPHRASE), lambda receipt: None)
    with desk.locked(), pytest.raises(BusyError):
        tiny.sign()
    assert tiny.federation.current_plan()[0].plan_id == published.plan_id
