"""Chooses the classes or texts under which screening tests an expert."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddm.protocol.architecture import ClassCondition, Condition, NoCondition, TextCondition

Answer = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Called as ``u(x_B, t_B, c_B)``; c_B is None for no condition."""

MOST_CLASSES = 256
NUM_TEXTS = 4


@dataclass(frozen=True)
class ExpertCondition:
    """One condition.

    Attributes:
        words: names it in a fault; empty for no condition.
        value: of one sample, without a batch dimension; None for no condition.
    """

    words: str = ""
    value: Tensor | None = None


def chosen_conditions(
    condition: Condition, rng: np.random.Generator, most: int = MOST_CLASSES
) -> list[ExpertCondition]:
    """Return classes or texts in a secret order; none where experts take no condition.

    The aggregator holds no captions and need not hold the plan's text encoder, so the tokens of a text are drawn at
    random, with values of order 1 as the last normalisation of a text encoder gives them.

    Args:
        condition: the plan's.
        rng: chooses.
        most: how many at most.
    """
    match condition:
        case NoCondition():
            return []
        case ClassCondition(num_classes=num_classes):
            classes = rng.permutation(num_classes)[:most].tolist()
            return [ExpertCondition(f" for class {c}", torch.tensor(c)) for c in classes]
        case TextCondition(dim=dim, max_tokens=max_tokens):
            texts = torch.zeros(min(NUM_TEXTS, most), max_tokens, dim)
            for text in texts:
                length = int(rng.integers(1, max_tokens + 1))
                text[:length] = torch.from_numpy(
                    rng.standard_normal((length, dim), dtype=np.float32)
                )
            return [
                ExpertCondition(f" for made-up text {number}", text)
                for number, text in enumerate(texts, 1)
            ]


def answer_by_condition(
    answer: Answer, x_B: Tensor, t_B: Tensor, told: Sequence[ExpertCondition]
) -> Tensor:
    """Ask an expert about samples, first those without a condition, then those that have one.

    Args:
        answer: the expert.
        x_B: samples, shape (B, ...).
        t_B: their times.
        told: the condition of each; those without one come first.
    """
    values = [each.value for each in told if each.value is not None]
    num_null = len(told) - len(values)
    found = [answer(x_B[:num_null], t_B[:num_null], None)] if num_null else []
    if values:
        found.append(answer(x_B[num_null:], t_B[num_null:], torch.stack(values)))
    return torch.cat(found)
