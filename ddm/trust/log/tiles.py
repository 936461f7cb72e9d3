"""The public form of a log, C2SP `tlog-tiles`: hashes and entries in files that never change; no I/O.

A full tile holds 256 hashes of one level, an entry bundle 256 entries; the last of each may be partial, and has its
width in its name. With them anybody computes any proof.
"""

from collections.abc import Iterator, Sequence

from ddm.errors import DocumentError
from ddm.trust.log.merkle import leaf_hash, root_hash

WIDTH = 256
_LENGTH_BYTES = 2
MAX_BUNDLE_BYTES = WIDTH * (2**16 + 1)


def tile_path(level: int | None, index: int, width: int) -> str:
    """Return the path of a tile, or of an entry bundle where `level` is None; ``x001/x234/067`` is index 1234067."""
    parts = [f"{index % 1000:03d}"]
    while index := index // 1000:
        parts.insert(0, f"x{index % 1000:03d}")
    partial = f".p/{width}" if width < WIDTH else ""
    return f"tile/{'entries' if level is None else level}/{'/'.join(parts)}{partial}"


def tiles_of(num: int) -> list[tuple[int, int]]:
    """Return index and width of the tiles that hold `num` hashes or entries, the partial one last."""
    full = [(index, WIDTH) for index in range(num // WIDTH)]
    return full + ([(num // WIDTH, num % WIDTH)] if num % WIDTH else [])


def layout(entries: Sequence[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield every file of a log of these entries, path and content, except the checkpoint."""
    for index, width in tiles_of(len(entries)):
        first = index * WIDTH
        yield tile_path(None, index, width), encode_bundle(entries[first : first + width])
    level, hashes = 0, [leaf_hash(entry) for entry in entries]
    while hashes:
        for index, width in tiles_of(len(hashes)):
            yield (
                tile_path(level, index, width),
                b"".join(hashes[index * WIDTH : index * WIDTH + width]),
            )
        full = range(len(hashes) // WIDTH)
        level, hashes = level + 1, [root_hash(hashes[i * WIDTH : (i + 1) * WIDTH]) for i in full]


def encode_bundle(entries: Sequence[bytes]) -> bytes:
    """Join entries, each after its length in two bytes."""
    return b"".join(len(entry).to_bytes(_LENGTH_BYTES, "big") + entry for entry in entries)


def parse_bundle(data: bytes, width: int, subject: str) -> list[bytes]:
    """Split an entry bundle.

    Raises:
        DocumentError: it does not hold exactly `width` entries.
    """
    entries: list[bytes] = []
    at = 0
    while at < len(data) and len(entries) < width:
        end = at + _LENGTH_BYTES + int.from_bytes(data[at : at + _LENGTH_BYTES], "big")
        if end > len(data) or end < at + _LENGTH_BYTES or at + _LENGTH_BYTES > len(data):
            break
        entries.append(data[at + _LENGTH_BYTES : end])
        at = end
    if len(entries) != width or at != len(data):
        got = f"{len(entries)} entries, then {len(data) - at} bytes"
        raise DocumentError(subject, expected=f"{width} whole entries", got=got)
    return entries
