"""Types that most files of this room share, by what they mean."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.generic]
"""Pixels, or the entries of a column: numbers or text of any type."""

Numbers = NDArray[Any]
"""Values to compute with; which type of number they have is known only when they are read."""

Mask = NDArray[np.bool_]
"""A truth value for each of some values."""

ValueType = np.dtype[np.generic]
"""The type of values."""

Shape = tuple[int, ...]
"""The lengths of an array's axes."""

Bounds = tuple[float, float]
"""The lowest and the highest of some values, or those that are shown black and white."""

Spacing = tuple[float, float]
"""The distance in mm between the rows of an image, and between its columns."""

Scaling = tuple[float, float]
"""Slope and intercept, by which stored values become those that a file means."""
