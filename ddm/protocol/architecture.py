"""The architectures and the kinds of condition that an expert may have: fields with bounds. Imports no torch.

Each architecture is one class here, its document, and one file of `ddm/models`, its network: the module that has the
name of the kind. So a plan is read without torch (docs/adr/0070).
"""

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from ddm.errors import ShapeError
from ddm.protocol.base import TEXT_PATTERN, File, Model
from ddm.protocol.classes import Classes, find_naming_fault

Shape = tuple[int, ...]

# The learning rate of a transformer's recipe that names none, times its width (docs/results/recipe.md).
RATE_TIMES_WIDTH = 0.5
DropProbability = Annotated[float, Field(ge=0.0, lt=1.0)]
ClassName = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=TEXT_PATTERN)]


class NoCondition(Model):
    """Unconditional experts."""

    kind: Literal["none"] = "none"


class ClassCondition(Model):
    """Experts conditioned on a class; training drops it with probability `drop`, for classifier-free guidance.

    Attributes:
        num_classes: number of classes, numbered from 0.
        drop: probability with which training drops a sample's class.
        names: the names of the classes, from number 0 on, which tables of images and requests for samples may use.
    """

    kind: Literal["class"] = "class"
    num_classes: Annotated[int, Field(gt=1, le=4096)]
    drop: DropProbability = 0.1
    names: Annotated[tuple[ClassName, ...], Field(max_length=4096)] = ()

    @model_validator(mode="after")
    def _names_tell_classes_apart(self) -> "ClassCondition":
        if self.names:
            problem = find_naming_fault(self.names, self.num_classes)
            if problem:
                raise ValueError(problem)
        return self

    @property
    def classes(self) -> Classes:
        """The classes, by number and by name."""
        return Classes(self.num_classes, self.names)


MaxTokens = Annotated[int, Field(gt=0, le=4096)]


class PinnedEncoder(Model):
    """The frozen encoder of a plan's texts, by digest. A plan does not contain its files; each site brings the folder.

    Attributes:
        name: the folder's name, for display only.
        files: its configuration, tokenizer and weights, by their names in that folder.
    """

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    files: Annotated[tuple[File, ...], Field(min_length=3, max_length=1024)]


class TextCondition(Model):
    """Experts conditioned on a text, as at most `max_tokens` embeddings of `dim` values; `drop` as for classes."""

    kind: Literal["text"] = "text"
    dim: Annotated[int, Field(gt=0, le=16384)]
    max_tokens: MaxTokens
    drop: DropProbability = 0.1
    encoder: PinnedEncoder | None = None


Condition = Annotated[NoCondition | ClassCondition | TextCondition, Field(discriminator="kind")]


def learns_null(condition: Condition) -> bool:
    """Whether experts answer without a condition: they take none, or training hid it from some samples."""
    return isinstance(condition, NoCondition) or condition.drop > 0


GridSide = Annotated[int, Field(gt=0, le=65536)]
GridSize = tuple[GridSide, GridSide]


class ExpertArchitecture(Model, ABC):
    """The document of an expert's network: its sizes, and what the toolkit has to know before it builds one.

    Attributes:
        supports_masking: whether training may leave out a share of the tokens (`mask_ratio`).
        has_unit_weights: whether some weights, as the scales of normalisations, start at 1. Screening then allows for
            it where it asks how far weights have moved.
        size_names: the published sizes that a recipe may name in `size`; empty for an architecture without.
    """

    supports_masking: ClassVar[bool] = False
    has_unit_weights: ClassVar[bool] = False
    size_names: ClassVar[str] = ""

    @abstractmethod
    def misfit(self, shape: Shape, condition: Condition) -> str | None:
        """Return what the sample's shape or the condition must be, or None where both fit."""

    @property
    def usual_learning_rate(self) -> float | None:
        """The learning rate of a recipe that names none; None where none was measured."""
        return None

    def position_span(self, shape: Shape) -> GridSize | None:
        """Return rows and columns of the grid that positions span; None for a network without patches."""
        return None

    def spanning(self, grid: GridSize, shape: Shape) -> Self:
        """Return it with positions that span this grid, as an expert learned them on other image sizes."""
        return self

    @classmethod
    def published_size(cls, name: str) -> Self:
        """Return a published size by its name.

        Raises:
            ShapeError: there is no published size of this name.
        """
        raise ShapeError(
            "size of an architecture",
            expected="numbers: this architecture has no published sizes",
            got=repr(name[:40]),
        )


