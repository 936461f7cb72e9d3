import gzip
from itertools import permutations, product
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from nibabel.testing import data_path

from ddm.images.content import FileContent
from ddm.images.formats import decode
from ddm.images.picture import DecodedPicture, DecodeLimits
from ddm.images.reasons import Flag, ImageError, Reason
from tests.support.case import case
from tests.support.dicom_files import waves
from tests.support.volume_files import CODES, encode_mgh, encode_nifti

SHAPE = (4, 5, 6)
RAS = np.eye(4)
AXIAL = np.diag([-1.0, -1.0, 1.0, 1.0])  # in which a file's axes are W, H and D


def picture(data: bytes, name: str = "a.nii") -> DecodedPicture:
    (picture,) = decode(FileContent(None, data, name))
    assert isinstance(picture, DecodedPicture)
    return picture


def refusal(data: bytes, name: str = "a.nii", limits: DecodeLimits | None = None) -> ImageError:
    with pytest.raises(ImageError) as caught:
        list(decode(FileContent(None, data, name), limits))
    return caught.value


def in_file(values: np.ndarray) -> np.ndarray:
    """Return (D, H, W) in the axes of a file whose matrix is AXIAL."""
    return values.transpose(2, 1, 0)


def of_places(
    order: tuple[int, ...], signs: tuple[int, ...], sides: tuple[float, ...]
) -> tuple[np.ndarray, ...]:
    """Return voxels that say where they are, and their matrix.

    Args:
        order: to which of right, anterior and superior each axis of the file goes.
        signs: whether it goes there or the other way.
        sides: of a voxel in mm along each axis of the file.
    """
    matrix = np.eye(4)
    matrix[:3, :3] = 0
    for axis in range(3):
        matrix[order[axis], axis] = signs[axis] * sides[axis]
    index = np.indices(SHAPE)
    steps = [np.zeros(1)] * 3
    for axis in range(3):
        steps[order[axis]] = index[axis] if signs[axis] > 0 else SHAPE[axis] - 1 - index[axis]
    right, anterior, superior = steps
    return (100 * superior + 10 * anterior + right).astype(np.int16), matrix


def test_every_order_and_direction_of_axes_is_turned_to_the_patients() -> None:
    sides = (1.0, 2.0, 3.0)
    for order in permutations(range(3)):
        for signs in product((1, -1), repeat=3):
            with case(order, signs):
                voxels, matrix = of_places(order, signs, sides)
                # to right, anterior, superior
                length = [SHAPE[order.index(axis)] for axis in range(3)]
                d, h, w = np.indices((length[2], length[1], length[0]))
                expected = 100 * d + 10 * (length[1] - 1 - h) + (length[0] - 1 - w)
                for actual in (
                    picture(encode_nifti(voxels, affine=matrix)),
                    picture(encode_nifti(voxels, affine=matrix, version=2, order=">")),
                    picture(encode_mgh(voxels[..., None], matrix[:3, :3] / sides, sides), "a.mgh"),
                ):
                    assert (actual.values[0] == expected).all()
                    assert actual.spacing == tuple(sides[order.index(axis)] for axis in (2, 1, 0))


def test_oblique_axes_go_to_the_nearest_of_the_patient_without_resampling() -> None:
    for degrees in (-30, 10, 40):
        angle = np.radians(degrees)
        turn = np.eye(4)
        turn[1:3, 1:3] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
        voxels = waves(SHAPE).astype(np.int16)
        actual = picture(encode_nifti(voxels, affine=turn @ np.diag([-1.0, -2, 3, 1])))
        assert (actual.values[0] == in_file(voxels)).all()
        assert np.allclose(actual.spacing or (), (3, 2, 1))


def test_axes_that_are_not_at_right_angles_are_refused_in_every_place() -> None:
    voxels = waves(SHAPE).astype(np.int16)
    for row, column in permutations(range(3), 2):
        for shear, is_refused in ((0.4, True), (-0.02, True), (1e-5, False)):
            matrix = np.diag([-1.0, -1, 4, 1])
            matrix[row, column] = shear
            with case(row, column, shear):
                if is_refused:
                    assert "shear" in refusal(encode_nifti(voxels, affine=matrix)).detail
                    assert (
                        "shear"
                        in refusal(encode_mgh(voxels[..., None], matrix[:3, :3]), "a.mgh").detail
                    )
                else:
                    assert (
                        picture(encode_nifti(voxels, affine=matrix)).values[0] == in_file(voxels)
                    ).all()


