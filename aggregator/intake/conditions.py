"""Chooses the conditions under which screening tests an expert: no condition, classes, and texts."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddm.protocol.plan import ClassCondition, Condition, NoCondition, TextCondition

MOST_CLASSES = 256
NUM_TEXTS = 4


@dataclass(frozen=True)
class Told:
    """One condition.

    Attributes:
        words: names it in a fault; empty for no condition.
        value: of one sample, without a batch dimension; None where experts take no condition.
    """

    words: str
    value: Tensor | None


def chosen_conditions(condition: Condition, rng: np.random.Generator, most: int = MOST_CLASSES) -> list[Told]:
    """Return no condition, then classes or texts in a secret order.

    The aggregator holds no captions and need not hold the plan's text encoder, so the tokens of a text are drawn at
    random, with values of order 1 as the last normalisation of a text encoder gives them.

    Args:
        condition: the plan's.
        rng: chooses.
        most: most conditions beside no condition.
    """
    match condition:
        case NoCondition():
            return [Told("", None)]
        case ClassCondition(num_classes=num_classes):
            classes = rng.permutation(num_classes)[:most].tolist()
            return [Told("", torch.tensor(-1)), *(Told(f" for class {c}", torch.tensor(c)) for c in classes)]
        case TextCondition(dim=dim, max_tokens=max_tokens):
            texts = torch.zeros(1 + min(NUM_TEXTS, most), max_tokens, dim)
            for row in range(1, len(texts)):
                length = int(rng.integers(1, max_tokens + 1))
                texts[row, :length] = torch.from_numpy(rng.standard_normal((length, dim), dtype=np.float32))
            return [Told("" if row == 0 else f" for made-up text {row}", text) for row, text in enumerate(texts)]


def stacked(told: list[Told]) -> Tensor | None:
    """Return one row for each sample; None where experts take no condition."""
    values = [each.value for each in told if each.value is not None]
    return torch.stack(values) if values else None
