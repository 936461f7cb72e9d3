import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
import tifffile
from PIL import Image

from ddm.images.content import FileContent
from ddm.images.formats import decode
from ddm.images.picture import DecodedPicture, DecodeLimits
from ddm.images.reasons import Flag, ImageError, Reason
from tests.support.case import case
from tests.support.tiff_files import DEFLATE, JPEG, LZW, NONE, PACK_BITS, encode_tiff, tiff_page

H = 21
W = 37  # no multiples of a byte's bits, a tile or each other


def noise(dtype: Any = np.uint8, channels: int = 1, high: int | None = None) -> np.ndarray:
    rng = np.random.default_rng(channels)
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return rng.normal(0, 1000, (H, W, channels)).astype(kind)
    bounds = np.iinfo(kind)
    return rng.integers(
        bounds.min, bounds.max if high is None else high, (H, W, channels), kind, endpoint=True
    )


def decoded(data: bytes, limits: DecodeLimits | None = None) -> list[DecodedPicture | ImageError]:
    return list(decode(FileContent(None, data, "a.tif"), limits))


def picture(data: bytes) -> DecodedPicture:
    (picture,) = decoded(data)
    assert isinstance(picture, DecodedPicture)
    return picture


def values(data: bytes) -> np.ndarray:
    """Return (H, W, C)."""
    return np.moveaxis(picture(data).values, 0, -1)


def refusal(data: bytes, limits: DecodeLimits | None = None) -> ImageError:
    with pytest.raises(ImageError) as caught:
        decoded(data, limits)
    return caught.value


def turned(array: np.ndarray, orientation: int) -> np.ndarray:
    """Place each pixel of (H, W, C) where TIFF 6.0 says that it belongs on the screen."""
    height, width = array.shape[:2]
    swapped = orientation >= 5
    actual = np.zeros((width, height, *array.shape[2:]) if swapped else array.shape, array.dtype)
    for row in range(height):
        for column in range(width):
            up = height - 1 - row
            left = width - 1 - column
            place = {
                1: (row, column),
                2: (row, left),
                3: (up, left),
                4: (up, column),
                5: (column, row),
                6: (column, up),
                7: (left, up),
                8: (left, row),
            }[orientation]
            actual[place] = array[row, column]
    return actual


TYPES = (
    np.uint8,
    np.uint16,
    np.uint32,
    np.int8,
    np.int16,
    np.int32,
    np.float16,
    np.float32,
    np.float64,
)


def layouts() -> Iterator[dict[str, Any]]:
    for segments in ({}, {"rows": 4}, {"tile": (16, 16)}):
        for compression in (NONE, DEFLATE, LZW, PACK_BITS):
            for predictor in (1, 2, 3) if compression in (DEFLATE, LZW) else (1,):
                yield {"compression": compression, "predictor": predictor, **segments}


def test_every_type_layout_byte_order_and_compression_is_read_to_the_value() -> None:
    for dtype in TYPES:
        for channels in (1, 3):
            array = noise(dtype, channels)
            expected = (
                array.astype(np.float32)
                if array.dtype.kind == "f" or array.dtype == np.uint32
                else array
            )
            for layout in layouts():
                if layout["predictor"] == 3 and array.dtype.kind != "f":
                    continue
                for number, order in enumerate("<>"):
                    with case(dtype, channels, order, **layout):
                        options = {
                            "planar": 1 + number,
                            "order": order,
                            "photometric": 2 if channels == 3 else 1,
                        }
                        data = encode_tiff(
                            tiff_page(array, **options, **layout),
                            order=order,
                            big=layout["compression"] == LZW,
                        )
                        assert (values(data).astype(expected.dtype) == expected).all()


