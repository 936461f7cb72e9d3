"""Arrays in an npz: the range of whole numbers, parts of a data set by their names, and archives that are refused."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddm.errors import DataError
from ddm.images.array_files import open_arrays, read_images
from ddm.images.content import FileContent
from ddm.images.formats import decode
from ddm.images.picture import DecodedPicture
from ddm.images.reasons import ImageError, Reason
from ddm.protocol.data import DataSpec
from tests.support.case import case
from tests.support.errors import has_subject

SPEC = DataSpec(shape=(1, 2, 2), range=(-1.0, 3.0))


def images(num: int, value: int) -> np.ndarray:
    return np.full((num, 8, 8), value, np.uint8)


def rows_of(path: Path) -> list[tuple[int, str | None, str | None, str | None]]:
    rows = []
    for picture in decode(FileContent.of(path)):
        assert isinstance(picture, DecodedPicture)
        rows.append((int(picture.values.max()), picture.split, picture.label, picture.patient))
    return rows


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_whole_numbers_are_spread_over_the_plans_range(tmp_path: Path, dtype: type) -> None:
    most = np.iinfo(dtype).max
    np.savez(
        tmp_path / "a.npz", images=np.array([[[0, most], [most // 3, most // 5]]], dtype=dtype)
    )
    actual = read_images(tmp_path / "a.npz", SPEC).flatten().tolist()
    assert actual == pytest.approx([-1.0, 3.0, 1 / 3, -0.2], abs=1e-6)


@pytest.mark.parametrize("dtype", [np.int16, np.uint32, np.int64, bool])
def test_other_whole_numbers_are_refused(tmp_path: Path, dtype: type) -> None:
    np.savez(tmp_path / "a.npz", images=np.ones((1, 2, 2), dtype=dtype))
    with pytest.raises(DataError, check=has_subject("image values")):
        read_images(tmp_path / "a.npz", SPEC)


def test_parts_of_a_data_set_come_with_their_own_columns(tmp_path: Path) -> None:
    train = [(1, "train", "7", "a"), (1, "train", "8", "b")]
    test = [(2, "test", None, "c")]
    conventions = {
        "MedMNIST": (
            "train_images",
            "train_labels",
            "train_patients",
            "test_images",
            "test_patients",
        ),
        "reversed": (
            "images_train",
            "labels_train",
            "patients_train",
            "images_test",
            "patients_test",
        ),
        "Keras": ("x_train", "y_train", "patients_train", "x_test", "patients_test"),
        "singular": ("train_images", "train_label", "train_patient", "test_images", "test_patient"),
        "capitals": ("X_train", "Y_train", "train_patient_id", "X_test", "test_patient_id"),
    }
    columns = (images(2, 1), [[7], [8]], ["a", "b"], images(1, 2), ["c"])
    for name, names in conventions.items():
        for save in (np.savez, np.savez_compressed):
            with case(name, save.__name__):
                path = tmp_path / "a.npz"
                save(path, **dict(zip(names, columns, strict=True)))
                assert sorted(rows_of(path), key=lambda row: row[0]) == train + test
                with pytest.raises(DataError, match="parts"):
                    open_arrays(path)


def test_columns_that_belong_to_no_part_in_particular_are_refused(tmp_path: Path) -> None:
    train = images(2, 1)
    test = images(1, 2)
    wrong: dict[str, dict[str, Any]] = {
        "whole beside parts": {"train_images": train, "test_images": test, "labels": [1, 2, 3]},
        "whole beside one part": {"train_images": train, "labels": [1, 2]},
        "images twice": {"images": train, "train_images": train},
        "part beside whole": {"images": train, "train_labels": [1, 2]},
        "labels without images": {"train_images": train, "val_labels": [1, 2]},
        "two images of a part": {"train_images": train, "x_train": train},
        "two labels": {"images": train, "label": [1, 2], "labels": [1, 2]},
        "two labels of a part": {
            "train_images": train,
            "train_labels": [1, 2],
            "train_label": [1, 2],
        },
    }
    for name, arrays in wrong.items():
        with case(name):
            np.savez(tmp_path / "a.npz", **arrays)
            with pytest.raises(ImageError) as caught:
                rows_of(tmp_path / "a.npz")
            assert caught.value.reason is Reason.AMBIGUOUS
    unequal: dict[str, dict[str, Any]] = {
        "too long": {"train_images": train, "train_labels": [1, 2, 3]},
        "of another part": {
            "train_images": train,
            "test_images": test,
            "train_labels": [1],
            "test_labels": [1],
        },
        "several for each": {"train_images": train, "train_labels": np.zeros((2, 14))},
        "one value": {"images": train, "labels": 3},
    }
    for name, arrays in unequal.items():
        with case(name):
            np.savez(tmp_path / "a.npz", **arrays)
            with pytest.raises(ImageError, match="for each|a single value"):
                rows_of(tmp_path / "a.npz")


def test_an_array_beside_the_images_may_be_anything_that_has_no_name_of_a_column(
    tmp_path: Path,
) -> None:
    np.savez(
        tmp_path / "a.npz",
        images=images(2, 1),
        mask_images=images(5, 9),
        info=np.array([{}], object),
        split=["a", "b"],
    )
    assert [row[:2] for row in rows_of(tmp_path / "a.npz")] == [(1, "a"), (1, "b")]
    assert len(open_arrays(tmp_path / "a.npz")) == 2


def test_an_archive_with_two_arrays_of_one_name_or_none_of_images_is_refused(
    tmp_path: Path,
) -> None:
    data = io.BytesIO()
    np.save(data, images(2, 1))
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("images.npy", data.getvalue())
        archive.writestr("images", data.getvalue())
    with pytest.raises(ImageError, match="one name"):
        rows_of(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", mask_images=images(2, 1))
    with pytest.raises(ImageError, match="called images"):
        rows_of(tmp_path / "b.npz")


def test_a_column_whose_entries_have_room_for_a_million_characters_is_refused_unread(
    tmp_path: Path,
) -> None:
    header = "{'descr': '<U1000000', 'fortran_order': False, 'shape': (2,), }".ljust(117) + "\n"
    prefix = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
    np.savez_compressed(tmp_path / "a.npz", images=images(2, 1))
    with zipfile.ZipFile(tmp_path / "a.npz", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("captions.npy", prefix + bytes(8_000_000))
    with pytest.raises(ImageError, match="captions"):
        rows_of(tmp_path / "a.npz")


def test_a_flipped_byte_in_a_large_archive_is_an_error(tmp_path: Path) -> None:
    for save in (np.savez, np.savez_compressed):
        with case(save.__name__):
            save(
                tmp_path / "a.npz",
                images=np.random.default_rng(0).integers(0, 256, (1000, 8, 8), np.uint8),
            )
            data = bytearray((tmp_path / "a.npz").read_bytes())
            data[40_000] ^= 1  # beyond what is read with the header
            (tmp_path / "a.npz").write_bytes(data)
            with pytest.raises(ImageError) as caught:
                list(decode(FileContent.of(tmp_path / "a.npz")))
            assert caught.value.reason is Reason.DAMAGED


def test_an_array_without_an_image_gives_a_reason(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=images(0, 1))
    with pytest.raises(ImageError) as caught:
        rows_of(tmp_path / "a.npz")
    assert caught.value.reason is Reason.NO_PIXELS
