import io
import struct
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ddm.images.content import FileContent
from ddm.images.formats import decode
from ddm.images.picture import DecodedPicture, DecodeLimits
from ddm.images.reasons import Flag, ImageError, Reason
from tests.support.case import case

RNG = np.random.default_rng(0)
H = 13
W = 21
RGB = RNG.integers(0, 256, (H, W, 3), np.uint8)
RGBA = RNG.integers(0, 256, (H, W, 4), np.uint8)


def decoded(data: bytes, limits: DecodeLimits | None = None) -> list[np.ndarray]:
    actual = list(decode(FileContent(None, data, "a"), limits))
    assert all(
        isinstance(picture, DecodedPicture) and picture.full == (0, 255) for picture in actual
    )
    return [
        np.moveaxis(picture.values, 0, -1)
        for picture in actual
        if isinstance(picture, DecodedPicture)
    ]


def refusal(data: bytes, limits: DecodeLimits | None = None) -> ImageError:
    with pytest.raises(ImageError) as caught:
        decoded(data, limits)
    return caught.value


def webp(array: np.ndarray, **options: Any) -> bytes:
    written = io.BytesIO()
    Image.fromarray(array).save(written, "WEBP", **{"lossless": True, "exact": True} | options)
    return written.getvalue()


def over_black(array: np.ndarray) -> np.ndarray:
    return np.floor(array[..., :3].astype(float) * array[..., 3:] / 255 + 0.5)


def test_webp_keeps_every_value_and_lays_transparency_over_black() -> None:
    assert (decoded(webp(RGB))[0] == RGB).all()
    assert (decoded(webp(RGBA))[0] == over_black(RGBA)).all()
    flat = np.full((H, W, 3), (200, 40, 90), np.uint8)
    assert np.abs(decoded(webp(flat, lossless=False, quality=95))[0].astype(int) - flat).max() <= 4


def test_webp_is_turned_as_its_exif_says() -> None:
    exif = Image.Exif()
    for orientation, expected in (
        (1, RGB),
        (3, RGB[::-1, ::-1]),
        (6, np.rot90(RGB, -1)),
        (5, RGB.swapaxes(0, 1)),
    ):
        exif[0x0112] = orientation
        with case(orientation):
            assert (decoded(webp(RGB, exif=exif))[0] == expected).all()


def test_frames_of_webp_are_images_of_their_own() -> None:
    frames = [RGB, 255 - RGB, RGB[::-1]]
    rest = [Image.fromarray(frame) for frame in frames[1:]]
    data = webp(RGB, save_all=True, append_images=rest, duration=100)
    for actual, frame in zip(decoded(data), frames, strict=True):
        assert (actual == frame).all()
    assert refusal(data, DecodeLimits(pictures=2)).reason is Reason.TOO_LARGE


def test_broken_webp_has_its_true_reason() -> None:
    data = webp(RGB)
    for length in (len(data) - 1, len(data) // 2, 40):
        assert refusal(data[:length]).reason is Reason.TRUNCATED
    assert (decoded(data + b"behind the end")[0] == RGB).all()
    assert refusal(data, DecodeLimits(values=100)).reason is Reason.TOO_LARGE
    xmp = webp(RGB, xmp=b"<x:xmpmeta>xmpGImg</x:xmpmeta>")
    (picture,) = decode(FileContent(None, xmp, "a"))
    assert isinstance(picture, DecodedPicture) and picture.flags == {Flag.THUMBNAIL}


def bmp(
    rows: np.ndarray,
    width: int,
    bits: int,
    *,
    palette: np.ndarray | None = None,
    header: int = 40,
    **fields: Any,
) -> bytes:
    """Return a file of rows of bytes, top first; the height is negative if `top_down`."""
    height = len(rows)
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 4)))
    pixels = (rows if fields.get("top_down") else rows[::-1]).tobytes()
    masks = fields.get("masks", b"")
    if header == 12:
        information_header = struct.pack("<IHHHH", 12, width, height, 1, bits)
    else:
        signed = -height if fields.get("top_down") else height
        num = 0 if palette is None else len(palette)
        per_column, per_row = fields.get("density", (0, 0))
        compression = fields.get("compression", 0)
        information_header = struct.pack(
            "<IiiHHIIiiII",
            header,
            width,
            signed,
            1,
            bits,
            compression,
            0,
            per_column,
            per_row,
            num,
            0,
        )
        information_header += masks[: header - 40].ljust(header - 40, b"\0")
        masks = masks[header - 40 :]
    colours = b""
    if palette is not None:
        blue_first = palette[:, ::-1].astype(np.uint8)
        colours = (blue_first if header == 12 else np.pad(blue_first, ((0, 0), (0, 1)))).tobytes()
    start = 14 + len(information_header) + len(masks) + len(colours)
    return (
        struct.pack("<2sIII", b"BM", start + len(pixels), 0, start)
        + information_header
        + masks
        + colours
        + pixels
    )


MASKS = struct.pack("<IIII", 0xFF0000, 0xFF00, 0xFF, 0)


