"""Renames and reorders the weights of diffusers' networks into those of the same network here, and a `unet` back.

Imports no diffusers.

`DiTTransformer2DModel` becomes a `dit`, `UNet2DModel` a `unet`, `SD3Transformer2DModel` an `mmdit`. What cannot be
expressed here is refused by its field in `config.json` or by its tensor. Time is `1000 t` here, a step's number there.
"""

# Shape legend: D hidden width, O outputs, I inputs, C channels, P side of a patch.
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from ddm.errors import SetupError, TensorFileError
from ddm.models.base_weights import BaseWeights
from ddm.protocol.architecture import (
    Architecture,
    ClassCondition,
    Condition,
    Dit,
    Mmdit,
    Shape,
    TextCondition,
    Unet,
)

DiffusersClass = Literal["DiTTransformer2DModel", "UNet2DModel", "SD3Transformer2DModel"]
LAYOUTS = get_args(DiffusersClass)
_MAX_SHOWN = 80

SampleSide = Annotated[int, Field(gt=0, le=65536)]


class _Config(BaseModel):
    """The fields of a `config.json` that say what a network computes; others, such as dropout, do not matter here."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class DitConfig(_Config):
    """Of a `DiTTransformer2DModel`; defaults are those of diffusers."""

    num_attention_heads: int = 16
    attention_head_dim: int = 72
    in_channels: Annotated[int, Field(gt=0, le=4096)] = 4
    out_channels: Annotated[int, Field(gt=0, le=8192)] | None = None
    num_layers: Annotated[int, Field(gt=0, le=128)] = 28
    attention_bias: Literal[True] = True
    sample_size: SampleSide = 32
    patch_size: Annotated[int, Field(gt=0, le=64)] = 2
    # The tanh of the second is an approximation of the first, which this toolkit computes.
    activation_fn: Literal["gelu", "gelu-approximate"] = "gelu-approximate"
    norm_type: Literal["ada_norm_zero"] = "ada_norm_zero"
    norm_elementwise_affine: Literal[False] = False


class UnetConfig(_Config):
    """Of a `UNet2DModel`; defaults are those of diffusers."""

    sample_size: SampleSide | tuple[SampleSide, SampleSide] | None = None
    in_channels: Annotated[int, Field(gt=0, le=4096)] = 3
    out_channels: Annotated[int, Field(gt=0, le=4096)] = 3
    center_input_sample: Literal[False] = False
    time_embedding_type: Literal["positional"] = "positional"
    flip_sin_to_cos: bool = True
    down_block_types: tuple[str, ...] = ("DownBlock2D", *["AttnDownBlock2D"] * 3)
    mid_block_type: Literal["UNetMidBlock2D"] = "UNetMidBlock2D"
    up_block_types: tuple[str, ...] = (*["AttnUpBlock2D"] * 3, "UpBlock2D")
    block_out_channels: tuple[int, ...] = (224, 448, 672, 896)
    layers_per_block: int = 2
    mid_block_scale_factor: Literal[1] = 1
    downsample_padding: Literal[1] = 1
    downsample_type: Literal["conv"] = "conv"
    upsample_type: Literal["conv"] = "conv"
    act_fn: Literal["silu"] = "silu"
    attention_head_dim: int | None = 8
    norm_num_groups: int = 32
    attn_norm_num_groups: None = None
    resnet_time_scale_shift: Literal["default"] = "default"
    add_attention: Literal[True] = True
    class_embed_type: None = None


class Sd3Config(_Config):
    """Of an `SD3Transformer2DModel`; only those that normalise queries and keys, as Stable Diffusion 3.5 does."""

    sample_size: SampleSide = 128
    patch_size: Annotated[int, Field(gt=0, le=64)] = 2
    in_channels: Annotated[int, Field(gt=0, le=4096)] = 16
    num_layers: Annotated[int, Field(gt=0, le=128)] = 18
    attention_head_dim: int = 64
    num_attention_heads: int = 18
    out_channels: Annotated[int, Field(gt=0, le=4096)] = 16
    dual_attention_layers: Annotated[tuple[int, ...], Field(max_length=0)] = ()
    qk_norm: Literal["rms_norm"]


CONFIGS: Mapping[DiffusersClass, type[_Config]] = {
    "DiTTransformer2DModel": DitConfig,
    "UNet2DModel": UnetConfig,
    "SD3Transformer2DModel": Sd3Config,
}


@dataclass
class _Source:
    """Tensors of a file, of which each is taken once: one that is left has a meaning that would be lost."""

    tensors: dict[str, Tensor]

    def take(self, name: str, num: int = 1) -> Tensor:
        """Return a tensor and remove it; `num` parts of equal length must be in its first side.

        Raises:
            TensorFileError: there is none of this name, or it cannot be divided.
        """
        if name not in self.tensors:
            raise TensorFileError(
                f"base, tensor {name}",
                expected="a tensor of this name",
                got=f"{len(self.tensors)} others",
            )
        tensor = self.tensors.pop(name)
        if tensor.dim() == 0 or len(tensor) % num:
            raise TensorFileError(
                f"base, tensor {name}",
                expected=f"{num} parts of equal length",
                got=f"shape {list(tensor.shape)}",
            )
        return tensor

    def drop(self, name: str) -> None:
        """Remove a tensor without a counterpart here, if it is there."""
        self.tensors.pop(name, None)

    def check_empty(self) -> None:
        """Refuse tensors that nobody took.

        Raises:
            TensorFileError: names the first.
        """
        for name in self.tensors:
            raise TensorFileError(
                f"base, tensor {ascii(name[:_MAX_SHOWN])}",
                expected="a tensor that the network here has as well",
                got="one without a counterpart",
            )


def weights_of(
    layout: DiffusersClass,
    config: _Config,
    tensors: Mapping[str, Tensor],
    architecture: Architecture,
) -> BaseWeights:
    """Return the weights of a network of diffusers as those of this architecture.

    Args:
        layout: the class of diffusers.
        config: its parsed configuration, of the class in `CONFIGS`.
        tensors: the tensors of its file, float32.
        architecture: the architecture of the plan's experts.

    Raises:
        SetupError: the architecture is of another kind, or differs in what no tensor's shape shows.
        TensorFileError: a tensor is missing, left over, or cannot be divided as it must; it is named.
    """
    source = _Source(dict(tensors))
    try:
        match architecture, config:
            case Dit(), DitConfig():
                weights = _dit_weights(source, config, architecture)
            case Unet(), UnetConfig():
                weights = _unet_weights(source, config, architecture)
            case Mmdit(), Sd3Config():
                weights = _mmdit_weights(source, config, architecture)
            case _:
                raise SetupError(
                    "recipe, expert.architecture.kind",
                    expected=f"the kind that a {layout} becomes: dit of DiTTransformer2DModel, unet of UNet2DModel, "
                    "mmdit of SD3Transformer2DModel",
                    got=architecture.kind,
                )
    # torch's own errors where a tensor has other sides than the configuration says.
    except (RuntimeError, IndexError) as error:
        raise TensorFileError(
            "base",
            expected="tensors of the shapes that config.json implies",
            got=" ".join(str(error).split())[:200],
        ) from error
    source.check_empty()
    return weights


def _require(field: str, expected: Any, got: Any) -> None:
    """Refuse a size that no tensor's shape shows, and which would change what the weights compute.

    Raises:
        SetupError: the two differ.
    """
    if expected != got:
        raise SetupError(
            f"recipe, expert.architecture.{field}",
            expected=f"{expected}, as config.json of the base says",
            got=f"{got}",
        )


def _dit_weights(source: _Source, config: DitConfig, architecture: Dit) -> BaseWeights:
    hidden = config.num_attention_heads * config.attention_head_dim
    _require("heads", config.num_attention_heads, architecture.heads)
    _require("patch", config.patch_size, architecture.patch)
    _require("hidden", hidden, architecture.hidden)
    _require("depth", config.num_layers, architecture.depth)
    _require("qk_norm", False, architecture.qk_norm)
    channels = config.in_channels
    num_answers = config.out_channels or channels
    source.drop("pos_embed.pos_embed")

    first = "transformer_blocks.0.norm1.emb"
    embeddings = {
        name.removeprefix(first): tensor
        for name, tensor in source.tensors.items()
        if name.startswith(f"{first}.")
    }
    tensors = {
        "embed.weight": source.take("pos_embed.proj.weight").flatten(1),
        "embed.bias": source.take("pos_embed.proj.bias"),
        "head.weight": _dit_answers(source.take("proj_out_2.weight", num_answers), config),
        "head.bias": _dit_answers(source.take("proj_out_2.bias", num_answers), config),
        "time.mlp.0.weight": source.take(f"{first}.timestep_embedder.linear_1.weight"),
        "time.mlp.0.bias": source.take(f"{first}.timestep_embedder.linear_1.bias"),
        "time.mlp.2.weight": source.take(f"{first}.timestep_embedder.linear_2.weight"),
        "time.mlp.2.bias": source.take(f"{first}.timestep_embedder.linear_2.bias"),
        # The null class is the last row there and the first here.
        "classes.table.weight": source.take(f"{first}.class_embedder.embedding_table.weight").roll(
            1, 0
        ),
    }
    modulations: dict[str, list[Tensor]] = {"weight": [], "bias": []}
    for number in range(config.num_layers):
        theirs = f"transformer_blocks.{number}"
        ours = f"blocks.{number}"
        if number:
            _drop_copies(source, f"{theirs}.norm1.emb", embeddings)
        for kind, parts in modulations.items():
            parts.append(source.take(f"{theirs}.norm1.linear.{kind}"))
            tensors[f"{ours}.qkv.{kind}"] = torch.cat(
                [source.take(f"{theirs}.attn1.to_{name}.{kind}") for name in "qkv"]
            )
            tensors[f"{ours}.project.{kind}"] = source.take(f"{theirs}.attn1.to_out.0.{kind}")
            tensors[f"{ours}.up.{kind}"] = source.take(f"{theirs}.ff.net.0.proj.{kind}")
            tensors[f"{ours}.down.{kind}"] = source.take(f"{theirs}.ff.net.2.{kind}")
    for kind, parts in modulations.items():
        parts.append(source.take(f"proj_out_1.{kind}"))
        tensors[f"modulation.{kind}"] = torch.cat(parts)
    shape = (channels, config.sample_size, config.sample_size)
    return BaseWeights(_rows_before_columns(tensors, hidden), shape)


def _drop_copies(source: _Source, prefix: str, first: Mapping[str, Tensor]) -> None:
    """Remove a block's own embedding of time and class, which must be that of the first block.

    Raises:
        TensorFileError: it is another one; here all blocks share one.
    """
    for name, tensor in first.items():
        copy = source.take(f"{prefix}{name}")
        if not torch.equal(copy, tensor):
            raise TensorFileError(
                f"base, tensor {prefix}{name}",
                expected="the values of the same tensor in the first block",
                got="other values",
            )


def _dit_answers(output: Tensor, config: DitConfig) -> Tensor:
    """Bring the last layer's rows from (P, P, channels) to (channels, P, P), without those of a learned variance."""
    return _channels_first(output, config.patch_size)[: config.in_channels].flatten(0, 2)


