"""A full disk at either side: the work waits, says so, and goes on where it was when there is room again."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.test_kill import check_nothing_lost_or_doubled, check_published_once
from tests.support.operators import (
    Operators,
    all_services_ended,
    serve_everything,
    set_up_federation,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system"),
]


@pytest.fixture
def operators(tmp_path: Path) -> Iterator[Operators]:
    operators = Operators(tmp_path)
    yield operators
    operators.stop()


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A file system of its own on a folder; what lies there moves onto it."""
    aside = folder.with_name(f"{folder.name}-aside")
    folder.rename(aside)
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "none", folder], check=True)
    try:
        subprocess.run(["cp", "-a", f"{aside}/.", folder], check=True)
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    """Fill a file system to the last byte."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as stream:
        for size in (65536, 4096, 1):
            try:
                while True:
                    stream.write(b"\0" * size)
            except OSError:
                continue
    assert os.statvfs(folder).f_bavail == 0
    return ballast


def test_silo_whose_disk_fills_up_during_training_goes_on_when_there_is_room(
    operators: Operators,
) -> None:
    set_up_federation(operators, num_steps=400)
    site = operators.folder / "north"
    with small_disk(site, 16 << 20):
        serve_everything(operators)
        operators.wait_until(
            lambda: any((site / "private" / "checkpoints").rglob("*.safetensors")), "a checkpoint"
        )
        ballast = fill(site)
        said = lambda: "No space left" in operators.logs()  # noqa: E731
        operators.wait_until(said, "a message about the disk")
        assert "Traceback" not in operators.running["north-worker"].log_tail()
        ballast.unlink()
        operators.wait_until(lambda: all_services_ended(operators), "the end")
        operators.stop()
        digests = check_nothing_lost_or_doubled(operators)
        check_published_once(operators, digests)


def test_aggregator_whose_disk_fills_up_during_a_transfer_goes_on_when_there_is_room(
    operators: Operators,
) -> None:
    set_up_federation(operators)
    with small_disk(operators.fed / "incoming", 64 << 20) as incoming:
        serve_everything(operators)
        operators.wait_until(lambda: any(incoming.rglob("status.json")), "a first answer")
        ballast = fill(incoming)
        log = operators.fed / "flower" / "logs" / "serverapp.log"
        operators.wait_until(
            lambda: "No space left" in log.read_text() or "full" in log.read_text(), "a message"
        )
        assert not list(operators.fed.glob("accepted/*/*"))
        ballast.unlink()
        operators.wait_until(lambda: all_services_ended(operators), "the end")
        check_published_once(operators, check_nothing_lost_or_doubled(operators))
