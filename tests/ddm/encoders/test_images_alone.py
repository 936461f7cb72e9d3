"""Features of one image are the same bits whichever other images there are, as the epsilon of statistics assumes."""

from collections.abc import Callable

import pytest
import torch

from ddm.encoders import Encoder, HogEncoder, PcaEncoder
from ddm.encoders.timm import TimmEncoder
from ddm.protocol.data import DataSpec

DATA = DataSpec(shape=(1, 33, 31), range=(-1.0, 1.0))
IMAGES = torch.rand(150, *DATA.shape, generator=torch.Generator().manual_seed(5)) * 2 - 1


def pca() -> Encoder:
    return PcaEncoder.fit(IMAGES, 7)


def hog() -> Encoder:
    return HogEncoder.fit(IMAGES, 7, cells=3, mirrored=True)


def timm() -> Encoder:
    return TimmEncoder.random("test_resnet", DATA, seed=1, image_size=(32, 32))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("make", [pca, hog, timm])
def test_features_have_the_same_bits_without_any_other_image(make: Callable[[], Encoder]) -> None:
    encoder = make()
    alone = encoder.for_single_samples()
    features_ND = alone.encode(IMAGES[:70])
    for image in (0, 37, 69):
        assert alone.encode(IMAGES[image : image + 1])[0].equal(features_ND[image])
    # One image less moves all later ones to another place.
    assert alone.encode(IMAGES[1:70]).equal(features_ND[1:])
    torch.testing.assert_close(features_ND, encoder.encode(IMAGES[:70]), rtol=1e-4, atol=1e-4)
    assert alone.tensors().keys() == encoder.tensors().keys()
