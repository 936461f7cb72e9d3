"""The learning curves of islands: beside each expert, shown by a command, and forwarded while they train."""

import json
from pathlib import Path

import pytest

from ddm.islands.folder import Islands
from ddm.training.metrics import read_metrics
from tests.ddm.training.test_writers import scalars_of
from tests.support.islands import Owner


def test_curves_of_seed_and_islands_are_kept_shown_and_forwarded(tmp_path: Path) -> None:
    owner = Owner.make(tmp_path, steps=40)
    assert owner.split("--seed-share", "0.5").code == 0
    before = owner.train("--status")
    assert before.code == 0 and before.out.count("not begun") == 3
    assert owner.train("--seed-only").code == 0
    assert owner.train("--island", 1, "--log", f"tensorboard:{tmp_path / 'curves'}").code == 0
    islands = Islands(owner.run)
    for training in (islands.seed, islands.island(1)):
        curve = read_metrics(training.metrics)
        assert [one.step for one in curve] == [10, 20]
        assert not training.job.path.exists()
    last = read_metrics(islands.island(1).metrics)[-1]
    assert last.loss == islands.trained(1).training.loss
    shown = owner.train("--status")
    assert f"loss {last.loss:.4g} at step 20" in shown.out
    assert (shown.out.count("not begun"), shown.out.count("trained")) == (1, 2)
    listed = json.loads(owner.train("--status", "--json").out)["islands"]
    assert [island["state"] for island in listed] == ["trained", "not begun", "trained"]
    assert [island["island"] for island in listed] == ["seed", "0", "1"]
    assert listed[0]["num_images"] == listed[1]["num_images"] + listed[2]["num_images"]
    assert listed[1]["last"] is None and listed[2]["last"]["loss"] == last.loss
    # Not a terminal: no bars.
    assert "▁" not in shown.out
    events = scalars_of(tmp_path / "curves" / "island-1")
    last_step, last_loss = events["training/loss"][-1]
    assert last_step == 20 and last_loss == pytest.approx(last.loss)
    assert len(events["training/gradient_norm"]) == 2


def test_json_is_refused_where_it_would_train(tmp_path: Path) -> None:
    owner = Owner.make(tmp_path)
    assert owner.split().code == 0
    refused = owner.train("--json")
    assert refused.code == 3 and "--status" in refused.err
    assert not Islands(owner.run).island(0).job.path.exists()


def test_unknown_writer_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    owner = Owner.make(tmp_path)
    assert owner.split().code == 0
    refused = owner.train("--log", "mlflow")
    assert refused.code == 3 and "tensorboard[:TARGET]" in refused.err
    assert not Islands(owner.run).island(0).job.path.exists()
