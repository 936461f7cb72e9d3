"""How a seed shares the budget of one owner's training with the islands, and the plan of islands that start from it.

The budget is counted in images: without a seed, each of K islands makes N steps of B images. A seed gets a share of
these N steps, in which it sees as many images as the K islands would have: K times B a step. The islands make the other
steps. A step costs as many operations per image for either, so that the operations are divided by the same share.
"""

from dataclasses import dataclass
from typing import Protocol

from ddm.errors import SetupError
from ddm.planning.training import BASE_RATE_SHARE, usual_warmup_steps
from ddm.protocol.base import File
from ddm.protocol.bases import Base, SeedBase
from ddm.protocol.learning import BASE_PATH, ExpertObjective, FullAdaptation, Training
from ddm.protocol.plan import Plan
from ddm.protocol.submission import ExpertTraining


@dataclass(frozen=True)
class SeedBudget:
    """The training of a seed, and that of each island after it.

    Attributes:
        seed: from random weights, on the images of all islands.
        island: from the seed's weights.
    """

    seed: Training
    island: Training


class TrainedSeed(Protocol):
    """What is known of a seed once it is trained."""

    @property
    def num_images(self) -> int:
        """The number of images of all islands."""
        ...

    @property
    def training(self) -> ExpertTraining:
        """What its training took."""
        ...

    @property
    def expert(self) -> File:
        """Its weights, as a file of the islands' plan."""
        ...


def num_seed_steps(num_steps: int, share: float) -> int:
    """Return the number of steps that the seed gets of those of an island without a seed."""
    return round(share * num_steps)


def divide_budget(
    whole: Training, share: float, num_islands: int, batch_size: int | None
) -> SeedBudget:
    """Divide the training of islands between a seed and the islands.

    Args:
        whole: the training of an island as if there were no seed, but at the learning rate of one that starts from a
            base.
        share: the seed's, in (0, 1).
        num_islands: how many islands there are.
        batch_size: images in a step of the seed; None for those that all islands see in a step.

    Raises:
        SetupError: a batch that does not divide the images that all islands see in a step.
    """
    seed_steps = num_seed_steps(whole.num_steps, share)
    images_a_step = num_islands * whole.batch_size
    if batch_size is None:
        batch_size = images_a_step
    # Otherwise the seed would see more or fewer images than its share.
    if images_a_step % batch_size:
        raise SetupError(
            "recipe, base.batch_size",
            expected=f"a divisor of {images_a_step}, the images in a step of {num_islands} islands",
            got=str(batch_size),
            remedy="Leave base.batch_size out, or set it to expert.training.batch_size.",
        )
    smaller_steps = images_a_step // batch_size
    # Validated, and not copied with changes: numbers of steps and of images in a step have bounds.
    num_steps_of_seed = seed_steps * smaller_steps
    seed = Training.model_validate(
        whole.model_dump()
        | {
            "num_steps": num_steps_of_seed,
            "batch_size": batch_size,
            "learning_rate": whole.learning_rate / BASE_RATE_SHARE,
            "warmup_steps": _warmup_of_part(whole, num_steps_of_seed),
        }
    )
    num_steps_of_island = whole.num_steps - seed_steps
    island = Training.model_validate(
        whole.model_dump()
        | {
            "num_steps": num_steps_of_island,
            "warmup_steps": _warmup_of_part(whole, num_steps_of_island),
        }
    )
    return SeedBudget(seed, island)


def _warmup_of_part(whole: Training, num_steps: int) -> int:
    """Return the warm-up of a part with this number of steps: that of the whole would last longer than a short seed.

    A recipe that names none has the usual one, and so does the part. One that a recipe states takes at most the share
    of the part's steps that it takes of the whole.
    """
    if whole.warmup_steps == usual_warmup_steps(whole.num_steps):
        return usual_warmup_steps(num_steps)
    proportional_steps = whole.warmup_steps * num_steps // whole.num_steps
    return min(whole.warmup_steps, proportional_steps)


def plan_from_seed(seed_plan: Plan, training: Training, seed: TrainedSeed) -> Plan:
    """Return the plan of islands that start from a trained seed: the same document whenever it is asked for.

    Args:
        seed_plan: by which the seed was trained.
        training: the training of each island.
        seed: as it was trained.
    """
    seed_training = seed_plan.expert.training
    num_islands = len(seed_plan.silos)
    images_by_seed = seed_training.num_steps * seed_training.batch_size
    images_by_islands = num_islands * training.num_steps * training.batch_size
    origin = SeedBase(
        digest=seed.expert.digest,
        share=images_by_seed / (images_by_seed + images_by_islands),
        num_steps=seed_training.num_steps,
        batch_size=seed_training.batch_size,
        flops=seed.training.flops,
    )
    objective = seed_plan.objective
    base = Base(
        digest=seed.expert.digest,
        origin=origin,
        licence=seed_plan.licence,
        num_images=seed.num_images,
        objective=ExpertObjective(path=objective.path, prediction=objective.prediction),
    )
    expert = seed_plan.expert.model_copy(
        update={"adaptation": FullAdaptation(base=BASE_PATH), "training": training}
    )
    fields = {name: getattr(seed_plan, name) for name in Plan.model_fields}
    fields["expert"] = expert
    fields["base"] = base
    fields["files"] = (*seed_plan.files, seed.expert)
    return Plan(**fields)
