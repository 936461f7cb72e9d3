"""Tar archives of images, as WebDataset keeps them: an image, and beside it its class, its text and other facts.

Members whose names are equal up to the first dot of the file's name are one sample, and follow each other:
``a/001.png``, ``a/001.cls``, ``a/001.txt``, ``a/001.json``. The archive is read once from its beginning, packed by gzip
or not. Nothing is ever written, no link is followed, and what is pickled stays closed.
"""

import gzip
import io
import json
import re
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import PurePosixPath
from typing import IO, Any

from ddm.images.column_names import FIELDS, MAX_CELL_BYTES, as_text, find_column
from ddm.images.content import FileContent
from ddm.images.formats import decode_unchecked
from ddm.images.picture import DecodedPicture, DecodeLimits
from ddm.images.reasons import ImageError, Reason

_SKIP_BYTES = 1 << 20
_MAX_HEADER_BYTES = 1 << 16  # of one member, with its pax headers and long names
_MAX_JSON_BYTES = 1 << 20
_MAX_SAMPLES = 1 << 20
_GZIP = b"\x1f\x8b"
_ENCODING = "utf-8"
_MANY_DIGITS = re.compile(rb"\d{1024}")
_PAX_TYPES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)

# What is read as an image. Formats that no decoder here knows are among them, so that they are refused by name.
_IMAGE_SUFFIXES = (
    *(
        ".png",
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".webp",
        ".tif",
        ".tiff",
        ".bmp",
        ".gif",
        ".jp2",
        ".ppm",
        ".pgm",
    ),
    *(".dcm", ".dicom", ".ima", ".nii", ".nii.gz", ".mgh", ".mgz", ".npy"),
)
_TEXT_SUFFIXES = {
    ".cls": "label",
    ".class": "label",
    ".txt": "caption",
    ".text": "caption",
    ".caption": "caption",
}
_JSON_SUFFIX = ".json"


def read(
    content: FileContent,
    kind: str,
    limits: DecodeLimits,
) -> Iterator[DecodedPicture | ImageError]:
    """Yield the pictures of an archive; a sample that gives none comes as its error, and the next ones follow.

    Args:
        content: the archive.
        kind: tar.
        limits: the most that one image may ask for. Its file may have as many bytes as the image values.

    Raises:
        ImageError: an archive that is damaged or cut short, after what comes before that; or one without images.
    """
    if content.path is None:
        raise ImageError(Reason.UNSUPPORTED, f"a {kind} archive inside another file")
    num_samples = 0
    is_packed = content.head(len(_GZIP)) == _GZIP
    with content.open() as stream, gzip.open(stream) if is_packed else stream as unpacked:
        for sample in _samples(unpacked, limits):
            if not sample.suffixes:
                continue  # such as a README
            num_samples += 1
            yield from _decode(sample, limits)
    if num_samples == 0:
        raise ImageError(Reason.UNKNOWN, "an archive without images")


@dataclass
class _Sample:
    """The members of one key.

    Attributes:
        key: their name, up to the first dot of the file's name.
        image: the file of the image.
        texts: what belongs to it, by field and by where it comes from.
        suffixes: of the members, each of which may come once.
        error: why the sample gives no picture.
    """

    key: str
    image: FileContent | None = None
    texts: dict[str, list[str]] = field(default_factory=dict)
    suffixes: set[str] = field(default_factory=set)
    error: ImageError | None = None

    def refuse(self, reason: Reason, detail: str) -> None:
        """Note why this sample gives no picture; the first reason counts."""
        self.image = None
        if self.error is None:
            self.error = ImageError(reason, detail)


def _decode(sample: _Sample, limits: DecodeLimits) -> Iterator[DecodedPicture | ImageError]:
    fields: dict[str, Any] = {}
    for name, texts in sample.texts.items():
        if len(set(texts)) > 1:
            sample.refuse(Reason.AMBIGUOUS, f"a {name} that differs between the members of one key")
        fields[name] = texts[0]
    if sample.error is not None or sample.image is None:
        yield sample.error or ImageError(
            Reason.NO_PIXELS, "a key without an image of a known format"
        )
        return
    try:
        for picture in decode_unchecked(sample.image, limits):
            if isinstance(picture, ImageError):
                yield picture
            else:
                yield picture.with_fields(**fields)
    except ImageError as error:
        yield error


