"""Small files that image readers have read wrongly, from a folder beside this repository: the right value of each.

Tests of their kinds, which make files of their own, are beside the decoders. This one is skipped where the folder is
missing.
"""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ddm.errors import DataError
from ddm.evaluation import evaluate
from ddm.images import ImageError, Reason, read_pictures
from ddm.images.columns import text_column
from ddm.images.picture import DecodedPicture
from ddm.images.samples import open_image_set
from ddm.protocol.data import DataSpec
from ddm.protocol.transform import FullRange, TransformSpec
from tests.support.case import case
from tests.support.errors import has_subject

CASES = Path(__file__).parents[4] / "shared" / "cases"
DATA = DataSpec(shape=(1, 8, 8), range=(-1.0, 1.0))
FULL = TransformSpec(channels="grey", range=FullRange(), storage="uint16")

pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason="no folder of shared cases")


def folder(name: str) -> Path:
    return CASES / name / "in"


def read(path: Path) -> list[DecodedPicture | ImageError]:
    actual = list(read_pictures(path))
    assert actual, path.name
    return actual


def one(path: Path) -> DecodedPicture | ImageError:
    [picture] = read(path)
    return picture


def picture(path: Path) -> DecodedPicture:
    actual = one(path)
    assert isinstance(actual, DecodedPicture), actual
    return actual


def values_or_refusal(
    path: Path, expected: NDArray[np.generic], reasons: tuple[Reason, ...]
) -> None:
    """Either the right values, or a refusal for one of these reasons; never other values."""
    actual = one(path)
    if isinstance(actual, ImageError):
        assert actual.reason in reasons, actual
    else:
        np.testing.assert_array_equal(actual.values, expected)


def channels_first(array: NDArray[np.generic]) -> NDArray[np.generic]:
    return array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0)


def test_01_high_bit_is_obeyed_or_refused() -> None:
    expected = channels_first(np.load(CASES / "01-highbit" / "expected.npy"))
    np.testing.assert_array_equal(picture(folder("01-highbit") / "plain.dcm").values, expected)
    values_or_refusal(
        folder("01-highbit") / "highbit15.dcm", expected, (Reason.UNSUPPORTED, Reason.DAMAGED)
    )


def test_03_orientation_of_tiff_is_done_for_every_type_of_pixel() -> None:
    rgb = channels_first(np.load(CASES / "03-tiff-orientation" / "expected_rgb8.npy"))
    for name, expected in {
        "rgb8.tif": rgb,
        "rgb16.tif": rgb.astype(np.uint16) * 257,
        "grey16.tif": rgb[1:2].astype(np.uint16) * 257,
    }.items():
        with case(name):
            np.testing.assert_array_equal(
                picture(folder("03-tiff-orientation") / name).values, expected
            )
    with case("grey32f.tif"):
        floats = picture(folder("03-tiff-orientation") / "grey32f.tif").values
        assert floats.dtype == np.float32
        scale = float(floats.max()) / float(rgb[1].max())
        np.testing.assert_allclose(floats[0], rgb[1] * scale, rtol=1e-5, atol=1e-5 * scale)


def test_04_further_samples_of_tiff_are_what_extrasamples_says() -> None:
    path = folder("04-tiff-extrasamples")
    rgb = picture(path / "rgb16.tif").values
    values_or_refusal(path / "rgb_nir16.tif", rgb, (Reason.UNSUPPORTED, Reason.SHAPE))
    half = picture(path / "premultiplied16.tif").values
    assert int(np.abs(half.astype(np.int64) * 2 - rgb.astype(np.int64)).max()) <= 2
    eight = (rgb >> 8).astype(np.uint8)
    values_or_refusal(path / "rgb_nir8.tif", eight, (Reason.UNSUPPORTED, Reason.SHAPE))
    half = picture(path / "premultiplied8.tif").values
    assert int(np.abs(half.astype(np.int64) * 2 - eight.astype(np.int64)).max()) <= 2


def test_05_tilted_slices_are_no_upright_volume() -> None:
    path = folder("05-gantry-tilt")
    straight = picture(path / "straight.dcm")
    assert straight.spacing is not None
    for name in ("tilted.dcm", "tilted.nii.gz"):
        with case(name):
            actual = read(path / name)
            for item in actual:
                is_image = isinstance(item, DecodedPicture) and item.values.ndim == 3
                is_volume = (
                    isinstance(item, DecodedPicture)
                    and item.spacing is not None
                    and item.values.ndim == 4
                )
                assert isinstance(item, ImageError) or is_image or is_volume
                if isinstance(item, DecodedPicture) and item.values.ndim == 4:
                    assert item.spacing is not None
                    assert item.spacing[0] == pytest.approx(4.0, rel=1e-3)


def test_07_windows_narrower_than_one_are_those_of_the_standard() -> None:
    path = folder("07-window-below-1")
    for name in ("exact.dcm", "sigmoid.dcm"):
        with case(name):
            assert picture(path / name).window == pytest.approx((0.0, 0.1), abs=1e-6)
    # LINEAR windows have a width of at least 1 (PS3.3 C.11.2.1.2): a narrower one is none.
    assert picture(path / "linear.dcm").window is None


def test_08_padding_is_background() -> None:
    path = folder("08-padding")
    xray = picture(path / "dx_mono1.dcm")
    corner = xray.values[0, 0, 0]
    assert corner == xray.values.min()
    ct = picture(path / "ct.dcm")
    # What pads a CT is no value far below air.
    assert float(ct.values.min()) >= -1024


