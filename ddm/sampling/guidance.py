"""Computes what a condition changes: each expert's share, the router, and the condition that the experts receive.

``pi_{k|c} = pi_k p(c | k) / p(c)``: an expert without data of the condition has the share 0 and is never evaluated.
Under a target prior pi' in place of the ensemble's pi it is ``pi_{k|c} pi'_k / pi_k``, normalised.
"""

# Shape legend: K experts, N samples, L tokens, D features of a token.
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, cast

import torch
from torch import Tensor

from ddm.errors import MathError, ShapeError
from ddm.io.array_input import real_number
from ddm.protocol.architecture import ClassCondition, Condition, NoCondition, learns_null
from ddm.routers.base import ConditionalRouter, Router, log_prior
from ddm.sampling.mixture import Branch, SampleConditions

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
class Branches:
    """The branches of a mixture.

    Attributes:
        conditional: one, or one for each class that samples have.
        unconditional: with guidance only.
        sample_conditions: what differs from sample to sample, where anything does.
    """

    conditional: tuple[Branch, ...]
    unconditional: Branch | None = None
    sample_conditions: SampleConditions | None = None


@dataclass(frozen=True)
class SampledEnsemble:
    """What an ensemble says about its experts, from which branches are made.

    Attributes:
        condition: the kind of condition that the experts take.
        router: models which expert's data a noised sample came from.
        prior: the ensemble's own.
        class_prior: returns the experts' shares of a class.
    """

    condition: Condition
    router: Router | None
    prior: Sequence[float]
    class_prior: ClassPriors | None


