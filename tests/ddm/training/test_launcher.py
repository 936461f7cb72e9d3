"""Several processes that do one work: what they are handed, who hears of their ends, and that none stays behind."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ddm.errors import NumericalError, PolicyError, SetupError, TrustError
from ddm.training.config import Engine
from ddm.training.launcher import Work, _cause, _Ended, do_together
from ddm.training.loop import Progress
from tests.ddm.training.test_loop import Run, images, same_bytes, stop_at
from tests.support.launched_functions import (
    Tell,
    Train,
    TrainApart,
    break_in_the_second,
    fail_in_the_second,
    wait_for_the_end,
)
from tests.support.processes import alive
from tests.support.torchrun_program import texts

DIED = _Ended(SetupError("training process 2 of 2"), died=True)
GONE = _Ended(RuntimeError("connection closed by peer"))
BROKEN = _Ended(NumericalError("loss at step 3"))
FULL = _Ended(OSError(28, "No space left on device"))
STOPPED = _Ended(KeyboardInterrupt())
DONE = _Ended()


def test_error_behind_all_others_is_raised() -> None:
    for ends, cause in [
        ([DONE, DONE], None),
        ([STOPPED, STOPPED], STOPPED),
        ([GONE, DIED], DIED),
        ([GONE, BROKEN], BROKEN),
        ([DIED, BROKEN], BROKEN),
        ([STOPPED, FULL], FULL),
        ([STOPPED, GONE], GONE),
    ]:
        assert _cause(ends) is (cause and cause.error), (ends, cause)


def do(
    work: Work,
    folder: Path,
    on_progress: Callable[[Any], None] = lambda told: None,
    should_stop: Callable[[], bool] = lambda: False,
    **tensors: Tensor,
) -> None:
    do_together(
        work, tensors or {"images": images()}, 2, folder=folder, on_progress=on_progress, should_stop=should_stop
    )


def running() -> dict[str, int]:
    """The processes that were started, by name."""
    return {child.name: int(child.pid or 0) for child in multiprocessing.active_children()}


@pytest.mark.slow
def test_every_process_is_handed_the_same_tensors_of_its_own_and_no_more_than_torchrun_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    scratch = tmp_path / "for a moment, für kurz"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    handed = {
        "bytes": torch.arange(5, dtype=torch.uint8),
        "halves": torch.rand(3, 2).bfloat16().float().half(),
        "numbers": torch.arange(6).reshape(3, 2).T,
    }
    ranks: list[int] = []
    do(Tell(tmp_path), tmp_path, ranks.append, **handed)
    assert sorted(ranks) == [0, 1]
    for rank in ranks:
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told["tensors"] == {name: [str(value.dtype), value.tolist()] for name, value in handed.items()}
        assert told["after"] == dict.fromkeys(handed, False)
        assert told["threads"] == torch.get_num_threads() == int(told["environment"]["OMP_NUM_THREADS"])
        assert [told["environment"][name] for name in ("RANK", "WORLD_SIZE")] == [str(rank), "2"]
        assert scratch in Path(told["temporary"]).parents
    assert all(bool(value.any()) for value in handed.values()), "nor does the one who handed them see what was written"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json", "1.json", scratch.name]
    assert not list(scratch.iterdir()), "what they left for a moment has gone with them"


@pytest.mark.slow
def test_error_of_one_process_is_raised_and_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(NumericalError, match="loss at step 3: expected a finite number, got nan") as caught:
        do(fail_in_the_second, tmp_path)
    assert caught.value.remedy == "Learn slower."
    with pytest.raises(RuntimeError, match="(?s)training process 2 of 2:.*ZeroDivisionError: by the second"):
        do(break_in_the_second, tmp_path)
    assert not running() and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_error_about_the_progress_ends_all_processes_although_they_listen_to_nobody(tmp_path: Path) -> None:
    pids: list[int] = []

    def refuse(told: object) -> None:
        pids.extend(running().values())
        raise PolicyError("training time")

    with pytest.raises(PolicyError):
        do(wait_for_the_end, tmp_path, refuse)
    assert len(pids) == 2 and not any(map(alive, pids))


@pytest.mark.slow
def test_signal_to_all_processes_while_they_start_is_the_stopping_of_one_that_was_told(tmp_path: Path) -> None:
    asked: list[int] = []

    def stop() -> bool:
        for pid in running().values() if not asked else ():
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        asked.append(1)
        return len(asked) > 10  # a second later: by then whoever hears a signal has died of it

    with pytest.raises(KeyboardInterrupt):
        do(Train(tmp_path, "dit", Engine(device="cpu", processes=2)), tmp_path, should_stop=stop)


@pytest.mark.slow
def test_process_that_hangs_ends_the_others_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddm.training.launcher._PATIENCE_S", 10.0)
    pids: list[int] = []

    def halt(told: object) -> None:
        pids.extend(running().values())
        os.kill(running()["training process 2 of 2"], signal.SIGSTOP)

    with pytest.raises(SetupError, match="process 1 of 2: expected the other processes' part within 10 s, got no word"):
        do(wait_for_the_end, tmp_path, halt)
    assert pids and not any(map(alive, pids))


INTRUDER = """
import os, socket, struct
os.setuid(65534)
held, known = [], None
print("ready", flush=True)
while True:
    rows = [line.split() for line in open("/proc/net/tcp").readlines()[1:]]
    ports = {int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and row[1].startswith("0100007F")}
    known = ports if known is None else known
    for port in ports - known:
        for number in range(4):  # what gloo's processes count each other by
            try:
                held.append(socket.socket())
                held[-1].connect(("127.0.0.1", port))
                held[-1].sendall(struct.pack("<q", number))
            except OSError:
                pass
    known |= ports
