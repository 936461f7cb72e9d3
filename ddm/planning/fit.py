"""Fit what a plan makes public: the encoder, the latents, the clusters and the sketch, all from public images."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import torch
from torch import Tensor

from ddm.encoders import Encoder, HogEncoder, PcaEncoder
from ddm.encoders.autoencoder import Identity, Latent, spread
from ddm.errors import DataError, DigestError
from ddm.io.files import replacing
from ddm.io.tensors import save_tensors
from ddm.loading.plan import CENTROIDS_PATH, ENCODER_PATH, SKETCH_PATH
from ddm.partition.clustering import Clusters, fit_clustering
from ddm.planning.bases import OpenedBase
from ddm.planning.networks import (
    OpenedEncoder,
    OwnAutoencoder,
    PublishedAutoencoder,
    RecipeNetworks,
    name_recipe_field,
)
from ddm.planning.recipe import HogRecipe, PcaRecipe, PublicRecipe, SharedRecipe, TimmRecipe
from ddm.protocol.architecture import Condition
from ddm.protocol.base import sha256_file
from ddm.protocol.encoder import EncoderSpec, HogEncoderSpec, PcaEncoderSpec
from ddm.protocol.latent import AUTOENCODER_PATH, Autoencoder, IdentityLatent
from ddm.protocol.learning import Expert
from ddm.routers.sketch import Sketch
from ddm.system.progress import ProgressCallback

MIN_HELD_OUT = 20  # public images that judge and calibrate the routers


@dataclass(frozen=True)
class PublicImages:
    """The public images, divided.

    Attributes:
        fitted: those that encoder, clusters and sketch are fitted on, shape (N, C, H, W).
        holdout: those kept back to judge the routers, shape (N, C, H, W).
        latents: the latents of the first and of the second, as experts see them; None where experts see the images
            themselves.
    """

    fitted: Tensor
    holdout: Tensor
    latents: tuple[Tensor, Tensor] | None = None

    @property
    def expert_inputs(self) -> Tensor:
        """What experts see of the images fitted on."""
        return self.latents[0] if self.latents else self.fitted


@dataclass(frozen=True)
class PublicParts:
    """What was computed from the public images, and how the plan describes it.

    Attributes:
        images: the public images, divided.
        paths: the files that were written, relative to the plan's folder.
        encoder: the encoder, as the plan describes it.
        latent: the same of what experts see of an image.
        num_fine: number of fine centroids.
        condition: what experts are conditioned on, the encoder of texts pinned by digests.
        sketch: what routers see of an image.
        network: the encoder itself.
        clusters: the clusters themselves.
        autoencoder: the latent itself.
        base: the public expert that training starts from; None where it starts from random weights.
    """

    images: PublicImages
    paths: tuple[str, ...]
    encoder: EncoderSpec
    latent: IdentityLatent | Autoencoder
    num_fine: int
    condition: Condition
    sketch: Sketch
    network: Encoder
    clusters: Clusters
    autoencoder: Latent
    base: OpenedBase | None = None


@dataclass(frozen=True)
class FittedLatent:
    """The space that experts work in.

    Attributes:
        network: encodes images.
        spec: how the plan describes it.
        latents: the latents of the images fitted on and of those held out; None where experts see the images
            themselves.
    """

    network: Latent
    spec: IdentityLatent | Autoencoder
    latents: tuple[Tensor, Tensor] | None


def fit_public_parts(
    recipe: SharedRecipe,
    networks: RecipeNetworks,
    public: Tensor,
    folder: Path,
    on_progress: ProgressCallback | None = None,
) -> PublicParts:
    """Fit the public parts of a plan and write them into `folder`.

    Args:
        recipe: what the operator asks for.
        networks: those that the recipe names, see `open_networks`.
        public: public images, shape (N, C, H, W).
        folder: where the plan's files go.
        on_progress: called with the number of images encoded and of all images; encoding takes long with a large
            network.

    Raises:
        SetupError: the encoder of the recipe fails on these images, by the field that names it.
        DataError: too few public images for the recipe.
    """
    fitted_rows, holdout_rows = divide(len(public), recipe.public)
    fitted = public[fitted_rows]
    holdout = public[holdout_rows]
    encoder = networks.encoder or _fit_encoder(recipe, fitted)
    latent = fit_latent(networks, fitted, holdout, on_progress)
    images = PublicImages(fitted, holdout, latent.latents)

    # Clusters and sketch are public: they are fitted on public images alone, and cost no privacy.
    features = encoder.network.encode(fitted, on_progress)
    num_fine = recipe.clustering.fine_for(len(fitted), recipe.num_groups)
    clusters = fit_clustering(
        features,
        num_fine,
        recipe.clustering.num_coarse,
        recipe.num_groups,
        seed=recipe.public.seed,
        balanced=recipe.clustering.balanced,
    )
    sketch = Sketch.fit(
        images.expert_inputs,
        clusters.group_F[clusters.assign(features)],
        recipe.sketch.rank,
        recipe.num_groups,
        released_rank=recipe.released_rank,
    )

    tensors_of = {
        ENCODER_PATH: encoder.network.tensors(),
        CENTROIDS_PATH: clusters.tensors(),
        SKETCH_PATH: sketch.tensors(),
    }
    for path, tensors in tensors_of.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        save_tensors(folder / path, tensors)
    paths = [
        *tensors_of,
        *write_autoencoder(networks, folder),
        *write_base(recipe.expert, networks, folder),
    ]
    return PublicParts(
        images=images,
        paths=tuple(sorted(paths)),
        encoder=encoder.spec,
        latent=latent.spec,
        num_fine=num_fine,
        condition=networks.condition,
        sketch=sketch,
        network=encoder.network,
        clusters=clusters,
        autoencoder=latent.network,
        base=networks.base,
    )


def divide(num: int, settings: PublicRecipe) -> tuple[Tensor, Tensor]:
    """Return which of this many images are fitted on, and which are held out.

    Raises:
        DataError: too few to hold out.
    """
    # Seeded, so that the same recipe and images give the same plan files.
    order = torch.randperm(num, generator=torch.Generator().manual_seed(settings.seed))
    num_holdout = int(num * settings.holdout_share)
    if num_holdout < MIN_HELD_OUT:
        raise DataError(
            "public images",
            expected=f"at least {MIN_HELD_OUT} to hold out, by public.holdout_share",
            got=f"{num_holdout} of {num}",
            remedy="Give more public images, or raise public.holdout_share in the recipe.",
        )
    return order[num_holdout:], order[:num_holdout]


def _fit_encoder(recipe: SharedRecipe, fitted: Tensor) -> OpenedEncoder:
    """Fit the encoder on the public images, and describe it for the plan."""
    chosen = recipe.encoder
    match chosen:
        case PcaRecipe():
            pca_spec = PcaEncoderSpec(path=ENCODER_PATH, dim=chosen.dim)
            return OpenedEncoder(PcaEncoder.fit(fitted, chosen.dim), pca_spec)
        case HogRecipe():
            spec = HogEncoderSpec(
                path=ENCODER_PATH, dim=chosen.dim, cells=chosen.cells, mirrored=chosen.mirrored
            )
            with name_recipe_field("encoder.cells", recipe.data.shape):
                encoder = HogEncoder.fit(
                    fitted, chosen.dim, cells=chosen.cells, mirrored=chosen.mirrored
                )
            return OpenedEncoder(encoder, spec)
        case TimmRecipe():
            raise ValueError("a network of timm is opened, not fitted")
        case _:
            assert_never(chosen)


def fit_latent(
    networks: RecipeNetworks, fitted: Tensor, holdout: Tensor, on_progress: ProgressCallback | None
) -> FittedLatent:
    """Encode all images as experts see them, and scale the latents where the autoencoder does not do so itself."""
    autoencoder = networks.autoencoder
    if autoencoder is None:
        return FittedLatent(Identity(), IdentityLatent(), None)
    network = autoencoder.network
    fitted_latents = network.encode(fitted, on_progress)
    holdout_latents = network.encode(holdout, on_progress)
    if isinstance(autoencoder, PublishedAutoencoder):
        return FittedLatent(network, autoencoder.spec, (fitted_latents, holdout_latents))
    # Experts see latents as wide as the noise: divided by their spread on the images that the plan is fitted on.
    scale = spread(fitted_latents)
    network.scale = scale
    latents = (fitted_latents / scale, holdout_latents / scale)
    return FittedLatent(network, autoencoder.spec(scale), latents)


def write_autoencoder(networks: RecipeNetworks, folder: Path) -> list[str]:
    """Write the autoencoder where the plan has it, if the recipe names one, and return its path in the plan.

    Raises:
        DigestError: the file of a published one has changed since it was opened.
    """
    autoencoder = networks.autoencoder
    if autoencoder is None:
        return []
    target = folder / AUTOENCODER_PATH
    if isinstance(autoencoder, OwnAutoencoder):
        save_tensors(target, autoencoder.network.tensors())
        return [AUTOENCODER_PATH]
    with replacing(target) as copy, autoencoder.weights.open("rb") as published_file:
        shutil.copyfileobj(published_file, copy)
    copied_digest = sha256_file(target)
    if copied_digest != autoencoder.digest:
        raise DigestError(
            "weights of the autoencoder",
            expected=f"the file that encoded the public images, sha256 {autoencoder.digest}",
            got=f"sha256 {copied_digest}",
            remedy="Leave the file alone while the plan is drafted, and draft the plan again.",
        )
    return [AUTOENCODER_PATH]


def write_base(expert: Expert, networks: RecipeNetworks, folder: Path) -> list[str]:
    """Write the public expert that training starts from, if the recipe names one, and return its path in the plan."""
    if networks.base is None or expert.base is None:
        return []
    save_tensors(folder / expert.base, networks.base.tensors)
    return [expert.base]
