"""Jobs of several real processes of this machine: who hears of their ends, and that none stays behind."""

import os
import signal
import threading
from pathlib import Path

import pytest

from ddm.errors import NumericalError, PolicyError, SetupError
from ddm.system.process_table import descendants
from ddm.training.config import TrainingSettings
from ddm.training.progress import Progress
from tests.support.jobs import SmallJob, small_task
from tests.support.processes import is_running

pytestmark = pytest.mark.slow
TWO = TrainingSettings(device="cpu", processes=2)
SAVING = TrainingSettings(device="cpu", processes=2, checkpoint_s=0.0)
WORDS = [b"-P", b"-m", b"ddm.training"]
LONG = {"num_steps": 100_000}


def running() -> list[int]:
    """The processes that train, by their ranks."""
    pid_by_rank = dict[int, int]()
    for pid in descendants(os.getpid()):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[1:4] == WORDS:
            pid_by_rank[
                next(int(variable[5:]) for variable in environment if variable.startswith(b"RANK="))
            ] = pid
    return [pid_by_rank[rank] for rank in sorted(pid_by_rank)]


def test_error_of_one_process_is_raised_and_ends_the_others(tmp_path: Path) -> None:
    trial = SmallJob(tmp_path, TWO, small_task(num_steps=5000))
    trial.task.inputs["images"].mul_(1e20)  # type: ignore[attr-defined]
    with pytest.raises(NumericalError, match="loss"):
        trial()
    assert not running()


def test_error_about_the_progress_ends_all_processes(tmp_path: Path) -> None:
    pids: list[int] = []

    def refuse(progress: Progress) -> None:
        pids.extend(running())
        raise PolicyError("training time")

    with pytest.raises(PolicyError):
        SmallJob(tmp_path, TWO, small_task(**LONG))(refuse)
    assert len(pids) == 2 and not any(map(is_running, pids))


def test_signal_to_all_processes_is_nothing_to_them_and_the_word_to_stop_is(tmp_path: Path) -> None:
    trial = SmallJob(tmp_path, TWO, small_task(**LONG))
    seen = list[int]()
    is_over = threading.Event()

    def signal_while_they_start() -> None:
        while not is_over.wait(0.02):
            for pid in running():
                seen.append(pid)
                os.kill(pid, signal.SIGINT)
                os.kill(pid, signal.SIGTERM)

    thread = threading.Thread(target=signal_while_they_start)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            trial(lambda progress: trial.stop.set())
    finally:
        is_over.set()
        thread.join()
    assert len(set(seen)) == 2 and not any(map(is_running, seen))
    assert list(trial.folder.checkpoints.glob("step-*.json")), "they wrote a checkpoint"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "shard"), [("dit", False), ("dit", True), ("mmdit", True)])
def test_expert_has_the_same_bytes_when_a_process_was_killed_and_when_all_were_stopped(
    tmp_path: Path, kind: str, shard: bool
) -> None:
    settings = SAVING.model_copy(update={"shard": shard})
    whole = SmallJob(tmp_path / "whole", settings, small_task(kind, num_steps=300))
    whole()
    trial = SmallJob(tmp_path / "killed", settings, small_task(kind, num_steps=300))
    for rank in (1, 0):
        before = _steps(trial)

        def kill(progress: Progress, rank: int = rank, before: int = before) -> None:
            if _steps(trial) > before and len(pids := running()) == 2:
                os.kill(pids[rank], signal.SIGKILL)

        with pytest.raises(
            SetupError, match=f"process {rank + 1} of 2: expected its answer, got its end: SIGKILL"
        ):
            trial(kill)
        assert not running()
    before = _steps(trial)
    with pytest.raises(KeyboardInterrupt):
        trial(lambda progress: trial.stop.set() if progress.step > before + 10 else None)
    trial.stop.clear()
    trial()
    assert trial.expert.read_bytes() == whole.expert.read_bytes()


def test_process_that_hangs_ends_all(tmp_path: Path) -> None:
    trial = SmallJob(tmp_path, TWO.model_copy(update={"silence_s": 10.0}), small_task(**LONG))
    pids: list[int] = []

    def halt(progress: Progress) -> None:
        if not pids:
            pids.extend(running())
            os.kill(pids[0], signal.SIGSTOP)

    with pytest.raises(SetupError, match="got no sign of life"):
        trial(halt)
    assert pids and not any(map(is_running, pids))


def _steps(trial: SmallJob) -> int:
    return max(
        (int(path.stem[5:]) for path in trial.folder.checkpoints.glob("step-*.json")), default=0
    )
