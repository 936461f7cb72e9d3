import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ddm.errors import DataError, SetupError
from ddm.images import workers
from ddm.images.find import find_data
from ddm.images.patients import pseudonyms
from ddm.images.picture import DecodeLimits
from ddm.images.record import difference_hash
from ddm.images.workers import DecodedFile, DecodedImage, DecodeJob, DecoderOptions, decode_files
from silo.images import scan as scan_module
from silo.images.alike import near_duplicates
from silo.images.scan import ScannedImages, scan
from tests.support.cohorts import scan_at, source_at
from tests.support.commands import run_command
from tests.support.dicom_files import tags_of, waves, write, write_inflating

KEY = bytes(32)
LIMITS = DecodeLimits(memory_bytes=2 << 30)


def image(path: Path, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 40), dtype=np.uint8)).save(
        path
    )
    return path


def quarantined(private: Path) -> dict[str, str]:
    with (private / scan_module.QUARANTINE).open(
        encoding="utf-8", errors="surrogateescape", newline=""
    ) as handle:
        return {row["path"]: row["reason"] for row in csv.DictReader(handle)}


def age(folder: Path) -> None:
    """Let files be older than a scan, as they are outside tests."""
    for path in folder.rglob("*"):
        os.utime(path, ns=(10**18, 10**18))
    time.sleep(0.06)  # of the times of their entries, which nothing but the clock sets


def test_command_prints_exactly_the_counts_and_no_name(tmp_path: Path) -> None:
    data = tmp_path / "DOE^JOHN"
    image(data / "a.png"), image(data / "deep/er/b.png"), image(data / "c.png", 1)
    (data / "notes.txt").write_text("MRN0017")
    write(tags_of(waves(), Modality="US"), data / "MRN0017.dcm")
    finished = run_command(
        "silo", "scan", "--data", data, "--json", "--private", tmp_path / "private"
    )
    assert finished.code == 0, finished.err
    assert json.loads(finished.out) == {
        "accepted": 3,
        "quarantined": 2,
        "reasons": {"not an image": 1, "ultrasound": 1},
        "other_parts": {},
        "patients": 0,
        "labels": {},
        "shapes": {"40x40": 3},
        "duplicates": 1,
    }
    again = run_command("silo", "scan", "--data", data, "--private", tmp_path / "private")
    assert "3 images accepted, 2 in quarantine. 0 files were decoded now" in again.out
    assert not {"DOE", "MRN0017"} & set(
        (again.out + finished.out + finished.err).replace("^", " ").split()
    )
    assert quarantined(tmp_path / "private") == {
        f"{data}/notes.txt": "not an image",
        f"{data}/MRN0017.dcm": "ultrasound",
    }
    assert b"MRN0017" not in (tmp_path / "private/memory.sqlite").read_bytes().replace(
        b"MRN0017.dcm", b""
    )
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "private").iterdir())


def test_command_ends_with_an_error_where_nothing_is_accepted_or_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/notes.txt").write_text("no image")
    finished = run_command(
        "silo", "scan", "--data", tmp_path / "data", "--json", "--private", tmp_path / "private"
    )
    assert finished.code == DataError.exit_code and json.loads(finished.out)["reasons"] == {
        "not an image": 1
    }
    assert run_command("silo", "scan").code == SetupError.exit_code
    assert run_command("silo", "scan", "--data", tmp_path / "absent").code == 4
    assert (
        run_command("silo", "scan", "--data", tmp_path / "data", "--column", "size=x").code
        == SetupError.exit_code
    )


