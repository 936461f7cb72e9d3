"""The encoder of public features: principal components, or a network of timm. Sizes only: imports no torch."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from ddm.protocol.base import Model, RelativePath


class PcaEncoder(Model):
    """Principal components of the public images; needs no weights from elsewhere."""

    kind: Literal["pca"] = "pca"
    path: RelativePath = "plan/encoder.safetensors"
    dim: Annotated[int, Field(gt=0, le=4096)]


Side = Annotated[int, Field(gt=0, le=1024)]  # of an encoder's input, pixels
ChannelMean = Annotated[float, Field(ge=-1e3, le=1e3)]
ChannelDeviation = Annotated[float, Field(ge=1e-3, le=1e3)]  # a divisor


class TimmEncoder(Model):
    """A frozen network of the timm library; its weights are in the plan's bundle, its preprocessing is stated here."""

    kind: Literal["timm"] = "timm"
    path: RelativePath = "plan/encoder.safetensors"
    dim: Annotated[int, Field(gt=0, le=16384)]
    model: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
    weights: Literal["file", "random"] = "file"
    image_size: tuple[Side, Side]
    interpolation: Literal["nearest", "bilinear", "bicubic"] = "bicubic"
    crop: Annotated[float, Field(ge=0.1, le=1.0)] = 1.0
    mean: Annotated[tuple[ChannelMean, ...], Field(min_length=1, max_length=16)]
    std: Annotated[tuple[ChannelDeviation, ...], Field(min_length=1, max_length=16)]

    @model_validator(mode="after")
    def _channels_agree(self) -> "TimmEncoder":
        if len(self.mean) != len(self.std):
            got = f"{len(self.mean)} and {len(self.std)}"
            raise ValueError(f"mean and std must have one entry for each channel, got {got}")
        return self
