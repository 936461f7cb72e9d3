import io
import struct
import zlib
from pathlib import Path

import numpy as np
import png as pypng
from PIL import Image

from ddm.images.content import FileContent
from ddm.images.formats import decode
from ddm.images.picture import DecodedPicture
from ddm.images.reasons import Flag, ImageError, Reason
from tests.support.case import case
from tests.support.decoding import decoded_picture, decoding_refusal, exif_of_orientation
from tests.support.png_files import SIGNATURE, encode_png, png_chunk

H = 19
W = 27
GREY = 0
RGB = 2
PALETTE = 3
GREY_ALPHA = 4
RGB_ALPHA = 6
CHANNELS = {GREY: 1, RGB: 3, PALETTE: 1, GREY_ALPHA: 2, RGB_ALPHA: 4}
KINDS = [(GREY, depth) for depth in (1, 2, 4, 8, 16)] + [
    (colour, depth) for colour in (RGB, GREY_ALPHA, RGB_ALPHA) for depth in (8, 16)
]


def noise(channels: int, depth: int) -> np.ndarray:
    return np.random.default_rng(depth).integers(0, 1 << depth, (H, W, channels), np.uint16)


def values(data: bytes) -> np.ndarray:
    return np.moveaxis(decoded_picture(data).values, 0, -1)


