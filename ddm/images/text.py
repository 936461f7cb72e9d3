"""Suspects burned-in text: rows of small, sharp shapes of one height and one brightness, as letters are drawn.

No letter is read. Text is found from about 7 pixels of height on, in images of 48 pixels and more; a suspicion is a
reason to look, and none is no proof that there is no text. Measured shares: docs/how-to/scan-images.md.
"""

from math import ceil, log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LEAST_SIDE = 48
_EVERY = 3  # rows: a letter has at least two of these
_STEP = 0.25  # of the range between neighbours: an edge of a drawn letter
_EDGES = 8  # along one row: four strokes
_STROKE = 13  # pixels; what is thinner is a stroke
_CONTRAST = 0.3  # of the range, of a stroke above what surrounds it
_HEIGHTS = (6, 80)
_LETTERS = 4
_CROWD = 100  # shapes; each time they double, one more must stand in a row
_MOST_SHAPES = 4000


def suspect_text(values: NDArray[np.generic]) -> bool:
    """Whether an image, shape (C, H, W), may hold text; of a colour, its brightest and its darkest channel count."""
    if min(values.shape[1:]) < _LEAST_SIDE:
        return False
    if len(values) == 1:
        return _has_lines(values[0])
    return _has_lines(values.max(0)) or _has_lines(values.min(0))


def _has_lines(grey_HW: NDArray[np.generic]) -> bool:
    """First a look at every third row, which most images do not pass; then shapes, bright and dark."""
    rows = grey_HW[::_EVERY]
    low, high = float(rows.min()), float(rows.max())
    narrow = rows.dtype.itemsize <= 2 and max(high - low, high, -low) < 1 << 15  # no difference wraps around
    if not high > low:
        return False
    signed: NDArray[Any] = rows.astype(np.int16 if narrow else np.float32, copy=False)
    steps: NDArray[Any] = signed[:, 1:] - signed[:, :-1]
    if max(float(steps.max()), -float(steps.min())) <= _STEP * (high - low):  # most images: two looks instead of three
        return False
    sharp = np.abs(steps, out=steps) > _STEP * (high - low)
    if np.count_nonzero(sharp) < 2 * _EDGES:  # of most images: counting by rows takes ten times as long
        return False
    busy = np.flatnonzero(np.count_nonzero(sharp, axis=1) >= _EDGES)
    if len(busy) < 2:
        return False
    start, stop = max(0, _EVERY * int(busy[0]) - _HEIGHTS[1]), _EVERY * int(busy[-1]) + _HEIGHTS[1]
    part: NDArray[Any] = (grey_HW[start:stop].astype(np.float32) - low) / (high - low)
    return _has_letters(part) or _has_letters(1 - part)


def _has_letters(part: NDArray[Any]) -> bool:
    from scipy import ndimage

    raised = part - ndimage.grey_opening(part, size=(_STROKE, _STROKE))
    found, num = ndimage.label(raised > _CONTRAST, structure=np.ones((3, 3)))
    if not num >= _LETTERS:
        return False
    boxes = [
        (rows.start, rows.stop, columns.start, columns.stop, number)
        for number, (rows, columns) in enumerate(ndimage.find_objects(found), 1)
        if _HEIGHTS[0] <= rows.stop - rows.start <= _HEIGHTS[1]
        and columns.stop - columns.start <= 1.6 * (rows.stop - rows.start)
    ]
    if not _LETTERS <= len(boxes) <= _MOST_SHAPES:
        return False
    box_N5 = np.array(boxes)
    brightness_N = np.asarray(ndimage.maximum(part, found, box_N5[:, 4]))
    filled_N = np.asarray(ndimage.sum_labels(np.ones_like(part), found, box_N5[:, 4]))
    top_N, bottom_N, left_N, right_N, _ = box_N5.T
    height_N, width_N = bottom_N - top_N, right_N - left_N
    share_N = filled_N / (height_N * width_N)
    kept_N = (share_N > 0.15) & ((share_N < 0.85) | (width_N <= 0.4 * height_N))
    if np.count_nonzero(kept_N) < _LETTERS:
        return False
    return _in_a_row(*(each[kept_N] for each in (top_N, bottom_N, left_N, right_N, brightness_N)))


def _in_a_row(
    top_N: NDArray[np.int64],
    bottom_N: NDArray[np.int64],
    left_N: NDArray[np.int64],
    right_N: NDArray[np.int64],
    brightness_N: NDArray[np.float32],
) -> bool:
    """Whether enough shapes stand on one line beside each other, alike in height and in brightness."""
    height_N = bottom_N - top_N
    higher_NN = np.maximum(height_N[:, None], height_N)
    lower_NN = np.minimum(height_N[:, None], height_N)
    gap_NN = left_N[None, :] - right_N[:, None]
    next_NN = (
        (higher_NN <= 1.7 * lower_NN)
        & (np.abs(bottom_N[:, None] - bottom_N) <= 1 + 0.15 * higher_NN)
        & (gap_NN >= -1)
        & (gap_NN <= 1 + 0.8 * higher_NN)
        & (np.abs(brightness_N[:, None] - brightness_N) <= 0.06)
    )
    longest_N = np.ones(len(height_N), np.int64)
    for number in np.argsort(left_N, kind="stable"):
        before = np.flatnonzero(next_NN[:, number])
        if len(before):
            longest_N[number] = 1 + longest_N[before].max()
    by_chance = max(0, ceil(log2(len(height_N) / _CROWD)))  # among many shapes of noise, some stand in a row
    return bool(longest_N.max() >= _LETTERS + by_chance)
