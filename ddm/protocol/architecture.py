"""Which networks an expert may be, and what they may be told beside the image and the time. No torch: sizes only."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from ddm.errors import ShapeError
from ddm.protocol.base import File, Model

Shape = tuple[int, ...]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


class NoCondition(Model):
    """Unconditional experts."""

    kind: Literal["none"] = "none"


class ClassCondition(Model):
    """Experts that are told an image's class; training hides it with probability `drop`, for guidance.

    Attributes:
        num_classes: classes, numbered from 0.
        drop: share of the samples whose class training hides, for guidance.
    """

    kind: Literal["class"] = "class"
    num_classes: Annotated[int, Field(gt=1, le=4096)]
    drop: Probability = 0.1


MaxTokens = Annotated[int, Field(gt=0, le=4096)]


class PinnedEncoder(Model):
    """The frozen encoder of a plan's texts, by digest. Its files do not travel: whoever uses it brings the folder.

    Attributes:
        name: what the folder was called; for people.
        files: its configuration, tokenizer and weights, by their names in that folder.
    """

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    files: Annotated[tuple[File, ...], Field(min_length=3, max_length=1024)]


class TextCondition(Model):
    """Experts that are told a text, as at most `max_tokens` vectors of `dim` values; `drop` as for classes.

    `encoder` was added after the first plans were signed and is left out of a document that names none.
    """

    kind: Literal["text"] = "text"
    dim: Annotated[int, Field(gt=0, le=16384)]
    max_tokens: MaxTokens
    drop: Probability = 0.1
    encoder: Annotated[PinnedEncoder | None, Field(exclude_if=lambda pinned: pinned is None)] = None


Condition = Annotated[NoCondition | ClassCondition | TextCondition, Field(discriminator="kind")]


class TransformerSize(Model):
    """What every transformer on square patches has.

    Attributes:
        patch: side of a patch in pixels or latents; it divides height and width.
        hidden: width; an even multiple of heads.
        depth: number of blocks.
        heads: attention heads of each block.
    """

    patch: Annotated[int, Field(gt=0, le=64)]
    hidden: Annotated[int, Field(gt=0, le=8192)]
    depth: Annotated[int, Field(gt=0, le=128)]
    heads: Annotated[int, Field(gt=0, le=128)]

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> "TransformerSize":
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError("hidden must be an even multiple of heads")
        return self

    def misfit(self, shape: Shape, condition: Condition) -> str | None:
        """Say what a sample's shape or the condition would have to be; None where both fit."""
        if len(shape) != 3:
            return "images (C, H, W): volumes take the architecture unet"
        if any(side % self.patch for side in shape[1:]):
            return "a patch that divides height and width"
        return None


class Dit(TransformerSize):
    """A diffusion transformer with adaLN-zero blocks (Peebles and Xie 2023); reads a text by cross-attention."""

    kind: Literal["dit"] = "dit"


class Mmdit(TransformerSize):
    """Text and image tokens in one attention (Esser et al. 2024).

    Attributes:
        shared_depth: how many of the blocks, counted from the last, have one set of weights for both kinds of token,
            and attention and network side by side; 0 is Stable Diffusion 3.
    """

    kind: Literal["mmdit"] = "mmdit"
    shared_depth: Annotated[int, Field(ge=0, le=128)] = 0

    @model_validator(mode="after")
    def _shared_blocks_are_blocks(self) -> "Mmdit":
        if self.shared_depth > self.depth:
            raise ValueError("shared_depth must be at most depth")
        return self

    def misfit(self, shape: Shape, condition: Condition) -> str | None:
        """See `TransformerSize.misfit`."""
        if not isinstance(condition, TextCondition):
            return "the condition text, whose tokens it joins with the image's: without one take dit"
        return super().misfit(shape, condition)


class Unet(Model):
    """MONAI's DiffusionModelUNet, for images and volumes.

    Attributes:
        channels: width of each level; each level has half the side of the one before.
        attention: whether each level attends; the innermost block always does.
        num_res_blocks: residual blocks of each level.
        head_channels: channels of one attention head.
        norm_groups: groups of every normalisation.
    """

    kind: Literal["unet"] = "unet"
    channels: Annotated[tuple[Annotated[int, Field(gt=0, le=4096)], ...], Field(min_length=1, max_length=8)]
    attention: Annotated[tuple[bool, ...], Field(min_length=1, max_length=8)]
    num_res_blocks: Annotated[int, Field(gt=0, le=16)] = 2
    head_channels: Annotated[int, Field(gt=0, le=1024)] = 32
    norm_groups: Annotated[int, Field(gt=0, le=256)] = 32

    @model_validator(mode="after")
    def _levels_agree(self) -> "Unet":
        if len(self.attention) != len(self.channels):
            raise ValueError("attention must say yes or no for each of channels")
        if any(width % self.norm_groups for width in self.channels):
            raise ValueError("channels must be multiples of norm_groups")
        attending = [width for width, attends in zip(self.channels, self.attention, strict=True) if attends]
        if any(width % self.head_channels for width in (*attending, self.channels[-1])):
            raise ValueError("channels that attend, the last ones included, must be multiples of head_channels")
        return self

    def misfit(self, shape: Shape, condition: Condition) -> str | None:
        """See `TransformerSize.misfit`."""
        halved = 2 ** (len(self.channels) - 1)
        if any(side % halved for side in shape[1:]):
            return f"sides that are multiples of {halved}, which {len(self.channels)} levels halve"
        return None


Architecture = Annotated[Dit | Mmdit | Unet, Field(discriminator="kind")]

# Widths, depths and heads as published (Peebles and Xie 2023, table 1).
_DIT_SIZES = {"S": (384, 12, 6), "B": (768, 12, 12), "L": (1024, 24, 16), "XL": (1152, 28, 16)}


def dit_size(name: str) -> Dit:
    """Return a published size by its name: S, B, L or XL, then the side of a patch, as in ``XL/2``.

    Raises:
        ShapeError: a name that was not published.
    """
    letter, _, patch = name.partition("/")
    if letter not in _DIT_SIZES or patch not in ("2", "4", "8"):
        raise ShapeError("size of a DiT", expected="S, B, L or XL, then /2, /4 or /8", got=name)
    hidden, depth, heads = _DIT_SIZES[letter]
    return Dit(patch=int(patch), hidden=hidden, depth=depth, heads=heads)