def test_bmp_of_each_depth_and_header_is_read_to_the_value() -> None:
    blue_first = RGB[..., ::-1].reshape(H, -1)
    padded = np.pad(RGB[..., ::-1], ((0, 0), (0, 0), (0, 1)), constant_values=7).reshape(H, -1)
    for options in ({}, {"top_down": True}, {"header": 12}, {"header": 108}, {"header": 124}):
        with case(**options):
            assert (decoded(bmp(blue_first, W, 24, **options))[0] == RGB).all()
            if options.get("header") != 12:
                assert (decoded(bmp(padded, W, 32, **options))[0] == RGB).all()
    for header in (40, 56, 108, 124):
        assert (
            decoded(bmp(padded, W, 32, header=header, compression=3, masks=MASKS))[0] == RGB
        ).all()
    for bits in (1, 4, 8):
        num = 1 << bits
        indices = RNG.integers(0, num, (H, W), np.uint8)
        digits = (indices[..., None] >> np.arange(bits - 1, -1, -1, dtype=np.uint8)) & 1
        rows = np.packbits(digits.reshape(H, -1), axis=1)
        palette = RNG.integers(0, 256, (num, 3))
        grey = np.repeat(RNG.integers(0, 256, (num, 1)), 3, axis=1)
        for header in (12, 40, 124):
            with case(bits, header):
                assert (
                    decoded(bmp(rows, W, bits, palette=palette, header=header))[0]
                    == palette[indices]
                ).all()
                actual = decoded(bmp(rows, W, bits, palette=grey, header=header))[0]
                assert actual.shape == (H, W, 1) and (actual[..., 0] == grey[indices][..., 0]).all()
        short = bmp(rows, W, bits, palette=palette[:-1])
        assert "palette" in refusal(short).detail
    # Pillow takes these palettes for greys of 8 bits and of 1 bit.
    four = np.repeat(np.arange(16)[:, None], 3, axis=1)
    assert (
        "biClrUsed" in refusal(bmp(np.zeros((H, W // 2 + 1), np.uint8), W, 4, palette=four)).detail
    )
    assert (
        "biClrUsed" in refusal(bmp(np.ones((H, W), np.uint8), W, 8, palette=four[:2] * 255)).detail
    )


def test_pillow_writes_bmp_that_is_read() -> None:
    for array in (RGB, RGB[..., 0], RGB[..., 0] > 127):
        written = io.BytesIO()
        Image.fromarray(array).save(written, "BMP")
        expected = array * np.uint8(255) if array.dtype == bool else array
        actual = decoded(written.getvalue())[0]
        assert (actual.squeeze() == expected).all()


def test_other_encodings_of_bmp_and_gif_are_refused() -> None:
    rows = np.zeros((H, 2 * W), np.uint8)
    assert "biBitCount" in refusal(bmp(rows, W, 16)).detail
    four = np.zeros((H, 4 * W), np.uint8)
    alpha = MASKS[:12] + struct.pack("<I", 0xFF000000)
    assert (
        "transparency" in refusal(bmp(four, W, 32, header=108, compression=3, masks=alpha)).detail
    )
    other = struct.pack("<III", 0xFF, 0xFF00, 0xFF0000)
    assert "masks" in refusal(bmp(four, W, 32, compression=3, masks=other)).detail
    for compression in (1, 2, 4, 5):
        assert (
            "biCompression"
            in refusal(bmp(four, W, 8, palette=np.zeros((256, 3)), compression=compression)).detail
        )
    whole = bmp(RGB.reshape(H, -1), W, 24)
    assert refusal(whole[:-5]).reason is Reason.TRUNCATED
    assert refusal(whole[:40]).reason is Reason.TRUNCATED
    huge = whole[:18] + struct.pack("<ii", 1 << 20, 1 << 20) + whole[26:]
    assert refusal(huge).reason is Reason.TOO_LARGE
    gif = io.BytesIO()
    Image.fromarray(RGB[..., 0]).save(gif, "GIF")
    assert "GIF" in refusal(gif.getvalue()).detail
    for name, word in (("JPEG2000", "JPEG 2000"), ("AVIF", "AVIF")):
        written = io.BytesIO()
        Image.fromarray(RGB).save(written, name)
        assert word in refusal(written.getvalue()).detail
    assert refusal(b"BMI stands for something").reason is Reason.UNKNOWN


def test_images_of_formats_without_a_decoder_are_refused_by_name() -> None:
    analyze = struct.pack("<i", 348) + bytes(344)
    for name, data, word in (
        ("a.nrrd", b"NRRD0004\ntype: short\n", "NRRD"),
        ("a.mha", b"ObjectType = Image\nNDims = 3\n", "MetaImage"),
        ("a.mhd", b"NDims = 3\nDimSize = 4 4 4\n", "MetaImage"),
        ("a.pgm", b"P5 2 2 255\n1234", "PGM"),
        ("a.ppm", b"P6\n# GIMP\n2 2\n255\n", "PPM"),
        ("a.pam", b"P7\nWIDTH 2\n", "PGM"),
        ("a.psd", b"8BPS\0\1" + bytes(20), "Photoshop"),
        ("a.hdr", analyze, "ANALYZE"),
        ("a.hdr", analyze[3::-1] + analyze[4:], "ANALYZE"),
    ):
        with case(name=name, word=word):
            with pytest.raises(ImageError) as caught:
                list(decode(FileContent(None, data, name)))
            assert caught.value.reason is Reason.UNSUPPORTED and word in caught.value.detail
    for name, data in (
        ("a", b"P5 is a protein"),
        ("a", b"P2P network"),
        ("a.bin", analyze),
        ("a.txt", b"Object: x"),
    ):
        with case(name=name, data=data[:9]):
            with pytest.raises(ImageError) as caught:
                list(decode(FileContent(None, data, name)))
            assert caught.value.reason is Reason.UNKNOWN


def test_pixels_of_bmp_that_are_not_square_have_spacings() -> None:
    for density, spacing in (((3000, 3000), None), ((4000, 2000), (0.5, 0.25)), ((0, 0), None)):
        (picture,) = decode(FileContent(None, bmp(RGB.reshape(H, -1), W, 24, density=density), "a"))
        assert isinstance(picture, DecodedPicture) and picture.spacing == spacing
