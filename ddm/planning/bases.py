"""Opens the base that a recipe names, fits it to the plan's network, and states where it comes from."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import assert_never

from pydantic import ValidationError
from torch import Tensor

from ddm.errors import DocumentError, SetupError
from ddm.io.files import read_bounded, require_file
from ddm.io.settings import first_message
from ddm.io.tensors import load_tensors
from ddm.models import MAX_WEIGHT
from ddm.models.base_weights import BaseWeights, fit_base, num_input_channels
from ddm.models.diffusers_configs import (
    CONFIG_NAME,
    DiffusersClass,
    NetworkConfig,
    parse_config,
)
from ddm.models.diffusers_weights import weights_of
from ddm.planning.recipe import (
    BaseRecipe,
    DiffusersBaseRecipe,
    FileBaseRecipe,
    ReleaseBaseRecipe,
    SeedBaseRecipe,
    SharedRecipe,
    TrainedBaseRecipe,
)
from ddm.planning.trained_base import CARD_NAME, WEIGHTS_NAME, TrainedBaseCard, images_digest
from ddm.protocol.architecture import (
    Architecture,
    ClassCondition,
    Condition,
    GridSize,
    Shape,
    TextCondition,
)
from ddm.protocol.base import MAX_DOCUMENT_BYTES, check_json, sha256_file
from ddm.protocol.bases import (
    Base,
    ExpertBase,
    FileBase,
    StudentBase,
    TrainedBase,
    licence_misfit,
)
from ddm.protocol.latent import Autoencoder, AutoencoderKlLatent, DiffusersKlLatent, LatentSpec
from ddm.protocol.learning import Expert, ExpertObjective
from ddm.protocol.plan import Plan

_DIFFUSERS_WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
_MAX_CONFIG_BYTES = 1 << 16
_MAX_NAMES = 300
# Scales of latents that differ by less are taken for equal.
_SAME_SCALE = 0.01
_FLOATS = ("torch.float32", "torch.float16", "torch.bfloat16", "torch.float64")
_DIFFUSERS_OBJECTIVE = ExpertObjective(path="ddpm_linear", prediction="eps")


@dataclass(frozen=True)
class BaseSpace:
    """The space in which experts learn, and their condition: what weights mean beside their objective.

    Attributes:
        latent: pixels, or latents of an autoencoder.
        autoencoder: sha256 of the autoencoder's weights; None on pixels.
        condition: what experts are conditioned on.
        data_range: the lowest and highest value of an image.
    """

    latent: LatentSpec
    autoencoder: str | None
    condition: Condition
    data_range: tuple[float, float]

    @classmethod
    def of_plan(cls, plan: Plan) -> "BaseSpace":
        """Return the space of a plan's experts."""
        autoencoder = None
        if isinstance(plan.latent, Autoencoder):
            autoencoder = plan.file(plan.latent.path).digest
        return cls(plan.latent, autoencoder, plan.condition, plan.data.range)

    def compare(self, other: "BaseSpace") -> tuple[str, ...]:
        """Compare the space of a base with that of the experts that start from it.

        The scale of an autoencoder that the plan fits is compared by `describe_scale`, once it is known.

        Returns:
            Differences that training corrects, in words.

        Raises:
            SetupError: another autoencoder, other classes under the same numbers, or texts of another encoder.
        """
        self._check_latents(other)
        self._check_classes(other)
        self._check_text_encoder(other)
        if self.data_range == other.data_range:
            return ()
        old_range = "{:g} to {:g}".format(*self.data_range)
        new_range = "{:g} to {:g}".format(*other.data_range)
        return (f"images with values from {new_range} instead of {old_range}",)

    def _check_latents(self, other: "BaseSpace") -> None:
        if self.autoencoder != other.autoencoder:
            raise SetupError(
                "recipe, latent",
                expected=_autoencoder_words(self.autoencoder) + ", as the base learned them",
                got=_autoencoder_words(other.autoencoder),
                remedy="Latents of another autoencoder are noise to the base: use the same, or another base.",
            )
        if not isinstance(self.latent, DiffusersKlLatent) or not isinstance(
            other.latent, DiffusersKlLatent
        ):
            return
        old_factors = (self.latent.scaling_factor, self.latent.shift_factor)
        new_factors = (other.latent.scaling_factor, other.latent.shift_factor)
        if old_factors != new_factors:
            raise SetupError(
                "recipe, latent.folder",
                expected="scaling_factor {:g} and shift_factor {:g}, as the base learned".format(
                    *old_factors
                ),
                got="{:g} and {:g}".format(*new_factors),
                remedy="Use the config.json of the autoencoder that the base was trained with.",
            )

    def _check_classes(self, other: "BaseSpace") -> None:
        if not isinstance(self.condition, ClassCondition) or not isinstance(
            other.condition, ClassCondition
        ):
            return
        old_names = self.condition.names
        new_names = other.condition.names[: len(old_names)]
        if old_names and new_names and old_names != new_names:
            raise SetupError(
                "recipe, condition.names",
                expected=f"first those of the base, in its order: {', '.join(old_names)}"[
                    :_MAX_NAMES
                ],
                got=", ".join(new_names)[:_MAX_NAMES],
                remedy="Number the classes as the base does; new ones come after its own.",
            )

    def _check_text_encoder(self, other: "BaseSpace") -> None:
        if not isinstance(self.condition, TextCondition) or not isinstance(
            other.condition, TextCondition
        ):
            return
        # Embeddings of equal width fit the layers of the base, and mean something else to them.
        if _encoder_digests(self.condition) != _encoder_digests(other.condition):
            raise SetupError(
                "recipe, condition.encoder",
                expected=f"the encoder of the base's texts, {_encoder_words(self.condition)}",
                got=_encoder_words(other.condition),
                remedy="Texts of another encoder are noise to the base: use the same, or another base.",
            )

    def describe_scale(self, latent: LatentSpec) -> tuple[str, ...]:
        """Return in words by how much a plan scales the same latents differently, if it does."""
        if not isinstance(self.latent, AutoencoderKlLatent) or not isinstance(
            latent, AutoencoderKlLatent
        ):
            return ()
        if isclose(self.latent.scale, latent.scale, rel_tol=_SAME_SCALE):
            return ()
        return (f"latents divided by {latent.scale:.4g} instead of {self.latent.scale:.4g}",)