def _channels_first(output: Tensor, patch: int) -> Tensor:
    """Bring the rows of a last layer from (P, P, channels), side by side, to (channels, P, P, ...)."""
    by_place = output.reshape(patch, patch, -1, *output.shape[1:])
    return by_place.movedim(2, 0)


def _rows_before_columns(tensors: Mapping[str, Tensor], hidden: int) -> dict[str, Tensor]:
    """Exchange the halves of a transformer's width, of which positions encode rows in one and columns in the other.

    There columns come first, here rows. Every layer reads and writes the same width, and its normalisations have no
    weights, so that a permutation of the width changes no answer.
    """
    # Positions have sines and cosines of both, each a quarter of the width; what is left over stays in its place.
    half = hidden // 4 * 2
    order = torch.arange(hidden)
    order[:half], order[half : 2 * half] = torch.arange(half, 2 * half), torch.arange(half)

    def rows(tensor: Tensor) -> Tensor:
        # Several vectors of the width may be one below the other, as in modulations.
        return tensor.reshape(-1, hidden, *tensor.shape[1:])[:, order].flatten(0, 1)

    def columns(tensor: Tensor) -> Tensor:
        return tensor[:, order]

    rules: Sequence[tuple[str, Callable[[Tensor], Tensor]]] = (
        (r"(embed|modulation|.*\.(project|down))\.(weight|bias)", rows),
        (r"(head|.*\.(qkv|up))\.weight", columns),
    )
    permuted = dict(tensors)
    for name, tensor in tensors.items():
        for pattern, permute in rules:
            if re.fullmatch(pattern, name):
                permuted[name] = permute(tensor)
    return permuted