def test_few_and_odd_bits_are_read_to_the_value_in_either_byte_order() -> None:
    for bits in range(1, 16):
        if bits == 8:
            continue
        top = (1 << bits) - 1
        for channels in (1, 3):
            array = noise(np.uint8 if bits < 8 else np.uint16, channels, top)
            spread = 255 // top if bits in (1, 2, 4) else 1
            for layout in (
                {},
                {"tile": (16, 16), "order": ">", "compression": LZW},
                {"planar": 2, "rows": 5},
            ):
                with case(bits, channels, **layout):
                    made = tiff_page(
                        array, bits=bits, photometric=2 if channels == 3 else 1, **layout
                    )
                    actual = picture(encode_tiff(made, order=layout.get("order", "<")))
                    assert (np.moveaxis(actual.values, 0, -1) == array.astype(int) * spread).all()
                    assert actual.full == (0, top * spread)


def test_orientation_is_applied_to_every_type_from_path_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    kinds = [(noise(dtype, channels), {}) for dtype in TYPES for channels in (1, 3)]
    kinds += [
        (noise(np.uint16, 1, 4095), {"bits": 12}),
        (noise(np.uint8, 1, 1), {"bits": 1}),
        (noise(), {"bits": 8}),
    ]
    for array, options in kinds:
        channels = array.shape[-1]
        straight = values(
            encode_tiff(tiff_page(array, photometric=2 if channels == 3 else 1, **options))
        )
        for orientation in range(1, 9):
            with case(array.dtype, channels, orientation=orientation):
                made = tiff_page(
                    array, photometric=2 if channels == 3 else 1, tags={274: orientation}, **options
                )
                path.write_bytes(encode_tiff(made))
                expected = turned(straight, orientation)
                assert (values(path.read_bytes()) == expected).all()
                (picture,) = decode(FileContent.of(path))
                assert isinstance(picture, DecodedPicture)
                assert (np.moveaxis(picture.values, 0, -1) == expected).all()


def test_orientation_is_applied_to_palettes_inks_and_transparency() -> None:
    colours = noise(np.uint16, 3, 255)[:16, 0] * 257
    kinds = (
        tiff_page(
            noise(np.uint8, 1, 15), bits=4, photometric=3, tags={320: colours.T.ravel().tolist()}
        ),
        tiff_page(noise(np.uint8, 4), photometric=5),
        tiff_page(noise(np.uint16, 4), photometric=2, extra=[2]),
        tiff_page(noise(np.uint16, 1), photometric=0),
    )
    for number, made in enumerate(kinds):
        straight = values(encode_tiff(made))
        for orientation in range(1, 9):
            with case(number, orientation):
                tagged = {"segments": made["segments"], "tags": made["tags"] | {274: orientation}}
                assert (values(encode_tiff(tagged)) == turned(straight, orientation)).all()


def test_extra_samples_say_what_a_further_sample_is() -> None:
    for dtype in (np.uint8, np.uint16):
        array = noise(dtype, 4)
        top = np.iinfo(dtype).max
        colours = array[..., :3]
        alpha = array[..., 3:].astype(float)
        over_black = np.floor(colours * alpha / top + 0.5)
        for planar in (1, 2):
            with case(dtype, planar):
                made = {"photometric": 2, "planar": planar}
                assert (values(encode_tiff(tiff_page(array, extra=[0], **made))) == colours).all()
                assert (values(encode_tiff(tiff_page(array, extra=[1], **made))) == colours).all()
                assert (
                    values(encode_tiff(tiff_page(array, extra=[2], **made))) == over_black
                ).all()
                five = np.concatenate([colours, array[..., :1], array[..., 3:]], -1)
                assert (
                    values(encode_tiff(tiff_page(five, extra=[0, 2], **made))) == over_black
                ).all()
        grey = array[..., [0, 3]]
        assert (values(encode_tiff(tiff_page(grey, extra=[2]))) == over_black[..., :1]).all()
        assert (values(encode_tiff(tiff_page(grey, extra=[1]))) == grey[..., :1]).all()
        inverse = np.floor((top - grey[..., :1].astype(float)) * alpha / top + 0.5)
        assert (values(encode_tiff(tiff_page(grey, extra=[2], photometric=0))) == inverse).all()


