"""Arrays in several npy files: their order, and the columns beside them."""

from pathlib import Path

import numpy as np
import pytest

from ddm.errors import DataError
from ddm.images.array_files import open_arrays
from ddm.images.content import FileContent
from ddm.images.formats import decode
from ddm.images.npy_folder import npy_folder, numeric_order
from ddm.images.picture import DecodedPicture
from ddm.images.reasons import ImageError, Reason
from tests.support.case import case
from tests.support.errors import has_subject


def write_parts(folder: Path, suffixes: list[str], **columns: np.ndarray) -> Path:
    """Write two grey images for each part; all of their values are the part's place in the list, from 1 on."""
    folder.mkdir(parents=True)
    for place, suffix in enumerate(suffixes, 1):
        np.save(folder / f"images-{suffix}.npy", np.full((2, 8, 8), place, np.uint8))
    for name, column in columns.items():
        np.save(folder / f"{name.replace('_', '-')}.npy", column)
    return folder


def values_and_labels(path: Path) -> list[tuple[int, str | None]]:
    pictures = list(decode(FileContent.of(path)))
    assert all(isinstance(picture, DecodedPicture) for picture in pictures)
    return [(int(picture.values.max()), picture.label) for picture in pictures]


def test_parts_are_paired_with_one_column_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    labels = np.repeat(np.arange(1, 13), 2)
    patterns = {
        "plain": [f"{number}" for number in range(1, 13)],
        "filled": [f"{number:02}" for number in range(1, 13)],
        "overflowing": [f"{number:02}" for number in range(95, 107)],
        "of": [f"{number}-of-12" for number in range(1, 13)],
        "two numbers": [
            f"{year}-{month}" for year in (2020, 2021) for month in (1, 2, 3, 10, 11, 12)
        ],
    }
    for name, suffixes in patterns.items():
        with case(name):
            folder = write_parts(tmp_path / name, suffixes, labels=labels)
            expected = [(number, str(number)) for number in labels.tolist()]
            assert values_and_labels(folder / f"images-{suffixes[0]}.npy") == expected
            source = open_arrays(folder)
            assert [file.stem.removeprefix("images-") for file in source.files] == suffixes
            stored = source.in_place()
            assert stored is not None
            assert stored.read(range(24))[:, 0, 0].tolist() == source.column("labels", 8).tolist()


def test_names_that_state_no_order_are_never_paired_with_one_column(tmp_path: Path) -> None:
    for number, suffixes in enumerate(
        (
            ["a", "10"],
            ["01", "1"],
            ["1", "02"],
            ["a", "b"],
            ["north-1", "south-2"],
            ["1", "1-2"],
            ["1", "01"],
        )
    ):
        with case(suffixes):
            assert numeric_order(suffixes) is None
            folder = write_parts(tmp_path / str(number), suffixes, patients=np.arange(4))
            with pytest.raises(DataError, check=has_subject("image")):
                open_arrays(folder).column("patients", 8)
            with pytest.raises(ImageError) as caught:
                list(decode(FileContent.of(folder / f"images-{suffixes[0]}.npy")))
            assert caught.value.reason is Reason.AMBIGUOUS
            (folder / "patients.npy").unlink()
            assert len(open_arrays(folder)) == 4


def test_columns_of_parts_belong_to_the_part_of_their_name(tmp_path: Path) -> None:
    for number, suffixes in enumerate((["1", "2", "10"], ["north", "south"])):
        with case(suffixes):
            folder = write_parts(tmp_path / str(number), suffixes)
            for place, suffix in enumerate(suffixes, 1):
                np.save(folder / f"labels-{suffix}.npy", np.array([[place], [place]]))
                np.save(folder / f"patient-{suffix}.npy", np.array([f"p{place}" * place] * 2))
            pictures = list(decode(FileContent.of(folder / f"images-{suffixes[0]}.npy")))
            for picture in pictures:
                assert isinstance(picture, DecodedPicture)
                place = int(picture.values.max())
                assert (picture.label, picture.patient) == (str(place), f"p{place}" * place)
            source = open_arrays(folder)
            assert {"labels", "patients"} <= source.columns
            assert (
                source.column_shape("labels") == (len(source),) == source.column("labels", 8).shape
            )
            np.save(folder / f"labels-{suffixes[0]}.npy", np.arange(3))
            with pytest.raises(DataError, check=has_subject("labels")):
                source.column("labels", 8)


def test_columns_that_do_not_belong_to_the_parts_are_refused(tmp_path: Path) -> None:
    two = np.arange(2)
    wrong = {
        "one part without": {"labels_1": two},
        "whole and part": {"labels_1": two, "labels_2": two, "labels": np.arange(4)},
        "part without images": {"labels_1": two, "labels_2": two, "labels_3": two},
        "two names": {"labels": np.arange(4), "label": np.arange(4)},
        "two names in parts": {"labels_1": two, "label_2": two},
    }
    for name, columns in wrong.items():
        with case(name):
            folder = write_parts(tmp_path / name, ["1", "2"], **columns)
            with pytest.raises(ImageError) as caught:
                list(decode(FileContent.of(folder / "images-1.npy")))
            assert caught.value.reason is Reason.AMBIGUOUS
    for name, column in {
        "longer": np.arange(5),
        "shorter": np.arange(3),
        "wide": np.zeros((4, 14)),
    }.items():
        with case(name):
            folder = write_parts(tmp_path / name, ["1", "2"], labels=column)
            with pytest.raises(ImageError, match="one entry for each"):
                list(decode(FileContent.of(folder / "images-1.npy")))


def test_one_array_beside_parts_of_it_is_refused(tmp_path: Path) -> None:
    folder = write_parts(tmp_path / "both", ["1", "2"], images=np.zeros((2, 8, 8), np.uint8))
    for name in ("images", "images-1"):
        with case(name), pytest.raises(ImageError, match="keep one or the other"):
            list(decode(FileContent.of(folder / f"{name}.npy")))
    assert npy_folder(["a.npy", "b.png"]) is None


def test_missing_entries_of_a_column_are_none(tmp_path: Path) -> None:
    labels = np.array([1.0, np.nan, 2.5, 3])
    patients = np.array(["a", "", "NA", " b "])
    folder = write_parts(tmp_path / "parts", ["1", "2"], labels=labels, patients=patients)
    pictures = list(decode(FileContent.of(folder / "images-1.npy")))
    assert [picture.label for picture in pictures] == ["1", None, "2.5", "3"]
    assert [picture.patient for picture in pictures] == ["a", None, None, "b"]
