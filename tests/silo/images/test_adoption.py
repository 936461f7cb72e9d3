"""Decisions that were made before there was a site hold in the site that is made for the same data."""

import stat
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ddm.errors import BusyError
from ddm.io.locks import locked
from silo.config import ImagesSettings, Site
from silo.images.adoption import adopt_decisions
from silo.images.decisions import Decision, Decisions
from silo.images.memory import ScanMemory
from silo.images.review import Review
from silo.images.scan import scan
from silo.images.source import default_folder
from silo.setup import first_look, new_source
from tests.support.cohorts import source_at
from tests.support.commands import run_command
from tests.support.dicom_files import tags_of, waves, write

DECIDED = ("key", "decisions.sqlite", "memory.sqlite")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three ultrasound images and three others; scans outside of a site are remembered below `tmp_path`."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(3):
        write(tags_of(waves((48, 40 + number)), Modality="US"), folder / f"us{number}.dcm")
        Image.fromarray(waves((40, 40 + number), high=255, dtype=np.uint8)).save(
            folder / f"{number}.png"
        )
    return folder


def scan_and_decide(data: Path) -> None:
    """Clear one image, leave out two others, one of which nothing is the matter with."""
    assert run_command("silo", "scan", "--data", data).code == 0
    words = (
        "--clear",
        data / "us0.dcm",
        "--leave-out",
        data / "us1.dcm",
        "--leave-out",
        data / "2.png",
    )
    assert run_command("silo", "review", "--images", "--data", data, *words).code == 0


def test_decisions_before_init_hold_in_the_site_and_nothing_is_decoded_again(
    data: Path, tmp_path: Path
) -> None:
    scan_and_decide(data)
    site = Site(tmp_path / "site")
    source = new_source(site, data, ImagesSettings())
    look = first_look(site, source)
    assert look.num_adopted == 3 and look.summary is not None
    assert look.summary.accepted == 3
    assert look.summary.reasons == {"ultrasound": 1, "left out by a person": 2}
    assert look.summary.num_decoded == 0
    for name in DECIDED:
        assert stat.S_IMODE((source.folder / name).stat().st_mode) == 0o600
    with (
        Decisions.opened(source.folder) as decisions,
        ScanMemory.opened(source.folder, "") as memory,
    ):
        review = Review.of(memory, decisions)
        review.decide(review.listed(Decision.LEAVE_OUT), None)
    assert scan(source).reasons == {"ultrasound": 2}
    # What was decided in the site does not reach back.
    assert scan(source_at(data, default_folder(data))).reasons == {
        "ultrasound": 1,
        "left out by a person": 2,
    }


def test_nothing_is_carried_over_where_nothing_was_decided_or_the_site_has_its_own(
    data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "private"
    assert adopt_decisions(default_folder(data), folder) == 0 and not folder.exists()
    assert run_command("silo", "scan", "--data", data).code == 0
    assert adopt_decisions(default_folder(data), folder) == 0 and not (folder / "key").exists()
    scan(source_at(data, folder))
    key = (folder / "key").read_bytes()
    scan_and_decide(data)
    assert adopt_decisions(default_folder(data), folder) == 0
    assert (folder / "key").read_bytes() == key


def test_an_interrupted_carrying_over_is_completed(data: Path, tmp_path: Path) -> None:
    scan_and_decide(data)
    before = default_folder(data)
    folder = tmp_path / "private"
    assert adopt_decisions(before, folder) == 3
    (folder / "decisions.sqlite").unlink()  # as if it had ended before the last step
    (folder / "decisions.sqlite.partial").write_bytes(b"half")
    assert adopt_decisions(before, folder) == 3
    assert scan(source_at(data, folder)).reasons == {"ultrasound": 1, "left out by a person": 2}


def test_a_scan_at_work_is_not_copied(data: Path, tmp_path: Path) -> None:
    scan_and_decide(data)
    with locked(default_folder(data), "scan"), pytest.raises(BusyError):
        adopt_decisions(default_folder(data), tmp_path / "private")
    assert not (tmp_path / "private/key").exists()