class TransformerSize(Model):
    """The sizes of a transformer on square patches.

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
            raise ValueError(
                f"hidden must be an even multiple of heads: {self.hidden} is not one of {self.heads}"
            )
        return self

    def misfit(self, shape: Shape, condition: Condition) -> str | None:
        """Return what the sample's shape or the condition must be, or None where both fit."""
        if len(shape) != 3:
            return f"images (C, H, W), not {len(shape)} dimensions: use the architecture unet for volumes"
        if any(side % self.patch for side in shape[1:]):
            return f"a patch that divides height and width, {shape[1]} and {shape[2]}: {self.patch} does not"
        return None


class ExpertTransformer(TransformerSize, ExpertArchitecture):
    """A transformer whose positions are computed from the place of a patch.

    Attributes:
        position_grid: rows and columns of the grid of patches on which an expert was trained first; in an image with
            more patches, the places of rows and columns lie between those of this grid and span the same range. None
            where positions are the numbers of row and column.
    """

    position_grid: GridSize | None = None

    @property
    def usual_learning_rate(self) -> float:
        """See `ExpertArchitecture`; wider transformers need smaller rates."""
        return RATE_TIMES_WIDTH / self.hidden

    def patch_grid(self, shape: Shape) -> tuple[int, int]:
        """Return rows and columns of the patches of a sample (C, H, W)."""
        return shape[1] // self.patch, shape[2] // self.patch

    def position_span(self, shape: Shape) -> GridSize:
        """See `ExpertArchitecture`."""
        return self.position_grid or self.patch_grid(shape)

    def spanning(self, grid: GridSize, shape: Shape) -> Self:
        """See `ExpertArchitecture`; a `position_grid` that the document names stays."""
        if self.position_grid is not None or self.patch_grid(shape) == grid:
            return self
        return self.model_copy(update={"position_grid": grid})


# Widths, depths and heads as published (Peebles and Xie 2023, table 1).
_DIT_SIZES = {"S": (384, 12, 6), "B": (768, 12, 12), "L": (1024, 24, 16), "XL": (1152, 28, 16)}
# Depths d of Esser et al. 2024, whose width is 64 d and whose heads are d.
_MMDIT_DEPTHS = {f"d{depth}": depth for depth in (15, 18, 21, 24, 30, 38)}
# The width, depth and heads of McAllister et al. 2025, which come to 3B parameters in shared blocks only.
_MMDIT_3B = (2560, 30, 20)
_PATCHES = ("2", "4", "8")


class Dit(ExpertTransformer):
    """A diffusion transformer with adaLN-zero blocks (Peebles and Xie 2023); a text enters by cross-attention.

    Attributes:
        qk_norm: whether queries and keys are normalised in each head, so that attention stays bounded at high learning
            rates and in bf16 (Dehghani et al. 2023); those of an MMDiT always are.
    """

    supports_masking: ClassVar[bool] = True
    size_names: ClassVar[str] = "S, B, L or XL, then /2, /4 or /8"

    kind: Literal["dit"] = "dit"
    qk_norm: bool = False

    @classmethod
    def published_size(cls, name: str) -> Self:
        """Return a published size by its name: S, B, L or XL, then the side of a patch, as in ``XL/2``.

        Raises:
            ShapeError: there is no published size of this name.
        """
        letter, _, patch = name.partition("/")
        if letter not in _DIT_SIZES or patch not in _PATCHES:
            raise ShapeError("size of a DiT", expected=cls.size_names, got=repr(name[:40]))
        hidden, depth, heads = _DIT_SIZES[letter]
        return cls(patch=int(patch), hidden=hidden, depth=depth, heads=heads)


