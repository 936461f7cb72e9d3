"""Nearest copies: how far each sample lies from its nearest reference image, on the scale of images held out.

The scale are real images that are not in the reference, or, without any, each reference image's distance to the nearest
other one. A sample nearer than 1% of these is a near copy; of samples that copy nothing about 1% are. It speaks about
the reference alone: where experts were trained on images that are not in it, it says nothing about those.
"""

# Shape legend: N samples, H images held out, P values of one image.
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ddm.evaluation.intervals import Estimate, proportion

SIDE, VOLUME_SIDE = 32, 16  # to which longer sides of images and volumes are averaged down
_NEAR = 0.01


@dataclass(frozen=True)
class Copies:
    """How near samples come to the reference in one space.

    Attributes:
        which_N: the nearest reference image of each sample.
        ratio_N: its distance over the median distance of images held out; 0 is a copy, 1 is usual.
        near: the share of near copies; 0.01 is expected by chance.
        threshold: the ratio at which a sample is a near copy.
        num_holdout: H.
    """

    which_N: Tensor
    ratio_N: Tensor
    near: Estimate
    threshold: float
    num_holdout: int

    @property
    def worst(self) -> list[int]:
        """The samples, nearest to a reference image first."""
        return torch.argsort(self.ratio_N, stable=True).tolist()


def near_copies(nearest_N: Tensor, which_N: Tensor, holdout_H: Tensor) -> Copies:
    """Set samples' distances beside those of images held out.

    Args:
        nearest_N: squared distance of each sample to its nearest reference image.
        which_N: that image.
        holdout_H: the same distance of each image held out.
    """
    apart_N, apart_H = nearest_N.sqrt(), holdout_H.sqrt()
    # half the reference are duplicates: distances as they are
    scale = float(apart_H.median()) or 1.0
    threshold = float(torch.quantile(apart_H, _NEAR, interpolation="lower"))
    near = proportion(apart_N <= threshold)
    return Copies(which_N, apart_N / scale, near, threshold / scale, len(apart_H))


def pixels(images: Tensor) -> Tensor:
    """Return images as rows, shape (N, P), float32; sides beyond 32 pixels (16 of a volume) are averaged down."""
    most = VOLUME_SIDE if images.ndim == 5 else SIDE
    sides = [min(side, most) for side in images.shape[2:]]
    if images.ndim in (4, 5) and sides != list(images.shape[2:]):
        pool = F.adaptive_avg_pool3d if images.ndim == 5 else F.adaptive_avg_pool2d
        images = pool(images.float(), sides)  # type: ignore[arg-type]
    return images.flatten(1).float()
