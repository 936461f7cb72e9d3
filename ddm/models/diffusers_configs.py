"""Reads the `config.json` of a network of diffusers, of which every field counts. Imports neither torch nor diffusers.

Each field of these classes of diffusers (those of 0.39 and before) is of one of four kinds:

- it is converted, or compared with the plan's architecture (`ddm.models.diffusers_weights`);
- it must have the one value that the network here has, and another is refused;
- it is of a part that is replaced, as the plan's list of changes states: the positions and the text of an `mmdit`;
- no output depends on it (`Ignored`).

A field that is unknown here is refused, since it could change what the weights compute.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ddm.errors import SetupError

DiffusersClass = Literal["DiTTransformer2DModel", "UNet2DModel", "SD3Transformer2DModel"]
LAYOUTS = get_args(DiffusersClass)
CONFIG_NAME = "config.json"
_MAX_SHOWN = 80

# Before it had a class of its own, a DiT was saved as this class; diffusers too opens it as a DiT then.
_OLD_DIT_CLASS = "Transformer2DModel"
_OLD_DIT_NORM = "ada_norm_zero"

# What diffusers, and its moving average of the weights (`EMAModel`), write beside the arguments of a network.
_BOOKKEEPING = frozenset(
    {
        "decay",
        "inv_gamma",
        "min_decay",
        "optimization_step",
        "power",
        "update_after_step",
        "use_ema_warmup",
        "_class_name",
        "_commit_hash",
        "_diffusers_version",
        "_name_or_path",
        "_use_default_values",
    }
)

SampleSide = Annotated[int, Field(gt=0, le=65536)]
Channels = Annotated[int, Field(gt=0, le=4096)]
NumLayers = Annotated[int, Field(gt=0, le=128)]
PatchSide = Annotated[int, Field(gt=0, le=64)]
Ignored = Any
# Networks here add 1e-6 to a variance, those of diffusers often 1e-5: the difference is in the fifth decimal.
NormEps = Annotated[float, Field(ge=1e-6, le=1e-5)]


class NetworkConfig(BaseModel):
    """The fields of a `config.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DitConfig(NetworkConfig):
    """Of a `DiTTransformer2DModel`; defaults are those of diffusers."""

    num_attention_heads: int = 16
    attention_head_dim: int = 72
    in_channels: Channels = 4
    out_channels: Annotated[int, Field(gt=0, le=8192)] | None = None
    num_layers: NumLayers = 28
    dropout: Ignored = 0.0
    norm_num_groups: Ignored = 32
    attention_bias: Literal[True] = True
    sample_size: SampleSide = 32
    patch_size: PatchSide = 2
    # The tanh of the second is an approximation of the first, which this toolkit computes.
    activation_fn: Literal["gelu", "gelu-approximate"] = "gelu-approximate"
    # The rows of the table of classes without that of no class.
    num_embeds_ada_norm: Annotated[int, Field(gt=0)] = 1000
    upcast_attention: Ignored = False
    norm_type: Literal["ada_norm_zero"] = "ada_norm_zero"
    norm_elementwise_affine: Literal[False] = False
    norm_eps: NormEps = 1e-5


class OldDitConfig(DitConfig):
    """Of a DiT that was saved as a `Transformer2DModel`; its other fields have no part in a DiT."""

    cross_attention_dim: None = None
    num_vector_embeds: None = None
    use_linear_projection: Literal[False] = False
    only_cross_attention: Literal[False] = False
    double_self_attention: Literal[False] = False
    attention_type: Literal["default"] = "default"
    caption_channels: None = None
    interpolation_scale: None = None
    use_additional_conditions: Literal[False] | None = None


class UnetConfig(NetworkConfig):
    """Of a `UNet2DModel`; defaults are those of diffusers."""

    sample_size: SampleSide | tuple[SampleSide, SampleSide] | None = None
    in_channels: Channels = 3
    out_channels: Channels = 3
    center_input_sample: Literal[False] = False
    time_embedding_type: Literal["positional"] = "positional"
    time_embedding_dim: int | None = None
    freq_shift: Literal[0] = 0
    flip_sin_to_cos: bool = True
    down_block_types: tuple[str, ...] = ("DownBlock2D", *["AttnDownBlock2D"] * 3)
    mid_block_type: Literal["UNetMidBlock2D"] = "UNetMidBlock2D"
    up_block_types: tuple[str, ...] = (*["AttnUpBlock2D"] * 3, "UpBlock2D")
    block_out_channels: Annotated[tuple[Channels, ...], Field(min_length=1)] = (224, 448, 672, 896)
    layers_per_block: int = 2
    mid_block_scale_factor: Literal[1] = 1
    downsample_padding: Literal[1] = 1
    downsample_type: Literal["conv"] = "conv"
    upsample_type: Literal["conv"] = "conv"
    dropout: Ignored = 0.0
    act_fn: Literal["silu", "swish"] = "silu"
    # Null means one head in each level.
    attention_head_dim: Annotated[int, Field(gt=0)] | None = 8
    norm_num_groups: int = 32
    attn_norm_num_groups: None = None
    norm_eps: NormEps = 1e-5
    resnet_time_scale_shift: Literal["default"] = "default"
    add_attention: Literal[True] = True
    class_embed_type: None = None
    # The rows of the table of classes.
    num_class_embeds: Annotated[int, Field(gt=0)] | None = None
    # Read only with learned embeddings of the time, which are refused.
    num_train_timesteps: Ignored = None


class Sd3Config(NetworkConfig):
    """Of an `SD3Transformer2DModel`; only those that normalise queries and keys, as Stable Diffusion 3.5 does."""

    sample_size: SampleSide = 128
    patch_size: PatchSide = 2
    in_channels: Channels = 16
    num_layers: NumLayers = 18
    attention_head_dim: int = 64
    num_attention_heads: int = 18
    # Of the layers that read a text, which begin again in a plan.
    joint_attention_dim: Ignored = 4096
    caption_projection_dim: Ignored = 1152
    pooled_projection_dim: Ignored = 2048
    out_channels: Channels | None = 16
    # Of its positions, in whose place a plan computes others.
    pos_embed_max_size: Ignored = 96
    dual_attention_layers: Annotated[tuple[int, ...], Field(max_length=0)] = ()
    qk_norm: Literal["rms_norm"]


CONFIGS: Mapping[DiffusersClass, type[NetworkConfig]] = {
    "DiTTransformer2DModel": DitConfig,
    "UNet2DModel": UnetConfig,
    "SD3Transformer2DModel": Sd3Config,
}


def parse_config(values: object) -> tuple[DiffusersClass, NetworkConfig]:
    """Return the class of a network and its configuration.

    Args:
        values: the content of its `config.json`.

    Raises:
        SetupError: no network that has a counterpart here; the field is named.
    """
    if not isinstance(values, Mapping):
        raise _class_error(None)
    name = values.get("_class_name")
    if name == _OLD_DIT_CLASS and values.get("norm_type") == _OLD_DIT_NORM:
        return "DiTTransformer2DModel", _parse("DiTTransformer2DModel", OldDitConfig, values)
    if name not in LAYOUTS:
        raise _class_error(name)
    layout = cast(DiffusersClass, name)
    return layout, _parse(layout, CONFIGS[layout], values)


def config_error(field: str, expected: object, got: object) -> SetupError:
    """Return the error of a field whose value the network here cannot have."""
    return SetupError(
        f"base, {CONFIG_NAME}, {field}", expected=str(expected)[:400], got=str(got)[:_MAX_SHOWN]
    )


def _class_error(name: object) -> SetupError:
    return config_error("_class_name", f"one of {', '.join(LAYOUTS)}", ascii(name))


def _parse(
    layout: DiffusersClass, document: type[NetworkConfig], values: Mapping[str, object]
) -> NetworkConfig:
    fields = {name: value for name, value in values.items() if name not in _BOOKKEEPING}
    try:
        # As JSON, whose arrays are tuples here.
        return document.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        raise config_error(
            ascii(field)[1:-1][:_MAX_SHOWN],
            f"only fields of a {layout} whose meaning is known here",
            "another one, which may change what the weights compute",
        )
    if fault["type"] == "missing":
        raise config_error(field, "a value that the network here has as well", "no such field")
    expected = fault["msg"].removeprefix("Input should be ")
    raise config_error(field, f"{expected}, as the network here has it", ascii(fault["input"]))
