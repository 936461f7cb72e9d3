"""Private images from disk into one tensor of the plan's shape and range. Paths and names stop here."""

import hashlib
import hmac
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddm.errors import DataError
from ddm.files import require_file
from ddm.protocol.plan import DataSpec


@dataclass(frozen=True)
class Cohort:
    """The images this site trains on.

    Attributes:
        images: shape (N, C, H, W), float32, in the plan's range.
        digest: see `dataset_digest`.
    """

    images: Tensor
    digest: str

    @property
    def num_units(self) -> int:
        """The number of privacy units; the unit is the image."""
        return len(self.images)


def load_cohort(path: Path, spec: DataSpec, *, min_images: int, salt: bytes) -> Cohort:
    """Read `path` and check it against the plan.

    Args:
        path: an npz with `images`, shape (N, C, H, W) or (N, H, W): float in the plan's range, or uint8.
        spec: the plan's shape and range.
        min_images: fewest images that the plan and this site accept.
        salt: this site's, for the digest.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not an npz of images, of another shape or range, not finite, or too few.
    """
    require_file(path, "an npz of images")
    images = torch.from_numpy(_fit(_read_npz(path), spec)).contiguous()
    if len(images) < min_images:
        raise DataError("images", expected=f"at least {min_images}, as plan and policy ask", got=f"{len(images)}")
    return Cohort(images=images, digest=dataset_digest(images, salt))


def dataset_digest(images: Tensor, salt: bytes) -> str:
    """Return the HMAC-SHA256 of the images' shape and float32 values; one changed image changes it.

    It is keyed with a secret of this site because ledger entries contain it and their digests leave: without the key,
    whoever knows all images but one could try candidates for the last against the ledger's chain.
    """
    array = images.contiguous().numpy()
    return hmac.new(salt, repr(array.shape).encode() + array.tobytes(), hashlib.sha256).hexdigest()


def _read_npz(path: Path) -> np.ndarray:
    try:
        with path.open("rb") as handle, np.load(handle, allow_pickle=False) as archive:
            if "images" not in archive.files:
                raise DataError("data file", expected="an array called images", got=f"{len(archive.files)} others")
            return np.asarray(archive["images"])
    except (ValueError, TypeError, AttributeError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError("data file", expected="an npz without pickled objects", got="something else") from error


def _fit(array: np.ndarray, spec: DataSpec) -> np.ndarray:
    low, high = spec.range
    if array.ndim == 3:
        array = array[:, None]
    if array.ndim != 4 or tuple(array.shape[1:]) != spec.shape:
        raise DataError("image shape", expected=str(spec.shape), got=str(tuple(array.shape[1:])))
    if array.dtype == np.uint8:
        return (low + (high - low) * (array.astype(np.float32) / 255.0)).astype(np.float32)
    if array.dtype.kind != "f":
        raise DataError("image values", expected="floating point or uint8", got=str(array.dtype))
    array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise DataError("image values", expected="finite numbers", got="some that are not")
    if array.size and (array.min() < low - 1e-5 or array.max() > high + 1e-5):
        raise DataError("image values", expected=f"within [{low:g}, {high:g}]", got="values outside")
    return array
