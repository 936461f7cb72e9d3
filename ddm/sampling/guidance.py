"""What a condition changes: who counts, who could have made x_t, and what the experts are told.

``pi_{k|c} = pi_k p(c | k) / p(c)``: an expert that never saw the condition has the share 0 and is never asked. Under
another prior of the experts, pi', it is ``pi_{k|c} pi'_k / pi_k``, normalised.
"""

# Shape legend: K experts, L tokens, D features of a token.
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddm.errors import MathError, ShapeError
from ddm.protocol.plan import ClassCondition, Condition, NoCondition
from ddm.routers.base import Router, log_prior

Asked = int | Tensor
"""A class, or a text as the plan's encoder sees it, float (L, D)."""


@dataclass(frozen=True)
class Given:
    """What is known of who holds a class.

    Args:
        prior: every expert's share of the data of that class, in any unit; an expert with 0 never saw it.
        router: ``log p(x_t | k, c, t)``; None where nothing better than the ensemble's own router is known.
    """

    prior: Sequence[float]
    router: Router | None = None


GivenClass = Callable[[int], Given]


def told(condition: Condition, asked: Asked) -> tuple[Tensor, Tensor]:
    """Return what a sample's expert is told under the condition asked for, and under none.

    Raises:
        MathError: these experts have no condition, another kind, no such class, or a text of another shape.
    """
    if isinstance(condition, NoCondition):
        remedy = "Leave the condition out: these experts were trained without."
        raise MathError("condition", expected="none", got="one", remedy=remedy)
    kind = type(asked).__name__
    if isinstance(condition, ClassCondition):
        if not isinstance(asked, int) or not 0 <= asked < condition.num_classes:
            got = str(asked) if isinstance(asked, int) else kind
            raise MathError("condition", expected=f"a class, int, 0 to {condition.num_classes - 1}", got=got)
        return torch.tensor(asked), torch.tensor(-1)
    most, shape = condition.max_tokens, tuple(asked.shape) if isinstance(asked, Tensor) else ()
    if not isinstance(asked, Tensor) or len(shape) != 2 or not 0 < shape[0] <= most or shape[1] != condition.dim:
        expected = f"a text, a tensor of 1 to {most} tokens of {condition.dim} values"
        raise ShapeError("condition", expected=expected, got=f"{kind} of shape {shape}" if shape else kind)
    return asked, torch.zeros_like(asked)


def conditional_log_prior(given: Sequence[float], own: Sequence[float], wanted: Sequence[float] | None) -> Tensor:
    """Return ``log pi_{k|c}`` under the prior wanted, shape (K,).

    Args:
        given: every expert's share of the data with the condition, under the ensemble's own prior.
        own: the ensemble's own prior.
        wanted: another one, None for its own; either way a weight of 0 leaves an expert out, whatever it was given.

    Raises:
        MathError: no expert is left that saw the condition.
    """
    own_K = log_prior(own, len(own))
    wanted_K = own_K if wanted is None else log_prior(wanted, len(own))
    shift_K = torch.where(own_K.isfinite(), wanted_K - own_K, wanted_K)
    prior_K = (log_prior(given, len(own)) + shift_K).softmax(0)
    if not bool(prior_K.isfinite().all()):
        raise MathError("condition", expected="an expert with a weight that saw it", got="none")
    return prior_K.log()
