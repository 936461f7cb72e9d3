"""A federation in which one silo is late."""

from pathlib import Path

import pytest

from aggregator.intake.inventory import take_inventory
from aggregator.router.train import train_router
from tests.support.federation import PlannedFederation, TinyFederation
from tests.support.publishing import publish_short_pages


@pytest.fixture
def short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishing writes pages of a line: drawing them takes longer than all the rest, and has tests of its own."""
    publish_short_pages(monkeypatch)


@pytest.fixture(scope="session")
def late_once(tmp_path_factory: pytest.TempPathFactory) -> PlannedFederation:
    """Two silos of which one has answered, the other has trained and waits to be fetched."""
    tiny = TinyFederation.create(tmp_path_factory.mktemp("late"), {"east": 40, "north": 60})
    plan_id = tiny.sign()
    for silo_id in ("east", "north"):
        tiny.deliver_plan(silo_id, plan_id)
        tiny.work(silo_id)
    tiny.collect("north", plan_id)
    tiny.take_in()
    train_router(tiny.federation, take_inventory(tiny.federation), seed=0)
    return PlannedFederation(tiny, plan_id)


@pytest.fixture
def late(late_once: PlannedFederation, tmp_path: Path) -> PlannedFederation:
    """A copy that a test may change."""
    return late_once.copy(tmp_path / "late")
