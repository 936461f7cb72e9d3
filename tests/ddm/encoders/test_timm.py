"""A network of timm as encoder: its own preprocessing, its weights from a file, and what is refused."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ddm.encoders.timm import TimmEncoder, create_model, timm_specs
from ddm.errors import DataError, SetupError, ShapeError, TensorFileError
from ddm.io.tensors import load_tensors, save_tensors
from ddm.loading.plan import PlanFiles
from ddm.planning.recipe import TimmRecipe
from ddm.protocol.data import DataSpec
from tests.support.errors import has_subject
from tests.support.federation import TinyFederation, images, make_draft, recipe

COLOUR = DataSpec(shape=(3, 40, 56), range=(0.0, 1.0))
GREY = DataSpec(shape=(1, 40, 56), range=(0.0, 1.0))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def weights(path: Path, model: str = "test_vit", **options: object) -> Path:
    """Random weights of a whole network, classifier and all, as timm's files hold them."""
    torch.manual_seed(3)
    network = create_model(model, **options)
    save_tensors(path, {name: value for name, value in network.state_dict().items() if value.ndim})
    return path


def pictures(num: int, spec: DataSpec = COLOUR) -> torch.Tensor:
    """Pictures of whole grey levels, so that PIL holds them without loss."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (num, spec.shape[0], 5, 7))
    fine = coarse.repeat(8, axis=2).repeat(8, axis=3) + rng.integers(-20, 21, (num, *spec.shape))
    return torch.from_numpy(np.clip(fine, 0, 255).astype(np.float32) / 255)


def of_timm(encoder: TimmEncoder, x_NCHW: torch.Tensor, **changes: object) -> torch.Tensor:
    """timm's own pipeline on PIL images."""
    from timm.data import create_transform, resolve_model_data_config

    transform = create_transform(**resolve_model_data_config(encoder.net) | changes)
    arrays = (x_NCHW.permute(0, 2, 3, 1) * 255).round().byte().numpy()
    return torch.stack([transform(Image.fromarray(array)) for array in arrays])


@pytest.mark.parametrize("model", ["test_vit", "test_resnet"])
def test_network_input_and_features_are_those_of_timms_own_pipeline(
    tmp_path: Path, model: str
) -> None:
    encoder = TimmEncoder.from_file(model, weights(tmp_path / "w.safetensors", model), COLOUR)
    # no value that bicubic weights would carry beyond black or white
    soft = (pictures(5) * 127 + 64).round() / 255
    # PIL rounds to whole levels after each of its two passes
    close = 1.5 / 255 / min(encoder.spec.std)
    torch.testing.assert_close(encoder.prepare(soft), of_timm(encoder, soft), atol=close, rtol=0)
    assert (
        encoder.prepare(soft) - of_timm(encoder, soft, mean=(0.45, 0.45, 0.45))
    ).abs().max() > 5 * close
    hard = pictures(5)
    with torch.inference_mode():
        expected = encoder.net(of_timm(encoder, hard))
        wrong = encoder.net(of_timm(encoder, hard, mean=(0.1, 0.1, 0.1)))
    assert (encoder.encode(hard) - expected).norm() < 0.01 * expected.norm()
    assert (wrong - expected).norm() > 0.1 * expected.norm()


def test_features_are_the_same_whatever_the_split_into_batches(tmp_path: Path) -> None:
    encoder = TimmEncoder.from_file(
        "test_resnet", weights(tmp_path / "w.safetensors", "test_resnet"), COLOUR, (32, 32)
    )
    x_NCHW = pictures(70)
    whole = encoder.encode(x_NCHW)
    assert whole.shape == (70, encoder.dim) and whole.dtype == torch.float32
    assert float(whole.std(0).max()) > 0
    for size in (1, 23):
        parts = [encoder.encode(part) for part in torch.split(x_NCHW[:46], size)]
        assert torch.equal(torch.cat(parts), whole[:46])


def test_grey_is_repeated_for_a_network_of_colours_and_taken_as_it_is_by_one_of_grey(
    tmp_path: Path,
) -> None:
    grey = pictures(3, GREY)
    colours = weights(tmp_path / "c.safetensors")
    of_grey = TimmEncoder.from_file("test_vit", colours, GREY, (32, 32)).encode(grey)
    of_colour = TimmEncoder.from_file("test_vit", colours, COLOUR, (32, 32)).encode(
        grey.expand(-1, 3, -1, -1)
    )
    assert torch.equal(of_grey, of_colour)
    single = TimmEncoder.from_file(
        "test_vit", weights(tmp_path / "g.safetensors", in_chans=1), GREY, (32, 32)
    )
    assert len(single.spec.mean) == 1 and single.prepare(grey).shape == (3, 1, 32, 32)


def test_classifier_in_the_file_is_left_out_and_the_rest_survives_the_plans_file(
    tmp_path: Path,
) -> None:
    encoder = TimmEncoder.from_file(
        "test_resnet", weights(tmp_path / "w.safetensors", "test_resnet"), COLOUR
    )
    assert any(
        name.startswith("fc.")
        for name in load_tensors(tmp_path / "w.safetensors", None, max_bytes=1 << 30)
    )
    assert not any(name.startswith("fc.") for name in encoder.tensors())
    save_tensors(tmp_path / "plan.safetensors", encoder.tensors())
    loaded = load_tensors(
        tmp_path / "plan.safetensors", timm_specs(encoder.spec), max_bytes=1 << 30
    )
    again = TimmEncoder.from_tensors(loaded, encoder.spec, COLOUR)
    assert torch.equal(again.encode(pictures(3)), encoder.encode(pictures(3)))