"""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
def test_other_user_of_the_machine_who_connects_in_a_process_s_place_is_refused(tmp_path: Path) -> None:
    work = Train(tmp_path, "dit", Engine(device="cpu", processes=2))
    with subprocess.Popen([sys.executable, "-I", "-c", INTRUDER], stdout=subprocess.PIPE) as intruder:
        try:
            assert intruder.stdout is not None and intruder.stdout.readline() == b"ready\n"
            with pytest.raises(TrustError, match="expected connections with its own user's processes alone"):
                do(work, tmp_path)
        finally:
            intruder.kill()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_processes_that_do_not_see_the_same_checkpoints_are_refused(tmp_path: Path) -> None:
    work = TrainApart(tmp_path, "dit", Engine(device="cpu", processes=2))
    with pytest.raises(KeyboardInterrupt):
        Run(tmp_path / "1", work.recipe())(stop_at(20))
    with pytest.raises(SetupError, match="checkpoints: expected the same step in every process, got step"):
        do(work, tmp_path)


def run(
    folder: Path,
    kind: str,
    shard: bool,
    on_progress: Callable[[Progress], None] = lambda told: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Tensor]:
    told = texts(kind)
    labels = {} if told is None else {"labels": told}
    engine = Engine(device="cpu", processes=2, shard=shard)
    do(Train(folder, kind, engine), folder, on_progress, should_stop, images=images(), **labels)
    return load_file(folder / "expert.safetensors")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "shard"), [("dit", False), ("dit", True), ("mmdit", True)])
def test_expert_has_the_same_bytes_when_a_process_was_killed_and_when_all_were_stopped(
    tmp_path: Path, kind: str, shard: bool
) -> None:
    whole = run(tmp_path / "whole", kind, shard)
    victims = iter(["training process 2 of 2", "training process 1 of 2"])
    folder, pids, stop = tmp_path / "killed", set[int](), threading.Event()

    def kill(told: Progress) -> None:
        pids.update(running().values())
        if told.step >= 30 and (victim := next(victims, None)):
            os.kill(running()[victim], signal.SIGKILL)

    for name in ("2 of 2", "1 of 2"):
        with pytest.raises(SetupError, match=f"process {name}: expected its answer, got its end: SIGKILL"):
            run(folder, kind, shard, kill)
    assert len(pids) == 4 and not any(map(alive, pids))
    with pytest.raises(KeyboardInterrupt):
        run(folder, kind, shard, lambda told: stop.set() if told.step >= 60 else None, stop.is_set)
    assert same_bytes(run(folder, kind, shard), whole)
