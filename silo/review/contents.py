"""What is in a file that would leave, for a person to read: a document as text, tensors as numbers."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ddm.io.files import read_bounded
from ddm.io.tensors import TensorSpec, load_tensors, read_header
from ddm.protocol.base import MAX_DOCUMENT_BYTES
from ddm.system.escape import escape_control

MOST_VALUES = 20_000  # shown of one file; all of them are in its download
_AT_ONCE_BYTES = 1 << 28


def as_text(path: Path) -> str:
    """Describe a file: JSON indented; of tensors name, type, shape and range, and of small ones every value.

    Raises:
        TensorFileError, FormatError: the file is neither.
    """
    if path.suffix == ".json":
        document = json.loads(read_bounded(path, MAX_DOCUMENT_BYTES))
        return escape_control(json.dumps(document, indent=2, ensure_ascii=False))
    return "\n".join(_tensors(path))


def _tensors(path: Path) -> Iterator[str]:
    size = path.stat().st_size
    header = read_header(path, max_bytes=size)
    yield f"{len(header)} tensors, {sum(_count(spec) for spec in header.values())} values\n"
    if size > _AT_ONCE_BYTES:
        yield from (f"{name}: {spec}" for name, spec in header.items())
        yield "\nToo large to be opened here; the download holds every value."
        return
    left = MOST_VALUES
    for name, tensor in load_tensors(path, header, max_bytes=size).items():
        values = tensor.double().numpy()
        yield f"{name}: {header[name]}, least {values.min():.6g}, mean {values.mean():.6g}, largest {values.max():.6g}"
        if values.size <= left and values.size <= MOST_VALUES // 4:
            left -= values.size
            with np.printoptions(threshold=MOST_VALUES, linewidth=116, precision=5):
                yield str(values.astype(np.int64) if header[name].dtype.startswith("I") else values)
        else:
            yield "(too many to show; the download holds them)"
        yield ""


def _count(spec: TensorSpec) -> int:
    return int(np.prod(spec.shape, dtype=np.int64))
