"""An aggregator on a full or read-only disk says so before it starts a program, trains a router or signs a release."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from aggregator.intake.inventory import take_inventory
from aggregator.intake.limits import bytes_to_come, submission_bytes
from aggregator.release.publish import publish
from aggregator.router.train import train_router
from aggregator.runtime.running import run_federation
from ddm.errors import DiskError
from tests.conftest import PublishedRelease
from tests.support.federation import PASSPHRASE, PlannedFederation, TinyFederation


def fails_to_sync(folder: Path) -> Callable[[int], None]:
    """What a disk does that has become read-only, below one folder."""
    sync = os.fsync

    def failing(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(folder):
            raise OSError(30, "Read-only file system")
        sync(descriptor)

    return failing


def test_run_needs_room_for_each_silo_s_largest_submission_and_its_copy(
    planned_once: PlannedFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = planned_once.tiny.copy(tmp_path / "tiny")
    _ = planned_once.plan_id
    plan, _ = tiny.federation.current_plan()
    needed = 2 * len(tiny.sites) * submission_bytes(plan)
    assert bytes_to_come(tiny.federation, plan) == needed
    monkeypatch.setattr("ddm.io.space.free_bytes", lambda folder: needed - 1)
    with pytest.raises(DiskError) as refusal:
        run_federation(tiny.federation, PASSPHRASE)
    said = str(refusal.value)
    assert f"at least {needed} bytes free" in said and f"got {needed - 1} bytes free" in said
    assert str(tiny.federation.incoming) in said
    assert not (tiny.federation.path / "flower" / "run.json").exists(), "no program was started"


@pytest.mark.parametrize("name", ["incoming", "accepted", "receipts", "registry", "flower"])
def test_run_names_the_folder_that_is_read_only(
    name: str, planned_once: PlannedFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = planned_once.tiny.copy(tmp_path / "tiny")
    folder = tiny.federation.path / name
    monkeypatch.setattr(os, "fsync", fails_to_sync(folder))
    with pytest.raises(DiskError, match="Read-only") as refusal:
        run_federation(tiny.federation, PASSPHRASE)
    assert refusal.value.subject == str(folder)


def router(tiny: TinyFederation, out: Path) -> None:
    train_router(tiny.federation, take_inventory(tiny.federation), seed=0)


def release(tiny: TinyFederation, out: Path) -> None:
    publish(tiny.federation, PASSPHRASE, out, rehearsal=True, renew=True)


@pytest.mark.parametrize("act", [router, release])
def test_router_and_release_begin_on_no_full_and_no_read_only_disk(
    act: Callable[[TinyFederation, Path], None],
    published: PublishedRelease,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny = published.tiny
    before = sorted(path for path in tiny.federation.path.rglob("*") if ".lock" not in path.name)
    with monkeypatch.context() as patch, pytest.raises(DiskError, match="1000 bytes free"):
        patch.setattr("ddm.io.space.free_bytes", lambda folder: 1000)
        act(tiny, tmp_path / "out")
    with monkeypatch.context() as patch, pytest.raises(DiskError, match="Read-only"):
        patch.setattr(os, "fsync", fails_to_sync(tiny.federation.path))
        act(tiny, tmp_path / "out")
    assert (
        sorted(path for path in tiny.federation.path.rglob("*") if ".lock" not in path.name)
        == before
    )
