"""Fit what a plan makes public: the encoder, the latents, the clusters and the sketch, all from public images."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

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
    AutoencoderKlRecipe,
    DiffusersKlRecipe,
    HogRecipe,
    PcaRecipe,
    PublicRecipe,
    SharedRecipe,
    TextRecipe,
    TimmRecipe,
)
from ddm.protocol.architecture import Condition
from ddm.protocol.encoder import Encoder as EncoderSpec
from ddm.protocol.encoder import HogEncoderSpec, PcaEncoderSpec
from ddm.protocol.latent import (
    AUTOENCODER_PATH,
    Autoencoder,
    AutoencoderKlLatent,
    AutoencoderSize,
    IdentityLatent,
)
from ddm.routers.sketch import Sketch

MIN_HELD_OUT = 20  # public images that judge and calibrate the routers


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


@dataclass(frozen=True)
class _LatentPart:
    """The space that experts work in.

    Attributes:
        latent: encodes images.
        spec: how the plan describes it.
        latents: of the images fitted on and of those held out; None where experts see the images themselves.
    """

    latent: Latent
    spec: IdentityLatent | Autoencoder
    latents: tuple[Tensor, Tensor] | None


def fit_public_parts(
    recipe: SharedRecipe, public: Tensor, folder: Path, on_progress: Progress | None = None
) -> PublicParts:
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
    fitted_rows, holdout_rows = divide(len(public), recipe.public)
    fitted = public[fitted_rows]
    holdout = public[holdout_rows]
    # Files and folders that the recipe names are opened before the long part, the encoding of images.
    condition = condition_of(recipe)
    encoder, encoder_spec = _open_encoder(recipe, fitted)
    part = _encode_latents(recipe, fitted, holdout, folder, on_progress)
    images = PublicImages(fitted, holdout, part.latents)

    # Clusters and sketch are public: they are fitted on public images alone, and cost no privacy.
    features = encoder.encode(fitted, on_progress)
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
        images.seen,
        clusters.group_F[clusters.assign(features)],
        recipe.sketch.rank,
        recipe.num_groups,
        released_rank=recipe.released_rank,
    )
    tensors_of = {
        ENCODER_PATH: encoder.tensors(),
        CENTROIDS_PATH: clusters.tensors(),
        SKETCH_PATH: sketch.tensors(),
    }
    for path, tensors in tensors_of.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        save_tensors(folder / path, tensors)

    paths = [*tensors_of, *write_base(recipe, images, condition, folder)]
    if part.latents is not None:
        paths.append(AUTOENCODER_PATH)
    return PublicParts(
        images=images,
        paths=tuple(sorted(paths)),
        encoder=encoder_spec,
        latent=part.spec,
        num_fine=num_fine,
        condition=condition,
        sketch=sketch,
        network=encoder,
        clusters=clusters,
        autoencoder=part.latent,
    )


def divide(num: int, settings: PublicRecipe) -> tuple[Tensor, Tensor]:
    """Return which of so many images are fitted on, and which are held out.

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


def condition_of(recipe: SharedRecipe) -> Condition:
    """Return what experts are conditioned on, the encoder of texts pinned by the digests of its files."""
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
    chosen = recipe.encoder
    match chosen:
        case PcaRecipe():
            encoder = PcaEncoder.fit(fitted, chosen.dim)
            return encoder, PcaEncoderSpec(path=ENCODER_PATH, dim=chosen.dim)
        case HogRecipe():
            cells = chosen.cells
            mirrored = chosen.mirrored
            spec = HogEncoderSpec(path=ENCODER_PATH, dim=chosen.dim, cells=cells, mirrored=mirrored)
            with _network_of("encoder.cells", recipe):
                return HogEncoder.fit(fitted, chosen.dim, cells=cells, mirrored=mirrored), spec
        case TimmRecipe():
            from ddm.encoders.timm import TimmEncoder  # takes seconds, and most recipes do without

            size = chosen.image_size
            if chosen.weights is None:
                network = TimmEncoder.random(chosen.model, recipe.data, chosen.seed, size)
            else:
                weights = require_file(Path(chosen.weights), f"the weights of {chosen.model}")
                network = TimmEncoder.from_file(chosen.model, weights, recipe.data, size)
            return network, network.spec
        case _:
            assert_never(chosen)


