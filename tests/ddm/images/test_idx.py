"""The idx format, against bytes written by hand."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from ddm.errors import DataError
from ddm.images.array_files import open_arrays, open_images, read_images
from ddm.images.idx import is_idx, labels_beside, read_idx
from ddm.islands.data import Dataset
from ddm.protocol.data import DataSpec
from tests.support.case import case

SPEC = DataSpec(shape=(1, 2, 3), range=(-1.0, 1.0))


def written(path: Path, array: np.ndarray, *, packed: bool) -> Path:
    data = (
        b"\0\0\x08"
        + bytes([array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )
    path.write_bytes(gzip.compress(data) if packed else data)
    return path


def test_images_and_labels_of_an_idx_file_are_read_packed_or_not(tmp_path: Path) -> None:
    images = np.arange(24, dtype=np.uint8).reshape(4, 2, 3) * 10
    label_N = np.array([3, 0, 1, 2], np.uint8)
    for packed in (False, True):
        with case(packed=packed):
            path = written(tmp_path / "train-images-idx3-ubyte", images, packed=packed)
            written(labels_beside(path), label_N, packed=packed)
            assert is_idx(path)
            assert np.array_equal(read_idx(path), images)
            assert np.allclose(read_images(path, SPEC)[:, 0].numpy(), images / 127.5 - 1, atol=1e-6)
            source = open_arrays(path)
            assert (source.in_place() is None) == packed and source.columns == {"labels"}
            kept = open_images(source, SPEC, tmp_path / "kept")
            assert torch.equal(kept[torch.tensor([3, 0])], read_images(path, SPEC)[[3, 0]])
            dataset = Dataset.read(path, SPEC)
            assert dataset.column("labels").tolist() == [3, 0, 1, 2]
            with pytest.raises(DataError, match="called site"):
                dataset.column("site")
            labels_beside(path).unlink()
            assert not open_arrays(path).columns
            with pytest.raises(DataError, match="called labels"):
                open_arrays(path).column("labels", 8)


def test_idx_file_that_is_cut_short_damaged_or_huge_is_refused(tmp_path: Path) -> None:
    good = written(tmp_path / "good", np.zeros((4, 2, 3), np.uint8), packed=False).read_bytes()
    packed = gzip.compress(good)
    huge = b"\0\0\x08\x03" + struct.pack(">3I", 2**31, 2**31, 2**31)
    for number, data in enumerate(
        (good[:-1], good + b"\0", good[:6], packed[:-9], huge, b"\0\0\x0d\x01", b"")
    ):
        with case(number):
            (tmp_path / "bad").write_bytes(data)
            with pytest.raises(DataError):
                read_idx(tmp_path / "bad")
            with pytest.raises(DataError):
                read_images(tmp_path / "bad", SPEC)
    assert not is_idx(tmp_path / "bad")
