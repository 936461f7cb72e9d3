"""Pause and resume: what stops, what stays, what survives kill -9, and what of loss and speed leaves: nothing."""

import json
import logging
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ddm.footprint import training_bytes
from ddm.planning.devices import DEVICES
from ddm.planning.estimates import expert_bytes
from ddm.system.console import run_app
from ddm.system.processes import program
from ddm.training.progress import Progress
from ddm.training.state import TrainingState
from silo.audit.holdout import num_holdout_units
from silo.cli import app
from silo.config import Site
from silo.plan.acceptance import load_accepted
from silo.running import Narrator
from silo.worker.pause import is_halted, pause, present_pause, resume
from silo.worker.progress import ProgressMeter, read_note
from silo.worker.state import State, load_state, save_state, state_path
from silo.worker.status import read_status
from silo.worker.worker import Worker
from tests.silo.worker.test_worker import recipe_of_many_steps
from tests.support.commands import run_command
from tests.support.federation import PASSPHRASE, PlannedFederation, TinyFederation, set_training
from tests.support.threads import THREADS
from tests.support.waiting import LIMIT_S, wait_until

SILO = "north"


@pytest.fixture
def planned(planned_once: PlannedFederation, tmp_path: Path) -> PlannedFederation:
    return planned_once.copy(tmp_path / "copy")


def start(site: Site, secret: Path) -> "subprocess.Popen[str]":
    words = [
        str(program("silo")),
        "run",
        str(site.path),
        "--only",
        "worker",
        "--passphrase-file",
        str(secret),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )


def end(process: "subprocess.Popen[str]", number: signal.Signals) -> str:
    process.send_signal(number)
    _, said = process.communicate(timeout=LIMIT_S)
    return said


def test_training_that_is_paused_goes_on_at_the_next_step_and_ends_with_the_undisturbed_bytes(
    planned: PlannedFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, plan_id = planned
    site = tiny.sites[SILO]
    control = tiny.copy(tmp_path / "control")
    control.work(SILO)
    stopping = threading.Event()
    waited = list[str]()
    steps = list[int]()
    advance = TrainingState.advance

    def counted(self: TrainingState, *words: object) -> None:
        steps.append(self.step)
        if self.step == 3:
            pause(site)
            threading.Thread(target=when_halted, args=(site, waited)).start()
        advance(self, *words)  # type: ignore[arg-type]

    monkeypatch.setattr(TrainingState, "advance", counted)

    def stop_at_the_end(state: State) -> None:
        if state.state == "in_outbox":
            stopping.set()

    with pytest.raises(KeyboardInterrupt):
        Worker(site, tiny.key(SILO), stop_at_the_end, stopping=stopping).run()
    assert waited == ["training"]
    # none is taken twice: the checkpoint was written when it stopped
    assert steps == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]
    expert = f"{plan_id}/1/silos/{SILO}/experts/{SILO}/expert.safetensors"
    assert (site.outbox / expert).read_bytes() == (control.sites[SILO].outbox / expert).read_bytes()


def when_halted(site: Site, waited: list[str]) -> None:
    """Resume a site once its worker waits, and note in which state."""
    wait_until(lambda: is_halted(site), "a worker that has stopped")
    waited.append(load_state(state_path(site.private)).state)
    resume(site)


