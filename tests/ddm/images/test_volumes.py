from pathlib import Path

import numpy as np

from ddm.images.content import FileContent
from ddm.images.formats import decode
from ddm.images.picture import DecodedPicture
from ddm.images.reasons import ImageError, Reason
from tests.support.dicom_files import waves


def test_rows_of_arrays_come_with_their_columns_and_a_bad_one_alone_is_lost(tmp_path: Path) -> None:
    rows = np.stack([waves((6, 5)).astype(np.float32)] * 3)
    rows[1, 2, 2] = np.inf
    np.savez(tmp_path / "a.npz", images=rows, labels=[4, 5, 6], patients=np.array(["a", "b", "c"]))
    first, second, third = decode(FileContent.of(tmp_path / "a.npz"))
    assert isinstance(second, ImageError) and second.reason is Reason.NOT_FINITE
    assert isinstance(third, DecodedPicture) and (third.label, third.patient) == ("6", "c")
    assert isinstance(first, DecodedPicture) and (first.values[0] == rows[0]).all()


def test_parts_of_a_data_set_and_channels_at_the_end_are_understood(tmp_path: Path) -> None:
    colours = waves((2, 6, 5, 3), high=255, dtype=np.uint8)
    np.savez_compressed(
        tmp_path / "a.npz", val_images=colours, val_labels=[[1], [0]], train_images=colours[:1]
    )
    actual = list(decode(FileContent.of(tmp_path / "a.npz")))
    assert [(volume.split, volume.label) for volume in actual] == [
        ("train", None),
        ("val", "1"),
        ("val", "0"),
    ]
    assert (actual[2].values == np.moveaxis(colours[1], -1, 0)).all()
