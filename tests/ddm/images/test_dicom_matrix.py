"""Arrays that are known, encoded in every way that DICOM has, come back; no other decoder is asked."""

import io
import zlib
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import jpeg_ls
import numpy as np
import pytest
from openjpeg.utils import encode_array
from PIL import Image

from ddm.images.content import FileContent
from ddm.images.formats import decode
from ddm.images.picture import DecodedPicture
from ddm.images.reasons import ImageError, Reason
from tests.support.case import case
from tests.support.dicom_files import (
    ADOBE_RGB,
    ADOBE_YBR,
    DEFLATED_FRAMES,
    ENCAPSULATED_UNCOMPRESSED,
    JFIF,
    cells_of,
    content_of,
    dct_jpeg,
    lossless_jpeg,
    run_length,
    write_through_gdcm,
)

IMPLICIT = "1.2.840.10008.1.2"
EXPLICIT = "1.2.840.10008.1.2.1"
BIG_ENDIAN = "1.2.840.10008.1.2.2"
DEFLATED = "1.2.840.10008.1.2.1.99"
RLE = "1.2.840.10008.1.2.5"
BASELINE = "1.2.840.10008.1.2.4.50"
EXTENDED = "1.2.840.10008.1.2.4.51"
LOSSLESS = "1.2.840.10008.1.2.4.57"
LOSSLESS_FIRST = "1.2.840.10008.1.2.4.70"
JPEG_LS = "1.2.840.10008.1.2.4.80"
NEAR_LOSSLESS = "1.2.840.10008.1.2.4.81"
JPEG_2000_LOSSLESS = "1.2.840.10008.1.2.4.90"
JPEG_2000 = "1.2.840.10008.1.2.4.91"
NATIVE = (IMPLICIT, EXPLICIT, BIG_ENDIAN, DEFLATED)
FRAMES = (ENCAPSULATED_UNCOMPRESSED, DEFLATED_FRAMES, RLE)

# BitsAllocated, BitsStored, HighBit: usual, in the middle of a cell, and at its upper end.
CELLS = (
    (8, 8, 7),
    (8, 6, 5),
    (8, 6, 7),
    (16, 16, 15),
    (16, 12, 11),
    (16, 12, 13),
    (16, 12, 15),
    (16, 10, 9),
)


def drawn(shape: tuple[int, ...], bits: int, *, signed: bool = False, seed: int = 0) -> np.ndarray:
    """Return noise of every value that so many bits can hold, the lowest and the highest among them."""
    low = -(1 << (bits - 1)) if signed else 0
    values = np.random.default_rng(seed).integers(low, low + (1 << bits), shape)
    values.flat[0] = low
    values.flat[1] = low + (1 << bits) - 1
    return values


def pictures(content: bytes) -> list[DecodedPicture]:
    actual = []
    for picture in decode(FileContent(None, content, "image.dcm")):
        if isinstance(picture, ImageError):
            raise picture
        actual.append(picture)
    return actual


def refusal(content: bytes) -> ImageError:
    with pytest.raises(ImageError) as caught:
        pictures(content)
    return caught.value


def described(
    values: np.ndarray, allocated: int, stored: int, high_bit: int, **others: Any
) -> dict[str, Any]:
    """Return the tags of an array of frames, (N, H, W) or (N, H, W, 3)."""
    samples = 3 if values.ndim == 4 else 1
    tags = {
        "Rows": values.shape[1],
        "Columns": values.shape[2],
        "NumberOfFrames": len(values),
        "SamplesPerPixel": samples,
        "PhotometricInterpretation": "RGB" if samples == 3 else "MONOCHROME2",
        "BitsAllocated": allocated,
        "BitsStored": stored,
        "HighBit": high_bit,
        "PixelRepresentation": int(values.min() < 0),
    }
    if samples == 3:
        tags["PlanarConfiguration"] = 0
    return tags | others