@pytest.mark.slow
def test_paused_training_waits_through_kill_and_restart_and_ends_with_the_undisturbed_bytes(
    tmp_path: Path,
) -> None:
    tiny = TinyFederation.create(tmp_path / "tiny", {SILO: 40})
    plan_id = tiny.sign(recipe_of_many_steps())
    tiny.deliver_plan(SILO, plan_id)
    control = tiny.copy(tmp_path / "control")
    site = tiny.sites[SILO]
    set_training(site, checkpoint_s=0.0)
    secret = tmp_path / "pass"
    secret.write_bytes(PASSPHRASE + b"\n")
    first = start(site, secret)
    checkpoints = site.private / "checkpoints" / plan_id / "experts" / SILO / "training"
    wait_until(lambda: any(checkpoints.rglob("*.json")) or first.poll() is not None, "a checkpoint")
    assert "Paused since" in run_command("silo", "pause", site.path).out
    wait_until(lambda: is_halted(site) or first.poll() is not None, "a worker that has stopped")
    sent = (site.outbox / "status.json").read_bytes()
    assert json.loads(sent)["state"] == "training" and "pause" not in sent.decode()
    assert (
        sum(1 for _ in checkpoints.rglob("*.json")) > 0
        and load_state(state_path(site.private)).state == "training"
    )
    assert f"silo resume {site.path}" in run_command("silo", "status", site.path).out
    assert "paused since" in end(first, signal.SIGKILL)
    assert not is_halted(site)
    second = start(site, secret)
    wait_until(
        lambda: is_halted(site) or second.poll() is not None, "a worker that waits from its start"
    )
    assert json.loads((site.outbox / "status.json").read_bytes())["state"] == "training"
    assert run_command("silo", "resume", site.path).out == "Resumed: the worker goes on.\n"
    wait_until(
        lambda: (
            load_state(state_path(site.private)).state == "in_outbox" or second.poll() is not None
        ),
        "the end",
    )
    assert "silo resume" in end(second, signal.SIGTERM)
    torch.set_num_threads(1)  # as the worker's own process has
    try:
        control.work(SILO)
    finally:
        torch.set_num_threads(THREADS)
    expert = f"{plan_id}/1/silos/{SILO}/experts/{SILO}/expert.safetensors"
    assert (site.outbox / expert).read_bytes() == (control.sites[SILO].outbox / expert).read_bytes()


