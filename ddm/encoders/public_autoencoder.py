"""Published autoencoders, as Stable Diffusion, SDXL and FLUX use them, from a local folder in the layout of diffusers.

Only this file builds an autoencoder of diffusers. The library gets numbers, never a folder or a name to look up, and
its tensors are those that these numbers imply: nothing is downloaded, and no pickle is opened. The weights' file stays
as it was published, so its digest in a plan is the one that its publisher lists.
"""

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidationError
from torch import Tensor, nn

from ddm.errors import DocumentError, SetupError, ShapeError
from ddm.io.files import read_bounded, require_file
from ddm.io.tensors import TensorSpec, load_tensors, read_header
from ddm.protocol.base import Model, check_json
from ddm.protocol.latent import DiffusersKlLatent, DiffusersKlSize

CONFIG = "config.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"
_MAX_CONFIG_BYTES = 1 << 16
_DTYPES: Mapping[str, Literal["float32", "float16", "bfloat16"]] = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Attention as files of before 2023 name it, and now.
_OLD_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}

Blocks = Annotated[tuple[str, ...], Field(max_length=8)]
Finite = Annotated[float, Field(ge=-1e6, le=1e6)]


class DiffusersConfig(Model):
    """What `config.json` says; defaults are those of diffusers, since older files leave newer fields out.

    Attributes:
        act_fn: the only activation of published ones.
        down_block_types: of each level.
        up_block_types: of each level.
        latents_mean: only of autoencoders that are not scaled by factors.
        latents_std: see `latents_mean`.
        sample_size: what it was trained on; not used.
        force_upcast: whether to compute in float32, as is always done here.
    """

    in_channels: Annotated[int, Field(gt=0, le=4096)] = 3
    out_channels: Annotated[int, Field(gt=0, le=4096)] = 3
    down_block_types: Blocks
    up_block_types: Blocks
    block_out_channels: Annotated[tuple[int, ...], Field(max_length=8)]
    layers_per_block: int = 1
    act_fn: Literal["silu"] = "silu"
    latent_channels: int = 4
    norm_num_groups: int = 32
    sample_size: int | tuple[int, int] = 32
    scaling_factor: Finite = 0.18215
    shift_factor: Finite | None = None
    latents_mean: None = None
    latents_std: None = None
    force_upcast: bool = True
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True


class PublicAutoencoder(nn.Module):
    """An AutoencoderKL of diffusers whose latents are shifted and scaled: ``z = (mean - shift) * factor``.

    Args:
        net: diffusers' network.
        spec: its sizes, factors and tile.
    """

    def __init__(self, net: nn.Module, spec: DiffusersKlLatent) -> None:
        super().__init__()
        tiled: Any = net
        self.net = net
        self.shift = spec.shift_factor
        self.factor = spec.scaling_factor
        if spec.tile:
            # diffusers counts a tile's side twice: in pixels, and in latents.
            tiled.enable_tiling()
            tiled.tile_sample_min_size = spec.tile
            tiled.tile_latent_min_size = spec.tile // spec.downsampling

    def encode(self, x_B: Tensor) -> tuple[Tensor]:
        """Return the scaled mean of the posterior of images, shape (B, latent channels, H / f, W / f)."""
        (posterior,) = self.net.encode(x_B, return_dict=False)  # type: ignore[operator]
        # The mean and not a draw, so that an image has one latent.
        mean_B: Tensor = posterior.mode()
        return ((mean_B - self.shift) * self.factor,)

    def decode(self, z_B: Tensor) -> Tensor:
        """Return the images of scaled latents, shape (B, C, H, W)."""
        unscaled_B = z_B / self.factor + self.shift
        images: Tensor = self.net.decode(unscaled_B, return_dict=False)[0]  # type: ignore[operator]
        return images


def describe(
    folder: Path,
    shape: tuple[int, ...],
    tile: int,
) -> tuple[DiffusersKlLatent, Path]:
    """Describe the autoencoder in a folder for a plan, from its configuration and the header of its weights.

    Args:
        folder: holds `config.json` and `diffusion_pytorch_model.safetensors`; other files are not read.
        shape: one image, (C, H, W).
        tile: see `DiffusersKlLatent`.

    Returns:
        The plan's `latent`, and where the weights are.

    Raises:
        MissingFileError: one of the two is not there.
        SetupError: a configuration of another kind of autoencoder, or of other images.
        TensorFileError: weights that are not safetensors file.
    """
    # The cache of Hugging Face holds links, which the readers of files refuse.
    path = require_file(folder / CONFIG, "the configuration of the autoencoder").resolve()
    weights = require_file(folder / WEIGHTS, "the weights of the autoencoder").resolve()
    config = _config(path)
    if (config.in_channels, config.out_channels) != (shape[0], shape[0]):
        raise SetupError(
            f"autoencoder, {CONFIG}",
            expected=f"images of {config.in_channels} channels in the recipe's data.shape",
            got=f"{shape[0]} channels",
        )
    header = read_header(weights, max_bytes=weights.stat().st_size)
    dtypes = {spec.dtype for spec in header.values()}
    if len(dtypes) != 1 or not dtypes <= _DTYPES.keys():
        raise SetupError(
            f"autoencoder, {WEIGHTS}",
            expected=f"tensors of one of the types {', '.join(_DTYPES)}",
            got=", ".join(sorted(dtypes)),
        )
    try:
        spec = DiffusersKlLatent(
            channels=config.block_out_channels,
            latent_channels=config.latent_channels,
            layers_per_block=config.layers_per_block,
            norm_groups=config.norm_num_groups,
            mid_attention=config.mid_block_add_attention,
            quant_conv=config.use_quant_conv,
            post_quant_conv=config.use_post_quant_conv,
            dtype=_DTYPES[dtypes.pop()],
            scaling_factor=config.scaling_factor,
            shift_factor=config.shift_factor or 0.0,
            tile=tile,
        )
    except ValidationError as error:
        raise _config_error(error) from error
    return spec, weights