def native(cells: np.ndarray, syntax: str, tags: dict[str, Any]) -> bytes:
    """Return a file of cells, of one value or in fragments, as the transfer syntax requires."""
    if syntax == BIG_ENDIAN:
        data = cells.tobytes() + b"\0" * (cells.nbytes % 2)
        return content_of(np.frombuffer(data, ">u2").astype("<u2").tobytes(), syntax, **tags)
    if syntax == ENCAPSULATED_UNCOMPRESSED:
        return content_of([frame.tobytes() for frame in cells], syntax, **tags)
    if syntax == DEFLATED_FRAMES:
        packers = [zlib.compressobj(9, zlib.DEFLATED, -15) for _ in cells]
        frames = [
            packer.compress(frame.tobytes()) + packer.flush()
            for packer, frame in zip(packers, cells, strict=True)
        ]
        return content_of(frames, syntax, **tags)
    if syntax == RLE:
        return content_of([run_length(frame) for frame in cells], syntax, **tags)
    return content_of(cells.tobytes() + b"\0" * (cells.nbytes % 2), syntax, **tags)


def test_greys_of_every_cell_are_those_that_were_encoded() -> None:
    for syntax, (allocated, stored, high_bit), signed, num_frames, photometric in product(
        NATIVE + FRAMES, CELLS, (False, True), (1, 3), ("MONOCHROME1", "MONOCHROME2")
    ):
        with case(
            syntax=syntax, allocated=allocated, stored=stored, high_bit=high_bit, signed=signed
        ):
            values = drawn((num_frames, 5, 7), stored, signed=signed)
            cells = cells_of(values, allocated, stored, high_bit, other_bits=0xA5A5)
            tags = described(
                values, allocated, stored, high_bit, PhotometricInterpretation=photometric
            )
            actual = pictures(native(cells, syntax, tags))
            low = -(1 << (stored - 1)) if signed else 0
            full = (low, low + (1 << stored) - 1)
            expected = sum(full) - values if photometric == "MONOCHROME1" else values
            assert len(actual) == num_frames
            for picture, frame in zip(actual, expected, strict=True):
                assert picture.full == full and (picture.values[0] == frame).all()


def test_colours_of_every_cell_are_those_that_were_encoded() -> None:
    for syntax, (allocated, stored, high_bit), planar, num_frames in product(
        NATIVE + FRAMES, CELLS, (0, 1), (1, 2)
    ):
        with case(
            syntax=syntax, allocated=allocated, stored=stored, high_bit=high_bit, planar=planar
        ):
            values = drawn((num_frames, 5, 7, 3), stored)
            cells = cells_of(values, allocated, stored, high_bit, other_bits=0xA5A5)
            tags = described(values, allocated, stored, high_bit, PlanarConfiguration=planar)
            # Run-length encoding has planes by definition, so that there the tag means nothing.
            if planar == 1 and syntax != RLE:
                cells = np.ascontiguousarray(np.moveaxis(cells, -1, 1))
            actual = pictures(native(cells, syntax, tags))
            assert len(actual) == num_frames
            for picture, frame in zip(actual, values, strict=True):
                assert (picture.values == np.moveaxis(frame, -1, 0)).all()


def test_single_bits_and_wide_cells_are_those_that_were_encoded() -> None:
    for syntax, num_frames in product((*NATIVE, ENCAPSULATED_UNCOMPRESSED), (1, 3)):
        with case(syntax=syntax, num_frames=num_frames):
            values = drawn((num_frames, 5, 7), 1)
            tags = described(values, 1, 1, 0)
            if syntax == ENCAPSULATED_UNCOMPRESSED:
                content = content_of(
                    [np.packbits(frame, bitorder="little").tobytes() for frame in values],
                    syntax,
                    **tags,
                )
            else:
                # Frames follow each other bit by bit.
                content = native(np.packbits(values.reshape(-1), bitorder="little"), syntax, tags)
            actual = pictures(content)
            assert all(
                (picture.values[0] == frame).all()
                for picture, frame in zip(actual, values, strict=True)
            )
            assert actual[0].full == (0, 1)
    for syntax, (allocated, stored), signed in product(
        (IMPLICIT, EXPLICIT, DEFLATED, RLE), ((32, 31), (32, 24), (32, 20), (64, 30)), (False, True)
    ):
        with case(syntax=syntax, allocated=allocated, stored=stored, signed=signed):
            values = drawn((2, 5, 7), stored, signed=signed)
            cells = cells_of(values, allocated, stored, stored - 1)
            actual = pictures(
                native(cells, syntax, described(values, allocated, stored, stored - 1))
            )
            assert (actual[1].values[0] == values[1]).all() and actual[1].values.dtype == np.int32


