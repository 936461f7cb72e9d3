"""Finds what cannot work, from a recipe and the enrolled cards alone, before anything is fitted, timed or signed."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping

from aggregator.intake.screening import MIN_TRAVEL
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
from ddm.system.findings import Finding
from ddm.training.schedule import travel

_MAX_CHARACTERS = 400  # of a list of silos in a message


def check_feasible(recipe: Recipe, cards: Mapping[str, Card]) -> None:
    """Refuse a recipe whose plan every silo, or intake, would refuse later.

    Args:
        recipe: what the operator asks for.
        cards: the cards of the silos that train, by their names.

    Raises:
        SetupError: names the field, what it must be and what to do.
        PolicyError: the statistics cost more than the total that the recipe states.
    """
    check_statistics(recipe.statistics, "recipe, statistics")
    for violation in find_violations(recipe, cards):
        raise SetupError(
            f"recipe, {violation.subject}",
            expected=violation.expected,
            got=violation.got,
            remedy=violation.remedy,
        )


def find_violations(recipe: Recipe, cards: Mapping[str, Card]) -> Iterator[Finding]:
    """Yield every rule that a recipe breaks."""
    yield from _too_few_steps(recipe)
    yield from _too_few_images(recipe, cards)
    yield from _unit_that_a_silo_lacks(recipe, cards)
    yield from _too_much_epsilon(recipe, cards)
    yield from _too_small_limits(recipe)


def _too_few_steps(recipe: Recipe) -> Iterator[Finding]:
    """Find a training after which an expert still draws noise: one from random weights that can hardly move them."""
    # Intake flags experts that hardly moved from their initial weights; those that start from a base need not move far.
    is_full = isinstance(recipe.expert.adaptation, FullAdaptation)
    if recipe.rehearsal or not is_full or recipe.expert.base is not None:
        return
    training = recipe.expert.training
    sum_of_rates = travel(training)
    if sum_of_rates >= MIN_TRAVEL:
        return
    yield Finding(
        subject="expert.training.num_steps",
        expected=f"enough that an expert learns to draw: learning rates that sum to {MIN_TRAVEL:g} or more, "
        f"{_min_steps(training)} steps at these rates",
        got=f"{training.num_steps} steps, which sum to {sum_of_rates:.3g}",
        remedy="Train for more steps, or at a higher rate. To try the federation out with experts that draw noise: "
        "rehearsal = true in the recipe.",
    )


def _min_steps(training: Training) -> int:
    """Return the fewest steps with which a training of these rates can teach an expert anything."""

    def is_enough(num_steps: int) -> bool:
        return travel(training.model_copy(update={"num_steps": num_steps})) >= MIN_TRAVEL

    # The sum of rates grows with the number of steps, so that bisection finds the least.
    upper_bound = training.num_steps
    while not is_enough(upper_bound):
        upper_bound *= 2
    return bisect_left(range(upper_bound), True, key=is_enough)


def _too_few_images(recipe: Recipe, cards: Mapping[str, Card]) -> Iterator[Finding]:
    """Find silos that cannot bring the fewest images that the plan needs of each."""
    min_images = recipe.partition.min_images
    required = f"{min_images} images of each silo"
    if isinstance(recipe.partition, RandomPartition):
        num_parts = recipe.partition.num_parts
        required = f"{num_parts * min_images} images of each silo, {min_images} for each of {num_parts} parts"
        min_images *= num_parts
    too_small = {
        silo_id: card.agreed.images
        for silo_id, card in cards.items()
        if card.agreed.images < min_images
    }
    if not too_small:
        return
    sizes = ", ".join(f"{silo_id} has at most {num}" for silo_id, num in too_small.items())
    yield Finding(
        subject="partition.min_images",
        expected=f"at most what every silo may bring by its card: {min(too_small.values())}",
        got=f"{required}; by their cards {sizes}"[:_MAX_CHARACTERS],
        remedy=(
            "Lower partition.min_images; or agree on more images with these silos, who send a new "
            "card (`silo enroll SITE --out card.json --images N`) that you take in (`aggregator "
            "enroll FED CARD`); or take them out: `aggregator remove FED SILO --reason TEXT`."
        ),
    )


def _unit_that_a_silo_lacks(recipe: Recipe, cards: Mapping[str, Card]) -> Iterator[Finding]:
    """Find silos that protect patients under a plan of images, or that have no patients under a plan of patients."""
    unit = recipe.statistics.unit
    protecting = [
        silo_id for silo_id, card in cards.items() if card.limits.privacy.unit == "patient"
    ]
    without_patients = [silo_id for silo_id, card in cards.items() if card.agreed.patients is None]
    give_patients = (
        "ask the silos that state none for a new card: a patient for each image (where every image is of another "
        "person, a name of its own for each will do), by `silo enroll SITE --out card.json --patients N`, which you "
        "take in with `aggregator enroll FED CARD`"
    )
    # Noise for one image would hide only a part of a patient who has several.
    if unit == "image" and protecting:
        remedy = 'Plan with statistics.unit = "patient".'
        if without_patients:
            names = ", ".join(without_patients)[:_MAX_CHARACTERS]
            remedy = f'Plan with statistics.unit = "patient", and {give_patients}: {names}.'
        yield Finding(
            subject="statistics.unit",
            expected='"patient", which silos protect by default',
            got=f'"image"; by their cards {", ".join(protecting)} protect patients'[
                :_MAX_CHARACTERS
            ],
            remedy=f"{remedy} Or, where no person has two images, ask the silos that protect patients for a new card: "
            'unit = "image" under [privacy] in their policy.toml, then `silo enroll SITE --out card.json`, which you '
            "take in with `aggregator enroll FED CARD`.",
        )
    # Such a silo would accept the plan, and then find no patient of any image.
    if unit == "patient" and without_patients:
        remedy = f"{give_patients[0].upper()}{give_patients[1:]}."
        if not protecting:
            remedy = f'Plan with statistics.unit = "image". Or {give_patients}.'
        yield Finding(
            subject="statistics.unit",
            expected="a unit that every silo has: its card states how many patients it may bring",
            got=f'"patient"; the cards of {", ".join(without_patients)} state none'[
                :_MAX_CHARACTERS
            ],
            remedy=remedy,
        )


def _too_much_epsilon(recipe: Recipe, cards: Mapping[str, Card]) -> Iterator[Finding]:
    """Find silos whose policy lets a plan spend less on router and experts together."""
    # A silo adds up what a plan spends on router and experts (silo/plan/policy.py), and so does this rule.
    router_epsilon = recipe.statistics.total.epsilon
    field = "statistics.total.epsilon"
    epsilon = router_epsilon
    spent = f"{epsilon:g}"
    private_training = recipe.expert.privacy
    if private_training:
        field += " and expert.privacy.epsilon"
        epsilon += private_training.epsilon
        spent = f"{epsilon:g}, {router_epsilon:g} for the router and {private_training.epsilon:g} for the experts"
    too_strict = {
        silo_id: card.limits.privacy.max_epsilon
        for silo_id, card in cards.items()
        if card.limits.privacy.max_epsilon < epsilon
    }
    if not too_strict:
        return
    limits = ", ".join(f"{silo_id} allows {limit:g}" for silo_id, limit in too_strict.items())
    yield Finding(
        subject=field,
        expected=f"at most what every silo lets a plan spend by its card: {min(too_strict.values()):g}",
        got=f"{spent}; by their cards {limits}"[:_MAX_CHARACTERS],
        remedy=(
            "Spend less; or agree on more with these silos, who raise privacy.max_epsilon in their "
            "policy.toml and send a new card (`silo enroll SITE --out card.json`) that you take in "
            "(`aggregator enroll FED CARD`); or take them out: `aggregator remove FED SILO --reason "
            "TEXT`."
        ),
    )


def _too_small_limits(recipe: Recipe) -> Iterator[Finding]:
    """Find an expert that is larger than the plan would allow silos to send."""
    if isinstance(recipe.condition, TextRecipe) or not isinstance(recipe.latent, IdentityLatent):
        return  # their sizes are read from files; a silo compares them when it gets the plan
    try:
        specs = expected_tensors(recipe.expert.architecture, recipe.data.shape, recipe.condition)
    except ArchipelagoError:  # the plan's own rules name the field that does not fit
        return
    expert_bytes = stored_bytes(specs)
    if expert_bytes > recipe.limits.expert_bytes:
        yield Finding(
            subject="limits.expert_bytes",
            expected=f"at least {expert_bytes}, as an expert of this architecture has",
            got=f"{recipe.limits.expert_bytes}",
            remedy="Raise limits.expert_bytes, or choose a smaller architecture.",
        )
