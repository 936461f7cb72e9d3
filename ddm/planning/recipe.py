"""The part of a recipe that every plan needs, of a federation or not: data, encoder, clusters, experts, router."""

from abc import abstractmethod
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializeAsAny, model_validator

from ddm.io.settings import Settings
from ddm.planning.architectures import ExpertRecipe, RouterRecipe
from ddm.planning.training import TrainingRecipe
from ddm.protocol.architecture import ClassCondition, DropProbability, MaxTokens, NoCondition
from ddm.protocol.base import Licence, NaturalInt, NumImages, PositiveInt
from ddm.protocol.bases import BaseSourceText, SeedShare
from ddm.protocol.encoder import Side
from ddm.protocol.latent import AutoencoderSize, IdentityLatent
from ddm.protocol.learning import (
    LogitNormalT,
    Objective,
    PathName,
    PredictionName,
    TDistribution,
)
from ddm.protocol.plan import ModelTerms, PlanTerms

MAX_DEFAULT_FINE = 1024
IMAGES_PER_FINE = 4
# Half the width of a range of pixels, at least and at most (docs/adr/0067-pixels-have-the-scale-of-the-noise.md).
HALF_WIDTHS = (0.25, 10.0)

PathText = Annotated[str, Field(max_length=4096)]


class PcaRecipe(Settings):
    """Principal components of the public images.

    Attributes:
        dim: number of principal components.
    """

    kind: Literal["pca"] = "pca"
    dim: Annotated[int, Field(gt=0, le=4096)]


class HogRecipe(Settings):
    """Principal components of the public images' histograms of oriented gradients.

    Attributes:
        dim: number of principal components.
        cells: the cells of the grid of histograms, along each side of an image.
        mirrored: give an image and its mirror image the same features; for kinds whose left and right mean nothing.
    """

    kind: Literal["hog"]
    dim: Annotated[int, Field(gt=0, le=4096)]
    cells: Annotated[int, Field(gt=0, le=64)] = 7
    mirrored: bool = False


class TimmRecipe(Settings):
    """A network of timm, with weights from a file on this machine (from where the command is run), or random ones.

    Attributes:
        model: its name in timm.
        weights: the file of its weights, safetensors; needed unless the weights are random.
        random_weights: draw random weights, for tests.
        seed: seed of the random weights.
        image_size: height and width of its input in pixels; by default the network's own.
    """

    kind: Literal["timm"]
    model: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
    weights: PathText | None = None
    random_weights: bool = False
    seed: NaturalInt = 0
    image_size: tuple[Side, Side] | None = None

    @model_validator(mode="after")
    def _weights_are_chosen(self) -> "TimmRecipe":
        if (self.weights is None) != self.random_weights:
            raise ValueError("name the weights' file, or ask for random_weights = true")
        return self


class AutoencoderKlRecipe(AutoencoderSize):
    """A public autoencoder, with weights from a file on this machine (from where the command is run).

    Attributes:
        weights: the file of its weights, safetensors.
    """

    kind: Literal["autoencoder_kl"] = "autoencoder_kl"
    weights: PathText


class DiffusersKlRecipe(Settings):
    """A published autoencoder, as of Stable Diffusion, SDXL or FLUX, from a folder in the layout of diffusers.

    Attributes:
        folder: holds `config.json` and `diffusion_pytorch_model.safetensors`, which say its sizes and factors.
        tile: side in pixels of the overlapping tiles that larger images are cut into; 0 for whole images.
    """

    kind: Literal["diffusers_kl"]
    folder: PathText
    tile: Annotated[int, Field(ge=0, le=65536)] = 0


class TextRecipe(Settings):
    """A text, as a frozen encoder in a folder on this machine sees it (from where the command is run).

    Attributes:
        encoder: the folder with its configuration, tokenizer and weights.
        max_tokens: tokens of a text that experts read; what is longer is cut off.
        drop: share of the samples whose text training hides, for guidance.
    """

    kind: Literal["text"] = "text"
    encoder: PathText
    max_tokens: MaxTokens
    drop: DropProbability = 0.1


class BaseTerms(Settings):
    """What nobody can read from the weights of a base.

    Attributes:
        licence: licence of the base, such as Apache-2.0; it must allow releases under the plan's licence.
        num_images: number of images that it was trained on; leave it out if it is unknown.
        source: what it is, such as `"DiT-XL-2-256"`; plan, manifest and card repeat it.
    """

    licence: Licence
    source: BaseSourceText | None = None
    num_images: NumImages | None = None