def test_second_scan_decodes_only_what_changed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    private = tmp_path / "private"
    for number in range(4):
        image(data / f"{number}.png", number)
    (data / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    age(data)
    first = scan_at(data, private, LIMITS)
    assert (first.accepted, first.quarantined, first.num_read, first.num_decoded) == (4, 1, 5, 5)
    second = scan_at(data, private, LIMITS)
    assert (second.num_read, second.num_decoded) == (0, 0) and second.as_json() == first.as_json()
    os.utime(data / "0.png")  # touched, with the same content
    image(data / "1.png", 9)  # another content
    (data / "2.png").unlink()
    image(data / "new.png", 10)
    third = scan_at(data, private, LIMITS)
    assert (third.accepted, third.num_read, third.num_decoded) == (4, 3, 2)
    # by other limits
    assert scan_at(data, private, DecodeLimits(memory_bytes=2 << 30, seconds=30.0)).num_decoded == 5


def test_lists_for_people_hold_no_formula_although_patients_and_files_are_called_like_one(
    tmp_path: Path,
) -> None:
    for number in range(4):
        image(tmp_path / f"{number}.png", number)
    (tmp_path / "=cmd.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "table.csv").write_text(
        "file,patient\n0.png,=M\u00dcLLER()\n1.png,=MUELLER()\n2.png,@017\n3.png,@17\n=cmd.png,-1\n",
        encoding="utf-8",
    )
    scanned = run_command(
        "silo", "scan", "--data", tmp_path / "table.csv", "--private", tmp_path / "private"
    )
    assert "look-alikes.csv lists them" in scanned.out, scanned.err
    cells = []
    for name in ("look-alikes.csv", "quarantine.csv"):
        with (tmp_path / "private" / name).open(newline="", encoding="utf-8") as handle:
            cells += [cell for row in csv.reader(handle) for cell in row]
    assert {"'=M\u00dcLLER()", "'@17"} <= set(cells)
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\t", "\r"))]


def test_tables_name_paths_labels_and_patients(tmp_path: Path) -> None:
    for number in range(4):
        image(tmp_path / f"images/{number}.png", number)
    rows = [
        "file;Class;patient_id;split",
        "images/0.png;cat;007;train",
        "images/1.png;dog; 7 ;train",
        "images/2.png;cat;;val",
    ]
    rows += ["images/3.png;cat;Ab 1;val", "images/absent.png;cat;x;val", "images/0.png;dog;x;val"]
    (tmp_path / "table.csv").write_text("\n".join(rows) + "\n")
    summary = scan_at(tmp_path / "table.csv", tmp_path / "private", LIMITS)
    assert summary.as_json()["labels"] == {"cat": 3, "dog": 1} and summary.parts == {
        "train": 2,
        "validation": 2,
    }
    assert (summary.patients, summary.look_alike_patients, summary.unknown_patients) == (3, 2, 1)
    assert summary.reasons == {"no such file": 1, "named twice in the table": 1}
    table = {
        "path": ["images/0.png", "images/1.png"],
        "finding": ["x", "y"],
        "patient": [12.0, 12.0],
    }
    pq.write_table(pa.table(table), tmp_path / "table.parquet")
    summary = scan_at(
        tmp_path / "table.parquet", tmp_path / "private", LIMITS, columns={"label": "finding"}
    )
    assert summary.labels == {"x": 1, "y": 1} and summary.patients == 1
    for text in ("a,b\n1,2\n", "path\n\xff\n", 'path\n"x\n', "path,label\nx\n"):
        (tmp_path / "bad.csv").write_bytes(text.encode("latin-1"))
        with pytest.raises(DataError):
            scan_at(tmp_path / "bad.csv", tmp_path / "private", LIMITS)


def test_folders_of_any_depth_and_odd_names_are_gone_through(tmp_path: Path) -> None:
    data = tmp_path / "data"
    place = data
    for _ in range(40):
        place = place / "d"
    image(place / "a.png")
    image(data / "b.png", 1).rename(os.fsdecode(os.fsencode(data) + b"/\xff\n.png"))
    (data / "link").symlink_to(place.parent)
    (data / "loop.png").symlink_to("loop.png")
    os.mkfifo(data / "pipe")
    summary = scan_at(data, tmp_path / "private", LIMITS)
    assert summary.accepted == 2
    assert summary.reasons == {"link to a folder": 1, "cannot be read": 1, "not a regular file": 1}


@pytest.mark.measured
def test_finding_files_takes_time_in_proportion_to_their_number(tmp_path: Path) -> None:
    # of one folder: looking through all names for each takes minutes where there are 60,000
    for number in range(4000):
        (tmp_path / f"{number}.png").touch()
    began = time.process_time()
    assert sum(1 for _ in find_data(tmp_path, {}).files()) == 4000
    assert time.process_time() - began < 1.5


def test_idx_is_read_with_the_labels_beside_it(tmp_path: Path) -> None:
    values = waves((3, 6, 5), high=255, dtype=np.uint8)
    labels = np.array([2, 0, 2], np.uint8)
    (tmp_path / "idx").mkdir()
    for name, array in (("train-images-idx3-ubyte", values), ("train-labels-idx1-ubyte", labels)):
        sides = b"".join(side.to_bytes(4, "big") for side in array.shape)
        (tmp_path / "idx" / name).write_bytes(
            b"\0\0\x08" + bytes([array.ndim]) + sides + array.tobytes()
        )
    summary = scan_at(tmp_path / "idx", tmp_path / "private", DecodeLimits())
    assert summary.as_json()["labels"] == {"2": 2, "0": 1} and not summary.quarantined


def test_hostile_files_are_bounded_and_the_others_still_read(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for number in range(6):
        image(data / f"{number}.png", number)
    write_inflating(data / "bomb.dcm", 1 << 30)
    summary = scan_at(data, tmp_path / "private", DecodeLimits(memory_bytes=1 << 30), processes=2)
    assert summary.accepted == 6
    assert quarantined(tmp_path / "private")[f"{data}/bomb.dcm"] in (
        *("too much memory", "decoder crashed", "too much time"),
    )


KILLER = """
import os, sys, time
from pathlib import Path
from ddm.images import worker
def decode(content, limits):
    path = content.path
    if path.name == "hang": time.sleep(600)
    if path.name == "slow": time.sleep(4)
    if path.name == "crash": os.abort()
    if path.name == "memory": bytearray(8 << 30)
    if path.name == "write": Path(sys.argv[1]).write_bytes(b"x" * 10)
    if path.name == "print":
        for descriptor in (1, 2):
            try: os.write(descriptor, b"DOE^JOHN")
            except OSError: pass
    return from_file(content, limits)
from_file, worker.decode = worker.decode, decode
worker.main()
"""


def run_killer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], limits: DecodeLimits
) -> dict:
    jobs = []
    for number, name in enumerate(names):
        path = str(image(tmp_path / f"{name}.png", number).rename(tmp_path / name))
        jobs.append(DecodeJob(path, (path,), 1))
    start = subprocess.Popen

    def popen(arguments: list, **options: object) -> subprocess.Popen:
        return start([sys.executable, "-P", "-c", KILLER, str(tmp_path / "written")], **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    results = list(decode_files(jobs, DecoderOptions(limits, KEY, 2, with_values=True)))
    for result in results:
        if isinstance(result, DecodedImage):
            assert result.picture is not None
            assert (result.picture.values[0] == np.asarray(Image.open(result.job.path))).all()
    assert [result.job for result in results if isinstance(result, DecodedFile)] == jobs
    return {
        Path(result.job.path).name: result.reason
        for result in results
        if isinstance(result, DecodedFile)
    }


def test_file_that_kills_its_decoder_is_named_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a", "crash", "b", "memory", "c", "write", "d", "print", "e"]
    ends = run_killer(tmp_path, monkeypatch, names, DecodeLimits(memory_bytes=2 << 30))
    assert (ends.pop("crash"), ends.pop("memory")) == ("decoder crashed", "too much memory")
    assert ends.pop("write") is not None and set(ends.values()) == {None}
    assert not (tmp_path / "written").exists() or not (tmp_path / "written").read_bytes()


def test_decoder_that_waits_for_a_busy_machine_is_waited_for_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = DecodeLimits(seconds=1, memory_bytes=2 << 30)
    with monkeypatch.context() as starved:
        starved.setattr(workers, "processor_use", lambda pid: (True, 0.0))
        assert run_killer(tmp_path, monkeypatch, ["a", "slow"], limits) == {"a": None, "slow": None}
        starved.setattr(workers, "_BUSY", 2)
        assert run_killer(tmp_path, monkeypatch, ["slow"], limits) == {"slow": "too much time"}


@pytest.mark.slow
def test_file_that_hangs_is_given_up_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = run_killer(
        tmp_path, monkeypatch, ["a", "hang", "b"], DecodeLimits(seconds=20, memory_bytes=2 << 30)
    )
    assert ends == {"a": None, "hang": "too much time", "b": None}


def test_pseudonyms_hide_identifiers_and_tell_spellings() -> None:
    exact, loose = pseudonyms("0042 a", KEY)
    for same in (
        " 0042 a\n",
        "0042A",
        "0042-a",
        "(0042)_A",
        "0042\u00a0A",
        "\uff10\uff10\uff14\uff12a",
    ):
        assert pseudonyms(same, KEY) == (exact, loose)
    for other in ("42A", "42 a", "\uff14\uff12a"):
        actual = pseudonyms(other, KEY)
        assert actual[1] == loose and actual[0] != exact
    assert pseudonyms("420a", KEY)[1] != loose and pseudonyms("0042 a", b"x" * 32) != (exact, loose)
    assert pseudonyms("12.0", KEY) == pseudonyms("12", KEY) != pseudonyms("120", KEY)
    assert pseudonyms("--", KEY) != pseudonyms("..", KEY)
    assert pseudonyms(" ", KEY) is None and pseudonyms("NaN", KEY) is None


def test_near_duplicates_are_found_after_compression_and_not_among_others() -> None:
    rng = np.random.default_rng(0)
    pictures = [
        Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).resize(
            (90, 80), Image.Resampling.BICUBIC
        )
        for _ in range(200)
    ]
    changed = [
        picture.resize((120, 100)).point(lambda value: value * 0.8 + 20)
        for picture in pictures[:20]
    ]
    hashes = [difference_hash(np.asarray(picture)[None]) for picture in (*pictures, *changed)]
    codes = [int(digest, 16) for digest in hashes]
    close = {
        max(i, j) for i in range(220) for j in range(i) if (codes[i] ^ codes[j]).bit_count() <= 15
    }
    assert near_duplicates(hashes[:200]) == 0 and near_duplicates(hashes) == len(close) >= 18
    assert difference_hash(np.zeros((1, 64, 64), np.uint8)) is None