def on_screen(samples: np.ndarray, depth: int, colour: int) -> np.ndarray:
    """Return what section 13 of the standard shows: alpha over black, few bits spread evenly."""
    top = (1 << depth) - 1
    wide = samples.astype(np.int64)
    if colour in (GREY_ALPHA, RGB_ALPHA):
        wide = (2 * wide[..., :-1] * wide[..., -1:] + top) // (2 * top)
    return wide * (255 // top) if depth < 8 else wide


def test_every_colour_type_depth_and_interlace_method_is_read_to_the_value(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    for colour, depth in KINDS:
        samples = noise(CHANNELS[colour], depth)
        for interlace in (False, True):
            with case(colour, depth, interlace):
                path.write_bytes(
                    encode_png(samples, depth, colour, interlace=interlace, idat_bytes=100)
                )
                actual = decoded_picture(path.read_bytes())
                assert (
                    np.moveaxis(actual.values, 0, -1) == on_screen(samples, depth, colour)
                ).all()
                assert actual.full == (0, 65535 if depth == 16 else 255)
                (from_path,) = decode(FileContent.of(path))
                assert (
                    isinstance(from_path, DecodedPicture)
                    and (from_path.values == actual.values).all()
                )


def test_every_size_up_to_a_pass_of_interlacing_is_read() -> None:
    samples = noise(3, 16)
    for height in range(1, 10):
        for width in range(1, 10):
            with case(height, width):
                part = samples[:height, :width]
                assert (values(encode_png(part, 16, RGB, interlace=True)) == part).all()


def test_palettes_are_looked_up_with_their_transparency() -> None:
    rng = np.random.default_rng(0)
    for depth in (1, 2, 4, 8):
        num = (1 << depth) - 1
        indices = noise(1, depth) % num
        colours = rng.integers(0, 256, (num, 3))
        alpha = rng.integers(0, 256, num // 2)
        whole = np.concatenate([alpha, np.full(num - len(alpha), 255)])
        clear = (2 * colours * whole[:, None] + 255) // 510
        plte = (b"PLTE", colours.astype(np.uint8).tobytes())
        for interlace in (False, True):
            with case(depth, interlace):
                data = encode_png(indices, depth, PALETTE, before=[plte], interlace=interlace)
                assert (values(data) == colours[indices[..., 0]]).all()
                trns = (b"tRNS", alpha.astype(np.uint8).tobytes())
                data = encode_png(indices, depth, PALETTE, before=[plte, trns], interlace=interlace)
                assert (values(data) == clear[indices[..., 0]]).all()
        beyond = indices.copy()
        beyond[3, 4] = num
        assert "PLTE" in decoding_refusal(encode_png(beyond, depth, PALETTE, before=[plte])).detail
    assert "PLTE" in decoding_refusal(encode_png(noise(1, 8), 8, PALETTE)).detail


def test_one_transparent_colour_is_black_at_every_depth() -> None:
    for colour, depth in KINDS[:7]:
        if colour not in (GREY, RGB):
            continue
        samples = noise(CHANNELS[colour], depth)
        clear = samples[5, 6]
        expected = np.where(
            (samples == clear).all(-1, keepdims=True), 0, on_screen(samples, depth, colour)
        )
        with case(colour, depth):
            data = encode_png(
                samples, depth, colour, before=[(b"tRNS", clear.astype(">u2").tobytes())]
            )
            assert (values(data) == expected).all()
    # A colour that shares only the upper bytes, or one sample, is not transparent.
    samples = np.array([[[0x1234, 0x1234, 0x1234], [0x1235, 0x1234, 0x1234]]], np.uint16)
    data = encode_png(samples, 16, RGB, before=[(b"tRNS", samples[0, 0].astype(">u2").tobytes())])
    assert (values(data) == [[[0, 0, 0], [0x1235, 0x1234, 0x1234]]]).all()
    assert (
        "tRNS"
        in decoding_refusal(encode_png(noise(1, 8), 8, GREY, before=[(b"tRNS", b"\0")])).detail
    )


def test_orientation_is_applied_to_every_kind_before_and_behind_the_pixels() -> None:
    plte = (b"PLTE", bytes(range(3 * 16)))
    for colour, depth in [*KINDS, (PALETTE, 4)]:
        samples = noise(CHANNELS[colour], depth)
        palette = [plte] if colour == PALETTE else []
        straight = values(encode_png(samples, depth, colour, before=palette))
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
            9: straight,
        }
        for orientation, expected in turns.items():
            with case(colour, depth, orientation):
                block = (b"eXIf", exif_of_orientation(orientation, "<>"[orientation % 2]))
                assert (
                    values(encode_png(samples, depth, colour, before=[*palette, block])) == expected
                ).all()
                assert (
                    values(encode_png(samples, depth, colour, before=palette, after=[block]))
                    == expected
                ).all()
    assert (
        "EXIF"
        in decoding_refusal(
            encode_png(noise(1, 8), 8, GREY, before=[(b"eXIf", b"II*\0\xff\xff\xff\0")])
        ).detail
    )


def test_chunks_on_colour_and_few_significant_bits_change_no_value() -> None:
    samples = noise(3, 8)
    profile = b"name\0\0" + zlib.compress(b"no profile")
    chunks = [
        (b"gAMA", struct.pack(">I", 100000)),
        (b"iCCP", profile),
        (b"sBIT", bytes([5, 5, 5])),
        (b"sRGB", b"\0"),
    ]
    for one in chunks:
        with case(one[0]):
            actual = decoded_picture(encode_png(samples, 8, RGB, before=[one]))
            assert (np.moveaxis(actual.values, 0, -1) == samples).all() and actual.full == (0, 255)
    background = (b"bKGD", struct.pack(">HHH", 255, 255, 255))
    assert (
        values(encode_png(noise(4, 8), 8, RGB_ALPHA, before=[background]))
        == on_screen(noise(4, 8), 8, RGB_ALPHA)
    ).all()


def test_animations_and_apples_variant_are_refused() -> None:
    frames = [Image.fromarray(noise(1, 8)[..., 0].astype(np.uint8) // part) for part in (1, 2)]
    for default_image in (False, True):
        written = io.BytesIO()
        frames[0].save(
            written, "PNG", save_all=True, append_images=frames, default_image=default_image
        )
        assert "acTL" in decoding_refusal(written.getvalue()).detail
    plain = encode_png(noise(1, 8), 8, GREY)
    assert "CgBI" in decoding_refusal(SIGNATURE + png_chunk(b"CgBI", bytes(4)) + plain[8:]).detail


def test_pixels_that_are_not_square_have_spacings() -> None:
    for per_column, per_row, unit, spacing in (
        (3000, 3000, 1, None),
        (4000, 2000, 1, (0.5, 0.25)),
        (4000, 2000, 0, (2.0, 1.0)),
        (0, 2000, 1, None),
    ):
        with case(per_column, per_row, unit):
            data = encode_png(
                noise(1, 8),
                8,
                GREY,
                before=[(b"pHYs", struct.pack(">IIB", per_column, per_row, unit))],
            )
            assert decoded_picture(data).spacing == spacing


def test_every_flipped_byte_that_matters_is_noticed() -> None:
    samples = noise(3, 16)[:5, :5]
    whole = encode_png(
        samples, 16, RGB, before=[(b"tRNS", bytes(6)), (b"eXIf", exif_of_orientation(6))]
    )
    expected = values(whole)
    for position in range(8, len(whole)):
        data = bytearray(whole)
        data[position] ^= 0x20
        try:
            actual = values(bytes(data))
        except ImageError:
            continue
        with case(position):
            assert actual.shape == expected.shape and (actual == expected).all()


def test_broken_files_have_their_true_reason() -> None:
    samples = noise(3, 8)
    whole = encode_png(samples, 8, RGB)
    for length in range(60, len(whole) - 1, 100):
        with case(length):
            assert decoding_refusal(whole[:length]).reason is Reason.TRUNCATED
    assert (values(whole + b"PK\x03\x04 another file") == samples).all()

    def with_pixels(raw: bytes, **sizes: int) -> bytes:
        header = struct.pack(
            ">IIBBBBB", sizes.get("width", W), sizes.get("height", H), 8, 2, 0, 0, 0
        )
        return (
            SIGNATURE
            + png_chunk(b"IHDR", header)
            + png_chunk(b"IDAT", raw)
            + png_chunk(b"IEND", b"")
        )

    rows = b"".join(b"\0" + row.astype(np.uint8).tobytes() for row in samples.reshape(H, -1))
    assert (values(with_pixels(zlib.compress(rows))) == samples).all()
    for raw, reason in (
        (zlib.compress(rows[:-1]), (Reason.TRUNCATED, Reason.DAMAGED)),
        (zlib.compress(rows)[:-50], (Reason.TRUNCATED, Reason.DAMAGED)),
        (zlib.compress(b"\7" + rows[1:]), (Reason.DAMAGED,)),
        (b"no stream", (Reason.DAMAGED, Reason.TRUNCATED)),
    ):
        with case(raw[:10]):
            assert decoding_refusal(with_pixels(raw)).reason in reason
    assert (
        decoding_refusal(with_pixels(b"", width=1 << 17, height=1 << 17)).reason is Reason.TOO_LARGE
    )
    assert decoding_refusal(with_pixels(b"", width=0)).reason is Reason.DAMAGED
    assert (
        decoding_refusal(SIGNATURE + png_chunk(b"IHDR", bytes(13)) + png_chunk(b"IEND", b"")).reason
        is Reason.DAMAGED
    )
    bad_depth = (
        SIGNATURE
        + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 4, 2, 0, 0, 0))
        + png_chunk(b"IEND", b"")
    )
    assert "IHDR" in decoding_refusal(bad_depth).detail
    assert (
        decoding_refusal(encode_png(samples, 8, RGB, before=[(b"ABCD", b"")])).reason
        is Reason.UNSUPPORTED
    )
    no_pixels = SIGNATURE + whole[8:33] + png_chunk(b"IEND", b"")
    assert decoding_refusal(no_pixels).reason is Reason.NO_PIXELS


def test_huge_texts_and_profiles_ask_for_no_memory_and_are_still_looked_at() -> None:
    samples = noise(3, 8)
    bomb = zlib.compress(bytes(1 << 24))
    texts = [
        (b"zTXt", b"a\0\0" + bomb),
        (b"iTXt", b"a\0\1\0\0\0" + bomb),
        (b"iCCP", b"a\0\0" + bomb),
    ]
    actual = decoded_picture(encode_png(samples, 8, RGB, before=texts))
    assert (np.moveaxis(actual.values, 0, -1) == samples).all() and not actual.flags
    for text in (
        (b"tEXt", b"Software\0Screenshot tool"),
        (b"zTXt", b"Comment\0\0" + zlib.compress(b"a screenshot")),
        (b"iTXt", b"Comment\0\1\0\0\0" + zlib.compress(b"a screenshot")),
        (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0<exif:UserComment>Screenshot</exif:UserComment>"),
    ):
        with case(text[0]):
            assert decoded_picture(encode_png(samples, 8, RGB, before=[text])).flags == {
                Flag.SCREENSHOT
            }
            assert not decoded_picture(encode_png(samples[..., :1], 8, GREY, before=[text])).flags


def test_pypng_and_pillow_write_what_is_read() -> None:
    for channels, options in ((1, {}), (2, {"alpha": True}), (3, {}), (4, {"alpha": True})):
        for interlace in (False, True):
            samples = noise(channels, 16)
            written = io.BytesIO()
            writer = pypng.Writer(
                W, H, greyscale=channels < 3, bitdepth=16, interlace=interlace, **options
            )
            (writer.write_array if interlace else writer.write)(
                written, samples.ravel().tolist() if interlace else samples.reshape(H, -1).tolist()
            )
            colour = {1: GREY, 2: GREY_ALPHA, 3: RGB, 4: RGB_ALPHA}[channels]
            with case(channels, interlace):
                assert (values(written.getvalue()) == on_screen(samples, 16, colour)).all()
    for array in (noise(1, 8).astype(np.uint8), noise(3, 8).astype(np.uint8), noise(1, 16)):
        written = io.BytesIO()
        Image.fromarray(array.squeeze()).save(written, "PNG")
        assert (values(written.getvalue()) == array).all()
