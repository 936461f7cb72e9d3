import numpy as np
import pytest
import torch

from ddm.encoders import HogEncoder, hog_specs
from ddm.encoders.hog import histograms
from ddm.errors import DataError, ShapeError
from ddm.io.tensors import load_tensors, save_tensors
from ddm.protocol.encoder import HOG_DIRECTIONS, HogEncoderSpec
from tests.support.errors import has_subject


def _images(num: int = 60, channels: int = 1) -> torch.Tensor:
    return torch.rand(num, channels, 12, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1


def _by_hand(image: np.ndarray, cells: int) -> np.ndarray:
    """The definition, pixel by pixel, for sides that the cells divide."""
    channels, height, width = image.shape
    edge = np.pad(image, ((0, 0), (1, 1), (1, 1)), mode="edge")
    histogram = np.zeros((HOG_DIRECTIONS, cells, cells))
    for c, y, x in np.ndindex(channels, height, width):
        right = edge[c, y + 1, x + 2] - edge[c, y + 1, x]
        down = edge[c, y + 2, x + 1] - edge[c, y, x + 1]
        place = np.arctan2(down, right) % np.pi / np.pi * HOG_DIRECTIONS
        low = int(place)
        share = place % 1
        row = y * cells // height
        column = x * cells // width
        histogram[low % HOG_DIRECTIONS, row, column] += np.hypot(right, down) * (1 - share)
        histogram[(low + 1) % HOG_DIRECTIONS, row, column] += np.hypot(right, down) * share
    return np.sqrt(histogram * cells**2 / (height * width * channels))


@pytest.mark.parametrize("channels", [1, 3])
def test_histograms_are_those_of_the_definition(channels: int) -> None:
    images = _images(3, channels)
    actual = histograms(images, 4, mirrored=False)
    expected = np.stack([_by_hand(image.double().numpy(), 4) for image in images])
    np.testing.assert_allclose(actual.numpy(), expected, atol=1e-5)
    mirrored = np.stack([_by_hand(image.flip(2).double().numpy(), 4) for image in images])
    both = histograms(images, 4, mirrored=True).numpy()
    np.testing.assert_allclose(both, (expected + mirrored) / 2, atol=1e-5)


def test_an_edge_lies_in_its_direction_and_brightness_does_not_count() -> None:
    step = torch.zeros(1, 1, 8, 8)
    step[..., 4:] = 1
    histogram = histograms(step, 1, mirrored=False)[0, :, 0, 0]
    assert histogram[0] > 0 and not histogram[1:].any()
    turned = histograms(step.transpose(2, 3), 1, mirrored=False)[0, :, 0, 0]
    assert turned[HOG_DIRECTIONS // 2] > 0 and int((turned > 1e-6).sum()) == 1
    assert torch.equal(histograms(step + 0.5, 1, mirrored=False)[0, :, 0, 0], histogram)


def test_mirror_images_have_the_same_features_where_that_is_asked_for_and_not_otherwise() -> None:
    images = _images()
    same, other = (
        HogEncoder.fit(images, 5, cells=3, mirrored=mirrored) for mirrored in (True, False)
    )
    torch.testing.assert_close(same.encode(images.flip(3)), same.encode(images), atol=1e-5, rtol=0)
    assert (other.encode(images.flip(3)) - other.encode(images)).abs().max() > 0.1


def test_features_do_not_depend_on_how_many_images_are_encoded_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = _images()
    encoder = HogEncoder.fit(images, 3, cells=4, mirrored=True)
    reports = []
    whole = encoder.encode(images)
    monkeypatch.setattr("ddm.encoders.hog._MAX_BLOCK", 8)
    assert torch.equal(encoder.encode(images, lambda *num_done: reports.append(num_done)), whole)
    assert reports[0] == (8, 60) and reports[-1] == (60, 60)


def test_an_image_that_is_lost_is_filled_in_alone() -> None:
    images = _images()
    encoder = HogEncoder.fit(images, 3, cells=4, mirrored=False)
    spoilt = images.clone()
    spoilt[7, 0, 3, 3] = torch.nan
    features = encoder.encode(spoilt, replacement=0.0)
    assert not features[7].any() and torch.equal(features[:7], encoder.encode(images)[:7])


def test_images_that_have_too_few_pixels_or_no_edges_are_refused() -> None:
    with pytest.raises(ShapeError, check=has_subject("images")):
        histograms(_images(), 13, mirrored=False)
    with pytest.raises(ShapeError):
        histograms(torch.zeros(2, 1, 8, 8, 8), 2, mirrored=False)
    with pytest.raises(DataError, check=has_subject("public images")):
        HogEncoder.fit(torch.zeros(20, 1, 8, 8), 1, cells=2, mirrored=False)
    assert (
        HogEncoderSpec(dim=3, cells=7, mirrored=False).misfit((1, 8, 6))
        == "images of at least 7 pixels a side"
    )
    assert "pca for volumes" in HogEncoderSpec(dim=3, cells=7, mirrored=False).misfit((1, 8, 8, 8))


def test_encoder_survives_its_file(tmp_path) -> None:
    images = _images()
    spec = HogEncoderSpec(dim=3, cells=4, mirrored=True)
    encoder = HogEncoder.fit(images, spec.dim, cells=spec.cells, mirrored=spec.mirrored)
    save_tensors(tmp_path / "encoder.safetensors", encoder.tensors())
    loaded = load_tensors(tmp_path / "encoder.safetensors", hog_specs(spec), max_bytes=10_000)
    assert torch.equal(HogEncoder.from_tensors(loaded, spec).encode(images), encoder.encode(images))
