"""The learning rate of every step."""

from math import cos, pi
from typing import assert_never

import numpy as np

from ddm.protocol.learning import Training
from ddm.protocol.routers import SamplesSettings


def learning_rate(settings: Training | SamplesSettings, step: int) -> float:
    """Return the learning rate of a step, counted from 0: the recipe's, warming up and falling at the same time."""
    warmup = 1.0
    if settings.warmup_steps:
        # Counted from 1, since a first step at a rate of 0 would move nothing.
        warmup = min(1.0, (step + 1) / settings.warmup_steps)
    return settings.learning_rate * warmup * _remaining_share(settings, step / settings.num_steps)


def _remaining_share(settings: Training | SamplesSettings, completed: float) -> float:
    """Return the share of the learning rate that is left when a share of the run is completed."""
    match settings.schedule:
        case "constant":
            return 1.0
        case "cosine":
            fallen = (1 - cos(pi * completed)) / 2
        case "linear":
            fallen = completed
        case _:
            assert_never(settings.schedule)
    return 1 - (1 - settings.final_rate) * fallen


def travel(settings: Training) -> float:
    """Return how far training can move a weight: Adam moves each by about the learning rate a step."""
    # A run has up to a billion steps; the rate is smooth, so a sum over a grid of them is as good.
    steps = np.unique(np.linspace(0, settings.num_steps - 1, 10_000).astype(np.int64))
    mean = np.mean([learning_rate(settings, int(step)) for step in steps])
    return float(mean * settings.num_steps)
