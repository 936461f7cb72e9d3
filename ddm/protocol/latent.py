"""The space that experts work in: pixels, or latents of a public autoencoder. Sizes only: imports no torch."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ddm.protocol.architecture import Shape
from ddm.protocol.base import Model, RelativePath

AUTOENCODER_PATH = "plan/autoencoder.safetensors"


class IdentityLatent(Model):
    """Experts work on the pixels themselves."""

    kind: Literal["identity"] = "identity"

    def misfit(self, shape: Shape) -> str | None:
        """Any shape fits."""
        return None

    def shape(self, shape: Shape) -> Shape:
        """Return the shape of a sample in the experts' space."""
        return shape


class AutoencoderSize(Model):
    """The sizes of a MONAI AutoencoderKL.

    Attributes:
        channels: width of each level; each level has half the side of the one before.
        attention: whether each level has attention; the innermost block has it where the last level has.
        latent_channels: channels of the latents.
        num_res_blocks: residual blocks of each level.
        norm_groups: groups of every normalisation.
    """

    channels: Annotated[tuple[Annotated[int, Field(gt=0, le=4096)], ...], Field(min_length=1, max_length=8)]
    attention: Annotated[tuple[bool, ...], Field(min_length=1, max_length=8)]
    latent_channels: Annotated[int, Field(gt=0, le=256)]
    num_res_blocks: Annotated[int, Field(gt=0, le=16)] = 2
    norm_groups: Annotated[int, Field(gt=0, le=256)] = 32

    @model_validator(mode="after")
    def _levels_agree(self) -> "AutoencoderSize":
        if len(self.attention) != len(self.channels):
            counts = f"got {len(self.attention)} for {len(self.channels)} levels"
            raise ValueError(f"attention must have one entry for each of channels, {counts}")
        if any(width % self.norm_groups for width in self.channels):
            raise ValueError(f"channels must be multiples of norm_groups, {self.norm_groups}, got {self.channels}")
        return self

    @property
    def levels(self) -> int:
        """The number of levels."""
        return len(self.channels)

    @property
    def downsampling(self) -> int:
        """The factor by which each side of the latents is shorter."""
        return int(2 ** (self.levels - 1))

    def misfit(self, shape: Shape) -> str | None:
        """Return what the sample's shape must be, or None where it fits."""
        if any(side % self.downsampling for side in shape[1:]):
            return f"sides that are multiples of {self.downsampling} for {self.levels} levels, not {shape[1:]}"
        return None

    def shape(self, shape: Shape) -> Shape:
        """Return the shape of a sample's latents."""
        return (self.latent_channels, *(side // self.downsampling for side in shape[1:]))


class AutoencoderKlLatent(AutoencoderSize):
    """Experts work on latents of a frozen public autoencoder, its weights in the plan's bundle.

    Attributes:
        path: the weights.
        scale: standard deviation of the latents of public images, by which the experts' latents are divided.
    """

    kind: Literal["autoencoder_kl"] = "autoencoder_kl"
    path: RelativePath = AUTOENCODER_PATH
    scale: Annotated[float, Field(ge=1e-6, le=1e6)]


Latent = Annotated[IdentityLatent | AutoencoderKlLatent, Field(discriminator="kind")]
