import warnings
from pathlib import Path

import numpy as np
import pydicom
import pytest
from pydicom.data import get_testdata_file
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate
from pydicom.pixels.processing import convert_color_space
from pydicom.sequence import Sequence
from pydicom.uid import (
    UID,
    DeflatedExplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGLSLossless,
    RLELossless,
    SecondaryCaptureImageStorage,
    UltrasoundImageStorage,
)

from ddm.images.content import FileContent
from ddm.images.dicom_tags import floats_of, texts_of, word_of
from ddm.images.formats import decode
from ddm.images.picture import DecodedPicture, DecodeLimits
from ddm.images.reasons import Flag, ImageError, Reason
from tests.support.dicom_files import (
    tags_of,
    waves,
    write,
    write_baseline_jpeg,
    write_big_endian,
    write_compressed,
    write_enhanced,
    write_inflating,
    write_through_gdcm,
    write_without_meta,
)


def pictures(path: Path, limits: DecodeLimits | None = None) -> list[DecodedPicture]:
    actual = list(decode(FileContent.of(path), limits))
    assert all(isinstance(item, DecodedPicture) for item in actual)
    return [item for item in actual if isinstance(item, DecodedPicture)]


def values_of(path: Path) -> np.ndarray:
    (picture,) = pictures(path)
    return picture.values


def reason_of(path: Path, limits: DecodeLimits | None = None) -> Reason:
    with pytest.raises(ImageError) as caught:
        list(decode(FileContent.of(path), limits))
    assert path.name not in str(caught.value)
    return caught.value.reason


def deflated(path: Path) -> Path:
    tags = tags_of(waves())
    tags.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    return write(tags, path)


SYNTAXES = {
    "explicit": lambda path: write(tags_of(waves()), path),
    "RLE": lambda path: write_compressed(tags_of(waves()), RLELossless, path),
    "JPEG-LS": lambda path: write_compressed(tags_of(waves()), JPEGLSLossless, path),
    "JPEG 2000": lambda path: write_compressed(tags_of(waves()), JPEG2000Lossless, path),
    "JPEG baseline": write_baseline_jpeg,
    "JPEG lossless": lambda path: write_through_gdcm(
        write(tags_of(waves()), path.with_suffix(".raw")), path, "JPEGLosslessProcess14_1"
    ),
    "deflated": deflated,
    "big endian": write_big_endian,
    "no preamble, explicit": lambda path: write_without_meta(path, implicit=False),
    "no preamble, implicit": lambda path: write_without_meta(path, implicit=True),
}


@pytest.mark.parametrize("name", SYNTAXES)
def test_pixels_of_every_transfer_syntax_are_those_of_pydicom(name: str, tmp_path: Path) -> None:
    path = SYNTAXES[name](tmp_path / "image")
    tags = pydicom.dcmread(path, force=True)
    if "TransferSyntaxUID" not in tags.file_meta:
        implicit = tags.original_encoding[0]
        tags.file_meta.TransferSyntaxUID = (
            pydicom.uid.ImplicitVRLittleEndian if implicit else pydicom.uid.ExplicitVRLittleEndian
        )
    (picture,) = pictures(path)
    assert (picture.values[0] == tags.pixel_array).all()
    assert picture.patient == "MRN0017" and "MRN0017" not in repr(picture)
    if name != "JPEG baseline":  # which loses a little
        assert (picture.values[0] == waves()).all()
        assert picture.full == (0, 4095) and picture.values.dtype == np.uint16


def test_rescaling_and_window_follow_the_standard(tmp_path: Path) -> None:
    tags = tags_of(
        waves(),
        RescaleSlope=1,
        RescaleIntercept=-1024,
        WindowCenter=[40, 600],
        WindowWidth=[400, 1500],
    )
    tags.PixelSpacing = [0.5, 0.75]
    picture = pictures(write(tags, tmp_path / "image"))[0]
    assert (
        picture.values.dtype == np.int16 and (picture.values[0] == waves().astype(int) - 1024).all()
    )
    # PS3.3 C.11.2.1.2.1: below c - 0.5 - (w - 1) / 2 black, above c - 0.5 + (w - 1) / 2 white.
    assert picture.window == (40 - 0.5 - 399 / 2, 40 - 0.5 + 399 / 2)
    assert picture.full == (-1024, 3071) and picture.spacing == (0.5, 0.75)
    tags.RescaleSlope = 0.5
    tags.VOILUTFunction = "LINEAR_EXACT"
    picture = pictures(write(tags, tmp_path / "image"))[0]
    assert picture.values.dtype == np.float32 and np.allclose(
        picture.values[0], waves() * 0.5 - 1024
    )
    assert picture.window == (-160, 240)


