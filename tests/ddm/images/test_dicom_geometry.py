"""Where frames are, and how large: spacing, and what makes a volume."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddm.images.content import FileContent
from ddm.images.formats import decode
from ddm.images.picture import DecodedPicture
from ddm.images.reasons import ImageError
from tests.support.case import case
from tests.support.dicom_files import tags_of, waves, write, write_enhanced


def pictures(path: Path) -> list[DecodedPicture]:
    return [
        picture for picture in decode(FileContent.of(path)) if isinstance(picture, DecodedPicture)
    ]


def test_spacing_is_that_of_the_first_tag_that_states_it(tmp_path: Path) -> None:
    for tags, spacing in (
        ({"PixelSpacing": [0.5, 0.75]}, (0.5, 0.75)),
        ({"PixelSpacing": [0.5, 0.75], "ImagerPixelSpacing": [1, 1]}, (0.5, 0.75)),
        ({"ImagerPixelSpacing": [0.2, 0.1]}, (0.2, 0.1)),
        ({"NominalScannedPixelSpacing": [0.3, 0.4]}, (0.3, 0.4)),
        ({"PixelSpacing": [0, 0], "ImagerPixelSpacing": [0.2, 0.1]}, (0.2, 0.1)),
        ({"PixelAspectRatio": [2, 1]}, (2, 1)),
        ({"PixelAspectRatio": [1, 2]}, (1, 2)),
        ({"PixelAspectRatio": [3, 4]}, (1, 4 / 3)),
        ({"PixelAspectRatio": [1, 1]}, None),
        ({"PixelAspectRatio": [1, 1], "PixelSpacing": [0.5, 0.75]}, (0.5, 0.75)),
        ({"PixelAspectRatio": [2, 3], "PixelSpacing": [0.5, 0.75]}, (0.5, 0.75)),
        ({"PixelAspectRatio": [0, 3]}, None),
        ({}, None),
    ):
        with case(tags=tags):
            (picture,) = pictures(write(tags_of(waves(), **tags), tmp_path / "a.dcm"))
            assert (picture.spacing is None) == (spacing is None)
            if spacing is not None:
                assert picture.spacing == pytest.approx(spacing)


def placed(
    values: np.ndarray, tmp_path: Path, change: Any = None, steps: list[float] | None = None
) -> Path:
    """Write frames 4 mm apart, after a change of the tags."""
    import pydicom

    path = write_enhanced(
        values, steps or [4.0 * number for number in range(len(values))], tmp_path / "a.dcm"
    )
    if change is not None:
        tags = pydicom.dcmread(path)
        change(tags)
        tags.save_as(path)
    return path


def test_only_frames_at_even_steps_along_their_normal_make_a_volume(tmp_path: Path) -> None:
    values = waves((6, 20, 24))

    def tilt(tags: Any) -> None:
        for number, group in enumerate(tags.PerFrameFunctionalGroupsSequence):
            group.PlanePositionSequence[0].ImagePositionPatient = [
                10,
                20 + 1.8652 * number,
                4 * number,
            ]

    def round_positions(tags: Any) -> None:
        for number, group in enumerate(tags.PerFrameFunctionalGroupsSequence):
            group.PlanePositionSequence[0].ImagePositionPatient = [
                10 + 0.001 * number,
                20,
                4 * number + 0.0004,
            ]

    def orient(directions: list[float]) -> Any:
        def change(tags: Any) -> None:
            orientation = tags.SharedFunctionalGroupsSequence[0].PlaneOrientationSequence[0]
            orientation.ImageOrientationPatient = directions

        return change

    def other_spacing(tags: Any) -> None:
        group = tags.PerFrameFunctionalGroupsSequence[3]
        group.PixelMeasuresSequence = pydicom_sequence(
            tags.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
        )
        group.PixelMeasuresSequence[0].PixelSpacing = [0.6, 0.75]

    for name, change, steps, is_volume in (
        ("straight", None, None, True),
        ("rounded", round_positions, None, True),
        ("tilted gantry", tilt, None, False),
        ("uneven", None, [0, 4, 8, 12.5, 16, 20], False),
        ("one slice missing", None, [0, 4, 8, 16, 20, 24], False),
        ("a place twice", None, [0, 4, 8, 8, 12, 16], False),
        ("all in one place", None, [0] * 6, False),
        ("directions too long", orient([1.1, 0, 0, 0, 1, 0]), None, False),
        ("directions not at a right angle", orient([1, 0, 0, 0.1, 0.995, 0]), None, False),
        ("no direction", orient([0, 0, 0, 0, 1, 0]), None, False),
        ("two spacings", other_spacing, None, False),
    ):
        with case(name=name):
            actual = pictures(placed(values, tmp_path, change, steps))
            assert len(actual) == (1 if is_volume else 6)
            if is_volume:
                assert actual[0].spacing == pytest.approx((4, 0.5, 0.75), abs=1e-3)
                assert (actual[0].values[0] == values.astype(int) * 2 - 1000).all()
            else:
                assert all(
                    (picture.values[0] == frame.astype(int) * 2 - 1000).all()
                    for picture, frame in zip(actual, values, strict=True)
                )


def pydicom_sequence(item: Any) -> Any:
    from copy import deepcopy

    from pydicom.sequence import Sequence

    return Sequence([deepcopy(item)])


def test_an_oblique_volume_has_the_steps_along_its_normal(tmp_path: Path) -> None:
    values = waves((5, 20, 24))
    angle = np.radians(20)
    row = np.array([1.0, 0, 0])
    column = np.array([0, np.cos(angle), np.sin(angle)])
    normal = np.cross(row, column)

    def turn(tags: Any) -> None:
        orientation = tags.SharedFunctionalGroupsSequence[0].PlaneOrientationSequence[0]
        orientation.ImageOrientationPatient = [
            round(float(number), 6) for number in (*row, *column)
        ]
        for number, group in enumerate(tags.PerFrameFunctionalGroupsSequence):
            position = np.array([10, 20, 30]) + 3 * number * normal
            group.PlanePositionSequence[0].ImagePositionPatient = [
                round(float(number), 4) for number in position
            ]

    (volume,) = pictures(placed(values, tmp_path, turn))
    assert volume.spacing == pytest.approx((3, 0.5, 0.75), abs=1e-3)
    assert (volume.values[0] == values.astype(int) * 2 - 1000).all()


def test_a_proportion_alone_gives_no_size_in_mm_of_a_slice(tmp_path: Path) -> None:
    tags = tags_of(
        waves(), PixelAspectRatio=[2, 1], BodyPartExamined="HEAD", SeriesInstanceUID="1.2.3"
    )
    (picture,) = pictures(write(tags, tmp_path / "a.dcm"))
    assert picture.slice is not None and picture.slice.sides_mm is None


def test_control_a_spacing_that_is_no_number_is_refused(tmp_path: Path) -> None:
    path = write(tags_of(waves(), PixelSpacing=["9.99", "9.99"]), tmp_path / "a.dcm")
    path.write_bytes(path.read_bytes().replace(b"9.99", b"wide"))
    with pytest.raises(ImageError) as caught:
        pictures(path)
    assert "PixelSpacing" in caught.value.detail
