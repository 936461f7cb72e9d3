"""Several processes that share the samples of one command: what they draw is what one would, and none stays behind."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ddm.cli.sampling import (
    ComputeSettings,
    DrawnSamples,
    ReleaseSource,
    SamplingJob,
    draw_together,
)
from ddm.ensemble import SamplingOptions
from ddm.errors import SetupError
from ddm.loading.ensemble import load_ensemble
from ddm.models.arithmetic import Arithmetic
from ddm.sampling.expert_cache import LazyExperts
from ddm.sampling.strategies import strategy_named
from ddm.system.process_table import descendants, start_ticks
from tests.conftest import PublishedRelease
from tests.support.case import case
from tests.support.processes import is_running
from tests.support.publishing import verify_release
from tests.support.waiting import LIMIT_S, wait_until

NUM = 11
SEED = 3
STRATEGIES = ("lock", "sample", "full")


def job_of(
    published: PublishedRelease, strategy: str = "lock", steps: int = 3, **how: Any
) -> SamplingJob:
    release = verify_release(published, published.release)
    source = ReleaseSource(
        release.plan,
        release.manifest,
        release.folder,
        None,
        ComputeSettings("cpu", Arithmetic(), 1),
    )
    prior = [expert.prior for expert in release.manifest.experts]
    return SamplingJob(
        source,
        strategy_named(strategy),
        SEED,
        {"steps": steps, "prior": prior, "condition": None, **how},
    )


def shares_of(job: SamplingJob) -> Tensor:
    return torch.tensor(job.how["prior"], dtype=torch.float64)


def alone(job: SamplingJob) -> DrawnSamples:
    return job.draw(job.source.ensemble(), range(NUM), lambda num_done, total: None)


def test_processes_draw_what_one_would(
    published: PublishedRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process's part is run here, one after the other; with one sample at a time not a byte may differ."""

    def in_turn(work: SamplingJob, num: int, *, on_report: Any, **_: Any) -> None:
        for rank in range(num):
            work(rank, num, on_report)

    monkeypatch.setattr("ddm.cli.sampling.run_parts", in_turn)
    for strategy in STRATEGIES:
        for num_processes, first_number in ((2, 0), (3, 5)):
            with case(strategy=strategy, num_processes=num_processes):
                job = replace(job_of(published, strategy), first_number=first_number)
                shown = list[tuple[int, int]]()
                record = lambda num_done, total: shown.append((num_done, total))  # noqa: B023, E731
                drawn = draw_together(job, NUM, num_processes, shares_of(job), record)
                one = alone(job)
                assert torch.equal(drawn.images, one.images)
                assert torch.equal(drawn.expert_N, one.expert_N)
                assert shown[-1] == (3 * NUM, 3 * NUM)
                assert shown == sorted(shown)


def test_process_loads_only_the_experts_of_its_samples_under_lock(
    published: PublishedRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(published)
    loaded: dict[str, set[int]] = {}
    experts_of = {rank: set[int]() for rank in ("0", "1")}

    def in_turn(work: SamplingJob, num: int, *, on_report: Any, **_: Any) -> None:
        one = alone(job).expert_N
        for rank, part in enumerate(torch.tensor(work.order).tensor_split(num)):
            experts_of[str(rank)] = set(one[part].tolist())
            built = job.source.ensemble(rank, lazily=True)
            monkeypatch.setattr(ReleaseSource, "ensemble", lambda *_, built=built, **__: built)
            work(rank, num, on_report)
            assert isinstance(built.experts, LazyExperts)
            loaded[str(rank)] = set(built.experts._loaded)
            monkeypatch.undo()

    with monkeypatch.context() as patched:
        patched.setattr("ddm.cli.sampling.run_parts", in_turn)
        draw_together(job, NUM, 2, shares_of(job), lambda num_done, total: None)
    assert loaded == experts_of
    assert sum(map(len, loaded.values())) <= len(job.how["prior"]) + 1


def test_sample_is_the_same_in_any_company(published: PublishedRelease) -> None:
    ensemble = load_ensemble(verify_release(published, published.release))
    for strategy in STRATEGIES:
        few = ensemble.sample(
            3, strategy=strategy, steps=3, options=SamplingOptions(numbers=[7, 0, 2])
        ).images
        many = ensemble.sample(8, strategy=strategy, steps=3).images
        torch.testing.assert_close(few, many[[7, 0, 2]], atol=1e-5, rtol=0)


def command(published: PublishedRelease, tmp_path: Path, *flags: object) -> list[str]:
    words = (published.release, "--root", published.root, "--state", tmp_path / "state", *flags)
    return [sys.executable, "-m", "ddm.cli.main", "sample", *map(str, words)]


@pytest.mark.slow
def test_two_real_processes_write_the_bytes_of_one(
    published: PublishedRelease, tmp_path: Path
) -> None:
    arrays_by_run = []
    for processes in (1, 2):
        out = tmp_path / f"{processes}.npz"
        flags = (
            "--num",
            NUM,
            "--steps",
            3,
            "--set",
            "batch=1",
            "--out",
            out,
            "--processes",
            processes,
        )
        environment = {**os.environ, "OMP_NUM_THREADS": "2" if processes == 2 else "1"}
        words = command(published, tmp_path, *flags)
        result = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
        assert f"{NUM} samples in {out}" in result.stdout and not result.stderr
        with np.load(out) as file:
            arrays_by_run.append({name: file[name] for name in file.files})
    assert all(
        np.array_equal(arrays_by_run[0][name], arrays_by_run[1][name]) for name in arrays_by_run[0]
    )


@pytest.mark.slow
def test_process_that_dies_ends_all_with_its_name(published: PublishedRelease) -> None:
    job = job_of(published, steps=10_000)
    pids: list[int] = []

    def kill_the_second(num_done: int, total: int) -> None:
        if not pids:
            # They are listed in the order in which they were started.
            pids.extend(sorted(descendants(os.getpid()), key=start_ticks))
            os.kill(pids[1], signal.SIGKILL)

    with pytest.raises(SetupError, match="sampling process 2 of 2.*SIGKILL") as caught:
        draw_together(job, 100, 2, shares_of(job), kill_the_second)
    assert "--processes" in caught.value.remedy and "checkpoint" not in caught.value.remedy
    assert len(pids) == 2 and not any(map(is_running, pids))


@pytest.mark.slow
def test_interrupt_ends_the_command_and_all_of_its_processes(
    published: PublishedRelease, tmp_path: Path
) -> None:
    out = tmp_path / "never.npz"
    words = command(
        published, tmp_path, "--num", 100, "--steps", 10_000, "--processes", 2, "--out", out
    )
    program = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    watchdog = threading.Timer(LIMIT_S, program.kill)
    watchdog.start()
    children = Path(f"/proc/{program.pid}/task/{program.pid}/children")
    process_ids: list[int] = []
    while len(process_ids) < 2 and program.poll() is None:
        process_ids = [int(pid) for pid in children.read_text().split()]
    program.send_signal(signal.SIGINT)
    _, stderr = program.communicate()
    watchdog.cancel()
    assert program.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert not out.exists()
    wait_until(lambda: not any(map(is_running, process_ids)), "the end of the processes")
