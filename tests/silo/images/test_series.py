"""Heads in slices: files of one slice each are flagged where together they make a volume that may show a face."""

from pathlib import Path
from typing import Any

import pytest

from ddm.images.content import FileContent
from ddm.images.faces import names_head
from ddm.images.formats import decode
from ddm.images.picture import DecodedPicture, DecodeLimits
from ddm.images.reasons import Flag
from ddm.images.record import PictureRecord, SliceRecord
from silo.images.decisions import Decision, Decisions
from silo.images.scanned_image import ScannedImage
from silo.images.series import Stacks
from tests.support.cohorts import scan_at
from tests.support.dicom_files import tags_of, waves, write

LIMITS = DecodeLimits(memory_bytes=2 << 30)


def stack(
    num: int, step_mm: float | None = 5.0, head: bool | None = True, side_mm: float | None = 240.0
) -> Stacks:
    """The slices of one scan, each 64 x 64."""
    stacks = Stacks()
    for number in range(num):
        place = None if step_mm is None else step_mm * number
        sides = side_mm and (side_mm, side_mm)
        part = SliceRecord(series="a1", place_mm=place, sides_mm=sides or None, head=head)
        stacks.add(PictureRecord(shape=(1, 64, 64), pixels=f"{number:032x}", slice=part))
    return stacks


@pytest.mark.parametrize(
    ("slices", "face"),
    [
        (stack(24), True),
        (stack(23), False),  # too few for a face
        (stack(48, 0.0), False),  # one place, again and again
        (stack(24, None), True),  # places that nobody states
        (stack(24, 5.0, None), True),  # of no named part, as large as a head: 120 mm
        (stack(24, 2.0, None), False),
        (stack(60, 5.0, None, 60.0), False),
        (stack(24, 5.0, None, None), True),
        (stack(24, 1.0, True, 60.0), True),  # a name says more than a size
    ],
)
def test_a_scan_shows_a_face_where_it_has_slices_enough_and_names_or_fits_a_head(
    slices: Stacks, face: bool
) -> None:
    assert slices.judged() == {"a1": face}


def test_words_for_heads_are_found_and_others_are_not_taken_for_them() -> None:
    heads = (
        "HEAD",
        "headneck",
        "T1_BRAIN",
        "cMRT Großhirn",
        "CT Schädel nativ",
        "WHOLEBODY",
        "Head^Routine",
        "C-SPINE",
    )
    assert all(map(names_head, heads))
    assert not any(
        map(names_head, ("HEART", "SURFACE", "CLEAR", "CHEST", "femoral head", "YEAR", ""))
    )


def place(path: Path, number: int, series: str, **tags: Any) -> None:
    name = path / f"{series}{number:02d}.dcm"
    position = {
        "ImagePositionPatient": [0, 0, 5.0 * number],
        "ImageOrientationPatient": [1, 0, 0, 0, 1, 0],
    }
    write(
        tags_of(
            waves((40 + int(series), 40 + number)),
            SeriesInstanceUID=f"1.2.{series}",
            **position,
            **tags,
        ),
        name,
    )


def test_a_scan_flags_head_slices_as_soon_as_there_are_enough_of_them_and_forgets_no_decision(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    private = tmp_path / "private"
    data.mkdir()
    for number in range(24):
        place(data, number, "1", SeriesDescription="t1 HEAD sag", BodyPartExamined="")
        place(data, number, "2", BodyPartExamined="CHEST")
        if number < 20:
            place(data, number, "3", BodyPartExamined="BRAIN")
    actual: list[ScannedImage] = []
    first = scan_at(data, private, LIMITS, observe=actual.append)
    assert first.reasons == {Flag.FACE.value: 24} and first.accepted == 44
    assert {Path(image.path).name[0] for image in actual if image.reason} == {"1"}
    for number in range(20, 24):  # the rest of the third scan arrives
        place(data, number, "3", BodyPartExamined="BRAIN")
    with Decisions.opened(private) as decisions:
        decisions.record(
            [image.record for image in actual if image.reason and image.record], Decision.CLEAR
        )
    second = scan_at(data, private, LIMITS)
    assert (
        second.reasons == {Flag.FACE.value: 24}
        and second.accepted == 48
        and second.num_decoded == 4
    )
    with Decisions.opened(private) as decisions:
        chest = next(image.record for image in actual if image.path.endswith("200.dcm"))
        unknown = chest.model_copy(update={"slice": SliceRecord(series="ff")})
        assert decisions.verdict(chest) is None and decisions.verdict(unknown) == Flag.FACE.value


def test_a_slice_says_which_scan_it_belongs_to_only_where_it_may_be_of_a_head(
    tmp_path: Path,
) -> None:
    def slice_of(**tags: Any) -> Any:
        (picture,) = decode(
            FileContent.of(
                write(tags_of(waves(), SeriesInstanceUID="1.2.3", **tags), tmp_path / "a.dcm")
            )
        )
        assert isinstance(picture, DecodedPicture)
        return picture.slice

    lies = {"ImagePositionPatient": [1, 2, 3], "ImageOrientationPatient": [1, 0, 0, 0, 1, 0]}
    assert slice_of(BodyPartExamined="HEAD").head is True and slice_of(**lies).head is None
    assert slice_of(BodyPartExamined="HEAD", Modality="DX") is None and slice_of() is None
    assert slice_of(BodyPartExamined="CHEST", **lies) is None
    assert (
        slice_of(BodyPartExamined="CHEST", StudyDescription="CT head and chest").series == "1.2.3"
    )
    assert slice_of(BodyPartExamined="HEAD", **lies).place_mm == 3
    cut = slice_of(
        BodyPartExamined="HEAD", ImagePositionPatient=[1, 2], ImageOrientationPatient=[1]
    )
    assert cut.place_mm is None
    far = {"ImagePositionPatient": [0, 0, "1e300"], "PixelSpacing": ["1e300", "1e300"]}
    wild = slice_of(BodyPartExamined="HEAD", **{**lies, **far})
    assert wild.place_mm is None and wild.sides_mm is None
