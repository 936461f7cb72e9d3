"""Safetensors files, before and after they are trusted: bounded header, exact shapes, finite values.

A safetensors file is eight bytes (the header's length, little-endian), a JSON header, and the tensors' bytes. The
header is parsed here, with every bound checked, before a tensor is made; that needs no torch. A file is read once, and
each block of it is hashed, and its values checked, while the processor still holds it. So what is checked, digest
included, are the very bytes that become tensors, and a file that is only checked takes one block of memory.
"""

import hashlib
import json
import math
import mmap
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ddm.errors import DigestError, DocumentError, TensorFileError, TrustError
from ddm.io.files import replacing
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
# The word that a wrapper puts before every name, the wrapper, and its attribute that is the network itself.
_WRAPPERS = (
    ("_orig_mod.", "torch.compile", "_orig_mod"),
    ("module.", "DataParallel or DistributedDataParallel", "module"),
)
_PICKLE_REMEDY = (
    "A pickle can run code and is not read. If the file is your own, load it with torch.load and weights_only=True, "
    "and write it again with safetensors.torch.save_file. If not, ask its sender for safetensors."
)
_ALIGNMENT = 8
_BLOCK_BYTES = 1 << 18  # what is read, hashed and checked together stays in the processor's cache
_HEADER_ENTRY_BYTES = 160  # the most that a header has for a tensor, without its name
_LENGTH_BYTES = 8  # of the header, at the beginning of a file
_HASH_CHUNK_BYTES = 1 << 20


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


class HashingReader:
    """A file that is read once, from its first byte to its last, and hashed meanwhile: what is hashed is what is used.

    Args:
        handle: the file, at its beginning.
        size: its length when it was opened; no more is ever read.
        digest: the sha256 that was signed or listed for it; None where nobody listed one, so that nothing is hashed.
    """

    def __init__(self, handle: BinaryIO, size: int, digest: str | None) -> None:
        self._handle = handle
        self.size = size
        self._digest = digest
        self._sha256 = hashlib.sha256()

    def read(self, num_bytes: int) -> bytes:
        """Read some bytes; fewer where the file ends."""
        data = self._handle.read(num_bytes)
        self._hash(data)
        return data

    def readinto(self, view: memoryview, subject: str) -> None:
        """Read as many bytes as `view` holds.

        Raises:
            TensorFileError: the file became shorter.
        """
        num_read = self._handle.readinto(view)  # type: ignore[attr-defined]
        if num_read != len(view):
            raise TensorFileError(
                subject,
                expected=f"{len(view)} more bytes, as when it was opened",
                got=f"{num_read}",
            )
        self._hash(view)

    def _hash(self, data: bytes | memoryview) -> None:
        if self._digest is not None:
            self._sha256.update(data)

    @contextmanager
    def verified(self, subject: str) -> Iterator[None]:
        """Report other bytes than the listed ones as that, and as nothing else that may be wrong with them.

        Raises:
            DigestError: the whole file is not the one listed.
            TensorFileError: it is, and the block under this found something wrong with it.
        """
        try:
            yield
        except TensorFileError:
            self._check_digest(subject)
            raise
        self._check_digest(subject)

    def _check_digest(self, subject: str) -> None:
        """Hash what is left of the file, then compare."""
        if self._digest is None:
            return
        num_left = self.size - self._handle.tell()
        while num_left > 0:
            chunk = self._handle.read(min(num_left, _HASH_CHUNK_BYTES))
            if not chunk:
                break
            self._sha256.update(chunk)
            num_left -= len(chunk)
        digest = self._sha256.hexdigest()
        if digest != self._digest:
            raise DigestError(
                subject, expected=f"sha256 {self._digest[:16]}...", got=f"{digest[:16]}..."
            )


def read_header(path: Path, *, max_bytes: int) -> Mapping[str, TensorSpec]:
    """Read the names, dtypes and shapes in a file without reading a tensor.

    Args:
        path: the file.
        max_bytes: most bytes the whole file may have.

    Raises:
        TensorFileError: not a regular file, too large, a pickle, or a header that breaks any rule of the format.
    """
    with _open_bounded(path, max_bytes) as (handle, size):
        header, _ = _read_header(HashingReader(handle, size, None), None, path.name)
    return header


