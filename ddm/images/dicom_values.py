"""From the stored values of a DICOM frame to a picture: modality, display window, padding, inverted greys, palettes.

The order is that of PS3.3 C.7.6.3 and C.11: padding is recognised by stored values; the modality transform follows;
inverted greys are turned; at last padding becomes background, the lowest value of all other pixels.
"""

from dataclasses import dataclass, replace
from math import inf, nextafter
from typing import Any

import numpy as np

from ddm.images.dicom_geometry import lengths_of, spacing_of
from ddm.images.dicom_pixels import PixelFormat, StoredFrame, contradiction
from ddm.images.dicom_tags import (
    float_of,
    group_of,
    has_tag,
    sequence_of,
    tag_of,
    text_of,
    value_of,
    word_of,
    words_of,
)
from ddm.images.picture import Picture, supported
from ddm.images.reasons import ImageError, Reason
from ddm.images.types import Bounds, Mask, Numbers, Scaling, Spacing, Values

_COLOURS = ("Red", "Green", "Blue")
_WORD = 1 << 16


@dataclass(frozen=True)
class Frame:
    """One frame as a picture, and which of its pixels are padding.

    Attributes:
        picture: the picture with padding still as it was stored.
        padding: (H, W); None where no pixel is padding.
    """

    picture: Picture
    padding: Mask | None = None

    def lowest(self) -> float | None:
        """Return the lowest value of the pixels that are not padding; None where all are."""
        if self.padding is None:
            return float(self.picture.values.min())
        image = self.picture.values[0][~self.padding]
        if not image.size:
            return None
        return float(image.min())

    def with_background(self, background: float) -> Picture:
        """Return the picture with padding as background."""
        if self.padding is None:
            return self.picture
        values = self.picture.values
        background_value = values.dtype.type(background)
        filled: Numbers = np.where(self.padding[None], background_value, values)
        return replace(self.picture, values=filled)


def frame_of(
    tags: Any,
    number: int,
    stored: StoredFrame,
    pixel_format: PixelFormat,
) -> Frame:
    """Return one frame in the values that the file means.

    Raises:
        ImageError: a transform of values that is damaged, or contradicts another one.
    """
    spacing = spacing_of(tags, number)
    full: Bounds | None = None
    if stored.bounds is not None:
        full = _as_floats(stored.bounds)
    if pixel_format.photometric == "PALETTE COLOR":
        frame = Frame(_through_palette(tags, stored.values, pixel_format, spacing))
    elif pixel_format.samples == 3:
        channels_first = np.moveaxis(stored.values, -1, 0)
        values = _writeable(supported(channels_first), stored.values)
        frame = Frame(Picture(values, spacing, None, full))
    else:
        frame = _grey(tags, number, stored, pixel_format, spacing, full)
    if spacing is not None and lengths_of(tags, number) is None:
        # Only the proportion of a pixel's sides is known.
        picture = replace(frame.picture, spacing_in_mm=False)
        return replace(frame, picture=picture)
    return frame


def _as_floats(bounds: tuple[int, int]) -> Bounds:
    low, high = bounds
    return float(low), float(high)


def _writeable(values: Values, source: Numbers) -> Values:
    """Return values in memory of their own, since those of a file may not be written to."""
    if not values.flags.writeable or np.may_share_memory(values, source):
        return values.copy()
    return values


