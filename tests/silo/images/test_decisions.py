"""A person's decisions about flagged pictures: for which pictures they hold, and what they survive."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ddm.errors import SetupError
from ddm.images.picture import DecodeLimits
from ddm.images.reasons import Flag, Reason
from ddm.images.record import PictureRecord
from silo.images.decisions import LEFT_OUT, Decision, Decisions
from tests.support.cohorts import scan_at
from tests.support.dicom_files import tags_of, waves, write
from tests.support.errors import has_subject

CAPTURE = Flag.SECONDARY_CAPTURE.value
TEXT = Flag.SUSPECTED_TEXT.value


def seen(number: int = 1, *flags: str) -> PictureRecord:
    return PictureRecord(shape=(1, 2, 2), dtype="uint8", flags=flags, pixels=f"{number:032x}")


def test_a_decision_holds_for_these_pixels_and_flags_until_it_is_taken_back(tmp_path: Path) -> None:
    with Decisions.opened(tmp_path) as decisions:
        assert decisions.verdict(seen(1, CAPTURE)) == CAPTURE and decisions.verdict(seen(1)) is None
        decisions.record([seen(1, CAPTURE), seen(2, TEXT, CAPTURE)], Decision.CLEAR)
    with Decisions.opened(tmp_path) as decisions:
        assert (
            decisions.verdict(seen(1, CAPTURE)) is None
            and decisions.verdict(seen(2, CAPTURE, TEXT)) is None
        )
        assert decisions.verdict(seen(1, CAPTURE, TEXT)) == CAPTURE  # a flag that nobody saw
        assert decisions.verdict(seen(3, CAPTURE)) == CAPTURE
        assert decisions.verdict(PictureRecord(reason=Reason.DAMAGED.value)) == "damaged"
        decisions.record([seen(1, CAPTURE)], None)
        assert decisions.verdict(seen(1, CAPTURE)) == CAPTURE


def test_what_was_left_out_stays_out_whatever_its_flags_and_clearing_it_lets_it_in(
    tmp_path: Path,
) -> None:
    with Decisions.opened(tmp_path) as decisions:
        decisions.record([seen(1, CAPTURE)], Decision.LEAVE_OUT)
        assert [decisions.verdict(seen(1, *flags)) for flags in ((CAPTURE,), (), (TEXT,))] == [
            LEFT_OUT
        ] * 3
        assert decisions.verdict(seen(2)) is None
        decisions.record([seen(1, TEXT)], Decision.CLEAR)
        assert (
            decisions.verdict(seen(1, TEXT)) is None
            and decisions.verdict(seen(1, CAPTURE)) == CAPTURE
        )


def test_a_scan_takes_what_was_cleared_and_counts_what_was_left_out(tmp_path: Path) -> None:
    data = tmp_path / "data"
    private = tmp_path / "private"
    data.mkdir()
    for number in range(3):
        write(tags_of(waves((48, 40 + number)), Modality="US"), data / f"{number}.dcm")
    limits = DecodeLimits(memory_bytes=2 << 30)
    assert scan_at(data, private, limits).reasons == {"ultrasound": 3}
    with Decisions.opened(private) as decisions:
        waiting = sorted(
            (record for record in known(private) if record.flags), key=lambda record: record.shape
        )
        decisions.record(waiting[:1], Decision.CLEAR)
        decisions.record(waiting[1:2], Decision.LEAVE_OUT)
    summary = scan_at(data, private, limits)
    assert (summary.accepted, summary.quarantined) == (1, 2)
    assert summary.reasons == {"ultrasound": 1, LEFT_OUT: 1} and summary.shapes == {"48x40": 1}
    rows = (private / "quarantine.csv").read_text().splitlines()
    assert f"{data}/1.dcm,0,{LEFT_OUT},ultrasound" in rows and f"{data}/2.dcm,0,ultrasound," in rows


def known(private: Path) -> list[PictureRecord]:
    """What the scan's memory holds of each picture."""
    import sqlite3

    database = sqlite3.connect(private / "memory.sqlite")
    try:
        return [
            PictureRecord.model_validate_json(text)
            for (text,) in database.execute("select record from pictures")
        ]
    finally:
        database.close()


DECIDING = """
import sys
from pathlib import Path
from silo.images.decisions import Decision, Decisions
from ddm.images.record import PictureRecord
with Decisions.opened(Path(sys.argv[1])) as decisions:
    for number in range(10**6):
        pair = [PictureRecord(flags=("overlay",), pixels=f"{2 * number + each:032x}") for each in (0, 1)]
        decisions.record(pair, Decision.CLEAR)
        print(number, flush=True)
"""


def test_what_was_recorded_survives_a_kill_and_pairs_stay_whole(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DECIDING, tmp_path], stdout=subprocess.PIPE, text=True
    ) as process:
        last = 0
        while last < 20:
            last = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        last = max([last, *map(int, process.stdout.read().split())])
    with Decisions.opened(tmp_path) as decisions:
        held = [
            decisions.verdict(seen(number, "overlay")) is None for number in range(2 * last + 8)
        ]
    assert all(held[: 2 * last + 2]) and held[::2] == held[1::2]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in tmp_path.iterdir())


def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "decisions.sqlite").write_bytes(os.urandom(8192))
    with (
        pytest.raises(SetupError, check=has_subject("decisions.sqlite")),
        Decisions.opened(tmp_path),
    ):
        pass
