import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ddm.images.content import FileContent
from ddm.images.formats import decode
from ddm.images.picture import DecodedPicture, DecodeLimits
from ddm.images.reasons import Flag, Reason
from tests.support.case import case
from tests.support.decoding import decoded_picture, decoding_refusal, exif_of_orientation

RAMP = np.linspace(0, 250, 40 * 56).reshape(40, 56)
RGB = np.stack([RAMP, 250 - RAMP, RAMP[::-1]], -1).astype(np.uint8)
GREY = RGB[..., 0]
INKS = np.concatenate([RGB, np.full((40, 56, 1), 60, np.uint8)], -1)


def jpeg(array: np.ndarray, mode: str | None = None, **options: Any) -> bytes:
    written = io.BytesIO()
    defaults = {"quality": 100, "subsampling": 0}
    Image.fromarray(array, mode).save(written, "JPEG", **defaults | options)
    return written.getvalue()


def marker(code: int, data: bytes) -> bytes:
    return bytes([0xFF, code]) + struct.pack(">H", len(data) + 2) + data


def with_marker(data: bytes, code: int, content: bytes) -> bytes:
    return data[:2] + marker(code, content) + data[2:]


def exif(orientation: int, order: str = "<") -> bytes:
    return b"Exif\0\0" + exif_of_orientation(orientation, order)


def without(data: bytes, code: int) -> bytes:
    """Return the file without the first marker of a kind."""
    start = data.index(bytes([0xFF, code]))
    return data[:start] + data[start + 2 + int.from_bytes(data[start + 2 : start + 4]) :]


def values(data: bytes) -> np.ndarray:
    return np.moveaxis(decoded_picture(data).values, 0, -1).astype(int)


def near(actual: np.ndarray, expected: np.ndarray, most: int = 3) -> bool:
    expected = expected if expected.ndim == 3 else expected[..., None]
    return (
        actual.shape == expected.shape and int(np.abs(actual - expected.astype(int)).max()) <= most
    )


def test_greys_and_colours_are_read_in_each_way_of_coding(tmp_path: Path) -> None:
    ways = (
        {},
        {"progressive": True},
        {"optimize": True},
        {"restart_marker_blocks": 3},
        {"restart_marker_rows": 1},
    )
    for options in ways:
        with case(**options):
            assert near(values(jpeg(GREY, **options)), GREY)
            assert near(values(jpeg(RGB, **options)), RGB)
            assert near(values(jpeg(RGB, keep_rgb=True, **options)), RGB)
    (tmp_path / "a.jpg").write_bytes(jpeg(RGB))
    (actual,) = decode(FileContent.of(tmp_path / "a.jpg"))
    assert isinstance(actual, DecodedPicture) and actual.full == (0, 255)
    assert (actual.values == decoded_picture(jpeg(RGB)).values).all()
    flat = np.full((40, 56, 3), (200, 40, 90), np.uint8)
    for subsampling in (0, 1, 2):
        assert near(values(jpeg(flat, subsampling=subsampling)), flat)


def test_adobes_marker_says_what_three_and_four_colours_are() -> None:
    light = 255 - INKS.astype(float)
    expected = light[..., :3] * light[..., 3:] / 255
    cmyk = jpeg(INKS, "CMYK")
    assert b"Adobe" in cmyk  # inverted, as Adobe's programs write it
    assert near(values(cmyk), expected, 5)
    assert "APP14" in decoding_refusal(without(cmyk, 0xEE)).detail
    # YCCK is YCbCr of R = 255 - C and so on, where C is inverted ink (Adobe's note 5116): R is ink, K its inverse.
    grey_inks = np.stack(
        [GREY, np.full_like(GREY, 128), np.full_like(GREY, 128), np.full_like(GREY, 55)], -1
    )
    # Pillow inverts, so that the file holds `grey_inks`
    ycck = bytearray(jpeg(255 - grey_inks, "CMYK"))
    ycck[ycck.index(b"Adobe") + 11] = 2
    light_of_grey = np.stack([255 - GREY.astype(float)] * 3, -1) * 55 / 255
    assert near(values(bytes(ycck)), light_of_grey, 5)


def test_orientation_is_applied_to_each_kind() -> None:
    for kind, data in (("grey", jpeg(GREY)), ("RGB", jpeg(RGB)), ("CMYK", jpeg(INKS, "CMYK"))):
        straight = values(data)
        turns = {
            1: straight,
            2: straight[:, ::-1],
            3: straight[::-1, ::-1],
            4: straight[::-1],
            5: straight.swapaxes(0, 1),
            6: np.rot90(straight, -1),
            7: straight[::-1, ::-1].swapaxes(0, 1),
            8: np.rot90(straight, 1),
            0: straight,
            77: straight,
        }
        for orientation, expected in turns.items():
            for order in "<>":
                with case(kind, orientation, order):
                    turned = values(with_marker(data, 0xE1, exif(orientation, order)))
                    assert turned.shape == expected.shape and (turned == expected).all()