class FileBaseRecipe(BaseTerms):
    """A file of weights with this toolkit's names, such as an `expert.safetensors` (path from where the command runs).

    Attributes:
        file: the file of its weights, safetensors.
        shape: shape of a sample of the base, as its network sees it; needed only if the plan's samples have other sides
            or channels.
        path: the probability path that it was trained on; by default that of the recipe's `[objective]`.
        prediction: what it predicts; by default that of the recipe's `[objective]`.
    """

    kind: Literal["file"] = "file"
    file: PathText
    shape: Annotated[tuple[Side, ...], Field(min_length=3, max_length=4)] | None = None
    path: PathName | None = None
    prediction: PredictionName | None = None


class DiffusersBaseRecipe(BaseTerms):
    """A checkpoint of diffusers in a folder: `DiTTransformer2DModel`, `UNet2DModel` or `SD3Transformer2DModel`.

    Attributes:
        folder: holds `config.json` and `diffusion_pytorch_model.safetensors`.
        path: the probability path that it was trained on; by default `ddpm_linear`, for an SD3 `linear`.
        prediction: what it predicts; by default `eps`, for an SD3 `velocity`.
    """

    kind: Literal["diffusers"]
    folder: PathText
    path: PathName | None = None
    prediction: PredictionName | None = None


class TrainedBaseRecipe(Settings):
    """A base that `aggregator base` trains on public images, with the network of the recipe's experts.

    Attributes:
        folder: the folder of the base and its card.
        licence: licence of the base, which the public images must allow.
        source: what the public images are, such as the name of their data set; plan, manifest and card repeat it.
        unconditional: whether it is trained without the recipe's classes, for public images that have none.
        training: how it is trained, with the fields and defaults of `[expert.training]`.
    """

    kind: Literal["trained"]
    folder: PathText
    licence: Licence
    source: BaseSourceText | None = None
    unconditional: bool = False
    training: SerializeAsAny[TrainingRecipe]


class SeedBaseRecipe(Settings):
    """A base that one owner trains first, on the images of all islands: for `ddm split`; `--seed-share` writes this.

    Attributes:
        share: share of the images that seed and islands see in training together, those that the seed sees.
        batch_size: images in a step of the seed, which must divide the batches of all islands together; by default it
            is these.
    """

    kind: Literal["seed"]
    share: SeedShare
    batch_size: PositiveInt | None = None


class ReleaseBaseRecipe(Settings):
    """An expert of an earlier release, or a student of it; `aggregator plan --from-release` writes this table.

    Attributes:
        release: the release's folder.
        root: for a release of islands, their owner's pinned root; by default this federation's. `ddm split` needs it.
        expert: the expert's name; with neither expert nor student, the best one on public images is proposed. `ddm
            split` needs it.
        student: the file of the student's weights, with the record beside it; not for `ddm split`.
    """

    kind: Literal["release"]
    release: PathText
    root: PathText | None = None
    expert: Annotated[str, Field(max_length=100)] | None = None
    student: PathText | None = None

    @model_validator(mode="after")
    def _one_network(self) -> "ReleaseBaseRecipe":
        if self.expert is not None and self.student is not None:
            raise ValueError("name an expert or a student, not both")
        return self


BaseRecipe = Annotated[
    FileBaseRecipe | DiffusersBaseRecipe | TrainedBaseRecipe | SeedBaseRecipe | ReleaseBaseRecipe,
    Field(discriminator="kind"),
]


