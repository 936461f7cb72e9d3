"""A federation in which one silo is late."""

import shutil
from pathlib import Path

import pytest

from aggregator.intake.inventory import take_inventory
from aggregator.router.train import train_router
from tests.support.federation import TinyFederation


@pytest.fixture(scope="session")
def late_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyFederation, str]:
    """Two silos of which one has answered, the other has trained and waits to be fetched."""
    tiny = TinyFederation.create(tmp_path_factory.mktemp("late"), {"east": 40, "north": 60})
    plan_id = tiny.sign()
    for silo_id in ("east", "north"):
        tiny.deliver_plan(silo_id, plan_id)
        tiny.work(silo_id)
    tiny.collect("north", plan_id)
    tiny.take_in()
    train_router(tiny.federation, take_inventory(tiny.federation), seed=0)
    return tiny, plan_id


@pytest.fixture
def late(late_once: tuple[TinyFederation, str], tmp_path: Path) -> tuple[TinyFederation, str]:
    original, plan_id = late_once
    shutil.copytree(original.path, tmp_path / "late")
    sites = {silo_id: type(site)(tmp_path / "late" / silo_id) for silo_id, site in original.sites.items()}
    return TinyFederation(tmp_path / "late", type(original.federation)(tmp_path / "late" / "fed"), sites), plan_id
