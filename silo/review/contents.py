"""What is in a file that would leave, for a person to read: a document as text, tensors as numbers."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ddm.io.files import read_bounded
from ddm.io.tensors import TensorSpec, load_tensors, read_header
from ddm.protocol.base import MAX_DOCUMENT_BYTES
from ddm.system.escape import escape_control

# Shown of one file; all of them are in its download.
MAX_VALUES = 20_000
# A larger file is not opened as a whole.
_MAX_OPENED_BYTES = 1 << 28


def as_text(path: Path) -> str:
    """Describe a file: JSON indented; of tensors name, type, shape and range, and of small ones every value.

    Raises:
        TensorFileError, FormatError: the file is neither.
    """
    if path.suffix == ".json":
        document = json.loads(read_bounded(path, MAX_DOCUMENT_BYTES))
        # A text in a document may come from elsewhere: escape sequences in it could rewrite what a terminal shows.
        return escape_control(json.dumps(document, indent=2, ensure_ascii=False))
    return "\n".join(_tensors(path))


def _tensors(path: Path) -> Iterator[str]:
    # The bounds of reading are the file's own: it is this site's, and was verified against the draft.
    size = path.stat().st_size
    header = read_header(path, max_bytes=size)
    yield f"{len(header)} tensors, {sum(_count(spec) for spec in header.values())} values\n"
    if size > _MAX_OPENED_BYTES:
        yield from (f"{name}: {spec}" for name, spec in header.items())
        yield "\nToo large to be opened here; the download holds every value."
        return
    num_left = MAX_VALUES
    for name, tensor in load_tensors(path, header, max_bytes=size).items():
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
