"""Batches drawn ahead: the same bytes as drawn in line, also where a run is stopped, and errors where they belong."""

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import ddm.training.loop
from ddm.errors import DataError
from ddm.images.array_files import open_arrays, open_images
from ddm.protocol.data import DataSpec
from ddm.training.batches import Batch
from ddm.training.prefetch import drawing_threads, drawn_ahead
from tests.ddm.training.test_loop import (
    SHAPE,
    Run,
    images,
    kill_in_mid_training,
    same_bytes,
    settings,
    stop_at,
)
from tests.support.waiting import LIMIT_S


def batch_of(step: int) -> Batch:
    return Batch(torch.full((2, 1), float(step)), torch.zeros(2, 1), torch.zeros(2))


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_batches_come_in_the_order_of_the_steps_each_drawn_once(threads: int) -> None:
    drawn: list[int] = []

    def draw(step: int) -> Batch:
        drawn.append(step)
        return batch_of(step)

    with drawn_ahead(draw, 5, 12, threads) as next_batch:
        assert [int(next_batch().x_0[0, 0]) for _ in range(7)] == list(range(5, 12))
    assert sorted(drawn) == list(range(5, 12))


def test_no_more_than_two_batches_a_thread_wait_and_none_is_drawn_after_the_end() -> None:
    drawn: list[int] = []

    def draw(step: int) -> Batch:
        drawn.append(step)
        return batch_of(step)

    with drawn_ahead(draw, 0, 100, 2) as next_batch:
        next_batch()
    assert len(drawn) <= 5
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


@pytest.mark.parametrize("threads", [0, 1, 2, 4])
def test_batches_are_drawn_while_the_step_computes(threads: int) -> None:
    """A step that does not end before the next batches are drawn; without threads they would never be."""
    drawn = [threading.Event() for _ in range(12)]

    def draw(step: int) -> Batch:
        drawn[step].set()
        return batch_of(step)

    with drawn_ahead(draw, 0, len(drawn), threads) as next_batch:
        for step in range(3):
            next_batch()
            ahead = drawn[step + 1 : step + 1 + 2 * threads]
            assert all(event.wait(LIMIT_S) for event in ahead)
            assert not drawn[step + 1 + 2 * threads].is_set()


def test_error_of_a_draw_is_raised_where_its_batch_is_asked_for_and_ends_the_run() -> None:
    def draw(step: int) -> Batch:
        if step == 3:
            raise DataError("images", expected="all", got="none")
        return batch_of(step)

    with drawn_ahead(draw, 0, 9, 2) as next_batch:
        for _ in range(3):
            next_batch()
        with pytest.raises(DataError):
            next_batch()


def test_weights_are_the_same_bytes_however_many_threads_draw_and_wherever_the_images_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "a.npy", images().numpy())
    lazy = open_images(
        open_arrays(tmp_path / "a.npy"), DataSpec(shape=SHAPE, range=(-1.0, 1.0)), tmp_path
    )
    weights = {}
    for threads, data in ((0, images()), (1, images()), (3, lazy)):
        monkeypatch.setattr(
            ddm.training.loop, "drawing_threads", lambda *_, threads=threads: threads
        )
        run = Run(tmp_path / f"{threads}", data=data)  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            run(stop_at(11 + threads))
        weights[threads] = Run(tmp_path / f"{threads}", data=data)().ema  # type: ignore[arg-type]
    assert same_bytes(weights[0], weights[1]) and same_bytes(weights[0], weights[3])
    other = Run(tmp_path / "other", data=images().flip(0))()  # the control
    assert not same_bytes(weights[0], other.ema)


def test_run_that_was_killed_ends_with_the_same_bytes_when_it_goes_on_with_batches_drawn_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = settings(num_steps=120)
    kill_in_mid_training(tmp_path / "killed", after_step=20)
    shutil.copytree(tmp_path / "killed", tmp_path / "in line")
    in_line = Run(tmp_path / "in line", long)()
    monkeypatch.setattr(ddm.training.loop, "drawing_threads", lambda *_: 2)
    assert same_bytes(Run(tmp_path / "killed", long)().ema, in_line.ema)
    assert same_bytes(Run(tmp_path / "whole", long)().ema, in_line.ema)


def test_batches_are_drawn_ahead_for_a_gpu_and_in_line_for_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ddm.training.prefetch.usable_cores", lambda: 4)
    assert [drawing_threads(torch.device("cpu"), num) for num in (1, 2)] == [0, 0]
    assert [drawing_threads(torch.device("cuda"), num) for num in (1, 2, 8)] == [4, 2, 1]
