"""Samples to latents and back: what is computed, in which blocks, and which weights are taken for an autoencoder's."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ddm.encoders.autoencoder import (
    AutoencoderKl,
    Identity,
    build_autoencoder,
    open_latent,
    open_weights,
    spread,
)
from ddm.errors import DigestError, NumericalError, SetupError, ShapeError, TensorFileError
from ddm.io.tensors import save_tensors
from ddm.protocol.base import File
from ddm.protocol.latent import AutoencoderKlLatent, AutoencoderSize, IdentityLatent
from tests.support.errors import has_subject

SIZE = AutoencoderSize(
    channels=(8, 16), attention=(False, False), latent_channels=3, num_res_blocks=1, norm_groups=4
)
SHAPES = [(2, 8, 12), (1, 4, 8, 6)]


class AveragingAutoencoder(nn.Module):
    """Three channels of 2 x 2 means, times 1, 2 and 3; decoded by repeating the first. Counts what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[int] = []

    def encode(self, x_B: Tensor) -> tuple[Tensor, Tensor]:
        self.given.append(len(x_B))
        mean_B = nn.functional.avg_pool2d(x_B[:, :1], 2)
        z_B = torch.cat([mean_B, 2 * mean_B, 3 * mean_B], 1)
        return z_B, torch.full_like(z_B, 100.0)

    def decode(self, z_B: Tensor) -> Tensor:
        self.given.append(len(z_B))
        return z_B[:, :1].repeat_interleave(2, 2).repeat_interleave(2, 3)


def samples(num: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(num, *shape, generator=torch.Generator().manual_seed(seed))


def latent_of(shape: tuple[int, ...], scale: float = 1.0) -> AutoencoderKl:
    """An autoencoder whose every weight was given a value."""
    net = build_autoencoder(SIZE, shape)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return AutoencoderKl(net, SIZE, shape, scale)


def test_identity_hands_on_what_it_is_given() -> None:
    x_N = samples(3, (1, 4, 4))
    assert Identity().encode(x_N) is x_N
    assert Identity().decode(x_N) is x_N


def test_latents_are_the_posterior_mean_over_the_scale_and_decoding_undoes_the_scale() -> None:
    latent = AutoencoderKl(AveragingAutoencoder(), SIZE, (1, 4, 4), scale=2.0)
    x_N = samples(5, (1, 4, 4))
    mean_N = x_N.unfold(2, 2, 2).unfold(3, 2, 2).mean((-1, -2))
    seen = latent.encode(x_N)
    assert torch.allclose(seen, torch.cat([mean_N, 2 * mean_N, 3 * mean_N], 1) / 2)
    assert torch.allclose(latent.decode(seen)[:, :, ::2, ::2], mean_N)


@pytest.mark.parametrize("num", [1, 64, 65])
def test_every_block_has_the_same_size_and_progress_counts_samples_alone(num: int) -> None:
    net = AveragingAutoencoder()
    reports = list[tuple[int, int]]()
    latent = AutoencoderKl(net, SIZE, (1, 4, 4))
    whole = latent.encode(
        samples(num, (1, 4, 4)), lambda num_done, total: reports.append((num_done, total))
    )
    assert set(net.given) == {latent.block} == {64}
    assert reports == [(num_done, num) for num_done in dict.fromkeys([min(64, num), num])]
    alone = torch.cat([latent.encode(x[None]) for x in samples(num, (1, 4, 4))])
    assert torch.equal(alone, whole)


def test_larger_samples_go_in_smaller_blocks() -> None:
    assert AutoencoderKl(AveragingAutoencoder(), SIZE, (1, 1024, 1024)).block == 2
    assert AutoencoderKl(AveragingAutoencoder(), SIZE, (1, 512, 512, 512)).block == 1


def test_samples_of_another_shape_and_answers_that_are_not_finite_are_refused() -> None:
    latent = AutoencoderKl(AveragingAutoencoder(), SIZE, (1, 4, 4))
    with pytest.raises(ShapeError):
        latent.encode(samples(2, (1, 4, 6)))
    with pytest.raises(ShapeError):
        latent.decode(samples(2, (1, 4, 4)))
    with pytest.raises(NumericalError):
        latent.encode(torch.full((2, 1, 4, 4), float("inf")))


def test_spread_is_the_standard_deviation_and_needs_different_latents() -> None:
    x_N = 3 * samples(2000, (1, 4, 4)) + 5
    assert spread(x_N) == pytest.approx(float((x_N - x_N.mean()).square().mean().sqrt()), rel=1e-3)
    with pytest.raises(NumericalError):
        spread(torch.ones(4, 1, 2, 2))


def test_sides_that_the_levels_cannot_halve_are_refused_before_anything_is_built() -> None:
    with pytest.raises(ShapeError, check=has_subject("autoencoder")):
        build_autoencoder(SIZE, (1, 7, 8))


def test_autoencoder_without_monai_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "monai.networks.nets", None)
    with pytest.raises(SetupError, check=has_subject("latent autoencoder_kl")) as caught:
        build_autoencoder(SIZE, (1, 8, 8))
    assert "monai" in caught.value.remedy


