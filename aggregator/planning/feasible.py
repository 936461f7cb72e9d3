"""What cannot work, told from a recipe and the enrolled cards alone: before anything is fitted, timed or signed."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping

from aggregator.intake.screening import TRAVEL
from aggregator.planning.recipe import Recipe
from ddm.errors import ArchipelagoError, SetupError
from ddm.io.tensors import stored_bytes
from ddm.models import expected_tensors
from ddm.planning.recipe import TextRecipe
from ddm.protocol.enrolment import Card
from ddm.protocol.latent import IdentityLatent
from ddm.protocol.learning import FullAdaptation, Training
from ddm.protocol.partition import RandomPartition
from ddm.statistics.cost import check_statistics
from ddm.training.schedule import travel

Broken = tuple[str, str, str, str]
"""Subject, what was expected, what was found, what to do."""


def check_feasible(recipe: Recipe, cards: Mapping[str, Card]) -> None:
    """Refuse a recipe whose plan every silo, or intake, would refuse later.

    Args:
        recipe: what the operator asks for.
        cards: of the silos that train, by their names.

    Raises:
        SetupError: names the field, what it must be and what to do.
        PolicyError: the statistics cost more than the total that the recipe states.
    """
    check_statistics(recipe.statistics, "recipe, statistics")
    for subject, expected, got, remedy in broken(recipe, cards):
        raise SetupError(f"recipe, {subject}", expected=expected, got=got, remedy=remedy)


def broken(recipe: Recipe, cards: Mapping[str, Card]) -> Iterator[Broken]:
    """Yield every rule that a recipe breaks."""
    yield from _too_few_steps(recipe)
    yield from _too_few_images(recipe, cards)
    yield from _images_for_patients(recipe, cards)
    yield from _too_much_epsilon(recipe, cards)
    yield from _too_small_limits(recipe)


def _too_few_steps(recipe: Recipe) -> Iterator[Broken]:
    """Find a training after which an expert still draws noise: one from random weights that can hardly move them."""
    training, reach = recipe.expert.training, travel(recipe.expert.training)
    if (
        recipe.rehearsal
        or not isinstance(recipe.expert.adaptation, FullAdaptation)
        or reach >= TRAVEL
    ):
        return
    yield (
        "expert.training.num_steps",
        f"enough that an expert learns to draw: learning rates that sum to {TRAVEL:g} or more, "
        f"{_enough_steps(training)} steps at these rates",
        f"{training.num_steps} steps, which sum to {reach:.3g}",
        "Train for more steps, or at a higher rate. To try the federation out with experts that draw noise: "
        "rehearsal = true in the recipe.",
    )


def _enough_steps(training: Training) -> int:
    """Return the fewest steps with which a training of these rates can teach an expert anything."""

    def enough(num_steps: int) -> bool:
        return travel(training.model_copy(update={"num_steps": num_steps})) >= TRAVEL

    most = training.num_steps
    while not enough(most):
        most *= 2
    return bisect_left(range(most), True, key=enough)


def _too_few_images(recipe: Recipe, cards: Mapping[str, Card]) -> Iterator[Broken]:
    """Find silos that cannot bring the fewest images that the plan needs of each."""
    partition = recipe.partition
    parts = partition.num_parts if isinstance(partition, RandomPartition) else 1
    fewest = parts * partition.min_images
    most = {silo_id: card.agreed.images for silo_id, card in cards.items()}
    short = {silo_id: num for silo_id, num in most.items() if num < fewest}
    if short:
        needed = f"{fewest} images of each silo" + (
            f", {partition.min_images} for each of {parts} parts" * (parts > 1)
        )
        yield (
            "partition.min_images",
            f"at most what every silo may bring by its card: {min(short.values())}",
            f"{needed}; by their cards {', '.join(f'{name} has at most {num}' for name, num in short.items())}"[
                :400
            ],
            "Lower partition.min_images; or agree on more images with these silos (silo enroll --images, then "
            "aggregator enroll); or take them out (aggregator remove).",
        )


def _images_for_patients(recipe: Recipe, cards: Mapping[str, Card]) -> Iterator[Broken]:
    """Find silos that protect patients, where the plan would protect single images."""
    strict = [silo_id for silo_id, card in cards.items() if card.unit == "patient"]
    if strict and recipe.statistics.unit == "image":
        yield (
            "statistics.unit",
            '"patient", which silos protect by default',
            f'"image"; by their cards {", ".join(strict)} protect patients'[:400],
            'Plan with statistics.unit = "patient". Or, where no person has two images, ask these silos for '
            'a new card: unit = "image" under [privacy] in their policy.toml, then silo enroll and aggregator enroll.',
        )


def _too_much_epsilon(recipe: Recipe, cards: Mapping[str, Card]) -> Iterator[Broken]:
    """Find silos whose policy lets a plan spend less on router and experts together."""
    router, private = recipe.statistics.total.epsilon, recipe.expert.privacy
    spends = router + (private.epsilon if private else 0.0)
    stated = {silo_id: card.max_epsilon for silo_id, card in cards.items()}
    if not (short := {silo_id: most for silo_id, most in stated.items() if most < spends}):
        return
    yield (
        "statistics.total.epsilon" + " and expert.privacy.epsilon" * (private is not None),
        f"at most what every silo lets a plan spend by its card: {min(short.values()):g}",
        f"{spends:g}"
        + (
            f", {router:g} for the router and {private.epsilon:g} for the experts"
            if private
            else ""
        )
        + f"; by their cards {', '.join(f'{name} allows {most:g}' for name, most in short.items())}"[
            :400
        ],
        "Spend less; or agree on more with these silos (privacy.max_epsilon in their policy.toml, then silo enroll and "
        "aggregator enroll); or take them out (aggregator remove).",
    )


def _too_small_limits(recipe: Recipe) -> Iterator[Broken]:
    """Find an expert that is larger than the plan would allow silos to send."""
    if isinstance(recipe.condition, TextRecipe) or not isinstance(recipe.latent, IdentityLatent):
        return  # their sizes are read from files; a silo compares them when it gets the plan
    try:
        specs = expected_tensors(recipe.expert.architecture, recipe.data.shape, recipe.condition)
    except ArchipelagoError:  # the plan's own rules name the field that does not fit
        return
    if (needed := stored_bytes(specs)) > recipe.limits.expert_bytes:
        yield (
            "limits.expert_bytes",
            f"at least {needed}, as an expert of this architecture has",
            f"{recipe.limits.expert_bytes}",
            "Raise limits.expert_bytes, or choose a smaller architecture.",
        )
