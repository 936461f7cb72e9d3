import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from ddm.encoders import PcaEncoder, pca_specs, principal_directions
from ddm.errors import DataError, ShapeError
from ddm.io.tensors import load_tensors, save_tensors
from ddm.protocol.data import DataSpec
from tests.support.errors import has_subject


def _images(num: int = 60, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.linspace(3, 0.1, 36)
    return (torch.randn(num, 36, generator=generator) * spread + 5).view(num, 1, 6, 6)


def test_pca_features_match_scikit_learn_up_to_sign_and_half_whitening() -> None:
    images = _images()
    ours = PcaEncoder.fit(images, 5).encode(images).double().numpy()
    flat = images.flatten(1).double().numpy()
    model = PCA(5, svd_solver="full").fit(flat)
    plain = np.abs(model.transform(flat))
    half = plain * np.sqrt(model.singular_values_[0] / model.singular_values_)
    np.testing.assert_allclose(np.abs(ours), half, atol=1e-4)
    # the comparison can tell features that are not whitened
    assert np.abs(plain - half).max() > 0.1
    assert np.abs(np.abs(flat @ model.components_.T) - plain).max() > 1  # nor centred


def test_pca_directions_have_the_same_signs_when_images_are_reordered_or_mirrored() -> None:
    images = _images()
    _, basis = principal_directions(images, 4)
    _, reordered = principal_directions(images.flip(0), 4)
    _, mirrored = principal_directions(-images, 4)
    torch.testing.assert_close(basis, reordered)
    torch.testing.assert_close(basis, mirrored)
    assert bool((basis.gather(1, basis.abs().argmax(1, keepdim=True)) > 0).all())


def test_pca_encoding_is_the_same_in_blocks_and_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    images = _images()
    encoder = PcaEncoder.fit(images, 3)
    whole = encoder.encode(images)
    monkeypatch.setattr("ddm.encoders.pca._BLOCK", 7)
    torch.testing.assert_close(encoder.encode(images), whole)


def test_pca_refuses_more_directions_than_the_images_span() -> None:
    with pytest.raises(DataError, check=has_subject("public images")):
        PcaEncoder.fit(_images(5), 5)
    flat = torch.zeros(20, 1, 6, 6)
    with pytest.raises(DataError):
        PcaEncoder.fit(flat, 1)


def test_pca_refuses_images_of_another_size() -> None:
    with pytest.raises(ShapeError):
        PcaEncoder.fit(_images(), 3).encode(torch.zeros(2, 1, 5, 5))


def test_pca_encoder_survives_its_file(tmp_path) -> None:
    images = _images()
    encoder = PcaEncoder.fit(images, 3)
    save_tensors(tmp_path / "encoder.safetensors", encoder.tensors())
    specs = pca_specs(DataSpec(shape=(1, 6, 6), range=(-1.0, 1.0)), 3)
    loaded = PcaEncoder.from_tensors(
        load_tensors(tmp_path / "encoder.safetensors", specs, max_bytes=10_000)
    )
    assert torch.equal(loaded.encode(images), encoder.encode(images))
    assert loaded.dim == 3
