"""Training that is killed, and training by several processes, end in the bytes of one that was left alone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddm.islands.folder import Islands
from tests.support.islands import Owner
from tests.support.threads import THREADS
from tests.support.waiting import wait_until

PROGRAM = "from ddm.cli.main import main; main()"
PLAIN = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}


def start(owner: Owner, *words: str) -> subprocess.Popen[bytes]:
    """Start `ddm train` as a process of its own."""
    command = [sys.executable, "-c", PROGRAM, "train", str(owner.run), "--device", "cpu", *words]
    return subprocess.Popen(command, env=PLAIN, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_island_killed_in_the_middle_ends_in_the_same_bytes(tmp_path: Path) -> None:
    owner = Owner.make(tmp_path / "one", steps=400)
    assert owner.split().code == 0
    shutil.copytree(owner.path, tmp_path / "two")
    left_alone = Owner(tmp_path / "two")
    island = Islands(owner.run).island(0)
    killed = start(owner, "--island", "0")
    wait_until(lambda: list(island.checkpoints.glob("step-*")), "a checkpoint", check=lambda: killed.poll())
    killed.kill()
    killed.wait()
    assert not island.is_trained
    assert owner.train("--island", 0).code == 0
    assert left_alone.train("--island", 0).code == 0
    assert island.expert.read_bytes() == Islands(left_alone.run).island(0).expert.read_bytes()
    assert not island.checkpoints.exists()


@pytest.mark.slow
def test_two_processes_share_an_island_and_torchrun_starts_them_too(tmp_path: Path) -> None:
    owner = Owner.make(tmp_path, steps=20)
    assert owner.split().code == 0
    assert owner.train("--island", 0, "--processes", 2).code == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    words = ["-m", "ddm.cli.main", "train", str(owner.run), "--device", "cpu"]
    done = subprocess.run([*torchrun, *words], env=PLAIN, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("All 2 islands are trained") == 1
    assert [Islands(owner.run).island(number).is_trained for number in range(2)] == [True, True]