def test_samples_without_a_meaning_are_refused_by_the_tag() -> None:
    rgb = {"photometric": 2}
    for made, tag in (
        (tiff_page(noise(channels=4), **rgb), "ExtraSamples"),
        (tiff_page(noise(channels=4), extra=[3], **rgb), "ExtraSamples"),
        (tiff_page(noise(channels=5), extra=[1, 2], **rgb), "ExtraSamples"),
        (tiff_page(noise(channels=4), extra=[0, 0], **rgb), "ExtraSamples"),
        (tiff_page(noise(channels=5), extra=[0] * 4), "ExtraSamples"),
        (tiff_page(noise(np.float32, 4), extra=[2], **rgb), "ExtraSamples"),
        (tiff_page(noise(channels=2), extra=[1], photometric=0), "ExtraSamples"),
        (tiff_page(noise(channels=2), photometric=2), "SamplesPerPixel"),
    ):
        with case(made["tags"]):
            assert tag in refusal(encode_tiff(made)).detail


def test_white_is_zero_is_turned_for_every_type() -> None:
    for dtype in TYPES:
        array = noise(dtype)
        if array.dtype.kind == "f" or array.itemsize == 4:
            wide = array.astype(np.float64)
            expected = (wide.max() + wide.min() - wide).astype(np.float32)
        elif array.dtype.kind == "i":
            expected = -1 - array.astype(int)
        else:
            expected = np.iinfo(dtype).max - array.astype(int)
        with case(dtype):
            actual = values(encode_tiff(tiff_page(array, photometric=0)))
            assert np.allclose(
                actual, expected, rtol=1e-3 if dtype == np.float16 else 1e-6, atol=1e-3
            )
    for bits, top in ((1, 255), (2, 255), (4, 255), (12, 4095)):
        array = noise(np.uint16 if bits > 8 else np.uint8, 1, (1 << bits) - 1)
        spread = 255 // ((1 << bits) - 1) or 1
        with case(bits):
            assert (
                values(encode_tiff(tiff_page(array, bits=bits, photometric=0)))
                == top - array.astype(int) * spread
            ).all()


def test_palettes_keep_eight_bits_or_sixteen_as_their_map_has_them() -> None:
    rng = np.random.default_rng(0)
    for bits in (1, 2, 4, 8):
        num = 1 << bits
        indices = noise(np.uint8, 1, num - 1)
        small = rng.integers(1, 256, (num, 3))
        deep = rng.integers(0, 65536, (num, 3))
        deep[0] = 256 * 3 + 7
        for map_of_16, expected, full in (
            (small * 257, small, 255),
            (small * 256, small, 255),
            (deep, deep, 65535),
        ):
            with case(bits, full):
                made = tiff_page(
                    indices, bits=bits, photometric=3, tags={320: map_of_16.T.ravel().tolist()}
                )
                actual = picture(encode_tiff(made))
                assert (np.moveaxis(actual.values, 0, -1) == expected[indices[..., 0]]).all()
                assert actual.full == (0, full)
        made = tiff_page(indices, bits=bits, photometric=3, tags={320: small.T.ravel().tolist()})
        assert "ColorMap" in refusal(encode_tiff(made)).detail
    assert (
        "ColorMap"
        in refusal(encode_tiff(tiff_page(noise(), photometric=3, tags={320: [0] * 30}))).detail
    )


def test_inks_become_rgb_by_their_formula() -> None:
    for dtype in (np.uint8, np.uint16):
        inks = noise(dtype, 4)
        top = np.iinfo(dtype).max
        light = (top - inks.astype(float)) / top
        expected = light[..., :3] * light[..., 3:] * top
        for planar in (1, 2):
            assert (
                np.abs(
                    values(encode_tiff(tiff_page(inks, photometric=5, planar=planar))) - expected
                ).max()
                <= 0.5001
            )
        assert (
            values(
                encode_tiff(
                    tiff_page(np.concatenate([inks, inks[..., :1]], -1), photometric=5, extra=[0])
                )
            )
            >= 0
        ).all()
    assert (
        "InkSet"
        in refusal(encode_tiff(tiff_page(noise(channels=4), photometric=5, tags={332: 2}))).detail
    )
    assert (
        "DotRange"
        in refusal(
            encode_tiff(tiff_page(noise(channels=4), photometric=5, tags={336: [16, 240]}))
        ).detail
    )


