"""Tells the format of a file by its first bytes, and decodes it: a new format is one module and one line in `FORMATS`.

Decoders are libraries in C that read what strangers wrote. `ddm.images.workers` runs them in processes with bounds of
memory and time; in this process, `DecodeLimits` alone bound what a header may ask for.
"""

import gzip
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from ddm.errors import SetupError
from ddm.images.content import FileContent
from ddm.images.faces import volume_may_show_face
from ddm.images.idx import is_idx_head
from ddm.images.picture import DecodedPicture, DecodeLimits
from ddm.images.reasons import Flag, ImageError, Reason
from ddm.images.text import suspect_text

_HEAD_BYTES = 552  # up to the end of the header of NIfTI-2, the longest that is looked at
_IMAGE_AXES = 3  # (C, H, W)
_VOLUME_AXES = 4  # (C, D, H, W)
_GZIP = b"\x1f\x8b"
_ARCHIVES = (
    b"PK\x03\x04",
    b"PK\x05\x06",
    b"7z\xbc\xaf\x27\x1c",
    b"Rar!",
    b"BZh",
    b"\xfd7zXZ\0",
    b"\x28\xb5\x2f\xfd",
)
_ZIP = _ARCHIVES[:2]
_NOT_DECODED = {
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
    b"jP  \r\n\x87\n": "JPEG 2000",
    b"\xff\x4f\xff\x51": "JPEG 2000",
    b"JXL \r\n\x87\n": "JPEG XL",
    b"ftypavif": "AVIF",
    b"ftypheic": "HEIC",
    b"ftypmif1": "HEIC",
    b"ftypheix": "HEIC",
    b"8BPS": "Photoshop",
}
_VOLUMES_NOT_DECODED = {b"NRRD000": "NRRD", b"ObjectType": "MetaImage", b"NDims": "MetaImage"}
_NETPBM = re.compile(rb"P[1-6]\s+[#\d]|P7\s+WIDTH|P[Ff]\s+\d")
_FIRST_DICOM_GROUPS = (b"\x08\0", b"\x02\0", b"\0\x08", b"\0\x02")  # little and big endian
_MAX_FIRST_ELEMENT_BYTES = 1 << 16
_INSTALL = "Install them: in Archipelago's repository, pip install '.[images]'."


@dataclass(frozen=True)
class FileHead:
    """The head of a file, which decides its format.

    Attributes:
        first_bytes: of the file; of a gzip file, of what it unpacks to.
        name: the name of the file.
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
class ImageFormat:
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


def decode(
    content: FileContent,
    limits: DecodeLimits | None = None,
) -> Iterator[DecodedPicture | ImageError]:
    """Yield the pictures of a file, whatever its format; a picture of it that cannot be used comes as its error.

    Args:
        content: the file.
        limits: the most that it may ask for.

    Raises:
        ImageError: no picture, or no more pictures, with the true reason; it never names the file.
        SetupError: the packages that decode this format are not installed.
    """
    for picture in decode_unchecked(content, limits or DecodeLimits()):
        if isinstance(picture, ImageError):
            yield picture
        else:
            yield checked(picture)


def decode_unchecked(
    content: FileContent,
    limits: DecodeLimits,
) -> Iterator[DecodedPicture | ImageError]:
    """Yield the pictures of a file inside another one, before the checks that `decode` makes of each.

    Args:
        content: the file.
        limits: the most that it may ask for.

    Raises:
        ImageError, SetupError: see `decode`.
    """
    try:
        file_format = format_of(content)
        reader = import_module(f"ddm.images.{file_format.module}")
        yield from reader.read(content, file_format.name, limits)
    except (ImageError, SetupError):
        raise
    except ImportError as error:
        got = f"no module {error.name}"
        raise SetupError(
            "images",
            expected="the decoders of images",
            got=got,
            remedy=_INSTALL,
        ) from error
    except Exception as error:
        # Whatever a library raised: its text may quote the file, so that only its meaning goes further.
        raise _meaning_of(error) from error


def checked(picture: DecodedPicture) -> DecodedPicture:
    """Return a picture with the flags that its values call for, added to those that its decoder set."""
    if picture.values.ndim == _IMAGE_AXES:
        # A declared text makes the picture wait in any case, and the search for text takes time.
        is_suspected = Flag.DECLARED_TEXT not in picture.flags and suspect_text(picture.values)
        flag = Flag.SUSPECTED_TEXT
    elif picture.values.ndim == _VOLUME_AXES:
        is_suspected = Flag.DECLARED_FACE not in picture.flags and volume_may_show_face(
            picture, picture.head
        )
        flag = Flag.FACE
    else:
        return picture
    if not is_suspected:
        return picture
    return replace(picture, flags=picture.flags | {flag})


def format_of(content: FileContent) -> ImageFormat:
    """Return the format of a file, as its first bytes show.

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
    order: Any
    order = "big"
    if data[1] == 0:
        order = "little"
    # Elements of group 8 that may come first have small numbers; text that happens to begin alike has not.
    if order == "little" and int.from_bytes(data[2:4], order) > 0x2000:
        return False
    has_explicit_type = data[4:6].isalpha() and data[4:6].isupper()
    return has_explicit_type or int.from_bytes(data[4:8], order) < _MAX_FIRST_ELEMENT_BYTES


