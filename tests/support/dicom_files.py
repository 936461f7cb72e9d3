"""DICOM files made for tests, in every transfer syntax that something here can write.

What no encoder at hand writes is encoded here in a few lines: cells of any bits, run-length encoding, lossless JPEG of
every predictor, and JPEG of 8 and 12 bits, all with Huffman codes of one length.
"""

import io
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from PIL import Image
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.sequence import Sequence
from pydicom.uid import (
    UID,
    CTImageStorage,
    EnhancedCTImageStorage,
    ExplicitVRLittleEndian,
    JPEGBaseline8Bit,
    generate_uid,
)

ENCAPSULATED_UNCOMPRESSED = "1.2.840.10008.1.2.1.98"
DEFLATED_FRAMES = "1.2.840.10008.1.2.8.1"


def waves(
    shape: tuple[int, ...] = (48, 40), high: int = 4095, dtype: Any = np.uint16
) -> np.ndarray:
    """Return smooth values from 0 to `high` that differ in every direction."""
    grids = np.meshgrid(
        *(np.linspace(0, 2 + axis, side) for axis, side in enumerate(shape)), indexing="ij"
    )
    values = sum(np.sin(grid + number) * (number + 1) for number, grid in enumerate(grids))
    values = values - values.min()
    return np.round(values / values.max() * high).astype(dtype)


def tags_of(values: np.ndarray, *, bits: int = 12, **others: Any) -> FileDataset:
    """Return an image of greys (H, W), colours (H, W, 3) or frames (N, H, W), uncompressed.

    Args:
        values: of the pixels, in the type that they are stored in.
        bits: that the values need, of those that are stored.
        others: tags to add or to replace, by keyword.
    """
    meta = FileMetaDataset()
    kind = others.pop("SOPClassUID", CTImageStorage)
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = kind
    meta.MediaStorageSOPInstanceUID = generate_uid(entropy_srcs=["1"])
    tags = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    tags.SOPClassUID = kind
    tags.SOPInstanceUID = meta.MediaStorageSOPInstanceUID
    tags.PatientID = "MRN0017"
    tags.PatientName = "DOE^JOHN"
    tags.Modality = "CT"
    has_colours = values.ndim == 3 and values.shape[-1] == 3
    if has_colours:
        tags.Rows, tags.Columns = values.shape[:2]
        tags.SamplesPerPixel = 3
        tags.PhotometricInterpretation = "RGB"
        tags.PlanarConfiguration = 0
    else:
        tags.Rows, tags.Columns = values.shape[-2:]
        tags.SamplesPerPixel = 1
        tags.PhotometricInterpretation = "MONOCHROME2"
        if values.ndim == 3:
            tags.NumberOfFrames = len(values)
    tags.BitsAllocated = 8 * values.itemsize
    tags.BitsStored = bits
    tags.HighBit = bits - 1
    tags.PixelRepresentation = int(values.dtype.kind == "i")
    tags.PixelData = values.tobytes()
    for keyword, value in others.items():
        setattr(tags, keyword, value)
    return tags


def write(tags: FileDataset, path: Path) -> Path:
    """Write a file with its preamble."""
    tags.save_as(path, enforce_file_format=True)
    return path


def write_compressed(tags: FileDataset, syntax: UID, path: Path) -> Path:
    """Write a file whose pixels are compressed by pydicom's encoders."""
    tags.compress(syntax, generate_instance_uid=False)
    return write(tags, path)


