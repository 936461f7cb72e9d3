"""Opens what a recipe names on this machine: the weights of encoder, autoencoder, text encoder and public expert."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import assert_never

import torch
from torch import Tensor

from ddm.encoders import Encoder
from ddm.encoders.autoencoder import AutoencoderKl, open_published, open_weights
from ddm.errors import ArchipelagoError, MissingFileError, SetupError, ShapeError
from ddm.io.files import require_file
from ddm.io.tensors import save_tensors
from ddm.planning.bases import BaseSource, BaseSpace, OpenedBase, open_base
from ddm.planning.recipe import (
    AutoencoderKlRecipe,
    DiffusersKlRecipe,
    SharedRecipe,
    TextRecipe,
    TimmRecipe,
)
from ddm.protocol.architecture import Condition
from ddm.protocol.base import sha256_file
from ddm.protocol.encoder import EncoderSpec
from ddm.protocol.latent import (
    AutoencoderKlLatent,
    AutoencoderSize,
    DiffusersKlLatent,
    IdentityLatent,
    LatentSpec,
)
from ddm.protocol.plan import Plan


@dataclass(frozen=True)
class OpenedEncoder:
    """An encoder of images whose weights are not fitted on the public images.

    Attributes:
        network: the encoder.
        spec: how a plan describes it.
    """

    network: Encoder
    spec: EncoderSpec


@dataclass(frozen=True)
class OwnAutoencoder:
    """An autoencoder whose latents are scaled when the plan is fitted.

    Attributes:
        network: at scale 1.
        size: what the recipe says about it.
    """

    network: AutoencoderKl
    size: AutoencoderKlRecipe

    def spec(self, scale: float) -> AutoencoderKlLatent:
        """Return how a plan describes it at this scale."""
        sizes = {name: getattr(self.size, name) for name in AutoencoderSize.model_fields}
        return AutoencoderKlLatent(**sizes, scale=scale)


@dataclass(frozen=True)
class PublishedAutoencoder:
    """A published autoencoder, which brings its own scale.

    Attributes:
        network: the autoencoder.
        spec: how a plan describes it.
        weights: the file as it was published, which becomes a file of the plan.
        digest: sha256 of the bytes that the network was built from.
    """

    network: AutoencoderKl
    spec: DiffusersKlLatent
    weights: Path
    digest: str


@dataclass(frozen=True)
class RecipeNetworks:
    """The networks that a recipe names, opened and tried.

    Attributes:
        condition: what experts are conditioned on, the encoder of texts pinned by the digests of its files.
        encoder: of images; None where it is fitted on the public images.
        autoencoder: None where experts see the images themselves.
        base: the public expert that training starts from; None where it starts from random weights.
    """

    condition: Condition
    encoder: OpenedEncoder | None
    autoencoder: OwnAutoencoder | PublishedAutoencoder | None
    base: OpenedBase | None


def open_networks(recipe: SharedRecipe, released_base: BaseSource | None = None) -> RecipeNetworks:
    """Open every file and folder that a recipe names, before images are read and encoded, which is the long part.

    Args:
        recipe: what the operator asks for.
        released_base: the base of a recipe that names a release, which the aggregator has verified.

    Raises:
        MissingFileError: a file of weights that the recipe names is not there.
        SetupError: the folder of the text encoder, or of the autoencoder, that the recipe names holds none; or a
            network of the recipe fails on an image, by the field that names it.
        TensorFileError: the weights of the autoencoder, or of the base, are not what the recipe implies.
    """
    condition = condition_of(recipe)
    encoder = _open_encoder(recipe)
    autoencoder = _open_autoencoder(recipe)
    base = None
    if recipe.base is not None:
        expert_shape = shape_after(autoencoder, recipe.data.shape)
        space = _space_of(recipe, condition, autoencoder)
        base = open_base(recipe, expert_shape, space, released_base)
    return RecipeNetworks(condition, encoder, autoencoder, base)


def _space_of(
    recipe: SharedRecipe,
    condition: Condition,
    autoencoder: OwnAutoencoder | PublishedAutoencoder | None,
) -> BaseSpace:
    """Return the space of the recipe's experts; the scale of an own autoencoder is fitted later, and 1 here."""
    digest = autoencoder_digest(autoencoder)
    latent: LatentSpec
    match autoencoder:
        case None:
            latent = IdentityLatent()
        case OwnAutoencoder():
            latent = autoencoder.spec(1.0)
        case PublishedAutoencoder():
            latent = autoencoder.spec
        case _:
            assert_never(autoencoder)
    return BaseSpace(latent, digest, condition, recipe.data.range)


def autoencoder_digest(
    autoencoder: OwnAutoencoder | PublishedAutoencoder | None,
) -> str | None:
    """Return sha256 of the autoencoder's weights as a plan has them; None on pixels."""
    match autoencoder:
        case None:
            return None
        case PublishedAutoencoder():
            return autoencoder.digest
        case OwnAutoencoder():
            return _digest_in_plan(autoencoder.network.tensors())
        case _:
            assert_never(autoencoder)


