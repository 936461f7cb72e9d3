"""Renames and reorders the weights of diffusers' networks into those of the same network here, and a `unet` back.

Imports no diffusers.

`DiTTransformer2DModel` becomes a `dit`, `UNet2DModel` a `unet`, `SD3Transformer2DModel` an `mmdit`. What cannot be
expressed here is refused by its field in `config.json` or by its tensor. Time is `1000 t` here, a step's number there.
"""

# Shape legend: D hidden width, O outputs, I inputs, C channels, P side of a patch.
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ddm.errors import SetupError, TensorFileError
from ddm.models.base_weights import BaseWeights
from ddm.models.diffusers_configs import (
    DiffusersClass,
    DitConfig,
    NetworkConfig,
    Sd3Config,
    UnetConfig,
    config_error,
)
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

_MAX_SHOWN = 80


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
    config: NetworkConfig,
    tensors: Mapping[str, Tensor],
    architecture: Architecture,
) -> BaseWeights:
    """Return the weights of a network of diffusers as those of this architecture.

    Args:
        layout: the class of diffusers.
        config: its parsed configuration, see `ddm.models.diffusers_configs`.
        tensors: the tensors of its file, float32.
        architecture: the architecture of the plan's experts.

    Raises:
        SetupError: the architecture is of another kind, or differs in what no tensor's shape shows; or the network of
            diffusers computes something that the one here cannot. The field is named.
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
    if num_answers not in (channels, 2 * channels):
        raise config_error(
            "out_channels",
            f"{channels}, as many as in_channels, or {2 * channels} with a learned variance",
            num_answers,
        )
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
        "head.weight": _dit_answers(source.take("proj_out_2.weight"), config, num_answers),
        "head.bias": _dit_answers(source.take("proj_out_2.bias"), config, num_answers),
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
    table_rows = len(tensors["classes.table.weight"])
    if table_rows != config.num_embeds_ada_norm + 1:
        raise config_error(
            "num_embeds_ada_norm", f"{table_rows - 1}, as its table", config.num_embeds_ada_norm
        )
    shape = (channels, config.sample_size, config.sample_size)
    # Those of diffusers are a little lower; the published weights were trained with these.
    notes = ("its frequencies of the time are those of the original DiT",)
    return BaseWeights(_rows_before_columns(tensors, hidden), shape, notes)


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


def _dit_answers(output: Tensor, config: DitConfig, num_answers: int) -> Tensor:
    """Bring the last layer's rows from (P, P, channels) to (channels, P, P), without those of a learned variance."""
    by_channel = _channels_first(output, config.patch_size, num_answers)
    return by_channel[: config.in_channels].flatten(0, 2)


def _channels_first(output: Tensor, patch: int, channels: int) -> Tensor:
    """Bring the rows of a last layer from (P, P, channels), side by side, to (channels, P, P, ...)."""
    by_place = output.reshape(patch, patch, channels, *output.shape[1:])
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
    _check_unet_blocks(config, architecture)
    _require("head_channels", _unet_head_channels(config), architecture.head_channels)
    if config.out_channels != config.in_channels:
        raise config_error(
            "out_channels", f"{config.in_channels}, as many as in_channels", config.out_channels
        )
    time_dim = 4 * config.block_out_channels[0]
    if config.time_embedding_dim not in (None, time_dim):
        raise config_error(
            "time_embedding_dim",
            f"{time_dim}, four times the first of block_out_channels, or null",
            config.time_embedding_dim,
        )

    tensors = {}
    notes = []
    for name in list(source.tensors):
        if name == "class_embedding.weight":
            continue
        tensors[_own_unet_name(name)] = source.take(name)
    if config.num_class_embeds is not None:
        table_KD = source.take("class_embedding.weight")
        if len(table_KD) != config.num_class_embeds:
            raise config_error(
                "num_class_embeds", f"{len(table_KD)}, as its table", config.num_class_embeds
            )
        # Its table has no row for no class, which begins as the mean of all.
        tensors["net.class_embedding.weight"] = torch.cat(
            [table_KD.mean(0, keepdim=True), table_KD]
        )
        notes.append(
            f"no class added, as the mean of its {len(table_KD)} classes: it never learned to answer without one"
        )
    if not config.flip_sin_to_cos:
        name = "net.time_embed.0.weight"
        if name in tensors:
            # Sines come first there and cosines here; of an odd width the last column is neither.
            half = tensors[name].shape[1] // 2
            sines, cosines, rest = tensors[name].tensor_split((half, 2 * half), dim=1)
            tensors[name] = torch.cat([cosines, sines, rest], dim=1)
    return BaseWeights(tensors, _unet_shape(config), tuple(notes))


def _check_unet_blocks(config: UnetConfig, architecture: Unet) -> None:
    """Refuse levels other than those of the architecture, or blocks that it does not have."""
    attends = tuple(name == "AttnDownBlock2D" for name in config.down_block_types)
    _require("attention", attends, architecture.attention)
    down_blocks, up_blocks = _unet_blocks(attends)
    if config.down_block_types != down_blocks:
        raise config_error(
            "down_block_types",
            "DownBlock2D and AttnDownBlock2D",
            ", ".join(config.down_block_types),
        )
    if config.up_block_types != up_blocks:
        raise config_error(
            "up_block_types",
            f"{', '.join(up_blocks)}: the levels of down_block_types in reverse order",
            ", ".join(config.up_block_types),
        )


def _unet_blocks(attention: Sequence[bool]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the blocks on the way down and, from the innermost level on, on the way up."""
    down_blocks = []
    up_blocks = []
    for attends in attention:
        if attends:
            down_blocks.append("AttnDownBlock2D")
            up_blocks.append("AttnUpBlock2D")
        else:
            down_blocks.append("DownBlock2D")
            up_blocks.append("UpBlock2D")
    return tuple(down_blocks), tuple(up_blocks[::-1])


def _unet_head_channels(config: UnetConfig) -> int:
    """Return the channels of one attention head, which all levels here have in common.

    Raises:
        SetupError: every level has one head, and levels with attention differ in width.
    """
    if config.attention_head_dim is not None:
        return config.attention_head_dim
    # Without a number, diffusers gives every level one head of all its channels; the innermost block attends too.
    widths = {config.block_out_channels[-1]}
    for width, name in zip(config.block_out_channels, config.down_block_types, strict=True):
        if name == "AttnDownBlock2D":
            widths.add(width)
    if len(widths) > 1:
        raise config_error(
            "attention_head_dim",
            "a number, since null means one head in every level, and levels with attention have "
            f"{', '.join(map(str, sorted(widths)))} channels: heads here have equal widths",
            "null",
        )
    return widths.pop()


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
    down_blocks, up_blocks = _unet_blocks(architecture.attention)
    return {
        "sample_size": list(shape[1:]),
        "in_channels": shape[0],
        "out_channels": shape[0],
        "layers_per_block": architecture.num_res_blocks,
        "block_out_channels": list(architecture.channels),
        "down_block_types": list(down_blocks),
        "up_block_types": list(up_blocks),
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
    if config.out_channels not in (None, config.in_channels):
        raise config_error(
            "out_channels", f"{config.in_channels}, as many as in_channels", config.out_channels
        )
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
        head = source.take(f"proj_out.{kind}")
        by_channel = _channels_first(head, config.patch_size, config.in_channels)
        tensors[f"head.{kind}"] = by_channel.flatten(0, 2)
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
