"""Encoders: public features of images, text embeddings, and latents, one encoder per file."""

from typing import Protocol

from torch import Tensor

from ddm.encoders.hog import HogEncoder, hog_specs
from ddm.encoders.pca import PcaEncoder, pca_specs, principal_directions
from ddm.images.rows import Images
from ddm.system.progress import ProgressCallback

__all__ = [
    "Encoder",
    "HogEncoder",
    "PcaEncoder",
    "hog_specs",
    "pca_specs",
    "principal_directions",
]


class Encoder(Protocol):
    """A frozen encoder of public features."""

    @property
    def dim(self) -> int:
        """The number of features."""
        ...

    def encode(
        self,
        images: Images,
        on_progress: ProgressCallback | None = None,
        *,
        replacement: float | None = None,
    ) -> Tensor:
        """Return features, shape (N, dim), float32, of images of shape (N, C, H, W) in the plan's range.

        Images are read in blocks of a power of two, at most 1024.
        """
        ...

    def for_single_samples(self) -> "Encoder":
        """Return it computing each image alone, so that no bit of a feature depends on other images."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return what a plan stores of this encoder."""
        ...
