"""A published autoencoder end to end: in the plan's bundle as it was published, at the silo, and in the release."""

from pathlib import Path

import pytest
import torch

from aggregator.intake.inventory import take_inventory
from ddm import open_ensemble
from ddm.encoders.public_autoencoder import CONFIG, WEIGHTS
from ddm.errors import DigestError, SetupError
from ddm.footprint import encoding_bytes, file_bytes, inspection_bytes
from ddm.loading.plan import PlanFiles
from ddm.planning.fit import fit_public_parts
from ddm.planning.networks import autoencoder_digest, open_networks
from ddm.protocol.base import sha256_file
from ddm.protocol.latent import AUTOENCODER_PATH, DiffusersKlLatent
from silo.data.latents import keep_latents, training_inputs
from tests.support.autoencoders import SD, write_autoencoder
from tests.support.cohorts import cohort_at
from tests.support.errors import has_subject
from tests.support.federation import TinyFederation, images, recipe

LAYOUT = SD | {"latent_channels": 2}


def asked(folder: Path) -> dict[str, object]:
    """The recipe's table for images of one channel."""
    return {"kind": "diffusers_kl", "folder": str(folder)}


def test_plan_takes_the_file_as_it_was_published_and_the_factors_from_its_configuration(
    tmp_path: Path,
) -> None:
    theirs = write_autoencoder(tmp_path / "vae", LAYOUT, channels=(8, 8), images=1)
    wanted = recipe(latent=asked(tmp_path / "vae"))
    public = torch.from_numpy(images(120, 0.1, seed=0))
    networks = open_networks(wanted)
    fitted = fit_public_parts(wanted, networks, public, tmp_path / "plan-files")
    assert isinstance(fitted.latent, DiffusersKlLatent)
    assert (fitted.latent.scaling_factor, fitted.latent.channels) == (0.18215, (8, 8))
    assert AUTOENCODER_PATH in fitted.paths
    written = sha256_file(tmp_path / "plan-files" / AUTOENCODER_PATH)
    assert written == sha256_file(tmp_path / "vae" / WEIGHTS)
    # Known before anything is fitted, so that a base of other latents is refused then.
    assert autoencoder_digest(networks.autoencoder) == written
    assert fitted.images.latents is not None
    with torch.no_grad():
        expected = theirs.encode(fitted.images.fitted).latent_dist.mode() * 0.18215
    torch.testing.assert_close(fitted.images.expert_inputs, expected, rtol=1e-4, atol=1e-5)


def test_plan_is_not_drafted_when_the_weights_changed_after_they_encoded_the_images(
    tmp_path: Path,
) -> None:
    """The plan would name weights that give other latents than those its sketch and clusters were fitted on."""
    write_autoencoder(tmp_path / "vae", LAYOUT, channels=(8, 8), images=1)
    chosen = recipe(latent=asked(tmp_path / "vae"))
    networks = open_networks(chosen)
    weights = tmp_path / "vae" / WEIGHTS
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    public = torch.from_numpy(images(120, 0.1, seed=0))
    with pytest.raises(DigestError, check=has_subject("weights of the autoencoder")):
        fit_public_parts(chosen, networks, public, tmp_path / "plan-files")


@pytest.mark.slow
def test_silo_trains_on_published_latents_and_the_release_decodes_samples(tmp_path: Path) -> None:
    theirs = write_autoencoder(tmp_path / "vae", LAYOUT, channels=(8, 8), images=1)
    tiny = TinyFederation.create(tmp_path, {"north": 60, "west": 40})
    plan_id = tiny.complete(tmp_path / "release", recipe(latent=asked(tmp_path / "vae")))
    plan = take_inventory(tiny.federation).plan
    assert (plan.plan_id, plan.expert_shape) == (plan_id, (2, 2, 2))
    listed = plan.file(AUTOENCODER_PATH)
    assert listed.digest == sha256_file(tmp_path / "vae" / WEIGHTS)
    assert listed.bytes <= file_bytes(plan)[AUTOENCODER_PATH]
    assert min(inspection_bytes(plan), encoding_bytes(plan)) > listed.bytes // 2
    files = PlanFiles.load(plan, tiny.federation.bundle(plan_id) / "targets" / plan_id)
    cohort = cohort_at(
        tiny.path / "north.npz",
        plan.data,
        min_images=1,
        salt=b"s" * 32,
        unit="image",
        num_classes=None,
    )
    folder = tmp_path / "private"
    folder.mkdir()
    keep_latents(cohort, files.latent, plan, folder, lambda num_done, total: None)
    kept = training_inputs(cohort, plan, folder).images
    with torch.no_grad():
        expected = theirs.encode(cohort.images).latent_dist.mode() * 0.18215
    torch.testing.assert_close(kept[:], expected, rtol=1e-4, atol=1e-5)
    drawn = open_ensemble(tmp_path / "release", root=tiny.root).sample(3, steps=2)
    with torch.no_grad():
        decoded = theirs.decode(drawn.latents / 0.18215).sample
    torch.testing.assert_close(drawn.images, decoded, rtol=1e-4, atol=1e-5)

    # and the plan that carries them over keeps the autoencoder, byte for byte
    tiny.join("east", 50, 2)
    write_autoencoder(
        tmp_path / "other", LAYOUT | {"scaling_factor": 0.13025}, channels=(8, 8), images=1
    )
    with pytest.raises(SetupError, match="scaling_factor"):
        tiny.grow(chosen=recipe(latent=asked(tmp_path / "other")))
    (tmp_path / "other" / CONFIG).write_bytes((tmp_path / "vae" / CONFIG).read_bytes())
    changed = (tmp_path / "vae" / WEIGHTS).read_bytes()
    (tmp_path / "other" / WEIGHTS).write_bytes(changed[:-1] + bytes([changed[-1] ^ 1]))
    with pytest.raises(SetupError, match="digest"):
        tiny.grow(chosen=recipe(latent=asked(tmp_path / "other")))
    tiny.grow(chosen=recipe(latent=asked(tmp_path / "vae")))
    grown, _ = tiny.federation.current_plan()
    assert [expert.silo_id for expert in grown.carried] == ["north", "west"]
    assert (grown.latent, grown.file(AUTOENCODER_PATH)) == (plan.latent, listed)