class Spy:
    """Looks at everything in the outbox whenever the worker reports."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.sent: list[bytes] = []
        self.private: list[str] = []

    def __call__(self, state: object) -> None:
        for path in sorted(self._site.outbox.rglob("*")):
            if path.is_file() and path.read_bytes() not in self.sent:
                self.sent.append(path.read_bytes())
        if (note := read_note(self._site.private)) is not None and note.loss is not None:
            self.private.append(f"{note.loss!r}")


def work(tiny: TinyFederation, until: str) -> Spy:
    spy = Spy(tiny.sites[SILO])
    worker = Worker(tiny.sites[SILO], tiny.key(SILO), spy)
    worker.begin()
    while worker.state.state != until:
        worker.step()
    return spy


def test_loss_and_speed_stay_in_the_private_folder(
    planned: PlannedFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("worker", "progress"):
        monkeypatch.setattr(f"silo.worker.{module}.NOTE_S", 0.0)
    tiny, _ = planned
    other = tiny.copy(tmp_path / "other")
    spy = work(tiny, "released")
    assert spy.private and len(spy.sent) > 3  # a loss was there to be sent, and so were states
    assert {frozenset(json.loads(sent)) for sent in spy.sent} == {
        frozenset({"plan_id", "state", "progress", "sequence", "code"})
    }
    # The same work with another loss and at another speed tells the aggregator the same, byte for byte.
    real = ProgressMeter.train

    def distorted(self: ProgressMeter, plan_id: str, progress: Progress, batch_size: int) -> None:
        real(
            self,
            plan_id,
            Progress(progress.step, progress.num_steps, 7.5, 123.0, progress.seconds),
            batch_size,
        )

    monkeypatch.setattr(ProgressMeter, "train", distorted)
    changed = work(other, "released")
    assert changed.private == ["7.5"] * len(changed.private) != spy.private
    assert changed.sent == spy.sent


def test_status_command_estimates_time_memory_and_disk_until_training_begins(
    planned: PlannedFederation, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny, plan_id = planned
    site = tiny.sites[SILO]

    def shown() -> dict[str, Any]:
        with pytest.raises(SystemExit) as left:
            run_app(app, ["status", str(site.path), "--json"])
        assert not left.value.code
        return dict(json.loads(capsys.readouterr().out))

    state = tiny.work(SILO, until="scanned")
    save_state(state_path(site.private), state)
    estimate = shown()["estimate"]
    plan = load_accepted(site, plan_id, state.plan_digest or "").plan
    assert estimate["memory_bytes"] == training_bytes(plan)
    assert estimate["disk_bytes"] > expert_bytes(plan)
    assert [*estimate["times"]][1:] == [device.name for device in DEVICES]
    assert all(duration["train_s"] > 0 for duration in estimate["times"].values())
    # Where too few units are held out, no audit runs.
    num_units = plan.agreed[SILO].units(plan.statistics.unit)
    is_audited = num_holdout_units(num_units, site.policy()) >= plan.audit.min_holdout_units
    assert all((duration["audit_s"] > 0) == is_audited for duration in estimate["times"].values())
    assert not is_audited
    save_state(state_path(site.private), tiny.work(SILO, until="training"))
    assert shown()["estimate"] is None


def test_status_shows_step_loss_speed_and_time_left_while_a_worker_is_at_work(
    planned: PlannedFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, plan_id = planned
    site = tiny.sites[SILO]
    assert read_status(site).next_command == f"silo run {site.path}"
    assert "no worker is running" in read_status(site).text()
    state = tiny.work(SILO, until="training")
    save_state(state_path(site.private), state)
    ProgressMeter(site.private).train(plan_id, Progress(3, 6, 0.512, 2.0, 1.5), batch_size=8)
    assert read_status(site).note is None  # nobody trains at present
    monkeypatch.setattr("silo.worker.status.is_locked", lambda folder, holder: holder == "worker")
    status = read_status(site)
    assert "3 of 6 (50%), 16 images/s, 2 s left, loss 0.512" in status.text()
    assert "ahead    audit, statistics, approval, receipt" in status.text()
    assert status.next_command is None
    values = status.as_json()
    assert (
        values["state"] == "training" and values["plan_id"] == plan_id and values["running"] is True
    )
    note = values["progress"]
    assert isinstance(note, dict)
    assert (note["done"], note["total"], note["images_per_s"], note["seconds_left"]) == (
        3,
        6,
        16.0,
        1.5,
    )
    assert note["loss"] == 0.512
    save_state(state_path(site.private), state.model_copy(update={"state": "audited"}))
    assert read_status(site).note is None  # what is noted is of a stage that is over


def test_status_of_a_worker_that_waits_for_a_person_shows_no_progress(
    planned: PlannedFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, plan_id = planned
    site = tiny.sites[SILO]
    save_state(state_path(site.private), tiny.work(SILO, until="plan_accepted"))
    ProgressMeter(site.private).count("reading images", plan_id, 8, 9)
    monkeypatch.setattr("silo.worker.status.is_locked", lambda folder, holder: holder == "worker")
    assert "reading images" in read_status(site).text()
    monkeypatch.setattr("silo.worker.status.reported_code", lambda site: 33)
    assert "reading images" not in read_status(site).text()


def test_time_left_of_a_count_follows_its_own_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("silo.worker.progress.time.monotonic", lambda: now[0])
    meter = ProgressMeter(tmp_path)
    plan_id = "tiny-00000000"
    meter.count("reading images", plan_id, 0, 100)
    now[0] += 10.0
    meter.count("reading images", plan_id, 20, 100)
    note = read_note(tmp_path)
    assert note and (note.images_per_s, note.seconds_left) == (2.0, 40.0)
    now[0] += 90.0
    # another stage begins: the first one's speed says nothing
    meter.count("assigning images", plan_id, 50, 100)
    note = read_note(tmp_path)
    assert note and (note.stage, note.images_per_s, note.seconds_left) == (
        "assigning images",
        None,
        None,
    )


def test_pause_stops_every_stage_and_resume_twice_does_no_harm(
    planned: PlannedFederation,
) -> None:
    tiny, _ = planned
    site = tiny.sites[SILO]
    tiny.work(SILO, until="scanned")
    assert pause(site) == pause(site) == present_pause(site)
    worker = Worker(site, tiny.key(SILO), lambda state: None)
    worker.begin()
    with pytest.raises(KeyboardInterrupt):  # the loop of `run` waits before it comes here
        worker.step()
    assert worker.state.state == "scanned"
    (site.private / "paused.json").write_bytes(b"junk")
    present = present_pause(site)
    assert present is not None and "damaged" in present.by
    assert resume(site) and not resume(site) and present_pause(site) is None
    assert run_command("silo", "resume", site.path).out == "This site is not paused.\n"
    words = run_command("silo", "log", "show", site.path).out
    assert words.count("paused the worker") == words.count("resumed the worker") == 1


def test_restarted_worker_states_no_step_that_its_checkpoint_may_not_have_reached(
    planned: PlannedFederation, caplog: pytest.LogCaptureFixture
) -> None:
    tiny, plan_id = planned
    state = tiny.work(SILO, until="training").model_copy(update={"step": 110, "num_steps": 600})
    narrate = Narrator(tiny.sites[SILO], every_s=0.0)
    with caplog.at_level(logging.INFO):
        narrate(state)
        narrate(state.model_copy(update={"step": 80}))
    assert [record.getMessage() for record in caplog.records] == [
        f"[{SILO}] training, from the last checkpoint if there is one",
        f"[{SILO}] training 80/600 steps",
    ]
