"""Changes of an image that leave it as probable as it was: mirrored from left to right, moved by a few pixels."""

# Shape legend: B batch, C channels, H height, W width.
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddm.errors import ShapeError
from ddm.protocol.learning import Training


def augment(x_BCHW: Tensor, settings: Training, random: np.random.Generator) -> Tensor:
    """Return the images, each mirrored and shifted at random as the recipe states; the same images where it does not.

    Args:
        x_BCHW: images, shape (B, C, H, W), or volumes (B, C, D, H, W).
        settings: the recipe.
        random: decides for each image.

    Raises:
        ShapeError: samples without height and width.
    """
    if not (settings.flip or settings.crop):
        return x_BCHW
    if x_BCHW.dim() < 4:
        raise ShapeError(
            "augmentation", expected="images or volumes", got=f"samples {tuple(x_BCHW.shape[1:])}"
        )
    if settings.flip:
        is_mirrored_B = torch.from_numpy(random.random(len(x_BCHW)) < 0.5)
        num_inner = x_BCHW.dim() - 1
        is_mirrored = is_mirrored_B.view(-1, *[1] * num_inner)
        x_BCHW = torch.where(is_mirrored, x_BCHW.flip(-1), x_BCHW)
    if settings.crop:
        # A volume has a depth besides, which moves as well.
        for axis in range(2, x_BCHW.dim()):
            crop = settings.crop
            shift_B = random.integers(-crop, crop, len(x_BCHW), endpoint=True)
            x_BCHW = _shift(x_BCHW, axis, shift_B)
    return x_BCHW


def _shift(x: Tensor, axis: int, shift_B: NDArray[np.int64]) -> Tensor:
    """Shift each sample along an axis; its edge fills what becomes free."""
    side = x.shape[axis]
    # Where each new place comes from; places beyond the edge become the edge.
    source_BS = np.arange(side) - shift_B[:, None]
    index_BS = torch.from_numpy(source_BS.clip(0, side - 1))
    view = [1] * x.dim()
    view[0] = len(x)
    view[axis] = side
    index = index_BS.view(view).expand_as(x)
    return x.gather(axis, index)
