"""Measures attacks on the statistics: empirical epsilons, and re-identification from the default statistic."""

from collections.abc import Callable

import torch

from examples.paper.privacy import neighbours
from examples.paper.privacy.attacks import epsilon_bound, reidentification
from examples.paper.privacy.drawing import make_plan, make_source, noise_of, sketches_in_order
from examples.paper.privacy.neighbours import Neighbours, with_quarter_noise
from examples.paper.privacy.public import PublicParts
from examples.paper.privacy.results import Empirical, Presets, Reidentification
from examples.paper.privacy.worlds import PrivateWorld

CLAIM = 1.0
DELTA = 1e-2
DEFAULT_EPSILON = 7.0
DEFAULT_DELTA = 1e-5
COHORT = 2000
REPEATS = {False: 40, True: 2}  # by whether records are assigned together, which takes long
OUTLYING = 20

ATTACKS: dict[str, tuple[Callable[[float], Neighbours], float, float]] = {
    "counts": (neighbours.counts, 0.0, 1.0),
    "class counts": (neighbours.class_counts, 0.0, 1.0),
    "sketches": (lambda epsilon: neighbours.sketches(epsilon, DELTA), DELTA, 1.0),
}
"""By statistic: the attack at an epsilon, its delta, and the share of the draws that it can afford."""


def empirical_epsilons(presets: Presets, say: Callable[[str], None]) -> tuple[Empirical, ...]:
    """Attack every statistic at epsilon 1, and again with a quarter of its noise, which must show."""
    bounds = []
    for statistic, (attack, delta, share) in ATTACKS.items():
        num = int(share * presets.attack_draws)
        bound, quartered = (
            epsilon_bound(*attack(epsilon).scores(num), delta)
            for epsilon in (CLAIM, with_quarter_noise(CLAIM, delta))
        )
        name = f"{statistic} (delta {delta:g}, {num} draws)"
        bounds.append(
            Empirical(statistic=name, claim=CLAIM, bound=bound, bound_quartered=quartered)
        )
        say(
            f"membership attack on {statistic}: epsilon above {bound:.3f}, with a quarter of the noise {quartered:.3f}"
        )
    return tuple(bounds)


def reidentification_rates(
    world: PrivateWorld, parts: PublicParts, seed: int, say: Callable[[str], None]
) -> Reidentification:
    """Match released sketches to their images, both by themselves and all together; the better attack counts."""
    images = torch.cat(world.silos)
    cohort = images[
        torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:COHORT]
    ]
    rank = world.dataset.released_rank
    plan = make_plan(
        {"sketch": {"epsilon": DEFAULT_EPSILON, "delta": DEFAULT_DELTA, "rank": rank}}, rank=rank
    )
    sketch = parts.sketch.head(rank)
    alpha, _ = noise_of(plan, sketch)
    source = make_source(plan, sketch, cohort, torch.zeros(len(cohort), dtype=torch.int64))
    average = 0.0
    outlying = 0.0
    for together in (False, True):
        rates = [
            reidentification(
                sketch.project(cohort),
                sketches_in_order(source),
                alpha,
                OUTLYING,
                together=together,
            )
            for _ in range(REPEATS[together])
        ]
        average = max(average, sum(rate.average for rate in rates) / len(rates))
        outliers = [[rate.longest for rate in rates], [rate.loneliest for rate in rates]]
        outlying = max(outlying, *(sum(values) / len(values) for values in outliers))
    say(
        f"re-identified among {len(cohort)}: {average:.2%}, of the {OUTLYING} most outlying {outlying:.2%}"
    )
    return Reidentification(
        num=len(cohort), epsilon=DEFAULT_EPSILON, average=average, outlying=outlying
    )
