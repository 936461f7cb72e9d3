"""Opens any file and yields its pictures: the kind is told by the first bytes, never by the name alone.

Decoders are libraries in C that read what strangers wrote. They belong in a process with bounds of memory and time,
as `silo.images` starts it; `Limits` alone bound what a header may ask for.
"""

import gzip
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from ddm.errors import SetupError
from ddm.images.picture import DecodedPicture, Limits
from ddm.images.reasons import ImageError, Reason

_HEAD_BYTES = 552
_ARCHIVES = (b"PK\x03\x04", b"PK\x05\x06", b"7z\xbc\xaf\x27\x1c", b"Rar!", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")
_RASTERS = {
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"\xff\xd8\xff": "JPEG",
    **dict.fromkeys((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), "TIFF"),
}
_GZIP = b"\x1f\x8b"
_DICOM_GROUPS = (b"\x08\0", b"\x02\0", b"\0\x08", b"\0\x02")  # of the first element of a file without preamble
_EXTRA = "Install them: in Archipelago's repository, pip install '.[images]'."
ARRAYS = ("npz", "npy", "idx", "Parquet")


def decode(
    path: Path, limits: Limits | None = None, content: bytes | None = None
) -> Iterator[DecodedPicture | ImageError]:
    """Yield the pictures of a file, whatever its kind; an image of it that cannot be used comes as its error.

    Args:
        path: a DICOM, NIfTI, MGH, PNG, JPEG, TIFF or WebP file, or an npz, npy, idx or Parquet file of many images.
        limits: the most that it may ask for.
        content: what the file holds, where that was read already.

    Raises:
        ImageError: no picture, or none any more, with the true reason; it never names the file.
        SetupError: the packages that decode this kind are not installed.
    """
    limits = limits or Limits()
    try:
        kind, packed = _kind(path, content)
        yield from _pictures(path, kind, packed, limits, content)
    except (ImageError, SetupError):
        raise
    except ImportError as error:
        got = f"no module {error.name}"
        raise SetupError("images", expected="the decoders of images", got=got, remedy=_EXTRA) from error
    except Exception as error:
        raise _reason(error) from error


def _pictures(
    path: Path, kind: str, packed: bool, limits: Limits, content: bytes | None
) -> Iterator[DecodedPicture | ImageError]:
    """Call the decoder of a kind; each pulls in its library only here."""
    if kind == "DICOM":
        from ddm.images.dicom import read_dicom

        yield from read_dicom(path if content is None else BytesIO(content), limits)
    elif kind in ("NIfTI", "NIfTI-2", "MGH"):
        from ddm.images.nifti import read_nifti

        yield from read_nifti(path, kind, packed, limits)
    elif kind in ARRAYS:
        from ddm.images.arrays import read_arrays

        yield from read_arrays(path, kind, limits)
    else:
        from ddm.images.raster import read_raster

        yield from read_raster(path, kind, limits, content)


def _kind(path: Path, content: bytes | None) -> tuple[str, bool]:
    """Return the kind of a file, and whether gzip packed it."""
    if content is None:
        with path.open("rb") as handle:
            head = handle.read(_HEAD_BYTES)
    else:
        head = content[:_HEAD_BYTES]
    if not head:
        raise ImageError(Reason.EMPTY)
    packed = head.startswith(_GZIP)
    if packed:
        with gzip.open(path) as unpacked:
            head = unpacked.read(_HEAD_BYTES)
    kind = _sniffed(head, path, packed)
    if kind is None:
        raise ImageError(Reason.ARCHIVE if packed or head.startswith(_ARCHIVES) else Reason.UNKNOWN)
    return kind, packed


def _sniffed(head: bytes, path: Path, packed: bool) -> str | None:
    if head[128:132] == b"DICM" and not packed:
        return "DICOM"
    if head.startswith(b"\0\0\x08") and 1 <= head[3] <= 4:
        return "idx"
    if (kind := _of_volume(head, path)) is not None:
        return kind
    if packed:
        return None
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "WEBP"
    if head.startswith(b"PAR1"):
        return "Parquet"
    if head.startswith(b"\x93NUMPY"):
        return "npy"
    if head.startswith(_ARCHIVES[:2]) and path.suffix.lower() == ".npz":
        return "npz"
    for begin, kind in _RASTERS.items():
        if head.startswith(begin):
            return kind
    return "DICOM" if _bare_dicom(head) else None


def _of_volume(head: bytes, path: Path) -> str | None:
    sizes = {int.from_bytes(head[:4], order) for order in ("little", "big")}
    if 348 in sizes and head[344:348] in (b"n+1\0", b"ni1\0"):
        if head[344:348] == b"ni1\0":
            raise ImageError(Reason.UNSUPPORTED, "NIfTI in two files: save it as one, .nii")
        return "NIfTI"
    if 540 in sizes and head[4:7] == b"n+2":
        return "NIfTI-2"
    is_mgh = path.name.lower().endswith((".mgh", ".mgz", ".mgh.gz"))
    return "MGH" if head.startswith(b"\0\0\0\1") and is_mgh else None


def _bare_dicom(head: bytes) -> bool:
    """Whether a file begins with an element of DICOM's first groups, whose length lies within reason."""
    if len(head) < 8 or head[:2] not in _DICOM_GROUPS:
        return False
    order = "little" if head[1] == 0 else "big"
    if int.from_bytes(head[2:4], order) > 0x2000 and head[:2] in _DICOM_GROUPS[::2]:  # type: ignore[arg-type]
        return False
    explicit = head[4:6].isalpha() and head[4:6].isupper()
    return explicit or int.from_bytes(head[4:8], order) < 1 << 16  # type: ignore[arg-type]


def _reason(error: Exception) -> ImageError:
    """Return what a library's error means; its text may quote the file and goes no further."""
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
