"""Private pictures as a scan accepts them, on their way through the plan's transform into the cohort."""

import csv
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ddm.errors import DataError
from ddm.images.reasons import Reason
from ddm.images.samples import open_image_set
from ddm.images.transform import Transform
from ddm.images.workers import DecodedFile, DecodeJob, DecoderOptions, decode_files
from ddm.protocol.classes import Classes
from ddm.protocol.data import DataSpec
from ddm.protocol.transform import TransformSpec
from silo.config import ImagesSettings
from silo.data import transformed
from silo.data.cohort import Cohort
from silo.data.transformed import LEFT_OUT, RequiredColumns, open_transformed
from silo.images import scan as scan_module
from silo.images.decisions import Decision, Decisions
from silo.images.memory import ScanMemory
from silo.images.scan import ScannedImages
from silo.images.source import FOLDER, ImageSource
from tests.support.case import case
from tests.support.cohorts import cohort_at
from tests.support.dicom_files import tags_of, waves, write
from tests.support.forked import fork_process, wait_for_exit

DATA = DataSpec(shape=(1, 16, 16), range=(-1.0, 1.0))
SPEC = TransformSpec(
    channels="grey", range={"kind": "full"}, fit={"kind": "stretch"}, storage="uint8"
)
TRANSFORM = Transform(SPEC, DATA)
ONE = ImagesSettings(processes=1)


def tone(level: int) -> np.ndarray:
    return np.full((40, 40), level, np.uint8)