def _grey(
    tags: Any,
    number: int,
    stored: StoredFrame,
    pixel_format: PixelFormat,
    spacing: Spacing | None,
    full: Bounds | None,
) -> Frame:
    padding = _padding_mask(tags, stored, pixel_format)
    values = stored.values
    bounds = stored.bounds
    slope, intercept = _rescaling(tags, number)
    tables = sequence_of(tags, "ModalityLUTSequence")
    if len(tables):
        if (slope, intercept) != (1.0, 0.0):
            raise contradiction("ModalityLUTSequence", "RescaleSlope")
        table = _table_of(tables[0], "LUTDescriptor", "LUTData", pixel_format.signed)
        values = table.applied(values)
        bounds = table.bounds
        full = _as_floats(bounds)
    elif full is not None:
        # A negative slope turns the order of the two around.
        ends = (full[0] * slope + intercept, full[1] * slope + intercept)
        full = (min(ends), max(ends))
    is_signed = full is not None and full[0] < 0
    window = _window(tags, number, is_signed=is_signed)
    if _is_inverted(tags, pixel_format):
        # Turned within the bounds of the type; numbers without bounds change their sign.
        turn = 0.0
        if full is not None:
            turn = full[0] + full[1]
        slope = -slope
        intercept = turn - intercept
        if window is not None:
            black, white = window
            window = _ascending(turn - white, turn - black)
    values = _rescaled(values, slope, intercept, bounds)
    if padding is not None and values.dtype.kind == "f":
        # A padding that is not a number would make the whole picture unusable.
        is_unusable = padding & ~np.isfinite(values)
        values = np.where(is_unusable, values.dtype.type(0), values)
    own_values = _writeable(supported(values[None]), stored.values)
    picture = Picture(own_values, spacing, window, full)
    return Frame(picture, padding)


def _is_inverted(tags: Any, pixel_format: PixelFormat) -> bool:
    """Whether the lowest value is shown as white."""
    is_inverted = pixel_format.photometric == "MONOCHROME1"
    if text_of(tags, "PresentationLUTShape").upper() == "INVERSE" and not is_inverted:
        raise contradiction("PresentationLUTShape", "PhotometricInterpretation")
    return is_inverted


def _padding_mask(
    tags: Any,
    stored: StoredFrame,
    pixel_format: PixelFormat,
) -> Mask | None:
    """Return which stored values are padding: one value, or all from it to a limit (PS3.3 C.7.5.1.1.2)."""
    ends = _padding_ends(tags, stored, pixel_format)
    if ends is None:
        return None
    values = stored.values
    low, high = ends
    mask: Mask
    if np.isnan(low):
        mask = np.isnan(values)
    elif low == high:
        mask = values == low
    else:
        mask = (values >= low) & (values <= high)
    if not mask.any():
        return None
    return mask


def _padding_ends(
    tags: Any,
    stored: StoredFrame,
    pixel_format: PixelFormat,
) -> Bounds | None:
    if pixel_format.is_float:
        return _float_padding(tags, pixel_format)
    return _integer_padding(tags, stored)


def _float_padding(tags: Any, pixel_format: PixelFormat) -> Bounds | None:
    prefix = "Float"
    if pixel_format.allocated == 64:
        prefix = "DoubleFloat"
    value = value_of(tags, f"{prefix}PixelPaddingValue")
    if value is None:
        return None
    limit = value_of(tags, f"{prefix}PixelPaddingRangeLimit")
    if limit is None:
        limit = value
    ends = (float(value), float(limit))
    return min(ends), max(ends)


def _integer_padding(tags: Any, stored: StoredFrame) -> tuple[int, int] | None:
    value = word_of(tags, "PixelPaddingValue")
    limit = word_of(tags, "PixelPaddingRangeLimit")
    if value is None:
        if limit is not None:
            raise ImageError(Reason.DAMAGED, "PixelPaddingRangeLimit without PixelPaddingValue")
        return None
    if stored.bounds is None:
        return None
    if limit is None:
        limit = value
    # The limit may be below the value or above it.
    ends = (_as_stored(value, stored.bounds), _as_stored(limit, stored.bounds))
    lowest_stored, highest_stored = stored.bounds
    # Comparison with a number that the type cannot hold is an error in NumPy; such a padding occurs nowhere.
    lowest = max(min(ends), lowest_stored)
    highest = min(max(ends), highest_stored)
    if lowest > highest:
        return None
    return (lowest, highest)