def check_tensors(
    specs: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec], subject: str
) -> None:
    """Require exactly the tensors expected.

    Raises:
        TensorFileError: a name too few or too many, another dtype or another shape.
    """
    for name in expected:
        if name not in specs:
            refuse_wrapped_names(specs, subject)
            raise TensorFileError(
                subject,
                expected=f"tensor {name}",
                got=f"{len(specs)} tensors of other names",
                remedy=(
                    "Give the weights of this network, under the names of its state_dict(). If others sent the file, "
                    "do not use it."
                ),
            )
    for name, spec in specs.items():
        if name not in expected:
            raise TensorFileError(
                subject,
                expected=f"only {len(expected)} known tensors",
                got=f"an unknown tensor among {len(specs)}",
            )
        if spec != expected[name]:
            raise TensorFileError(
                f"{subject}, tensor {name}", expected=str(expected[name]), got=str(spec)
            )


def refuse_wrapped_names(names: Iterable[str], subject: str) -> None:
    """Refuse names before which a wrapper around the network put a word, and say how to save them without it.

    Raises:
        TensorFileError: such names.
    """
    for prefix, wrapper, attribute in _WRAPPERS:
        if all(name.startswith(prefix) for name in names):
            raise TensorFileError(
                subject,
                expected="the names of the network's own tensors",
                got=f"names that begin with {prefix}, as {wrapper} makes them",
                remedy=(
                    "Save the network inside of the wrapper: "
                    f"safetensors.torch.save_file(net.{attribute}.state_dict(), FILE)."
                ),
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
        data = memoryview(memory)
        reader = HashingReader(handle, size, digest)
        with reader.verified(subject):
            header, offset = _read_header(reader, expected, subject)
            for name, block in _blocks(header, offset):
                view = data[block]
                reader.readinto(view, subject)
                _check_values(view, header[name].dtype, f"{subject}, tensor {name}", max_abs)
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
    subject = path.name
    # One block of memory for all: nothing of the file is kept.
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    with _open_bounded(path, max_bytes) as (handle, size):
        reader = HashingReader(handle, size, digest)
        with reader.verified(subject):
            header, offset = _read_header(reader, expected, subject)
            for name, block in _blocks(header, offset):
                view = buffer[: block.stop - block.start]
                reader.readinto(view, subject)
                _check_values(view, header[name].dtype, f"{subject}, tensor {name}", max_abs)


def _read_header(
    reader: HashingReader, expected: Mapping[str, TensorSpec] | None, subject: str
) -> tuple[Mapping[str, TensorSpec], int]:
    """Return what the header says, and where the tensors begin."""
    length = _header_length(reader.read(_LENGTH_BYTES), reader.size, subject)
    offset = _LENGTH_BYTES + length
    header = _parse_header(reader.read(length), reader.size - offset, subject)
    # Before any value is read, so that a file of other tensors costs no more than its header.
    if expected is not None:
        check_tensors(header, expected, subject)
    return header, offset


def _blocks(header: Mapping[str, TensorSpec], offset: int) -> Iterator[tuple[str, slice]]:
    """Cut the tensors, which follow one another from `offset` on, into blocks of whole values."""
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
    max_length = min(MAX_HEADER_BYTES, size - _LENGTH_BYTES)
    if len(start) < _LENGTH_BYTES or not 2 <= length <= max_length:
        _name_pickle(start, subject)
        expected = f"a header of at most {MAX_HEADER_BYTES} bytes, within the file"
        raise TensorFileError(subject, expected=expected, got=f"{length} bytes in a file of {size}")
    return length


def stored_bytes(specs: Mapping[str, TensorSpec]) -> int:
    """Return no less than a file of these tensors needs: their values, and the header's entry for each."""
    num_bytes = _HEADER_ENTRY_BYTES
    for name, spec in specs.items():
        num_bytes += _HEADER_ENTRY_BYTES + len(name) + spec.bytes
    return num_bytes


def save_tensors(
    path: Path, tensors: "Mapping[str, torch.Tensor]", metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors so that the same values give the same bytes, whole or not at all.

    The safetensors library orders metadata at random, so the format is written here: larger dtypes first, then by name,
    as the library does, the header padded with blanks to a multiple of eight bytes.

    Args:
        path: the file to write.
        tensors: name to tensor, on any device, of any strides.
        metadata: short strings, 4 KiB in all.

    Raises:
        TensorFileError: what `read_header` would refuse.
        OSError: the disk is full or the folder is not writable; an old file is untouched.
    """
    specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
    order = sorted(specs, key=lambda name: (-DTYPE_BYTES[specs[name].dtype], name))
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = dict(sorted(metadata.items()))
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
    # What a reader would refuse is not written at all.
    _parse_header(encoded, offset, path.name)
    with replacing(path) as handle:
        handle.write(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded)
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
    """Report a pickle as that. Called only after the length is refused, since a valid length may look like one too."""
    if start.startswith(b"PK\x03\x04"):
        raise TensorFileError(
            subject,
            expected="safetensors",
            got="a zip archive, as torch.save writes (a pickle)",
            remedy=_PICKLE_REMEDY,
        )
    if re.match(rb"\x80[\x02-\x05]", start):
        raise TensorFileError(
            subject, expected="safetensors", got="a pickle", remedy=_PICKLE_REMEDY
        )


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
    # In the order of the bytes: overlapping tensors could hide values from the checks, gaps could carry anything.
    placed.sort(key=lambda place: place[0])
    end = 0
    specs: dict[str, TensorSpec] = {}
    for begin, name, spec in placed:
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
    size = 0
    for name, text in value.items():
        if not isinstance(text, str):
            raise TensorFileError(
                f"{subject}, __metadata__", expected="strings by name", got=f"{_kind(text)} by name"
            )
        size += len(name) + len(text)
    if size > MAX_METADATA_BYTES:
        expected = f"at most {MAX_METADATA_BYTES} characters"
        raise TensorFileError(f"{subject}, __metadata__", expected=expected, got=f"{size}")


def _parse_entry(entry: Any, subject: str) -> tuple[TensorSpec, int]:
    """Return what the tensor is and where its bytes begin."""
    expected = "exactly dtype, shape and data_offsets"
    if not isinstance(entry, dict):
        raise TensorFileError(subject, expected=expected, got=_kind(entry))
    if set(entry) != {"dtype", "shape", "data_offsets"}:
        raise TensorFileError(subject, expected=expected, got=f"{len(entry)} fields")
    dtype = entry["dtype"]
    if not (isinstance(dtype, str) and dtype in DTYPE_BYTES):
        raise TensorFileError(
            subject, expected=f"dtype {', '.join(DTYPE_BYTES)}", got="an unknown dtype"
        )
    spec = TensorSpec(dtype, _parse_shape(entry["shape"], subject))
    begin, end = _parse_offsets(entry["data_offsets"], subject)
    if begin < 0 or end - begin != spec.bytes:
        raise TensorFileError(
            subject, expected=f"{spec.bytes} bytes for {spec}", got="offsets that span another size"
        )
    return spec, begin


def _parse_shape(shape: Any, subject: str) -> tuple[int, ...]:
    expected = f"at most {MAX_DIMS} dimensions"
    if not isinstance(shape, list):
        raise TensorFileError(subject, expected=expected, got=_kind(shape))
    if len(shape) > MAX_DIMS:
        raise TensorFileError(subject, expected=expected, got=f"{len(shape)}")
    for number, size in enumerate(shape, 1):
        if not (_is_int(size) and 0 < size <= MAX_SIZE):
            raise TensorFileError(
                subject,
                expected=f"dimensions that are whole numbers from 1 to {MAX_SIZE}",
                got=f"another value as dimension {number}",
            )
    return tuple(shape)


def _parse_offsets(offsets: Any, subject: str) -> tuple[int, int]:
    """Return where the bytes of a tensor begin and end, counted from the end of the header."""
    expected = "two whole numbers as offsets"
    if not isinstance(offsets, list):
        raise TensorFileError(subject, expected=expected, got=_kind(offsets))
    if len(offsets) != 2 or not all(map(_is_int, offsets)):
        raise TensorFileError(subject, expected=expected, got=f"{len(offsets)} values")
    begin, end = offsets
    return begin, end


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
    # JSON's true is an int to Python.
    return isinstance(value, int) and not isinstance(value, bool)


def _check_values(block: memoryview, dtype: str, subject: str, max_abs: float | None) -> None:
    import torch

    kind = getattr(torch, _TORCH_NAMES[dtype])
    if not kind.is_floating_point:
        return
    # The smallest and the largest value are both NaN if any value is, so that one pass finds everything.
    extremes = torch.aminmax(torch.frombuffer(block, dtype=kind))
    low = float(extremes.min)
    high = float(extremes.max)
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
