"""A site whose disk is too small or read-only says so before the first step of training."""

import os
from pathlib import Path

import pytest
import torch

from ddm.errors import DiskError
from ddm.io.settings import save_settings
from ddm.planning.estimates import plan_bytes
from ddm.training.config import TrainingSettings
from ddm.training.inputs import write_inputs
from ddm.training.job import JobFolder
from silo.config import Policy, Site
from silo.plan.acceptance import load_accepted
from silo.plan.workspace import open_workspace
from silo.worker.disk_space import audit_bytes, job_bytes
from silo.worker.state import State
from silo.worker.worker import Worker
from tests.support.federation import (
    POLICY,
    PlannedFederation,
    TinyFederation,
    recipe,
    set_training,
    write_policy,
)
from tests.support.submissions import SILO


@pytest.fixture
def planned(planned_once: PlannedFederation, tmp_path: Path) -> PlannedFederation:
    return planned_once.copy(tmp_path / "tiny")


def worker(tiny: TinyFederation) -> Worker:
    return Worker(tiny.sites[SILO], tiny.key(SILO), lambda state: None)


def written(folder: Path) -> int:
    """What lies in a folder, each file counted once."""
    files = {
        path.lstat().st_ino: path.lstat().st_size for path in folder.rglob("*") if path.is_file()
    }
    return sum(files.values())


def trained(site: Site) -> bool:
    return any((site.private / "checkpoints").rglob("step-*"))


def test_full_disk_is_found_before_training_and_again_after_it_filled_up(
    planned: PlannedFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, plan_id = planned
    monkeypatch.setattr("ddm.io.space.free_bytes", lambda folder: 12_345)
    with pytest.raises(DiskError) as refusal:
        tiny.work(SILO, until="training")
    said = str(refusal.value)
    assert (
        "got 12345 bytes free" in said
        and f"for plan {plan_id}" in said
        and str(tiny.sites[SILO].private) in said
    )
    assert tiny.state_of(SILO).state == "plan_accepted" and not trained(tiny.sites[SILO])
    with monkeypatch.context() as patch:
        patch.setattr("ddm.io.space.free_bytes", lambda folder: 1 << 40)
        tiny.work(SILO, until="training")
    with pytest.raises(DiskError):
        tiny.work(SILO)
    assert not trained(tiny.sites[SILO])
    monkeypatch.undo()
    assert tiny.work(SILO).state == "in_outbox"


def test_room_asked_for_is_no_less_than_what_the_work_writes_and_not_much_more(
    planned: PlannedFederation,
) -> None:
    tiny, plan_id = planned
    site = tiny.sites[SILO]
    before = written(site.private) + written(site.outbox)
    most = 0
    running = worker(tiny)
    running.begin()
    while running.state.state != "in_outbox":
        running.step()
        most = max(most, written(site.private) + written(site.outbox) - before)
    accepted = load_accepted(site, plan_id, running.state.plan_digest or "")
    needed = plan_bytes(accepted.plan, 40, 40)
    copied = written(site.private / "plans" / plan_id)  # on acceptance, before this is asked
    assert most - copied <= needed <= (most - copied) * 2 + (2 << 20)
    assert written(open_workspace(site, plan_id).folder) > 0


@pytest.mark.parametrize("name", ["private", "outbox", "checkpoints"])
def test_worker_ends_before_its_first_step_where_a_folder_refuses_a_write(
    planned: PlannedFederation, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, _ = planned
    site = tiny.sites[SILO]
    opened = os.open
    (site.private / "checkpoints").mkdir(exist_ok=True)

    def read_only(path: object, flags: int, *rest: object, **more: object) -> int:
        if flags & os.O_WRONLY and name in (Path(str(path)).name, Path(str(path)).parent.name):
            raise OSError(30, "Read-only file system")
        return opened(path, flags, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(DiskError, match="Read-only") as refusal:
        worker(tiny).run()
    assert refusal.value.subject.endswith(name)
    assert not trained(site)


@pytest.mark.slow
def test_room_of_the_audit_and_of_jobs_elsewhere_is_what_they_write_and_not_much_more(
    tmp_path: Path,
) -> None:
    tiny = TinyFederation.create(tmp_path / "tiny", {SILO: 80})
    limits = {"required": True, "min_holdout_units": 10, "max_mia_auc": 1.0}
    plan_id = tiny.sign(recipe(audit=limits))
    tiny.deliver_plan(SILO, plan_id)
    site = tiny.sites[SILO]
    terms = limits | {"holdout_share": 0.25, "num_samples": 1500}
    write_policy(site, POLICY | {"audit": terms | {"waiver": site.policy().audit.waiver}})
    # Checkpoints are part of what is written.
    set_training(site, checkpoint_s=0.0)
    tiny.work(SILO, until="training")
    work = open_workspace(site, plan_id)
    most = [0]

    def measure(state: State) -> None:
        files = [
            *(work.folder / "audit").rglob("*"),
            *(work.folder / "experts").glob("audit-*/**/*"),
        ]
        most[0] = max(most[0], sum(path.stat().st_size for path in files if path.is_file()))

    running = Worker(site, tiny.key(SILO), measure)
    running.begin()
    while running.state.state != "audited":
        running.step()
    plan = load_accepted(site, plan_id, running.state.plan_digest or "").plan
    assert most[0] <= audit_bytes(plan, 80, site.policy()) <= 2 * most[0] + (1 << 20)
    assert audit_bytes(plan, 80, Policy()) == 0, (
        "a site that holds nothing out writes nothing for it"
    )
    images = torch.zeros(60, *plan.expert_shape)
    folder = JobFolder(tmp_path / "job")
    folder.path.mkdir()
    write_inputs({"images": images}, {}, folder, is_complete=True)
    assert (
        written(folder.path) <= job_bytes(plan, 60) - job_bytes(plan, 0) <= 3 * written(folder.path)
    )


def test_disk_of_the_jobs_folder_is_looked_at_where_other_machines_train(
    planned: PlannedFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, _ = planned
    site = tiny.sites[SILO]
    needs: list[dict[Path, int]] = []
    monkeypatch.setattr(
        "silo.worker.disk_space.require_free_space",
        lambda needed, purpose: needs.append(dict(needed)),
    )
    tiny.copy(tiny.path.parent / "here").work(SILO, until="scanned")
    jobs = tiny.path.parent / "shared" / "jobs"
    jobs.parent.mkdir()
    elsewhere = TrainingSettings(launcher=("true", "{folder}"), jobs=jobs)
    save_settings(
        site.settings().model_copy(update={"training": elsewhere}), site.path / "silo.toml", "test"
    )
    tiny.work(SILO, until="scanned")
    plan = load_accepted(site, planned[1], tiny.state_of(SILO).plan_digest or "").plan
    assert jobs.parent not in needs[0] and needs[1][jobs.parent] == job_bytes(plan, 40)
