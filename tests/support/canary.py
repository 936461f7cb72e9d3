"""Texts that name a patient, and a search for them in whatever form bytes may hold them.

`found(data)` looks for every text of `TEXTS` in UTF-8, UTF-16, Latin-1, base64 at each of its three offsets,
hexadecimal, URL and JSON escapes, in either case, and for its plain digests, which anybody could guess; in the bytes
themselves and in what is packed inside them: zlib and gzip streams, members of zip archives (npz), cells of Parquet and
of SQLite.
"""

import base64
import gzip
import hashlib
import json
import sqlite3
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

NAME = "DOE^JOHN"
FOREIGN = "MÜLLER^JÖRG"
NUMBER = "MRN48213377"
BIRTH = "19370514"
TEXTS = (NAME, FOREIGN, NUMBER, BIRTH)
# Archives lie in archives; `pack_every_way` has as many layers.
_DEPTH = 3
_MOST = 1 << 26  # of what is packed in what is packed; bytes that one stream may hold
_ZLIB = tuple(bytes([0x78, flags]) for flags in (0x01, 0x5E, 0x9C, 0xDA))
_DIGESTS = ("md5", "sha1", "sha256", "sha512", "blake2b", "blake2s")


def find_texts(data: bytes) -> set[tuple[str, str]]:
    """Return the texts that some bytes hold, and in which form."""
    return set(_search(data, 0))


def find_texts_below(*places: Path) -> dict[str, set[tuple[str, str]]]:
    """Return what the files at or below some places hold, and their names; only those that hold something."""
    hits: dict[str, set[tuple[str, str]]] = {}
    for place in places:
        for path in [place, *sorted(place.rglob("*"))]:
            name = str(path.relative_to(place)).encode("utf-8", "surrogateescape")
            hits_of_path = find_texts(name)
            if path.is_file():
                hits_of_path |= find_texts(path.read_bytes())
            if hits_of_path:
                hits[str(path)] = hits_of_path
    return hits


def forms(text: str) -> dict[str, bytes]:
    """Return how a text may be written, by the name of the form."""
    encoded = {name: text.encode(name) for name in ("utf-8", "latin-1", "utf-16-le", "utf-16-be")}
    spellings = dict(encoded)
    for name, plain in encoded.items():
        # Three bytes become four letters, so that a text looks different at each of three offsets.
        spellings |= {f"base64 of {name} at {at}": _in_base64(plain, at) for at in range(3)}
        spellings[f"hex of {name}"] = plain.hex().encode()
    spellings["url"] = quote(text, safe="").encode()
    spellings["url, every letter"] = "".join(f"%{byte:02X}" for byte in encoded["utf-8"]).encode()
    spellings["json"] = json.dumps(text)[1:-1].encode()
    # A plain digest hides nothing: a patient's number has few digits, and anybody can try them all.
    for name in _DIGESTS:
        digest = hashlib.new(name, encoded["utf-8"]).digest()
        spellings |= {name: digest, f"{name} in hex": digest.hex().encode()}
    return spellings


def pack_every_way(plain: bytes, folder: Path) -> dict[str, bytes]:
    """Return files that hold some bytes, packed in each way that the search undoes."""
    archive = BytesIO()
    stored = BytesIO()
    table = BytesIO()
    database = folder / "database.sqlite"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as members:
        members.writestr("a.txt", b"x" * 100 + plain)
    np.savez_compressed(stored, cells=np.frombuffer(plain, np.uint8))
    pq.write_table(pa.table({"cell": [plain], "number": [1]}), table, compression="zstd")
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("create table kept (number integer, cell blob)")
        connection.execute("insert into kept values (1, ?)", (b"a" * 4000 + plain + b"b" * 9000,))
        connection.commit()
    return {
        "zlib": b"before" + zlib.compress(plain * 3) + b"after",
        "gzip": gzip.compress(plain),
        "zip": archive.getvalue(),
        "npz": stored.getvalue(),
        "parquet": table.getvalue(),
        "sqlite": database.read_bytes(),
        "zlib in zip in gzip": gzip.compress(_zip(zlib.compress(plain))),
    }