def _samples(stream: IO[bytes] | gzip.GzipFile, limits: DecodeLimits) -> Iterator[_Sample]:
    """Yield the samples of an archive, each once its last member is read.

    Raises:
        ImageError: an archive that is damaged or cut short: the sample in which that happens is not yielded.
    """
    archive = _Archive(stream)
    sample: _Sample | None = None
    # Digests, so that a million keys take the same memory however long they are.
    finished: set[bytes] = set()
    for member in archive.members():
        key, suffix = _key_and_suffix(member.name)
        if not key:
            continue
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample
                finished.add(_digest(sample.key))
            if len(finished) >= _MAX_SAMPLES:
                raise ImageError(
                    Reason.TOO_LARGE, f"an archive of more than {_MAX_SAMPLES} samples"
                )
            sample = _Sample(key)
            if _digest(key) in finished:
                # What came before may have been the image, or its text: neither is certain now.
                sample.refuse(Reason.AMBIGUOUS, "a key that comes again, after other keys")
        _add(sample, suffix, archive, member, limits)
    if sample is not None:
        yield sample


def _digest(key: str) -> bytes:
    return blake2b(key.encode(_ENCODING, "surrogateescape"), digest_size=16).digest()


def _key_and_suffix(name: str) -> tuple[str, str]:
    """Return the key of a member and the rest of its name, in lower case; no key of a hidden file, or without a dot."""
    path = PurePosixPath(name.replace("\\", "/"))
    is_hidden = (
        any(part.startswith(".") and part != ".." for part in path.parts)
        or "__MACOSX" in path.parts
    )
    base, dot, suffix = path.name.partition(".")
    if is_hidden or not dot or not base:
        return "", ""
    return str(path.with_name(base)), f".{suffix.lower()}"


def _add(
    sample: _Sample,
    suffix: str,
    archive: "_Archive",
    member: tarfile.TarInfo,
    limits: DecodeLimits,
) -> None:
    """Take what a member holds into its sample."""
    is_image = suffix.endswith(_IMAGE_SUFFIXES)
    if not is_image and suffix not in _TEXT_SUFFIXES and suffix != _JSON_SUFFIX:
        return
    problem = _problem(member)
    if problem:
        sample.refuse(Reason.UNSUPPORTED, problem)
    if suffix in sample.suffixes:
        sample.refuse(Reason.AMBIGUOUS, "two members of one name")
    if is_image and any(other.endswith(_IMAGE_SUFFIXES) for other in sample.suffixes):
        sample.refuse(
            Reason.AMBIGUOUS, "several images under one key, which ends at the first dot of a name"
        )
    sample.suffixes.add(suffix)
    if sample.error is not None:
        return
    if is_image:
        if member.size > limits.values:
            sample.refuse(Reason.TOO_LARGE, f"an image file of more than {limits.values} bytes")
            return
        sample.image = FileContent(
            data=archive.read_exactly(member.size), name=PurePosixPath(member.name).name
        )
        return
    try:
        texts = _texts(suffix, archive, member)
    except ImageError as error:
        if error.reason is Reason.TRUNCATED:
            raise
        sample.refuse(error.reason, error.detail)
        return
    for name, text in texts.items():
        if text is not None:
            sample.texts.setdefault(name, []).append(text)


def _texts(
    suffix: str,
    archive: "_Archive",
    member: tarfile.TarInfo,
) -> dict[str, str | None]:
    """Return the fields that a member states.

    Raises:
        ImageError: one that is too long, in another encoding, or that does not parse.
    """
    name = _TEXT_SUFFIXES.get(suffix)
    max_bytes = _MAX_JSON_BYTES
    if name is not None:
        max_bytes = MAX_CELL_BYTES[name]
    if member.size > max_bytes:
        raise ImageError(Reason.TOO_LARGE, f"a {suffix} of more than {max_bytes} bytes")
    data = archive.read_exactly(member.size)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ImageError(Reason.DAMAGED, f"a {suffix} that is not UTF-8") from None
    if name is None:
        return _facts_of_json(text)
    return {name: as_text(text)}


