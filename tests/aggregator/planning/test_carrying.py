"""Public parts that a plan keeps with carried experts: a recipe that names other weights is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aggregator.planning.carrying import _check_recipe_keeps_parts
from ddm.encoders.autoencoder import build_autoencoder
from ddm.errors import SetupError
from ddm.io.tensors import save_tensors
from ddm.planning.fit import fit_public_parts
from ddm.planning.networks import open_networks
from ddm.protocol.base import File
from ddm.protocol.latent import AutoencoderSize
from ddm.protocol.plan import Plan
from tests.support.documents import plan_document, to_bytes
from tests.support.federation import images, recipe

SIZE = AutoencoderSize(channels=(4, 4), attention=(False, False), latent_channels=1, norm_groups=2)


def timm_recipe(folder: Path, seed: int) -> dict[str, Any]:
    """An encoder of timm whose weights follow from the seed."""
    encoder = {"kind": "timm", "model": "test_vit", "random_weights": True, "seed": seed}
    return {"encoder": encoder | {"image_size": [32, 32]}}


def autoencoder_recipe(folder: Path, seed: int) -> dict[str, Any]:
    """An autoencoder whose weights follow from the seed, always under the same name."""
    random = torch.Generator().manual_seed(seed)
    network = build_autoencoder(SIZE, (1, 4, 4))
    weights = {
        name: weight + 0.1 * torch.randn(weight.shape, generator=random)
        for name, weight in network.state_dict().items()
    }
    path = folder / "autoencoder.safetensors"
    save_tensors(path, weights)
    stated = SIZE.model_dump(mode="json")
    return {"latent": stated | {"kind": "autoencoder_kl", "weights": str(path)}}


@pytest.mark.parametrize(
    ("make_recipe", "field"),
    [
        (timm_recipe, "encoder.weights, digest"),
        (autoencoder_recipe, "latent.weights, digest"),
    ],
)
def test_recipe_with_other_weights_of_a_public_network_is_refused_where_experts_are_carried_over(
    tmp_path: Path, make_recipe: Callable[[Path, int], dict[str, Any]], field: str
) -> None:
    """The fault: what the recipe asked for was passed over in silence."""
    chosen = recipe(**make_recipe(tmp_path, 1))
    public = torch.from_numpy(images(100, 0.2, seed=1))
    parts = fit_public_parts(chosen, open_networks(chosen), public, tmp_path)
    document = Plan.parse(to_bytes(plan_document()), subject="plan")
    clustering = document.clustering.model_copy(update={"num_fine": parts.num_fine})
    plan = document.model_copy(
        update={
            "encoder": parts.encoder,
            "latent": parts.latent,
            "clustering": clustering,
            "files": tuple(File.of(path, tmp_path / path) for path in parts.paths),
        }
    )
    # The control: the same weights.
    _check_recipe_keeps_parts(chosen, plan)
    other = recipe(**make_recipe(tmp_path, 2))
    with pytest.raises(SetupError) as caught:
        _check_recipe_keeps_parts(other, plan)
    assert caught.value.subject == f"recipe, {field}"