@pytest.mark.parametrize("shape", SHAPES, ids=["2D", "3D"])
def test_shapes_are_as_the_plan_says_and_no_samples_latent_depends_on_the_others(
    shape: tuple[int, ...],
) -> None:
    latent = latent_of(shape)
    x_N = samples(3, shape)
    seen = latent.encode(x_N)
    assert tuple(seen.shape[1:]) == SIZE.shape(shape)
    assert latent.decode(seen).shape == x_N.shape
    assert torch.equal(latent.encode(x_N[:1]), seen[:1])
    assert not torch.allclose(seen[0], seen[1])


@pytest.mark.parametrize("shape", SHAPES, ids=["2D", "3D"])
def test_stored_autoencoder_opens_as_it_was_and_its_tensors_are_those_expected(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    latent = latent_of(shape, scale=2.0)
    path = tmp_path / "plan" / "autoencoder.safetensors"
    save_tensors(path, latent.tensors())
    spec = AutoencoderKlLatent(**SIZE.model_dump(), scale=2.0)
    opened = open_latent(spec, shape, File.of("plan/autoencoder.safetensors", path), tmp_path)
    x_N = samples(2, shape)
    assert torch.equal(opened.encode(x_N), latent.encode(x_N))
    assert torch.allclose(open_weights(path, SIZE, shape).encode(x_N), 2 * latent.encode(x_N))
    assert isinstance(open_latent(IdentityLatent(), shape, None, tmp_path), Identity)


def test_other_weights_than_the_plan_lists_or_its_sizes_imply_are_refused(tmp_path: Path) -> None:
    shape = SHAPES[0]
    path = tmp_path / "plan" / "autoencoder.safetensors"
    save_tensors(path, latent_of(shape).tensors())
    listed = File.of("plan/autoencoder.safetensors", path)
    spec = AutoencoderKlLatent(**SIZE.model_dump(), scale=1.0)
    save_tensors(path, latent_of(shape).tensors() | {"quant_conv_mu.conv.bias": torch.zeros(3)})
    with pytest.raises(DigestError):
        open_latent(spec, shape, listed, tmp_path)
    wider = spec.model_copy(update={"channels": (16, 16)})
    with pytest.raises(TensorFileError):
        open_latent(wider, shape, File.of(listed.path, path), tmp_path)
    huge = {
        name: torch.full_like(tensor, 1e6) for name, tensor in latent_of(shape).tensors().items()
    }
    save_tensors(path, huge)
    with pytest.raises(TensorFileError, check=has_subject("tensor decoder.blocks.0.conv.bias")):
        open_latent(spec, shape, File.of(listed.path, path), tmp_path)