def _autoencoder_words(digest: str | None) -> str:
    if digest is None:
        return "pixels"
    return f"latents of the autoencoder of sha256 {digest[:16]}"


def _encoder_digests(condition: TextCondition) -> frozenset[tuple[str, str]] | None:
    """Return the files of an encoder; its folder may have another name."""
    if condition.encoder is None:
        return None
    return frozenset((file.path, file.digest) for file in condition.encoder.files)


def _encoder_words(condition: TextCondition) -> str:
    if condition.encoder is None:
        return "vectors of an unknown encoder"
    weights = max(condition.encoder.files, key=lambda file: file.bytes)
    return f"{condition.encoder.name}, {weights.path} of sha256 {weights.digest[:16]}"


@dataclass(frozen=True)
class BaseSource:
    """A base as it was found, before it is fitted to a plan.

    Attributes:
        weights: its weights.
        grid: the grid of patches whose places it knows; None for a network without patches, or where nobody stated it.
        origin: where it comes from.
        licence: the licence of the base.
        num_images: how many images it was trained on; None where nobody knows.
        objective: what it was trained for.
        space: what its weights mean beside that; None where nobody stated it.
        source: what it is, in the operator's words.
        public_digest: sha256 of the public images that it learned, as a plan reads them; None unless it was trained on
            these.
        architecture: its own; None where nobody stated it, or where the recipe's was compared as it was read.
    """

    weights: BaseWeights
    grid: GridSize | None
    origin: FileBase | TrainedBase | ExpertBase | StudentBase
    licence: str
    num_images: int | None
    objective: ExpertObjective
    space: BaseSpace | None = None
    source: str | None = None
    public_digest: str | None = None
    architecture: Architecture | None = None

    def check_architecture(self, architecture: Architecture) -> None:
        """Refuse a recipe's architecture other than the base's own.

        Tensors do not show all of it: with another number of heads they have the same names and shapes, and another
        meaning. `position_grid` may differ, since positions are computed and `OpenedBase.fit_positions` places them.

        Raises:
            SetupError: a field differs; it is named.
        """
        if self.architecture is None:
            return
        fields_of_base = self.architecture.model_dump(exclude={"position_grid"})
        fields_of_recipe = architecture.model_dump(exclude={"position_grid"})
        # Two kinds have other fields; `kind` is the first that differs.
        for field in ("kind", *fields_of_base):
            value_of_base = fields_of_base[field]
            value_of_recipe = fields_of_recipe[field]
            if value_of_base != value_of_recipe:
                raise SetupError(
                    f"recipe, expert.architecture.{field}",
                    expected=f"{value_of_base}, as the base has it",
                    got=f"{value_of_recipe}",
                    remedy="Give the experts the architecture of the base, or choose another base.",
                )