def test_weights_are_opened_through_a_link_as_hugging_faces_cache_has_them(tmp_path: Path) -> None:
    # The cache names a file by its digest, without an ending.
    blob = weights(tmp_path / "blob")
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    tensors = TimmEncoder.from_file("test_vit", link, COLOUR).tensors()
    stored = load_tensors(blob, None, max_bytes=1 << 30)
    assert all(torch.equal(tensors[name], stored[name]) for name in tensors)


def test_weights_that_are_not_safetensors_are_refused_with_the_conversion(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "w.pth")
    with pytest.raises(SetupError) as refused:
        TimmEncoder.from_file("test_vit", tmp_path / "w.pth", COLOUR)
    assert "save_file" in refused.value.remedy and "weights_only=True" in refused.value.remedy
    (tmp_path / "w.pth").rename(tmp_path / "w.safetensors")
    with pytest.raises(TensorFileError, match="pickle"):
        TimmEncoder.from_file("test_vit", tmp_path / "w.safetensors", COLOUR)


def test_weights_of_another_network_or_shape_or_not_finite_are_refused(tmp_path: Path) -> None:
    path = weights(tmp_path / "w.safetensors")
    with pytest.raises(SetupError, check=has_subject("w.safetensors")):
        TimmEncoder.from_file("test_resnet", path, COLOUR)
    tensors = load_tensors(path, None, max_bytes=1 << 30)
    save_tensors(path, tensors | {"norm.weight": torch.ones(3)})
    with pytest.raises(SetupError, match=r"norm\.weight"):
        TimmEncoder.from_file("test_vit", path, COLOUR)
    save_tensors(path, tensors | {"norm.weight": tensors["norm.weight"] * float("nan")})
    with pytest.raises(TensorFileError, check=has_subject("tensor norm.weight")):
        TimmEncoder.from_file("test_vit", path, COLOUR)


def test_unknown_networks_colours_and_shapes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, check=has_subject("encoder")):
        TimmEncoder.random("no_such_network", COLOUR, 0)
    two = DataSpec(shape=(2, 40, 56), range=(0.0, 1.0))
    with pytest.raises(DataError, check=has_subject("images")):
        TimmEncoder.from_file("test_vit", weights(tmp_path / "w.safetensors"), two)
    with pytest.raises(DataError, check=has_subject("images")):
        TimmEncoder.random("test_vit", two, 0)
    with pytest.raises(ShapeError):
        TimmEncoder.random("test_vit", COLOUR, 0).encode(torch.zeros(1, 3, 40, 40))


def test_features_that_are_not_finite_are_refused() -> None:
    encoder = TimmEncoder.random("test_vit", COLOUR, 0, (32, 32))
    with torch.no_grad():
        encoder.net.norm.weight.fill_(float("inf"))  # type: ignore[union-attr, operator]
    with pytest.raises(DataError, check=has_subject("features of test_vit")):
        encoder.encode(pictures(1))


@pytest.mark.parametrize("chosen", [{}, {"weights": "a.safetensors", "random_weights": True}])
def test_random_weights_are_refused_unless_asked_for_instead_of_a_file(
    chosen: dict[str, object],
) -> None:
    with pytest.raises(ValueError, match="random_weights"):
        TimmRecipe.model_validate({"kind": "timm", "model": "test_vit"} | chosen)


@pytest.mark.parametrize("random", [False, True])
def test_plan_records_the_network_and_its_files_open_again(tmp_path: Path, random: bool) -> None:
    tiny = TinyFederation.create(tmp_path, {"north": 40})
    source = (
        {"random_weights": True}
        if random
        else {"weights": str(weights(tmp_path / "w.safetensors"))}
    )
    chosen = recipe(encoder={"kind": "timm", "model": "test_vit", "image_size": [32, 32]} | source)
    public = torch.from_numpy(images(80, 0.2, seed=1))
    draft = make_draft(tiny.federation, chosen, public, tmp_path / "draft")
    assert draft.plan.encoder.weights == ("random" if random else "file")  # type: ignore[union-attr]
    files = PlanFiles.load(draft.plan, tmp_path / "draft")
    features = files.encoder.encode(public)
    assert features.shape == (80, draft.plan.encoder.dim)
    assert len(files.clusters.groups(features).unique()) > 1


def test_opening_a_plan_of_principal_components_imports_no_timm() -> None:
    code = "import sys, ddm.loading.plan; sys.exit('timm' in sys.modules or 'torchvision' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


@pytest.mark.gpu
def test_features_in_half_precision_are_close_to_those_of_the_cpu() -> None:
    encoder = TimmEncoder.random("test_vit", COLOUR, 0, (32, 32))
    fast = encoder.encode(pictures(9))
    encoder.device = torch.device("cpu")
    exact = encoder.encode(pictures(9))
    assert 0 < (fast - exact).norm() / exact.norm() < 0.01
