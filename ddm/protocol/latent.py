"""What experts work on: a sample itself, or its latents under a public autoencoder. No torch: sizes only."""

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
        """Return the shape of what experts see."""
        return shape


class AutoencoderSize(Model):
    """The sizes of a MONAI AutoencoderKL.

    Attributes:
        channels: width of each level; each level has half the side of the one before.
        attention: whether each level attends; the innermost block does where the last level does.
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
            raise ValueError("attention must say yes or no for each of channels")
        if any(width % self.norm_groups for width in self.channels):
            raise ValueError("channels must be multiples of norm_groups")
        return self

    @property
    def levels(self) -> int:
        """The number of levels."""
        return len(self.channels)

    @property
    def downsampling(self) -> int:
        """How many times shorter each side of the latents is."""
        return int(2 ** (self.levels - 1))

    def misfit(self, shape: Shape) -> str | None:
        """Say what a sample's shape would have to be; None where it fits."""
        if any(side % self.downsampling for side in shape[1:]):
            return f"sides that are multiples of {self.downsampling}, which {self.levels} levels halve"
        return None

    def shape(self, shape: Shape) -> Shape:
        """Return the shape of a sample's latents."""
        return (self.latent_channels, *(side // self.downsampling for side in shape[1:]))


class AutoencoderKlLatent(AutoencoderSize):
    """Experts work on latents of a frozen public autoencoder, its weights in the plan's bundle.

    Attributes:
        path: the weights.
        scale: standard deviation of the latents of public images; experts see latents divided by it.
    """

    kind: Literal["autoencoder_kl"] = "autoencoder_kl"
    path: RelativePath = AUTOENCODER_PATH
    scale: Annotated[float, Field(ge=1e-6, le=1e6)]


Latent = Annotated[IdentityLatent | AutoencoderKlLatent, Field(discriminator="kind")]
