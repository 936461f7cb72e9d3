import io
import struct
import zlib
from pathlib import Path

import numpy as np
import png
import pytest
import tifffile
from PIL import Image, ImageDraw, ImageFont

from ddm.images.content import FileContent
from ddm.images.formats import decode
from ddm.images.picture import DecodedPicture, DecodeLimits
from ddm.images.reasons import Flag, ImageError, Reason
from tests.support.dicom_files import waves


def pictures(path: Path) -> list[DecodedPicture]:
    return [item for item in decode(FileContent.of(path)) if isinstance(item, DecodedPicture)]


def values_of(path: Path) -> np.ndarray:
    (picture,) = pictures(path)
    assert not picture.flags
    return picture.values


def reason_of(path: Path, limits: DecodeLimits | None = None) -> Reason:
    with pytest.raises(ImageError) as caught:
        list(decode(FileContent.of(path), limits))
    return caught.value.reason


def colours(high: int, dtype: type, channels: int = 3) -> np.ndarray:
    return np.stack(
        [np.roll(waves(high=high, dtype=dtype), 3 * channel, 1) for channel in range(channels)], -1
    )


GREY = waves(high=255, dtype=np.uint8)
RGB = colours(255, np.uint8)
RGBA = colours(255, np.uint8, 4)


@pytest.mark.parametrize(
    ("ending", "options"), [("png", {}), ("tiff", {}), ("webp", {"lossless": True})]
)
def test_eight_bit_colours_are_read_to_the_value(
    ending: str, options: dict, tmp_path: Path
) -> None:
    path = tmp_path / f"image.{ending}"
    Image.fromarray(RGB).save(path, **options)
    assert (values_of(path) == np.moveaxis(RGB, -1, 0)).all()


def test_greys_of_each_depth_are_read_to_the_value(tmp_path: Path) -> None:
    deep = waves(high=65535)
    for ending, array in (("png", GREY), ("tiff", GREY), ("png", deep), ("tiff", deep)):
        path = tmp_path / f"image.{ending}"
        Image.fromarray(array).save(path)
        values = values_of(path)
        assert values.dtype == array.dtype and (values[0] == array).all()
    Image.fromarray(GREY).save(tmp_path / "image.jpg", quality=95)
    values = values_of(tmp_path / "image.jpg")
    assert (values[0] == np.asarray(Image.open(tmp_path / "image.jpg"))).all()


def test_sixteen_bit_colours_keep_all_bits(tmp_path: Path) -> None:
    deep = colours(65535, np.uint16)
    with (tmp_path / "image.png").open("wb") as handle:
        png.Writer(40, 48, greyscale=False, bitdepth=16).write(
            handle, deep.reshape(48, -1).tolist()
        )
    tifffile.imwrite(tmp_path / "image.tiff", deep, photometric="rgb")
    for name in ("image.png", "image.tiff"):
        assert (values_of(tmp_path / name) == np.moveaxis(deep, -1, 0)).all()
    clear = np.concatenate([deep, np.full((48, 40, 1), 32768, np.uint16)], -1)
    with (tmp_path / "clear.png").open("wb") as handle:
        png.Writer(40, 48, greyscale=False, bitdepth=16, alpha=True).write(
            handle, clear.reshape(48, -1).tolist()
        )
    expected = np.round(np.moveaxis(deep, -1, 0) * (32768 / 65535))
    assert (values_of(tmp_path / "clear.png") == expected).all()


