"""A network of the recipe that cannot be called on the recipe's images: an error that names the field at fault."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ddm.encoders.autoencoder import AutoencoderKl, build_autoencoder
from ddm.encoders.timm import TimmEncoder, create_model
from ddm.errors import SetupError
from ddm.io.tensors import save_tensors
from ddm.planning.fit import fit_public_parts
from ddm.planning.networks import condition_of, open_networks
from ddm.protocol.data import DataSpec
from ddm.protocol.latent import AutoencoderSize
from tests.support.case import case
from tests.support.errors import has_subject
from tests.support.federation import images, recipe
from tests.support.text_encoders import make_encoder, save_encoder

GREY = DataSpec(shape=(1, 32, 32), range=(0.0, 1.0))
VOLUME = DataSpec(shape=(1, 8, 8, 8), range=(0.0, 1.0))


def refusal(model: str, image_size: tuple[int, int] | None, data: DataSpec = GREY) -> SetupError:
    with pytest.raises(SetupError) as caught:
        TimmEncoder.random(model, data, 0, image_size)
    return caught.value


def test_size_that_a_transformer_does_not_take_names_the_field_and_a_size_that_works() -> None:
    error = refusal("test_vit", (30, 47))
    assert error.subject == "recipe, encoder.image_size"
    assert "multiples of its patch of 16 x 16 pixels" in str(error.expected)
    assert "[32, 48]" in str(error.remedy)
    assert "160, 160" in str(error.remedy)
    assert TimmEncoder.random("test_vit", GREY, 0, (32, 48)).encode(
        torch.zeros(2, 1, 32, 32)
    ).shape == (2, 64)


def test_sizes_that_networks_fail_on_are_errors_of_the_field_for_every_kind_of_network() -> None:
    for model, size in {
        "test_convnext": (1, 1),
        "levit_128s": (30, 30),
        "nest_tiny": (30, 30),
        "crossvit_tiny_240": (30, 30),
    }.items():
        with case(model):
            error = refusal(model, size)
            assert error.subject == "recipe, encoder.image_size"
            assert str(list(size)) in str(error.got)


def test_size_is_checked_with_weights_from_a_file_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = create_model("test_vit", in_chans=1)
    tensors = {name: value for name, value in network.state_dict().items() if value.ndim}
    save_tensors(tmp_path / "w.safetensors", tensors)
    with pytest.raises(SetupError, check=has_subject("recipe, encoder.image_size")):
        TimmEncoder.from_file("test_vit", tmp_path / "w.safetensors", GREY, (30, 30))
    assert TimmEncoder.from_file("test_vit", tmp_path / "w.safetensors", GREY, (48, 32)).dim == 64


def test_network_of_images_is_refused_for_volumes() -> None:
    assert refusal("test_resnet", None, VOLUME).subject == "recipe, encoder.kind"


def test_plan_on_networks_that_do_not_fit_names_the_field_of_the_recipe(tmp_path: Path) -> None:
    public = torch.from_numpy(images(100, 0.2, seed=1))
    shape = tuple(public.shape[1:])
    assert shape == (1, 4, 4)
    size: dict[str, Any] = {
        "channels": [4] * 5,
        "attention": [False] * 5,
        "latent_channels": 1,
        "norm_groups": 2,
    }
    timm = {"kind": "timm", "model": "test_vit", "random_weights": True, "image_size": [30, 30]}
    (tmp_path / "w.safetensors").write_bytes(b"")
    autoencoder = {"kind": "autoencoder_kl", "weights": str(tmp_path / "w.safetensors")} | size
    for field, changes in {
        "encoder.image_size": {"encoder": timm},
        "encoder.cells": {"encoder": {"kind": "hog", "dim": 2, "cells": 9}},
        "latent": {"latent": autoencoder},
    }.items():
        with case(field), pytest.raises(SetupError) as caught:
            changed = recipe(**changes)
            fit_public_parts(changed, open_networks(changed), public, tmp_path)
        assert caught.value.subject == f"recipe, {field}"


def test_failed_check_of_a_library_names_the_field_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = AutoencoderSize(
        channels=(4, 4), attention=(False, False), latent_channels=1, norm_groups=2
    )
    tensors = dict(build_autoencoder(size, (1, 4, 4)).state_dict())
    save_tensors(tmp_path / "w.safetensors", tensors)

    def fails(*args: object, **options: object) -> None:
        raise AssertionError("a library's own check")

    monkeypatch.setattr(AutoencoderKl, "encode", fails)
    chosen = {
        "kind": "autoencoder_kl",
        "weights": str(tmp_path / "w.safetensors"),
    } | size.model_dump(mode="json")
    with pytest.raises(SetupError) as caught:
        open_networks(recipe(latent=chosen))
    assert caught.value.subject == "recipe, latent"
    assert "AssertionError" in str(caught.value.got)


def test_text_encoder_that_takes_fewer_tokens_names_the_field_of_the_recipe(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "tiny-bert", make_encoder("BertModel"))
    with pytest.raises(SetupError) as caught:
        condition_of(recipe(condition={"kind": "text", "encoder": str(folder), "max_tokens": 500}))
    assert caught.value.subject == "recipe, condition.encoder: text encoder tiny-bert"
    assert "takes 500 tokens" in str(caught.value.expected)
