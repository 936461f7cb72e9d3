"""Islands whose experts see latents, and recipes of islands that name a published size."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddm.encoders.autoencoder import build_autoencoder
from ddm.io.tensors import save_tensors
from ddm.islands.arrays import map_array
from ddm.islands.folder import Islands
from ddm.loading.plan import PlanFiles
from ddm.protocol.architecture import Dit
from ddm.protocol.latent import AutoencoderSize
from tests.support.autoencoders import SD, write_autoencoder
from tests.support.islands import RECIPE, Owner, digits

NUMBERS = "patch = 4\nhidden = 16\ndepth = 1\nheads = 2\n"


def published(folder: Path) -> str:
    """Write an autoencoder as diffusers does, and return its table."""
    write_autoencoder(folder / "vae", SD, channels=(8, 8), images=1)
    return f'[latent]\nkind = "diffusers_kl"\nfolder = "{folder / "vae"}"\n'


def own(folder: Path) -> str:
    """Write an autoencoder of MONAI, and return its table."""
    size = AutoencoderSize(
        channels=(8, 8),
        attention=(False, False),
        latent_channels=4,
        num_res_blocks=1,
        norm_groups=4,
    )
    save_tensors(
        folder / "vae.safetensors", dict(build_autoencoder(size, (1, 8, 8), seed=3).state_dict())
    )
    return (
        f'[latent]\nkind = "autoencoder_kl"\nweights = "{folder / "vae.safetensors"}"\nchannels = [8, 8]\n'
        "attention = [false, false]\nlatent_channels = 4\nnum_res_blocks = 1\nnorm_groups = 4\n"
    )


@pytest.mark.parametrize("autoencoder", [published, own])
def test_islands_hold_the_latents_of_the_plan_and_the_named_size_becomes_its_numbers(
    autoencoder: Callable[[Path], str], tmp_path: Path
) -> None:
    """Against the plan's own files, as whoever decodes a sample opens them."""
    sized = RECIPE.replace(NUMBERS, 'size = "S/2"\n')
    assert sized != RECIPE
    owner = Owner.make(tmp_path, recipe=sized, extra=autoencoder(tmp_path))
    result = owner.split()
    assert result.code == 0, result.err
    islands = Islands(owner.run)
    images = torch.from_numpy(digits()[0])
    plan = islands.plan
    assert plan.expert.architecture == Dit(patch=2, hidden=384, depth=12, heads=6)
    assert plan.expert_shape == (4, 4, 4)
    latent = PlanFiles.load(plan, islands.bundle).latent
    for number in range(2):
        folder = islands.island(number)
        kept = map_array(folder.images)
        rows = map_array(folder.rows)
        assert 0.3 < float(kept.std()) / float(latent.encode(images).std()) < 3.0
        torch.testing.assert_close(kept, latent.encode(images[rows]), rtol=1e-4, atol=1e-5)
