"""From stored values to pictures: display windows, padding, tables, rescaling of each frame, and fragments."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate_extended
from pydicom.sequence import Sequence
from pydicom.uid import EnhancedMRImageStorage

from ddm.images.content import FileContent
from ddm.images.formats import decode
from ddm.images.picture import DecodedPicture
from ddm.images.reasons import ImageError, Reason
from ddm.images.transform import Transform
from ddm.protocol.data import DataSpec
from ddm.protocol.transform import PercentilesRange, StretchFit, TransformSpec, WindowRange
from tests.support.case import case
from tests.support.dicom_files import (
    cells_of,
    content_of,
    lossless_jpeg,
    run_length,
    tags_of,
    waves,
    write,
)

LOSSLESS = "1.2.840.10008.1.2.4.70"
RLE = "1.2.840.10008.1.2.5"


def items(path: Path) -> list[DecodedPicture | ImageError]:
    return list(decode(FileContent.of(path)))


def picture_of(path: Path) -> DecodedPicture:
    (picture,) = items(path)
    assert isinstance(picture, DecodedPicture)
    return picture


def refusal(path: Path) -> ImageError:
    with pytest.raises(ImageError) as caught:
        items(path)
    return caught.value


def sample_of(picture: DecodedPicture, kind: Any) -> np.ndarray:
    """Return what a plan makes of a picture, from 0 to 1."""
    height, width = picture.values.shape[-2:]
    spec = TransformSpec(range=kind, fit=StretchFit())
    return Transform(spec, DataSpec(shape=(1, height, width), range=(0.0, 1.0))).apply(picture)[0][
        0
    ]


def test_windows_are_those_of_their_function_and_of_every_legal_width(tmp_path: Path) -> None:
    for function, centre, width, window in (
        ("LINEAR_EXACT", 0.05, 0.1, (0, 0.1)),
        ("SIGMOID", 0.05, 0.1, (0, 0.1)),
        ("LINEAR_EXACT", 40, 400, (-160, 240)),
        ("SIGMOID", -2, 1e-3, (-2.0005, -1.9995)),
        ("LINEAR", 40, 400, (-160, 239)),
        (None, 40, 400, (-160, 239)),
        ("LINEAR", 2048, 4096, (0, 4095)),
        ("LINEAR", 10, 1.5, (9.25, 9.75)),
        ("LINEAR", 0.05, 0.1, None),
        (None, 0.05, 0.1, None),
        ("LINEAR_EXACT", 5, 0, None),
        ("SIGMOID", 5, -3, None),
        ("LOGARITHMIC", 5, 3, None),
    ):
        with case(function=function, centre=centre, width=width):
            tags = tags_of(waves(), WindowCenter=centre, WindowWidth=width)
            if function:
                tags.VOILUTFunction = function
            picture = picture_of(write(tags, tmp_path / "a.dcm"))
            assert (picture.window is None) == (window is None)
            if window is not None:
                assert picture.window == pytest.approx(window, abs=1e-12)


def test_a_window_of_width_one_is_a_threshold(tmp_path: Path) -> None:
    values = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64)
    for photometric, expected in (("MONOCHROME2", values > 1999), ("MONOCHROME1", values < 2000)):
        with case(photometric=photometric):
            tags = tags_of(
                values, WindowCenter=2000, WindowWidth=1, PhotometricInterpretation=photometric
            )
            picture = picture_of(write(tags, tmp_path / "a.dcm"))
            assert (sample_of(picture, WindowRange()) == expected).all()


def test_a_table_of_the_display_window_gives_the_values_that_it_maps(tmp_path: Path) -> None:
    for first, signed, window in ((100, False, (100, 355)), (-200, True, (-200, 55))):
        with case(first=first):
            table = Dataset()
            table.add_new("LUTDescriptor", "SS" if signed else "US", [256, first, 12])
            table.add_new("LUTData", "US", list(range(0, 4096, 16)))
            values = waves().astype(np.int16) - (2048 if signed else 0)
            tags = tags_of(
                values, PixelRepresentation=int(signed), VOILUTSequence=Sequence([table])
            )
            assert picture_of(write(tags, tmp_path / "a.dcm")).window == window


def test_a_modality_table_gives_its_entries(tmp_path: Path) -> None:
    entries = np.random.default_rng(0).integers(0, 1 << 16, 300)
    values = waves(high=500)
    for first, bits in ((0, 16), (100, 16), (0, 12)):
        with case(first=first, bits=bits):
            table = Dataset()
            table.add_new("LUTDescriptor", "US", [300, first, bits])
            table.add_new("LUTData", "US", [int(entry) % (1 << bits) for entry in entries])
            tags = tags_of(values, ModalityLUTSequence=Sequence([table]))
            picture = picture_of(write(tags, tmp_path / "a.dcm"))
            expected = entries[(values.astype(int) - first).clip(0, 299)] % (1 << bits)
            assert (picture.values[0] == expected).all() and picture.full == (0, (1 << bits) - 1)
            tags.RescaleSlope = 2
            assert "ModalityLUTSequence" in refusal(write(tags, tmp_path / "a.dcm")).detail
    table = Dataset()
    table.add_new("LUTDescriptor", "US", [300, 0, 16])
    table.add_new("LUTData", "US", [1] * 299)
    error = refusal(
        write(tags_of(values, ModalityLUTSequence=Sequence([table])), tmp_path / "a.dcm")
    )
    assert "LUTData" in error.detail


def test_padding_is_background_and_out_of_percentiles(tmp_path: Path) -> None:
    body = np.random.default_rng(0).integers(900, 1100, (64, 64))
    border = np.zeros((64, 64), bool)
    border[:, :12] = True
    for padding, limit, stored, tag in (
        (-2000, None, -2000, {"PixelPaddingValue": -2000}),
        (-2000, -1900, -1950, {"PixelPaddingValue": -2000, "PixelPaddingRangeLimit": -1900}),
        (3000, 2000, 2500, {"PixelPaddingValue": 3000, "PixelPaddingRangeLimit": 2000}),
    ):
        with case(padding=padding, limit=limit):
            values = np.where(border, stored, body).astype(np.int16)
            tags = tags_of(values, bits=16, RescaleSlope=1, RescaleIntercept=-1024)
            for name, value in tag.items():
                tags.add_new(name, "SS", value)
            picture = picture_of(write(tags, tmp_path / "a.dcm"))
            least = body[~border].min() - 1024
            assert (picture.values[0] == np.where(border, least, body - 1024)).all()
            sample = sample_of(picture, PercentilesRange())
            assert (
                not sample[border].any()
                and sample[~border].min() == 0
                and sample[~border].max() == 1
            )
            assert 0.4 < sample[~border].mean() < 0.6


def test_padding_of_inverted_greys_is_black(tmp_path: Path) -> None:
    values = waves(high=2900) + np.uint16(500)
    values[:, :9] = 0
    tags = tags_of(values, PhotometricInterpretation="MONOCHROME1", PixelPaddingValue=0)
    picture = picture_of(write(tags, tmp_path / "a.dcm"))
    expected = 4095 - values.astype(int)
    expected[:, :9] = expected[:, 9:].min()
    assert (picture.values[0] == expected).all() and picture.values.max() == 4095 - values[
        :, 9:
    ].min()


def test_padding_of_any_type_beside_it_is_found(tmp_path: Path) -> None:
    for signed, bits, kind, value, stored in (
        (True, 16, "US", 63536, -2000),
        (True, 12, "US", 2048, -2048),
        (False, 16, "SS", -2000, 63536),
        (True, 16, "SS", -32768, -32768),
    ):
        with case(kind=kind, value=value):
            values = waves(high=1000).astype(np.int16 if signed else np.uint16) + 100
            values[0] = np.int64(stored).astype(values.dtype)
            tags = tags_of(values, bits=bits)
            tags.add_new("PixelPaddingValue", kind, value)
            picture = picture_of(write(tags, tmp_path / "a.dcm"))
            assert (picture.values[0][0] == values[1:].min()).all() and (
                picture.values[0][1:] == values[1:]
            ).all()
    cells = waves()
    cells[0] = 0xF830
    tags = tags_of(cells, bits=12)
    tags.add_new("PixelPaddingValue", "US", 0xF830)
    assert "PixelPaddingValue" in refusal(write(tags, tmp_path / "a.dcm")).detail


def test_frames_of_nothing_but_padding_are_refused_alone(tmp_path: Path) -> None:
    values = waves((3, 40, 40)) + np.uint16(1)
    values[1] = 0
    first, second, third = items(
        write(tags_of(values, bits=16, PixelPaddingValue=0), tmp_path / "a.dcm")
    )
    assert isinstance(first, DecodedPicture) and isinstance(third, DecodedPicture)
    assert isinstance(second, ImageError) and "PixelPaddingValue" in second.detail


def enhanced_mr(values: np.ndarray, frames: list[dict[str, Any]], **others: Any) -> Any:
    """Return frames (N, H, W) in steps of 2 mm, each with slope, intercept and window of its own."""
    tags = tags_of(values, SOPClassUID=EnhancedMRImageStorage, **others)
    shared = Dataset()
    orientation = Dataset()
    measures = Dataset()
    orientation.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
    measures.PixelSpacing = [1, 1]
    shared.PlaneOrientationSequence = Sequence([orientation])
    shared.PixelMeasuresSequence = Sequence([measures])
    groups = []
    for number, frame in enumerate(frames):
        group = Dataset()
        position = Dataset()
        rescale = Dataset()
        window = Dataset()
        position.ImagePositionPatient = [0, 0, 2 * number]
        rescale.RescaleSlope = frame["slope"]
        rescale.RescaleIntercept = frame["intercept"]
        group.PlanePositionSequence = Sequence([position])
        group.PixelValueTransformationSequence = Sequence([rescale])
        if frame["window"] is not None:
            window.WindowCenter, window.WindowWidth = frame["window"]
            window.VOILUTFunction = "LINEAR_EXACT"
            group.FrameVOILUTSequence = Sequence([window])
        groups.append(group)
    tags.SharedFunctionalGroupsSequence = Sequence([shared])
    tags.PerFrameFunctionalGroupsSequence = Sequence(groups)
    return tags


def test_each_frame_has_its_own_rescaling_and_the_bounds_hold_them_all(tmp_path: Path) -> None:
    values = waves((3, 20, 24)).astype(np.uint16)
    frames = [
        {"slope": 1, "intercept": 0, "window": (500, 1000)},
        {"slope": 2.5, "intercept": -100, "window": (2000, 200)},
        {"slope": 3, "intercept": 7, "window": (100, 2000)},
    ]
    volume = picture_of(write(enhanced_mr(values, frames), tmp_path / "a.dcm"))
    expected = np.stack([values[0] * 1.0, values[1] * 2.5 - 100, values[2] * 3.0 + 7])
    assert np.allclose(volume.values[0], expected, rtol=1e-6)
    assert (
        volume.full == (-100, 4095 * 3 + 7)
        and volume.window == (-900, 2100)
        and volume.spacing == (2, 1, 1)
    )
    frames[1]["window"] = None
    assert picture_of(write(enhanced_mr(values, frames), tmp_path / "a.dcm")).window is None
    frames[2]["slope"] = 0
    assert (
        refusal(write(enhanced_mr(values, frames), tmp_path / "a.dcm")).detail
        == "RescaleSlope is zero"
    )


def test_padding_of_a_volume_is_the_lowest_value_of_all_its_frames(tmp_path: Path) -> None:
    values = waves((3, 20, 24), high=1000).astype(np.uint16) + np.uint16(100)
    values[1] += np.uint16(500)
    values[:, :4] = 0
    values[2] = 0
    frames = [{"slope": 1, "intercept": -1024, "window": None}] * 3
    volume = picture_of(write(enhanced_mr(values, frames, PixelPaddingValue=0), tmp_path / "a.dcm"))
    least = int(values[:2, 4:].min()) - 1024
    assert (volume.values[0][values == 0] == least).all()
    assert (volume.values[0][values > 0] == values[values > 0].astype(int) - 1024).all()


def test_padding_of_a_volume_is_exact_where_its_frames_have_other_types(tmp_path: Path) -> None:
    # One frame is rescaled to whole numbers without sign, one to negative ones, one to halves: the lowest value of all
    # is one that the first frame's own type does not hold.
    values = waves((3, 20, 24), high=1000).astype(np.uint16) + np.uint16(1)
    values[:, :4] = 0
    for slope, intercept in ((1, -1024), (0.5, -7), (-1, 0), (1, -40_000)):
        with case(slope=slope, intercept=intercept):
            frames = [{"slope": 1, "intercept": 0, "window": None}] * 2
            frames.append({"slope": slope, "intercept": intercept, "window": None})
            volume = picture_of(
                write(enhanced_mr(values, frames, PixelPaddingValue=0), tmp_path / "a.dcm")
            )
            expected = values.astype(np.float64)
            expected[2] = expected[2] * slope + intercept
            expected[values == 0] = expected[values > 0].min()
            assert (volume.values[0] == expected).all()


def test_inverted_greys_of_a_volume_are_turned_within_the_same_bounds(tmp_path: Path) -> None:
    values = waves((3, 20, 24)).astype(np.uint16)
    frames = [{"slope": 2, "intercept": -5, "window": None}] * 3
    tags = enhanced_mr(values, frames, PhotometricInterpretation="MONOCHROME1")
    expected = (-5 + 2 * 4095 - 5) - (values.astype(int) * 2 - 5)
    assert (picture_of(write(tags, tmp_path / "a.dcm")).values[0] == expected).all()
    frames[1] = {"slope": 3, "intercept": -5, "window": None}
    error = refusal(
        write(
            enhanced_mr(values, frames, PhotometricInterpretation="MONOCHROME1"), tmp_path / "a.dcm"
        )
    )
    assert error.reason is Reason.UNSUPPORTED and "MONOCHROME1" in error.detail


def test_an_enhanced_file_has_one_functional_group_for_each_frame(tmp_path: Path) -> None:
    values = waves((3, 20, 24)).astype(np.uint16)
    frame = {"slope": 2, "intercept": 0, "window": None}
    for num_groups in (1, 2, 4):
        with case(num_groups=num_groups):
            error = refusal(write(enhanced_mr(values, [frame] * num_groups), tmp_path / "a.dcm"))
            assert error.reason is Reason.DAMAGED
            assert (
                "NumberOfFrames" in error.detail
                and "PerFrameFunctionalGroupsSequence" in error.detail
            )


def test_slopes_that_are_no_numbers_are_refused_by_name(tmp_path: Path) -> None:
    for value in (b"zero", b"nan ", b"inf "):
        with case(value=value):
            path = write(
                tags_of(waves(), RescaleSlope="9999", RescaleIntercept=0), tmp_path / "a.dcm"
            )
            path.write_bytes(path.read_bytes().replace(b"9999", value))
            assert "RescaleSlope" in refusal(path).detail


def test_overlays_in_the_bits_of_pixels_are_no_part_of_their_values(tmp_path: Path) -> None:
    values = waves()
    for high_bit, overlay in ((11, 12), (15, 0)):
        with case(high_bit=high_bit, overlay=overlay):
            cells = cells_of(values, 16, 12, high_bit) | np.uint16(1 << overlay)
            tags = tags_of(cells, HighBit=high_bit)
            tags.add_new(0x60000010, "US", 48)
            tags.add_new(0x60000011, "US", 40)
            tags.add_new(0x60000100, "US", 16)
            tags.add_new(0x60000102, "US", overlay)
            assert (picture_of(write(tags, tmp_path / "a.dcm")).values[0] == values).all()


def test_fragments_make_the_frames_that_tables_and_code_streams_say(tmp_path: Path) -> None:
    values = waves((3, 20, 24))
    streams = [lossless_jpeg(frame, 12) for frame in values]
    tags = {name: tags_of(values)[name].value for name in PIXEL_TAGS}
    runs = [run_length(frame.astype("<u2")) for frame in values]
    for name, frames, syntax, tables, fragments in (
        ("a table", streams, LOSSLESS, True, 1),
        ("a table of frames in parts", streams, LOSSLESS, True, 3),
        ("no table", streams, LOSSLESS, False, 1),
        ("no table, frames in parts", streams, LOSSLESS, False, 3),
        ("RLE", runs, RLE, False, 1),
        ("RLE with a table", runs, RLE, True, 1),
    ):
        with case(name=name):
            content = content_of(frames, syntax, tables=tables, fragments=fragments, **tags)
            actual = [
                picture
                for picture in decode(FileContent(None, content, "a"))
                if not isinstance(picture, ImageError)
            ]
            assert all(
                (picture.values[0] == frame).all()
                for picture, frame in zip(actual, values, strict=True)
            )
            short = content_of(frames[:2], syntax, tables=tables, fragments=fragments, **tags)
            with pytest.raises(ImageError) as caught:
                list(decode(FileContent(None, short, "a")))
            assert "NumberOfFrames" in caught.value.detail
    pixels, offsets, lengths = encapsulate_extended(streams)
    with_tables = tags | {"ExtendedOffsetTable": offsets, "ExtendedOffsetTableLengths": lengths}
    content = content_of(pixels, LOSSLESS, representation="OB", **with_tables)
    assert len(list(decode(FileContent(None, content, "a")))) == 3
    for keyword, value in (
        ("ExtendedOffsetTable", offsets[:16]),
        ("ExtendedOffsetTableLengths", np.full(3, 64, "<u8").tobytes()),
    ):
        with case(keyword=keyword), pytest.raises(ImageError) as caught:
            content = content_of(
                pixels, LOSSLESS, representation="OB", **with_tables | {keyword: value}
            )
            list(decode(FileContent(None, content, "a")))
        assert caught.value.reason is Reason.DAMAGED


PIXEL_TAGS = (
    "Rows",
    "Columns",
    "NumberOfFrames",
    "SamplesPerPixel",
    "PhotometricInterpretation",
    "BitsAllocated",
    "BitsStored",
    "HighBit",
    "PixelRepresentation",
)


def test_a_code_stream_without_its_end_is_truncated(tmp_path: Path) -> None:
    values = waves()
    tags = {name: tags_of(values)[name].value for name in PIXEL_TAGS if name != "NumberOfFrames"}
    stream = lossless_jpeg(values, 12)
    for length in (len(stream) - 2, len(stream) // 2, 30):
        with case(length=length), pytest.raises(ImageError) as caught:
            list(decode(FileContent(None, content_of([stream[:length]], LOSSLESS, **tags), "a")))
        assert caught.value.reason is Reason.TRUNCATED
