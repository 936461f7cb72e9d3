"""Suspects burned-in text: bands of rows in which many edges are close together, with quiet rows above and below.

No letter is read, and nothing is cut into shapes, so that letters which touch each other, as small ones do, count like
others. A line of letters is crossed by the edges of strokes, two or more at each letter, and ends above and below at
once. Anatomy, tubes and noise have edges too, but not in a band with a straight top and bottom.

A suspicion is a reason to look, and no suspicion does not prove that there is no text. How much is found, and how many
images without text are suspected: docs/results/burned-in-text.md.
"""

# Shape legend: H height, W width of an image at one scale.
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ddm.images.text_reader import reads_letters
from ddm.images.types import Mask, Numbers, Values

_MIN_SIDE = 48  # pixels of an image that is searched
_SCALES = 5  # each half of the one before: letters of up to 160 pixels
_MIN_SCALED_SIDE = 20  # pixels; an image is not shrunk further
_LETTER_HEIGHTS = (5, 6, 7, 8, 10)  # pixels, at one scale
_LINE_LENGTH = 2.5  # letter heights: three or four letters
_CELLS = 3  # equal parts of such a piece of a line
_EDGE_STEPS = (0.05, 0.09, 0.16, 0.3)  # of the range of values, between neighbours; ascending
# For lines that are turned: fewer images have to be searched twice.
_TURNED_EDGE_STEPS = _EDGE_STEPS[1:]
# Edges in each row of a line, on a stretch as long as letters are high, beyond those around the line.
_SUSPICIOUS_EDGES = 2.05
# Of a line that is turned by a quarter, where tesseract reads nothing in it.
_SUSPICIOUS_TURNED_EDGES = 2.65
_MIN_LINE_EDGES = 2.0  # fewer are no line at all
_CELL_SHARE = 1.6  # the emptiest cell has at least one part in this of an equal share of the edges
_BORDER_EDGES = 0.4  # that a line has to have more where it touches the border of the image
# Edges a pixel; where there are more, a line has more of them beyond those around it, too.
_SPARSE = 0.08
_QUIET_ROWS = 2  # above a line, and as many below it

_SAMPLED_ROWS = 3  # one row in three is looked at first: every line has at least one of them
# One column in six, for lines that are turned: every line of 7 pixels has at least one.
_SAMPLED_COLUMNS = 6
_MIN_SAMPLED_EDGES = 4  # in such a row; fewer than in a mean row of the shortest line
_WINDOW_BYTES = 4  # of eight packed columns: they hold the shortest line, wherever it begins
# Of a line of any height, in such a window of as many rows as the lowest letters have.
_MIN_EDGES = 24


@dataclass(frozen=True)
class TextLine:
    """What may be a line of text, in pixels of the whole image.

    Attributes:
        edges: in each row of it, on a stretch as long as it is high, beyond those above or below it.
        top: its first row.
        left: its first column.
        height: the height of its letters.
        length: the length of the piece of it that was looked for; the line may continue at both ends.
    """

    edges: float
    top: int
    left: int
    height: int
    length: int


@dataclass(frozen=True)
class ValueRange:
    """Of which values edges are shares.

    Attributes:
        low: the lowest value, but for a few rows.
        high: the highest value, but for a few rows.
        fits_int16: whether differences of values do.
    """

    low: float
    high: float
    fits_int16: bool

    @property
    def span(self) -> float:
        """The distance from the lowest to the highest value."""
        return self.high - self.low

    @classmethod
    def of(cls, rows_HW: Values) -> "ValueRange":
        """Return the range of an image by some of its rows, but for the extremes of a few: of hot pixels."""
        lowest_H = np.sort(rows_HW.min(1))
        highest_H = np.sort(rows_HW.max(1))
        num_ignored = 1 + len(rows_HW) // 100
        low = float(lowest_H[num_ignored])
        high = float(highest_H[-1 - num_ignored])
        lowest = float(lowest_H[0])
        highest = float(highest_H[-1])
        # A line may be all that there is in an image.
        if not high > low:
            low = lowest
            high = highest
        largest_difference = max(highest - lowest, highest, -lowest)
        has_small_type = rows_HW.dtype.itemsize <= 2
        return cls(
            low=low,
            high=high,
            fits_int16=has_small_type and largest_difference < 1 << 15,
        )


