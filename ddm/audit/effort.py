"""How much an audit computes: a tenth of what the training did, but never too little to tell."""

from dataclasses import dataclass

from ddm.audit.attacks import CALLS
from ddm.protocol.learning import Training

SHARE = 0.1
"""Of the evaluations of the expert that training took, a step on an image counting as three."""
SAMPLE_STEPS = 20
_REFERENCE, _FEWEST_REFERENCE = 0.03, 50
_CONTROL, _FEWEST_CONTROL, _MOST_CONTROL = 0.01, 60, 2000
MOST_IMAGES, _FEWEST_SAMPLES = 4, 500
_CONTROL_UNITS = 16


@dataclass(frozen=True)
class Effort:
    """What one expert's audit computes.

    Attributes:
        reference_steps: of the reference expert's training.
        control_steps: of the overfitted copy's.
        control_units: that it is overfitted to.
        images_per_unit: attacked at most.
        num_samples: drawn.
    """

    reference_steps: int
    control_steps: int
    control_units: int
    images_per_unit: int
    num_samples: int


def effort_of(training: Training, num_units: int, most_samples: int, *, reference: bool) -> Effort:
    """Share the budget: first the two trainings, then the attacks, then samples.

    Args:
        training: the plan's recipe.
        num_units: members and units held out, together.
        most_samples: drawn if there is room.
        reference: whether a reference is trained.
    """
    steps = (
        min(max(round(_REFERENCE * training.num_steps), _FEWEST_REFERENCE), training.num_steps)
        if reference
        else 0
    )
    control = min(max(round(_CONTROL * training.num_steps), _FEWEST_CONTROL), _MOST_CONTROL)
    total = SHARE * 3 * training.num_steps * training.batch_size
    left = total - 3 * (steps + control) * training.batch_size
    each = 3 * CALLS * num_units  # the expert, the reference and the overfitted copy
    images = min(max(int(left / 2 / each), 1), MOST_IMAGES) if num_units else 1
    samples = int((left - images * each) / SAMPLE_STEPS)
    num = min(max(samples, _FEWEST_SAMPLES), most_samples)
    return Effort(steps, control, _CONTROL_UNITS, images, num)
