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
    index //= 1000
    while index:
        parts.insert(0, f"x{index % 1000:03d}")
        index //= 1000
    kind = "entries" if level is None else str(level)
    path = f"tile/{kind}/{'/'.join(parts)}"
    if width < WIDTH:
        path += f".p/{width}"
    return path


def tiles_of(num: int) -> list[tuple[int, int]]:
    """Return index and width of the tiles that hold `num` hashes or entries, the partial one last."""
    num_full = num // WIDTH
    tiles = [(index, WIDTH) for index in range(num_full)]
    if num % WIDTH:
        tiles.append((num_full, num % WIDTH))
    return tiles


def layout(entries: Sequence[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield every file of a log of these entries, path and content, except the checkpoint."""
    # The entries themselves, then the hashes, level by level.
    for index, width in tiles_of(len(entries)):
        first = index * WIDTH
        yield tile_path(None, index, width), encode_bundle(entries[first : first + width])
    level = 0
    hashes = [leaf_hash(entry) for entry in entries]
    while hashes:
        for index, width in tiles_of(len(hashes)):
            first = index * WIDTH
            yield tile_path(level, index, width), b"".join(hashes[first : first + width])
        # A full tile is one hash of the level above; a partial tile is not there yet, since its root will change.
        num_full = len(hashes) // WIDTH
        hashes = [
            root_hash(hashes[index * WIDTH : (index + 1) * WIDTH]) for index in range(num_full)
        ]
        level += 1


def encode_bundle(entries: Sequence[bytes]) -> bytes:
    """Join entries, each after its length in two bytes."""
    return b"".join(len(entry).to_bytes(_LENGTH_BYTES, "big") + entry for entry in entries)


def parse_bundle(data: bytes, width: int, subject: str) -> list[bytes]:
    """Split an entry bundle.

    Raises:
        DocumentError: it does not hold exactly `width` entries.
    """
    entries: list[bytes] = []
    position = 0
    while position < len(data) and len(entries) < width:
        start = position + _LENGTH_BYTES
        length = int.from_bytes(data[position:start], "big")
        # A length of one byte only, or an entry that is cut off: what is left over is refused below.
        if start + length > len(data):
            break
        entries.append(data[start : start + length])
        position = start + length
    if len(entries) != width or position != len(data):
        raise DocumentError(
            subject,
            expected=f"{width} whole entries",
            got=f"{len(entries)} entries, then {len(data) - position} bytes",
        )
    return entries
