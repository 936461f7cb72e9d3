"""Fit what a plan makes public: the encoder, the latents, the clusters and the sketch, all from public images."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ddm.encoders import Encoder, PcaEncoder, Progress
from ddm.encoders.autoencoder import AutoencoderKl, Identity, Latent, open_weights, spread
from ddm.errors import DataError
from ddm.io.files import require_file
from ddm.io.tensors import load_tensors, save_tensors
from ddm.loading.plan import CENTROIDS_PATH, ENCODER_PATH, SKETCH_PATH
from ddm.models import MAX_WEIGHT, expected_tensors
from ddm.partition.clustering import Clusters, fit_clustering
from ddm.planning.recipe import AutoencoderKlRecipe, PcaRecipe, PublicRecipe, SharedRecipe, TextRecipe
from ddm.protocol.latent import AUTOENCODER_PATH, AutoencoderSize
from ddm.protocol.plan import AutoencoderKlLatent, Condition, IdentityLatent, TimmEncoder
from ddm.protocol.plan import PcaEncoder as PcaSpec
from ddm.routers.sketch import Sketch

FEWEST_HELD_OUT = 20  # public images that judge and calibrate the routers


@dataclass(frozen=True)
class PublicImages:
    """The public images, divided.

    Attributes:
        fitted: those that encoder, clusters and sketch are fitted on, shape (N, C, H, W).
        holdout: those kept back to judge the routers, shape (N, C, H, W).
        latents: of the first and of the second, as experts see them; None where experts see the images themselves.
    """

    fitted: Tensor
    holdout: Tensor
    latents: tuple[Tensor, Tensor] | None = None

    @property
    def seen(self) -> Tensor:
        """What experts see of the images fitted on."""
        return self.latents[0] if self.latents else self.fitted


@dataclass(frozen=True)
class Fitted:
    """What was computed from the public images, and how the plan describes it.

    Attributes:
        images: the public images, divided.
        paths: the files that were written, relative to the plan's folder.
        encoder: the encoder, as the plan describes it.
        latent: the same of what experts see of an image.
        num_fine: number of fine centroids.
        condition: what experts are told, the encoder of texts pinned by digests.
        sketch: what routers see of an image.
        network: the encoder itself.
        clusters: the clusters themselves.
        autoencoder: the latent itself.
    """

    images: PublicImages
    paths: tuple[str, ...]
    encoder: PcaSpec | TimmEncoder
    latent: IdentityLatent | AutoencoderKlLatent
    num_fine: int
    condition: Condition
    sketch: Sketch
    network: Encoder
    clusters: Clusters
    autoencoder: Latent


def fit_public(recipe: SharedRecipe, public: Tensor, folder: Path, on_progress: Progress | None = None) -> Fitted:
    """Fit the public parts of a plan and write them into `folder`.

    Args:
        recipe: what the operator asks for.
        public: public images, shape (N, C, H, W).
        folder: where the plan's files go.
        on_progress: called with images encoded and images in all, which is long with a large network.

    Raises:
        MissingFileError: a file of weights that the recipe names is not there.
        SetupError: the folder of the text encoder that the recipe names holds none.
        TensorFileError: the autoencoder's weights are not what the recipe's sizes imply.
        DataError: too few public images for the recipe.
    """
    fitted, holdout = (public[rows] for rows in divide(len(public), recipe.public))
    condition = _condition(recipe)
    encoder, encoder_spec = _open_encoder(recipe, fitted)
    num_fine = recipe.clustering.fine_for(len(fitted), recipe.num_groups)
    latent, latent_spec, latents = _open_latent(recipe, fitted, holdout, on_progress)
    images = PublicImages(fitted, holdout, latents)
    sketch, clusters = _fit_partition(recipe, encoder, num_fine, images, folder, on_progress)
    paths = [CENTROIDS_PATH, ENCODER_PATH, SKETCH_PATH]
    if isinstance(latent, AutoencoderKl):
        save_tensors(folder / AUTOENCODER_PATH, latent.tensors())
        paths.append(AUTOENCODER_PATH)
    if recipe.base and recipe.expert.base:
        save_tensors(folder / recipe.expert.base, _open_base(recipe, recipe.base, images.seen, condition))
        paths.append(recipe.expert.base)
    return Fitted(
        images=images,
        paths=tuple(sorted(paths)),
        encoder=encoder_spec,
        latent=latent_spec,
        num_fine=num_fine,
        condition=condition,
        sketch=sketch,
        network=encoder,
        clusters=clusters,
        autoencoder=latent,
    )


def divide(num: int, settings: PublicRecipe) -> tuple[Tensor, Tensor]:
    """Return which of so many images are fitted on, and which are held out.

    Raises:
        DataError: too few to hold out.
    """
    order = torch.randperm(num, generator=torch.Generator().manual_seed(settings.seed))
    num_holdout = int(num * settings.holdout_share)
    if num_holdout < FEWEST_HELD_OUT:
        expected = f"at least {FEWEST_HELD_OUT} to hold out, by public.holdout_share"
        remedy = "Give more public images, or raise public.holdout_share in the recipe."
        raise DataError("public images", expected=expected, got=f"{num_holdout} of {num}", remedy=remedy)
    return order[num_holdout:], order[:num_holdout]


def _condition(recipe: SharedRecipe) -> Condition:
    """Return what experts are told, the encoder of texts pinned by the digests of its files."""
    condition = recipe.condition
    if not isinstance(condition, TextRecipe):
        return condition
    from ddm.encoders.text import pin  # takes seconds, and most recipes do without

    return pin(Path(condition.encoder), max_tokens=condition.max_tokens, drop=condition.drop)


def _open_encoder(recipe: SharedRecipe, fitted: Tensor) -> tuple[Encoder, PcaSpec | TimmEncoder]:
    """Fit or load the encoder, and describe it for the plan."""
    wanted = recipe.encoder
    if isinstance(wanted, PcaRecipe):
        return PcaEncoder.fit(fitted, wanted.dim), PcaSpec(path=ENCODER_PATH, dim=wanted.dim)
    from ddm.encoders.timm import TimmEncoder as Network  # takes seconds, and most recipes do without

    if wanted.weights is None:
        network = Network.random(wanted.model, recipe.data, wanted.seed, wanted.image_size)
    else:
        weights = require_file(Path(wanted.weights), f"the weights of {wanted.model}")
        network = Network.from_file(wanted.model, weights, recipe.data, wanted.image_size)
    return network, network.spec


def _open_latent(
    recipe: SharedRecipe, fitted: Tensor, holdout: Tensor, on_progress: Progress | None
) -> tuple[Latent, IdentityLatent | AutoencoderKlLatent, tuple[Tensor, Tensor] | None]:
    """Open the autoencoder, measure how wide its latents are on the images that the plan is fitted on, encode all."""
    wanted = recipe.latent
    if not isinstance(wanted, AutoencoderKlRecipe):
        return Identity(), wanted, None
    weights = require_file(Path(wanted.weights), "the weights of the autoencoder")
    opened = open_weights(weights, wanted, recipe.data.shape)
    raw_fitted, raw_holdout = opened.encode(fitted, on_progress), opened.encode(holdout, on_progress)
    scale = spread(raw_fitted)
    sizes = {name: getattr(wanted, name) for name in AutoencoderSize.model_fields}
    return opened, AutoencoderKlLatent(**sizes, scale=scale), (raw_fitted / scale, raw_holdout / scale)


def _open_base(recipe: SharedRecipe, weights: str, seen: Tensor, condition: Condition) -> dict[str, Tensor]:
    """Load the public expert that training starts from; it must be what the recipe wants trained."""
    path = require_file(Path(weights), "the public expert that training starts from")
    specs = expected_tensors(recipe.expert.architecture, tuple(seen.shape[1:]), condition)
    return load_tensors(path, specs, max_bytes=path.stat().st_size, max_abs=MAX_WEIGHT)


def _fit_partition(
    recipe: SharedRecipe,
    encoder: Encoder,
    num_fine: int,
    images: PublicImages,
    folder: Path,
    on_progress: Progress | None,
) -> tuple[Sketch, Clusters]:
    """Fit clusters on features of images, and the sketch on what experts see of them; write both and the encoder."""
    clustering, num_groups = recipe.clustering, recipe.num_groups
    features = encoder.encode(images.fitted, on_progress)
    clusters = fit_clustering(
        features, num_fine, clustering.num_coarse, num_groups, seed=recipe.public.seed, balanced=clustering.balanced
    )
    group_N = clusters.group_F[clusters.assign(features)]
    sketch = Sketch.fit(images.seen, group_N, recipe.sketch.rank, num_groups, released_rank=recipe.released_rank)
    for path, part in ((ENCODER_PATH, encoder), (CENTROIDS_PATH, clusters), (SKETCH_PATH, sketch)):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        save_tensors(folder / path, part.tensors())
    return sketch, clusters