def suspect_text(values: Values) -> bool:
    """Return whether an image, shape (C, H, W), may hold text, upright or turned by a quarter.

    Ribs lie above each other like the letters of a line that is turned, so that such a line is suspected only where it
    has more edges than ribs have, or where tesseract, if it is installed, reads a word in it.
    """
    if min(values.shape[1:]) < _MIN_SIDE:
        return False
    for grey_HW in _grey_views(values):
        value_range = ValueRange.of(grey_HW[::_SAMPLED_ROWS])
        if not value_range.span > 0:
            continue
        line = strongest_line(grey_HW, value_range)
        if line is not None and line.edges >= _SUSPICIOUS_EDGES:
            return True
        if not _may_hold_turned_line(grey_HW, value_range):
            continue
        if _suspect_turned_line(grey_HW, value_range):
            return True
    return False


def _suspect_turned_line(grey_HW: Values, value_range: ValueRange) -> bool:
    # In the transposed image, a line that is turned runs along the rows, mirrored in one of two ways.
    transposed_HW = np.ascontiguousarray(grey_HW.T)
    line = strongest_line(
        transposed_HW,
        value_range,
        _SUSPICIOUS_TURNED_EDGES,
        _TURNED_EDGE_STEPS,
    )
    if line is None or line.edges < _SUSPICIOUS_EDGES:
        return False
    if line.edges >= _SUSPICIOUS_TURNED_EDGES:
        return True
    height, width = transposed_HW.shape
    mirrored_top = max(0, height - line.top - line.height)
    mirrored_left = max(0, width - line.left - line.length)
    upside_down_HW = transposed_HW[::-1]
    if reads_letters(upside_down_HW, mirrored_top, line.left, line.height, line.length):
        return True
    right_to_left_HW = transposed_HW[:, ::-1]
    return reads_letters(right_to_left_HW, line.top, mirrored_left, line.height, line.length)


def _grey_views(values: Values) -> Iterator[Values]:
    """Yield the grey images, shape (H, W), in which text of an image, shape (C, H, W), is visible.

    Of a colour image these are the brightest and the darkest channel of each pixel: letters of any colour differ in one
    of them from grey.
    """
    if len(values) == 1:
        yield values[0]
    else:
        yield values.max(0)
        yield values.min(0)


def strongest_line(
    grey_HW: Values,
    value_range: ValueRange,
    enough_edges: float = _SUSPICIOUS_EDGES,
    edge_steps: Sequence[float] = _EDGE_STEPS,
) -> TextLine | None:
    """Return what most looks like a line of text, or the first that has enough edges; None where nothing does.

    Args:
        grey_HW: the image.
        value_range: its range.
        enough_edges: the edges of a line after which no other line is searched for.
        edge_steps: least heights of edges, shares of the range, ascending; lines are looked for by each.
    """
    min_step = edge_steps[0] * value_range.span
    busy_rows = _busy_rows(grey_HW[::_SAMPLED_ROWS], min_step, value_range)
    if not len(busy_rows):
        return None

    # What is searched reaches beyond these rows by the height of the tallest letters.
    margin = _LETTER_HEIGHTS[-1] << (_SCALES - 1)
    first_row = _SAMPLED_ROWS * int(busy_rows[0])
    last_row = _SAMPLED_ROWS * int(busy_rows[-1])
    start = max(0, first_row - margin)
    stop = last_row + margin
    part_HW: Numbers = grey_HW[start:stop].astype(np.float32)
    part_HW -= value_range.low
    part_HW /= value_range.span
    strongest = None
    for scale, scaled_HW in enumerate(_scales(part_HW)):
        for line in _lines_at_scale(scaled_HW, edge_steps):
            if strongest is None or line.edges > strongest.edges:
                # In pixels of the image: each scale halves its sides.
                strongest = TextLine(
                    edges=line.edges,
                    top=start + (line.top << scale),
                    left=line.left << scale,
                    height=line.height << scale,
                    length=line.length << scale,
                )
            if strongest.edges >= enough_edges:
                return strongest
    return strongest


