"""Tells the format of a file by its first bytes, and decodes it: a new format is one module and one line in `FORMATS`.

Decoders are libraries in C that read what strangers wrote. `ddm.images.workers` runs them in processes with bounds of
memory and time; in this process, `Limits` alone bound what a header may ask for.
"""

import gzip
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ddm.errors import SetupError
from ddm.images.check import checked
from ddm.images.content import FileContent
from ddm.images.picture import DecodedPicture, Limits
from ddm.images.reasons import ImageError, Reason

_HEAD_BYTES = 552  # up to the end of the header of NIfTI-2, the longest that is looked at
_GZIP = b"\x1f\x8b"
_ARCHIVES = (b"PK\x03\x04", b"PK\x05\x06", b"7z\xbc\xaf\x27\x1c", b"Rar!", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")
_ZIP = _ARCHIVES[:2]
_FIRST_DICOM_GROUPS = (b"\x08\0", b"\x02\0", b"\0\x08", b"\0\x02")  # little and big endian
_MAX_FIRST_ELEMENT_BYTES = 1 << 16
_INSTALL = "Install them: in Archipelago's repository, pip install '.[images]'."


@dataclass(frozen=True)
class FileHead:
    """What tells the format of a file.

    Attributes:
        first_bytes: of the file; of a gzip file, of what it unpacks to.
        name: of the file.
        gzipped: whether the file is packed by gzip.
    """

    first_bytes: bytes
    name: str
    gzipped: bool

    def starts_with(self, *prefixes: bytes) -> bool:
        """Whether the file begins with one of these, and is not packed."""
        return not self.gzipped and self.first_bytes.startswith(prefixes)

    def has_suffix(self, *suffixes: str) -> bool:
        """Whether the name ends with one of these, in either case."""
        return self.name.lower().endswith(suffixes)


@dataclass(frozen=True)
class Format:
    """One format of image files.

    Attributes:
        name: what reports call it.
        module: the module of `ddm.images` whose function `read(content, name, limits)` decodes it; it is imported when
            the first file of this format comes, since most of them pull in a large library.
        matches: whether a file is of this format.
    """

    name: str
    module: str
    matches: Callable[[FileHead], bool]


def decode(content: FileContent, limits: Limits | None = None) -> Iterator[DecodedPicture | ImageError]:
    """Yield the pictures of a file, whatever its format; a picture of it that cannot be used comes as its error.

    Args:
        content: the file.
        limits: the most that it may ask for.

    Raises:
        ImageError: no picture, or no more pictures, with the true reason; it never names the file.
        SetupError: the packages that decode this format are not installed.
    """
    limits = limits or Limits()
    try:
        file_format = format_of(content)
        reader = import_module(f"ddm.images.{file_format.module}")
        for picture in reader.read(content, file_format.name, limits):
            yield picture if isinstance(picture, ImageError) else checked(picture)
    except (ImageError, SetupError):
        raise
    except ImportError as error:
        got = f"no module {error.name}"
        raise SetupError("images", expected="the decoders of images", got=got, remedy=_INSTALL) from error
    except Exception as error:
        # Whatever a library raised: its text may quote the file, so that only its meaning goes further.
        raise _meaning_of(error) from error


def format_of(content: FileContent) -> Format:
    """Return the format of a file, as its first bytes tell.

    Raises:
        ImageError: an empty file, an archive, or no image.
    """
    first_bytes = content.head(_HEAD_BYTES)
    if not first_bytes:
        raise ImageError(Reason.EMPTY)
    gzipped = first_bytes.startswith(_GZIP)
    if gzipped:
        with content.open() as stream, gzip.open(stream) as unpacked:
            first_bytes = unpacked.read(_HEAD_BYTES)
    head = FileHead(first_bytes, content.name, gzipped)
    for file_format in FORMATS:
        if file_format.matches(head):
            return file_format
    if gzipped or head.starts_with(*_ARCHIVES):
        raise ImageError(Reason.ARCHIVE)
    raise ImageError(Reason.UNKNOWN)


def _is_dicom(head: FileHead) -> bool:
    return head.first_bytes[128:132] == b"DICM" and not head.gzipped


def _is_dicom_without_preamble(head: FileHead) -> bool:
    """Whether a file begins with an element of DICOM's first groups whose length is plausible."""
    data = head.first_bytes
    if head.gzipped or len(data) < 8 or data[:2] not in _FIRST_DICOM_GROUPS:
        return False
    order: Any = "little" if data[1] == 0 else "big"
    # Elements of group 8 that may come first have small numbers; text that happens to begin alike has not.
    if order == "little" and int.from_bytes(data[2:4], order) > 0x2000:
        return False
    has_explicit_type = data[4:6].isalpha() and data[4:6].isupper()
    return has_explicit_type or int.from_bytes(data[4:8], order) < _MAX_FIRST_ELEMENT_BYTES


def _is_nifti(head: FileHead) -> bool:
    sizes = (int.from_bytes(head.first_bytes[:4], "little"), int.from_bytes(head.first_bytes[:4], "big"))
    magic = head.first_bytes[344:348]
    if 348 in sizes and magic == b"ni1\0":
        raise ImageError(Reason.UNSUPPORTED, "NIfTI in two files: save it as one, .nii")
    return 348 in sizes and magic == b"n+1\0"


def _is_nifti_2(head: FileHead) -> bool:
    sizes = (int.from_bytes(head.first_bytes[:4], "little"), int.from_bytes(head.first_bytes[:4], "big"))
    return 540 in sizes and head.first_bytes[4:7] == b"n+2"


def _is_mgh(head: FileHead) -> bool:
    return head.first_bytes.startswith(b"\0\0\0\1") and head.has_suffix(".mgh", ".mgz", ".mgh.gz")


FORMATS = (
    Format("DICOM", "dicom", _is_dicom),
    Format("idx", "arrays", lambda head: head.first_bytes[:3] == b"\0\0\x08" and head.first_bytes[3] in (1, 2, 3, 4)),
    Format("NIfTI", "nifti", _is_nifti),
    Format("NIfTI-2", "nifti", _is_nifti_2),
    Format("MGH", "nifti", _is_mgh),
    Format("WEBP", "raster", lambda head: head.starts_with(b"RIFF") and head.first_bytes[8:12] == b"WEBP"),
    Format("Parquet", "arrays", lambda head: head.starts_with(b"PAR1")),
    Format("npy", "arrays", lambda head: head.starts_with(b"\x93NUMPY")),
    Format("npz", "arrays", lambda head: head.starts_with(*_ZIP) and head.has_suffix(".npz")),
    Format("PNG", "raster", lambda head: head.starts_with(b"\x89PNG\r\n\x1a\n")),
    Format("JPEG", "raster", lambda head: head.starts_with(b"\xff\xd8\xff")),
    Format("TIFF", "raster", lambda head: head.starts_with(b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")),
    Format("DICOM", "dicom", _is_dicom_without_preamble),
)
"""The first that matches counts, so that formats with weak signs come last."""


def _meaning_of(error: Exception) -> ImageError:
    text = str(error).lower()
    if isinstance(error, MemoryError) or "cannot allocate" in text or "out of memory" in text:
        return ImageError(Reason.MEMORY)
    if isinstance(error, EOFError) or "truncated" in text or "unexpected end" in text or "premature" in text:
        return ImageError(Reason.TRUNCATED)
    if isinstance(error, PermissionError):
        return ImageError(Reason.FORBIDDEN)
    if isinstance(error, FileNotFoundError):
        return ImageError(Reason.MISSING)
    if isinstance(error, RecursionError):
        return ImageError(Reason.DAMAGED, "nested too deeply")
    if isinstance(error, gzip.BadGzipFile | zlib.error):
        return ImageError(Reason.DAMAGED, "packed with errors")
    return ImageError(Reason.DAMAGED, type(error).__name__)