def test_large_rescaled_values_do_not_wrap(tmp_path: Path) -> None:
    tags = tags_of(waves(high=65535), bits=16, RescaleSlope=3, RescaleIntercept=-70000)
    values = values_of(write(tags, tmp_path / "image"))
    assert (
        values.dtype == np.int32 and (values[0] == waves(high=65535).astype(int) * 3 - 70000).all()
    )
    tags.RescaleSlope = 1
    tags.RescaleIntercept = -1024
    values = values_of(write(tags, tmp_path / "image"))
    assert values.dtype == np.int32 and (values[0] == waves(high=65535).astype(int) - 1024).all()


def test_inverted_greys_are_turned_with_their_window(tmp_path: Path) -> None:
    tags = tags_of(
        waves(), PhotometricInterpretation="MONOCHROME1", WindowCenter=1000.5, WindowWidth=1001
    )
    picture = pictures(write(tags, tmp_path / "image"))[0]
    assert (picture.values[0] == 4095 - waves()).all() and picture.window == (
        4095 - 1500,
        4095 - 500,
    )


def test_colours_come_as_rgb_from_ybr_and_palettes(tmp_path: Path) -> None:
    rgb = np.stack(
        [
            waves(high=255, dtype=np.uint8),
            waves(high=200, dtype=np.uint8).T[::-1, ::-1].T,
            waves(high=90, dtype=np.uint8),
        ],
        -1,
    )
    assert (
        values_of(write(tags_of(rgb, bits=8), tmp_path / "rgb")) == np.moveaxis(rgb, -1, 0)
    ).all()
    ybr = write(tags_of(rgb, bits=8, PhotometricInterpretation="YBR_FULL"), tmp_path / "ybr")
    expected = convert_color_space(rgb, "YBR_FULL", "RGB")
    assert (values_of(ybr) == np.moveaxis(expected, -1, 0)).all()
    tags = tags_of(
        waves(high=255, dtype=np.uint8), bits=8, PhotometricInterpretation="PALETTE COLOR"
    )
    tables = {
        name: np.roll(np.arange(256), shift).astype(np.uint16) * 257
        for name, shift in (("Red", 1), ("Green", 7), ("Blue", 90))
    }
    for name, table in tables.items():
        setattr(tags, f"{name}PaletteColorLookupTableDescriptor", [256, 0, 16])
        setattr(tags, f"{name}PaletteColorLookupTableData", table.tobytes())
    values = values_of(write(tags, tmp_path / "palette"))
    for channel, table in enumerate(tables.values()):
        assert (values[channel] == table[waves(high=255, dtype=np.uint8)]).all()


def test_frames_make_a_volume_only_where_they_lie_evenly(tmp_path: Path) -> None:
    frames = waves((4, 6, 5))
    (volume,) = pictures(write_enhanced(frames, [30, 10, 20, 0], tmp_path / "volume"))
    # from inferior to superior
    assert (volume.values[0] == frames[[3, 1, 2, 0]].astype(int) * 2 - 1000).all()
    assert volume.spacing == (10, 0.5, 0.75)
    for places in ([0, 10, 20, 20], [0, 10, 20, 35]):
        apart = pictures(write_enhanced(frames, places, tmp_path / "frames"))
        assert [picture.values.shape for picture in apart] == [(1, 6, 5)] * 4
        assert (apart[2].values[0] == frames[2].astype(int) * 2 - 1000).all()
    clip = pictures(write(tags_of(frames), tmp_path / "clip"))
    assert [
        (picture.values[0] == frame).all() for picture, frame in zip(clip, frames, strict=True)
    ] == [True] * 4


def icon() -> Sequence:
    small = Dataset()
    small.Rows = small.Columns = 2
    return Sequence([small])


@pytest.mark.parametrize(
    ("flag", "changes"),
    [
        (Flag.DECLARED_TEXT, {"BurnedInAnnotation": "YES"}),
        (Flag.DECLARED_FACE, {"RecognizableVisualFeatures": "YES"}),
        (Flag.THUMBNAIL, {"IconImageSequence": icon()}),
        (Flag.SCREENSHOT, {"ConversionType": "WSD"}),
        (Flag.SCREENSHOT, {"ImageType": ["DERIVED", "SECONDARY", "SCREEN SAVE"]}),
        (Flag.SECONDARY_CAPTURE, {"SOPClassUID": SecondaryCaptureImageStorage}),
        (Flag.SECONDARY_CAPTURE, {"ConversionType": "DF"}),
        (Flag.ULTRASOUND, {"SOPClassUID": UltrasoundImageStorage}),
        (Flag.ULTRASOUND, {"Modality": "US"}),
    ],
)
def test_tags_flag_what_a_person_must_see(flag: Flag, changes: dict, tmp_path: Path) -> None:
    (picture,) = pictures(write(tags_of(waves(), **changes), tmp_path / "image"))
    assert picture.flags == {flag}


