"""What is in a file that would leave, for a person to read: a document as text, tensors as numbers."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ddm.errors import DigestError
from ddm.io.files import read_bounded
from ddm.io.tensors import TensorSpec, check_file, load_tensors, read_header
from ddm.protocol.base import MAX_DOCUMENT_BYTES, sha256_hex
from ddm.system.escape import escape_control

# Shown of one file; all of them are in its download.
MAX_VALUES = 20_000
# A larger file is not opened as a whole.
_MAX_OPENED_BYTES = 1 << 28
_BLOCK_BYTES = 1 << 20
CHANGED_REMEDY = "Restore private/ from backup, or give the plan up: `silo withdraw SITE`."


def as_text(path: Path, digest: str) -> str:
    """Describe a file: JSON indented; of tensors name, type, shape and range, and of small ones every value.

    Args:
        path: the file.
        digest: the sha256 that the draft lists for it; what is described has it.

    Raises:
        DigestError: the file changed since the draft was verified.
        TensorFileError, FormatError: the file is neither.
    """
    if path.suffix == ".json":
        data = read_bounded(path, MAX_DOCUMENT_BYTES)
        _check_digest(path.name, sha256_hex(data), digest)
        document = json.loads(data)
        # A text in a document may come from elsewhere: escape sequences in it could rewrite what a terminal shows.
        return escape_control(json.dumps(document, indent=2, ensure_ascii=False))
    return "\n".join(_tensors(path, digest))


def open_verified(path: Path, digest: str) -> BinaryIO:
    """Open a file that has the digest which the draft lists; `verified_blocks` reads it.

    Raises:
        DigestError: the file changed since the draft was verified.
    """
    handle = path.open("rb")
    try:
        actual = hashlib.file_digest(handle, "sha256").hexdigest()
        _check_digest(path.name, actual, digest)
        handle.seek(0)
    except BaseException:
        handle.close()
        raise
    return handle


def verified_blocks(handle: BinaryIO, digest: str) -> Iterator[bytes]:
    """Yield the bytes of a file from `open_verified`, and close it.

    Raises:
        DigestError: the file changed since it was opened; its end was not yielded.
    """
    hasher = hashlib.sha256()
    with handle:
        block = handle.read(_BLOCK_BYTES)
        while block:
            hasher.update(block)
            next_block = handle.read(_BLOCK_BYTES)
            if not next_block:
                # A download without its end is known to be broken: nobody inspects other bytes than the draft's.
                _check_digest(Path(handle.name).name, hasher.hexdigest(), digest)
            yield block
            block = next_block


def _check_digest(subject: str, actual: str, digest: str) -> None:
    if actual != digest:
        raise DigestError(
            subject,
            expected=f"the draft's, sha256 {digest}",
            got=f"sha256 {actual}",
            remedy=CHANGED_REMEDY,
        )


def _tensors(path: Path, digest: str) -> Iterator[str]:
    # The bounds of reading are the file's own, since it is this site's. The bytes below must have the draft's digest.
    size = path.stat().st_size
    header = read_header(path, max_bytes=size)
    yield f"{len(header)} tensors, {sum(_count(spec) for spec in header.values())} values\n"
    if size > _MAX_OPENED_BYTES:
        check_file(path, header, max_bytes=size, digest=digest)
        yield from (f"{name}: {spec}" for name, spec in header.items())
        yield "\nToo large to be opened here; the download holds every value."
        return
    num_left = MAX_VALUES
    for name, tensor in load_tensors(path, header, max_bytes=size, digest=digest).items():
        values = tensor.double().numpy()
        yield f"{name}: {header[name]}, least {values.min():.6g}, mean {values.mean():.6g}, largest {values.max():.6g}"
        # One tensor takes at most a quarter of the values that are shown, so that several small ones find a place.
        if values.size <= num_left and values.size <= MAX_VALUES // 4:
            num_left -= values.size
            # Read as float64 above; counts are shown without a decimal point.
            if header[name].dtype.startswith("I"):
                values = values.astype(np.int64)
            with np.printoptions(threshold=MAX_VALUES, linewidth=116, precision=5):
                yield str(values)
        else:
            yield "(too many to show; the download holds them)"
        yield ""


def _count(spec: TensorSpec) -> int:
    return int(np.prod(spec.shape, dtype=np.int64))