def _as_stored(word: int, bounds: tuple[int, int]) -> int:
    """Return a word of padding as a stored value, whatever sign the type beside it in the file has."""
    lowest, highest = bounds
    if lowest == 0:
        return word
    num_values = highest - lowest + 1
    if highest < word < num_values:
        return word - num_values  # the bits of a cell whose sign was not extended
    if word >= _WORD // 2:
        return word - _WORD
    return word


def _rescaling(tags: Any, number: int) -> Scaling:
    """Return slope and intercept of one frame (PS3.3 C.11.1 and C.7.6.16.2.9)."""
    group = group_of(tags, number, "PixelValueTransformationSequence")
    slope = float_of(group, "RescaleSlope")
    intercept = float_of(group, "RescaleIntercept")
    if slope is None:
        slope = 1.0
    if slope == 0:
        raise ImageError(Reason.DAMAGED, "RescaleSlope is zero")
    return slope, intercept or 0.0


def _rescaled(
    values: Numbers,
    slope: float,
    intercept: float,
    bounds: tuple[int, int] | None,
) -> Values:
    """Return slope * values + intercept: whole numbers in the smallest type that holds them, else float32."""
    if (slope, intercept) == (1.0, 0.0):
        return values
    has_whole_values = values.dtype.kind in "iu"
    has_whole_terms = slope.is_integer() and intercept.is_integer()
    largest_term = max(abs(slope), abs(intercept))
    if has_whole_values and has_whole_terms and largest_term < 1 << 31:
        whole_slope = int(slope)
        whole_intercept = int(intercept)
        kind = _type_of_result(values, bounds, whole_slope, whole_intercept)
        if kind is not None:
            return _rescaled_whole(values, kind, whole_slope, whole_intercept)
    rescaled = values.astype(np.float64) * slope + intercept
    return np.asarray(rescaled).astype(np.float32)


def _type_of_result(
    values: Numbers,
    bounds: tuple[int, int] | None,
    slope: int,
    intercept: int,
) -> type[Any] | None:
    """Return the smallest type that holds all results; None where 32 bits do not."""
    kind = None
    if bounds is not None:
        kind = _smallest_type(values.itemsize, bounds, slope, intercept)
    # The bounds of the stored bits mostly suffice for a small type; only otherwise all values are read for it.
    if kind in (None, np.int32):
        extremes = (int(values.min()), int(values.max()))
        kind = _smallest_type(values.itemsize, extremes, slope, intercept)
    return kind


def _rescaled_whole(
    values: Numbers,
    kind: type[Any],
    slope: int,
    intercept: int,
) -> Values:
    limits = np.iinfo(kind)
    fits_intercept = limits.min <= intercept <= limits.max
    if abs(slope) != 1 or not fits_intercept:
        wide: Numbers = values.astype(np.int64)
        return np.asarray(wide * slope + intercept).astype(kind)
    # Whole numbers wrap around and back, so that they can be added in the type of the result.
    has_same_size = values.dtype.itemsize == np.dtype(kind).itemsize
    narrow: Numbers
    if values.dtype.isnative and has_same_size:
        narrow = values.view(kind)
    else:
        narrow = values.astype(kind)
    if slope == 1:
        return np.asarray(narrow + kind(intercept))
    return np.asarray(kind(intercept) - narrow)


def _smallest_type(
    item_bytes: int,
    extremes: tuple[int, int],
    slope: int,
    intercept: int,
) -> type[Any] | None:
    ends = (extremes[0] * slope + intercept, extremes[1] * slope + intercept)
    for kind in (np.uint8, np.uint16, np.int16, np.int32):
        limits = np.iinfo(kind)
        if kind is np.uint8 and item_bytes > 1:
            continue
        if limits.min <= min(ends) and max(ends) <= limits.max:
            return kind
    return None