class Mmdit(ExpertTransformer):
    """Joint attention over text and image tokens (Esser et al. 2024).

    Attributes:
        shared_depth: how many of the blocks, counted from the last, share one set of weights between both kinds of
            token and compute attention and network in parallel; with 0, the network is that of Stable Diffusion 3.
    """

    size_names: ClassVar[str] = f"{', '.join(_MMDIT_DEPTHS)} or 3B, then /2, /4 or /8"

    kind: Literal["mmdit"] = "mmdit"
    shared_depth: Annotated[int, Field(ge=0, le=128)] = 0

    @model_validator(mode="after")
    def _shared_blocks_are_blocks(self) -> "Mmdit":
        if self.shared_depth > self.depth:
            raise ValueError(
                f"shared_depth must be at most depth, {self.depth}, got {self.shared_depth}"
            )
        return self

    def misfit(self, shape: Shape, condition: Condition) -> str | None:
        """See `ExpertArchitecture`."""
        if not isinstance(condition, TextCondition):
            return (
                f"the condition text, not {condition.kind}: without texts use the architecture dit"
            )
        return super().misfit(shape, condition)

    @classmethod
    def published_size(cls, name: str) -> Self:
        """Return a published size by its name: d15 to d38, or 3B, then the side of a patch, as in ``d24/2``.

        ``d24`` is that of Stable Diffusion 3 medium. ``3B`` has the paper's width and depth, every block shared.

        Raises:
            ShapeError: there is no published size of this name.

        Source:
            Esser et al. 2024, section 5.3; McAllister et al. 2025.
        """
        stem, _, patch = name.partition("/")
        if (stem not in _MMDIT_DEPTHS and stem != "3B") or patch not in _PATCHES:
            raise ShapeError("size of an MMDiT", expected=cls.size_names, got=repr(name[:40]))
        if stem == "3B":
            hidden, depth, heads = _MMDIT_3B
            return cls(
                patch=int(patch), hidden=hidden, depth=depth, heads=heads, shared_depth=depth
            )
        depth = _MMDIT_DEPTHS[stem]
        return cls(patch=int(patch), hidden=64 * depth, depth=depth, heads=depth)


def check_levels(channels: tuple[int, ...], attention: tuple[bool, ...], norm_groups: int) -> None:
    """Check the levels of a convolutional network against each other.

    Raises:
        ValueError: attention for another number of levels, or channels that do not form groups of equal size.
    """
    if len(attention) != len(channels):
        counts = f"got {len(attention)} for {len(channels)} levels"
        raise ValueError(f"attention must have one entry for each of channels, {counts}")
    if any(width % norm_groups for width in channels):
        raise ValueError(
            f"channels must be multiples of norm_groups, {norm_groups}, got {channels}"
        )


class Unet(ExpertArchitecture):
    """MONAI's DiffusionModelUNet, for images and volumes.

    Attributes:
        channels: width of each level; each level has half the side of the one before.
        attention: whether each level has attention; the innermost block always has.
        num_res_blocks: residual blocks of each level.
        head_channels: channels of one attention head.
        norm_groups: groups of every normalisation.
    """

    has_unit_weights: ClassVar[bool] = True

    kind: Literal["unet"] = "unet"
    channels: Annotated[
        tuple[Annotated[int, Field(gt=0, le=4096)], ...], Field(min_length=1, max_length=8)
    ]
    attention: Annotated[tuple[bool, ...], Field(min_length=1, max_length=8)]
    num_res_blocks: Annotated[int, Field(gt=0, le=16)] = 2
    head_channels: Annotated[int, Field(gt=0, le=1024)] = 32
    norm_groups: Annotated[int, Field(gt=0, le=256)] = 32

    @model_validator(mode="after")
    def _levels_agree(self) -> "Unet":
        check_levels(self.channels, self.attention, self.norm_groups)
        attending_widths = {self.channels[-1]}
        for width, attends in zip(self.channels, self.attention, strict=True):
            if attends:
                attending_widths.add(width)
        if any(width % self.head_channels for width in attending_widths):
            raise ValueError(
                f"channels with attention and the last ones must be multiples of head_channels, "
                f"{self.head_channels}, got {self.channels}"
            )
        return self

    def misfit(self, shape: Shape, condition: Condition) -> str | None:
        """See `ExpertArchitecture`."""
        # Each level after the first has half the sides of the one before.
        halved = 2 ** (len(self.channels) - 1)
        if any(side % halved for side in shape[1:]):
            return f"sides that are multiples of {halved} for {len(self.channels)} levels, not {shape[1:]}"
        return None


# The architectures that a plan, a policy and a recipe may name.
Architecture = Annotated[Dit | Mmdit | Unet, Field(discriminator="kind")]
ArchitectureKind = Literal["dit", "mmdit", "unet"]
