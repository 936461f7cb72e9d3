"""PNG files laid out from a known array: every colour type, depth, filter and interlace method."""

import struct
import zlib
from collections.abc import Iterable

import numpy as np

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_ADAM7 = (
    (0, 0, 8, 8),
    (0, 4, 8, 8),
    (4, 0, 8, 4),
    (0, 2, 4, 4),
    (2, 0, 4, 2),
    (0, 1, 2, 2),
    (1, 0, 2, 1),
)


def png_chunk(name: bytes, data: bytes) -> bytes:
    """Return one chunk."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def encode_png(
    samples: np.ndarray,
    depth: int,
    colour: int,
    *,
    interlace: bool = False,
    before: Iterable[tuple[bytes, bytes]] = (),
    after: Iterable[tuple[bytes, bytes]] = (),
    idat_bytes: int = 1 << 30,
) -> bytes:
    """Return a file of samples (H, W, S); each row has another of the five filters.

    Args:
        samples: below 2 ** depth.
        depth: bits of a sample.
        colour: type of colours.
        interlace: by Adam7.
        before: chunks before the pixels.
        after: chunks behind them.
        idat_bytes: of one chunk of pixels.
    """
    height, width, channels = samples.shape
    passes = _ADAM7 if interlace else ((0, 0, 1, 1),)
    raw = b""
    for top, left, down, across in passes:
        part = samples[top::down, left::across]
        if part.size:
            raw += _apply_filters(_row_bytes(part, depth), max(1, depth * channels // 8))
    packed = zlib.compress(raw)
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace)),
        *before,
    ]
    chunks += [
        (b"IDAT", packed[start : start + idat_bytes]) for start in range(0, len(packed), idat_bytes)
    ]
    chunks += [*after, (b"IEND", b"")]
    return SIGNATURE + b"".join(png_chunk(name, data) for name, data in chunks)


def _row_bytes(part: np.ndarray, depth: int) -> np.ndarray:
    flat = part.reshape(len(part), -1)
    if depth == 16:
        return np.ascontiguousarray(flat.astype(">u2")).view(np.uint8)
    if depth == 8:
        return flat.astype(np.uint8)
    digits = (flat[..., None].astype(np.uint8) >> np.arange(depth - 1, -1, -1, dtype=np.uint8)) & 1
    return np.packbits(digits.reshape(len(part), -1), axis=1)


def _apply_filters(rows: np.ndarray, step: int) -> bytes:
    """Apply filter 0 to the first row, 1 to the second, and so on."""
    data = b""
    above = np.zeros(rows.shape[1], int)
    for number, row in enumerate(rows.astype(int)):
        left = np.concatenate([np.zeros(step, int), row[:-step]])[: len(row)]
        above_left = np.concatenate([np.zeros(step, int), above[:-step]])[: len(row)]
        estimate = left + above - above_left
        distances = np.abs(np.stack([estimate - left, estimate - above, estimate - above_left]))
        paeth = np.choose(distances.argmin(0), [left, above, above_left])
        predicted = (0 * row, left, above, (left + above) // 2, paeth)[number % 5]
        data += bytes([number % 5]) + ((row - predicted) % 256).astype(np.uint8).tobytes()
        above = row
    return data
