"""Arrays on disk: written block by block, so that a full disk is an error, and read through the page cache."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from ddm.errors import DataError
from ddm.io.files import replacing


def write_rows(
    path: Path, shape: tuple[int, ...], blocks: Iterable[np.ndarray], dtype: type = np.float32
) -> None:
    """Write an array to an npy file from blocks of its rows; whole and durable, or not at all.

    Raises:
        OSError: the disk is full.
    """
    with replacing(path) as handle:
        # Written block by block: where a file is mapped, a full disk is a signal that ends the process.
        header = {
            "descr": npy.dtype_to_descr(np.dtype(dtype)),
            "fortran_order": False,
            "shape": shape,
        }
        npy.write_array_header_1_0(handle, header)
        for block in blocks:
            handle.write(np.ascontiguousarray(block, dtype).data)


def map_array(path: Path) -> Tensor:
    """Return an array of `write_rows`, mapped into memory.

    Raises:
        DataError: no such file, or one that is cut short.
    """
    try:
        # Copy-on-write, since torch warns of arrays that cannot be written to. Without pickles, which can run any code.
        return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
    except (OSError, ValueError) as error:
        is_absent = isinstance(error, FileNotFoundError)
        raise DataError(
            f"{path.parent.name}/{path.name}",
            expected="an array",
            got="no file" if is_absent else "a file that is not whole",
            remedy="Copy the folder again from where it was split, or split the data again.",
        ) from error
