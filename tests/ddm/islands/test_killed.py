"""Training that is killed, and training by several processes, end in the bytes of one that was left alone."""

import shutil
from pathlib import Path

import pytest

from ddm.errors import TrustError
from ddm.islands.folder import Islands
from tests.support.forked import fork_process, wait_for_exit
from tests.support.islands import Owner
from tests.support.publishing import kill_at_step


def trained(owner: Owner) -> bytes:
    """Train the first island in a process of its own, to the end; return its expert."""
    assert wait_for_exit(fork_process(lambda: owner.train("--island", 0))) == 0
    return Islands(owner.run).island(0).expert.read_bytes()


def test_island_killed_again_and_again_ends_in_the_same_bytes(tmp_path: Path) -> None:
    """By kill -9 right before a change on disk, while checkpoints are written, each step having one."""
    owner = Owner.make(tmp_path / "one", steps=20)
    assert owner.split().code == 0
    # here, so that the processes below need not import what it takes
    assert owner.train("--island", 1).code == 0
    shutil.copytree(owner.path, tmp_path / "two")
    wanted = trained(Owner(tmp_path / "two"))
    island = Islands(owner.run).island(0)
    steps = set[str]()
    for changes in (20, 24):
        assert kill_at_step(changes, lambda: owner.train("--island", 0, "--checkpoint-s", 0))
        assert not island.is_trained
        steps |= {path.name for path in island.job.checkpoints.glob("step-*.json")}
    assert len(steps) > 1, "it was killed after more than one checkpoint"
    assert trained(owner) == wanted
    assert not island.job.path.exists()


@pytest.mark.slow
def test_two_processes_share_an_island(tmp_path: Path) -> None:
    owner = Owner.make(tmp_path, steps=20)
    assert owner.split().code == 0
    assert owner.train("--island", 0, "--processes", 2).code == 0
    assert owner.train().code == 0
    assert [Islands(owner.run).island(number).is_trained for number in range(2)] == [True, True]


def test_island_is_not_trained_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Owner.make(tmp_path, steps=20)
    assert owner.split().code == 0
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    refused = owner.train("--island", 0)
    assert refused.code == TrustError.exit_code and "--processes N" in refused.err
    assert not Islands(owner.run).island(0).job.path.exists()