def test_10_pixels_that_are_no_squares_have_their_aspect() -> None:
    actual = picture(folder("10-pixel-aspect") / "aspect.dcm")
    assert actual.spacing is not None
    down, right = actual.spacing
    assert max(down, right) / min(down, right) == pytest.approx(2.0)


def test_13_every_frame_has_its_own_slope() -> None:
    expected = np.load(CASES / "13-slope-by-frame" / "expected.npy")
    actual = read(folder("13-slope-by-frame") / "slopes.dcm")
    pictures = [item for item in actual if isinstance(item, DecodedPicture)]
    assert len(pictures) == len(actual)
    values = np.concatenate(
        [picture.values.reshape(-1, *picture.values.shape[-2:]) for picture in pictures]
    )
    # every eighth pixel is listed
    np.testing.assert_allclose(values[:, ::8, ::8], expected, rtol=1e-6)
    for picture in pictures:
        if picture.full is not None:
            assert picture.full[0] <= picture.values.min()
            assert picture.values.max() <= picture.full[1]


def test_14_tables_as_offices_write_them() -> None:
    path = folder("14-tables")
    usual: list[str | None] = ["normal", "nodule"] * 3
    expected: dict[str, list[str | None]] = dict.fromkeys(
        [
            *(
                "absolute_blank_end.csv",
                "backslash.csv",
                "bom_semicolon_crlf.csv",
                "label_category.parquet",
            ),
            *("mac_cr.csv", "patient_null.parquet", "sep_line.csv", "utf16.csv", "zeros.csv"),
        ],
        usual,
    )
    expected |= {
        "label_bool.parquet": ["1", "0"] * 3,
        "label_float_nan.parquet": ["0", "1", "0", None, "0", "1"],
        "latin1.csv": ["Gef\u00e4\u00df"] * 6,
        "na.csv": ["normal", "nodule", "normal", None, None, "nodule"],
    }
    for name, labels in expected.items():
        with case(name):
            actual = read(path / name)
            assert [item.label for item in actual if isinstance(item, DecodedPicture)] == labels
            assert len(actual) == len(labels)
    # Two columns could be the label: neither is taken in silence.
    for name, words in {
        "label_class.csv": "class and label",
        "label_twice.csv": "Label and label",
    }.items():
        with case(name):
            refusal = one(path / name)
            assert isinstance(refusal, ImageError)
            assert words in refusal.detail
    missing = read(path / "upper_ext.csv")
    assert len(missing) == 6
    for item in missing:
        assert isinstance(item, ImageError)
        assert item.reason is Reason.MISSING
        assert "differs only in case" in item.detail


def test_15_parts_of_an_array_come_in_the_order_of_their_numbers_or_are_refused() -> None:
    path = folder("15-parts-order")
    parts = [np.load(path / f"images-{number}.npy") for number in range(1, 13)]
    labels = np.load(path / "labels.npy")
    actual = read(path)
    if any(isinstance(item, ImageError) for item in actual):
        return
    rows = [row for part in parts for row in part]
    assert len(actual) == len(rows) == len(labels)
    for picture, row, label in zip(actual, rows, labels, strict=True):
        assert isinstance(picture, DecodedPicture)
        np.testing.assert_array_equal(picture.values.reshape(row.shape), row)
        assert picture.label == str(label)


def test_16_and_17_little_of_the_range_is_remarked() -> None:
    for name, words in {
        "16-zero-to-one": "fill 50% of the declared range -1 to 1: 0 to 1",
        "17-uint16-12bit": "fill 6% of the range of their type, 0 to 65535: 0 to 4095",
    }.items():
        for file in sorted(folder(name).iterdir()):
            with case(file.name):
                images = open_image_set(file, DATA, None)
                [remark] = images.range_remarks(images.read())
                assert words in remark


def test_18_clutter_in_a_public_folder_is_skipped_and_a_bad_image_is_named() -> None:
    for name, clutter in {"with_README": "README.txt", "with_Thumbs": "Thumbs.db"}.items():
        with case(name):
            spec = DataSpec(shape=(1, 16, 16), range=(-1.0, 1.0))
            images = open_image_set(folder("18-public-folder") / name, spec, FULL)
            assert len(images) == 8
            assert images.remarks[0] == f"1 file that holds no image was skipped: {clutter}."
            assert len(read(folder("18-public-folder") / name)) >= 8


def test_20_same_samples_give_the_same_figures() -> None:
    path = folder("20-evaluate-range")
    reference = open_image_set(path / "ref.npz", DATA, None).read()
    right = (
        evaluate(open_image_set(path / "right.npz", DATA, None).read(), reference)
        .metrics["fid"]
        .value
    )
    whole = (
        evaluate(open_image_set(path / "u8.npz", DATA, None).read(), reference).metrics["fid"].value
    )
    assert whole == pytest.approx(right, rel=0.05)
    with pytest.raises(DataError, match="within"):
        open_image_set(path / "f255.npz", DATA, None).read()


def test_34_spellings_of_a_column_are_one_value_and_blanks_are_counted() -> None:
    path = folder("34-split-by-column")
    column = text_column(open_image_set(path / "spelling.npz", DATA, None).column("site"), "site")
    assert len(set(column.values)) == 2
    assert column.num_joined == 1
    for name in ("blank.npz", "nan.npz"):
        with (
            case(name),
            pytest.raises(DataError, check=has_subject("site")),
        ):
            column = text_column(open_image_set(path / name, DATA, None).column("site"), "site")
            column.require_complete("site")