def _may_hold_turned_line(grey_HW: Values, value_range: ValueRange) -> bool:
    """Return whether there are about as many edges in a column as a line has that is turned by a quarter."""
    # A copy of one column in six: working along the columns of the image itself takes several times as long.
    sampled_HW = np.ascontiguousarray(grey_HW[:, ::_SAMPLED_COLUMNS])
    min_step = _TURNED_EDGE_STEPS[0] * value_range.span
    sharp_HW = _sharp_steps(sampled_HW, min_step, value_range, axis=0)
    # The total first: few images have this many edges, and counting by columns takes longer.
    if np.count_nonzero(sharp_HW) < _MIN_SAMPLED_EDGES:
        return False
    num_edges_W = np.count_nonzero(sharp_HW, axis=0)
    return int(num_edges_W.max()) >= _MIN_SAMPLED_EDGES


def _sharp_steps(
    grey_HW: Values,
    min_step: float,
    value_range: ValueRange,
    axis: int,
) -> Mask:
    """Return where neighbours along an axis differ by more than a step."""
    # The difference of two values must not wrap around.
    dtype: type[np.int16] | type[np.float32] = np.float32
    if value_range.fits_int16:
        dtype = np.int16
    signed_HW: Numbers = grey_HW.astype(dtype, copy=False)
    if axis == 0:
        steps_HW = signed_HW[1:] - signed_HW[:-1]
    else:
        steps_HW = signed_HW[:, 1:] - signed_HW[:, :-1]
    np.abs(steps_HW, out=steps_HW)
    sharp_HW: Mask = steps_HW > min_step
    return sharp_HW


def _busy_rows(
    rows_HW: Values,
    min_step: float,
    value_range: ValueRange,
) -> NDArray[np.intp]:
    """Return the rows with about as many edges as a line of text has; most images have none, and end here."""
    sharp_HW = _sharp_steps(rows_HW, min_step, value_range, axis=1)
    if np.count_nonzero(sharp_HW) < _MIN_SAMPLED_EDGES:
        return np.empty(0, np.intp)
    # Counting the bits of packed rows takes a tenth of the time of counting rows of booleans.
    packed_HB = np.packbits(sharp_HW, axis=1)
    counts_H = np.bitwise_count(packed_HB).sum(1, dtype=np.int32)
    return np.flatnonzero(counts_H >= _MIN_SAMPLED_EDGES)


