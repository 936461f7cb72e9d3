"""The compact types in which transformed pictures lie on a disk, and the exact mapping to the plan's range.

Of `uint8` and `uint16`, whose largest number is m, the stored number n stands for ``low + (high - low) n / m``; a value
v becomes ``n = round((v - low) / (high - low) m)``, halves to even, so that it changes by ``(high - low) / 2m`` at
most: a 510th of the range, or a 131,070th. Of `float16` the stored number is the nearest within the range. Computed in
double precision; `ddm.images.array_files.fit` reads it back, as it reads every array of whole numbers.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

LARGEST = {"uint8": 255, "uint16": 65535}


def to_stored(
    values: NDArray[np.float32], storage: Literal["uint8", "uint16", "float16"], target: tuple[float, float]
) -> NDArray[np.generic]:
    """Return values of the plan's range in their compact type.

    Args:
        values: any shape, within `target`.
        storage: the type.
        target: the plan's range.
    """
    low, high = target
    exact = values.astype(np.float64).clip(low, high)
    if storage == "float16":
        nearest = exact.astype(np.float16)
        above, below = nearest.astype(np.float64) > high, nearest.astype(np.float64) < low
        nearest[above] = np.nextafter(nearest[above], np.float16(-np.inf))
        nearest[below] = np.nextafter(nearest[below], np.float16(np.inf))
        return nearest
    return np.rint((exact - low) / (high - low) * LARGEST[storage]).astype(storage)