def test_overlays_and_faces_are_flagged(tmp_path: Path) -> None:
    tags = tags_of(waves())
    tags.add_new(0x60020010, "US", 8)
    assert pictures(write(tags, tmp_path / "overlay"))[0].flags == {Flag.OVERLAY}
    frames = waves((30, 32, 32))
    places = [5.0 * number for number in range(30)]
    assert pictures(write_enhanced(frames, places, tmp_path / "head", "HEAD"))[0].flags == {
        Flag.FACE
    }
    assert not pictures(write_enhanced(frames, places, tmp_path / "chest", "CHEST"))[0].flags


def test_broken_files_have_their_true_reason(tmp_path: Path) -> None:
    whole = write(tags_of(waves()), tmp_path / "whole").read_bytes()
    cut = tmp_path / "cut"
    cut.write_bytes(whole[:-1000])
    assert reason_of(cut) is Reason.TRUNCATED
    cut.write_bytes(whole[: whole.index(b"\xe0\x7f\x10\x00") - 10])
    assert reason_of(cut) is Reason.TRUNCATED
    rle = write_compressed(tags_of(waves()), RLELossless, tmp_path / "rle").read_bytes()
    cut.write_bytes(rle[: rle.index(b"\xe0\x7f\x10\x00") + 200])
    assert reason_of(cut) in (Reason.TRUNCATED, Reason.DAMAGED)
    tags = tags_of(waves())
    del tags.PixelData, tags.Rows, tags.Columns
    assert reason_of(write(tags, tmp_path / "report")) is Reason.NO_PIXELS
    dose = tags_of(waves(), SOPClassUID="1.2.840.10008.5.1.4.1.1.481.2")
    assert reason_of(write(dose, tmp_path / "grid")) is Reason.NO_PICTURE
    unknown = tags_of(waves(), PixelData=encapsulate([b"a film"]))
    unknown["PixelData"].is_undefined_length = True
    unknown.file_meta.TransferSyntaxUID = UID("1.2.840.10008.1.2.4.100")  # MPEG-2
    assert reason_of(write(unknown, tmp_path / "film")) is Reason.UNSUPPORTED


def test_headers_that_announce_too_much_are_refused_before_anything_is_allocated(
    tmp_path: Path,
) -> None:
    tags = tags_of(waves())
    tags.Rows = tags.Columns = 65535
    assert reason_of(write(tags, tmp_path / "wide")) is Reason.TOO_LARGE
    tags = tags_of(waves(), NumberOfFrames=2**31 - 1)
    assert reason_of(write(tags, tmp_path / "long")) is Reason.TOO_LARGE
    tags.NumberOfFrames = 0
    tags.Rows = 0
    assert reason_of(write(tags, tmp_path / "flat")) is Reason.DAMAGED


def test_deeply_nested_tags_end_as_damaged(tmp_path: Path) -> None:
    inner = b""
    for _ in range(3000):
        inner = b"\x08\x00\x40\x11SQ\0\0\xff\xff\xff\xff\xfe\xff\x00\xe0\xff\xff\xff\xff" + inner
    head = write(tags_of(waves()), tmp_path / "whole").read_bytes()
    path = tmp_path / "sequences"
    path.write_bytes(head[: head.index(b"\x08\x00\x16\x00")] + inner)
    assert reason_of(path) in (Reason.DAMAGED, Reason.NO_PIXELS, Reason.TRUNCATED)


def test_every_file_that_pydicom_brings_loads_as_pydicom_loads_it_or_is_refused() -> None:
    folder = Path(get_testdata_file("CT_small.dcm")).parent
    equal = refused = 0
    for path in sorted(folder.glob("*.dcm")):
        try:
            actual = pictures(path)
        except ImageError:
            refused += 1
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tags = pydicom.dcmread(path, force=True)
            if (
                tags.get("PhotometricInterpretation") not in ("MONOCHROME2", "RGB")
                or "RescaleSlope" in tags
            ):
                continue
            try:
                raw = tags.pixel_array
            except RuntimeError:  # what pydicom cannot decode
                continue
        if "PerFrameFunctionalGroupsSequence" in tags or "ModalityLUTSequence" in tags:
            continue
        frames = raw if int(tags.get("NumberOfFrames") or 1) > 1 else raw[None]
        for picture, frame in zip(actual, frames, strict=True):
            expected = np.moveaxis(frame, -1, 0) if frame.ndim == 3 else frame[None]
            assert (picture.values == expected.astype(picture.values.dtype)).all(), path.name
        equal += 1
    assert equal > 20 and refused < equal