def test_fill_order_is_obeyed_for_one_bit_and_refused_else() -> None:
    bits = noise(np.uint8, 1, 1)
    made = tiff_page(bits, bits=1, tags={266: 2})
    reverse = bytes(int(f"{number:08b}"[::-1], 2) for number in range(256))
    made["segments"] = [segment.translate(reverse) for segment in made["segments"]]
    assert (values(encode_tiff(made)) == bits * 255).all()
    assert "FillOrder" in refusal(encode_tiff(tiff_page(noise(), tags={266: 2}))).detail
    assert (
        "FillOrder"
        in refusal(encode_tiff(tiff_page(bits, bits=1, compression=DEFLATE, tags={266: 2}))).detail
    )


def jpeg_of(array: np.ndarray, **options: Any) -> bytes:
    written = io.BytesIO()
    Image.fromarray(array.squeeze()).save(written, "JPEG", quality=100, subsampling=0, **options)
    return written.getvalue()


def with_jfif(stream: bytes) -> bytes:
    """Return a stream of RGB that claims YCbCr, by the marker of JFIF."""
    return stream[:2] + b"\xff\xe0\0\x10JFIF\0\1\1\0\0\1\0\1\0\0" + stream[2:]


def test_jpeg_has_the_colours_of_its_page_whatever_its_own_markers_say() -> None:
    ramp = np.linspace(0, 250, 48 * 64).reshape(48, 64)
    rgb = np.stack([ramp, 255 - ramp, ramp[::-1]], -1).astype(np.uint8)
    for photometric, stream, expected in (
        (6, jpeg_of(rgb), rgb),
        (2, jpeg_of(rgb, keep_rgb=True), rgb),
        (2, with_jfif(jpeg_of(rgb, keep_rgb=True)), rgb),
        (1, jpeg_of(rgb[..., 0]), rgb[..., :1]),
        (0, jpeg_of(rgb[..., 0]), 255 - rgb[..., :1]),
    ):
        with case(photometric):
            num = expected.shape[-1]
            tags: dict[int, Any] = {
                256: 64,
                257: 48,
                258: [8] * num,
                259: JPEG,
                262: photometric,
                277: num,
            }
            tags |= {322: 64, 323: 48}
            actual = values(encode_tiff({"segments": [stream], "tags": tags}))
            assert np.abs(actual.astype(int) - expected).max() <= 3
            assert (
                values(encode_tiff({"segments": [stream], "tags": tags | {257: 47}})) == actual[:47]
            ).all()
    assert (
        refusal(encode_tiff({"segments": [stream] * 2, "tags": tags | {322: 32}})).reason
        is Reason.DAMAGED
    )


def test_jpeg_tables_are_put_before_each_stream() -> None:
    ramp = np.linspace(0, 250, 48 * 64).reshape(48, 64).astype(np.uint8)
    written = io.BytesIO()
    Image.fromarray(ramp).save(written, "TIFF", compression="jpeg", quality=100, tiffinfo={278: 16})
    assert b"\x5b\x01\x07\x00" in written.getvalue()  # tag 347, JPEGTables
    assert np.abs(values(written.getvalue())[..., 0].astype(int) - ramp).max() <= 3