def test_transparency_is_laid_over_black_and_palettes_become_rgb(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    Image.fromarray(RGBA).save(path)
    expected = RGBA[..., :3].astype(float) * RGBA[..., 3:] / 255
    assert np.abs(values_of(path) - np.moveaxis(expected, -1, 0)).max() <= 1
    palette = Image.fromarray(RGB).quantize(17)
    palette.save(path)
    assert (values_of(path) == np.moveaxis(np.asarray(palette.convert("RGB")), -1, 0)).all()
    Image.fromarray(np.stack([GREY, GREY], -1), "LA").save(path)
    assert values_of(path).shape == (1, 48, 40)


def test_white_is_zero_is_turned_at_sixteen_bits(tmp_path: Path) -> None:
    deep = waves(high=65535)
    tifffile.imwrite(tmp_path / "image.tiff", deep, photometric="miniswhite")
    assert (values_of(tmp_path / "image.tiff")[0] == 65535 - deep).all()


def test_white_is_zero_is_turned_at_floating_point(tmp_path: Path) -> None:
    floats = waves(high=1000).astype(np.float32) / 8
    tifffile.imwrite(tmp_path / "image.tiff", floats, photometric="miniswhite")
    assert (values_of(tmp_path / "image.tiff")[0] == floats.max() + floats.min() - floats).all()


def test_a_tiff_keeps_the_sign_of_its_values(tmp_path: Path) -> None:
    numbers = waves(high=199).astype(np.int64) - 100
    for dtype, values in (
        (np.int8, numbers),
        (np.int16, numbers),
        (np.int32, numbers),
        (np.uint32, numbers + 4e9),
    ):
        for order in "<>" if dtype != np.uint32 else "<":
            tifffile.imwrite(
                tmp_path / "image.tiff",
                values.astype(dtype),
                photometric="minisblack",
                byteorder=order,
            )
            (picture,) = pictures(tmp_path / "image.tiff")
            assert (picture.values[0] == values.astype(dtype).astype(picture.values.dtype)).all(), (
                dtype
            )
            assert picture.full == {np.int8: (-128, 127), np.int16: (-32768, 32767)}.get(dtype)


def test_orientation_of_a_camera_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(GREY).save(tmp_path / "image.png", exif=exif)
    assert (values_of(tmp_path / "image.png")[0] == np.rot90(GREY, -1)).all()


def test_pages_are_images_of_their_own_and_reduced_ones_thumbnails(tmp_path: Path) -> None:
    pages = np.stack([GREY, 255 - GREY])
    tifffile.imwrite(tmp_path / "pages.tiff", pages, photometric="minisblack")
    assert [
        (picture.values[0] == page).all()
        for picture, page in zip(pictures(tmp_path / "pages.tiff"), pages, strict=True)
    ]
    with tifffile.TiffWriter(tmp_path / "reduced.tiff") as writer:
        writer.write(GREY, photometric="minisblack")
        writer.write(GREY[::2, ::2], photometric="minisblack", subfiletype=1)
    (picture,) = pictures(tmp_path / "reduced.tiff")
    assert picture.flags == {Flag.THUMBNAIL} and picture.values.shape == (1, 48, 40)


def test_thumbnails_and_screenshots_are_flagged(tmp_path: Path) -> None:
    thumbnail = io.BytesIO()
    Image.fromarray(GREY).resize((10, 10)).save(thumbnail, "JPEG")
    plain = io.BytesIO()
    path = tmp_path / "image.jpg"
    Image.fromarray(GREY).save(plain, "JPEG")
    small = thumbnail.getvalue()
    ifd1 = struct.pack("<HHHIIHHIII", 2, 0x0201, 4, 1, 44, 0x0202, 4, 1, len(small), 0)
    exif = b"Exif\0\0II*\0" + struct.pack("<IHI", 8, 0, 14) + ifd1 + small
    data = plain.getvalue()
    path.write_bytes(data[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + data[2:])
    assert pictures(path)[0].flags == {Flag.THUMBNAIL}
    Image.new("RGB", (1280, 720)).save(tmp_path / "screen.png")
    assert pictures(tmp_path / "screen.png")[0].flags == {Flag.SCREENSHOT}


def test_text_is_suspected_in_bright_and_dark_letters_and_not_in_noise(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    smooth = np.asarray(
        Image.fromarray(waves((32, 32), high=180, dtype=np.uint8)).resize((256, 256))
    )
    for colour, size in ((255, 12), (255, 24), (0, 16)):
        image = Image.fromarray(smooth // 2 + 60)
        ImageDraw.Draw(image).text(
            (20, 100), "DOE JOHN 1961", fill=colour, font=ImageFont.load_default(size)
        )
        image.save(tmp_path / "image.png")
        assert pictures(tmp_path / "image.png")[0].flags == {Flag.SUSPECTED_TEXT}
    noise = [
        rng.normal(128, 30, (256, 256)).clip(0, 255),
        rng.integers(0, 256, (256, 256)),
        rng.exponential(20, (512, 512)).clip(0, 255),
    ]
    for values in (*noise, smooth):
        Image.fromarray(values.astype(np.uint8)).save(tmp_path / "image.png")
        assert not pictures(tmp_path / "image.png")[0].flags


def bomb(side: int) -> bytes:
    """Return a PNG of a few kilobytes that announces side x side greys."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(1000)))
        + chunk(b"IEND", b"")
    )


def test_broken_and_hostile_files_have_their_true_reason(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    Image.fromarray(RGB).save(path)
    whole = path.read_bytes()
    cases = {
        whole[: len(whole) // 2]: Reason.TRUNCATED,
        b"": Reason.EMPTY,
        b"notes on patients": Reason.UNKNOWN,
        b"PK\x03\x04" + bytes(100): Reason.ARCHIVE,
        bomb(100_000): Reason.TOO_LARGE,
    }
    for data, reason in cases.items():
        path.write_bytes(data)
        assert reason_of(path) is reason
    # two files in one: the picture alone is read
    path.write_bytes(whole + b"PK\x03\x04 a second file")
    assert (values_of(path) == np.moveaxis(RGB, -1, 0)).all()
    path.write_bytes(whole[:60] + bytes([whole[60] ^ 255]) + whole[61:])
    assert reason_of(path) in (Reason.DAMAGED, Reason.TRUNCATED)
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(path)
    assert reason_of(path, DecodeLimits(values=15)) is Reason.TOO_LARGE
    Image.fromarray(np.full((4, 4), np.nan, np.float32)).save(tmp_path / "image.tiff")
    assert reason_of(tmp_path / "image.tiff") is Reason.NOT_FINITE