def _is_nifti(head: FileHead) -> bool:
    sizes = (
        int.from_bytes(head.first_bytes[:4], "little"),
        int.from_bytes(head.first_bytes[:4], "big"),
    )
    magic = head.first_bytes[344:348]
    if 348 in sizes and magic == b"ni1\0":
        raise ImageError(Reason.UNSUPPORTED, "NIfTI in two files: save it as one, .nii")
    return 348 in sizes and magic == b"n+1\0"


def _is_nifti_2(head: FileHead) -> bool:
    sizes = (
        int.from_bytes(head.first_bytes[:4], "little"),
        int.from_bytes(head.first_bytes[:4], "big"),
    )
    return 540 in sizes and head.first_bytes[4:7] == b"n+2"


def _is_bmp(head: FileHead) -> bool:
    """Whether a file begins with BMP's header: two letters, two fields of zero, and a header of a known size."""
    return (
        head.starts_with(b"BM")
        and head.first_bytes[6:10] == bytes(4)
        and head.first_bytes[15:18] == bytes(3)
    )


def _is_not_decoded(head: FileHead) -> bool:
    """Refuse images of formats that have no decoder here, by name."""
    for signature, name in _NOT_DECODED.items():
        if head.starts_with(signature) or (
            head.first_bytes[4:12] == signature and not head.gzipped
        ):
            raise ImageError(Reason.UNSUPPORTED, f"{name}: save it as PNG")
    for signature, name in _VOLUMES_NOT_DECODED.items():
        if head.first_bytes.startswith(signature):
            raise ImageError(Reason.UNSUPPORTED, f"{name}: save it as NIfTI, .nii")
    if not head.gzipped and _NETPBM.match(head.first_bytes):
        raise ImageError(Reason.UNSUPPORTED, "PBM, PGM or PPM: save it as PNG")
    if _is_analyze(head):
        raise ImageError(
            Reason.UNSUPPORTED,
            "ANALYZE, which does not say which side is left: save it as NIfTI, .nii",
        )
    return False


def _is_analyze(head: FileHead) -> bool:
    """Whether a file is a header of ANALYZE 7.5, which begins with its own length."""
    data = head.first_bytes
    is_nifti = data[344:347] in (b"ni1", b"n+1")
    if head.gzipped or len(data) < 348 or is_nifti:
        return False
    first_field = data[:4]
    lengths = (int.from_bytes(first_field, "little"), int.from_bytes(first_field, "big"))
    return 348 in lengths and head.has_suffix(".hdr")


def _is_mgh(head: FileHead) -> bool:
    return head.first_bytes.startswith(b"\0\0\0\1") and head.has_suffix(".mgh", ".mgz", ".mgh.gz")


FORMATS = (
    ImageFormat("DICOM", "dicom", _is_dicom),
    ImageFormat("idx", "arrays", lambda head: is_idx_head(head.first_bytes)),
    ImageFormat("NIfTI", "nifti", _is_nifti),
    ImageFormat("NIfTI-2", "nifti", _is_nifti_2),
    ImageFormat("MGH", "mgh", _is_mgh),
    ImageFormat(
        "WEBP",
        "webp",
        lambda head: head.starts_with(b"RIFF") and head.first_bytes[8:12] == b"WEBP",
    ),
    ImageFormat("Parquet", "arrays", lambda head: head.starts_with(b"PAR1")),
    ImageFormat("npy", "arrays", lambda head: head.starts_with(b"\x93NUMPY")),
    ImageFormat("npz", "arrays", lambda head: head.starts_with(*_ZIP) and head.has_suffix(".npz")),
    ImageFormat("PNG", "png", lambda head: head.starts_with(b"\x89PNG\r\n\x1a\n")),
    ImageFormat("JPEG", "jpeg", lambda head: head.starts_with(b"\xff\xd8\xff")),
    ImageFormat(
        "TIFF", "tiff", lambda head: head.starts_with(b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
    ),
    ImageFormat("BMP", "bmp", _is_bmp),
    ImageFormat("others", "", _is_not_decoded),
    ImageFormat("tar", "webdataset", lambda head: head.first_bytes[257:262] == b"ustar"),
    ImageFormat("DICOM", "dicom", _is_dicom_without_preamble),
)
"""The first that matches counts, so that formats with weak signs come last."""


def _meaning_of(error: Exception) -> ImageError:
    text = str(error).lower()
    if isinstance(error, MemoryError) or "cannot allocate" in text or "out of memory" in text:
        return ImageError(Reason.MEMORY)
    if (
        isinstance(error, EOFError)
        or "truncated" in text
        or "unexpected end" in text
        or "premature" in text
    ):
        return ImageError(Reason.TRUNCATED)
    if isinstance(error, PermissionError):
        return ImageError(Reason.FORBIDDEN)
    if isinstance(error, FileNotFoundError):
        return ImageError(Reason.MISSING)
    if isinstance(error, RecursionError):
        return ImageError(Reason.DAMAGED, "nested too deeply")
    if isinstance(error, struct.error) and "requires a buffer" in text:
        return ImageError(Reason.TRUNCATED)  # fewer bytes than the field has that is read
    if isinstance(error, gzip.BadGzipFile | zlib.error):
        return ImageError(Reason.DAMAGED, "compressed data with errors")
    return ImageError(Reason.DAMAGED, type(error).__name__)
