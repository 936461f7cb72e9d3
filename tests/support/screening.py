"""Experts of made-up images on trial, and one whose weights were changed so that it is wild at a single time."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddm.models import build_expert
from ddm.models.layers import TIME_FEATURES
from ddm.protocol.architecture import ClassCondition, Condition, Dit, NoCondition
from ddm.protocol.learning import Training
from ddm.training.batches import Examples
from ddm.training.loop import TrainingRun, train
from ddm.training.objective import TrainingObjective
from tests.support.federation import images

SHAPE = (1, 4, 4)
ARCHITECTURE = Dit(patch=2, hidden=16, depth=1, heads=2)
TRAINING = Training(
    num_steps=200,
    batch_size=32,
    learning_rate=0.004,
    weight_decay=0.01,
    ema_decay=0.98,
)
# radians a unit of t: slower waves hardly tell two times apart, fast ones neighbours
_FAST = 30.0
_SLOW = 0.3
_GAIN = 2.0


def public_images(seed: int = 90) -> Tensor:
    """Return public images of all silos, those to hold out among those to fit on."""
    drawn = np.stack([images(200, centre, seed) for centre in (-0.5, 0.5)], 1).reshape(-1, *SHAPE)
    return torch.from_numpy(drawn)


def train_expert(
    folder: Path,
    made_of: Tensor,
    training: Training = TRAINING,
    condition: Condition = NoCondition(),
    labels: Tensor | None = None,
    base: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Train one expert, from a base or from random weights."""
    expert = build_expert(ARCHITECTURE, SHAPE, condition=condition, seed=training.seed)
    if base is not None:
        expert.load_state_dict(base)
    return train(
        expert,
        Examples(made_of, labels, condition.drop if isinstance(condition, ClassCondition) else 0.0),
        training,
        TrainingObjective(),
        TrainingRun(folder),
    ).ema


def make_wild_at(weights: dict[str, Tensor], t: float, factor: float) -> dict[str, Tensor]:
    """Return a transformer's weights changed so that the last layer's input is about `factor` times as large at one t.

    One unit of the time's network fires within about 0.001 of t alone: its weights are the waves that all peak there.
    It drives one entry of the condition, which only scales the last layer.
    """
    changed = {name: value.clone() for name, value in weights.items()}
    half = TIME_FEATURES // 2
    hidden = changed["head.weight"].shape[1]
    frequency = 1000.0 * torch.exp(-np.log(10_000.0) * torch.arange(half) / half)
    fast = (frequency > _FAST).float()
    slow = (frequency < _SLOW).float()
    # The cosines of slow waves are about 1 for every t: together they are a bias that no single weight shows.
    bias = -(float(fast.sum()) - 2.0) / float(slow.sum())
    unit = int(changed["time.mlp.2.weight"].norm(dim=0).argmin())
    entry = int(changed["modulation.weight"].norm(dim=0).argmin())
    waves = torch.cat(
        [fast * torch.cos(frequency * t) + bias * slow, fast * torch.sin(frequency * t)]
    )
    changed["time.mlp.0.weight"][unit] = _GAIN * waves
    changed["time.mlp.0.bias"][unit] = 0.0
    changed["time.mlp.2.weight"][entry] = 0.0
    changed["time.mlp.2.weight"][:, unit] = 0.0
    changed["time.mlp.2.weight"][entry, unit] = 8.0
    changed["time.mlp.2.bias"][entry] = 0.0
    changed["modulation.weight"][:, entry] = 0.0
    changed["modulation.weight"][-hidden:, entry] = factor / (8.0 * 2.0 * _GAIN)
    return changed