def load_public_autoencoder(
    path: Path,
    spec: DiffusersKlLatent,
    shape: tuple[int, ...],
    **bounds: Any,
) -> PublicAutoencoder:
    """Build a plan's autoencoder and load its weights, in float32.

    Args:
        path: the weights, in the type that the plan names.
        spec: the plan's.
        shape: one image, (C, H, W).
        **bounds: of the file, see `ddm.io.tensors.load_tensors`.

    Raises:
        DigestError, TensorFileError: see `ddm.io.tensors.load_tensors`; other tensors than the sizes imply.
        ShapeError: the image does not fit the autoencoder.
        SetupError: diffusers is not installed.
    """
    with torch.device("meta"):
        net = build_public_autoencoder(spec, shape)
    dtype = _NAMES[spec.dtype]
    specs = {
        name: TensorSpec(dtype, tuple(tensor.shape)) for name, tensor in net.state_dict().items()
    }
    new_names = {name: name for name in specs}
    # Files of before 2023 name the tensors of attention otherwise, which their header shows.
    by_old_name = {_old_name(name): name for name in specs}
    header = read_header(path, max_bytes=bounds["max_bytes"])
    if any(name in by_old_name and name not in specs for name in header):
        new_names = by_old_name
    expected = {name: specs[new_name] for name, new_name in new_names.items()}
    tensors = load_tensors(path, expected, **bounds)
    weights = {new_names[name]: tensor.float() for name, tensor in tensors.items()}
    # Assigned, since the network's own tensors are on the meta device and have no memory to copy into.
    net.load_state_dict(weights, assign=True)
    return PublicAutoencoder(net, spec)


def build_public_autoencoder(size: DiffusersKlSize, shape: tuple[int, ...]) -> nn.Module:
    """Build diffusers' network, with its own initial weights.

    Args:
        size: its sizes.
        shape: one image, (C, H, W).

    Raises:
        ShapeError: the image does not fit the autoencoder.
        SetupError: diffusers is not installed.
    """
    misfit = size.misfit(shape)
    if misfit:
        raise ShapeError("autoencoder", expected=misfit, got=str(shape))
    # Before the import, which reads it: no server is asked for anything.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        with warnings.catch_warnings():
            # Third-party imports warn.
            warnings.simplefilter("ignore")
            from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    except ImportError as error:
        raise SetupError(
            "latent diffusers_kl",
            expected="an installed diffusers",
            got="no module diffusers",
            remedy="Install it: in Archipelago's repository, pip install '.[diffusers]'.",
        ) from error
    net: nn.Module = AutoencoderKL(
        in_channels=shape[0],
        out_channels=shape[0],
        down_block_types=("DownEncoderBlock2D",) * size.levels,
        up_block_types=("UpDecoderBlock2D",) * size.levels,
        block_out_channels=size.channels,
        layers_per_block=size.layers_per_block,
        latent_channels=size.latent_channels,
        norm_num_groups=size.norm_groups,
        use_quant_conv=size.quant_conv,
        use_post_quant_conv=size.post_quant_conv,
        mid_block_add_attention=size.mid_attention,
    )
    return net


def _old_name(name: str) -> str:
    for old, new in _OLD_NAMES.items():
        name = name.replace(f".mid_block.attentions.0.{new}.", f".mid_block.attentions.0.{old}.")
    return name


def _config(path: Path) -> DiffusersConfig:
    """Read a configuration, bounded; fields that begin with an underscore name versions and origins only.

    Raises:
        SetupError: not of an AutoencoderKL that this toolkit builds.
    """
    try:
        content = read_bounded(path, _MAX_CONFIG_BYTES)
        settings = check_json(content, subject=CONFIG, limit=_MAX_CONFIG_BYTES)
    except DocumentError as error:
        raise SetupError(
            f"autoencoder, {CONFIG}", expected=error.expected, got=error.got
        ) from error
    if not isinstance(settings, dict) or settings.get("_class_name") != "AutoencoderKL":
        raise SetupError(
            f"autoencoder, {CONFIG}",
            expected='"_class_name": "AutoencoderKL"',
            got="another kind of network, or none",
        )
    fields = {name: value for name, value in settings.items() if not name.startswith("_")}
    try:
        config = DiffusersConfig.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        raise _config_error(error) from error
    levels = len(config.block_out_channels)
    has_usual_blocks = (
        config.down_block_types == ("DownEncoderBlock2D",) * levels
        and config.up_block_types == ("UpDecoderBlock2D",) * levels
    )
    if not has_usual_blocks:
        raise SetupError(
            f"autoencoder, {CONFIG}",
            expected=f"{levels} DownEncoderBlock2D and as many UpDecoderBlock2D, one for each of "
            "block_out_channels",
            got="other blocks",
        )
    return config


def _config_error(error: ValidationError) -> SetupError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    message = first["msg"]
    if field:
        message = f"{field}: {message}"
    return SetupError(
        f"autoencoder, {CONFIG}",
        expected="the configuration of an AutoencoderKL within this toolkit's bounds",
        got=message,
    )
