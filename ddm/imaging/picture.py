"""One decoded image or volume, whatever file it came from: values and what they mean, never a name, a tag or a path."""

# Shape legend: C channels, D slices, H height, W width.
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Picture:
    """An image (C, H, W) or a volume (C, D, H, W), in the values of its file.

    Args:
        values: uint8, uint16, int16, int32 or float32, in C order. A volume's axes ascend from inferior to superior,
            anterior to posterior, and the patient's right to left; an image's rows and columns are those on a screen.
            Dark is low: inverted greys are turned, colours are RGB without transparency, rescaling is done.
        spacing: mm between neighbours along each axis but the first; None where the file does not say.
        window: the lowest and the highest value that its file asks to be shown, in units of `values`; None without one.
        full: the lowest and the highest value that the file's type can hold, such as (0, 255), or (0, 4095) for twelve
            bits; None where it has no such bounds.
    """

    values: NDArray[np.generic]
    spacing: tuple[float, ...] | None = None
    window: tuple[float, float] | None = None
    full: tuple[float, float] | None = None