def test_what_is_not_decoded_is_refused_by_the_tag() -> None:
    grey = tiff_page(noise())
    for tags, tag in (
        ({262: 8, 277: 3, 258: [8] * 3}, "PhotometricInterpretation"),
        ({262: 9, 277: 3, 258: [8] * 3}, "PhotometricInterpretation"),
        ({262: 6, 277: 3, 258: [8] * 3}, "PhotometricInterpretation"),
        ({262: 32803}, "PhotometricInterpretation"),
        ({262: 4}, "PhotometricInterpretation"),
        ({259: 4}, "Compression"),
        ({259: 6}, "Compression"),
        ({259: 50000}, "Compression"),
        ({259: 34925}, "Compression"),
        ({274: [6, 6]}, "Orientation"),
        ({274: (1, b"\6")}, "Orientation"),
        ({274: b"6\0"}, "Orientation"),
        ({256: b"37\0"}, "ImageWidth"),
        ({258: 24}, "BitsPerSample"),
        ({258: [8, 4], 277: 2, 338: [0]}, "BitsPerSample"),
        ({258: 64, 339: 6}, "SampleFormat"),
        ({258: [8] * 3, 277: 3, 262: 2, 339: [1, 2, 1]}, "SampleFormat"),
        ({317: 2}, "Predictor"),
        ({317: 7, 259: 8}, "Predictor"),
        ({284: 3}, "PlanarConfiguration"),
        ({266: 7}, "FillOrder"),
        ({254: 4}, "NewSubfileType"),
        ({32997: 3}, "ImageDepth"),
    ):
        with case(**{tag: tags}):
            made = {"segments": grey["segments"], "tags": grey["tags"] | tags}
            assert tag in refusal(encode_tiff(made)).detail


def test_pages_are_images_of_their_own_whatever_their_shapes_and_a_bad_one_alone_is_lost() -> None:
    first = noise()
    second = noise(np.uint16, 3)[:9]
    bad = tiff_page(noise(), compression=DEFLATE)
    bad["segments"] = [b"nothing"]
    actual = decoded(
        encode_tiff(
            tiff_page(first),
            bad,
            tiff_page(second, photometric=2, tags={274: 6}),
            order="<",
            big=True,
        )
    )
    assert isinstance(actual[0], DecodedPicture) and (actual[0].values[0] == first[..., 0]).all()
    assert isinstance(actual[1], ImageError) and actual[1].reason is Reason.DAMAGED
    assert isinstance(actual[2], DecodedPicture)
    assert (np.moveaxis(actual[2].values, 0, -1) == turned(second, 6)).all()
    actual = decoded(
        encode_tiff(tiff_page(first), tiff_page(first, tags={274: [6, 6]}), tiff_page(first))
    )
    assert isinstance(actual[1], ImageError) and "Orientation" in actual[1].detail
    assert [isinstance(image, DecodedPicture) for image in actual] == [True, False, True]
    assert (
        refusal(encode_tiff(tiff_page(first), tiff_page(first)), DecodeLimits(pictures=1)).reason
        is Reason.TOO_LARGE
    )


def test_reduced_pages_and_sub_directories_are_thumbnails(tmp_path: Path) -> None:
    whole = noise()
    small = noise()[::2, ::2]
    for tags in ({254: 1}, {255: 2}):
        (actual,) = decoded(encode_tiff(tiff_page(whole), tiff_page(small, tags=tags)))
        assert isinstance(actual, DecodedPicture) and actual.flags == {Flag.THUMBNAIL}
        assert (actual.values[0] == whole[..., 0]).all()
    path = tmp_path / "a.tif"
    for size, kind in ((2, 1), (2, 0), (1, 0)):
        with tifffile.TiffWriter(path) as writer:
            writer.write(whole[..., 0], subifds=1, photometric="minisblack")
            writer.write(whole[::size, ::size, 0], subfiletype=kind, photometric="minisblack")
        if size == 1:  # a second image, not a smaller copy
            assert "SubIFDs" in refusal(path.read_bytes()).detail
        else:
            assert picture(path.read_bytes()).flags == {Flag.THUMBNAIL}
    assert "NewSubfileType" in refusal(encode_tiff(tiff_page(small, tags={254: 1}))).detail