def test_sform_comes_before_qform_and_qform_before_the_sides_of_voxels() -> None:
    voxels, matrix = of_places((2, 0, 1), (1, -1, 1), (1.0, 1.0, 1.0))
    right = picture(encode_nifti(voxels, affine=matrix)).values
    quatern = {"qform_code": 1, "pixdim": [1.0, 2, 3, 4, 1, 1, 1, 1], "quatern": [0.0, 0.0, 1.0]}
    assert (picture(encode_nifti(voxels, affine=matrix, **quatern)).values == right).all()
    # Half a turn about the axis through the head: x and y go to the left and to the back.
    actual = picture(encode_nifti(voxels, **quatern))
    assert (actual.values[0] == in_file(voxels)).all() and actual.spacing == (4, 3, 2)
    mirrored = picture(encode_nifti(voxels, **(quatern | {"pixdim": [-1.0, 2, 3, 4, 1, 1, 1, 1]})))
    assert (mirrored.values[0] == in_file(voxels)[::-1]).all()
    # A quarter turn about the x axis (b = sin 45 degrees): y goes to the top, z to the back.
    half = float(np.sqrt(0.5))
    lying = picture(encode_nifti(voxels, **(quatern | {"quatern": [half, 0.0, 0.0]})))
    assert (lying.values[0] == voxels.transpose(1, 2, 0)[:, :, ::-1]).all()
    assert np.allclose(lying.spacing or (), (3, 4, 2))
    # Neither: the first axis to the left, the second to the front, the third to the top, as in ANALYZE.
    bare = picture(encode_nifti(voxels, pixdim=[1.0, 2, 3, 4, 1, 1, 1, 1]))
    assert (bare.values[0] == in_file(voxels)[:, ::-1]).all() and bare.spacing == (4, 3, 2)
    for fields, detail in (
        ({"qform_code": 1, "quatern": [0.9, 0.9, 0.0]}, "quatern"),
        ({"pixdim": [1.0, 0, 1, 1, 1, 1, 1, 1]}, "pixdim"),
        ({"qform_code": 1, "pixdim": [1.0, 1, -1, 1, 1, 1, 1, 1]}, "pixdim"),
        ({"sform_code": 1, "srow": [0.0] * 12}, "axes"),
        ({"sform_code": 1, "srow": [float("nan")] * 12}, "axes"),
    ):
        with case(fields):
            assert detail in refusal(encode_nifti(voxels, **fields)).detail


def test_units_of_length_are_known_and_an_unknown_one_counts_as_mm() -> None:
    voxels = waves(SHAPE).astype(np.int16)
    for units, factor in ((0, 1), (1, 1000), (2, 1), (3, 0.001), (2 | 8, 1), (3 | 16, 0.001)):
        with case(units):
            actual = picture(
                encode_nifti(voxels, affine=np.diag([-1.0, -2, 3, 1]), xyzt_units=units)
            )
            assert np.allclose(actual.spacing or (), (3 * factor, 2 * factor, factor))
    for units in (5, 7, 2 | 64, 128):
        assert "xyzt_units" in refusal(encode_nifti(voxels, affine=AXIAL, xyzt_units=units)).detail


def test_every_type_byte_order_and_version_is_read_to_the_value(tmp_path: Path) -> None:
    path = tmp_path / "a.nii.gz"
    rng = np.random.default_rng(0)
    for name in CODES:
        kind = np.dtype(name)
        if kind.kind == "f":
            voxels = rng.normal(0, 1000, SHAPE).astype(kind)
        else:
            bounds = np.iinfo(kind)
            voxels = rng.integers(max(bounds.min, -1 << 30), min(bounds.max, 1 << 30), SHAPE, kind)
        small = kind.kind != "f" and kind.itemsize <= 2
        full = (float(np.iinfo(kind).min), float(np.iinfo(kind).max)) if small else None
        for order, version in product("<>", (1, 2)):
            with case(name, order, version):
                data = encode_nifti(
                    voxels, affine=AXIAL, order=order, version=version, extension=b"anything"
                )
                path.write_bytes(gzip.compress(data))
                (packed,) = decode(FileContent.of(path))
                assert isinstance(packed, DecodedPicture)
                for actual in (picture(data), packed):
                    assert (
                        np.allclose(actual.values[0], in_file(voxels), rtol=1e-6)
                        and actual.full == full
                    )
                    assert actual.values.dtype.isnative
    for code in (1, 32, 1536, 1792, 2048, 9):
        assert "datatype" in refusal(encode_nifti(voxels, affine=AXIAL, datatype=code)).detail
    assert "bitpix" in refusal(encode_nifti(voxels, affine=AXIAL, bitpix=8)).detail


