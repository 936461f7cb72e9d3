"""Which images a step trains on: drawn anew at every step, or all of them once before any comes again."""

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
    epoch, place = np.divmod(position, num_images)
    chosen = np.empty(batch_size, dtype=np.int64)
    for each in np.unique(epoch):
        chosen[epoch == each] = _order(seed, int(each), num_images)[place[epoch == each]]
    return chosen


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, num_images: int) -> NDArray[np.int64]:
    """Return the order of an epoch; the last two are remembered, since drawing one takes as long as reading it."""
    return stream("epoch", seed, epoch).permutation(num_images)
