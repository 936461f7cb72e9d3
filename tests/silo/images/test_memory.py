"""What a scan's memory keeps of files, and what it does not take for lasting."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ddm.errors import SetupError
from ddm.images.picture import DecodeLimits
from silo.config import ImagesSettings
from silo.images.decisions import Decision, Decisions
from silo.images.scan import ScannedImages
from tests.support.case import case
from tests.support.cohorts import scan_at, source_at
from tests.support.dicom_files import tags_of, waves, write
from tests.support.errors import has_subject

SETTINGS = ImagesSettings(processes=1)
LIMITS = DecodeLimits(memory_bytes=SETTINGS.memory_mib << 20)
FAILS = """
import errno, os, signal
from ddm.images import worker
def content(files):
    if files[0].endswith("forbidden.png"): raise PermissionError(errno.EACCES, "")
    if files[0].endswith("stale.png"): raise OSError(errno.ESTALE, "")
    if files[0].endswith("killed.png"): os.kill(os.getpid(), signal.SIGKILL)
    return read(files)
read, worker._read_at_once = worker._read_at_once, content
worker.main()
"""


def images(folder: Path, *names: str) -> Path:
    """Different pictures in files that are older than a scan, as they are outside tests."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        path = folder / f"{name}.png"
        Image.fromarray(np.full((40, 40), number, np.uint8)).save(path)
        os.utime(path, ns=(10**18, 10**18))
    time.sleep(0.06)  # of the times of their entries, which nothing but the clock sets
    return folder


def test_what_the_machine_did_not_read_is_tried_again_by_the_next_scan_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = subprocess.Popen
    for name, reason in {
        "forbidden": "cannot be read",
        "stale": "cannot be read",
        "killed": "too much memory",
    }.items():
        with case(name=name):
            data = images(tmp_path / name, "a", name)
            private = tmp_path / f"private-{name}"
            with monkeypatch.context() as failing:
                failing.setattr(
                    subprocess,
                    "Popen",
                    lambda _, **how: start([sys.executable, "-P", "-c", FAILS], **how),
                )
                for read in (2, 1):  # the second scan tries the one file again, once
                    summary = scan_at(data, private, LIMITS)
                    assert (summary.accepted, summary.reasons, summary.num_read) == (
                        1,
                        {reason: 1},
                        read,
                    )
            with ScannedImages.opened(source_at(data, private, SETTINGS)) as pictures:
                assert [picture.reason for picture in pictures] == [None, reason]
            for read in (1, 0):
                summary = scan_at(data, private, LIMITS)
                assert (summary.accepted, summary.quarantined, summary.num_read) == (2, 0, read)


def test_patient_is_one_after_the_key_was_lost_and_decisions_are_not_forgotten_with_it(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    private = tmp_path / "private"
    data.mkdir()
    for number in range(3):
        if number == 2:
            (private / "key").unlink()
        write(
            tags_of(waves(high=255, dtype=np.uint8) // (1 + number), bits=8, PatientID="P1"),
            data / f"{number}.dcm",
        )
        summary = scan_at(data, private, LIMITS)
        assert (summary.accepted, summary.patients) == (number + 1, 1)
    with (
        ScannedImages.opened(source_at(data, private, SETTINGS)) as pictures,
        Decisions.opened(private) as decisions,
    ):
        seen = [picture.record for picture in pictures if picture.record]
        decisions.record(seen[:1], Decision.LEAVE_OUT)
    kept = (private / "memory.sqlite").read_bytes()
    (private / "key").rename(tmp_path / "key")
    with pytest.raises(SetupError, check=has_subject("private/key")):
        scan_at(data, private, LIMITS)
    assert not (private / "key").exists() and (private / "memory.sqlite").read_bytes() == kept
    (tmp_path / "key").rename(private / "key")
    assert scan_at(data, private, LIMITS).accepted == 2
