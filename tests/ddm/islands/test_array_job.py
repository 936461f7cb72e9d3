"""The array job of the documentation, as a scheduler would run it: with stand-ins for the scheduler's own programs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddm.islands.folder import Islands
from tests.support.islands import Owner
from tests.support.waiting import LIMIT_S

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "one-owner.md"


def task(owner: Owner, number: int, srun: str) -> tuple[int, str]:
    """Run the script as one task; return its exit code, and what it asked of the scheduler."""
    (script,) = re.findall(r"```bash\n(.*?)```", PAGE.read_text("utf-8"), flags=re.DOTALL)
    programs = owner.path / "programs"
    calls = owner.path / "asked"
    programs.mkdir(exist_ok=True)
    calls.write_text("")
    for name, text in (("srun", srun), ("scontrol", f'echo "$@" >> {calls}')):
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    named = {
        "SLURM_SUBMIT_DIR": str(owner.path),
        "SLURM_ARRAY_TASK_ID": str(number),
        "SLURM_JOB_ID": "417",
    }
    environment = {
        **os.environ,
        **named,
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    words = ["bash", "-c", script.replace("--device cuda", "--device cpu")]
    result = subprocess.run(
        words, env=environment, capture_output=True, timeout=LIMIT_S, check=False
    )
    return result.returncode, calls.read_text()


def test_task_that_was_stopped_is_queued_again_and_one_that_failed_is_not(tmp_path: Path) -> None:
    assert task(Owner(tmp_path), 0, "exit 143") == (143, "requeue 417\n")
    assert task(Owner(tmp_path), 0, "exit 7") == (7, "")
    assert task(Owner(tmp_path), 0, "exit 0") == (0, "")


@pytest.mark.slow
def test_tasks_train_one_island_each_and_end_at_once_when_it_is_trained(tmp_path: Path) -> None:
    owner = Owner.make(tmp_path / "owner")
    assert owner.split("--islands", 2).code == 0
    for number in (1, 0, 0):
        assert task(owner, number, 'exec "$@"') == (0, "")
        assert Islands(owner.run).island(number).is_trained
        assert Islands(owner.run).island(0).is_trained == (number == 0)