def test_stacks_whose_planes_have_no_pages_or_are_channels_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    stack = np.stack([noise()[..., 0]] * 6)
    for description in (
        b'{"shape": [6, 21, 37], "truncated": true}\0',
        b"ImageJ=1.54f\nimages=6\nslices=6\nloop=false\n\0",
    ):
        with case(description):
            error = refusal(encode_tiff(tiff_page(stack[0][..., None], tags={270: description})))
            assert error.reason is Reason.UNSUPPORTED and "no directories" in error.detail
    tifffile.imwrite(path, stack, imagej=True, metadata={"axes": "ZYX"}, photometric="minisblack")
    assert len(decoded(path.read_bytes())) == 6
    tifffile.imwrite(path, stack, imagej=True, metadata={"axes": "CYX"}, photometric="minisblack")
    assert "channels" in refusal(path.read_bytes()).detail
    channels = {"ome": True, "metadata": {"axes": "ZCYX"}, "photometric": "minisblack"}
    tifffile.imwrite(path, stack.reshape(2, 3, H, W), **channels)
    assert "SizeC" in refusal(path.read_bytes()).detail
    pages = [tiff_page(plane[..., None]) for plane in stack]
    pages[0]["tags"][270] = b"ImageJ=1.54f\nimages=6\nchannels=3\nslices=2\nhyperstack=true\n\0"
    assert "channels" in refusal(encode_tiff(*pages)).detail
    pages[0]["tags"][270] = b"ImageJ=1.54f\nimages=6\nslices=6\n\0"
    assert len(decoded(encode_tiff(*pages))) == 6
    tifffile.imwrite(path, stack, ome=True, metadata={"axes": "ZYX"}, photometric="minisblack")
    assert len(decoded(path.read_bytes())) == 6
    assert "UIC2Tag" in refusal(encode_tiff(tiff_page(noise(), tags={33629: (5, [0] * 12)}))).detail


def test_tifffile_and_pillow_write_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    for dtype in TYPES:
        for options in (
            {},
            {"byteorder": ">"},
            {"bigtiff": True},
            {"tile": (16, 16)},
            {"compression": "zlib"},
        ):
            for channels in (1, 3, 4):
                array = noise(dtype, channels)
                extra = {"extrasamples": ["unspecified"]} if channels == 4 else {}
                photometric = "minisblack" if channels == 1 else "rgb"
                with case(dtype, channels, **options):
                    tifffile.imwrite(
                        path, array.squeeze(), photometric=photometric, **options, **extra
                    )
                    actual = values(path.read_bytes())
                    assert np.allclose(actual, array[..., :3].astype(np.float64), rtol=1e-6)
    for compression in (None, "tiff_lzw", "tiff_adobe_deflate", "packbits"):
        for array in (
            noise(),
            noise(channels=3),
            noise(channels=3)[..., :1] > 127,
            noise(np.uint16),
        ):
            with case(compression, array.dtype):
                Image.fromarray(array.squeeze()).save(path, compression=compression)
                expected = array * np.uint8(255) if array.dtype == bool else array
                assert (values(path.read_bytes()) == expected).all()


def test_pixels_that_are_not_square_have_spacings() -> None:
    for tags, spacing in (
        ({282: (5, [300, 1]), 283: (5, [300, 1]), 296: 2}, None),
        ({282: (5, [200, 1]), 283: (5, [100, 1]), 296: 3}, (0.1, 0.05)),
        ({282: (5, [200, 1]), 283: (5, [100, 1]), 296: 1}, (2.0, 1.0)),
        ({282: (5, [200, 1]), 283: (5, [100, 1]), 296: 3, 274: 6}, (0.05, 0.1)),
        ({282: (5, [0, 0]), 283: (5, [100, 1])}, None),
    ):
        with case(tags):
            assert picture(encode_tiff(tiff_page(noise(), tags=tags))).spacing == spacing