def test_scaling_is_done_where_the_slope_says_so() -> None:
    voxels = np.arange(-60, 60).astype(np.int16).reshape(SHAPE)
    nan = float("nan")
    infinite = float("inf")
    for slope, intercept, expected in (
        (0.0, 7.0, (1, 0)),
        (nan, nan, (1, 0)),
        (infinite, 0.0, (1, 0)),
        (1.0, 0.0, (1, 0)),
        (1.0, -1024.0, (1, -1024)),
        (-0.5, 3.0, (-0.5, 3)),
    ):
        for version in (1, 2):
            with case(slope, intercept, version):
                actual = picture(
                    encode_nifti(
                        voxels, affine=AXIAL, version=version, scl_slope=slope, scl_inter=intercept
                    )
                )
                assert (actual.values[0] == in_file(voxels) * expected[0] + expected[1]).all()
                ends = sorted(bound * expected[0] + expected[1] for bound in (-32768, 32767))
                assert actual.full == tuple(ends)
    assert (
        "scl_inter"
        in refusal(encode_nifti(voxels, affine=AXIAL, scl_slope=2.0, scl_inter=nan)).detail
    )


def test_the_window_is_that_of_cal_min_and_cal_max() -> None:
    voxels = waves(SHAPE).astype(np.int16)
    for low, high, window in (
        (0.0, 0.0, None),
        (-5.0, 80.0, (-5, 80)),
        (9.0, 3.0, None),
        (0.0, float("nan"), None),
    ):
        with case(low, high):
            assert (
                picture(encode_nifti(voxels, affine=AXIAL, cal_min=low, cal_max=high)).window
                == window
            )


def pictures(
    data: bytes, name: str = "a.nii", limits: DecodeLimits | None = None
) -> list[DecodedPicture]:
    return [
        actual
        for actual in decode(FileContent(None, data, name), limits)
        if isinstance(actual, DecodedPicture)
    ]


def test_a_fourth_axis_holds_channels_unless_it_is_time() -> None:
    voxels = waves((*SHAPE, 3)).astype(np.int16)
    expected = voxels.transpose(3, 2, 1, 0)
    assert (picture(encode_nifti(voxels, affine=AXIAL)).values == expected).all()
    assert (picture(encode_nifti(voxels, affine=AXIAL, xyzt_units=2)).values == expected).all()
    for unit in (8, 16, 24, 32, 40, 48):
        series = encode_nifti(
            voxels, affine=AXIAL, xyzt_units=2 | unit, scl_slope=2.0, scl_inter=1.0
        )
        for data in (series, gzip.compress(series)):
            with case(unit):
                for actual, volume in zip(pictures(data), expected, strict=True):
                    assert (actual.values == 2 * volume[None] + 1).all() and actual.spacing == (
                        1,
                        1,
                        1,
                    )
    one = picture(encode_nifti(voxels[..., :1], affine=AXIAL, xyzt_units=10))
    assert (one.values == expected[:1]).all()
    fifth = encode_nifti(
        voxels.reshape(*SHAPE, 1, 3), affine=AXIAL, intent_code=1007, xyzt_units=10
    )
    assert (picture(fifth).values == expected).all()
    for shape in ((*SHAPE, 2, 3), (4, 5, 1, 1, 1, 2), (4,)):
        assert refusal(encode_nifti(np.zeros(shape, np.int16), affine=AXIAL)).reason is Reason.SHAPE
    trailing = picture(encode_nifti(voxels[..., 0].reshape(*SHAPE, 1, 1, 1, 1), affine=AXIAL))
    assert (trailing.values == expected[:1]).all()
    for dim in ([0, *SHAPE], [8, *SHAPE], [3, 4, 0, 6], [3, 4, -5, 6]):
        with case(dim):
            assert refusal(encode_nifti(voxels, affine=AXIAL, dim=dim)).reason is Reason.DAMAGED


