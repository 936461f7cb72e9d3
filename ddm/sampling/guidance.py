"""Computes what a condition changes: each expert's share, the router, and the condition that the experts receive.

``pi_{k|c} = pi_k p(c | k) / p(c)``: an expert without data of the condition has the share 0 and is never evaluated.
Under a target prior pi' in place of the ensemble's pi it is ``pi_{k|c} pi'_k / pi_k``, normalised.
"""

# Shape legend: K experts, L tokens, D features of a token.
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddm.errors import MathError, ShapeError
from ddm.protocol.plan import ClassCondition, Condition, NoCondition
from ddm.routers.base import Router, log_prior

ConditionValue = int | Tensor
"""A class, or a text as token embeddings of the plan's encoder, float (L, D)."""


@dataclass(frozen=True)
class ClassPrior:
    """The experts under one class.

    Args:
        prior: each expert's share of the data of that class, in any unit; 0 for an expert without such data.
        router: models ``log p(x_t | k, c, t)``; None where only the ensemble's unconditional router is known.
    """

    prior: Sequence[float]
    router: Router | None = None


ClassPriors = Callable[[int], ClassPrior]


def condition_and_null(condition: Condition, value: ConditionValue) -> tuple[Tensor, Tensor]:
    """Return the condition and the null condition in the form in which experts receive them, for one sample.

    Raises:
        MathError: the experts are unconditional, take another kind of condition, or have no such class.
        ShapeError: token embeddings of another shape.
    """
    kind = type(value).__name__
    if isinstance(condition, NoCondition):
        remedy = "Leave the condition out: these experts were trained without one."
        raise MathError("condition", expected="no condition", got=f"a condition of type {kind}", remedy=remedy)
    if isinstance(condition, ClassCondition):
        if not isinstance(value, int) or not 0 <= value < condition.num_classes:
            got = str(value) if isinstance(value, int) else kind
            raise MathError("condition", expected=f"a class, int, 0 to {condition.num_classes - 1}", got=got)
        return torch.tensor(value), torch.tensor(-1)
    most, shape = condition.max_tokens, tuple(value.shape) if isinstance(value, Tensor) else ()
    if not isinstance(value, Tensor) or len(shape) != 2 or not 0 < shape[0] <= most or shape[1] != condition.dim:
        expected = f"a text, a tensor of 1 to {most} tokens of {condition.dim} values"
        raise ShapeError("condition", expected=expected, got=f"{kind} of shape {shape}" if shape else kind)
    return value, torch.zeros_like(value)


def conditional_log_prior(
    class_prior: Sequence[float], prior: Sequence[float], target_prior: Sequence[float] | None
) -> Tensor:
    """Return ``log pi_{k|c}`` under a target prior, shape (K,).

    Args:
        class_prior: each expert's share of the data with the condition, under the ensemble's own prior.
        prior: the ensemble's own prior.
        target_prior: the prior to sample under, None for the ensemble's own; in both a weight of 0 withdraws an expert,
            whatever its share of the class.

    Raises:
        MathError: no expert with a weight above 0 has data of the condition.
    """
    own_K = log_prior(prior, len(prior))
    target_K = own_K if target_prior is None else log_prior(target_prior, len(prior))
    shift_K = torch.where(own_K.isfinite(), target_K - own_K, target_K)
    prior_K = (log_prior(class_prior, len(prior)) + shift_K).softmax(0)
    if not bool(prior_K.isfinite().all()):
        expected = "an expert with a weight above 0 and data of this condition"
        got = f"no such expert among the {int(target_K.isfinite().sum())} with a weight above 0"
        raise MathError("condition", expected=expected, got=got)
    return prior_K.log()
