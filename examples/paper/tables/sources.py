"""Where samples of a row come from, as plain data: which model, trained how, of how much.

Fields that later tables brought are left out of a document where they have their default, so that what was measured
before keeps its key.
"""

from typing import Annotated, Literal

from pydantic import Field

from ddm.protocol.base import Model

Partition = Literal["clusters", "random", "silos", "unequal"]
Recipe = Literal["default", "former"]
Objectives = Literal["velocity", "mixed"]
_Flag = Annotated[bool, Field(exclude_if=lambda is_set: not is_set)]
Times = Annotated[int, Field(ge=1, exclude_if=lambda times: times == 1)]
_UNLESS_NONE = Field(exclude_if=lambda value: value is None)
Concentration = Annotated[float, Field(gt=0, exclude_if=lambda value: value == 0.5)]
"""Of the Dirichlet distribution of the silos' classes: the lower it is, the fewer classes a silo has."""


class AllImages(Model):
    """The training images."""

    kind: Literal["all"] = "all"


class PublicImages(Model):
    """The public images of some classes, of which no silo has any."""

    kind: Literal["public"] = "public"
    classes: tuple[int, ...]


class SiloImages(Model):
    """The training images of one Dirichlet silo.

    Attributes:
        num: the number of silos.
        concentration: of the classes.
        silo: the one with the most images, or the fewest.
    """

    kind: Literal["silo"] = "silo"
    num: int
    concentration: float = 0.5
    silo: Literal["largest", "smallest"]


Images = Annotated[AllImages | PublicImages | SiloImages, Field(discriminator="kind")]


class Monolith(Model):
    """One model of all training images.

    Attributes:
        budget: of training, in units of the preset.
        batch: images in a step, as a share of the preset's.
        updates: how many times as many steps it takes, each of as many times fewer images.
        recipe: what plans leave to the library; or what they left to it before: uniform t, a constant rate.
        tuned: whether its rate is chosen among several, or is the one that plans take where they name none.
        conditional: whether it takes the class of an image as its condition.
        images: what it is trained on.
        start: the model with whose weights it starts; None for random ones.
    """

    kind: Literal["monolith"] = "monolith"
    budget: float = 1.0
    batch: Annotated[float, Field(exclude_if=lambda share: share == 1.0)] = 1.0
    updates: Times = 1
    recipe: Annotated[Recipe, Field(exclude_if=lambda recipe: recipe == "default")] = "default"
    tuned: Annotated[bool, Field(exclude_if=lambda tuned: tuned)] = True
    conditional: _Flag = False
    images: Annotated[Images, Field(exclude_if=lambda images: images.kind == "all")] = AllImages()
    start: "Annotated[Monolith | None, _UNLESS_NONE]" = None


class Experts(Model):
    """An ensemble of K experts with its router.

    Attributes:
        budget: of training, in units of the preset; all experts together take it.
        num: K.
        updates: how many times as many steps an expert takes, each of as many times fewer images.
        partition: whose images an expert has.
        concentration: of the classes of Dirichlet silos.
        whole: whether every silo brings the whole budget, in the monolith's batches.
        objectives: what experts predict, on which path: all velocities on the linear one, or one of `MIXED` in turn.
        conditional: whether experts and router take the class of an image as their condition.
        start: the model with whose weights all experts start; None for random ones.
    """

    kind: Literal["experts"] = "experts"
    budget: float = 1.0
    num: int
    updates: Times = 1
    partition: Partition = "clusters"
    concentration: Concentration = 0.5
    whole: _Flag = False
    objectives: Annotated[Objectives, Field(exclude_if=lambda which: which == "velocity")] = (
        "velocity"
    )
    conditional: _Flag = False
    start: "Annotated[Monolith | FirstRound | None, _UNLESS_NONE]" = None


class FirstRound(Model):
    """The best expert of an earlier ensemble: the one with the lowest loss on the public images."""

    kind: Literal["first round"] = "first round"
    experts: Experts


class Student(Model):
    """One dense model distilled from the ensemble of clusters of the same budget, by a quarter of the monolith's batch.

    Attributes:
        budget: of training, in units of the preset.
        num: K of the ensemble.
        images: the ensemble's own samples, labelled with their experts, or the training images with theirs.
        num_samples: how many own samples.
        steps: of Heun's method, which draws them, two evaluations each.
        teacher: which experts' velocity is the target.
        start: the weights that it starts from: random ones, or those of the expert with the largest prior.
        updates: how many times the monolith's steps it takes.
    """

    kind: Literal["student"] = "student"
    budget: float = 1.0
    num: int
    images: Literal["own samples", "training images"] = "own samples"
    num_samples: int
    steps: int
    teacher: Literal["label", "mixture"] = "label"
    start: Annotated[
        Literal["random", "expert"], Field(exclude_if=lambda start: start == "random")
    ] = "random"
    updates: Times = 1

    @property
    def conditional(self) -> bool:
        """Never: it takes no class."""
        return False


class Federated(Model):
    """One dense model averaged over Dirichlet silos, by a strategy of Flower's own.

    Attributes:
        budget: of training, in units of the preset; all silos together take it.
        num: silos.
        method: the strategy.
        rounds: of averaging.
        mu: weight of FedProx's proximal term.
        lost: whether the last silo is killed half-way.
        concentration: of the silos' classes.
        in_process: whether silos take turns in this process, with Flower's mean but without its messages; then what
            travels is the size of the weights.
        start: the model with whose weights the first round starts; None for random ones.
    """

    kind: Literal["federated"] = "federated"
    budget: float = 1.0
    num: int
    method: Literal["fedavg", "fedprox"] = "fedavg"
    rounds: int
    mu: float = 0.0
    lost: bool = False
    concentration: Concentration = 0.5
    in_process: _Flag = False
    start: Annotated[Monolith | None, _UNLESS_NONE] = None

    @property
    def conditional(self) -> bool:
        """Never: it takes no class."""
        return False


class TrainingImages(Model):
    """No model: training images in the place of samples."""

    kind: Literal["training images"] = "training images"


Experts.model_rebuild()
# Trousers, sneakers and bags in Fashion-MNIST: unlike each other, and most others.
PUBLIC_BASE = Monolith(images=PublicImages(classes=(1, 7, 8)))

Trained = Monolith | Experts | Student | Federated
Source = Annotated[Trained | TrainingImages, Field(discriminator="kind")]