def forward_ybr(rgb: np.ndarray) -> np.ndarray:
    """Return YBR_FULL by the equations of PS3.3 C.7.6.3.1.2."""
    matrix = np.array([[0.299, 0.587, 0.114], [-0.1687, -0.3313, 0.5], [0.5, -0.4187, -0.0813]])
    return np.rint(rgb @ matrix.T + [0, 128, 128]).clip(0, 255).astype(np.uint8)


def test_luminance_and_chrominance_become_the_colours_that_they_were_made_of() -> None:
    rgb = drawn((2, 6, 8, 3), 8)
    ybr = forward_ybr(rgb)
    for syntax, planar in product(NATIVE + FRAMES, (0, 1)):
        with case(syntax=syntax, planar=planar):
            tags = described(
                ybr, 8, 8, 7, PhotometricInterpretation="YBR_FULL", PlanarConfiguration=planar
            )
            cells = (
                np.ascontiguousarray(np.moveaxis(ybr, -1, 1))
                if planar == 1 and syntax != RLE
                else ybr
            )
            actual = pictures(native(cells, syntax, tags))
            # Each of three components was rounded by at most a half, and the largest sum of their weights is 2.8.
            assert np.abs(actual[1].values - np.moveaxis(rgb[1], -1, 0).astype(int)).max() <= 2
    pairs = rgb.copy()
    # no colour is lost where both pixels of a pair have the same one
    pairs[:, :, 1::2] = pairs[:, :, ::2]
    ybr = forward_ybr(pairs)
    quadruples = np.stack(
        [ybr[:, :, ::2, 0], ybr[:, :, 1::2, 0], ybr[:, :, ::2, 1], ybr[:, :, ::2, 2]], -1
    )
    for syntax in (*NATIVE, ENCAPSULATED_UNCOMPRESSED, DEFLATED_FRAMES):
        with case(syntax=syntax):
            tags = described(rgb, 8, 8, 7, PhotometricInterpretation="YBR_FULL_422")
            actual = pictures(native(quadruples, syntax, tags))
            assert np.abs(actual[1].values - np.moveaxis(pairs[1], -1, 0).astype(int)).max() <= 2


def test_palettes_of_every_form_give_the_colours_of_their_entries() -> None:
    generator = np.random.default_rng(1)
    for syntax, bits, num_entries, first, signed in product(
        (IMPLICIT, EXPLICIT, BIG_ENDIAN, RLE), (8, 16), (5, 200, 256), (0, 20, -3), (False, True)
    ):
        if first < 0 and not signed:
            continue
        with case(syntax=syntax, bits=bits, num_entries=num_entries, first=first, signed=signed):
            values = drawn((1, 5, 7), 8, signed=signed)
            tables = generator.integers(0, 1 << bits, (3, num_entries))
            tags = described(values, 8, 8, 7, PhotometricInterpretation="PALETTE COLOR")
            for name, table in zip(("Red", "Green", "Blue"), tables, strict=True):
                data = table.astype(f"<u{bits // 8}").tobytes()
                data += b"\0" * (len(data) % 2)
                if syntax == BIG_ENDIAN:
                    data = np.frombuffer(data, ">u2").astype("<u2").tobytes()
                tags[f"{name}PaletteColorLookupTableDescriptor"] = [num_entries, first, bits]
                tags[f"{name}PaletteColorLookupTableData"] = data
            (picture,) = pictures(native(cells_of(values, 8, 8, 7), syntax, tags))
            places = (values[0] - first).clip(0, num_entries - 1)
            assert (picture.values == tables[:, places]).all() and picture.full == (
                0,
                (1 << bits) - 1,
            )