def _window(
    tags: Any,
    number: int,
    *,
    is_signed: bool,
) -> Bounds | None:
    """Return the values that the first window, or the first table, maps to black and to white (PS3.3 C.11.2).

    A window that its function does not allow is none: LINEAR takes widths of 1 and more, the others all above 0.
    """
    group = group_of(tags, number, "FrameVOILUTSequence")
    centre = float_of(group, "WindowCenter")
    width = float_of(group, "WindowWidth")
    if centre is not None and width is not None:
        function = text_of(group, "VOILUTFunction").upper() or "LINEAR"
        return _window_ends(centre, width, function)
    tables = sequence_of(group, "VOILUTSequence")
    if not len(tables):
        return None
    table = _table_of(tables[0], "LUTDescriptor", "LUTData", is_signed)
    last = table.first + len(table.entries) - 1
    return _ascending(float(table.first), float(last))


def _window_ends(
    centre: float,
    width: float,
    function: str,
) -> Bounds | None:
    if function == "LINEAR" and width >= 1:
        # C.11.2.1.2.1: black up to c - 0.5 - (w - 1) / 2, white from c - 0.5 + (w - 1) / 2.
        middle = centre - 0.5
        half_width = (width - 1) / 2
        return _ascending(middle - half_width, middle + half_width)
    if function in ("LINEAR_EXACT", "SIGMOID") and width > 0:
        half_width = width / 2
        return _ascending(centre - half_width, centre + half_width)
    return None


def _ascending(low: float, high: float) -> Bounds:
    """Return the ends of a window; a window of no width, which is a threshold, gets the smallest that there is."""
    if not high > low:
        high = nextafter(low, inf)
    return low, high


@dataclass(frozen=True)
class LookupTable:
    """A lookup table of DICOM.

    Attributes:
        entries: one number for each stored value.
        first: the stored value of the first entry; lower ones have it too, and higher ones have the last.
        bits: the bits of each entry.
    """

    entries: Numbers
    first: int
    bits: int

    @property
    def bounds(self) -> tuple[int, int]:
        """Lowest and highest number that an entry can be."""
        return 0, (1 << self.bits) - 1

    def applied(self, values: Numbers) -> Numbers:
        """Return the entries of stored values.

        Raises:
            ImageError: the values are not whole numbers.
        """
        if values.dtype.kind not in "iu":
            raise contradiction("LUTData", "FloatPixelData")
        last = len(self.entries) - 1
        places = values.astype(np.int64) - self.first
        return np.asarray(self.entries[places.clip(0, last)])


def _table_of(
    item: Any,
    descriptor_keyword: str,
    data_keyword: str,
    is_signed: bool,
) -> LookupTable:
    """Return a table whose descriptor and data agree (PS3.3 C.11.1.1 and C.7.6.3.1.5)."""
    descriptor = words_of(item, descriptor_keyword)
    if len(descriptor) != 3:
        raise ImageError(Reason.DAMAGED, f"{descriptor_keyword} is not three numbers")
    num_entries, first, bits = descriptor
    # 2^16 entries are stated as 0 (PS3.3 C.11.1.1).
    num_entries = num_entries or _WORD
    if not 1 <= bits <= 16:
        raise ImageError(
            Reason.DAMAGED, f"{descriptor_keyword} states a number of bits that is not supported"
        )
    # The first stored value has the sign of the pixels, whatever type the file gives it.
    if is_signed and first >= _WORD // 2:
        first -= _WORD
    if data_keyword.startswith("Segmented"):
        entries = _unsegmented(words_of(item, data_keyword), num_entries, data_keyword)
    else:
        entries = _table_entries(item, data_keyword, num_entries, bits)
    if int(entries.max()) >= 1 << bits:
        raise contradiction(descriptor_keyword, data_keyword)
    return LookupTable(entries, first, bits)


