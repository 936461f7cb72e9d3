"""Volumes as NIfTI files, in the orientation in which silos read them."""

import gzip
import json
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

_COMMENT = 6  # the code of an extension of plain text
# W, H and D, in the file's coordinates to the right, front, top
_LEFT_POSTERIOR_SUPERIOR = np.diag([-1.0, -1.0, 1.0, 1.0])


def encode_volumes(volumes: "Tensor", marks: dict[str, str], *, compress: bool) -> bytes:
    """Return volumes as one NIfTI-1 file, float32, voxels of 1 without a unit.

    Args:
        volumes: shape (N, C, D, H, W); the file's axes are W, H, D, N and C, the last two where longer than 1.
        marks: what the file says of itself; `Synthetic` and `Release` stand in its field `descrip` too.
        compress: for a name that ends in .nii.gz.
    """
    import nibabel

    array = volumes.permute(4, 3, 2, 0, 1).contiguous().numpy()
    array = array.squeeze(tuple(axis for axis in (3, 4) if array.shape[axis] == 1))
    image = nibabel.Nifti1Image(array, _LEFT_POSTERIOR_SUPERIOR)
    image.header["descrip"] = f"synthetic {marks.get('Release', '')}".strip().encode()
    comment = json.dumps(marks, sort_keys=True).encode()
    image.header.extensions.append(nibabel.nifti1.Nifti1Extension(_COMMENT, comment))
    data: bytes = image.to_bytes()
    return gzip.compress(data, mtime=0) if compress else data