def _scales(image_HW: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    """Yield an image, and the same at half of its size, at a quarter and so on."""
    for _ in range(_SCALES):
        if min(image_HW.shape) < _MIN_SCALED_SIDE:
            return
        yield image_HW
        # A last row or column without a partner is left out.
        height = image_HW.shape[0] // 2 * 2
        width = image_HW.shape[1] // 2 * 2
        even_HW = image_HW[:height, :width]
        # The mean of each square of four values.
        pairs_of_rows = even_HW[0::2] + even_HW[1::2]
        sums_of_four = pairs_of_rows[:, 0::2] + pairs_of_rows[:, 1::2]
        image_HW = sums_of_four * np.float32(0.25)


def _lines_at_scale(
    image_HW: NDArray[np.float32],
    edge_steps: Sequence[float],
) -> Iterator[TextLine]:
    """Yield what may be lines of text, in pixels of this scale: the strongest of each part, step and height."""
    steps_HW = image_HW[:, 1:] - image_HW[:, :-1]
    is_step_HW = np.abs(steps_HW) > edge_steps[0]
    for rows, columns in _crowded_parts(is_step_HW):
        edges_HW = _edges(steps_HW[rows, columns])
        for line in _lines_of_part(edges_HW, edge_steps):
            top = rows.start + line.top
            left = columns.start + line.left
            yield replace(line, top=top, left=left)


def _lines_of_part(
    edges_HW: NDArray[np.float32],
    edge_steps: Sequence[float],
) -> Iterator[TextLine]:
    """Yield what may be lines of text among the edges of a part, in pixels of the part."""
    for edge_step in edge_steps:
        sharp_HW = edges_HW > edge_step
        parts = list(_crowded_parts(sharp_HW))
        if not parts:
            break  # a higher step leaves fewer edges
        # Where edges are everywhere, as in noise, some bands have many and their surroundings few by chance.
        edges_per_pixel = float(sharp_HW.mean())
        by_chance = max(0.0, edges_per_pixel - _SPARSE)
        for rows, columns in parts:
            for line in _lines(sharp_HW[rows, columns], by_chance):
                top = rows.start + line.top
                left = columns.start + line.left
                yield replace(line, top=top, left=left)


def _line_length(letter_height: int) -> int:
    """Return the pixels of the piece of a line that is looked for, a multiple of its cells."""
    cell_length = int(_LINE_LENGTH * letter_height / _CELLS)
    return _CELLS * cell_length


def _crowded_parts(sharp_HW: Mask) -> Iterator[tuple[slice, slice]]:
    """Yield the parts of an image in which edges are as close together as in a line of text, or closer.

    Edges are counted in windows of 32 columns, eight columns apart, and as many rows as the lowest line has. A longer
    line than such a window has fewer edges in it.
    """
    is_crowded_HB = _edges_in_windows(sharp_HW) >= _MIN_EDGES
    crowded_rows = np.flatnonzero(is_crowded_HB.any(1))
    if not len(crowded_rows):
        return

    # A line reaches beyond such a window by no more than its height and its length.
    margin = _LETTER_HEIGHTS[-1] + _QUIET_ROWS
    side_margin = _line_length(_LETTER_HEIGHTS[-1])
    # Rows whose margins do not meet are parts of their own.
    breaks = np.flatnonzero(np.diff(crowded_rows) > 2 * margin)
    first_places = np.concatenate(([0], breaks + 1))
    last_places = np.concatenate((breaks, [len(crowded_rows) - 1]))
    first_rows = crowded_rows[first_places].tolist()
    last_rows = crowded_rows[last_places].tolist()
    for first_row, last_row in zip(first_rows, last_rows, strict=True):
        is_crowded_B = is_crowded_HB[first_row : last_row + 1].any(0)
        crowded_bytes = np.flatnonzero(is_crowded_B)
        # A byte has eight columns.
        first_column = 8 * int(crowded_bytes[0])
        last_column = 8 * int(crowded_bytes[-1])
        top = max(0, first_row - margin)
        bottom = last_row + _LETTER_HEIGHTS[0] + margin
        left = max(0, first_column - side_margin)
        right = last_column + 8 * _WINDOW_BYTES + side_margin
        yield slice(top, bottom), slice(left, right)


def _edges_in_windows(sharp_HW: Mask) -> NDArray[np.uint8]:
    """Return how many edges each window has, by its first row and its first byte of eight columns."""
    packed_HB = np.packbits(sharp_HW, axis=1)
    counts_HB = np.bitwise_count(packed_HB)
    height, num_bytes = counts_HB.shape
    num_rows = height - _LETTER_HEIGHTS[0] + 1
    num_windows = max(1, num_bytes - _WINDOW_BYTES + 1)
    # Sums of neighbours, first along rows, then along columns; five rows of 32 columns fit 8 bits.
    in_rows_HB = counts_HB[:, :num_windows].copy()
    for offset in range(1, min(_WINDOW_BYTES, num_bytes)):
        end = offset + num_windows
        in_rows_HB += counts_HB[:, offset:end]
    in_window_HB = in_rows_HB[:num_rows].copy()
    for offset in range(1, _LETTER_HEIGHTS[0]):
        end = offset + num_rows
        in_window_HB += in_rows_HB[offset:end]
    return in_window_HB


def _edges(steps_HW: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the height of each edge at the steepest place of its slope, and zero elsewhere.

    A blurred edge is a slope of several steps: it counts once, so that soft anatomy does not look like many strokes.
    """
    padded_HW = np.pad(steps_HW, ((0, 0), (1, 1)))
    before_HW = padded_HW[:, :-2]
    after_HW = padded_HW[:, 2:]
    # Of equal steps beside each other the first is the steepest, so that none counts twice.
    is_highest_HW = (steps_HW >= before_HW) & (steps_HW > after_HW)
    is_lowest_HW = (steps_HW <= before_HW) & (steps_HW < after_HW)
    rises_HW = (steps_HW > 0) & is_highest_HW
    falls_HW = (steps_HW < 0) & is_lowest_HW
    return np.abs(steps_HW) * (rises_HW | falls_HW)


def _lines(sharp_HW: Mask, by_chance: float) -> Iterator[TextLine]:
    """Yield what may be a line of text, the strongest of each height.

    All counts of edges come from one integral image: those of any rectangle from four of its values.

    Args:
        sharp_HW: where edges are.
        by_chance: the edges per pixel by which a line exceeds the lines around it by chance.
    """
    height, width = sharp_HW.shape
    # Beyond the image there are no edges: a line may touch its border.
    shape = (height + 1 + 2 * _QUIET_ROWS, width + 1)
    integral_HW = np.zeros(shape, np.int32)
    first = 1 + _QUIET_ROWS
    end = first + height
    np.cumsum(sharp_HW, axis=0, out=integral_HW[first:end, 1:])
    integral_HW[end:] = integral_HW[end - 1]
    np.cumsum(integral_HW, axis=1, out=integral_HW)
    for letter_height in _LETTER_HEIGHTS:
        if height >= letter_height and width >= _line_length(letter_height):
            line = _line_of_height(integral_HW, letter_height, by_chance)
            if line is not None:
                yield line


def _line_of_height(
    integral_HW: NDArray[np.int32],
    height: int,
    by_chance: float,
) -> TextLine | None:
    """Return the strongest line of this height, where there is one that is worth a look.

    In a rectangle as high as letters are, the edges of each row on a stretch as long as that are its edges over its
    length: rows and height cancel out.
    """
    length = _line_length(height)
    min_edges = _MIN_LINE_EDGES + by_chance * height
    in_rows_HW = (
        integral_HW[_QUIET_ROWS + height : -_QUIET_ROWS]
        - integral_HW[_QUIET_ROWS : -_QUIET_ROWS - height]
    )
    in_line_HW = in_rows_HW[:, length:] - in_rows_HW[:, :-length]
    top_N, left_N = np.nonzero(in_line_HW >= min_edges * length)
    if not len(top_N):
        return None

    # Letters stand all along the line: one crowded place does not make one.
    cell_length = length // _CELLS
    border_NC = left_N[:, None] + cell_length * np.arange(_CELLS + 1)
    up_to_border_NC = in_rows_HW[top_N[:, None], border_NC]
    emptiest_cell_N = np.diff(up_to_border_NC, axis=1).min(1)
    by_line_N = in_line_HW[top_N, left_N] / length
    by_cell_N = _CELL_SHARE * emptiest_cell_N / cell_length
    within_N = np.minimum(by_line_N, by_cell_N)

    # Row r of the image is row r + _QUIET_ROWS of the integral image.
    above_N = _edges_in_strips(integral_HW, top_N, left_N, length)
    bottom_N = top_N + _QUIET_ROWS + height
    below_N = _edges_in_strips(integral_HW, bottom_N, left_N, length)
    # As if a strip were as high as the line.
    factor = height / (_QUIET_ROWS * length)
    around_N = np.maximum(above_N, below_N) * factor
    beyond_N = within_N - around_N - by_chance * height
    # The area beyond the border may have edges: tubes and ribs are cut there.
    last_quiet_top = len(in_rows_HW) - _QUIET_ROWS
    reaches_border_N = (top_N < _QUIET_ROWS) | (top_N >= last_quiet_top)
    beyond_N -= _BORDER_EDGES * reaches_border_N
    strongest = int(beyond_N.argmax())
    edges = float(beyond_N[strongest])
    if edges < _MIN_LINE_EDGES:
        return None
    return TextLine(
        edges=edges,
        top=int(top_N[strongest]),
        left=int(left_N[strongest]),
        height=height,
        length=length,
    )


def _edges_in_strips(
    integral_HW: NDArray[np.int32],
    top_N: NDArray[np.intp],
    left_N: NDArray[np.intp],
    length: int,
) -> NDArray[np.int32]:
    """Return how many edges are in strips of quiet rows, by the upper left corners of these in the integral image."""
    bottom_N = top_N + _QUIET_ROWS
    right_N = left_N + length
    lower_N = integral_HW[bottom_N, right_N] - integral_HW[bottom_N, left_N]
    upper_N = integral_HW[top_N, right_N] - integral_HW[top_N, left_N]
    return lower_N - upper_N
