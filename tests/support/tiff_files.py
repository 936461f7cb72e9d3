"""TIFF files laid out byte by byte from a known array: every layout that TIFF 6.0 and BigTIFF allow."""

import io
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, TiffImagePlugin

NONE = 1
LZW = 5
JPEG = 7
DEFLATE = 8
PACK_BITS = 32773
_SHORT = 3
_LONG = 4
_ASCII = 2
_RATIONAL = 5
_LONG8 = 16
_LETTERS = {1: "B", 3: "H", 4: "I", 5: "I", 7: "B", 12: "d", 16: "Q"}


def encode_tiff(*pages: Mapping[str, Any], order: str = "<", big: bool = False) -> bytes:
    """Return a file; each page has `segments`, a list of bytes, and `tags`, values by number or (type, values)."""
    offset_letter, offset_size = ("Q", 8) if big else ("I", 4)
    mark = b"II" if order == "<" else b"MM"
    header = mark + struct.pack(order + ("HHH" if big else "H"), *((43, 8, 0) if big else (42,)))
    position = len(header) + offset_size
    body = b""
    first = None
    link_at = None
    file = bytearray(header + bytes(offset_size))
    for page in pages:
        offsets = []
        for segment in page["segments"]:
            offsets.append(position)
            body += segment
            position += len(segment)
        tags = dict(page["tags"])
        is_tiled = 322 in tags
        tags[324 if is_tiled else 273] = (_LONG8 if big else _LONG, offsets)
        tags[325 if is_tiled else 279] = (_LONG, [len(segment) for segment in page["segments"]])
        entries = []
        for tag in sorted(tags):
            kind, values = _type_and_values(tags[tag])
            data = (
                values
                if isinstance(values, bytes)
                else struct.pack(f"{order}{len(values)}{_LETTERS[kind]}", *values)
            )
            count = len(values) // (2 if kind == _RATIONAL else 1)
            if len(data) <= offset_size:
                inline = data.ljust(offset_size, b"\0")
            else:
                inline = struct.pack(order + offset_letter, position)
                body += data
                position += len(data)
            entries.append(struct.pack(f"{order}HH{offset_letter}", tag, kind, count) + inline)
        directory_at = position
        directory = struct.pack(order + ("Q" if big else "H"), len(entries)) + b"".join(entries)
        body += directory + bytes(offset_size)
        position += len(directory) + offset_size
        if first is None:
            first = directory_at
        file += body
        body = b""
        if link_at is not None:
            file[link_at : link_at + offset_size] = struct.pack(order + offset_letter, directory_at)
        link_at = len(file) - offset_size
    file[len(header) : len(header) + offset_size] = struct.pack(order + offset_letter, first or 0)
    return bytes(file)


def _type_and_values(value: Any) -> tuple[int, Any]:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], list | bytes):
        return value
    if isinstance(value, bytes):
        return _ASCII, value
    if isinstance(value, list | tuple):
        return _SHORT, list(value)
    return (_LONG if value > 65535 else _SHORT), [value]


def tiff_page(
    samples: np.ndarray,
    *,
    bits: int | None = None,
    photometric: int = 1,
    order: str = "<",
    planar: int = 1,
    tile: tuple[int, int] | None = None,
    rows: int | None = None,
    compression: int = NONE,
    predictor: int = 1,
    extra: Sequence[int] = (),
    tags: Mapping[int, Any] | None = None,
) -> dict[str, Any]:
    """Return a page for `tiff` of an array (H, W, S), stored in its own type or in `bits` unsigned bits a sample."""
    height, width, num = samples.shape
    number = {"u": 1, "i": 2, "f": 3}[samples.dtype.kind]
    planes = [samples] if planar == 1 else [samples[..., [sample]] for sample in range(num)]
    segment_rows, segment_width = tile or (rows or height, width)
    segments = []
    for plane in planes:
        for top in range(0, height, segment_rows):
            for left in range(0, width, segment_width):
                part = plane[top : top + segment_rows, left : left + segment_width]
                if tile:
                    short = (segment_rows - part.shape[0], segment_width - part.shape[1])
                    part = np.pad(part, ((0, short[0]), (0, short[1]), (0, 0)))
                segments.append(_compress(_segment_rows(part, bits, order, predictor), compression))
    fields = {
        256: width,
        257: height,
        258: [bits or 8 * samples.itemsize] * num,
        259: compression,
        262: photometric,
        277: num,
        284: planar,
        339: [number] * num,
    }
    if tile:
        fields |= {322: tile[1], 323: tile[0]}
    else:
        fields[278] = segment_rows
    if predictor != 1:
        fields[317] = predictor
    if extra:
        fields[338] = list(extra)
    return {"segments": segments, "tags": fields | dict(tags or {})}


def _segment_rows(part: np.ndarray, bits: int | None, order: str, predictor: int) -> np.ndarray:
    """Return the bytes of a segment, a row in each row."""
    if bits is not None and bits % 8:
        flat = part.reshape(len(part), -1).astype(np.uint32)
        digits = (flat[..., None] >> np.arange(bits - 1, -1, -1)) & 1
        return np.packbits(digits.astype(np.uint8).reshape(len(part), -1), axis=1)
    size = part.itemsize
    if predictor == 2:
        whole = np.ascontiguousarray(part).view(f"u{size}")
        whole = np.diff(whole, axis=1, prepend=np.zeros_like(whole[:, :1]))
        part = whole.view(f"u{size}")
    if predictor == 3:
        high_first = np.ascontiguousarray(part.astype(part.dtype.newbyteorder(">"))).view(np.uint8)
        by_significance = (
            high_first.reshape(len(part), -1, size)
            .swapaxes(1, 2)
            .reshape(len(part), -1, part.shape[-1])
        )
        return np.diff(
            by_significance, axis=1, prepend=np.zeros_like(by_significance[:, :1])
        ).reshape(len(part), -1)
    in_order = np.ascontiguousarray(part.astype(part.dtype.newbyteorder(order)))
    return in_order.view(np.uint8).reshape(len(part), -1)


def _compress(rows: np.ndarray, compression: int) -> bytes:
    if compression == DEFLATE:
        return zlib.compress(rows.tobytes())
    if compression == NONE:
        return rows.tobytes()
    # libtiff packs bytes of any meaning, given as greys of one strip.
    written = io.BytesIO()
    name = {LZW: "tiff_lzw", PACK_BITS: "packbits"}[compression]
    Image.fromarray(rows).save(written, "TIFF", compression=name, tiffinfo={278: len(rows)})
    written.seek(0)
    with TiffImagePlugin.TiffImageFile(written) as image:
        (start,) = image.tag_v2[273]
        (size,) = image.tag_v2[279]
    return written.getvalue()[start : start + size]