def _table_entries(
    item: Any,
    keyword: str,
    num_entries: int,
    bits: int,
) -> Numbers:
    """Return entries in words of 16 bits, or in bytes where the length of the data shows it."""
    element = item.get_item(tag_of(keyword))
    value = None
    if element is not None:
        value = element.value
    # Values have an even length. Of a single entry, bytes and words have the same length: it is taken for a word.
    num_padded = num_entries + num_entries % 2
    may_be_bytes = bits <= 8 and num_padded != 2 * num_entries
    if may_be_bytes and isinstance(value, bytes) and len(value) == num_padded:
        data = value
        if not getattr(element, "is_little_endian", True):
            # Bytes are stored in words here too.
            words_of_bytes = np.frombuffer(value, ">u2")
            data = words_of_bytes.astype("<u2").tobytes()
        return np.frombuffer(data, np.uint8, num_entries)
    words = np.array(words_of(item, keyword), np.uint16)
    if len(words) != num_entries:
        raise ImageError(
            Reason.DAMAGED, f"{keyword} has another number of entries than its descriptor states"
        )
    return words


def _through_palette(
    tags: Any,
    values: Numbers,
    pixel_format: PixelFormat,
    spacing: Spacing | None,
) -> Picture:
    tables = [_palette_table(tags, colour, pixel_format.signed) for colour in _COLOURS]
    descriptions = {(len(table.entries), table.first, table.bits) for table in tables}
    if len(descriptions) > 1:
        raise contradiction(*(_palette_descriptor(colour) for colour in _COLOURS))
    first_table = tables[0]
    kind: type[np.uint8] | type[np.uint16] = np.uint16
    if first_table.bits == 8:
        kind = np.uint8
    channels = []
    for table in tables:
        entries = table.applied(values)
        channels.append(entries.astype(kind))
    colours = supported(np.stack(channels))
    return Picture(colours, spacing, None, _as_floats(first_table.bounds))


def _palette_descriptor(colour: str) -> str:
    return f"{colour}PaletteColorLookupTableDescriptor"


def _palette_table(
    tags: Any,
    colour: str,
    is_signed: bool,
) -> LookupTable:
    descriptor = _palette_descriptor(colour)
    if not has_tag(tags, descriptor):
        raise ImageError(Reason.DAMAGED, f"{descriptor} is missing")
    data = f"{colour}PaletteColorLookupTableData"
    if has_tag(tags, f"Segmented{data}"):
        data = f"Segmented{data}"
    table = _table_of(tags, descriptor, data, is_signed)
    if table.bits not in (8, 16):
        raise ImageError(Reason.DAMAGED, f"{descriptor} states neither 8 nor 16 bits")
    return table


def _unsegmented(
    words: list[int],
    num_entries: int,
    keyword: str,
) -> Numbers:
    """Return the entries of a segmented table of 16-bit words (PS3.3 C.7.9.2).

    A segment is discrete (0: its entries), linear (1: a line from the entry before to the one given) or indirect
    (2: segments from before once more).
    """
    damaged = ImageError(
        Reason.DAMAGED, f"{keyword} has segments that do not give the stated number of entries"
    )
    entries: list[int] = []
    pending = [
        (0, len(words), inf)
    ]  # where to continue, where to end, and how many segments at most
    while pending:
        position, end, num_segments = pending.pop()
        while position + 2 < end and num_segments > 0:
            kind = words[position]
            length = words[position + 1]
            start = position + 2
            num_segments -= 1
            is_outermost = end == len(words) and num_segments == inf
            if kind == 0 and start + length <= len(words):
                entries += words[start : start + length]
                position = start + length
            elif kind == 1 and entries:
                # It begins with the entry before, which is there already.
                line = np.linspace(entries[-1], words[start], length + 1)[1:]
                rounded = np.floor(line + 0.5)
                entries += [int(value) for value in rounded]
                position = start + 1
            elif kind == 2 and is_outermost and start + 2 <= end:
                # The offset counts bytes. What it points to is discrete or linear, so that this cannot continue
                # forever.
                offset = words[start] | words[start + 1] << 16
                pending.append((start + 2, end, inf))
                position = offset // 2
                num_segments = float(length)
            else:
                raise damaged
            if len(entries) > num_entries:
                raise damaged
    if len(entries) != num_entries:
        raise damaged
    return np.array(entries, np.uint16)
