"""Computes what a condition changes: each expert's share, the router, and the condition that the experts receive.

``pi_{k|c} = pi_k p(c | k) / p(c)``: an expert without data of the condition has the share 0 and is never evaluated.
Under a target prior pi' in place of the ensemble's pi it is ``pi_{k|c} pi'_k / pi_k``, normalised.
"""

# Shape legend: K experts, N samples, L tokens, D features of a token.
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import cast

import torch
from torch import Tensor

from ddm.errors import MathError, ShapeError
from ddm.protocol.architecture import ClassCondition, Condition, NoCondition
from ddm.routers.base import ConditionalRouter, Router, log_prior
from ddm.sampling.mixture import Branch, OfSamples

ConditionValue = int | Tensor
"""What samples are drawn under.

A class for all samples, or int64 (N,), one for each; or a text, as token embeddings of the plan's encoder, float (L, D)
for all samples, or (N, L, D), one for each.
"""


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


@dataclass(frozen=True)
class Asked:
    """What a caller asks of samples.

    Args:
        prior: weights in place of the ensemble's own; None for those.
        condition: see `ConditionValue`, or the name of a class; None for samples of all data.
        condition_prior: each expert's share of the data with the condition, where the release does not state it.
        guidance: g.
        interval: the times between which guidance applies.

    Raises:
        MathError: an argument out of range, or one that needs a condition.
    """

    prior: Sequence[float] | None = None
    condition: ConditionValue | str | None = None
    condition_prior: Sequence[float] | None = None
    guidance: float = 0.0
    interval: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        if self.condition is None and (self.guidance or self.condition_prior is not None):
            subject, got = (
                ("guidance", f"{self.guidance:g}")
                if self.guidance
                else ("condition_prior", "a prior")
            )
            raise MathError(
                subject, expected="a condition together with it", got=f"{got} without a condition"
            )
        if not 0 <= self.guidance < inf:
            raise MathError(
                "guidance", expected="a finite number of at least 0", got=str(self.guidance)
            )
        if len(self.interval) != 2 or not 0 <= self.interval[0] < self.interval[1] <= 1:
            expected = "two times (low, high) with 0 <= low < high <= 1"
            raise MathError("guidance_interval", expected=expected, got=str(self.interval))
        if tuple(self.interval) != (0.0, 1.0) and not self.guidance:
            raise MathError(
                "guidance_interval", expected="guidance above 0 together with it", got="guidance=0"
            )

    def branches(
        self,
        condition: Condition,
        router: Router | None,
        prior: Sequence[float],
        class_prior: ClassPriors | None,
    ) -> tuple[tuple[Branch, ...], Branch | None, OfSamples | None]:
        """Return the conditional branches, the unconditional one, and the samples' own conditions.

        Args:
            condition: the kind of condition that its experts take.
            router: its router.
            prior: its own prior.
            class_prior: its experts' shares of a class.

        Returns:
            One conditional branch, or one for each class that samples have; an unconditional one with guidance only;
            and what differs from sample to sample, where anything does.

        Raises:
            MathError, ShapeError: the ensemble does not take the condition, or nobody knows who holds it.
        """
        target = log_prior(prior if self.prior is None else self.prior, len(prior))
        if self.condition is None:
            return (Branch(target, router),), None, None

        def branch(value: ConditionValue) -> Branch:
            told, _ = condition_and_null(condition, value)
            counted = class_prior is not None and isinstance(value, int)
            if self.condition_prior is None and not counted and knows_shares(router):
                return Branch(target, router, told, router_shares=True)
            known = _known(value, self.condition_prior, class_prior, len(prior))
            return Branch(
                conditional_log_prior(known.prior, prior, self.prior), known.router or router, told
            )

        value = by_number(condition, self.condition)
        several = per_sample(condition, value)
        if several is None:
            _, null = condition_and_null(condition, value)
            return (branch(value),), Branch(target, router, null) if self.guidance else None, None
        if several.dim() == 1:
            labels_G, group_N = torch.unique(several, return_inverse=True)
            branches = tuple(branch(label) for label in labels_G.tolist())
            _, null = condition_and_null(condition, int(labels_G[0]))
        else:
            branches, group_N = (branch(several[0]),), torch.zeros(len(several), dtype=torch.int64)
            _, null = condition_and_null(condition, several[0])
        of_samples = OfSamples(group_N, several)
        return branches, Branch(target, router, null) if self.guidance else None, of_samples