@dataclass(frozen=True)
class OpenedBase:
    """A base whose weights are those of the plan's network.

    Attributes:
        source: as it was found.
        tensors: the fitted weights.
        changes: what was changed, in words.
    """

    source: BaseSource
    tensors: dict[str, Tensor]
    changes: tuple[str, ...]

    def describe(self, digest: str, latent: LatentSpec) -> Base:
        """Return what a plan states of it.

        Args:
            digest: of its file in the plan.
            latent: the plan's, as it was fitted.
        """
        changes = self.changes
        if self.source.space is not None:
            changes += self.source.space.describe_scale(latent)
        return Base(
            digest=digest,
            origin=self.source.origin,
            source=self.source.source,
            licence=self.source.licence,
            num_images=self.source.num_images,
            objective=self.source.objective,
            changes=changes,
        )

    def fit_positions(self, expert: Expert, shape: Shape) -> Expert:
        """Return a plan's expert whose positions span those that the base knows, on samples of another size too."""
        if self.source.grid is None:
            return expert
        architecture = expert.architecture.spanning(self.source.grid, shape)
        return expert.model_copy(update={"architecture": architecture})


def open_base(
    recipe: SharedRecipe, expert_shape: Shape, space: BaseSpace, source: BaseSource | None
) -> OpenedBase | None:
    """Open the base that a recipe names; None for a recipe without one, or with a seed, which is trained later.

    Args:
        recipe: what the operator asks for.
        expert_shape: of a sample, as the plan's experts see it.
        space: of the plan's experts; the scale of its latents may still be open.
        source: what a release has, which the aggregator alone opens; None where the recipe names a file or folder.

    Raises:
        MissingFileError: a file that the recipe names is not there.
        SetupError: the recipe's base is not of the form that its kind says, learned in another space, or has another
            architecture.
        TensorFileError: the weights do not fit the plan's network; names the tensor.
    """
    if recipe.base is None or isinstance(recipe.base, SeedBaseRecipe):
        return None
    if source is None:
        source = _read_source(recipe.base, recipe, space.condition)
    source.check_architecture(recipe.expert.architecture)
    differences: tuple[str, ...] = ()
    if source.space is not None:
        differences = source.space.compare(space)
    fitted = fit_base(source.weights, recipe.expert.architecture, expert_shape, space.condition)
    return OpenedBase(source, fitted.tensors, fitted.changes + differences)


def check_licence(base: OpenedBase | None, release_licence: str) -> None:
    """Refuse a base whose licence a release could not keep.

    Raises:
        SetupError: on such a one.
    """
    if base is not None:
        check_base_licence(base.source.licence, release_licence)


