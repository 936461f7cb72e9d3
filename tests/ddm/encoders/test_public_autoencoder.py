"""Published autoencoders from a folder: equal to diffusers' own, and refused where anything is not as it says."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ddm.encoders.autoencoder import AutoencoderKl, open_latent
from ddm.encoders.public_autoencoder import CONFIG, WEIGHTS, build_public_autoencoder, describe
from ddm.errors import DigestError, MissingFileError, SetupError, ShapeError, TensorFileError
from ddm.footprint import autoencoder_size
from ddm.models import num_parameters
from ddm.protocol.base import File
from ddm.protocol.latent import DiffusersKlLatent
from tests.support.autoencoders import FLUX, SD, SDXL, autoencoder_kl, write_autoencoder
from tests.support.case import case
from tests.support.errors import has_subject

SHAPE = (3, 24, 16)


def images(num: int = 3, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.rand(num, *shape, generator=torch.Generator().manual_seed(0)) * 2 - 1


def opened(
    folder: Path, shape: tuple[int, ...] = SHAPE, tile: int = 0
) -> tuple[AutoencoderKl, DiffusersKlLatent]:
    """What a site opens: the published file, by its digest, as the plan describes it."""
    spec, weights = describe(folder, shape, tile)
    listed = File.of(WEIGHTS, weights)
    latent = open_latent(spec.model_copy(update={"path": WEIGHTS}), shape, listed, folder)
    assert isinstance(latent, AutoencoderKl)
    return latent, spec


def test_autoencoder_is_described_through_links_as_hugging_faces_cache_has_them(
    tmp_path: Path,
) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    write_autoencoder(blobs, SD)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert describe(snapshot, SHAPE, 0) == describe(blobs, SHAPE, 0)


@pytest.mark.parametrize("layout", [SD, SDXL, FLUX], ids=["sd", "sdxl", "flux"])
def test_latents_and_images_are_those_of_diffusers(tmp_path: Path, layout: dict[str, Any]) -> None:
    theirs = write_autoencoder(tmp_path, layout)
    latent, spec = opened(tmp_path)
    x_N = images()
    shift = layout.get("shift_factor", 0.0)
    factor = layout["scaling_factor"]
    assert (spec.scaling_factor, spec.shift_factor, spec.latent_channels) == (
        factor,
        shift,
        layout["latent_channels"],
    )
    with torch.no_grad():
        expected = (theirs.encode(x_N).latent_dist.mode() - shift) * factor
        back = theirs.decode(expected / factor + shift).sample
    latents = latent.encode(x_N)
    assert latents.shape == (3, *spec.shape(SHAPE))
    torch.testing.assert_close(latents, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(latent.decode(expected), back, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(latents, expected / factor, rtol=0.01), "the factor matters"
    assert torch.allclose(expected, (expected / factor + shift) * factor) == (shift == 0), (
        "and so does the shift"
    )


def test_half_precision_files_are_computed_in_float32_and_take_half_the_bytes(
    tmp_path: Path,
) -> None:
    for dtype, name in ((torch.float16, "float16"), (torch.bfloat16, "bfloat16")):
        with case(name):
            theirs = write_autoencoder(tmp_path / name, FLUX, dtype=dtype)
            latent, spec = opened(tmp_path / name)
            assert spec.dtype == name
            with torch.no_grad():
                expected = (theirs.encode(images()).latent_dist.mode() - 0.1159) * 0.3611
            torch.testing.assert_close(latent.encode(images()), expected, rtol=1e-4, atol=1e-5)


def test_tiles_are_those_of_diffusers_and_differ_from_the_whole(tmp_path: Path) -> None:
    theirs = write_autoencoder(tmp_path, SD)
    shape = (3, 40, 24)
    latent, spec = opened(tmp_path, shape, tile=16)
    theirs.enable_tiling()
    assert (theirs.tile_sample_min_size, theirs.tile_latent_min_size) == (16, 4)
    x_N = images(2, shape)
    with torch.no_grad():
        expected = theirs.encode(x_N).latent_dist.mode() * 0.18215
        back = theirs.decode(expected / 0.18215).sample
    torch.testing.assert_close(latent.encode(x_N), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(latent.decode(expected), back, rtol=1e-4, atol=1e-5)
    whole, _ = opened(tmp_path, shape)
    assert not torch.allclose(whole.encode(x_N), expected, rtol=0.01)
    assert spec.at_once(shape) == (3, 16, 16)


def test_tiles_bound_the_memory_of_large_images() -> None:
    sizes = {
        "channels": (128, 256, 512, 512),
        "layers_per_block": 2,
        "latent_channels": 4,
        "norm_groups": 32,
    }
    parts = {
        "mid_attention": True,
        "quant_conv": True,
        "post_quant_conv": True,
        "scaling_factor": 0.18215,
    }
    tiled = DiffusersKlLatent(**sizes, **parts, tile=512)
    whole = DiffusersKlLatent(**sizes, **parts)
    one = autoencoder_size(whole, (3, 512, 512)).activations.forward
    assert autoencoder_size(tiled, (3, 4096, 4096)).activations.forward == one
    assert autoencoder_size(whole, (3, 4096, 4096)).activations.forward == 64 * one
    assert autoencoder_size(whole, (3, 512, 512)).parameters == 83_653_863, (
        "as Stable Diffusion's is published"
    )


@pytest.mark.parametrize(
    "layout", [SD, FLUX, SD | {"mid_block_add_attention": False}], ids=["sd", "flux", "plain"]
)
@pytest.mark.parametrize("channels", [(4,), (4, 8), (4, 12, 8, 8)])
def test_parameters_are_counted_exactly(
    tmp_path: Path, layout: dict[str, Any], channels: tuple[int, ...]
) -> None:
    write_autoencoder(tmp_path, layout, channels=channels)
    spec, _ = describe(tmp_path, SHAPE, 0)
    with torch.device("meta"):
        built = build_public_autoencoder(spec, SHAPE)
    assert autoencoder_size(spec, SHAPE).parameters == num_parameters(built)


def test_attention_under_its_old_names_is_read_too(tmp_path: Path) -> None:
    write_autoencoder(tmp_path, SD)
    latent, _ = opened(tmp_path)
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    renamed = {}
    for name, value in load_file(tmp_path / WEIGHTS).items():
        for new, before in old.items():
            name = name.replace(f"attentions.0.{new}.", f"attentions.0.{before}.")
        renamed[name] = value.clone()
    save_file(renamed, tmp_path / WEIGHTS)
    again, _ = opened(tmp_path)
    assert torch.equal(again.encode(images()), latent.encode(images()))
    mixed = {
        name.replace(
            "encoder.mid_block.attentions.0.query.", "encoder.mid_block.attentions.0.to_q."
        ): value
        for name, value in renamed.items()
    }
    save_file(mixed, tmp_path / WEIGHTS)
    with pytest.raises(TensorFileError, match="query"):
        opened(tmp_path)


CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("another class", {"_class_name": "AutoencoderTiny"}, "_class_name"),
    ("an unknown field", {"conv_kernel": 5}, "conv_kernel"),
    ("another activation", {"act_fn": "gelu"}, "act_fn"),
    ("other blocks", {"down_block_types": ["AttnDownEncoderBlock2D"] * 3}, "other blocks"),
    ("latents scaled one by one", {"latents_mean": [0.0] * 4}, "latents_mean"),
    ("a width beyond the bounds", {"block_out_channels": [4, 8, 80_000]}, "channels"),
    ("widths that groups do not divide", {"norm_num_groups": 3}, "norm_groups"),
    ("no scale", {"scaling_factor": 0.0}, "scaling_factor"),
    ("other images", {"in_channels": 1, "out_channels": 1}, "1 channels"),
    ("a text in place of a number", {"layers_per_block": "2"}, "layers_per_block"),
]


def test_configuration_that_says_something_else_is_refused(tmp_path: Path) -> None:
    write_autoencoder(tmp_path, SD)
    good = json.loads((tmp_path / CONFIG).read_text())
    for name, change, words in CONFIGS:
        with case(name):
            (tmp_path / CONFIG).write_text(json.dumps(good | change))
            with pytest.raises(SetupError, match=words):
                describe(tmp_path, SHAPE, 0)
    for text in (
        "{",
        "[]",
        '{"_class_name": "AutoencoderKL", "_class_name": "AutoencoderKL"}',
        " " * 70_000,
    ):
        (tmp_path / CONFIG).write_text(text)
        with pytest.raises((SetupError, Exception), match=CONFIG) as refused:
            describe(tmp_path, SHAPE, 0)
        assert type(refused.value).__module__ == "ddm.errors"


def test_weights_that_are_not_what_the_plan_lists_are_refused(tmp_path: Path) -> None:
    write_autoencoder(tmp_path, SD)
    spec, weights = describe(tmp_path, SHAPE, 0)
    spec = spec.model_copy(update={"path": WEIGHTS})
    listed = File.of(WEIGHTS, weights)
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    with pytest.raises(DigestError):
        open_latent(spec, SHAPE, listed, tmp_path)
    with pytest.raises(TensorFileError, check=has_subject("tensor decoder.conv_in.weight")):
        open_latent(spec.model_copy(update={"latent_channels": 8}), SHAPE, None, tmp_path)
    with pytest.raises(TensorFileError, check=has_subject("tensor decoder.conv_in.bias")):
        open_latent(spec.model_copy(update={"dtype": "float16"}), SHAPE, None, tmp_path)
    with pytest.raises(ShapeError, check=has_subject("autoencoder")):
        open_latent(spec, (3, 18, 16), None, tmp_path)
    with pytest.raises(ShapeError, check=has_subject("autoencoder")):
        open_latent(spec, (3, 8, 8, 8), None, tmp_path)
    torch.save({"a": torch.zeros(1)}, weights)
    with pytest.raises(TensorFileError, match="pickle"):
        describe(tmp_path, SHAPE, 0)
    weights.unlink()
    with pytest.raises(MissingFileError):
        describe(tmp_path, SHAPE, 0)


def test_tiles_that_would_cut_a_latent_are_refused(tmp_path: Path) -> None:
    write_autoencoder(tmp_path, SD)
    with pytest.raises(SetupError, check=has_subject("autoencoder, config.json")):
        describe(tmp_path, SHAPE, 24)


def test_missing_diffusers_is_told_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_autoencoder(tmp_path, SD)
    spec, _ = describe(tmp_path, SHAPE, 0)
    monkeypatch.setitem(sys.modules, "diffusers.models.autoencoders.autoencoder_kl", None)
    with pytest.raises(SetupError, check=has_subject("latent diffusers_kl")) as refused:
        open_latent(spec.model_copy(update={"path": WEIGHTS}), SHAPE, None, tmp_path)
    assert ".[diffusers]" in str(refused.value.remedy)


def test_published_sizes_have_the_tensors_that_diffusers_gives_them(tmp_path: Path) -> None:
    full = autoencoder_kl()
    with torch.device("meta"):
        flux = full(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
            **FLUX,
        )
    write_autoencoder(tmp_path, FLUX, channels=(4, 8, 8, 8))
    small, _ = describe(tmp_path, SHAPE, 0)
    spec = small.model_copy(update={"channels": (128, 256, 512, 512), "norm_groups": 32})
    assert autoencoder_size(spec, (3, 512, 512)).parameters == num_parameters(flux) == 83_819_683
