"""How much an audit computes: a quarter of what the training did, but never too little for a verdict."""

from dataclasses import dataclass

from ddm.audit.attacks import CALLS
from ddm.protocol.learning import Training

SHARE = 0.25
"""Of the evaluations of the expert that training took, a step on an image counting as three."""
TRAINING_CALLS = 3
"""What a training step on an image costs, in evaluations of the expert."""
SAMPLE_STEPS = 20
MAX_IMAGES_PER_UNIT = 4
# Shares of the steps of the training, within bounds. After a short training the reference takes as many steps as the
# expert did, which is the best comparison there is.
_REFERENCE_SHARE = 0.03
_MIN_REFERENCE_STEPS = 500
# In so few of its steps an expert forgets much of what it knew of units that are left out by then, and little else.
# What two shadows forget by chance cancels in part (docs/adr/0077).
NUM_SHADOWS = 2
_SHADOW_SHARE = 0.075
_MIN_SHADOW_STEPS = 100
_CONTROL_SHARE = 0.01
_MIN_CONTROL_STEPS = 200
_MAX_CONTROL_STEPS = 2000
_CONTROL_UNITS = 16
_MIN_SAMPLES = 500
# `audit.num_samples` of a policy that states no other number.
_DEFAULT_SAMPLES = 10_000
NUM_ATTACKED_EXPERTS = 3 + NUM_SHADOWS
"""The expert, the reference, the shadows and the overfitted copy."""


@dataclass(frozen=True)
class Effort:
    """What one expert's audit computes.

    Attributes:
        reference_steps: of the reference expert's training.
        shadow_steps: of each shadow, which is the expert, trained further without the members.
        control_steps: of the overfitted copy's training.
        control_units: the number of units to which it is overfitted.
        images_per_unit: the largest number of images of a unit that are attacked.
        num_samples: the number of samples drawn.
    """

    reference_steps: int
    shadow_steps: int
    control_steps: int
    control_units: int
    images_per_unit: int
    num_samples: int

    @property
    def num_steps(self) -> int:
        """How many steps all trainings take."""
        return self.reference_steps + NUM_SHADOWS * self.shadow_steps + self.control_steps

    def num_evaluations(self, training: Training, num_images: int) -> int:
        """Return how often an expert is evaluated, a training step on an image counting as three.

        Args:
            training: the plan's recipe.
            num_images: the number of images attacked.
        """
        for_trainings = TRAINING_CALLS * training.batch_size * self.num_steps
        for_attacks = NUM_ATTACKED_EXPERTS * CALLS * num_images
        for_samples = SAMPLE_STEPS * self.num_samples
        return for_trainings + for_attacks + for_samples


def effort_of(
    training: Training,
    num_units: int,
    max_samples: int,
    *,
    trains_reference: bool,
) -> Effort:
    """Divide the budget: first the trainings, then the attacks, then samples.

    Args:
        training: the plan's recipe.
        num_units: members and units held out, together.
        max_samples: drawn if the budget allows it.
        trains_reference: whether a reference is trained.
    """
    reference_steps = 0
    if trains_reference:
        reference_steps = max(round(_REFERENCE_SHARE * training.num_steps), _MIN_REFERENCE_STEPS)
        reference_steps = min(reference_steps, training.num_steps)
    shadow_steps = max(round(_SHADOW_SHARE * training.num_steps), _MIN_SHADOW_STEPS)
    shadow_steps = min(shadow_steps, training.num_steps)
    control_steps = max(round(_CONTROL_SHARE * training.num_steps), _MIN_CONTROL_STEPS)
    control_steps = min(control_steps, _MAX_CONTROL_STEPS)

    step_calls = TRAINING_CALLS * training.batch_size
    budget = SHARE * step_calls * training.num_steps
    budget -= step_calls * (reference_steps + NUM_SHADOWS * shadow_steps + control_steps)

    # Half of what is left is for the attacks, the rest for samples.
    calls_per_image_of_units = NUM_ATTACKED_EXPERTS * CALLS * num_units
    images_per_unit = 1
    if num_units:
        affordable_images = int(budget / 2 / calls_per_image_of_units)
        images_per_unit = min(max(affordable_images, 1), MAX_IMAGES_PER_UNIT)
    budget -= images_per_unit * calls_per_image_of_units
    num_samples = max(int(budget / SAMPLE_STEPS), _MIN_SAMPLES)
    return Effort(
        reference_steps=reference_steps,
        shadow_steps=shadow_steps,
        control_steps=control_steps,
        control_units=_CONTROL_UNITS,
        images_per_unit=images_per_unit,
        num_samples=min(num_samples, max_samples),
    )


def share_of_training(training: Training, num_holdout: int) -> float:
    """Return what an audit computes, over what the training does, at a site with the default policy.

    Args:
        training: the plan's recipe.
        num_holdout: units held out; as many members are attacked, one image of each.
    """
    num_units = 2 * num_holdout
    effort = effort_of(training, num_units, _DEFAULT_SAMPLES, trains_reference=True)
    step_evaluations = TRAINING_CALLS * training.batch_size
    num_evaluations = effort.num_evaluations(training, num_units)
    return num_evaluations / (step_evaluations * training.num_steps)
