"""What protects a unit in an expert's weights: nothing, or private training. A part of the plan and of the submission.

Private training is DP-SGD: each unit enters a step by chance, with one gradient of bounded norm for all its images, and
Gaussian noise hides which units did.
"""

from typing import Annotated, Literal

from pydantic import Field

from ddm.protocol.base import Epsilon, Model, NumSteps, Unit

# The search for the noise of an epsilon doubles up to here and gives up (`ddm.privacy.accounting`).
MAX_NOISE_MULTIPLIER = 2.0**14
NoiseMultiplier = Annotated[float, Field(gt=0.0, le=MAX_NOISE_MULTIPLIER)]
SamplingRate = Annotated[float, Field(gt=0.0, le=1.0)]
PositiveDelta = Annotated[float, Field(gt=0.0, lt=1.0)]


class DpSgd(Model):
    """Private training: the weights that leave hide each unit of the statistics, a patient or an image.

    Attributes:
        epsilon: what an expert costs, for each unit, under replace_one; the noise follows from it.
        delta: what an expert costs.
        clip: the largest norm of a unit's gradient; a larger one is scaled down to it.
        units_per_step: how many units a step takes on average; each enters by chance, with the same probability.
        images_per_unit: most images of one unit in a step; of a unit with more, this many are drawn.
        draws: times and noises drawn for each of these images, all inside the unit's one gradient.
    """

    kind: Literal["dp_sgd"] = "dp_sgd"
    epsilon: Epsilon
    delta: PositiveDelta
    # A gradient is scaled to whole steps of the clipping norm in float32: far below this bound the scale is infinite,
    # and so is a single unit's gradient, which no noise hides.
    clip: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    units_per_step: Annotated[int, Field(gt=0, le=2**20)]
    images_per_unit: Annotated[int, Field(gt=0, le=1024)] = 8
    draws: Annotated[int, Field(gt=0, le=256)] = 4

    def rate(self, num_units: int) -> float:
        """Return the probability with which each of this many units enters a step."""
        # At a site with fewer units than a step takes on average, every unit enters every step.
        return min(1.0, self.units_per_step / num_units)


class DpSgdMechanism(Model):
    """Steps of DP-SGD: each unit enters a step by chance, with one clipped gradient, and Gaussian noise hides the sum.

    Attributes:
        noise_multiplier: the noise's standard deviation over the largest norm of a unit's clipped gradient.
        rate: the probability with which each unit enters a step, independently of all others (Poisson sampling).
        steps: how many.
    """

    kind: Literal["dp_sgd"] = "dp_sgd"
    noise_multiplier: NoiseMultiplier
    rate: SamplingRate
    steps: NumSteps


class NoWeightPrivacy(Model):
    """The weights carry no differential privacy guarantee."""

    kind: Literal["none"] = "none"


class DpSgdPrivacy(Model):
    """The weights are (epsilon, delta) private for each unit: private training, as the plan asked for it.

    Attributes:
        epsilon: the plan's.
        delta: the plan's.
        unit: what is hidden.
        relation: how neighbouring data sets differ.
        noise_multiplier: the noise's standard deviation over the largest norm of a unit's clipped gradient.
        rate: the probability with which each unit entered a step.
    """

    kind: Literal["dp_sgd"] = "dp_sgd"
    epsilon: Epsilon
    delta: PositiveDelta
    unit: Unit
    relation: Literal["replace_one"] = "replace_one"
    noise_multiplier: NoiseMultiplier
    rate: SamplingRate

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:g}, delta {self.delta:g} per {self.unit}"


WeightPrivacy = Annotated[NoWeightPrivacy | DpSgdPrivacy, Field(discriminator="kind")]