def test_other_processes_than_baseline_and_progressive_of_8_bits_are_refused() -> None:
    data = jpeg(GREY)
    frame = data.index(b"\xff\xc0")
    for code in (0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF, 0xF7):
        with case(code):
            other = data[:frame] + bytes([0xFF, code]) + data[frame + 2 :]
            assert (
                decoding_refusal(other).reason is Reason.UNSUPPORTED
                and "SOF" in decoding_refusal(other).detail
            )
    for code in (0xC1, 0xC2):
        deep = (
            data[:frame]
            + bytes([0xFF, code])
            + data[frame + 2 : frame + 4]
            + b"\x0c"
            + data[frame + 5 :]
        )
        assert "precision" in decoding_refusal(deep).detail
    two = data[:frame] + marker(0xC0, b"\x08\0\x28\0\x38\2\1\x11\0\2\x11\0") + data[frame + 13 :]
    assert "SOF" in decoding_refusal(two).detail
    late_height = data[:-2] + marker(0xDC, b"\0\x28") + data[-2:]
    assert "DNL" in decoding_refusal(late_height).detail


def test_what_is_missing_is_noticed() -> None:
    for options in ({}, {"progressive": True}):
        data = jpeg(RGB, **options)
        for length in (3, 20, len(data) // 2, len(data) - 40, len(data) - 2, len(data) - 1):
            with case(length, **options):
                assert decoding_refusal(data[:length]).reason is Reason.TRUNCATED
                # A copy that was cut off is often filled up with zeros.
                assert decoding_refusal(data[:length].ljust(len(data), b"\0")).reason in (
                    Reason.TRUNCATED,
                    Reason.DAMAGED,
                )
        assert (values(data + b"behind the end \xff\xd8\xff") == values(data)).all()


def test_restart_markers_are_counted_and_in_order() -> None:
    for options in ({}, {"subsampling": 2}, {"progressive": True}):
        data = jpeg(RGB, restart_marker_blocks=3, **options)
        assert values(data).shape == (40, 56, 3)
        for before, after in (
            (b"\xff\xd1", b""),
            (b"\xff\xd1", b"\xff\xd3"),
            (b"\xff\xd1", b"\xff\xd1\0\xff\xd2"),
        ):
            with case(before, after, **options):
                assert "restart" in decoding_refusal(data.replace(before, after, 1)).detail
    assert "DRI" in decoding_refusal(jpeg(RGB)[:-2] + b"\xff\xd0\xff\xd9").detail


def test_further_pictures_in_a_file_are_thumbnails() -> None:
    written = io.BytesIO()
    Image.fromarray(RGB).save(
        written, "MPO", save_all=True, append_images=[Image.fromarray(RGB[::2, ::2])]
    )
    assert decoded_picture(written.getvalue()).flags == {Flag.THUMBNAIL}
    assert decoded_picture(written.getvalue()).values.shape == (3, 40, 56)
    data = jpeg(RGB)
    for code, content in (
        (0xE0, b"JFXX\0\x10"),
        (0xE0, b"JFIF\0\1\1\0\0\1\0\1\1\1abc"),
        (0xED, b"Photoshop 3.0\x008BIM\x04\x0c\0\0"),
        (0xE1, b"http://ns.adobe.com/xap/1.0/\0<xmpGImg:image>"),
    ):
        with case(content):
            assert decoded_picture(with_marker(data, code, content)).flags == {Flag.THUMBNAIL}
    comment = with_marker(data, 0xFE, b"a screenshot")
    assert decoded_picture(comment).flags == {Flag.SCREENSHOT}


def test_pixels_that_are_not_square_have_spacings() -> None:
    data = without(jpeg(GREY), 0xE0)
    for unit, per_column, per_row, spacing in (
        (1, 72, 72, None),
        (2, 200, 100, (0.1, 0.05)),
        (0, 2, 1, (2.0, 1.0)),
        (0, 0, 0, None),
    ):
        with case(unit, per_column, per_row):
            jfif = b"JFIF\0\1\1" + struct.pack(">BHHBB", unit, per_column, per_row, 0, 0)
            assert decoded_picture(with_marker(data, 0xE0, jfif)).spacing == spacing


def test_sizes_are_bounded_and_metadata_is_not_decoded() -> None:
    data = jpeg(GREY)
    frame = data.index(b"\xff\xc0")
    huge = data[: frame + 5] + b"\xff\xff\xff\xff" + data[frame + 9 :]
    assert decoding_refusal(huge).reason is Reason.TOO_LARGE
    assert decoding_refusal(data, DecodeLimits(values=100)).reason is Reason.TOO_LARGE
    none = data[: frame + 5] + b"\0\0\0\0" + data[frame + 9 :]
    assert decoding_refusal(none).reason is Reason.DAMAGED
    for number in range(30):
        data = with_marker(data, 0xE2, b"ICC_PROFILE\0" + bytes([number + 1, 30]) + bytes(65000))
    assert near(values(data), GREY)
    assert "EXIF" in decoding_refusal(with_marker(data, 0xE1, b"Exif\0\0MM\0*\xff\0\0\0")).detail
    for broken in (b"\xff\xd8\xff\xd9", b"\xff\xd8\xffnothing", data[:2] + b"\xff\xda\0\2\xff\xd9"):
        with case(broken):
            assert decoding_refusal(broken).reason in (
                Reason.NO_PIXELS,
                Reason.DAMAGED,
                Reason.TRUNCATED,
            )