def check_base_licence(base_licence: str, release_licence: str) -> None:
    """Refuse the licence of a base if a release could not keep it.

    Raises:
        SetupError: on such a one.
    """
    expected = licence_misfit(base_licence, release_licence)
    if expected is not None:
        raise SetupError(
            "licence of the releases",
            expected=expected,
            got=release_licence,
            remedy=(
                "Choose a base whose licence allows this, or publish under the base's licence: licence "
                "in federation.toml, or in the table [owner] of an owner's recipe."
            ),
        )


def check_held_out(base: OpenedBase | None, fitted: Tensor) -> None:
    """Refuse a base that was trained on other public images than those that the plan is fitted on.

    Images that judge routers and experts are held out from these, and another base could know them.

    Args:
        base: the plan's.
        fitted: public images, without those that are held out.

    Raises:
        SetupError: it was.
    """
    if base is None or base.source.public_digest is None:
        return
    digest = images_digest(fitted)
    if digest != base.source.public_digest:
        raise SetupError(
            "public images, for a base of the kind trained",
            expected=f"those that the base was trained on, sha256 {base.source.public_digest[:16]}",
            got=f"sha256 {digest[:16]}: other images, or another public.seed, public.holdout_share or [transform]",
            remedy="Train a base with this recipe and these images, in another folder: `aggregator base FED --recipe "
            "RECIPE --public PICTURES`. Or give the images that it learned. To use it with others, name its "
            'base.safetensors as kind = "file": nobody then checks that it never saw the images that are held out.',
        )


def _read_source(chosen: BaseRecipe, recipe: SharedRecipe, condition: Condition) -> BaseSource:
    match chosen:
        case FileBaseRecipe():
            return _read_file(chosen, recipe, condition)
        case DiffusersBaseRecipe():
            return _read_diffusers(chosen, recipe)
        case TrainedBaseRecipe():
            return _read_trained(chosen)
        case ReleaseBaseRecipe():
            raise SetupError(
                "recipe, base.kind",
                expected="file, diffusers or trained",
                got="release, which only aggregator plan opens",
            )
        case SeedBaseRecipe():
            raise SetupError(
                "recipe, base.kind",
                expected="file, diffusers or trained",
                got="seed, which ddm train trains",
            )
        case _:
            assert_never(chosen)


def _read_file(chosen: FileBaseRecipe, recipe: SharedRecipe, condition: Condition) -> BaseSource:
    # The operator may name a link, which the readers of files refuse.
    path = require_file(Path(chosen.file), "the base that training starts from").resolve()
    architecture = recipe.expert.architecture
    # The plan states this digest, so the bytes that have it must be those that become tensors.
    digest = sha256_file(path)
    tensors = read_weights(path, digest)
    grid = None
    if chosen.shape is not None:
        _check_stated_shape(chosen.shape, tensors, architecture, condition)
        grid = architecture.position_span(chosen.shape)
    return BaseSource(
        BaseWeights(tensors, chosen.shape),
        grid,
        FileBase(digest=digest),
        chosen.licence,
        chosen.num_images,
        _objective(
            chosen,
            ExpertObjective(path=recipe.objective.path, prediction=recipe.objective.prediction),
        ),
        source=chosen.source,
    )


def _check_stated_shape(
    shape: Shape, tensors: Mapping[str, Tensor], architecture: Architecture, condition: Condition
) -> None:
    """Refuse a shape that no sample of the base can have, as one with the channels last: positions follow from it.

    Raises:
        SetupError: the shape does not fit the architecture, or the first layer of the base.
    """
    expected = architecture.misfit(shape, condition)
    num_channels = num_input_channels(tensors, architecture)
    if expected is None and num_channels not in (None, shape[0]):
        expected = f"first the channels, {num_channels} as the first layer of the {architecture.kind} reads"
    if expected is not None:
        raise SetupError(
            "recipe, base.shape",
            expected=expected,
            got=f"{list(shape)}",
            remedy="State the shape of a sample of the base: its channels, then its sides. If that is what it says, "
            "the base has another patch than the recipe's architecture: state the architecture of the base.",
        )