def export(folder: Path, levels: list[int]) -> Path:
    """Pictures of one grey each, which tell what became of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, level in enumerate(levels):
        Image.fromarray(tone(level)).save(folder / f"{number:02d}.png")
    for path in folder.iterdir():
        os.utime(path, ns=(10**18, 10**18))
    time.sleep(0.06)  # a file that is as young as this is read again
    return folder


def source_of(data: Path, private: Path, settings: ImagesSettings = ONE) -> ImageSource:
    return ImageSource(data, private / FOLDER, settings)


def levels(folder: Path, private: Path, **how: object) -> list[int]:
    rows = open_transformed(
        source_of(folder, private), TRANSFORM, RequiredColumns(), private, **how
    )  # type: ignore[arg-type]
    return [int(row.max()) for block in rows.unpacked() for row in block]


def left_out(private: Path) -> list[tuple[str, str]]:
    with (private / "images" / LEFT_OUT).open(encoding="utf-8", newline="") as handle:
        return [(Path(row["path"]).name, row["reason"]) for row in csv.DictReader(handle)]


def load(path: Path, private: Path, **request: object) -> Cohort:
    plain = {"unit": "image", "num_classes": None, "transform": SPEC, "settings": ONE}
    return cohort_at(path, DATA, min_images=1, salt=b"s", folder=private, **(plain | request))  # type: ignore[arg-type]


def test_bad_and_flagged_pictures_are_left_out_unfit_ones_are_blank_and_all_stay_in_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = export(tmp_path / "export", [10, 20, 30])
    private = tmp_path / "private"
    (folder / "00-DOE^JOHN.txt").write_text("MRN0017")
    (folder / "00z.png").write_bytes((folder / "00.png").read_bytes()[:60])
    Image.new("RGB", (1280, 720)).save(folder / "01-DOE.png")  # as large as a screen
    # floating point has no full range
    Image.fromarray(np.zeros((40, 40), np.float32)).save(folder / "01z.tif")
    (folder / "more").mkdir()
    Image.fromarray(tone(40)).save(folder / "more/04.png")
    caplog.set_level("INFO")
    assert levels(folder, private) == [10, 20, 0, 30, 40]
    assert left_out(private) == [
        ("00-DOE^JOHN.txt", "not an image"),
        ("00z.png", "truncated"),
        ("01-DOE.png", "screenshot"),
        ("01z.tif", "blank: not taken by the plan"),
    ]
    assert "5 samples of 5 images" in caplog.text and "1 screenshot" in caplog.text
    assert "1 of 5 images are blank to this plan" in caplog.text
    assert "DOE" not in caplog.text and "MRN" not in caplog.text
    assert (private / "images" / LEFT_OUT).stat().st_mode & 0o777 == 0o600
    # whoever has looked at it may use it
    assert len(open_image_set(folder / "01-DOE.png", DATA, SPEC).read()) == 1


def test_pictures_keep_the_order_of_their_files_whatever_decodes_them(tmp_path: Path) -> None:
    folder = export(tmp_path / "export", [])
    for number in range(24):  # large ones between small ones, and one file of many
        side = 900 if number % 5 == 0 else 40
        Image.fromarray(np.full((side, side), 10 * number, np.uint8)).save(
            folder / f"{number:02d}.png"
        )
    pages = [Image.fromarray(tone(level)) for level in (71, 72, 73)]
    pages[0].save(folder / "07z.tif", save_all=True, append_images=pages[1:])
    wanted = [*range(0, 80, 10), 71, 72, 73, *range(80, 240, 10)]
    private = tmp_path / "private"
    source = source_of(folder, private, ImagesSettings(processes=3))
    rows = open_transformed(source, TRANSFORM, RequiredColumns(), private)
    assert [int(row.max()) for block in rows.unpacked() for row in block] == wanted


def test_unchanged_cohort_is_found_again_and_a_changed_one_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export(tmp_path / "export", [10, 20])
    private = tmp_path / "private"
    decoded = []
    once = ScannedImages.decoded

    def counted(self: ScannedImages) -> Iterator:
        decoded.append(1)
        return once(self)

    monkeypatch.setattr(ScannedImages, "decoded", counted)
    assert levels(folder, private) == [10, 20] and decoded == [1]
    assert levels(folder, private) == [10, 20] and decoded == [1]
    monkeypatch.setattr("ddm.images.workers.start_tied", None)  # no decoder even starts
    assert levels(folder, private) == [10, 20] and decoded == [1]
    monkeypatch.undo()
    monkeypatch.setattr(ScannedImages, "decoded", counted)
    os.utime(folder / "00.png")  # touched, with the same content
    assert levels(folder, private) == [10, 20] and decoded == [1]
    Image.fromarray(tone(30)).save(folder / "01.png")
    assert levels(folder, private) == [10, 30] and decoded == [1, 1]
    (folder / "00.png").unlink()
    assert levels(folder, private) == [30] and decoded == [1, 1, 1]
    assert len(list(private.glob("unpacked-*.npy"))) == 1


def test_what_a_person_decided_counts(tmp_path: Path) -> None:
    folder = export(tmp_path / "export", [10])
    private = tmp_path / "private"
    write(tags_of(waves(high=255, dtype=np.uint8), bits=8, Modality="US"), folder / "us.dcm")
    assert levels(folder, private) == [10]
    with (
        ScanMemory.opened(private / "images", "") as memory,
        Decisions.opened(private / "images") as decisions,
    ):
        images = ScannedImages(source_of(folder, private), memory, decisions)
        with pytest.raises(DataError, match="new or changed files"):  # of another recipe
            images.digest(())
    with ScannedImages.opened(source_of(folder, private)) as images:
        (waiting,) = (image.record for image in images if image.reason and image.record)
    with Decisions.opened(private / "images") as decisions:
        decisions.record([waiting], Decision.CLEAR)
    assert levels(folder, private) == [10, 254]
    with Decisions.opened(private / "images") as decisions:
        decisions.record([waiting], Decision.LEAVE_OUT)
    assert levels(folder, private) == [10]


def test_patients_labels_and_captions_come_from_the_table_and_patients_from_dicom_too(
    tmp_path: Path,
) -> None:
    export(tmp_path / "export", [10, 20, 30, 40])
    for number, patient in enumerate(("MRN1", "MRN2")):
        write(
            tags_of(waves(high=255, dtype=np.uint8), bits=8, PatientID=patient),
            tmp_path / f"export/d{number}.dcm",
        )
    rows = [
        "path,patient,finding,caption",
        "export/01.png,P2,Pneumonia,left lung",
        "export/00.png,P1, normal ,",
    ]
    rows += ["export/03.png,P2,1,right", "export/d1.dcm,,PNEUMONIA,", "export/d0.dcm,MRN2,0,"]
    (tmp_path / "table.csv").write_text("\n".join(rows) + "\n")
    settings = ImagesSettings(processes=1, columns={"label": "finding"})
    names = {"num_classes": 2, "class_names": ("normal", "pneumonia"), "settings": settings}
    cohort = load(
        tmp_path / "table.csv", tmp_path / "private", unit="patient", captions=True, **names
    )
    assert cohort.unit_N.tolist() == [0, 1, 0, 2, 2]  # the table's MRN2 is the file's
    assert cohort.label_N is not None and cohort.label_N.tolist() == [1, 0, 1, 1, 0]
    assert cohort.captions == ("left lung", "", "right", "", "")
    assert [int(127.5 * (1 + image.max())) for image in cohort.images[:]][:3] == [19, 9, 39]
    everything = b"".join(path.read_bytes() for path in (tmp_path / "private").glob("unpacked-*"))
    assert b"MRN" not in everything and b"P2" not in everything


def test_a_number_in_a_table_means_what_the_site_calls_by_it_and_not_what_the_plan_does(
    tmp_path: Path,
) -> None:
    export(tmp_path / "export", [10, 20, 30, 40])
    labels = ("0", "1.0", "Malignant", "benign")
    rows = [f"export/{number:02d}.png,{label}" for number, label in enumerate(labels)]
    (tmp_path / "table.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    names = {"num_classes": 3, "class_names": ("malignant", "other", "benign")}
    own = {"known_classes": Classes(2, ("benign", "malignant"))}
    cohort = load(tmp_path / "table.csv", tmp_path / "private", **names, **own)
    assert cohort.label_N is not None and cohort.label_N.tolist() == [2, 0, 0, 2]


def test_arrays_bring_their_columns_and_latents_stay_as_they_are(tmp_path: Path) -> None:
    pixels = np.stack([tone(level) for level in (10, 20, 30)])
    columns = {
        "patients": ["a", "b", "a"],
        "labels": ["Cat", "dog", "cat"],
        "captions": ["one", "", "three"],
    }
    np.savez(tmp_path / "a.npz", images=pixels, **columns)
    names = {"num_classes": 2, "class_names": ("cat", "dog")}
    cohort = load(tmp_path / "a.npz", tmp_path / "private", unit="patient", captions=True, **names)
    assert (cohort.unit_N.tolist(), cohort.label_N.tolist()) == ([0, 1, 0], [0, 1, 0])  # type: ignore[union-attr]
    assert cohort.captions == ("one", "", "three")
    np.savez(tmp_path / "latents.npz", latents=np.zeros((3, 4, 2, 2), np.float32))
    assert load(tmp_path / "latents.npz", tmp_path / "private", latent_shape=(4, 2, 2)).latent


def test_what_the_plan_needs_and_pictures_lack_is_told_at_once_before_anything_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(tmp_path / "export", [10, 20, 30])
    rows = "path,patient,label\nexport/00.png,P1,secret\nexport/01.png,,\nexport/02.png,P1,normal\n"
    (tmp_path / "table.csv").write_text(rows)
    monkeypatch.setattr(ScannedImages, "decoded", None)
    required = RequiredColumns(
        patients=True, classes=Classes(2, ("normal", "pneumonia")), captions=True
    )
    private = tmp_path / "private"
    with pytest.raises(DataError) as caught:
        open_transformed(source_of(tmp_path / "table.csv", private), TRANSFORM, required, private)
    said = f"{caught.value} {caught.value.remedy}"
    for part in (
        "patients: expected a patient for each image, got none for 1 of 3 images",
        "labels: expected a label for each image, got none for 1 of 3 images",
        "labels: expected classes of the plan, normal, pneumonia, got others at 1 of 3 images",
        "captions: expected a text for at least one image, got blank ones alone",
        "column patient",
    ):
        assert part in said
    assert "secret" not in said and "P1" not in said and str(tmp_path) not in said
    assert not list((tmp_path / "private").glob("unpacked-*"))


def test_data_of_which_nothing_is_left_say_why(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    with case("no files"), pytest.raises(DataError, match="no files at all"):
        levels(folder, tmp_path / "private")
    (folder / "DOE.txt").write_text("x")
    with (
        case("no images"),
        pytest.raises(DataError, match="none; left out: 1 not an image") as caught,
    ):
        levels(folder, tmp_path / "private")
    assert "DOE" not in str(caught.value)
    assert not list((tmp_path / "private").glob("unpacked-*"))
    Image.fromarray(np.zeros((40, 40), np.float32)).save(folder / "a.tif")
    with case("none that the plan takes"):  # which is the plan's question, and no reason to stop
        assert levels(folder, tmp_path / "private") == [0]


def test_what_a_scan_accepted_and_no_longer_decodes_is_blank_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export(tmp_path / "export", [10, 20, 30])
    private = tmp_path / "private"
    pages = [Image.fromarray(tone(level)) for level in (71, 72, 73)]
    pages[0].save(folder / "01z.tif", save_all=True, append_images=pages[1:])
    whole = decode_files

    def late(jobs: Iterable[DecodeJob], options: DecoderOptions) -> Iterator:
        """One file takes too long, after its first picture, when its values are read."""
        num = 0
        for answer in whole(jobs, options):
            if not options.with_values or not answer.job.path.endswith("01z.tif"):
                yield answer
            elif isinstance(answer, DecodedFile):
                yield DecodedFile(answer.job, reason=Reason.TIME)
            elif not num:
                num += 1
                yield answer

    monkeypatch.setattr(scan_module, "decode_files", late)
    assert levels(folder, private) == [10, 20, 71, 0, 0, 30]
    assert left_out(private) == [("01z.tif", "blank: too much time")] * 2


@pytest.mark.slow
def test_work_that_is_stopped_or_killed_leaves_no_cohort_and_the_next_one_is_whole(
    tmp_path: Path,
) -> None:
    folder = export(tmp_path / "export", list(range(0, 200, 10)))
    private = tmp_path / "private"

    def stop(num_done: int, num: int) -> None:
        if num and num_done > 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        levels(folder, private, advance=stop)

    def die(num_done: int, num: int) -> None:
        if num and num_done > 5:
            os.kill(os.getpid(), signal.SIGKILL)

    assert (
        wait_for_exit(fork_process(lambda: levels(folder, private, advance=die))) == -signal.SIGKILL
    )
    assert not list(private.glob("unpacked-*"))
    assert levels(folder, private) == list(range(0, 200, 10))
    assert not list(private.glob(".unpacked-*"))


def test_files_that_change_between_scan_and_decoding_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export(tmp_path / "export", [10, 20])
    check = transformed._CohortBuilder.check

    def changing(self: transformed._CohortBuilder) -> int:
        num = check(self)
        Image.fromarray(tone(99)).save(folder / "01.png")
        return num

    monkeypatch.setattr(transformed._CohortBuilder, "check", changing)
    with pytest.raises(DataError, match="do not change while"):
        levels(folder, tmp_path / "private")
    assert not list((tmp_path / "private").glob("unpacked-*"))


def test_table_of_a_folder_belongs_to_its_files(tmp_path: Path) -> None:
    folder = export(tmp_path / "export", [10, 20, 30])
    (folder / "volumes.csv").write_text(
        "file,patient,label\n02.png,B,1\n00.png,A,0\nabsent.png,A,0\n"
    )
    with pytest.raises(DataError, match="none for 1 of 3 images"):
        load(folder, tmp_path / "private", unit="patient")
    (folder / "01.png").unlink()
    cohort = load(folder, tmp_path / "private", unit="patient", num_classes=2)
    assert cohort.label_N is not None and cohort.label_N.tolist() == [0, 1]
    assert left_out(tmp_path / "private") == [("absent.png", "no such file")]


def test_who_is_held_out_stays_when_patients_join_files_move_and_scans_are_made_anew(
    tmp_path: Path,
) -> None:
    """By the patient of a table, of a DICOM file or of an array, who has the same place in each."""
    names = [f"MRN-{number}" for number in range(24)]
    values = waves(high=255, dtype=np.uint8)

    def tabled(folder: Path, patients: list[str]) -> Path:
        export(folder, [5 + number for number in range(len(patients))])
        rows = [f"{folder.name}/{number:02d}.png,{name}" for number, name in enumerate(patients)]
        (folder.parent / f"{folder.name}.csv").write_text("\n".join(["path,patient", *rows]) + "\n")
        return folder.parent / f"{folder.name}.csv"

    def filed(folder: Path, patients: list[str]) -> Path:
        folder.mkdir()
        for number, name in enumerate(patients):
            write(tags_of(values, bits=8, PatientID=name.lower()), folder / f"{number:02d}.dcm")
        return folder

    def arrayed(folder: Path, patients: list[str]) -> Path:
        np.savez(
            folder.with_suffix(".npz"),
            images=np.stack([tone(5)] * len(patients)),
            patients=np.array(patients),
        )
        return folder.with_suffix(".npz")

    def ranks(path: Path, private: str, patients: list[str], **request: object) -> dict[str, float]:
        cohort = load(path, tmp_path / private, unit="patient", **request)
        return dict(zip(dict.fromkeys(patients), cohort.rank_U.tolist(), strict=True))

    before = ranks(tabled(tmp_path / "before", names), "one", names)
    assert len(set(before.values())) == len(names)
    more = ["MRN-100", *reversed(names[3:]), "MRN-4"]
    others = TransformSpec(channels="grey", range={"kind": "full"}, fit={"kind": "stretch"})
    for kind, path, private, request in (
        ("table", tabled(tmp_path / "after", more), "one", {}),
        ("other transform", tmp_path / "after.csv", "one", {"transform": others}),
        ("scanned anew", tmp_path / "after.csv", "two", {}),
        ("DICOM", filed(tmp_path / "files", more), "three", {}),
        ("array", arrayed(tmp_path / "array", more), "four", {}),
    ):
        with case(kind):
            after = ranks(path, private, more, **request)
            assert {name: after[name] for name in names[3:]} == {
                name: before[name] for name in names[3:]
            }
    other = ranks(tmp_path / "after.csv", "one", more)
    assert other == ranks(tmp_path / "after.csv", "five", more)
    salted = cohort_at(
        tmp_path / "after.csv",
        DATA,
        min_images=1,
        salt=b"t",
        folder=tmp_path / "one",
        unit="patient",
        num_classes=None,
        transform=SPEC,
        settings=ONE,
    )
    assert not set(salted.rank_U.tolist()) & set(other.values())
    written = b"".join(path.read_bytes() for path in tmp_path.glob("*/unpacked-*"))
    assert not any(name.encode() in written for name in ("MRN-100", "mrn-100", "mrn100", "MRN100"))