def test_segmented_palettes_are_unrolled() -> None:
    values = np.arange(20).reshape(1, 4, 5)
    # 3 entries, then a line of 4 steps to 1000, then the line once more (from 1000 to 1000), then 9 entries.
    segments = [0, 3, 7, 100, 200, 1, 4, 1000, 2, 1, 10, 0, 0, 9, *range(9)]
    expected = [7, 100, 200, 400, 600, 800, 1000, 1000, 1000, 1000, 1000, *range(9)]
    tags = described(values, 8, 8, 7, PhotometricInterpretation="PALETTE COLOR")
    for name in ("Red", "Green", "Blue"):
        tags[f"{name}PaletteColorLookupTableDescriptor"] = [20, 0, 16]
        tags[f"Segmented{name}PaletteColorLookupTableData"] = np.array(segments, "<u2").tobytes()
    (picture,) = pictures(native(cells_of(values, 8, 8, 7), EXPLICIT, tags))
    assert (picture.values[2].reshape(-1) == expected).all()
    tags["SegmentedRedPaletteColorLookupTableData"] = np.array(segments[:-2], "<u2").tobytes()
    assert (
        "SegmentedRedPaletteColorLookupTableData"
        in refusal(native(values.astype("u1"), EXPLICIT, tags)).detail
    )


def test_floating_point_pixels_are_those_that_were_encoded() -> None:
    for syntax, (keyword, size), photometric in product(
        NATIVE, (("FloatPixelData", 4), ("DoubleFloatPixelData", 8)), ("MONOCHROME1", "MONOCHROME2")
    ):
        with case(syntax=syntax, keyword=keyword, photometric=photometric):
            values = np.random.default_rng(2).normal(0, 10, (2, 5, 7)).astype(np.float32)
            tags = described(values, 8 * size, 1, 0, PhotometricInterpretation=photometric)
            for name in ("BitsStored", "HighBit", "PixelRepresentation"):
                del tags[name]
            order = ">" if syntax == BIG_ENDIAN else "<"
            content = float_content(
                values.astype(f"{order}f{size}").tobytes(), keyword, syntax, tags
            )
            actual = pictures(content)
            expected = -values if photometric == "MONOCHROME1" else values
            assert (actual[1].values[0] == expected[1]).all() and actual[1].full is None


def float_content(data: bytes, keyword: str, syntax: str, tags: dict[str, Any]) -> bytes:
    import pydicom

    stream = io.BytesIO(content_of(b"\0\0", syntax, **tags))
    whole = pydicom.dcmread(stream)
    del whole.PixelData
    setattr(whole, keyword, data)
    written = io.BytesIO()
    whole.save_as(written, enforce_file_format=True)
    return written.getvalue()


def encoded_greys(
    values: np.ndarray, bits: int
) -> Iterator[tuple[str, str, Callable[[np.ndarray], bytes], int]]:
    """Yield a name, a transfer syntax, its encoder of one frame, and the largest error that it may make."""
    signed = bool(values.min() < 0)
    kind = f"{'i' if signed else 'u'}{1 if bits <= 8 else 2}"

    def as_cells(frame: np.ndarray) -> np.ndarray:
        return cells_of(frame, 8 if bits <= 8 else 16, bits, bits - 1)

    for predictor in range(1, 8):
        syntax = LOSSLESS_FIRST if predictor == 1 else LOSSLESS
        encoder: Callable[[np.ndarray], bytes] = lambda frame, predictor=predictor: lossless_jpeg(  # noqa: E731
            as_cells(frame), bits, predictor
        )
        yield f"lossless JPEG, predictor {predictor}", syntax, encoder, 0
    yield (
        "lossless JPEG of 16 bits",
        LOSSLESS_FIRST,
        lambda frame: lossless_jpeg(frame.astype(np.int64) & 0xFFFF, 16),
        0,
    )
    rows, columns = values.shape[1:3]
    for error in (0, 2):
        yield (
            f"JPEG-LS, error {error}",
            NEAR_LOSSLESS if error else JPEG_LS,
            lambda frame, error=error: bytes(
                jpeg_ls.encode_buffer(
                    as_cells(frame).tobytes(), rows, columns, 1, bits, lossy_error=error
                )
            ),
            0 if error == 0 else error,
        )
    yield (
        "JPEG 2000",
        JPEG_2000_LOSSLESS,
        lambda frame: encode_array(frame.astype(kind), bits_stored=bits),
        0,
    )