def _objective(
    chosen: FileBaseRecipe | DiffusersBaseRecipe, default: ExpertObjective
) -> ExpertObjective:
    try:
        return ExpertObjective(
            path=chosen.path or default.path, prediction=chosen.prediction or default.prediction
        )
    except ValidationError as error:
        raise SetupError("recipe, base", got=first_message(error)) from error


def read_weights(path: Path, digest: str | None = None) -> dict[str, Tensor]:
    """Read a file of weights of any names, in float32.

    Raises:
        DigestError: other bytes than those of `digest`.
        TensorFileError: no safetensors file, a value that is not finite, or one above `MAX_WEIGHT`.
    """
    # The operator's own file: names and shapes are compared later, and its size needs no bound.
    tensors = load_tensors(
        path, None, max_bytes=path.stat().st_size, max_abs=MAX_WEIGHT, digest=digest
    )
    return {
        name: tensor.float() if str(tensor.dtype) in _FLOATS else tensor
        for name, tensor in tensors.items()
    }


def _read_diffusers(chosen: DiffusersBaseRecipe, recipe: SharedRecipe) -> BaseSource:
    folder = Path(chosen.folder)
    config_path = require_file(folder / CONFIG_NAME, "the configuration of the base")
    path = require_file(folder / _DIFFUSERS_WEIGHTS_NAME, "the weights of the base")
    # The cache of Hugging Face holds links, which the readers of files refuse.
    path = path.resolve()
    layout, config = _read_config(config_path)
    architecture = recipe.expert.architecture
    # The plan states this digest, so the bytes that have it must be those that become tensors.
    digest = sha256_file(path)
    weights = weights_of(layout, config, read_weights(path, digest), architecture)
    grid = None
    if weights.shape is not None:
        grid = architecture.position_span(weights.shape)
    default = _DIFFUSERS_OBJECTIVE
    if layout == "SD3Transformer2DModel":
        default = ExpertObjective()
    return BaseSource(
        weights,
        grid,
        FileBase(layout=layout, digest=digest),
        chosen.licence,
        chosen.num_images,
        _objective(chosen, default),
        source=chosen.source,
    )


def _read_config(path: Path) -> tuple[DiffusersClass, NetworkConfig]:
    """Read a `config.json` of diffusers.

    Raises:
        SetupError: not of a network that has a counterpart here; names the field.
    """
    subject = f"base, {path.name}"
    try:
        content = read_bounded(path.resolve(), _MAX_CONFIG_BYTES)
        values = check_json(content, subject=subject, limit=_MAX_CONFIG_BYTES)
    except DocumentError as error:
        raise SetupError(subject, expected=error.expected, got=error.got) from error
    return parse_config(values)


def _read_trained(chosen: TrainedBaseRecipe) -> BaseSource:
    folder = Path(chosen.folder)
    card_path = require_file(folder / CARD_NAME, "the card of the base")
    path = require_file(folder / WEIGHTS_NAME, "the weights of the base")
    card = TrainedBaseCard.parse(read_bounded(card_path, MAX_DOCUMENT_BYTES), subject=CARD_NAME)
    for field, stated in (("licence", chosen.licence), ("source", chosen.source)):
        in_card = getattr(card, field)
        if in_card != stated:
            raise SetupError(
                f"recipe, base.{field}",
                expected=f"{in_card or 'no source'}, with which it was trained ({card_path})",
                got=stated or "no source",
                remedy="State it as the card does, or train the base again in another folder.",
            )
    return BaseSource(
        BaseWeights(read_weights(path, card.file.digest), card.shape),
        card.architecture.position_span(card.shape),
        TrainedBase(digest=card.file.digest, images_digest=card.images_digest),
        card.licence,
        card.num_images,
        card.objective,
        BaseSpace(card.latent, card.autoencoder, card.condition, card.range),
        card.source,
        card.public_digest,
        card.architecture,
    )