def _encode_latents(
    recipe: SharedRecipe,
    fitted: Tensor,
    holdout: Tensor,
    folder: Path,
    on_progress: Progress | None,
) -> _LatentPart:
    """Open the autoencoder if there is one, encode all images, and write its weights where the plan has them."""
    chosen = recipe.latent
    match chosen:
        case IdentityLatent():
            return _LatentPart(Identity(), chosen, None)
        case DiffusersKlRecipe():
            published, spec = _open_published(chosen, recipe, fitted, folder)
            fitted_latents = published.encode(fitted, on_progress)
            holdout_latents = published.encode(holdout, on_progress)
            return _LatentPart(published, spec, (fitted_latents, holdout_latents))
        case AutoencoderKlRecipe():
            weights = require_file(Path(chosen.weights), "the weights of the autoencoder")
            with _network_of("latent", recipe):
                autoencoder = open_weights(weights, chosen, recipe.data.shape)
                # One image first, so that a network that does not fit fails before all images are encoded.
                autoencoder.alone().encode(fitted[:1])
            fitted_latents = autoencoder.encode(fitted, on_progress)
            holdout_latents = autoencoder.encode(holdout, on_progress)
            # Experts see latents as wide as the noise: divided by their spread on the images that the plan is
            # fitted on. A published autoencoder brings its own factors instead.
            scale = spread(fitted_latents)
            autoencoder.scale = scale
            (folder / AUTOENCODER_PATH).parent.mkdir(parents=True, exist_ok=True)
            save_tensors(folder / AUTOENCODER_PATH, autoencoder.tensors())
            sizes = {name: getattr(chosen, name) for name in AutoencoderSize.model_fields}
            latents = (fitted_latents / scale, holdout_latents / scale)
            return _LatentPart(autoencoder, AutoencoderKlLatent(**sizes, scale=scale), latents)
        case _:
            assert_never(chosen)


def _open_published(
    chosen: DiffusersKlRecipe, recipe: SharedRecipe, fitted: Tensor, folder: Path
) -> tuple[Latent, Autoencoder]:
    """Copy a published autoencoder into the plan's folder, open it, and try it on a first image."""
    # takes seconds, and most recipes do without
    from ddm.encoders.public_autoencoder import describe

    spec, weights = describe(Path(chosen.folder), recipe.data.shape, chosen.tile)
    target = folder / AUTOENCODER_PATH
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as copy, weights.open("rb") as published_file:
        shutil.copyfileobj(published_file, copy)
    with _network_of("latent", recipe):
        published = open_latent(spec, recipe.data.shape, None, folder)
        published.encode(fitted[:1])
    return published, spec


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
    # torch, MONAI and diffusers raise all kinds of errors for sizes that do not fit.
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
    tensors = _open_base(recipe, recipe.base, images.seen, condition)
    save_tensors(folder / recipe.expert.base, tensors)
    return [recipe.expert.base]


def _open_base(
    recipe: SharedRecipe, weights: str, seen: Tensor, condition: Condition
) -> dict[str, Tensor]:
    """Load the public expert that training starts from; it must be what the recipe wants trained."""
    path = require_file(Path(weights), "the public expert that training starts from")
    # The operator's own file: its names, shapes and values are checked, and its size needs no bound.
    specs = expected_tensors(recipe.expert.architecture, tuple(seen.shape[1:]), condition)
    return load_tensors(path, specs, max_bytes=path.stat().st_size, max_abs=MAX_WEIGHT)