@pytest.mark.parametrize("signed", [False, True])
def test_compressed_greys_are_those_that_were_encoded(signed: bool) -> None:
    for bits, num_frames, photometric in product(
        (8, 12, 16), (1, 2), ("MONOCHROME1", "MONOCHROME2")
    ):
        values = drawn((num_frames, 33, 34), bits, signed=signed)
        full = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
        for name, syntax, encode, error in encoded_greys(values, bits):
            if error and signed:
                continue  # a near-lossless encoder that counts from zero upwards turns -1 into 0
            if photometric == "MONOCHROME1" and "predictor" in name:
                continue
            with case(name=name, bits=bits, num_frames=num_frames, photometric=photometric):
                # A HighBit and a PlanarConfiguration that would matter of cells mean nothing here.
                tags = described(
                    values,
                    8 if bits == 8 else 16,
                    bits,
                    15,
                    PlanarConfiguration=1,
                    PhotometricInterpretation=photometric,
                )
                tables = num_frames == 1 or name == "JPEG 2000"
                frames = [bytes(encode(frame)) for frame in values]
                actual = pictures(
                    content_of(
                        frames, syntax, tables=tables, fragments=1 + (bits == 12) * 2, **tags
                    )
                )
                expected = sum(full) - values if photometric == "MONOCHROME1" else values
                assert len(actual) == num_frames
                for picture, frame in zip(actual, expected, strict=True):
                    assert picture.full == full
                    assert np.abs(picture.values[0].astype(int) - frame).max() <= error


def test_compressed_colours_are_those_that_were_encoded() -> None:
    rgb = drawn((1, 33, 34, 3), 8)
    wide = drawn((1, 33, 34, 3), 16)
    ybr = forward_ybr(rgb)
    rows, columns = rgb.shape[1:3]

    def by_charls(values: np.ndarray, bits: int, mode: int) -> bytes:
        # CharLS takes pixels for the interleaving by lines too, and parts each line itself.
        planes = np.moveaxis(values, -1, 0) if mode == 0 else values
        data = planes.astype(f"<u{bits // 8}").tobytes()
        return bytes(jpeg_ls.encode_buffer(data, rows, columns, 3, bits, interleave_mode=mode))

    def by_openjpeg(values: np.ndarray, bits: int, *, use_mct: bool) -> bytes:
        return encode_array(
            values.astype(f"u{bits // 8}"),
            bits_stored=bits,
            use_mct=use_mct,
            photometric_interpretation=1,
        )

    for name, syntax, frame, values, bits, photometric, error in (
        ("lossless", LOSSLESS_FIRST, lossless_jpeg(rgb[0], 8), rgb, 8, "RGB", 0),
        (
            "lossless, Adobe",
            LOSSLESS_FIRST,
            lossless_jpeg(rgb[0], 8, 1, ADOBE_RGB, b"RGB"),
            rgb,
            8,
            "RGB",
            0,
        ),
        ("lossless, 16 bits", LOSSLESS, lossless_jpeg(wide[0], 16, 4), wide, 16, "RGB", 0),
        ("lossless, YBR", LOSSLESS, lossless_jpeg(ybr[0], 8, 2), rgb, 8, "YBR_FULL", 2),
        ("JPEG-LS by plane", JPEG_LS, by_charls(rgb[0], 8, 0), rgb, 8, "RGB", 0),
        ("JPEG-LS by line", JPEG_LS, by_charls(rgb[0], 8, 1), rgb, 8, "RGB", 0),
        ("JPEG-LS by pixel", JPEG_LS, by_charls(rgb[0], 8, 2), rgb, 8, "RGB", 0),
        ("JPEG-LS, 16 bits", JPEG_LS, by_charls(wide[0], 16, 0), wide, 16, "RGB", 0),
        ("JPEG-LS, YBR", JPEG_LS, by_charls(ybr[0], 8, 2), rgb, 8, "YBR_FULL", 2),
        (
            "JPEG 2000 with RCT",
            JPEG_2000_LOSSLESS,
            by_openjpeg(rgb[0], 8, use_mct=True),
            rgb,
            8,
            "YBR_RCT",
            0,
        ),
        (
            "JPEG 2000 without RCT",
            JPEG_2000_LOSSLESS,
            by_openjpeg(rgb[0], 8, use_mct=False),
            rgb,
            8,
            "RGB",
            0,
        ),
        (
            "JPEG 2000 of 16 bits",
            JPEG_2000_LOSSLESS,
            by_openjpeg(wide[0], 16, use_mct=True),
            wide,
            16,
            "YBR_RCT",
            0,
        ),
        (
            "JPEG 2000, YBR",
            JPEG_2000_LOSSLESS,
            by_openjpeg(ybr[0], 8, use_mct=False),
            rgb,
            8,
            "YBR_FULL",
            2,
        ),
    ):
        for planar in (0, 1):
            with case(name=name, planar=planar):
                tags = described(
                    values,
                    bits,
                    bits,
                    bits - 1,
                    PhotometricInterpretation=photometric,
                    PlanarConfiguration=planar,
                )
                (picture,) = pictures(content_of([frame], syntax, **tags))
                assert (
                    np.abs(picture.values.astype(int) - np.moveaxis(values[0], -1, 0)).max()
                    <= error
                )


