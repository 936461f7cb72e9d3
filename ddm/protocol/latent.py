"""The space that experts work in: pixels, or latents of a public autoencoder. Sizes only: imports no torch."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from ddm.protocol.architecture import Shape, check_levels
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


class _AutoencoderLevels(Model):
    """The levels of an autoencoder, of which each has half the sides of the one before."""

    # Those that inherit have these fields, each in its own order, which is the order in which they are written.
    if TYPE_CHECKING:
        channels: tuple[int, ...]
        latent_channels: int

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

    def at_once(self, shape: Shape) -> Shape:
        """Return the shape of the largest part of a sample that the network sees at once: all of it, or a tile."""
        return shape


class AutoencoderSize(_AutoencoderLevels):
    """The sizes of a MONAI AutoencoderKL.

    Attributes:
        channels: width of each level; each level has half the side of the one before.
        attention: whether each level has attention; the innermost block has it where the last level has.
        latent_channels: channels of the latents.
        num_res_blocks: residual blocks of each level.
        norm_groups: groups of every normalisation.
    """

    channels: Annotated[
        tuple[Annotated[int, Field(gt=0, le=4096)], ...], Field(min_length=1, max_length=8)
    ]
    attention: Annotated[tuple[bool, ...], Field(min_length=1, max_length=8)]
    latent_channels: Annotated[int, Field(gt=0, le=256)]
    num_res_blocks: Annotated[int, Field(gt=0, le=16)] = 2
    norm_groups: Annotated[int, Field(gt=0, le=256)] = 32

    @model_validator(mode="after")
    def _levels_agree(self) -> "AutoencoderSize":
        check_levels(self.channels, self.attention, self.norm_groups)
        return self


class AutoencoderKlLatent(AutoencoderSize):
    """Experts work on latents of a frozen public autoencoder, its weights in the plan's bundle.

    Attributes:
        path: the weights.
        scale: standard deviation of the latents of public images, by which the experts' latents are divided.
    """

    kind: Literal["autoencoder_kl"] = "autoencoder_kl"
    path: RelativePath = AUTOENCODER_PATH
    scale: Annotated[float, Field(ge=1e-6, le=1e6)]


class DiffusersKlSize(_AutoencoderLevels):
    """The sizes of an AutoencoderKL of diffusers, as those of Stable Diffusion, SDXL and FLUX; for images only.

    Attributes:
        channels: width of each level; each level has half the side of the one before.
        latent_channels: channels of the latents.
        layers_per_block: residual blocks of each level of the encoder; the decoder has one more.
        norm_groups: groups of every normalisation.
        mid_attention: whether the innermost block has attention.
        quant_conv: whether a convolution follows the encoder.
        post_quant_conv: whether a convolution precedes the decoder.
    """

    channels: Annotated[
        tuple[Annotated[int, Field(gt=0, le=4096)], ...], Field(min_length=1, max_length=8)
    ]
    latent_channels: Annotated[int, Field(gt=0, le=256)]
    layers_per_block: Annotated[int, Field(gt=0, le=16)]
    norm_groups: Annotated[int, Field(gt=0, le=256)]
    mid_attention: bool
    quant_conv: bool
    post_quant_conv: bool

    @model_validator(mode="after")
    def _groups_divide(self) -> "DiffusersKlSize":
        if any(width % self.norm_groups for width in self.channels):
            raise ValueError(
                f"channels must be multiples of norm_groups, {self.norm_groups}, got {self.channels}"
            )
        return self

    def misfit(self, shape: Shape) -> str | None:
        """See `_AutoencoderLevels.misfit`."""
        if len(shape) != 3:
            return f"images (C, H, W), not {len(shape)} dimensions: use autoencoder_kl for volumes"
        return super().misfit(shape)


Tile = Annotated[int, Field(ge=0, le=65536)]


class DiffusersKlLatent(DiffusersKlSize):
    """Experts work on latents of a published autoencoder, its file in the plan's bundle as it was published.

    Attributes:
        path: the weights.
        dtype: type of the weights in the file; latents are computed in float32.
        scaling_factor: what latents are multiplied by, after `shift_factor` is taken off.
        shift_factor: what is taken off every latent.
        tile: side in pixels of the overlapping tiles that larger images are cut into; 0 for whole images.
    """

    kind: Literal["diffusers_kl"] = "diffusers_kl"
    # Byte for byte as it was published, so that anybody can compare the digest with the publisher's (docs/adr/0027).
    path: RelativePath = AUTOENCODER_PATH
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    scaling_factor: Annotated[float, Field(ge=1e-6, le=1e6)]
    shift_factor: Annotated[float, Field(ge=-1e6, le=1e6)] = 0.0
    tile: Tile = 0

    @model_validator(mode="after")
    def _tiles_overlap_by_whole_latents(self) -> "DiffusersKlLatent":
        # Tiles of diffusers overlap by a quarter of their side, and the overlap must be a whole number of latents.
        if self.tile % (4 * self.downsampling):
            raise ValueError(
                f"tile must be 0 or a multiple of {4 * self.downsampling}, got {self.tile}"
            )
        return self

    def at_once(self, shape: Shape) -> Shape:
        """See `_AutoencoderLevels.at_once`."""
        return (shape[0], *(min(side, self.tile or side) for side in shape[1:]))


Autoencoder = AutoencoderKlLatent | DiffusersKlLatent
LatentSpec = Annotated[
    IdentityLatent | AutoencoderKlLatent | DiffusersKlLatent, Field(discriminator="kind")
]