_UNET_NAMES = (
    (r"^conv_in\.", "conv_in.conv."),
    (r"^time_embedding\.linear_1\.", "time_embed.0."),
    (r"^time_embedding\.linear_2\.", "time_embed.2."),
    (r"^mid_block\.attentions\.0\.", "middle_block.attention."),
    (r"^mid_block\.resnets\.0\.", "middle_block.resnet_1."),
    (r"^mid_block\.resnets\.1\.", "middle_block.resnet_2."),
    (r"\.downsamplers\.0\.conv\.", ".downsampler.op.conv."),
    (r"\.upsamplers\.0\.conv\.", ".upsampler.postconv.conv."),
    (r"\.(conv[12])\.", r".\1.conv."),
    (r"\.conv_shortcut\.", ".skip_connection.conv."),
    (r"(attentions?(?:\.\d+)?)\.group_norm\.", r"\1.norm."),
    (r"(attentions?(?:\.\d+)?)\.(to_[qkv])\.", r"\1.attn.\2."),
    (r"(attentions?(?:\.\d+)?)\.to_out\.0\.", r"\1.attn.out_proj."),
    (r"^conv_norm_out\.", "out.0."),
    (r"^conv_out\.", "out.2.conv."),
)


def _unet_weights(source: _Source, config: UnetConfig, architecture: Unet) -> BaseWeights:
    _require("channels", config.block_out_channels, architecture.channels)
    _require("num_res_blocks", config.layers_per_block, architecture.num_res_blocks)
    _require("norm_groups", config.norm_num_groups, architecture.norm_groups)
    attends = tuple(name == "AttnDownBlock2D" for name in config.down_block_types)
    _require("attention", attends, architecture.attention)
    if config.attention_head_dim is not None:
        _require("head_channels", config.attention_head_dim, architecture.head_channels)
    usual_down = tuple("AttnDownBlock2D" if attending else "DownBlock2D" for attending in attends)
    usual_up = tuple("AttnUpBlock2D" if attending else "UpBlock2D" for attending in attends[::-1])
    if (config.down_block_types, config.up_block_types) != (usual_down, usual_up):
        raise SetupError(
            "base, config.json",
            expected="DownBlock2D and AttnDownBlock2D, and on the way up the same levels in reverse order",
            got="other blocks",
        )
    if config.out_channels != config.in_channels:
        raise SetupError(
            "base, config.json",
            expected="as many channels out as in",
            got=f"{config.in_channels} in and {config.out_channels} out",
        )

    tensors = {}
    for name in list(source.tensors):
        if name == "class_embedding.weight":
            continue
        tensors[_own_unet_name(name)] = source.take(name)
    if "class_embedding.weight" in source.tensors:
        table_KD = source.take("class_embedding.weight")
        # Its table has no row for no class, which begins as the mean of all.
        tensors["net.class_embedding.weight"] = torch.cat(
            [table_KD.mean(0, keepdim=True), table_KD]
        )
    if not config.flip_sin_to_cos:
        name = "net.time_embed.0.weight"
        if name in tensors:
            # Sines come first there and cosines here.
            tensors[name] = tensors[name].roll(tensors[name].shape[1] // 2, 1)
    return BaseWeights(tensors, _unet_shape(config))


def _own_unet_name(name: str) -> str:
    """Return the name in a `unet` of a tensor of a `UNet2DModel`."""
    for pattern, replacement in _UNET_NAMES:
        name = re.sub(pattern, replacement, name)
    return f"net.{name}"


def unet_settings(architecture: Unet, shape: Shape, condition: Condition) -> dict[str, Any]:
    """Return the arguments of the `UNet2DModel` that computes what a `unet` does.

    Its class 0 is no class, and its class `c + 1` is class c here.

    Raises:
        SetupError: a volume, or a text; it is named.
    """
    if len(shape) != 3:
        _refuse_unet("images (C, H, W)", f"samples of {len(shape)} dimensions")
    if isinstance(condition, TextCondition):
        _refuse_unet("no condition or a class", "the condition text")
    num_classes = None
    if isinstance(condition, ClassCondition):
        num_classes = 1 + condition.num_classes
    down_blocks = []
    up_blocks = []
    for attends in architecture.attention:
        if attends:
            down_blocks.append("AttnDownBlock2D")
            up_blocks.append("AttnUpBlock2D")
        else:
            down_blocks.append("DownBlock2D")
            up_blocks.append("UpBlock2D")
    return {
        "sample_size": list(shape[1:]),
        "in_channels": shape[0],
        "out_channels": shape[0],
        "layers_per_block": architecture.num_res_blocks,
        "block_out_channels": list(architecture.channels),
        "down_block_types": down_blocks,
        # From the innermost level on.
        "up_block_types": up_blocks[::-1],
        "norm_num_groups": architecture.norm_groups,
        "attention_head_dim": architecture.head_channels,
        # That of MONAI; diffusers has another one by default.
        "norm_eps": 1e-6,
        "num_class_embeds": num_classes,
    }


def _refuse_unet(expected: str, got: str) -> NoReturn:
    raise SetupError("UNet2DModel of diffusers", expected=expected, got=got)


def unet_tensors(names: Iterable[str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a `unet` by the names of diffusers: the inverse of `weights_of`.

    Args:
        names: the names of the tensors of a `UNet2DModel` with `unet_settings`.
        tensors: the tensors of the `unet`.

    Raises:
        TensorFileError: a tensor is missing, or left over; it is named.
    """
    source = _Source(dict(tensors))
    renamed = {name: source.take(_own_unet_name(name)) for name in names}
    source.check_empty()
    return renamed


def _unet_shape(config: UnetConfig) -> Shape | None:
    match config.sample_size:
        case None:
            return None
        case int(side):
            return (config.in_channels, side, side)
        case (height, width):
            return (config.in_channels, height, width)


def _mmdit_weights(source: _Source, config: Sd3Config, architecture: Mmdit) -> BaseWeights:
    hidden = config.num_attention_heads * config.attention_head_dim
    _require("heads", config.num_attention_heads, architecture.heads)
    _require("patch", config.patch_size, architecture.patch)
    _require("hidden", hidden, architecture.hidden)
    _require("depth", config.num_layers, architecture.depth)
    _require("shared_depth", 0, architecture.shared_depth)
    # Positions are computed. What brings a text to the width has another form there: a plan's texts are read by an
    # encoder of its own, so that those layers begin again.
    for name in list(source.tensors):
        if name.startswith(
            ("pos_embed.pos_embed", "context_embedder.", "time_text_embed.text_embedder.")
        ):
            source.drop(name)

    tensors = {"embed.weight": source.take("pos_embed.proj.weight").flatten(1)}
    tensors["embed.bias"] = source.take("pos_embed.proj.bias")
    modulations: dict[str, list[Tensor]] = {"weight": [], "bias": []}
    last = config.num_layers - 1
    for kind, parts in modulations.items():
        for layer in (0, 2):
            theirs = f"time_text_embed.timestep_embedder.linear_{1 + layer // 2}"
            tensors[f"time.mlp.{layer}.{kind}"] = source.take(f"{theirs}.{kind}")
        for number in range(config.num_layers):
            theirs = f"transformer_blocks.{number}"
            parts.append(source.take(f"{theirs}.norm1.linear.{kind}"))
            context = source.take(f"{theirs}.norm1_context.linear.{kind}", 2)
            if number == last:
                # Scale and shift there, shift and scale here, as everywhere else.
                context = torch.cat(context.chunk(2)[::-1])
            parts.append(context)
            _take_stream(source, tensors, number, kind, is_updated=True, of_text=False)
            _take_stream(source, tensors, number, kind, is_updated=number < last, of_text=True)
        output = source.take(f"norm_out.linear.{kind}", 2)
        parts.append(torch.cat(output.chunk(2)[::-1]))
        tensors[f"modulation.{kind}"] = torch.cat(parts)
        head = source.take(f"proj_out.{kind}", config.patch_size**2)
        tensors[f"head.{kind}"] = _channels_first(head, config.patch_size).flatten(0, 2)
    shape = (config.in_channels, config.sample_size, config.sample_size)
    notes = (
        "its positions replaced by computed ones",
        "its layers that bring a text to the width left out",
    )
    return BaseWeights(_rows_before_columns(tensors, hidden), shape, notes)


def _take_stream(
    source: _Source,
    tensors: dict[str, Tensor],
    number: int,
    kind: str,
    *,
    is_updated: bool,
    of_text: bool,
) -> None:
    """Take the layers of one kind of token in a block; keys, values and queries in this order."""
    theirs = f"transformer_blocks.{number}"
    ours = f"joint.{number}.image"
    projections = ["to_k", "to_v", "to_q"]
    norms = ["norm_k", "norm_q"]
    output, network = "to_out.0", "ff"
    if of_text:
        ours = f"joint.{number}.text"
        projections = ["add_k_proj", "add_v_proj", "add_q_proj"]
        norms = ["norm_added_k", "norm_added_q"]
        output, network = "to_add_out", "ff_context"
    if not is_updated:
        # After the last block nothing reads the text's tokens, so that they ask for nothing.
        source.drop(f"{theirs}.attn.{projections.pop()}.{kind}")
        source.drop(f"{theirs}.attn.{norms.pop()}.weight")
    parts = [source.take(f"{theirs}.attn.{name}.{kind}") for name in projections]
    tensors[f"{ours}.qkv.{kind}"] = torch.cat(parts)
    if is_updated:
        tensors[f"{ours}.project.{kind}"] = source.take(f"{theirs}.attn.{output}.{kind}")
        tensors[f"{ours}.up.{kind}"] = source.take(f"{theirs}.{network}.net.0.proj.{kind}")
        tensors[f"{ours}.down.{kind}"] = source.take(f"{theirs}.{network}.net.2.{kind}")
    if kind == "weight":
        for index, name in enumerate(norms):
            # Stored as the difference from 1 here.
            scale = source.take(f"{theirs}.attn.{name}.weight") - 1
            tensors[f"{ours}.norms.{index}.scale"] = scale