def write_baseline_jpeg(path: Path) -> Path:
    """Write 8-bit greys in baseline JPEG, through Pillow."""
    values = waves(high=255, dtype=np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(values).save(encoded, "JPEG", quality=95)
    tags = tags_of(values, bits=8)
    tags.PixelData = encapsulate([encoded.getvalue()])
    tags["PixelData"].is_undefined_length = True
    tags.file_meta.TransferSyntaxUID = JPEGBaseline8Bit
    return write(tags, path)


def write_through_gdcm(source: Path, path: Path, kind: str) -> Path:
    """Write a file again with its pixels in a transfer syntax that GDCM names."""
    import gdcm

    reader = gdcm.ImageReader()
    writer = gdcm.ImageWriter()
    change = gdcm.ImageChangeTransferSyntax()
    reader.SetFileName(str(source))
    assert reader.Read()
    change.SetTransferSyntax(gdcm.TransferSyntax(getattr(gdcm.TransferSyntax, kind)))
    change.SetInput(reader.GetImage())
    assert change.Change()
    writer.SetFile(reader.GetFile())
    writer.SetImage(change.GetOutput())
    writer.SetFileName(str(path))
    assert writer.Write()
    return path


def write_big_endian(path: Path) -> Path:
    """Write a file in explicit big endian."""
    tags = tags_of(waves())
    tags.PixelData = waves().astype(">u2").tobytes()
    tags.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRBigEndian
    pydicom.dcmwrite(path, tags, enforce_file_format=True)
    return path


def write_without_meta(path: Path, *, implicit: bool) -> Path:
    """Write a file without preamble and without file meta information."""
    tags = Dataset(tags_of(waves()))
    pydicom.dcmwrite(
        path, tags, implicit_vr=implicit, little_endian=True, enforce_file_format=False
    )
    return path


def write_enhanced(
    values: np.ndarray, places: list[float], path: Path, body_part: str = "CHEST"
) -> Path:
    """Write frames (N, H, W) that lie along the body's axis, each at its place in mm."""
    tags = tags_of(values, SOPClassUID=EnhancedCTImageStorage, BodyPartExamined=body_part)
    shared = Dataset()
    frames = []
    measures = Dataset()
    orientation = Dataset()
    rescale = Dataset()
    measures.PixelSpacing = [0.5, 0.75]
    measures.SliceThickness = 2.0
    orientation.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
    rescale.RescaleSlope = 2
    rescale.RescaleIntercept = -1000
    rescale.RescaleType = "HU"
    shared.PixelMeasuresSequence = Sequence([measures])
    shared.PlaneOrientationSequence = Sequence([orientation])
    shared.PixelValueTransformationSequence = Sequence([rescale])
    for place in places:
        frame = Dataset()
        position = Dataset()
        position.ImagePositionPatient = [10, 20, place]
        frame.PlanePositionSequence = Sequence([position])
        frames.append(frame)
    tags.SharedFunctionalGroupsSequence = Sequence([shared])
    tags.PerFrameFunctionalGroupsSequence = Sequence(frames)
    return write(tags, path)


def write_inflating(path: Path, num_bytes: int) -> Path:
    """Write a deflated file of a few kilobytes whose data set inflates to so many zeros."""
    small = io.BytesIO()
    tags = tags_of(waves((8, 8)))
    tags.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
    tags.save_as(small, enforce_file_format=True)
    head = small.getvalue()
    meta_bytes = 132 + 12 + int.from_bytes(head[140:144], "little")
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = bytes(1 << 20)
    body = bytearray()
    for _ in range(num_bytes >> 20):
        body += packer.compress(block)
    path.write_bytes(head[:meta_bytes] + bytes(body) + packer.flush())
    return path


def cells_of(
    values: np.ndarray, allocated: int, stored: int, high_bit: int, other_bits: int = 0
) -> np.ndarray:
    """Return cells that hold values in the bits that end at `high_bit`; the bits above them are `other_bits`."""
    below = high_bit + 1 - stored
    wide = (values.astype(np.int64) & ((1 << stored) - 1)) << below
    above = ((1 << allocated) - 1) & ~((1 << (high_bit + 1)) - 1)
    return (wide | (other_bits & above)).astype(np.uint64).astype(f"<u{allocated // 8}")


def content_of(
    pixels: bytes | list[bytes],
    syntax: str,
    *,
    tables: bool = True,
    fragments: int = 1,
    **others: Any,
) -> bytes:
    """Return a file of pixels that are encoded already: of one value, or of one for each encapsulated frame."""
    meta = FileMetaDataset()
    sop_class = others.pop("SOPClassUID", CTImageStorage)
    # pydicom knows no deflated frames: their UID is put in afterwards, in the place of one that is as long.
    known_syntax = ENCAPSULATED_UNCOMPRESSED if syntax == DEFLATED_FRAMES else syntax
    meta.TransferSyntaxUID = UID(known_syntax)
    meta.MediaStorageSOPClassUID = sop_class
    meta.MediaStorageSOPInstanceUID = generate_uid(entropy_srcs=["2"])
    tags = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    tags.SOPClassUID = sop_class
    tags.SOPInstanceUID = meta.MediaStorageSOPInstanceUID
    tags.PatientID = "MRN0017"
    tags.Modality = "CT"
    representation = others.pop("representation", "OW")
    for name, value in others.items():
        if value is not None:
            setattr(tags, name, value)
    if isinstance(pixels, list):
        pixels = encapsulate(pixels, fragments_per_frame=fragments, has_bot=tables)
        representation = "OB"
    tags.add_new("PixelData", representation, pixels)
    tags["PixelData"].is_undefined_length = UID(known_syntax).is_compressed
    stream = io.BytesIO()
    pydicom.dcmwrite(stream, tags, enforce_file_format=True)
    content = stream.getvalue()
    if syntax != known_syntax:
        # A value of an odd length ends with a zero byte (PS3.5 6.2).
        padded_syntax = syntax.encode() + b"\0" * (len(syntax) % 2)
        content = content.replace(known_syntax.encode(), padded_syntax, 1)
    return content


def packbits(row: bytes) -> bytes:
    """Return a row of bytes as runs of equal bytes and stretches of others (PS3.5 G.3)."""
    packed_row = bytearray()
    position = 0
    while position < len(row):
        run = 1
        while position + run < len(row) and run < 128 and row[position + run] == row[position]:
            run += 1
        if run > 1:
            packed_row += bytes([257 - run, row[position]])
            position += run
            continue
        end = position + 1
        while (
            end < len(row)
            and end - position < 128
            and (end + 1 == len(row) or row[end] != row[end + 1])
        ):
            end += 1
        packed_row += bytes([end - position - 1]) + row[position:end]
        position = end
    return bytes(packed_row)


def run_length(cells: np.ndarray) -> bytes:
    """Return a frame of cells, (H, W) or (H, W, 3), in RLE: a segment for each byte, the highest first."""
    planes = (
        [cells] if cells.ndim == 2 else [cells[..., channel] for channel in range(cells.shape[-1])]
    )
    segments = []
    for plane in planes:
        octets = np.ascontiguousarray(plane).view(np.uint8).reshape(*plane.shape, -1)
        for number in reversed(range(octets.shape[-1])):
            segment = b"".join(packbits(row.tobytes()) for row in octets[..., number])
            segments.append(segment + b"\0" * (len(segment) % 2))
    offsets = [64]
    for segment in segments[:-1]:
        offsets.append(offsets[-1] + len(segment))
    header = [len(segments), *offsets] + [0] * (15 - len(offsets))
    return np.array(header, "<u4").tobytes() + b"".join(segments)


class _Bits:
    """Bits of entropy-coded data, with a zero byte after each 0xFF."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def add(self, number: int, length: int) -> None:
        if length:
            self.parts.append(format(number, f"0{length}b"))

    def add_number(self, number: int, code: int, code_length: int, size: int) -> None:
        """Add a code, and a number of that many bits; negative ones less one (ISO/IEC 10918-1 F.1.2.1)."""
        self.add(code, code_length)
        if number < 0:
            number += (1 << size) - 1
        self.add(number, size)

    def content(self) -> bytes:
        bits = "".join(self.parts)
        bits += "1" * (-len(bits) % 8)
        return int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")


def _segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2, "big") + content


def _huffman(kind: int, symbols: list[int], length: int) -> bytes:
    counts = [0] * 16
    counts[length - 1] = len(symbols)
    return _segment(0xC4, bytes([kind << 4, *counts, *symbols]))


def _jpeg(
    process: int, values: np.ndarray, bits: int, identifiers: bytes, markers: bytes, body: bytes
) -> bytes:
    frame = bytes([bits]) + values.shape[0].to_bytes(2, "big") + values.shape[1].to_bytes(2, "big")
    frame += bytes([len(identifiers)]) + b"".join(bytes([name, 0x11, 0]) for name in identifiers)
    return b"\xff\xd8" + markers + _segment(process, frame) + body + b"\xff\xd9"


ADOBE_RGB = _segment(0xEE, b"Adobe\0\x64\0\0\0\0\0")
ADOBE_YBR = _segment(0xEE, b"Adobe\0\x64\0\0\0\0\1")
JFIF = _segment(0xE0, b"JFIF\0\1\1\0\0\1\0\1\0\0")


def lossless_jpeg(
    values: np.ndarray,
    bits: int,
    predictor: int = 1,
    markers: bytes = b"",
    identifiers: bytes = b"\1\2\3",
) -> bytes:
    """Return greys (H, W) or colours (H, W, 3) in lossless JPEG (ISO/IEC 10918-1 H)."""
    planes = values.astype(int).reshape(*values.shape[:2], -1)
    identifiers = identifiers[: planes.shape[-1]]
    entropy = _Bits()
    for row in range(planes.shape[0]):
        for column in range(planes.shape[1]):
            for channel in range(planes.shape[2]):
                plane = planes[..., channel]
                if row == 0:
                    expected = plane[0, column - 1] if column else 1 << (bits - 1)
                elif column == 0:
                    expected = plane[row - 1, 0]
                else:
                    left = plane[row, column - 1]
                    above = plane[row - 1, column]
                    corner = plane[row - 1, column - 1]
                    expected = (
                        left,
                        above,
                        corner,
                        left + above - corner,
                        left + ((above - corner) >> 1),
                        above + ((left - corner) >> 1),
                        (left + above) >> 1,
                    )[predictor - 1]
                # Differences are modulo 65536; that of 32768 alone has 16 bits, and none follow its code.
                difference = int(plane[row, column] - expected) % 65536
                if difference > 32768:
                    difference -= 65536
                size = abs(difference).bit_length()
                if size < 16:
                    entropy.add_number(difference, size, 5, size)
                else:
                    entropy.add(size, 5)
    components = b"".join(bytes([name, 0]) for name in identifiers)
    scan = _segment(0xDA, bytes([len(identifiers)]) + components + bytes([predictor, 0, 0]))
    body = _huffman(0, list(range(17)), 5) + scan + entropy.content()
    return _jpeg(0xC3, values, bits, identifiers, markers, body)


def _zigzag_rank(index: int) -> tuple[int, int]:
    """Return what a block's coefficient is ordered by: its diagonal, then its place there (ISO/IEC 10918-1 A.3.6)."""
    row, column = divmod(index, 8)
    diagonal = row + column
    if diagonal % 2:
        return diagonal, row
    return diagonal, column


def dct_jpeg(
    values: np.ndarray, bits: int, markers: bytes = b"", identifiers: bytes = b"\1\2\3"
) -> bytes:
    """Return greys or colours in baseline (8 bits) or extended JPEG (12 bits), all coefficients in steps of 1.

    The transform is orthonormal and each of 64 coefficients is at most 0.5 off, so that no sample is more than 4 off.
    """
    planes = values.astype(float).reshape(*values.shape[:2], -1) - (1 << (bits - 1))
    identifiers = identifiers[: planes.shape[-1]]
    high = -(-planes.shape[0] // 8) * 8
    wide = -(-planes.shape[1] // 8) * 8
    planes = np.pad(
        planes, ((0, high - planes.shape[0]), (0, wide - planes.shape[1]), (0, 0)), "edge"
    )
    angles = (2 * np.arange(8) + 1) * np.arange(8)[:, None] * np.pi / 16
    basis = np.cos(angles) / 2
    basis[0] /= np.sqrt(2)
    order = sorted(range(64), key=_zigzag_rank)
    largest = 10 if bits == 8 else 14
    symbols = [0, 0xF0, *(run << 4 | size for run in range(16) for size in range(1, largest + 1))]
    entropy = _Bits()
    before = [0] * planes.shape[-1]
    for top in range(0, high, 8):
        for left in range(0, wide, 8):
            for channel in range(planes.shape[-1]):
                block = planes[top : top + 8, left : left + 8, channel]
                numbers = np.rint(basis @ block @ basis.T).astype(int).reshape(-1)[order].tolist()
                difference = numbers[0] - before[channel]
                before[channel] = numbers[0]
                size = abs(difference).bit_length()
                entropy.add_number(difference, size, 5, size)
                run = 0
                for number in numbers[1:]:
                    if number == 0:
                        run += 1
                        continue
                    while run > 15:
                        entropy.add(symbols.index(0xF0), 8)
                        run -= 16
                    size = abs(number).bit_length()
                    entropy.add_number(number, symbols.index(run << 4 | size), 8, size)
                    run = 0
                if run:
                    entropy.add(symbols.index(0), 8)
    components = b"".join(bytes([name, 0]) for name in identifiers)
    scan = _segment(0xDA, bytes([len(identifiers)]) + components + bytes([0, 63, 0]))
    body = (
        _segment(0xDB, bytes([0, *[1] * 64]))
        + _huffman(0, list(range(16)), 5)
        + _huffman(1, symbols, 8)
        + scan
        + entropy.content()
    )
    process = 0xC0 if bits == 8 else 0xC1
    return _jpeg(process, values, bits, identifiers, markers, body)
