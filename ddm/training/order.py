"""The images of a step in epochs: all of them once, in an order of the epoch's own, before any comes again."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ddm.diffusion.rng import stream


def in_epochs(seed: int, step: int, batch_size: int, num_images: int) -> NDArray[np.int64]:
    """Return the images of a step, counted from 0, where every epoch goes through all of them in an order of its own.

    A function of its arguments alone, so that a run resumes anywhere. A batch may span the end of an epoch.

    Args:
        seed: the recipe's.
        step: counted from 0.
        batch_size: images in every step.
        num_images: images there are.
    """
    position = step * batch_size + np.arange(batch_size)
    epoch_B, place_B = np.divmod(position, num_images)
    chosen_B = np.empty(batch_size, dtype=np.int64)
    for epoch in np.unique(epoch_B):
        in_epoch_B = epoch_B == epoch
        order = _order(seed, int(epoch), num_images)
        chosen_B[in_epoch_B] = order[place_B[in_epoch_B]]
    return chosen_B


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, num_images: int) -> NDArray[np.int64]:
    """Return the order of an epoch; the last two are remembered, since drawing one takes as long as reading it."""
    return stream("epoch", seed, epoch).permutation(num_images)
