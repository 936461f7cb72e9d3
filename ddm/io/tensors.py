"""What is in this safetensors file, before and after it is trusted: bounded header, exact shapes, finite values.

A safetensors file is eight bytes (the header's length, little-endian), a JSON header, and the tensors' bytes. The
header is parsed here, with every bound checked, before a tensor is made; that needs no torch. A file is read once, and
each block of it is hashed, and its values checked, while the processor still holds it. So what is checked, digest
included, are the very bytes that become tensors, and a file that is only checked takes one block of memory.
"""

import json
import math
import mmap
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ddm.errors import DocumentError, TensorFileError, TrustError
from ddm.io.files import replacing
from ddm.io.hashing import Once
from ddm.io.untrusted import open_regular
from ddm.protocol.base import check_json

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 1024 * 1024
MAX_METADATA_BYTES = 4096
MAX_NAME_LENGTH = 512
MAX_DIMS = 16
MAX_SIZE = 2**40
DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_ALIGNMENT = 8
_BLOCK_BYTES = 1 << 18  # what is read, hashed and checked together stays in the processor's cache
_HEADER_ENTRY = 160  # no header says more of a tensor than this and its name


@dataclass(frozen=True)
class TensorSpec:
    """What one tensor looks like.

    Attributes:
        dtype: as safetensors names it, e.g. ``F32``.
        shape: every entry above 0; empty for a scalar.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The tensor's length in the file."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def read_header(path: Path, *, max_bytes: int) -> Mapping[str, TensorSpec]:
    """Read the names, dtypes and shapes in a file without reading a tensor.

    Args:
        path: the file.
        max_bytes: most bytes the whole file may have.

    Raises:
        TensorFileError: not a regular file, too large, a pickle, or a header that breaks any rule of the format.
    """
    with _open_bounded(path, max_bytes) as (handle, size):
        return _read_header(Once(handle, size, None), None, path.name)[0]


def check_tensors(
    found: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec], subject: str
) -> None:
    """Demand exactly the tensors expected.

    Raises:
        TensorFileError: a name too few or too many, another dtype or another shape.
    """
    for name in expected:
        if name not in found:
            raise TensorFileError(
                subject, expected=f"tensor {name}", got=f"{len(found)} tensors of other names"
            )
    for name, spec in found.items():
        if name not in expected:
            raise TensorFileError(
                subject,
                expected=f"only {len(expected)} known tensors",
                got=f"an unknown tensor among {len(found)}",
            )
        if spec != expected[name]:
            raise TensorFileError(
                f"{subject}, tensor {name}", expected=str(expected[name]), got=str(spec)
            )


def load_tensors(
    path: Path,
    expected: Mapping[str, TensorSpec] | None,
    *,
    max_bytes: int,
    max_abs: float | None = None,
    digest: str | None = None,
) -> "dict[str, torch.Tensor]":
    """Load a file: read it once and check its header, its values and its digest.

    Args:
        path: the file.
        expected: exactly what must be in it; None accepts any names and shapes.
        max_bytes: most bytes the whole file may have.
        max_abs: largest magnitude any floating-point value may have.
        digest: the sha256 that was signed or listed for it; the bytes hashed are the bytes that become tensors.

    Returns:
        Name to tensor, on the CPU, side by side in one piece of memory as large as the file.

    Raises:
        DigestError: other bytes than those of `digest`, whatever else is wrong with them.
        TensorFileError: anything else that does not hold, NaN and infinity included.
    """
    import torch

    subject = path.name
    with _open_bounded(path, max_bytes) as (handle, size):
        # Memory of our own that is never written twice; a mapped file would be whatever its host says later. Private,
        # because the kernel keeps memory that could be shared as a file, and takes half as long again to hand it out.
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        data, file = memoryview(memory), Once(handle, size, digest)
        with file.verified(subject):
            header, offset = _read_header(file, expected, subject)
            for name, block in _blocks(header, offset):
                file.readinto(data[block], subject)
                _check_values(data[block], header[name].dtype, f"{subject}, tensor {name}", max_abs)
    tensors: dict[str, torch.Tensor] = {}
    for name, spec in header.items():  # in the order of their bytes, side by side
        dtype = getattr(torch, _TORCH_NAMES[spec.dtype])
        flat = torch.frombuffer(data, dtype=dtype, count=math.prod(spec.shape), offset=offset)
        tensors[name] = flat.reshape(spec.shape)
        offset += spec.bytes
    return tensors


def check_file(
    path: Path,
    expected: Mapping[str, TensorSpec],
    *,
    max_bytes: int,
    max_abs: float | None = None,
    digest: str | None = None,
) -> None:
    """Check a file as `load_tensors` does, and keep nothing of it.

    Args:
        path: the file.
        expected: exactly what must be in it.
        max_bytes: most bytes the whole file may have.
        max_abs: largest magnitude any floating-point value may have.
        digest: the sha256 that was signed or listed for it.

    Raises:
        DigestError: other bytes than those of `digest`, whatever else is wrong with them.
        TensorFileError: anything else that does not hold, NaN and infinity included.
    """
    subject, room = path.name, memoryview(bytearray(_BLOCK_BYTES))
    with _open_bounded(path, max_bytes) as (handle, size):
        file = Once(handle, size, digest)
        with file.verified(subject):
            header, offset = _read_header(file, expected, subject)
            for name, block in _blocks(header, offset):
                view = room[: block.stop - block.start]
                file.readinto(view, subject)
                _check_values(view, header[name].dtype, f"{subject}, tensor {name}", max_abs)


def _read_header(
    file: Once, expected: Mapping[str, TensorSpec] | None, subject: str
) -> tuple[Mapping[str, TensorSpec], int]:
    """Return what the header says, and where the tensors begin."""
    length = _header_length(file.read(8), file.size, subject)
    header = _parse_header(file.read(length), file.size - 8 - length, subject)
    if expected is not None:
        check_tensors(header, expected, subject)
    return header, 8 + length


def _blocks(header: Mapping[str, TensorSpec], offset: int) -> Iterator[tuple[str, slice]]:
    """Cut the tensors, which lie side by side from `offset` on, into blocks of whole values."""
    for name, spec in header.items():
        end = offset + spec.bytes
        for start in range(offset, end, _BLOCK_BYTES):
            yield name, slice(start, min(start + _BLOCK_BYTES, end))
        offset = end


@contextmanager
def _open_bounded(path: Path, max_bytes: int) -> Iterator[tuple[BinaryIO, int]]:
    with ExitStack() as stack:
        try:
            handle, size = stack.enter_context(open_regular(path, path.name))
        except TrustError as error:
            raise TensorFileError(path.name, expected=error.expected, got=error.got) from error
        if size > max_bytes:
            raise TensorFileError(
                path.name, expected=f"at most {max_bytes} bytes", got=f"{size} bytes"
            )
        yield handle, size


def _header_length(start: bytes, size: int, subject: str) -> int:
    length = int.from_bytes(start, "little")
    if len(start) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        _name_pickle(start, subject)
        expected = f"a header of at most {MAX_HEADER_BYTES} bytes, within the file"
        raise TensorFileError(subject, expected=expected, got=f"{length} bytes in a file of {size}")
    return length


def stored_bytes(specs: Mapping[str, TensorSpec]) -> int:
    """Return no less than a file of these tensors needs: their values, and room for what the header says of each."""
    return (
        sum(_HEADER_ENTRY + len(name) + spec.bytes for name, spec in specs.items()) + _HEADER_ENTRY
    )


def save_tensors(
    path: Path, tensors: "Mapping[str, torch.Tensor]", metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors so that the same values give the same bytes, whole or not at all.

    The safetensors library orders metadata at random, so the format is written here: larger dtypes first, then by name,
    as the library does, the header padded with blanks to a multiple of eight bytes.

    Args:
        path: where to.
        tensors: name to tensor, on any device, of any strides.
        metadata: short strings, 4 KiB in all.

    Raises:
        TensorFileError: what `read_header` would refuse.
        OSError: the disk is full or the folder is not writable; an old file is untouched.
    """
    specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
    order = sorted(specs, key=lambda name: (-DTYPE_BYTES[specs[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    offset = 0
    for name in order:
        spec = specs[name]
        end = offset + spec.bytes
        header[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    if len(encoded) > MAX_HEADER_BYTES:
        raise TensorFileError(
            path.name, expected=f"header of at most {MAX_HEADER_BYTES} bytes", got="a larger header"
        )
    _parse_header(encoded, offset, path.name)
    with replacing(path) as handle:
        handle.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in order:
            handle.write(_raw_bytes(tensors[name]))


def spec_of(tensor: "torch.Tensor") -> TensorSpec:
    """Describe a tensor.

    Raises:
        TensorFileError: a dtype that these files do not hold.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    for dtype, torch_name in _TORCH_NAMES.items():
        if name == torch_name:
            return TensorSpec(dtype, tuple(tensor.shape))
    raise TensorFileError("tensor", expected=f"dtype {', '.join(DTYPE_BYTES)}", got=name)


def _name_pickle(start: bytes, subject: str) -> None:
    """Say so when what is no safetensors file looks like a pickle; only after that, since a length may look so too."""
    if start.startswith(b"PK\x03\x04"):
        raise TensorFileError(
            subject, expected="safetensors", got="a zip archive, as torch.save writes (a pickle)"
        )
    if re.match(rb"\x80[\x02-\x05]", start):
        raise TensorFileError(subject, expected="safetensors", got="a pickle")


def _parse_header(header: bytes, data_bytes: int, subject: str) -> Mapping[str, TensorSpec]:
    """Read the JSON header of a file with `data_bytes` bytes of tensors behind it, in the order of those; pure."""
    if not header.startswith(b"{"):
        raise TensorFileError(
            subject, expected="a JSON header", got=f"bytes that begin with {header[:4].hex()}"
        )
    try:
        value = check_json(header, subject=f"{subject}, header", limit=MAX_HEADER_BYTES)
    except DocumentError as error:
        raise TensorFileError(error.subject, expected=error.expected, got=error.got) from error
    if not isinstance(value, dict):
        raise TensorFileError(subject, expected="a JSON object as header", got=_kind(value))
    _check_metadata(value.pop("__metadata__", {}), subject)
    placed: list[tuple[int, str, TensorSpec]] = []
    for number, (name, entry) in enumerate(value.items(), 1):
        if not 0 < len(name) <= MAX_NAME_LENGTH:
            raise TensorFileError(
                subject,
                expected=f"names of 1 to {MAX_NAME_LENGTH} characters",
                got=f"a name of {len(name)}",
            )
        spec, begin = _parse_entry(entry, f"{subject}, tensor {number} in its header")
        placed.append((begin, name, spec))
    end = 0
    specs: dict[str, TensorSpec] = {}
    for begin, name, spec in sorted(placed, key=lambda place: place[0]):
        if begin != end:
            raise TensorFileError(
                subject, expected="tensors without gaps or overlaps", got="a gap or an overlap"
            )
        specs[name] = spec
        end += spec.bytes
    if end != data_bytes:
        raise TensorFileError(subject, expected=f"{end} bytes of tensors", got=f"{data_bytes}")
    return specs


def _check_metadata(value: Any, subject: str) -> None:
    if not isinstance(value, dict):
        raise TensorFileError(
            f"{subject}, __metadata__", expected="strings by name", got=_kind(value)
        )
    if odd := [text for text in value.values() if not isinstance(text, str)]:
        raise TensorFileError(
            f"{subject}, __metadata__", expected="strings by name", got=f"{_kind(odd[0])} by name"
        )
    if (size := sum(len(name) + len(text) for name, text in value.items())) > MAX_METADATA_BYTES:
        expected = f"at most {MAX_METADATA_BYTES} characters"
        raise TensorFileError(f"{subject}, __metadata__", expected=expected, got=f"{size}")


def _parse_entry(entry: Any, subject: str) -> tuple[TensorSpec, int]:
    """Return what the tensor is and where its bytes begin."""
    if not (isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}):
        got = f"{len(entry)} fields" if isinstance(entry, dict) else _kind(entry)
        raise TensorFileError(subject, expected="exactly dtype, shape and data_offsets", got=got)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (isinstance(dtype, str) and dtype in DTYPE_BYTES):
        raise TensorFileError(
            subject, expected=f"dtype {', '.join(DTYPE_BYTES)}", got="an unknown dtype"
        )
    if not (isinstance(shape, list) and len(shape) <= MAX_DIMS):
        got = f"{len(shape)}" if isinstance(shape, list) else _kind(shape)
        raise TensorFileError(subject, expected=f"at most {MAX_DIMS} dimensions", got=got)
    if bad := [
        number
        for number, size in enumerate(shape, 1)
        if not (_is_int(size) and 0 < size <= MAX_SIZE)
    ]:
        expected = f"dimensions that are whole numbers from 1 to {MAX_SIZE}"
        raise TensorFileError(
            subject, expected=expected, got=f"another value as dimension {bad[0]}"
        )
    if not (
        isinstance(offsets, list) and len(offsets) == 2 and all(_is_int(place) for place in offsets)
    ):
        got = f"{len(offsets)} values" if isinstance(offsets, list) else _kind(offsets)
        raise TensorFileError(subject, expected="two whole numbers as offsets", got=got)
    spec = TensorSpec(dtype, tuple(shape))
    begin, end = offsets
    if begin < 0 or end - begin != spec.bytes:
        raise TensorFileError(
            subject, expected=f"{spec.bytes} bytes for {spec}", got="offsets that span another size"
        )
    return spec, begin


def _kind(value: Any) -> str:
    """Name a JSON value's kind; the value itself, which its sender chose, is not repeated."""
    kinds = {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "a truth value",
        type(None): "null",
    }
    return kinds.get(type(value), "a number")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_values(block: memoryview, dtype: str, subject: str, max_abs: float | None) -> None:
    import torch

    kind = getattr(torch, _TORCH_NAMES[dtype])
    if not kind.is_floating_point:
        return
    # hands NaN on
    low, high = (float(value) for value in torch.aminmax(torch.frombuffer(block, dtype=kind)))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise TensorFileError(subject, expected="finite values", got="NaN or infinity")
    if max_abs is not None and max(-low, high) > max_abs:
        raise TensorFileError(
            subject, expected=f"magnitudes up to {max_abs:g}", got="a larger value"
        )


def _raw_bytes(tensor: "torch.Tensor") -> bytes:
    import torch

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())