def test_each_time_of_a_series_is_a_volume_and_a_broken_file_gives_none() -> None:
    voxels = waves((*SHAPE, 3)).astype(np.int16)
    data = encode_nifti(voxels, affine=AXIAL, xyzt_units=10)
    packed = gzip.compress(data)
    spoiled = packed[:-8] + bytes([packed[-8] ^ 1]) + packed[-7:]
    for broken, reason in (
        (data[:-9], Reason.TRUNCATED),
        (packed[:-20], Reason.TRUNCATED),
        (spoiled, Reason.DAMAGED),
    ):
        content = FileContent(None, broken, "a.nii")
        with pytest.raises(ImageError) as caught:
            next(decode(content))
        assert caught.value.reason is reason
    assert refusal(data, limits=DecodeLimits(pictures=2)).reason is Reason.TOO_LARGE
    assert len(pictures(data, limits=DecodeLimits(values=voxels[..., 0].size))) == 3
    slices = encode_nifti(voxels[:, :, :1], affine=AXIAL, xyzt_units=10)
    assert [actual.values.shape for actual in pictures(slices)] == [(1, 5, 4)] * 3
    rgb = np.zeros((*SHAPE, 2), [("R", "u1"), ("G", "u1"), ("B", "u1")])
    rgb["G"][..., 1] = 7
    first, second = pictures(encode_nifti(rgb, affine=AXIAL, datatype=128, xyzt_units=10))
    assert (
        not first.values.any()
        and (second.values[1] == 7).all()
        and second.values.shape == (3, 6, 5, 4)
    )
    assert "channels" in refusal(encode_nifti(rgb, affine=AXIAL, datatype=128)).detail
    fifth = encode_nifti(voxels.reshape(*SHAPE, 3, 1)[..., [0, 0]], affine=AXIAL, xyzt_units=10)
    assert refusal(fifth).reason is Reason.SHAPE


def test_frames_of_mgh_hold_channels_unless_they_are_time() -> None:
    voxels = waves((*SHAPE, 3)).astype(np.float32)
    for repetition_time in (None, 0.0):
        actual = picture(
            encode_mgh(voxels, AXIAL[:3, :3], repetition_time=repetition_time), "a.mgh"
        )
        assert (actual.values == voxels.transpose(3, 2, 1, 0)).all()
    series = encode_mgh(voxels, AXIAL[:3, :3], repetition_time=2000.0)
    for data in (series, gzip.compress(series)):
        for actual, volume in zip(
            pictures(data, "a.mgz"), voxels.transpose(3, 2, 1, 0), strict=True
        ):
            assert (actual.values == volume[None]).all()
    assert picture(
        encode_mgh(voxels[..., :1], AXIAL[:3, :3], repetition_time=2000.0), "a.mgh"
    ).values.shape == (1, 6, 5, 4)


def test_types_of_mgh_are_read_to_the_value_and_one_without_axes_is_refused() -> None:
    for kind in (np.uint8, np.int16, np.uint16, np.int32, np.float32):
        voxels = waves((*SHAPE, 1), high=250).astype(kind)
        data = encode_mgh(voxels, AXIAL[:3, :3], repetition_time=0.0)
        for packed in (data, gzip.compress(data)):
            with case(kind):
                actual = picture(packed, "a.mgz")
                assert (actual.values[0] == in_file(voxels[..., 0])).all()
    assert "type" in refusal(encode_mgh(voxels, AXIAL[:3, :3], code=7), "a.mgh").detail
    assert "goodRASFlag" in refusal(encode_mgh(voxels, AXIAL[:3, :3], has_axes=0), "a.mgh").detail
    assert refusal(encode_mgh(voxels, AXIAL[:3, :3])[:-9], "a.mgh").reason is Reason.TRUNCATED


