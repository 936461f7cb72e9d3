"""Small autoencoders in the published layouts, with made weights, written by diffusers itself."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

SD: dict[str, Any] = {"latent_channels": 4, "scaling_factor": 0.18215}
SDXL: dict[str, Any] = {"latent_channels": 4, "scaling_factor": 0.13025, "force_upcast": True}
FLUX: dict[str, Any] = {
    "latent_channels": 16,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def autoencoder_kl() -> Any:
    """The class AutoencoderKL of diffusers; without diffusers the test is skipped."""
    pytest.importorskip("huggingface_hub")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from diffusers import AutoencoderKL
    except ImportError:
        pytest.skip("needs diffusers: pip install '.[diffusers]'")
    return AutoencoderKL


def write_autoencoder(
    folder: Path,
    layout: dict[str, Any],
    *,
    channels: tuple[int, ...] = (4, 8, 8),
    dtype: Any = None,
    images: int = 3,
) -> Any:
    """Write a small autoencoder into a folder as diffusers does, and return diffusers' own, opened from there.

    Args:
        folder: that config.json and the weights are written into.
        layout: what distinguishes a published layout: `SD`, `SDXL` or `FLUX`.
        channels: of each level; each level but the last halves the sides.
        dtype: of the stored weights; float32 by default.
        images: channels of the images.
    """
    cls = autoencoder_kl()
    levels = len(channels)
    # The published ones have two layers in each level; a small one with one layer is built more quickly.
    layers_per_block = 1 if levels < 3 else 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        made = cls(
            in_channels=images,
            out_channels=images,
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            block_out_channels=channels,
            layers_per_block=layers_per_block,
            norm_num_groups=4,
            sample_size=16,
            **layout,
        )
        # initial biases are 0, and norms 1, which would hide a mistaken name
        for weight in made.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    made.to(dtype or torch.float32).save_pretrained(folder)
    return cls.from_pretrained(folder, local_files_only=True, torch_dtype=torch.float32).eval()
