"""A silo's learning curve: no number of it is in anything that leaves, and nobody but the worker's user reads it."""

import logging
import platform
import stat
import struct
import subprocess
from pathlib import Path

import pytest

from ddm.training.metrics import StepMetrics, read_metrics
from silo.plan.workspace import Workspace
from silo.worker.curves import read_curves
from silo.worker.state import save_state, state_path
from silo.worker.status import read_status
from tests.ddm.training.test_writers import ROOT, WANDB_PROGRAM, wandb_run
from tests.support.federation import PlannedFederation

SILO = "north"


def forms_of(value: float) -> list[bytes]:
    """The forms in which a number may be written: as text, and packed; long enough not to occur by chance."""
    return [
        repr(value).encode(),
        f"{value:.6g}".encode(),
        struct.pack("<d", value),
        struct.pack(">d", value),
    ]


def numbers_in(data: bytes, curve: list[StepMetrics]) -> list[bytes]:
    """Return the forms of the curve's losses, norms and speeds that some bytes contain."""
    found = []
    for one in curve:
        values = (one.loss, one.interval_loss, one.gradient_norm or 0.0, one.images_per_second)
        for value in values:
            found += [form for form in forms_of(value) if value and form in data]
    return found


def test_search_finds_the_numbers_of_a_curve(tmp_path: Path) -> None:
    one = StepMetrics.model_validate_json(
        '{"step":6,"at":"2026-11-26T12:00:00Z","seconds":1.0,"loss":0.51234567,"interval_steps":6,'
        '"interval_loss":0.6234567,"learning_rate":0.01,"images_per_second":123.456,"gradient_norm":1.5678}'
    )
    for form in (b"0.512346", b'"loss":0.51234567', struct.pack("<d", 0.6234567), b"123.456"):
        assert numbers_in(b"noise " + form + b" noise", [one])
    assert not numbers_in(b'{"progress":100,"state":"accepted"}', [one])


def test_no_number_of_a_curve_is_in_anything_that_leaves(
    planned_once: PlannedFederation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny, plan_id = planned_once.copy(tmp_path / "copy")
    site = tiny.sites[SILO]
    caplog.set_level(logging.DEBUG)
    tiny.work(SILO)
    work = Workspace(site.work_folder(plan_id))
    paths = sorted(work.folder.glob("experts/*/metrics.jsonl"))
    curve = [one for path in paths for one in read_metrics(path)]
    assert curve, "there is a curve to search for"
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert site.private in path.parents
        # The control: the search finds the numbers where they are.
        assert numbers_in(path.read_bytes(), curve)
    # The courier sees these folders; what it sends is made from them alone.
    shared = [
        path
        for folder in (site.outbox, site.inbox, site.path / "courier")
        for path in folder.rglob("*")
        if path.is_file()
    ]
    names = {path.name for path in shared}
    assert {"submission.json", "expert.safetensors", "status.json"} <= names
    assert "metrics.jsonl" not in names
    for path in shared:
        assert not numbers_in(path.read_bytes(), curve), path.name
    assert not numbers_in(caplog.text.encode(), curve)


def test_status_shows_the_curve_until_the_submission_is_on_its_way(
    planned_once: PlannedFederation, tmp_path: Path
) -> None:
    tiny, plan_id = planned_once.copy(tmp_path / "copy")
    site = tiny.sites[SILO]
    save_state(state_path(site.private), tiny.work(SILO, until="auditing"))
    (curve,) = read_curves(site, plan_id)
    last = curve.metrics[-1]
    status = read_status(site)
    line = f"  curve    {curve.expert_id}: loss {last.loss:.4g} at step {last.step}"
    assert line in status.text().splitlines()
    assert f"{curve.expert_id}: ▁ loss" in status.text(draws_bars=True)
    assert status.as_json()["curves"] == [
        {"expert_id": curve.expert_id, "loss": [(last.step, last.loss)]}
    ]


@pytest.mark.slow  # It installs wandb, which is no dependency.
def test_run_of_wandb_holds_the_curve_and_nothing_of_the_machine_or_of_the_command(
    tmp_path: Path,
) -> None:
    """By itself the library sends the machine's name, the command line, what it prints, and a git repository."""
    printed = "error: /private/printed.npz"
    program = WANDB_PROGRAM.replace("writer.close()", f"print({printed!r})\nwriter.close()")
    folder = wandb_run(tmp_path, program, "--data", "/private/named.npz")
    sent = b"".join(
        path.read_bytes()
        for path in sorted(folder.rglob("*"))
        # The library's own logs stay on the machine.
        if path.is_file() and path.parent.name != "logs"
    )
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=False)
    commit = head.stdout.strip() or b"no commit"
    node = platform.node().encode()
    # A name of two letters occurs by chance; the length stands before it in a record.
    host = bytes([len(node)]) + node
    for text in (b"/private/", str(tmp_path).encode(), host, b"torch", b"memory", commit):
        assert text not in sent, text
