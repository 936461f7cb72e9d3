"""Pictures inside a page: images as small PNGs in its source, and positions on a bar."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

from PIL import Image

from ddm.io.pictures import to_pixels

if TYPE_CHECKING:
    from torch import Tensor

MAX_PIXELS = 160


@dataclass(frozen=True)
class Scale:
    """Maps numbers to positions on a bar."""

    low: float
    high: float
    width: float = 120.0

    def x(self, value: float) -> str:
        """Return the position of `value`."""
        # A scale of equal ends, where all values are 0, puts everything at its left end.
        span = (self.high - self.low) or 1.0
        part = (value - self.low) / span
        clipped = min(max(part, 0.0), 1.0)
        return f"{clipped * self.width:.1f}"

    @classmethod
    def over(cls, values: Sequence[float]) -> "Scale":
        """Return the scale from the smallest to the largest value that also contains zero."""
        return cls(min(0.0, *values), max(0.0, *values))


def inline(images: "Tensor", value_range: tuple[float, float]) -> tuple[str, ...]:
    """Return images, shape (N, C, H, W) or (N, C, D, H, W), as small PNGs in `data:` addresses.

    Returns:
        Nothing if they are neither grey nor colour.
    """
    if images.shape[1] not in (1, 3):
        return ()
    return tuple(_png(pixels) for pixels in to_pixels(images, value_range))


def _png(pixels: object) -> str:
    image = Image.fromarray(pixels)  # type: ignore[arg-type]
    image.thumbnail((MAX_PIXELS, MAX_PIXELS))
    encoded = BytesIO()
    image.save(encoded, format="PNG", optimize=True)
    return "data:image/png;base64," + b64encode(encoded.getvalue()).decode("ascii")