def by_number(condition: Condition, value: ConditionValue | str) -> ConditionValue:
    """Return the number of a class that is given by its name; any other condition as it is.

    Raises:
        MathError: experts without a class of this name.
    """
    if not isinstance(value, str) or not isinstance(condition, ClassCondition):
        # a text that is no class is refused where conditions are looked at
        return cast("ConditionValue", value)
    if (number := condition.classes.number(value)) is None:
        raise MathError(
            "condition", expected=f"a class, {condition.classes.words()}", got=repr(value[:40])
        )
    return number


def names_of(condition: Condition, value: ConditionValue | str | None, num: int) -> tuple[str, ...]:
    """Return the class that each of `num` samples was asked for, by its name where it has one; none without classes."""
    if value is None or not isinstance(condition, ClassCondition):
        return ()
    value = by_number(condition, value)
    numbers = [value] * num if isinstance(value, int) else value.tolist()
    return tuple(condition.classes.name(number) for number in numbers)


def knows_shares(router: Router | None) -> bool:
    """Whether a router has learned how data of a condition are divided among the experts."""
    return isinstance(router, ConditionalRouter) and router.knows_shares


def router_shares(
    router: Router | None, told: Tensor, prior: Sequence[float]
) -> list[float] | None:
    """Return each expert's share of the data with a condition, as the router has learned it; None where it has not.

    Args:
        router: the ensemble's.
        told: the condition, as experts receive it.
        prior: the ensemble's own.
    """
    if not isinstance(router, ConditionalRouter) or not knows_shares(router):
        return None
    log_K = log_prior(prior, len(prior)) + router.log_shares(told[None])[0].double().cpu()
    shares: list[float] = log_K.softmax(0).tolist()
    return shares


def per_sample(condition: Condition, value: ConditionValue | None) -> Tensor | None:
    """Return the conditions where a value holds one for each sample, None where it holds one for all.

    Raises:
        ShapeError: classes that are not whole numbers, or no conditions at all.
    """
    dims = 1 if isinstance(condition, ClassCondition) else 3
    if isinstance(condition, NoCondition) or not isinstance(value, Tensor) or value.dim() != dims:
        return None
    if not len(value) or (dims == 1 and value.dtype != torch.int64):
        expected = (
            "one class for each sample, int64 (N,)"
            if dims == 1
            else "one text for each sample, (N, L, D)"
        )
        raise ShapeError(
            "condition", expected=expected, got=f"{value.dtype} of shape {tuple(value.shape)}"
        )
    return value


def _known(
    condition: ConditionValue,
    declared: Sequence[float] | None,
    class_prior: ClassPriors | None,
    num_experts: int,
) -> ClassPrior:
    """Return the experts' shares of a condition as the caller declares them, else as the release states them.

    An ensemble of one expert needs neither: that expert's share is 1.
    """
    if declared is None and num_experts == 1:
        declared = [1.0]
    known = class_prior(condition) if class_prior and isinstance(condition, int) else None
    if declared is not None:
        return ClassPrior(declared, known.router if known else None)
    if known is None:
        remedy = "Pass condition_prior; the ensemble's own prior assumes that all experts hold equal shares of it."
        expected = "each expert's share of the data with this condition"
        got = (
            "a release without class counts"
            if isinstance(condition, int)
            else "a text, which no release counts"
        )
        raise MathError("condition_prior", expected=expected, got=got, remedy=remedy)
    return known


def condition_and_null(condition: Condition, value: ConditionValue) -> tuple[Tensor, Tensor]:
    """Return the condition and the null condition in the form in which experts receive them, for one sample.

    Raises:
        MathError: the experts are unconditional, take another kind of condition, or have no such class.
        ShapeError: token embeddings of another shape.
    """
    kind = type(value).__name__
    if isinstance(condition, NoCondition):
        remedy = "Leave the condition out: these experts were trained without one."
        raise MathError(
            "condition", expected="no condition", got=f"a condition of type {kind}", remedy=remedy
        )
    if isinstance(condition, ClassCondition):
        if not isinstance(value, int) or not 0 <= value < condition.num_classes:
            got = str(value) if isinstance(value, int) else kind
            raise MathError(
                "condition", expected=f"a class, int, 0 to {condition.num_classes - 1}", got=got
            )
        return torch.tensor(value), torch.tensor(-1)
    most, shape = condition.max_tokens, tuple(value.shape) if isinstance(value, Tensor) else ()
    if (
        not isinstance(value, Tensor)
        or len(shape) != 2
        or not 0 < shape[0] <= most
        or shape[1] != condition.dim
    ):
        expected = f"a text, a tensor of 1 to {most} tokens of {condition.dim} values"
        raise ShapeError(
            "condition", expected=expected, got=f"{kind} of shape {shape}" if shape else kind
        )
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
