"""Fit what a plan makes public: the encoder, the latents, the clusters and the sketch, all from public images."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ddm.encoders import Encoder, HogEncoder, PcaEncoder, Progress
from ddm.encoders.autoencoder import Identity, Latent, open_latent, open_weights, spread
from ddm.errors import ArchipelagoError, DataError, MissingFileError, SetupError, ShapeError
from ddm.io.files import replacing, require_file
from ddm.io.tensors import load_tensors, save_tensors
from ddm.loading.plan import CENTROIDS_PATH, ENCODER_PATH, SKETCH_PATH
from ddm.models import MAX_WEIGHT, expected_tensors
from ddm.partition.clustering import Clusters, fit_clustering
from ddm.planning.recipe import (
    DiffusersKlRecipe,
    HogRecipe,
    PcaRecipe,
    PublicRecipe,
    SharedRecipe,
    TextRecipe,
)
from ddm.protocol.architecture import Condition
from ddm.protocol.encoder import Encoder as EncoderSpec
from ddm.protocol.encoder import HogEncoder as HogSpec
from ddm.protocol.encoder import PcaEncoder as PcaSpec
from ddm.protocol.latent import (
    AUTOENCODER_PATH,
    Autoencoder,
    AutoencoderKlLatent,
    AutoencoderSize,
    IdentityLatent,
)
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
    encoder: EncoderSpec
    latent: IdentityLatent | Autoencoder
    num_fine: int
    condition: Condition
    sketch: Sketch
    network: Encoder
    clusters: Clusters
    autoencoder: Latent


def fit_public(
    recipe: SharedRecipe, public: Tensor, folder: Path, on_progress: Progress | None = None
) -> Fitted:
    """Fit the public parts of a plan and write them into `folder`.

    Args:
        recipe: what the operator asks for.
        public: public images, shape (N, C, H, W).
        folder: where the plan's files go.
        on_progress: called with images encoded and images in all, which is long with a large network.

    Raises:
        MissingFileError: a file of weights that the recipe names is not there.
        SetupError: the folder of the text encoder, or of the autoencoder, that the recipe names holds none; or a
            network of the recipe fails on these images, by the field that names it.
        TensorFileError: the autoencoder's weights are not what the recipe's sizes imply.
        DataError: too few public images for the recipe.
    """
    fitted, holdout = (public[rows] for rows in divide(len(public), recipe.public))
    condition = condition_of(recipe)
    encoder, encoder_spec = _open_encoder(recipe, fitted)
    num_fine = recipe.clustering.fine_for(len(fitted), recipe.num_groups)
    latent, latent_spec, latents = _encode(recipe, fitted, holdout, folder, on_progress)
    images = PublicImages(fitted, holdout, latents)
    sketch, clusters = _fit_partition(recipe, encoder, num_fine, images, folder, on_progress)
    paths = [CENTROIDS_PATH, ENCODER_PATH, SKETCH_PATH]
    if latents is not None:
        paths.append(AUTOENCODER_PATH)
    paths += write_base(recipe, images, condition, folder)
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
        raise DataError(
            "public images", expected=expected, got=f"{num_holdout} of {num}", remedy=remedy
        )
    return order[num_holdout:], order[:num_holdout]


def condition_of(recipe: SharedRecipe) -> Condition:
    """Return what experts are told, the encoder of texts pinned by the digests of its files."""
    condition = recipe.condition
    if not isinstance(condition, TextRecipe):
        return condition
    from ddm.encoders.text import pin  # takes seconds, and most recipes do without

    try:
        return pin(Path(condition.encoder), max_tokens=condition.max_tokens, drop=condition.drop)
    except MissingFileError:
        raise
    except SetupError as error:
        subject = f"recipe, condition.encoder: {error.subject}"
        raise SetupError(
            subject, expected=error.expected, got=error.got, remedy=error.remedy
        ) from error


def _open_encoder(recipe: SharedRecipe, fitted: Tensor) -> tuple[Encoder, EncoderSpec]:
    """Fit or load the encoder, and describe it for the plan."""
    wanted = recipe.encoder
    if isinstance(wanted, PcaRecipe):
        return PcaEncoder.fit(fitted, wanted.dim), PcaSpec(path=ENCODER_PATH, dim=wanted.dim)
    if isinstance(wanted, HogRecipe):
        spec = HogSpec(
            path=ENCODER_PATH, dim=wanted.dim, cells=wanted.cells, mirrored=wanted.mirrored
        )
        with _network_of("encoder.cells", recipe):
            return HogEncoder.fit(
                fitted, wanted.dim, cells=wanted.cells, mirrored=wanted.mirrored
            ), spec
    from ddm.encoders.timm import (
        TimmEncoder as Network,  # takes seconds, and most recipes do without
    )

    if wanted.weights is None:
        network = Network.random(wanted.model, recipe.data, wanted.seed, wanted.image_size)
    else:
        weights = require_file(Path(wanted.weights), f"the weights of {wanted.model}")
        network = Network.from_file(wanted.model, weights, recipe.data, wanted.image_size)
    return network, network.spec


def _encode(
    recipe: SharedRecipe,
    fitted: Tensor,
    holdout: Tensor,
    folder: Path,
    on_progress: Progress | None,
) -> tuple[Latent, IdentityLatent | Autoencoder, tuple[Tensor, Tensor] | None]:
    """Open the autoencoder if there is one, encode all images, and write its weights where the plan has them.

    Latents of MONAI's are divided by how wide they are on the images that the plan is fitted on; a published one brings
    its factors along.
    """
    wanted, target = recipe.latent, folder / AUTOENCODER_PATH
    if isinstance(wanted, IdentityLatent):
        return Identity(), wanted, None
    target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(wanted, DiffusersKlRecipe):
        from ddm.encoders.public_autoencoder import (
            describe,  # takes seconds, and most recipes do without
        )

        spec, weights = describe(Path(wanted.folder), recipe.data.shape, wanted.tile)
        with replacing(target) as copy, weights.open("rb") as published_file:
            shutil.copyfileobj(published_file, copy)
        with _network_of("latent", recipe):
            published = open_latent(spec, recipe.data.shape, None, folder)
            published.encode(fitted[:1])
        return (
            published,
            spec,
            (published.encode(fitted, on_progress), published.encode(holdout, on_progress)),
        )
    autoencoder_path = require_file(Path(wanted.weights), "the weights of the autoencoder")
    with _network_of("latent", recipe):
        opened = open_weights(autoencoder_path, wanted, recipe.data.shape)
        opened.alone().encode(fitted[:1])
    raw_fitted, raw_holdout = (
        opened.encode(fitted, on_progress),
        opened.encode(holdout, on_progress),
    )
    scale = spread(raw_fitted)
    sizes = {name: getattr(wanted, name) for name in AutoencoderSize.model_fields}
    save_tensors(target, opened.tensors())
    opened.scale = scale  # from here on as the plan has it
    return (
        opened,
        AutoencoderKlLatent(**sizes, scale=scale),
        (raw_fitted / scale, raw_holdout / scale),
    )


@contextmanager
def _network_of(field: str, recipe: SharedRecipe) -> Iterator[None]:
    """Let the failure of a network on a first image name the field of the recipe that chose the network.

    Raises:
        SetupError: in place of a shape that does not fit, and of whatever a library raises.
    """
    shape = recipe.data.shape
    try:
        yield
    except ShapeError as error:
        raise SetupError(
            f"recipe, {field}", expected=error.expected, got=f"data.shape {shape}"
        ) from error
    except (ArchipelagoError, ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    # torch, MONAI and diffusers raise all kinds of errors for sizes that do not fit
    except Exception as error:
        got = " ".join(f"one that fails, {type(error).__name__}: {error}".split())[:200]
        raise SetupError(
            f"recipe, {field}", expected=f"a network that takes images {shape}", got=got
        ) from error


def write_base(
    recipe: SharedRecipe, images: PublicImages, condition: Condition, folder: Path
) -> list[str]:
    """Write the public expert that training starts from, if the recipe names one, and return its path in the plan."""
    if not (recipe.base and recipe.expert.base):
        return []
    save_tensors(
        folder / recipe.expert.base, _open_base(recipe, recipe.base, images.seen, condition)
    )
    return [recipe.expert.base]


def _open_base(
    recipe: SharedRecipe, weights: str, seen: Tensor, condition: Condition
) -> dict[str, Tensor]:
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
        features,
        num_fine,
        clustering.num_coarse,
        num_groups,
        seed=recipe.public.seed,
        balanced=clustering.balanced,
    )
    group_N = clusters.group_F[clusters.assign(features)]
    sketch = Sketch.fit(
        images.seen, group_N, recipe.sketch.rank, num_groups, released_rank=recipe.released_rank
    )
    for path, part in ((ENCODER_PATH, encoder), (CENTROIDS_PATH, clusters), (SKETCH_PATH, sketch)):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        save_tensors(folder / path, part.tensors())
    return sketch, clusters