def smooth(height: int, width: int) -> np.ndarray:
    """Return colours without sharp edges, which a lossy encoder keeps."""
    rows, columns = np.mgrid[:height, :width]
    return (
        np.stack([100 + 3 * rows, 220 - 2 * columns, 60 + rows + columns], -1)
        .clip(0, 255)
        .astype(np.uint8)
    )


def test_the_code_stream_of_baseline_jpeg_decides_on_colours() -> None:
    # Coefficients in steps of 1 make an error of at most 4 of a sample, the colour transform at most 2.8 times that.
    rgb = smooth(33, 34)
    ybr = forward_ybr(rgb)
    stream = io.BytesIO()
    Image.fromarray(rgb).save(stream, "JPEG", quality=100, subsampling=2)
    subsampled = stream.getvalue()
    bare_subsampled = subsampled[:2] + subsampled[2 + 2 + int.from_bytes(subsampled[4:6], "big") :]
    for name, frame, interpretations in (
        (
            "Adobe, not transformed",
            dct_jpeg(rgb, 8, ADOBE_RGB),
            ("RGB", "YBR_FULL_422", "YBR_FULL"),
        ),
        ("components R, G, B", dct_jpeg(rgb, 8, b"", b"RGB"), ("RGB", "YBR_FULL_422")),
        ("Adobe, transformed", dct_jpeg(ybr, 8, ADOBE_YBR), ("RGB", "YBR_FULL_422", "YBR_FULL")),
        ("JFIF", dct_jpeg(ybr, 8, JFIF), ("RGB", "YBR_FULL_422")),
        ("nothing, YBR", dct_jpeg(ybr, 8), ("YBR_FULL_422", "YBR_FULL")),
        ("nothing, RGB", dct_jpeg(rgb, 8), ("RGB",)),
        ("JFIF, subsampled", subsampled, ("RGB", "YBR_FULL_422")),
        ("nothing, subsampled", bare_subsampled, ("RGB", "YBR_FULL_422")),
    ):
        for interpretation in interpretations:
            with case(name=name, interpretation=interpretation):
                tags = described(
                    rgb[None],
                    8,
                    8,
                    7,
                    PhotometricInterpretation=interpretation,
                    PlanarConfiguration=1,
                )
                (picture,) = pictures(content_of([frame], BASELINE, **tags))
                assert np.abs(picture.values.astype(int) - np.moveaxis(rgb, -1, 0)).max() <= 12