def test_report_names_tables_and_patients_that_are_missing_and_the_command_to_review(
    tmp_path: Path,
) -> None:
    data = tmp_path / "export data"
    image(data / "2024/0.png")
    (data / "2024/metadata.csv").write_text("file,patient\n0.png,p0\n")
    (data / "list.xlsx").write_bytes(b"PK")
    finished = run_command("silo", "scan", "--data", data, "--private", tmp_path / "scans")
    assert finished.code == 0 and finished.out.startswith(
        "1 image accepted, 0 in quarantine. 1 file was decoded now."
    )
    assert "Tables and spreadsheets among the skipped files: 2; they were not used." in finished.out
    assert "No image has a patient." in finished.out and "silo review" not in finished.out
    finished = run_command(
        "silo",
        "review",
        "--images",
        "--data",
        data,
        "--private",
        tmp_path / "scans",
        "--leave-out",
        data,
    )
    assert "1 left out" in finished.out
    image(data / "1.png", seed=1)
    finished = run_command("silo", "scan", "--data", data, "--private", tmp_path / "scans")
    assert f"silo review --images --data '{data}' --private {tmp_path / 'scans'}" in finished.out


def test_a_folder_without_images_is_refused_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/README").write_text("x")
    refused = run_command(
        "silo", "scan", "--data", tmp_path / "data", "--private", tmp_path / "scans"
    )
    assert refused.code == DataError.exit_code
    assert "no images; skipped: 1 other file" in refused.err and "silo scan" not in refused.err


def test_pixels_that_nobody_scanned_are_not_used_in_place_of_scanned_ones(tmp_path: Path) -> None:
    image(tmp_path / "data/a.png", 1)
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    column = pa.array([{"bytes": None, "path": "a.png"}], kind)
    pq.write_table(pa.table({"image": column}), tmp_path / "data/one.parquet")
    source = source_at(tmp_path / "data/one.parquet", tmp_path / "private")
    assert scan(source).accepted == 1
    with ScannedImages.opened(source) as images:
        assert [scanned.reason for scanned in images] == [None]
        assert [picture is not None for _, picture in images.decoded()] == [True]
    image(tmp_path / "data/a.png", 2)  # the Parquet file itself stays as it is
    with ScannedImages.opened(source) as images:
        assert [scanned.reason for scanned in images] == [None]
        with pytest.raises(DataError, match="do not change"):
            list(images.decoded())