@dataclass(frozen=True)
class ConditionRequest:
    """Under which condition, prior and guidance a caller wants samples.

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
        # Refuses texts and the like before they are compared.
        real_number(self.guidance, "guidance")
        if self.condition is None:
            expected = "a condition together with it"
            if self.guidance:
                got = f"{self.guidance:g} without a condition"
                raise MathError("guidance", expected=expected, got=got)
            if self.condition_prior is not None:
                got = "a prior without a condition"
                raise MathError("condition_prior", expected=expected, got=got)
        if not 0 <= self.guidance < inf:
            expected = "a finite number of at least 0"
            raise MathError("guidance", expected=expected, got=str(self.guidance))
        interval: tuple[Any, ...] = ()
        if isinstance(self.interval, Iterable):
            interval = tuple(self.interval)
        # The number of times first: another number cannot be unpacked.
        if len(interval) != 2 or not 0 <= interval[0] < interval[1] <= 1:
            expected = "two times (low, high) with 0 <= low < high <= 1"
            raise MathError("guidance_interval", expected=expected, got=str(self.interval))
        # Without guidance the interval would have no effect, which its caller does not expect.
        if interval != (0.0, 1.0) and not self.guidance:
            expected = "guidance above 0 together with it"
            raise MathError("guidance_interval", expected=expected, got="guidance=0")

    def check_learned(self, condition: Condition) -> None:
        """Refuse to evaluate experts without a condition, as guidance does too, where they always had one in training.

        Args:
            condition: the kind that the experts take.

        Raises:
            MathError: their answers without a condition are those of untrained weights.
        """
        if learns_null(condition) or (self.condition is not None and not self.guidance):
            return
        subject = "condition"
        expected = f"a {condition.kind}"
        remedy = f"Give condition: a {condition.kind}, or one for each sample."
        if self.condition is not None:
            subject = "guidance"
            expected = "0"
            remedy = "Leave guidance out."
        raise MathError(
            subject,
            expected=expected,
            got=f"experts that were always trained with a {condition.kind} (drop = 0)",
            remedy=remedy,
        )

    def branches(self, ensemble: SampledEnsemble) -> Branches:
        """Return the branches of the mixture that is requested of an ensemble.

        Raises:
            MathError, ShapeError: the ensemble does not take the condition, or nobody knows who holds it.
        """
        target_log_prior = self._target_log_prior(ensemble)
        if self.condition is None:
            return Branches((Branch(target_log_prior, ensemble.router),))

        value = by_number(ensemble.condition, self.condition)
        sample_values = per_sample(ensemble.condition, value)
        sample_conditions = None
        if sample_values is None:
            branch_values = [value]
        elif sample_values.dim() == 1:
            # Samples of one class share a branch.
            class_G, branch_B = torch.unique(sample_values, return_inverse=True)
            branch_values = class_G.tolist()
            sample_conditions = SampleConditions(branch_B, sample_values)
        else:
            # All texts share a branch: nothing but the text itself differs among them.
            branch_values = [sample_values[0]]
            branch_B = torch.zeros(len(sample_values), dtype=torch.int64)
            sample_conditions = SampleConditions(branch_B, sample_values)

        conditional = tuple(self._branch(ensemble, value) for value in branch_values)
        unconditional = None
        if self.guidance:
            # The null condition is the same for every class, and for texts it has the shape of one of them.
            _, null = condition_and_null(ensemble.condition, branch_values[0])
            unconditional = Branch(target_log_prior, ensemble.router, null)
        return Branches(conditional, unconditional, sample_conditions)

    def _target_log_prior(self, ensemble: SampledEnsemble) -> Tensor:
        """Return the log of the prior that samples are drawn under, the ensemble's own or the caller's."""
        target_prior = ensemble.prior
        if self.prior is not None:
            target_prior = self.prior
        return log_prior(target_prior, len(ensemble.prior))

    def _branch(self, ensemble: SampledEnsemble, value: ConditionValue) -> Branch:
        """Return the branch of one condition."""
        router = ensemble.router
        num_experts = len(ensemble.prior)
        condition, _ = condition_and_null(ensemble.condition, value)
        is_counted = ensemble.class_prior is not None and isinstance(value, int)
        if self.condition_prior is None and not is_counted and knows_shares(router):
            # The router has learned how data of the condition are divided, so the prior of all data is the base.
            target_log_prior = self._target_log_prior(ensemble)
            return Branch(target_log_prior, router, condition, router_shares=True)
        known = _known_shares(value, self.condition_prior, ensemble.class_prior, num_experts)
        log_prior_K = conditional_log_prior(known.prior, ensemble.prior, self.prior)
        return Branch(log_prior_K, known.router or router, condition)


def by_number(condition: Condition, value: ConditionValue | str) -> ConditionValue:
    """Return the number of a class that is given by its name; any other condition as it is.

    Raises:
        MathError: experts without a class of this name.
    """
    if not isinstance(value, str) or not isinstance(condition, ClassCondition):
        # A word for experts that take no classes is refused by `condition_and_null`, by its type.
        return cast("ConditionValue", value)
    number = condition.classes.number(value)
    if number is None:
        expected = f"a class, {condition.classes.choices()}"
        raise MathError("condition", expected=expected, got=repr(value[:40]))
    return number


def class_names(
    condition: Condition,
    value: ConditionValue | str | None,
    num: int,
) -> tuple[str, ...]:
    """Return the class of each of `num` requested samples, by its name where it has one; none without classes."""
    if value is None or not isinstance(condition, ClassCondition):
        return ()
    value = by_number(condition, value)
    if isinstance(value, int):
        name = condition.classes.name(value)
        return (name,) * num
    return tuple(condition.classes.name(number) for number in value.tolist())


def knows_shares(router: Router | None) -> bool:
    """Whether a router has learned how data of a condition are divided among the experts."""
    return isinstance(router, ConditionalRouter) and router.knows_shares


def router_shares(
    router: Router | None,
    condition: Tensor,
    prior: Sequence[float],
) -> list[float] | None:
    """Return each expert's share of the data with a condition, as the router has learned it; None where it has not.

    Args:
        router: the ensemble's.
        condition: as experts receive it.
        prior: the ensemble's own.
    """
    if not isinstance(router, ConditionalRouter) or not knows_shares(router):
        return None
    learned_1K = router.log_shares(condition[None])
    learned_K = learned_1K[0].double().cpu()
    log_shares_K = log_prior(prior, len(prior)) + learned_K
    shares: list[float] = log_shares_K.softmax(0).tolist()
    return shares


def per_sample(condition: Condition, value: ConditionValue | None) -> Tensor | None:
    """Return the conditions where a value holds one for each sample, None where it holds one for all.

    Raises:
        ShapeError: classes that are not whole numbers, or no conditions at all.
    """
    takes_classes = isinstance(condition, ClassCondition)
    if isinstance(condition, NoCondition) or not isinstance(value, Tensor):
        return None
    # One text for all samples has two dimensions, (L, D).
    num_dims = 3
    if takes_classes:
        num_dims = 1
    if value.dim() != num_dims:
        return None
    are_numbers = value.dtype == torch.int64
    if not len(value) or (takes_classes and not are_numbers):
        expected = "one text for each sample, (N, L, D)"
        if takes_classes:
            expected = "one class for each sample, int64 (N,)"
        got = f"{value.dtype} of shape {tuple(value.shape)}"
        raise ShapeError("condition", expected=expected, got=got)
    return value


def _known_shares(
    condition: ConditionValue,
    declared: Sequence[float] | None,
    class_prior: ClassPriors | None,
    num_experts: int,
) -> ClassPrior:
    """Return the experts' shares of a condition as the caller declares them, else as the release states them."""
    stated: ClassPrior | None = None
    if class_prior is not None and isinstance(condition, int):
        stated = class_prior(condition)
    if declared is None and num_experts == 1:
        # The share of an only expert is 1, regardless of who states it.
        declared = [1.0]
    if stated is not None:
        if declared is None:
            return stated
        # The caller's shares count, but a router of the class stays valid whatever the shares.
        return ClassPrior(declared, stated.router)
    if declared is not None:
        return ClassPrior(declared)
    got = "a text, which no release counts"
    if isinstance(condition, int):
        got = "a release without class counts"
    raise MathError(
        "condition_prior",
        expected="each expert's share of the data with this condition",
        got=got,
        remedy="Pass condition_prior; the ensemble's own prior assumes that all experts hold equal shares of it.",
    )