def test_control_inflating_file_is_small_and_its_data_set_large(tmp_path: Path) -> None:
    path = write_inflating(tmp_path / "bomb", 1 << 24)
    assert path.stat().st_size < 1 << 16


@pytest.mark.parametrize("bits", [8, 10, 12, 16])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("frames", [1, 3])
def test_uncompressed_greys_are_those_of_pydicom_whatever_stands_in_unused_bits(
    tmp_path: Path, bits: int, signed: bool, frames: int
) -> None:
    whole = np.random.default_rng(bits).integers(
        0, 256, (frames, 9, 7 * (1 if bits == 8 else 2)), dtype=np.uint8
    )
    values = whole.view(
        {(8, False): "u1", (8, True): "i1"}.get((bits, signed), "<i2" if signed else "<u2")
    )
    tags = tags_of(values if frames > 1 else values[0], bits=bits, PixelRepresentation=int(signed))
    for syntax in (pydicom.uid.ExplicitVRLittleEndian, pydicom.uid.ImplicitVRLittleEndian):
        tags.file_meta.TransferSyntaxUID = syntax
        path = tmp_path / "a.dcm"
        pydicom.dcmwrite(
            path,
            tags,
            enforce_file_format=True,
            implicit_vr=syntax.is_implicit_VR,
            little_endian=True,
        )
        actual = np.stack([picture.values[0] for picture in pictures(path)])
        expected = pydicom.dcmread(path).pixel_array.reshape(actual.shape)
        assert (actual == expected).all() and actual.dtype.kind == expected.dtype.kind


LARGE = waves((240, 200))  # more bytes than are read before they are asked for


@pytest.mark.parametrize(
    "syntax", ["explicit", "signed", "unused bits", "rescaled", "deflated", "RLE", "JPEG 2000"]
)
def test_large_pixels_of_a_file_in_memory_are_those_of_pydicom(syntax: str, tmp_path: Path) -> None:
    path = tmp_path / "image"
    tags = tags_of(LARGE)
    if syntax == "signed":
        tags.PixelRepresentation = 1
        tags.PixelData = (LARGE.astype(np.int16) - 2048).tobytes()
    elif syntax == "unused bits":
        tags.PixelData = (LARGE | 0xA000).tobytes()
    elif syntax == "rescaled":
        tags.RescaleSlope = 1
        tags.RescaleIntercept = -1024
    elif syntax == "deflated":
        tags.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    elif syntax == "RLE":
        tags.compress(RLELossless, generate_instance_uid=False)
    elif syntax == "JPEG 2000":
        noise = np.random.default_rng(0).integers(0, 4096, LARGE.shape, np.uint16)
        tags.PixelData = noise.tobytes()
        tags.compress(JPEG2000Lossless, generate_instance_uid=False)
        assert len(tags.PixelData) > 1 << 16
    write(tags, path)
    (alone,) = pictures(path)
    (actual,) = decode(FileContent.of(path, path.read_bytes()))
    assert isinstance(actual, DecodedPicture) and actual.values.flags.writeable
    expected = pydicom.dcmread(path).pixel_array.astype(int) - (1024 if syntax == "rescaled" else 0)
    assert (actual.values[0] == expected).all() and (alone.values == actual.values).all()
    assert (actual.patient, actual.flags, actual.full) == (alone.patient, alone.flags, alone.full)


def test_a_file_in_memory_that_ends_within_large_pixels_is_truncated(tmp_path: Path) -> None:
    content = write(tags_of(LARGE), tmp_path / "image").read_bytes()
    for end in (len(content) - 1, len(content) - LARGE.nbytes // 2):
        with pytest.raises(ImageError) as caught:
            list(decode(FileContent.of(tmp_path / "image", content[:end])))
        assert caught.value.reason is Reason.TRUNCATED


def test_values_of_tags_are_those_that_pydicom_converts() -> None:
    checked = 0
    for name in (
        "CT_small.dcm",
        "MR_small.dcm",
        "JPEG2000.dcm",
        "MR_small_bigendian.dcm",
        "MR_small_implicit.dcm",
    ):
        path = get_testdata_file(name)
        tags = pydicom.dcmread(path)
        whole = pydicom.dcmread(path)
        for element in whole:
            if not element.keyword or element.is_empty:
                continue
            if element.VR in ("DS", "IS"):
                expected = element.value if element.VM > 1 else [element.value]
                assert floats_of(tags, element.keyword) == [float(number) for number in expected], (
                    element.keyword
                )
            elif element.VR in ("CS", "UI"):
                expected = element.value if element.VM > 1 else [element.value]
                assert texts_of(tags, element.keyword) == list(expected), element.keyword
            elif element.VR in ("US", "SS") and element.VM == 1:
                assert word_of(tags, element.keyword) == element.value % 65536, element.keyword
            else:
                continue
            checked += 1
    assert checked > 100
