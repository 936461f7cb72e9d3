"""A scan that ends before its end: by Ctrl-C at the terminal or by kill -9, and what the next one does with it."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ddm.images.picture import DecodeLimits
from ddm.system.processes import program
from silo.images.scan import QUARANTINE
from tests.support.cohorts import scan_at
from tests.support.processes import is_running, running_children
from tests.support.waiting import LIMIT_S, wait_until

LIMITS = DecodeLimits()
NUM = 150
_TICKS = os.sysconf("SC_CLK_TCK")


def images(folder: Path) -> Path:
    """Images whose decoding takes a second or two in all."""
    data = folder / "data"
    data.mkdir()
    for number in range(NUM):
        values = np.random.default_rng(number % 8).integers(
            0, 255, (300, 300), dtype=np.uint8
        ) + np.uint8(number % 2)
        values[0, 0] = number
        Image.fromarray(values).save(data / f"{number:03d}.png", compress_level=1)
    return data


@contextmanager
def running_scan(data: Path, private: Path) -> "Iterator[subprocess.Popen[str]]":
    """A scan that does not outlive a test that fails."""
    words = [
        str(word)
        for word in (
            program("silo"),
            "scan",
            "--data",
            data,
            "--private",
            private,
            "--processes",
            2,
        )
    ]
    # In a group of its own, as at a terminal: Ctrl-C goes to all of the group.
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def cpu_seconds(pid: int) -> float:
    """How long a process has computed."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


@pytest.mark.parametrize(
    "after_s",
    [pytest.param(None, marks=pytest.mark.slow), pytest.param(0.0, marks=pytest.mark.slow), 1.2],
    ids=["begin", "decoders", "middle"],
)
def test_ctrl_c_ends_a_scan_in_one_line_and_the_next_one_goes_on(
    tmp_path: Path, after_s: float | None
) -> None:
    data = images(tmp_path)
    private = tmp_path / "private"
    with running_scan(data, private) as process:
        wait_until(
            lambda: (
                private.exists() if after_s is None else len(running_children(process.pid)) == 2
            ),
            "the scan",
        )
        decoders = running_children(process.pid)
        wait_until(
            lambda: (
                sum(map(cpu_seconds, decoders)) >= (after_s or 0.0) or process.poll() is not None
            ),
            "work",
        )
        # Decoders may have spent this time on imports: wait until a result was written.
        if after_s:
            wait_until(
                lambda: (private / "memory.sqlite-journal").exists() or process.poll() is not None,
                "an answer",
            )
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
    if process.returncode == 0:
        pytest.fail("the scan was over before it was interrupted")
    assert process.returncode == 130 and out == ""
    assert err.strip().startswith("Interrupted. Images that were examined")
    assert not any(map(is_running, decoders))
    assert (
        not [path for path in private.iterdir() if path.suffix == ".part"]
        and not (private / QUARANTINE).exists()
    )
    summary = scan_at(data, private, LIMITS, processes=2)
    assert (summary.accepted, summary.quarantined) == (NUM, 0)
    assert summary.num_decoded < NUM if after_s else summary.num_decoded <= NUM


def kill_in_the_middle(data: Path, private: Path) -> None:
    with running_scan(data, private) as process:
        wait_until(
            lambda: len(running_children(process.pid)) == 2 or process.poll() is not None,
            "decoders",
        )
        decoders = running_children(process.pid)
        wait_until(
            lambda: sum(map(cpu_seconds, decoders)) >= 1.2 or process.poll() is not None, "work"
        )
        process.kill()
        process.wait()
    wait_until(lambda: not any(map(is_running, decoders)), "decoders that end")


@pytest.mark.slow
def test_kill_9_loses_at_most_what_was_not_yet_written_and_leaves_no_decoder(
    tmp_path: Path,
) -> None:
    data = images(tmp_path)
    private = tmp_path / "private"
    for _ in range(3):
        kill_in_the_middle(data, private)
    summary = scan_at(data, private, LIMITS, processes=2)
    assert (summary.accepted, summary.quarantined) == (NUM, 0)
    again = scan_at(data, private, LIMITS)
    assert again.num_decoded == 0 and again.accepted == NUM