def test_lossy_greys_are_within_the_error_of_their_encoder(tmp_path: Any) -> None:
    for bits, syntax in ((8, BASELINE), (8, EXTENDED), (12, EXTENDED)):
        with case(bits=bits, syntax=syntax):
            values = drawn((1, 33, 34), bits)
            tags = described(values, 8 if bits == 8 else 16, bits, bits - 1)
            (picture,) = pictures(content_of([dct_jpeg(values[0], bits)], syntax, **tags))
            assert np.abs(picture.values[0].astype(int) - values[0]).max() <= 5
            assert picture.full == (0, (1 << bits) - 1)
    values = smooth(64, 64)[..., 1].astype(np.uint16) * 16
    for name, frame in (
        ("ratio", encode_array(values, bits_stored=12, compression_ratios=[4])),
        ("noise", encode_array(values, bits_stored=12, signal_noise_ratios=[60])),
    ):
        with case(name=name):
            (picture,) = pictures(
                content_of([frame], JPEG_2000, **described(values[None], 16, 12, 11))
            )
            # 60 dB below the range of 4095 is a mean error of 4; OpenJPEG comes close to what it is asked for.
            assert np.sqrt(np.square(picture.values[0].astype(int) - values).mean()) <= 8
    # GDCM writes greys of 12 bits as a code stream of 16; lossy JPEG has no such precision.
    values = (smooth(48, 40)[..., 0].astype(np.uint16) * 16)[None]
    (tmp_path / "a.dcm").write_bytes(
        native(values.astype("<u2"), EXPLICIT, described(values, 16, 12, 11))
    )
    for kind in (
        "JPEGLosslessProcess14",
        "JPEGLosslessProcess14_1",
        "JPEG2000Lossless",
        "JPEGLSLossless",
    ):
        with case(kind=kind):
            content = write_through_gdcm(tmp_path / "a.dcm", tmp_path / "b.dcm", kind).read_bytes()
            assert (pictures(content)[0].values[0] == values[0]).all()
    content = write_through_gdcm(
        tmp_path / "a.dcm", tmp_path / "b.dcm", "JPEGExtendedProcess2_4"
    ).read_bytes()
    assert refusal(content).reason is Reason.UNSUPPORTED


def test_a_tag_that_would_change_what_a_code_stream_holds_is_refused() -> None:
    grey = drawn((1, 33, 34), 12)
    rgb = drawn((1, 33, 34, 3), 8)
    plain = described(grey, 16, 12, 11)
    colours = described(rgb, 8, 8, 7)
    greys_jls = bytes(jpeg_ls.encode_buffer(grey.astype("<u2").tobytes(), 33, 34, 1, 12))
    signed = encode_array((grey[0] - 2048).astype("i2"), bits_stored=12)
    unsigned = encode_array(grey[0].astype("u2"), bits_stored=12)
    transformed = encode_array(
        rgb[0].astype("u1"), bits_stored=8, use_mct=True, photometric_interpretation=1
    )
    untransformed = encode_array(
        rgb[0].astype("u1"), bits_stored=8, use_mct=False, photometric_interpretation=1
    )
    for keyword, frame, syntax, tags in (
        ("Rows", greys_jls, JPEG_LS, plain | {"Rows": 32}),
        ("SamplesPerPixel", greys_jls, JPEG_LS, colours),
        ("SamplesPerPixel", transformed, JPEG_2000, plain),
        ("BitsStored", greys_jls, JPEG_LS, plain | {"BitsStored": 10}),
        ("BitsStored", greys_jls, JPEG_LS, plain | {"BitsStored": 16, "PixelRepresentation": 1}),
        ("PixelRepresentation", signed, JPEG_2000_LOSSLESS, plain),
        ("PixelRepresentation", unsigned, JPEG_2000_LOSSLESS, plain | {"PixelRepresentation": 1}),
        (
            "PhotometricInterpretation",
            transformed,
            JPEG_2000,
            colours | {"PhotometricInterpretation": "YBR_FULL"},
        ),
        (
            "PhotometricInterpretation",
            untransformed,
            JPEG_2000,
            colours | {"PhotometricInterpretation": "YBR_RCT"},
        ),
        (
            "PhotometricInterpretation",
            dct_jpeg(rgb[0], 8),
            BASELINE,
            colours | {"PhotometricInterpretation": "YBR_ICT"},
        ),
        (
            "PhotometricInterpretation",
            lossless_jpeg(rgb[0], 8, 1, ADOBE_YBR),
            LOSSLESS,
            colours,
        ),
        ("NumberOfFrames", greys_jls, JPEG_LS, plain | {"NumberOfFrames": 2}),
    ):
        with case(keyword=keyword, syntax=syntax):
            error = refusal(content_of([frame], syntax, tables=False, **tags))
            assert (
                error.reason is Reason.DAMAGED
                and keyword in error.detail
                and "contradict" in error.detail
            )


