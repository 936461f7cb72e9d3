"""The one Flower application that a silo runs: what `aggregator run` ships, known by a digest in this package.

The application's modules only import installed code. The attack: anybody who controls an aggregator ships another one,
which a SuperNode would install and run as the courier's user. A silo therefore compares before it unpacks.
"""

import hashlib
import io
import json
import struct
import tomllib
import zipfile
import zlib

from ddm.errors import DigestError

# Of the files in `aggregator/runtime/flower_app`; a test holds the two together.
APPLICATION_DIGEST = "3d6bbdf713c986247d02cca2e1c7df20c452e6227b1973850797bd82d08a3ada"

MAX_APPLICATION_BYTES = 64 * 1024
_MAX_FILES = 16
_SETTINGS = "pyproject.toml"
# Flower's own list of the files with their digests; it is not code, and says nothing that the files do not.
_CONTENT = ".info/CONTENT"
# What the parsers of archives and of TOML raise at garbage; RuntimeError includes NotImplementedError.
_PARSER_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    OSError,
    ValueError,
    KeyError,
    TypeError,
    RuntimeError,
    MemoryError,
    OverflowError,
)


def check_application(archive: bytes) -> None:
    """Check that an archive holds the application of this package, file for file.

    Args:
        archive: what Flower calls a FAB.

    Raises:
        DigestError: it is another application, or no archive.
    """
    digest = application_digest(archive)
    if digest == APPLICATION_DIGEST:
        return
    got = "something else than a small archive"
    if digest is not None:
        got = f"{digest[:16]}..."
    raise DigestError(
        "the shipped application",
        expected=f"sha256 {APPLICATION_DIGEST[:16]}..., that of this version of Archipelago",
        got=got,
        remedy="Nothing of it was run. Ask the federation's operator which version of Archipelago runs there.",
    )


def application_digest(archive: bytes) -> str | None:
    """Return the digest of an archive's files, None for what is not a small archive of distinct files.

    The archive's own bytes depend on the compressor, and its settings on who wrote the TOML; so files are digested, and
    the settings as what they say.
    """
    try:
        files = _read_archive(archive)
        settings = tomllib.loads(files.pop(_SETTINGS).decode())
        files.pop(_CONTENT, None)
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        description = {"settings": settings, "files": digests}
        encoded = json.dumps(description, sort_keys=True, allow_nan=False).encode()
    except _PARSER_ERRORS:
        return None
    return hashlib.sha256(encoded).hexdigest()


def _read_archive(archive: bytes) -> dict[str, bytes]:
    """Read every file within bounds: an archive of a few kilobytes can unpack to gigabytes."""
    if len(archive) > MAX_APPLICATION_BYTES:
        raise ValueError("too large")
    files: dict[str, bytes] = {}
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        entries = opened.infolist()
        if len(entries) > _MAX_FILES:
            raise ValueError("too many files")
        for entry in entries:
            if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError("compressed in another way than Flower does")
            with opened.open(entry) as stream:
                data = stream.read(MAX_APPLICATION_BYTES + 1)
            # Of two files of one name, Flower could unpack the one that was not digested here.
            if entry.filename in files or len(data) > MAX_APPLICATION_BYTES:
                raise ValueError("two files of one name, or a file that is too large")
            files[entry.filename] = data
    return files
