"""Images from an npz into one tensor of the plan's shape and range, or a refusal that names no value and no path."""

import os
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import torch
from torch import Tensor

from ddm.errors import ArchipelagoError, DataError
from ddm.io.files import require_file
from ddm.protocol.plan import DataSpec


def read_images(path: Path, spec: DataSpec) -> Tensor:
    """Read the array `images` of an npz.

    Args:
        path: the file; the array is (N, C, H, W) or (N, H, W), or (N, C, D, H, W) of volumes, floating point in the
            plan's range, or uint8 or uint16, whose whole range is then spread over the plan's.
        spec: the plan's shape and range.

    Returns:
        Shape (N, C, H, W) or (N, C, D, H, W), float32, in the plan's range.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not an npz of images, none in it, more than there is memory for, or of another shape or range.
    """
    require_file(path, "an npz of images")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return torch.from_numpy(fit_array(read_array(path, "images", max_bytes=memory), spec)).contiguous()


def read_array(path: Path, name: str, *, max_bytes: int) -> np.ndarray:
    """Read one array of an npz; its size is known before it is unpacked.

    Args:
        path: the file.
        name: of the array.
        max_bytes: most bytes that it may have, unpacked, with its header.

    Raises:
        DataError: not an npz, no such array, one that is too large, or one of pickled objects.
    """
    try:
        with path.open("rb") as handle, np.load(handle, allow_pickle=False) as archive:
            if name not in archive.files:
                got = f"{len(archive.files)} arrays with other names"
                raise DataError("data file", expected=f"an array called {name}", got=got)
            size = next(entry.file_size for entry in archive.zip.infolist() if entry.filename in (name, f"{name}.npy"))
            if size > max_bytes:
                raise DataError(name, expected=f"at most {max_bytes} bytes, unpacked", got=f"{size}")
            return np.asarray(archive[name])
    except ArchipelagoError:
        raise
    except Exception as error:  # whatever zip, its five compressions and the array's header may raise
        raise DataError(
            "data file",
            expected="an npz without pickled objects",
            got=f"a file that does not read as one ({type(error).__name__})",
        ) from error


def count_rows(path: Path, name: str) -> int:
    """Return the length of one array of an npz, from its header alone.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not an npz, no such array, one of pickled objects, or a single number.
    """
    require_file(path, "an npz of images")
    try:
        with ZipFile(path) as archive, archive.open(f"{name}.npy") as handle:
            version = np.lib.format.read_magic(handle)
            headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, _, dtype = headers[version](handle)
            if dtype.hasobject or not shape:
                raise ValueError("no array of numbers")
            return int(shape[0])
    except Exception as error:  # whatever zip and the array's header may raise
        expected = f"an npz with an array called {name}"
        raise DataError("data file", expected=expected, got=type(error).__name__) from error


def fit_array(array: np.ndarray, spec: DataSpec) -> np.ndarray:
    """Return images as float32 in the plan's range, with a channel; see `read_images`.

    Raises:
        DataError: of another shape or range, none, or not finite.
    """
    low, high = spec.range
    if array.ndim == 3:
        array = array[:, None]
    if tuple(array.shape[1:]) != spec.shape:
        raise DataError("image shape", expected=str(spec.shape), got=str(tuple(array.shape[1:])))
    if not len(array):
        raise DataError("images", expected="at least one", got="an empty array")
    if array.dtype in (np.uint8, np.uint16):
        share = array.astype(np.float32) / np.iinfo(array.dtype).max
        return (low + (high - low) * share).astype(np.float32)
    if array.dtype.kind != "f":
        raise DataError("image values", expected="floating point, uint8 or uint16", got=str(array.dtype))
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused as that
        array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise DataError("image values", expected="finite numbers", got="NaN or infinite values")
    if array.min() < low - 1e-5 or array.max() > high + 1e-5:
        raise DataError("image values", expected=f"within [{low:g}, {high:g}]", got="values outside this range")
    return array