def recipe_autoencoder_digest(recipe: SharedRecipe) -> str | None:
    """Return sha256 of the weights of a recipe's autoencoder as a plan has them; None where it names none.

    Raises:
        MissingFileError, SetupError, TensorFileError: see `open_networks`.
    """
    return autoencoder_digest(_open_autoencoder(recipe))


def recipe_encoder_digest(recipe: SharedRecipe) -> str | None:
    """Return sha256 of the weights of a recipe's encoder as a plan has them; None where a plan fits it.

    Raises:
        MissingFileError, SetupError, TensorFileError: see `open_networks`.
    """
    encoder = _open_encoder(recipe)
    if encoder is None:
        return None
    return _digest_in_plan(encoder.network.tensors())


def _digest_in_plan(tensors: dict[str, Tensor]) -> str:
    """Return sha256 of the file that a plan has of these tensors."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "weights.safetensors"
        save_tensors(path, tensors)
        return sha256_file(path)


def shape_after(
    autoencoder: OwnAutoencoder | PublishedAutoencoder | None, shape: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the shape of a sample as experts see it, of images of this shape."""
    match autoencoder:
        case None:
            return shape
        case OwnAutoencoder():
            # The scale that is fitted later has no part in the shape.
            return autoencoder.spec(1.0).shape(shape)
        case PublishedAutoencoder():
            return autoencoder.spec.shape(shape)
        case _:
            assert_never(autoencoder)


def open_networks_beside(
    recipe: SharedRecipe,
    plan: Plan,
    released_base: BaseSource | None = None,
) -> RecipeNetworks:
    """Open what a recipe names beside encoder and autoencoder, which an earlier plan provides.

    Args:
        recipe: what the operator asks for.
        plan: the earlier plan.
        released_base: see `open_networks`.

    Raises:
        MissingFileError, SetupError, TensorFileError: see `open_networks`.
    """
    condition = condition_of(recipe)
    space = replace(BaseSpace.of_plan(plan), condition=condition)
    base = open_base(recipe, plan.expert_shape, space, released_base)
    return RecipeNetworks(condition, encoder=None, autoencoder=None, base=base)


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


def _open_encoder(recipe: SharedRecipe) -> OpenedEncoder | None:
    chosen = recipe.encoder
    if not isinstance(chosen, TimmRecipe):
        return None
    from ddm.encoders.timm import TimmEncoder  # takes seconds, and most recipes do without

    if chosen.weights is None:
        network = TimmEncoder.random(chosen.model, recipe.data, chosen.seed, chosen.image_size)
    else:
        weights = require_file(Path(chosen.weights), f"the weights of {chosen.model}")
        network = TimmEncoder.from_file(chosen.model, weights, recipe.data, chosen.image_size)
    return OpenedEncoder(network, network.spec)


def _open_autoencoder(recipe: SharedRecipe) -> OwnAutoencoder | PublishedAutoencoder | None:
    chosen = recipe.latent
    shape = recipe.data.shape
    match chosen:
        case IdentityLatent():
            return None
        case DiffusersKlRecipe():
            return _open_published(chosen, shape)
        case AutoencoderKlRecipe():
            # The operator may name a link, which the readers of files refuse.
            weights = require_file(Path(chosen.weights), "the weights of the autoencoder").resolve()
            with name_recipe_field("latent", shape):
                network = open_weights(weights, chosen, shape)
                # One image alone, so that a network that does not fit fails before all images are encoded.
                network.for_single_samples().encode(torch.zeros(1, *shape))
            return OwnAutoencoder(network, chosen)
        case _:
            assert_never(chosen)


def _open_published(chosen: DiffusersKlRecipe, shape: tuple[int, ...]) -> PublishedAutoencoder:
    """Open an autoencoder in the layout of diffusers, and try it on one image."""
    # takes seconds, and most recipes do without
    from ddm.encoders.public_autoencoder import describe

    spec, weights = describe(Path(chosen.folder), shape, chosen.tile)
    # The plan lists a copy of this file: both must be the bytes that encode the images.
    digest = sha256_file(weights)
    with name_recipe_field("latent", shape):
        network = open_published(
            weights, spec, shape, max_bytes=weights.stat().st_size, digest=digest
        )
        network.encode(torch.zeros(1, *shape))
    return PublishedAutoencoder(network, spec, weights, digest)


@contextmanager
def name_recipe_field(field: str, shape: tuple[int, ...]) -> Iterator[None]:
    """Let the failure of a network on an image of this shape name the field of the recipe that chose the network.

    Raises:
        SetupError: in place of a shape that does not fit, and of whatever a library raises.
    """
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
