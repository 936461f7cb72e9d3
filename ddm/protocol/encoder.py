"""The encoder of public features: components of pixels or gradients, or a network of timm. Imports no torch."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from ddm.protocol.base import Model, RelativePath


class PcaEncoderSpec(Model):
    """Principal components of the public images; needs no weights from elsewhere."""

    kind: Literal["pca"] = "pca"
    path: RelativePath = "plan/encoder.safetensors"
    dim: Annotated[int, Field(gt=0, le=4096)]

    def misfit(self, shape: tuple[int, ...]) -> str:
        """Say what images an encoder of this kind takes if not those of this shape; these take all."""
        return ""


# Of a cell's histogram, over half a turn.
HOG_DIRECTIONS = 8


class HogEncoderSpec(Model):
    """Principal components of the public images' histograms of oriented gradients; needs no weights from elsewhere."""

    kind: Literal["hog"] = "hog"
    path: RelativePath = "plan/encoder.safetensors"
    dim: Annotated[int, Field(gt=0, le=4096)]
    cells: Annotated[int, Field(gt=0, le=64)]
    mirrored: bool

    @property
    def values(self) -> int:
        """The number of values of one image's histograms."""
        return HOG_DIRECTIONS * self.cells**2

    def misfit(self, shape: tuple[int, ...]) -> str:
        """Say what images an encoder of this kind takes if not those of this shape."""
        if len(shape) != 3:
            return _not_volumes(shape)
        if min(shape[1:]) < self.cells:
            return f"images of at least {self.cells} pixels a side"
        return ""


def _not_volumes(shape: tuple[int, ...]) -> str:
    return f"images (C, H, W), not {len(shape)} dimensions: use pca for volumes"


# A side of an encoder's input, pixels.
Side = Annotated[int, Field(gt=0, le=1024)]
ChannelMean = Annotated[float, Field(ge=-1e3, le=1e3)]
# A divisor, so not 0.
ChannelDeviation = Annotated[float, Field(ge=1e-3, le=1e3)]


class TimmEncoderSpec(Model):
    """A frozen network of the timm library; its weights are in the plan's bundle, its preprocessing is stated here."""

    kind: Literal["timm"] = "timm"
    path: RelativePath = "plan/encoder.safetensors"
    dim: Annotated[int, Field(gt=0, le=16384)]
    # No colon and no slash: timm takes a name such as hf-hub:OWNER/NAME for a place to download from.
    model: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
    weights: Literal["file", "random"] = "file"
    image_size: tuple[Side, Side]
    interpolation: Literal["nearest", "bilinear", "bicubic"] = "bicubic"
    crop: Annotated[float, Field(ge=0.1, le=1.0)] = 1.0
    mean: Annotated[tuple[ChannelMean, ...], Field(min_length=1, max_length=16)]
    std: Annotated[tuple[ChannelDeviation, ...], Field(min_length=1, max_length=16)]

    @model_validator(mode="after")
    def _channels_agree(self) -> "TimmEncoderSpec":
        if len(self.mean) != len(self.std):
            raise ValueError(
                "mean and std must have one entry for each channel, "
                f"got {len(self.mean)} and {len(self.std)}"
            )
        return self

    def misfit(self, shape: tuple[int, ...]) -> str:
        """Say what images an encoder of this kind takes if not those of this shape."""
        if len(shape) != 3:
            return _not_volumes(shape)
        return ""


EncoderSpec = Annotated[
    PcaEncoderSpec | HogEncoderSpec | TimmEncoderSpec, Field(discriminator="kind")
]