class ClusteringRecipe(Settings):
    """How many fine centroids and coarse clusters; by default 1,024 fine ones where the public images allow it.

    Attributes:
        num_fine: number of fine centroids; by default 1,024, but no more than a quarter of the public images and no
            fewer than one a group.
        num_coarse: number of coarse clusters.
        balanced: whether coarse clusters hold about equally many public images.
    """

    num_fine: Annotated[int, Field(gt=0, le=65536)] | None = None
    num_coarse: Annotated[int, Field(gt=0, le=4096)]
    balanced: bool = False

    def fine_for(self, num_images: int, num_groups: int) -> int:
        """Return the number of fine centroids: a quarter of the images at most, at least one a group."""
        if self.num_fine is not None:
            return self.num_fine
        return max(num_groups, min(MAX_DEFAULT_FINE, num_images // IMAGES_PER_FINE))


class SketchRecipe(Settings):
    """How many dimensions of an image routers see.

    Attributes:
        rank: dimensions of the public projection; it costs no privacy.
    """

    rank: Annotated[int, Field(gt=0, le=1024)]


class PublicRecipe(Settings):
    """How the public images are used: a part is held out to judge the routers.

    Attributes:
        holdout_share: share of the public images that is held out.
        seed: seed of the choice.
        silo_column: the column that names the silo which each public image is like, for the router labels silo.
    """

    holdout_share: Annotated[float, Field(gt=0.0, lt=0.9)] = 0.25
    seed: NaturalInt = 0
    silo_column: Annotated[str, Field(max_length=100)] = "silos"


class SharedRecipe(ModelTerms):
    """What any recipe holds: the terms that its plan repeats, and what the plan's public parts are fitted from.

    Of the terms, those with a default or with a shorter way to write them are listed again.

    Attributes:
        base: the public expert that training starts from, whichever weights `expert.adaptation` then trains; the
            adaptations lora and partial need one.
    """

    public: PublicRecipe = PublicRecipe()
    latent: Annotated[
        IdentityLatent | AutoencoderKlRecipe | DiffusersKlRecipe, Field(discriminator="kind")
    ] = IdentityLatent()
    encoder: Annotated[PcaRecipe | HogRecipe | TimmRecipe, Field(discriminator="kind")]
    clustering: ClusteringRecipe
    sketch: SketchRecipe
    t_distribution: TDistribution = LogitNormalT()
    condition: Annotated[NoCondition | ClassCondition | TextRecipe, Field(discriminator="kind")] = (
        NoCondition()
    )
    objective: Objective = Objective()
    expert: SerializeAsAny[ExpertRecipe]
    base: BaseRecipe | None = None
    router: RouterRecipe

    @property
    def terms(self) -> dict[str, Any]:
        """The fields that the plan repeats word for word: those of `PlanTerms` that this recipe has."""
        shared_names = PlanTerms.model_fields.keys() & type(self).model_fields.keys()
        return {name: getattr(self, name) for name in shared_names}

    @property
    @abstractmethod
    def num_groups(self) -> int:
        """The number of groups of fine centroids that images are counted in."""

    @property
    @abstractmethod
    def released_rank(self) -> int:
        """The dimensions of the sketch that its scale is fitted in."""

    # First, since all other rules read the expert as the plan will state it.
    @model_validator(mode="after")
    def _write_out_the_expert(self) -> Self:
        """Replace the recipe of the experts by what a plan states, which depends on whether there is a base."""
        if not isinstance(self.expert, ExpertRecipe):
            return self
        expert = self.expert.plain(
            has_base=self.base is not None, has_seed=isinstance(self.base, SeedBaseRecipe)
        )
        return self.model_copy(update={"expert": expert})

    @model_validator(mode="after")
    def _base_is_there(self) -> "SharedRecipe":
        if self.base is None and self.expert.base is not None:
            raise ValueError(
                f"the adaptation {self.expert.adaptation.kind} starts from a base: name it in a table [base]"
            )
        if self.base is not None and self.expert.base is None:
            raise ValueError(
                f"the adaptation {self.expert.adaptation.kind} starts from no base: leave the table [base] out"
            )
        return self

    @model_validator(mode="after")
    def _base_can_be_trained(self) -> "SharedRecipe":
        # Otherwise it would show after the public images were read and encoded.
        if not isinstance(self.base, TrainedBaseRecipe):
            return self
        architecture = self.expert.architecture
        self.base.training.plain(architecture, table="base.training")
        if self.base.training.mask_ratio and not architecture.supports_masking:
            raise ValueError(
                f"base.training.mask_ratio above 0 needs the architecture dit, not {architecture.kind}"
            )
        return self

    @model_validator(mode="after")
    def _pixels_have_the_scale_of_the_noise(self) -> "SharedRecipe":
        # Latents are scaled to the noise when the plan is fitted; pixels are as the recipe says.
        if not isinstance(self.latent, IdentityLatent):
            return self
        low, high = self.data.range
        min_half_width, max_half_width = HALF_WIDTHS
        if not min_half_width <= (high - low) / 2 <= max_half_width:
            raise ValueError(
                f"data.range must be {2 * min_half_width:g} to {2 * max_half_width:g} wide for experts on pixels, "
                f"got {low:g} to {high:g}: let [transform] map to [-1, 1], or scale the arrays"
            )
        return self

    @model_validator(mode="after")
    def _transform_fits(self) -> "SharedRecipe":
        # Without the unit, which only a federation's statistics have (`aggregator.planning.recipe`).
        if self.transform and (misfit := self.transform.misfit(self.data)):
            raise ValueError(f"the transform needs {misfit}")
        return self
