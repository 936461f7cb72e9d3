"""The base of a plan: the public expert that every silo's training starts from, where it comes from, on which terms."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from ddm.protocol.base import (
    Digest,
    ExpertId,
    Licence,
    Model,
    NumImages,
    NumSteps,
    PlanId,
    PositiveInt,
    ShortText,
    SiloId,
)
from ddm.protocol.learning import ExpertObjective

# Licences that let anybody publish what was made from a work under terms of their own, as long as the work is named.
PERMISSIVE_LICENCES = frozenset(
    {
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "CC-BY-4.0",
        "CC0-1.0",
        "ISC",
        "MIT",
        "PDDL-1.0",
        "Unlicense",
        "0BSD",
    }
)

BaseSourceText = Annotated[ShortText, StringConstraints(min_length=1, max_length=200)]
"""What a base is called where it was published, or the public images that it learned."""

SeedShare = Annotated[float, Field(gt=0.0, lt=1.0)]
"""Share of a training's budget that a seed gets."""


class FileBase(Model):
    """A file of the operator's.

    Attributes:
        layout: the layout whose names its tensors have: this toolkit's, or those of a network of diffusers.
        digest: sha256 of the file as it was given.
    """

    kind: Literal["file"] = "file"
    layout: Literal[
        "archipelago", "DiTTransformer2DModel", "UNet2DModel", "SD3Transformer2DModel"
    ] = "archipelago"
    digest: Digest


class TrainedBase(Model):
    """Trained by `aggregator base` on public images.

    Attributes:
        digest: sha256 of the weights as they were trained.
        images_digest: sha256 of the public images, in the form in which it learned them.
    """

    kind: Literal["trained"] = "trained"
    digest: Digest
    images_digest: Digest


class SeedBase(Model):
    """Trained by the owner of the plan's islands on the images of all of them, as a share of their training's budget.

    Attributes:
        digest: sha256 of the weights as they were trained.
        share: of the images that seed and islands see in training together, the share that the seed sees.
        num_steps: the number of steps of its training.
        batch_size: images in a step.
        flops: of its training, as the plan implies them.
    """

    kind: Literal["seed"] = "seed"
    digest: Digest
    share: SeedShare
    num_steps: NumSteps
    batch_size: PositiveInt
    flops: Annotated[float, Field(ge=0.0, le=1e36)]


class _ReleasedBase(Model):
    """A base that is part of a verified release, or was distilled from one.

    Attributes:
        root: fingerprint of the root of trust that the release was verified against.
        plan_id: its plan.
        version: the version of the release.
        manifest: sha256 of its manifest.
        silos: the silos whose images the base learned.
        digest: sha256 of the weights.
        trained_privately: whether these weights hide each unit of these silos (DP-SGD).
    """

    root: Digest
    plan_id: PlanId
    version: PositiveInt
    manifest: Digest
    silos: Annotated[tuple[SiloId, ...], Field(min_length=1, max_length=1024)]
    digest: Digest
    trained_privately: bool


class ExpertBase(_ReleasedBase):
    """An expert of a verified release.

    Attributes:
        expert_id: its name there.
    """

    kind: Literal["expert"] = "expert"
    expert_id: ExpertId


class StudentBase(_ReleasedBase):
    """A student that was distilled from a verified release; it knows what all experts of the release know.

    Attributes:
        images: what it was trained on: the ensemble's own samples, or images that its maker gave, whose owners nobody
            states.
    """

    kind: Literal["student"] = "student"
    images: Literal["own_samples", "given_images"]


class Base(Model):
    """The expert that training starts from, as plan, manifest and card state it.

    Attributes:
        digest: sha256 of its file in the plan.
        origin: where it comes from.
        source: what a file is, such as the name of a published network, or what public images it learned; stated by the
            operator, for people.
        licence: the licence of the base; the plan's own licence must allow it.
        num_images: how many images it was trained on; null where its origin does not say.
        objective: what it was trained for, which need not be what the plan's experts are trained for.
        changes: what was changed so that its weights fit the plan's network.
    """

    digest: Digest
    origin: Annotated[
        FileBase | TrainedBase | SeedBase | ExpertBase | StudentBase, Field(discriminator="kind")
    ]
    source: BaseSourceText | None = None
    licence: Licence
    num_images: NumImages | None = None
    objective: ExpertObjective = ExpertObjective()
    changes: Annotated[tuple[ShortText, ...], Field(max_length=16)] = ()

    @property
    def exposed_silos(self) -> tuple[SiloId, ...]:
        """The silos whose images the base learned without DP-SGD."""
        match self.origin:
            case ExpertBase() | StudentBase() if not self.origin.trained_privately:
                return self.origin.silos
        return ()

    @property
    def words(self) -> str:
        """Where it comes from, as a person reads it."""
        match self.origin:
            case FileBase(layout="archipelago"):
                source = "a file of the operator's"
            case FileBase(layout=layout):
                source = f"a file of the operator's, a {layout} of diffusers"
            case TrainedBase():
                source = "trained by the operator on public images"
            case SeedBase() as origin:
                source = (
                    f"a seed of the same owner, trained on the images of all islands: {origin.share:.3g} of the "
                    f"budget, {origin.num_steps:,} steps of {origin.batch_size:,} images, {origin.flops:.3g} FLOP"
                )
            case ExpertBase() as origin:
                source = (
                    f"expert {origin.expert_id} of {', '.join(origin.silos)}, {_release_of(origin)}"
                )
            case StudentBase() as origin:
                source = f"a student of {_release_of(origin)} ({', '.join(origin.silos)})"
                if origin.images == "given_images":
                    source += ", trained on images that its maker gave"
        images = "an unknown number of images"
        if self.num_images is not None:
            images = f"{self.num_images:,} images"
        words = f"{source}; {images}; licence {self.licence}; sha256 {self.digest[:16]}"
        if self.source is not None:
            # Last, so that no text of the operator's can pass for one of these facts.
            words += f"; in the operator's words: {self.source}"
        return words


def _release_of(origin: _ReleasedBase) -> str:
    return f"release {origin.version} of plan {origin.plan_id}"


def licence_misfit(base_licence: str, release_licence: str) -> str | None:
    """Return which licence a release must have, or None where a base of this licence may go into it.

    A permissive licence allows a release under any licence. Any other licence, such as CC-BY-SA-4.0 or one that forbids
    commercial use, must be the release's own: what it demands would otherwise end with the release.
    """
    if base_licence in PERMISSIVE_LICENCES or base_licence == release_licence:
        return None
    return f"{base_licence}, which is the base's and not permissive"