def _zip(data: bytes) -> bytes:
    archive = BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as members:
        members.writestr("a", data)
    return archive.getvalue()


@cache
def _needles() -> dict[bytes, tuple[str, str]]:
    """Return all forms of all texts, in lower case, as the searched bytes are; base64 of either case besides."""
    needles: dict[bytes, tuple[str, str]] = {}
    for text in TEXTS:
        for spelt in dict.fromkeys((text, text.lower(), text.upper())):
            needles |= {form.lower(): (text, name) for name, form in forms(spelt).items()}
    return needles


def _in_base64(plain: bytes, at: int) -> bytes:
    """Return the letters of base64 that follow from a text alone, where `at` bytes come before it."""
    whole = base64.b64encode(bytes(at) + plain + bytes(3))
    first = -(-8 * at // 6)
    last = 8 * (at + len(plain)) // 6
    return whole[first:last]


def _search(data: bytes, depth: int) -> Iterator[tuple[str, str]]:
    lowered = data.lower()
    # Base64 comes in lines, too, as in letters and certificates.
    joined = lowered.translate(None, b"\r\n")
    for needle, (text, form) in _needles().items():
        if needle in lowered or (form.startswith("base64") and needle in joined):
            yield text, form
    if depth < _DEPTH:
        for inner in _unpack(data):
            yield from _search(inner, depth + 1)


def _unpack(data: bytes) -> Iterator[bytes]:
    yield from _unpack_streams(data, _ZLIB, zlib.MAX_WBITS)
    yield from _unpack_streams(data, (b"\x1f\x8b\x08",), zlib.MAX_WBITS | 16)
    yield from _unpack_members(data)
    if data.startswith(b"PAR1"):
        for column in pq.read_table(BytesIO(data)).columns:
            yield from map(_as_bytes, column.to_pylist())
    if data.startswith(b"SQLite format 3\0"):
        yield from _database_cells(data)


def _unpack_streams(data: bytes, heads: tuple[bytes, ...], bits: int) -> Iterator[bytes]:
    for head in heads:
        at = data.find(head)
        while at >= 0:
            yield from _inflate(memoryview(data)[at:], bits)
            at = data.find(head, at + 1)


def _unpack_members(data: bytes) -> Iterator[bytes]:
    """Yield the members of zip archives by their local headers; stored ones stand in the bytes themselves."""
    at = data.find(b"PK\x03\x04")
    while at >= 0:
        name, extra = (
            int.from_bytes(data[at + place : at + place + 2], "little") for place in (26, 28)
        )
        if data[at + 8 : at + 10] == b"\x08\0":
            yield from _inflate(memoryview(data)[at + 30 + name + extra :], -zlib.MAX_WBITS)
        at = data.find(b"PK\x03\x04", at + 4)


def _inflate(data: memoryview, bits: int) -> Iterator[bytes]:
    """Yield what a stream held that begins here, also if it was cut short; nothing if none begins here."""
    with suppress(zlib.error):
        if inner := zlib.decompressobj(bits).decompress(data, _MOST):
            yield inner


def _database_cells(data: bytes) -> Iterator[bytes]:
    """Yield every cell of a database: a long one lies in pages that do not follow each other."""
    with TemporaryDirectory() as folder:
        copy = Path(folder, "copy.sqlite")
        copy.write_bytes(data)
        with closing(sqlite3.connect(copy)) as connection:
            connection.text_factory = bytes
            names = connection.execute(
                "select name from sqlite_master where type = 'table'"
            ).fetchall()
            for (name,) in names:
                for row in connection.execute(f'select * from "{name.decode()}"'):
                    yield from map(_as_bytes, row)


def _as_bytes(cell: object) -> bytes:
    return cell if isinstance(cell, bytes) else str(cell).encode("utf-8", "surrogatepass")
