"""Chooses the classes or texts under which screening tests an expert."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddm.protocol.architecture import ClassCondition, Condition, NoCondition, TextCondition

Answer = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Called as ``u(x_B, t_B, c_B)``; c_B is None for no condition."""

MAX_CLASSES = 256
NUM_TEXTS = 4


@dataclass(frozen=True)
class ExpertCondition:
    """One condition.

    Attributes:
        words: names it in a fault; empty for no condition.
        value: the value of one sample, without a batch dimension; None for no condition.
    """

    words: str = ""
    value: Tensor | None = None


def choose_conditions(
    condition: Condition, rng: np.random.Generator, max_conditions: int = MAX_CLASSES
) -> list[ExpertCondition]:
    """Return classes or texts in a secret order; none where experts take no condition.

    The aggregator holds no captions and need not hold the plan's text encoder, so the tokens of a text are drawn at
    random, with values of order 1 as the last normalisation of a text encoder gives them.

    Args:
        condition: the plan's.
        rng: chooses.
        max_conditions: how many at most.
    """
    match condition:
        case NoCondition():
            return []
        case ClassCondition(num_classes=num_classes):
            # In a secret order: where not all classes are tested, nobody can foresee which.
            classes = rng.permutation(num_classes)[:max_conditions].tolist()
            return [ExpertCondition(f" for class {c}", torch.tensor(c)) for c in classes]
        case TextCondition():
            texts = _made_up_texts(condition, rng, min(NUM_TEXTS, max_conditions))
            return [
                ExpertCondition(f" for made-up text {number}", text)
                for number, text in enumerate(texts, 1)
            ]


def _made_up_texts(condition: TextCondition, rng: np.random.Generator, num_texts: int) -> Tensor:
    """Draw the vectors of texts of random lengths, shape (num_texts, tokens, dim); 0 behind a text's end."""
    texts = torch.zeros(num_texts, condition.max_tokens, condition.dim)
    for text in texts:
        length = int(rng.integers(1, condition.max_tokens + 1))
        values = rng.standard_normal((length, condition.dim), dtype=np.float32)
        text[:length] = torch.from_numpy(values)
    return texts


def answer_by_condition(
    answer: Answer, x_B: Tensor, t_B: Tensor, conditions: Sequence[ExpertCondition]
) -> Tensor:
    """Evaluate an expert on samples, first those without a condition, then those that have one.

    Args:
        answer: the expert.
        x_B: samples, shape (B, ...).
        t_B: their times.
        conditions: the conditions of the samples; those without one come first.
    """
    # Null conditions and others cannot share a batch: an expert takes either no condition or one for each sample.
    values = [condition.value for condition in conditions if condition.value is not None]
    num_null = len(conditions) - len(values)
    answers = []
    if num_null:
        answers.append(answer(x_B[:num_null], t_B[:num_null], None))
    if values:
        answers.append(answer(x_B[num_null:], t_B[num_null:], torch.stack(values)))
    return torch.cat(answers)