def test_values_that_are_none_are_refused() -> None:
    floats = noise(np.float32)
    floats[3, 4] = -9999
    assert "GDAL_NODATA" in refusal(encode_tiff(tiff_page(floats, tags={42113: b"-9999\0"}))).detail
    assert (values(encode_tiff(tiff_page(floats, tags={42113: b"-1e30\0"}))) == floats).all()
    floats[3, 4] = np.nan
    for tags in ({}, {42113: b"nan\0"}):
        assert refusal(encode_tiff(tiff_page(floats, tags=tags))).reason is Reason.NOT_FINITE
    assert refusal(encode_tiff(tiff_page(floats, photometric=0))).reason is Reason.NOT_FINITE


def test_zstandard_is_unpacked() -> None:
    array = noise(np.uint16)
    made = tiff_page(array, rows=5, tags={259: 50000})
    made["segments"] = [bytes(imagecodecs.zstd_encode(segment)) for segment in made["segments"]]
    assert (values(encode_tiff(made)) == array).all()
    made["segments"][1] = made["segments"][1][:-1]
    assert refusal(encode_tiff(made)).reason is Reason.DAMAGED


def test_a_strip_that_lacks_its_last_bytes_is_refused_however_few_they_are() -> None:
    ramp = (np.add.outer(np.arange(H), np.arange(W)) // 3).astype(np.uint8)[..., None]
    for compression in (NONE, DEFLATE, LZW, PACK_BITS):
        for num_bytes in range(1, 20):
            made = tiff_page(ramp, rows=7, compression=compression)
            made["segments"][1] = made["segments"][1][:-num_bytes]
            with case(compression, num_bytes):
                assert refusal(encode_tiff(made)).reason in (Reason.TRUNCATED, Reason.DAMAGED)


def test_leftovers_of_other_kinds_of_images_change_nothing() -> None:
    for tags in (
        {530: [2, 2]},
        {347: (7, b"ab")},
        {34412: (7, b"abcdefgh")},
        {65000: 7},
        {34665: 7},
    ):
        with case(tags):
            assert (values(encode_tiff(tiff_page(noise(), tags=tags))) == noise()).all()


def test_broken_files_have_their_true_reason() -> None:
    whole = encode_tiff(tiff_page(noise(), rows=5))
    for compression in (NONE, DEFLATE, LZW, PACK_BITS):
        made = tiff_page(noise(), rows=5, compression=compression)
        made["segments"][1] = made["segments"][1][: len(made["segments"][1]) // 2]
        with case(compression):
            assert refusal(encode_tiff(made)).reason in (Reason.TRUNCATED, Reason.DAMAGED)
    flipped = tiff_page(noise(), compression=DEFLATE)
    flipped["segments"] = [flipped["segments"][0][:-1] + b"?"]
    assert refusal(encode_tiff(flipped)).reason is Reason.DAMAGED
    assert refusal(whole[:-30]).reason is Reason.TRUNCATED
    for tags, reason in (
        ({278: 0}, Reason.DAMAGED),
        ({257: 0}, Reason.DAMAGED),
        ({257: 400}, Reason.DAMAGED),
        ({256: 1 << 20, 257: 1 << 20}, Reason.TOO_LARGE),
        ({322: 1 << 20, 323: 1 << 20}, Reason.TOO_LARGE),
    ):
        made = tiff_page(noise(), rows=5)
        with case(tags):
            assert (
                refusal(
                    encode_tiff({"segments": made["segments"], "tags": made["tags"] | tags})
                ).reason
                is reason
            )
    unknown_type = whole.replace(b"\x02\x01\x03\x00", b"\x02\x01\x63\x00")  # of tag 258
    assert "BitsPerSample" in refusal(unknown_type).detail
    circle = bytearray(encode_tiff(tiff_page(noise())))
    circle[-4:] = circle[4:8]
    assert "circle" in refusal(bytes(circle)).detail
    bomb = tiff_page(np.zeros((2000, 2000, 1), np.uint8), compression=DEFLATE)
    assert refusal(encode_tiff(bomb), DecodeLimits(values=1 << 20)).reason is Reason.TOO_LARGE
