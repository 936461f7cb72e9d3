import gzip
from pathlib import Path

import nibabel
import numpy as np
import pytest
from nibabel.testing import data_path

from ddm.images.content import FileContent
from ddm.images.formats import decode
from ddm.images.picture import DecodedPicture, Limits
from ddm.images.reasons import Flag, ImageError, Reason
from tests.support.dicom_files import waves

AXES = (("L", "R"), ("P", "A"), ("I", "S"))


def picture_of(path: Path) -> DecodedPicture:
    (found,) = decode(FileContent.of(path))
    assert isinstance(found, DecodedPicture)
    return found


def reason_of(path: Path, limits: Limits | None = None) -> Reason:
    with pytest.raises(ImageError) as caught:
        list(decode(FileContent.of(path), limits))
    return caught.value.reason


def turned_by_monai(image: nibabel.Nifti1Image) -> np.ndarray:
    from monai.data import MetaTensor
    from monai.transforms import Orientation

    values = np.asanyarray(image.dataobj)
    values = values[None] if values.ndim == 3 else np.moveaxis(values, -1, 0)
    turned = Orientation(axcodes="SPL", labels=AXES)(MetaTensor(values.astype(np.float32), affine=image.affine))
    return turned.numpy()


@pytest.mark.parametrize(
    "name", ["anatomical.nii", "functional.nii", "example4d.nii.gz", "example_nifti2.nii.gz", "test.mgz"]
)
def test_volumes_are_turned_as_monai_turns_them(name: str) -> None:
    path = Path(data_path) / name
    found = picture_of(path)
    assert (found.values == turned_by_monai(nibabel.load(path))).all()
    assert found.values.ndim == 4 and found.spacing is not None


def test_spacing_follows_its_axis_and_its_unit(tmp_path: Path) -> None:
    matrix = np.array([[0, 0, 3.0, 0], [-1.0, 0, 0, 0], [0, 2.0, 0, 0], [0, 0, 0, 1]])
    image = nibabel.Nifti1Image(waves((4, 5, 6)).astype(np.int16), matrix)
    image.header.set_xyzt_units("mm")
    nibabel.save(image, tmp_path / "a.nii")
    found = picture_of(tmp_path / "a.nii")
    assert found.spacing == (2.0, 1.0, 3.0) and found.values.shape == (1, 5, 4, 6)
    assert found.values[0, 1, 2, 0] == np.asarray(image.dataobj)[2, 1, 5]
    image.header.set_xyzt_units("meter")
    nibabel.save(image, tmp_path / "a.nii")
    assert picture_of(tmp_path / "a.nii").spacing == (2000.0, 1000.0, 3000.0)


def test_slices_and_colours_become_images_with_the_head_up(tmp_path: Path) -> None:
    flat = waves((7, 5)).astype(np.int16)
    nibabel.save(nibabel.Nifti1Image(flat, np.diag([-1.0, -1, 1, 1])), tmp_path / "axial.nii")
    assert (picture_of(tmp_path / "axial.nii").values[0] == flat.T).all()
    coronal = waves((7, 1, 5)).astype(np.int16)
    nibabel.save(nibabel.Nifti1Image(coronal, np.diag([-1.0, -1, 1, 1])), tmp_path / "coronal.nii")
    assert (picture_of(tmp_path / "coronal.nii").values[0] == coronal[:, 0].T[::-1]).all()
    rgb = np.zeros((3, 4, 5), [("R", "u1"), ("G", "u1"), ("B", "u1")])
    rgb["G"] = waves((3, 4, 5), high=255, dtype=np.uint8)
    nibabel.save(nibabel.Nifti1Image(rgb, np.diag([-1.0, -1, 1, 1])), tmp_path / "rgb.nii")
    values = picture_of(tmp_path / "rgb.nii").values
    assert values.shape == (3, 5, 4, 3) and (values[1] == rgb["G"].transpose(2, 1, 0)).all() and not values[0].any()


def test_volumes_that_may_show_a_face_are_flagged(tmp_path: Path) -> None:
    head = nibabel.Nifti1Image(waves((64, 64, 64), high=200, dtype=np.uint8), np.diag([3.0, 3, 3, 1]))
    nibabel.save(head, tmp_path / "head.nii.gz")
    assert picture_of(tmp_path / "head.nii.gz").flags == {Flag.FACE}
    nibabel.save(nibabel.Nifti1Image(np.asarray(head.dataobj), np.diag([0.5, 0.5, 0.5, 1])), tmp_path / "part.nii.gz")
    assert not picture_of(tmp_path / "part.nii.gz").flags


def test_broken_volumes_have_their_true_reason(tmp_path: Path) -> None:
    path, image = tmp_path / "a.nii", nibabel.Nifti1Image(waves((8, 8, 8)).astype(np.int16), np.eye(4))
    nibabel.save(image, path)
    whole = path.read_bytes()
    for data, packed in ((whole[:-100], False), (whole[:-100], True)):
        path.write_bytes(gzip.compress(data) if packed else data)
        assert reason_of(path) is Reason.TRUNCATED
    path.write_bytes(gzip.compress(whole)[:-200])
    assert reason_of(path) is Reason.TRUNCATED
    large = bytearray(whole)
    large[40:56] = np.array([4, 32767, 32767, 32767, 32767, 1, 1, 1], "<i2").tobytes()
    path.write_bytes(bytes(large))
    assert reason_of(path) is Reason.TOO_LARGE
    path.write_bytes(gzip.compress(b"a text"))
    assert reason_of(path) is Reason.ARCHIVE
    odd = nibabel.Nifti1Image(np.full((8, 8, 8), np.nan, np.float32), np.eye(4))
    nibabel.save(odd, path)
    assert reason_of(path) is Reason.NOT_FINITE
    nibabel.save(nibabel.Nifti1Image(np.ones((4, 4, 4), np.complex64), np.eye(4)), path)
    assert reason_of(path) is Reason.UNSUPPORTED


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
    np.savez_compressed(tmp_path / "a.npz", val_images=colours, val_labels=[[1], [0]], train_images=colours[:1])
    found = list(decode(FileContent.of(tmp_path / "a.npz")))
    assert [(each.split, each.label) for each in found] == [("train", None), ("val", "1"), ("val", "0")]
    assert (found[2].values == np.moveaxis(colours[1], -1, 0)).all()