def test_intents_other_than_tones_are_refused_and_statistics_are_not() -> None:
    voxels = waves(SHAPE).astype(np.int16)
    for intent in (
        1002,
        1003,
        1004,
        1005,
        1006,
        1008,
        1009,
        1010,
        2001,
        2002,
        2004,
        2005,
        2006,
        2018,
        3001,
    ):
        for version in (1, 2):
            with case(intent, version):
                error = refusal(
                    encode_nifti(voxels, affine=AXIAL, version=version, intent_code=intent)
                )
                assert error.reason is Reason.NO_PICTURE and "intent_code" in error.detail
    for intent in (0, 3, 5, 22, 1001, 1007, 1011, 2003):
        assert picture(encode_nifti(voxels, affine=AXIAL, intent_code=intent)).values.shape == (
            1,
            6,
            5,
            4,
        )


def test_colours_are_channels() -> None:
    rng = np.random.default_rng(0)
    for shape in (SHAPE, (4, 5)):
        colours = rng.integers(0, 256, (*shape, 4), np.uint8)
        rgb = np.zeros(shape, [("R", "u1"), ("G", "u1"), ("B", "u1")])
        rgba = np.zeros(shape, [("R", "u1"), ("G", "u1"), ("B", "u1"), ("A", "u1")])
        for number, name in enumerate("RGB"):
            rgb[name] = rgba[name] = colours[..., number]
        rgba["A"] = 255
        expected = np.moveaxis(colours[..., :3], -1, 0).swapaxes(1, -1)
        for code, array in ((128, rgb), (2304, rgba)):
            with case(code, shape):
                actual = picture(encode_nifti(array, affine=AXIAL, datatype=code, scl_slope=2.0))
                assert (actual.values == expected).all() and actual.full == (0, 255)
        rgba["A"][1, 2] = 254
        assert "RGBA32" in refusal(encode_nifti(rgba, affine=AXIAL, datatype=2304)).detail


def test_flat_images_are_those_of_a_screen_whatever_their_third_axis_says() -> None:
    flat = waves((7, 5)).astype(np.int16)
    for fields in (
        {"affine": AXIAL},
        {"affine": np.diag([-1.0, -1.0, 0.0, 1.0])},
        {"qform_code": 1, "quatern": [0.0, 0.0, 1.0], "pixdim": [1.0, 1, 1, 0, 0, 0, 0, 0]},
    ):
        with case(fields):
            actual = picture(encode_nifti(flat, **fields))
            assert (actual.values[0] == flat.T).all() and actual.spacing == (1, 1)
    sagittal = np.zeros((4, 4))
    sagittal[1, 0] = -2
    sagittal[2, 1] = 3
    sagittal[0, 2] = 1
    sagittal[3, 3] = 1
    actual = picture(encode_nifti(flat[..., None], affine=sagittal))
    assert (actual.values[0] == flat.T[::-1]).all() and actual.spacing == (3, 2)


def test_places_of_the_voxels_are_obeyed_or_refused() -> None:
    voxels = waves(SHAPE).astype(np.int16)
    data = encode_nifti(voxels, affine=AXIAL, vox_offset=512)
    moved = data[:352] + bytes(512 - 352) + data[352:]
    for content in (moved, gzip.compress(moved)):
        assert (picture(content).values[0] == in_file(voxels)).all()
    for offset in (0, 100, 348, -8, 352.5, float("nan"), 1e30):
        with case(offset):
            assert (
                "vox_offset"
                in refusal(encode_nifti(voxels, affine=AXIAL, vox_offset=offset)).detail
            )
    assert refusal(encode_nifti(voxels, affine=AXIAL, vox_offset=1e6)).reason is Reason.TRUNCATED