def condition_and_null(condition: Condition, value: ConditionValue) -> tuple[Tensor, Tensor]:
    """Return the condition and the null condition in the form in which experts receive them, for one sample.

    Raises:
        MathError: the experts are unconditional, take another kind of condition, or have no such class.
        ShapeError: token embeddings of another shape.
    """
    type_name = type(value).__name__
    if isinstance(condition, NoCondition):
        raise MathError(
            "condition",
            expected="no condition",
            got=f"a condition of type {type_name}",
            remedy="Leave the condition out: these experts were trained without one.",
        )
    if isinstance(condition, ClassCondition):
        if not isinstance(value, int) or not 0 <= value < condition.num_classes:
            expected = f"a class, int, 0 to {condition.num_classes - 1}"
            got = type_name
            if isinstance(value, int):
                got = str(value)
            raise MathError("condition", expected=expected, got=got)
        return torch.tensor(value), torch.tensor(-1)
    expected = f"a text, a tensor of 1 to {condition.max_tokens} tokens of {condition.dim} values"
    if not isinstance(value, Tensor):
        raise ShapeError("condition", expected=expected, got=type_name)
    shape = tuple(value.shape)
    fits = len(shape) == 2 and shape[1] == condition.dim
    if not fits or not 0 < shape[0] <= condition.max_tokens:
        raise ShapeError("condition", expected=expected, got=f"{type_name} of shape {shape}")
    return value, torch.zeros_like(value)


def conditional_log_prior(
    class_prior: Sequence[float],
    prior: Sequence[float],
    target_prior: Sequence[float] | None,
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
    target_K = own_K
    if target_prior is not None:
        target_K = log_prior(target_prior, len(prior))
    # An expert that the ensemble's own prior withdraws, and the target does not, has no share to be shifted from.
    shift_K = torch.where(own_K.isfinite(), target_K - own_K, target_K)
    class_log_prior_K = log_prior(class_prior, len(prior))
    prior_K = (class_log_prior_K + shift_K).softmax(0)
    if not bool(prior_K.isfinite().all()):
        expected = "an expert with a weight above 0 and data of this condition"
        got = f"no such expert among the {int(target_K.isfinite().sum())} with a weight above 0"
        raise MathError("condition", expected=expected, got=got)
    return prior_K.log()
