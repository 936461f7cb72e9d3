"""Private images from disk into one tensor of the plan's shape and range. Paths and names stop here."""

import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ddm.errors import DataError
from ddm.npz import read_images
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
    images = read_images(path, spec)
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