def test_tags_that_contradict_each_other_are_refused_by_name() -> None:
    grey = drawn((1, 6, 8), 12)
    rgb = drawn((1, 6, 8, 3), 8)
    greys = cells_of(grey, 16, 12, 11).tobytes()
    colours = cells_of(rgb, 8, 8, 7).tobytes()
    plain = described(grey, 16, 12, 11)
    coloured = described(rgb, 8, 8, 7)
    for keywords, data, tags in (
        ("BitsStored BitsAllocated", greys, plain | {"BitsStored": 17}),
        ("HighBit BitsStored", greys, plain | {"HighBit": 10}),
        ("HighBit BitsAllocated", greys, plain | {"HighBit": 16}),
        ("HighBit", greys, plain | {"HighBit": 15}),
        ("BitsAllocated", greys, plain | {"BitsAllocated": 12}),
        ("BitsAllocated", greys, plain | {"BitsAllocated": None}),
        ("BitsStored", greys, plain | {"BitsStored": None}),
        ("PixelRepresentation", greys, plain | {"PixelRepresentation": None}),
        ("PixelRepresentation", greys, plain | {"PixelRepresentation": 2}),
        ("SamplesPerPixel", greys, plain | {"SamplesPerPixel": None}),
        ("PhotometricInterpretation", greys, plain | {"PhotometricInterpretation": None}),
        (
            "SamplesPerPixel PhotometricInterpretation",
            greys,
            plain | {"PhotometricInterpretation": "RGB"},
        ),
        (
            "SamplesPerPixel PhotometricInterpretation",
            colours,
            coloured | {"PhotometricInterpretation": "MONOCHROME2"},
        ),
        (
            "PhotometricInterpretation",
            colours,
            coloured | {"PhotometricInterpretation": "YBR_PARTIAL_422"},
        ),
        ("PhotometricInterpretation", colours, coloured | {"PhotometricInterpretation": "YBR_ICT"}),
        (
            "PhotometricInterpretation",
            colours,
            coloured | {"PhotometricInterpretation": "YBR_FULL_422"},
        ),
        ("PhotometricInterpretation", colours, coloured | {"PhotometricInterpretation": "HSV"}),
        ("PlanarConfiguration", colours, coloured | {"PlanarConfiguration": None}),
        ("PlanarConfiguration", colours, coloured | {"PlanarConfiguration": 2}),
        ("PixelRepresentation", colours, coloured | {"PixelRepresentation": 1}),
        ("NumberOfFrames", greys * 2, plain),
        ("Rows", greys, plain | {"Rows": 5}),
        ("RescaleSlope", greys, plain | {"RescaleSlope": 0}),
        ("PresentationLUTShape", greys, plain | {"PresentationLUTShape": "INVERSE"}),
        ("PixelAspectRatio", greys, plain | {"PixelAspectRatio": [2, 1], "PixelSpacing": [1, 1]}),
        ("PixelPaddingRangeLimit", greys, plain | {"PixelPaddingRangeLimit": 3}),
    ):
        with case(keywords=keywords):
            error = refusal(content_of(data, EXPLICIT, **tags))
            assert error.reason in (Reason.DAMAGED, Reason.UNSUPPORTED)
            assert all(keyword in error.detail for keyword in keywords.split())
    assert (
        refusal(content_of(greys, EXPLICIT, **plain | {"NumberOfFrames": 2})).reason
        is Reason.TRUNCATED
    )
