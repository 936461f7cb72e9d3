"""What a sample is: its shape, and the range of its values. A part of the plan."""

from math import prod
from typing import Annotated

from pydantic import Field, model_validator

from ddm.protocol.base import Model

PixelSide = Annotated[int, Field(gt=0, le=65536)]
PixelValue = Annotated[float, Field(ge=-1e6, le=1e6)]


class DataSpec(Model):
    """The shape of one sample, an image (C, H, W) or a volume (C, D, H, W), and the range of its values.

    Attributes:
        shape: channels, then the sides.
        range: lowest and highest value; for experts on pixels, a recipe takes ranges that are 0.5 to 20 wide.
    """

    shape: Annotated[tuple[PixelSide, ...], Field(min_length=3, max_length=4)]
    range: tuple[PixelValue, PixelValue]

    @model_validator(mode="after")
    def _range_ascends(self) -> "DataSpec":
        # Values are divided by the width of the range when they are scaled.
        if not self.range[0] < self.range[1]:
            raise ValueError(f"range must ascend, got {self.range[0]:g} to {self.range[1]:g}")
        return self

    @property
    def dim(self) -> int:
        """The number of values in one sample."""
        return prod(self.shape)