def _facts_of_json(text: str) -> dict[str, str | None]:
    """Return the fields of a JSON object that this project knows, at its top level.

    Raises:
        ImageError: no JSON, a name that comes twice, or a value that is neither text nor a number.
    """
    try:
        # Pairs, since a dictionary would keep the last of a name that comes twice.
        document = json.loads(text, object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        raise ImageError(Reason.DAMAGED, "a .json that does not parse") from None
    facts: dict[str, str | None] = {}
    if not isinstance(document, tuple):
        return facts
    names = [name for name, _ in document]
    for name, meaning in FIELDS.items():
        column = find_column(meaning, names)
        if column is None:
            continue
        value = dict(document)[column]
        if not isinstance(value, str | int | float | None):
            raise ImageError(
                Reason.UNSUPPORTED, f"a {name} in .json that is neither text nor a number"
            )
        cell = as_text(value)
        facts[name] = cell
        max_bytes = MAX_CELL_BYTES[name]
        encoded = (cell or "").encode(_ENCODING, "surrogatepass")
        if len(encoded) > max_bytes:
            raise ImageError(Reason.TOO_LARGE, f"a {name} in .json of more than {max_bytes} bytes")
    return facts


def _problem(member: tarfile.TarInfo) -> str:
    """Return why a member is not a file that an archive of images should hold; empty where it is one."""
    if member.issparse():
        return "a sparse member of an archive"
    if not member.isreg():
        return "a link, a device or another special member of an archive"
    if (
        member.name.startswith("/")
        or ".." in PurePosixPath(member.name).parts
        or "\\" in member.name
    ):
        return "a member of an archive whose name leads out of it"
    return ""


class _Archive(io.BufferedIOBase):
    """The bytes of an archive for `tarfile`: read forward and once, with a bound on the headers of one member.

    `tarfile` reads a pax header, a long name or a map of sparse data whole, whatever size it announces, and takes a
    damaged header, or none, for the end of the archive.
    """

    def __init__(self, stream: IO[bytes] | gzip.GzipFile) -> None:
        self._stream = stream
        self._position = 0
        self._last_block = b""
        self._is_before_pax = False
        self._num_header_bytes = 0

    def members(self) -> Iterator[tarfile.TarInfo]:
        """Yield the members that are not folders; `read_exactly` gives the content of one before the next is asked for.

        Raises:
            ImageError: an archive that is damaged or cut short, or that continues after its end.
        """
        try:
            with tarfile.open(fileobj=self, mode="r:", encoding=_ENCODING) as tar:
                while (member := tar.next()) is not None:
                    # It would keep the headers of all members; Python has an option for this since 3.13.
                    tar.members = []  # type: ignore[attr-defined]
                    if not member.isdir():
                        yield member
                    self._num_header_bytes = 0
        except (tarfile.TarError, ValueError, OverflowError, RecursionError):
            raise ImageError(Reason.DAMAGED, "the header of a member of an archive") from None
        if any(self._last_block):
            raise ImageError(Reason.DAMAGED, "the header of a member of an archive")
        # Of archives that were joined, the second would be lost.
        while block := self._read(_SKIP_BYTES):
            if any(block):
                raise ImageError(
                    Reason.DAMAGED, "bytes after the end of an archive, such as a second one"
                )

    def tell(self) -> int:
        """Return how many bytes were read."""
        return self._position

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        """Read on to a position: a seek would not notice the end of a file that is cut short."""
        if position < self._position or whence != io.SEEK_SET:
            raise ImageError(Reason.DAMAGED, "the size of a member of an archive")
        while self._position < position:
            self.read_exactly(min(position - self._position, _SKIP_BYTES))
        return self._position

    def read(self, num_bytes: int | None = -1, /) -> bytes:
        """Return a part of a header."""
        if num_bytes is None or num_bytes < 0:
            raise ImageError(Reason.DAMAGED, "the size of a member of an archive")
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > _MAX_HEADER_BYTES:
            raise ImageError(
                Reason.TOO_LARGE, f"a header in an archive of more than {_MAX_HEADER_BYTES} bytes"
            )
        block = self.read_exactly(num_bytes)
        if self._is_before_pax:
            _check_pax_records(block)
            self._is_before_pax = False
        else:
            # The type of a member is byte 156 of its header, in every format of tar.
            self._is_before_pax = num_bytes == tarfile.BLOCKSIZE and block[156:157] in _PAX_TYPES
        self._last_block = block
        return block

    def read_exactly(self, num_bytes: int) -> bytes:
        """Return this many bytes of a member.

        Raises:
            ImageError: there are fewer, or they are compressed data with errors.
        """
        data = self._read(num_bytes)
        if len(data) != num_bytes:
            raise ImageError(Reason.TRUNCATED, "an archive without its end")
        self._position += num_bytes
        return data

    def _read(self, num_bytes: int) -> bytes:
        try:
            return self._stream.read(num_bytes)
        except EOFError:
            raise ImageError(Reason.TRUNCATED, "an archive without its end") from None
        except (gzip.BadGzipFile, zlib.error):
            raise ImageError(Reason.DAMAGED, "compressed data with errors") from None


def _check_pax_records(data: bytes) -> None:
    """Refuse a pax header that is not made of records ``length key=value`` with the end of a line: `tarfile` skips it.

    See https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html#tag_20_92_13_03.
    """
    # Python before 3.11.10 takes a time for digits that grows with their square (CVE-2024-6232).
    if _MANY_DIGITS.search(data):
        raise ImageError(Reason.DAMAGED, "a pax header in an archive")
    while data.rstrip(b"\0"):
        digits, _, _ = data[:20].partition(b" ")
        length = 0
        if digits.isdigit():
            length = int(digits)
        if (
            not 0 < length <= len(data)
            or data[length - 1 : length] != b"\n"
            or b"=" not in data[:length]
        ):
            raise ImageError(Reason.DAMAGED, "a pax header in an archive")
        data = data[length:]