def test_gzip_is_read_in_several_members_and_to_its_check_sum() -> None:
    data = encode_nifti(waves((20, 20, 20)).astype(np.int16), affine=AXIAL)
    expected = picture(data).values
    parts = gzip.compress(data[:300]) + gzip.compress(data[300:1000]) + gzip.compress(data[1000:])
    assert (picture(parts).values == expected).all()
    assert (picture(gzip.compress(data + bytes(1000))).values == expected).all()
    packed = gzip.compress(data)
    assert refusal(packed[:-8] + bytes([packed[-8] ^ 1]) + packed[-7:]).reason is Reason.DAMAGED
    for position in range(40, len(packed) - 8, len(packed) // 20):
        flipped = packed[:position] + bytes([packed[position] ^ 0x10]) + packed[position + 1 :]
        with case(position):
            assert refusal(flipped).reason in (Reason.DAMAGED, Reason.TRUNCATED)
    for length in (200, 400, len(packed) - 100, len(packed) - 4):
        assert refusal(packed[:length]).reason is Reason.TRUNCATED
    endless = gzip.compress(data + bytes(1 << 27), 1)
    assert refusal(endless).reason is Reason.DAMAGED


def test_broken_volumes_have_their_true_reason() -> None:
    data = encode_nifti(waves((8, 8, 8)).astype(np.int16), affine=AXIAL)
    assert refusal(data[:-100]).reason is Reason.TRUNCATED
    assert refusal(gzip.compress(data[:-100])).reason is Reason.TRUNCATED
    large = encode_nifti(
        np.zeros((1, 1, 1), np.int16), affine=AXIAL, dim=[4, 32767, 32767, 32767, 32767, 1, 1, 1]
    )
    assert refusal(large).reason is Reason.TOO_LARGE
    assert refusal(gzip.compress(b"a text")).reason is Reason.ARCHIVE
    for floats in (np.full((8, 8, 8), np.nan, np.float32), np.full((8, 8, 8), 1e300)):
        assert refusal(encode_nifti(floats, affine=AXIAL)).reason is Reason.NOT_FINITE
    assert refusal(data.replace(b"n+1\0", b"ni1\0")).reason is Reason.UNSUPPORTED


def test_nibabel_writes_what_is_read(tmp_path: Path) -> None:
    voxels, matrix = of_places((1, 2, 0), (-1, 1, -1), (1.0, 2.0, 3.0))
    expected = picture(encode_nifti(voxels, affine=matrix))
    kinds: tuple[tuple[Any, str], ...] = (
        (nibabel.Nifti1Image, "a.nii"),
        (nibabel.Nifti1Image, "a.nii.gz"),
        (nibabel.Nifti2Image, "b.nii"),
        (nibabel.MGHImage, "a.mgz"),
    )
    for kind, name in kinds:
        with case(kind, name):
            nibabel.save(kind(voxels, matrix), tmp_path / name)
            (actual,) = decode(FileContent.of(tmp_path / name))
            assert isinstance(actual, DecodedPicture)
            assert (actual.values == expected.values).all() and actual.spacing == expected.spacing
    image = nibabel.Nifti1Image(voxels, None)
    image.set_qform(matrix, code=1)
    nibabel.save(image, tmp_path / "q.nii")
    (actual,) = decode(FileContent.of(tmp_path / "q.nii"))
    assert isinstance(actual, DecodedPicture)
    assert (actual.values == expected.values).all() and np.allclose(
        actual.spacing or (), expected.spacing or ()
    )


def test_public_files_are_read_as_their_headers_say() -> None:
    # Of its sform, the first axis goes to the left, the second to the front and the third to the top, by 2 mm each.
    path = Path(data_path) / "anatomical.nii"
    stored = np.frombuffer(path.read_bytes(), ">i2", 33 * 41 * 25, 352).reshape(
        (33, 41, 25), order="F"
    )
    (picture,) = decode(FileContent.of(path))
    assert isinstance(picture, DecodedPicture) and picture.spacing == (2, 2, 2)
    assert (picture.values[0] == stored[:, ::-1].transpose(2, 1, 0)).all()
    # Twenty volumes of 17 x 21 x 3 voxels, of the same directions.
    data = (Path(data_path) / "functional.nii").read_bytes()
    stored = np.frombuffer(data, "<i2", 17 * 21 * 3 * 20, 352).reshape((17, 21, 3, 20), order="F")
    slope, intercept = np.frombuffer(data, "<f4", 2, 112).astype(float)
    for picture, volume in zip(pictures(data), np.moveaxis(stored, -1, 0), strict=True):
        scaled = volume.astype(np.float64) * slope + intercept
        assert np.allclose(picture.values[0], scaled[:, ::-1].transpose(2, 1, 0))


def test_volumes_that_may_show_a_face_are_flagged() -> None:
    head = waves((64, 64, 64), high=200, dtype=np.uint8)
    assert picture(encode_nifti(head, affine=np.diag([3.0, 3, 3, 1]))).flags == {Flag.FACE}
    assert not picture(encode_nifti(head, affine=np.diag([0.5, 0.5, 0.5, 1]))).flags
