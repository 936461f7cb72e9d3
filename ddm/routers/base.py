"""The interface of routers, log p(x_t | k, t), and the posterior under any prior."""

# Shape legend: B batch, K experts, R sketch dimensions, ... all data dimensions.
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from ddm.errors import DataError, MathError, NumericalError, ShapeError
from ddm.io.array_input import real_tensor

LossCallback = Callable[[int, int, float], None]
"""Called in training with step, number of steps, and held-out loss, nats."""


@runtime_checkable
class Router(Protocol):
    """A model of which expert's data a noised sample came from.

    A router returns likelihoods, not posteriors, so that any target prior can be applied afterwards. At t = 1, where
    x_t carries no information about k, a correct router makes the posterior equal to the prior.
    """

    @property
    def num_experts(self) -> int:
        """The number of experts, K."""
        ...

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """Return ``log p(x_t | k, t)`` for every k, up to a term common to all k.

        Args:
            x_B: noised samples on the canonical path, shape (B, ...).
            t_B: their times in [0, 1], shape (B,).

        Returns:
            Shape (B, K), in the manifest's order of experts.
        """
        ...


@runtime_checkable
class SketchRouter(Router, Protocol):
    """A router that sees an image only through its sketch, so it can be evaluated on the silos' sketches."""

    def head(self, rank: int) -> Self:
        """Return the same router on the sketch's leading `rank` dimensions."""
        ...

    def sketch_log_likelihood(self, s_BR: Tensor, t_B: Tensor) -> Tensor:
        """Return `log_likelihood` of sketches ``s(x_t)``, shape (B, K)."""
        ...


@runtime_checkable
class ConditionalRouter(Router, Protocol):
    """A router that also reads the condition of each sample, a class or a text."""

    @property
    def knows_shares(self) -> bool:
        """Whether `log_shares` says how the silos' data are divided under a condition."""
        ...

    def given(self, condition_B: Tensor) -> Router:
        """Return the router ``log p(x_t | k, c, t)`` of these samples' conditions.

        Args:
            condition_B: as experts receive it, classes (B,) or texts (B, L, D); null where a sample has none.
        """
        ...

    def log_shares(self, condition_B: Tensor) -> Tensor:
        """Return ``log p(c | k)`` up to a term common to all k, shape (B, K)."""
        ...


def log_prior(prior: Sequence[float] | Tensor, num_experts: int) -> Tensor:
    """Check and normalise expert weights, and return their logarithm; weight 0 withdraws an expert.

    Args:
        prior: one weight per expert, in any unit; non-negative with a positive sum.
        num_experts: K.

    Returns:
        Shape (K,), float64, minus infinity where the weight is 0.

    Raises:
        ShapeError: not one weight per expert.
        MathError: a weight is negative or not finite, or all are 0.
        DataError: weights that are not real numbers.
    """
    if isinstance(prior, Mapping | str):
        got = "weights by name"
        if isinstance(prior, str):
            got = f"the text {prior!r}"
        raise DataError(
            "prior",
            expected=f"{num_experts} weights, one per expert, in the order of `expert_ids`",
            got=got,
            remedy="List a weight for every expert: with two experts, [1.0, 0.0] in place of {'north': 1.0}, and "
            "[1.0, 1.0] in place of 'equal'.",
        )
    prior_K = real_tensor(prior, "prior").to("cpu", torch.float64)
    if prior_K.shape != (num_experts,):
        got = f"shape {tuple(prior_K.shape)}"
        raise ShapeError("prior", expected=f"{num_experts} weights, one per expert", got=got)
    are_finite = bool(torch.isfinite(prior_K).all())
    has_negative = bool((prior_K < 0).any())
    has_positive = bool((prior_K > 0).any())
    if not are_finite or has_negative or not has_positive:
        listed = [f"{weight:g}" for weight in prior_K[:16].tolist()]
        if num_experts > 16:
            listed.append("...")
        got = ", ".join(listed)
        raise MathError("prior", expected="finite weights >= 0, not all 0", got=got)
    return torch.log(prior_K / prior_K.sum())


def posterior(
    router: Router,
    x_B: Tensor,
    t_B: Tensor,
    log_prior_K: Tensor,
) -> Tensor:
    """Return the probability of every expert at a noised sample.

    ``w_k(x, t) = pi_k p_t^k(x) / sum_j pi_j p_t^j(x)``

    Args:
        router: returns the likelihoods.
        x_B: noised samples on the canonical path, shape (B, ...).
        t_B: their times in [0, 1], shape (B,).
        log_prior_K: log of the target prior, shape (K,), or (B, K) for one per sample; minus infinity gives exactly 0.

    Returns:
        Shape (B, K); rows sum to 1. At least the precision of the router's output.

    Raises:
        ShapeError: the router does not return one value per sample and expert.
        NumericalError: a row has no finite value to normalise.
    """
    log_joint_BK = _log_joint(router, x_B, t_B, log_prior_K)
    w_BK = torch.softmax(log_joint_BK, dim=-1)
    # Where every expert with a prior above 0 has a likelihood of 0, there is nothing to normalise, and the row is NaN.
    if not bool(torch.isfinite(w_BK).all()):
        raise NumericalError("router", expected="a finite posterior", got="NaN or infinity")
    return w_BK


def log_posterior(
    router: Router,
    x_B: Tensor,
    t_B: Tensor,
    log_prior_K: Tensor,
) -> Tensor:
    """Return the logarithm of `posterior`, which says more where a probability is too small for a number.

    Raises:
        ShapeError, NumericalError: see `posterior`.
    """
    log_joint_BK = _log_joint(router, x_B, t_B, log_prior_K)
    log_w_BK = torch.log_softmax(log_joint_BK, dim=-1)
    if bool(log_w_BK.isnan().any()):
        raise NumericalError("router", expected="a finite posterior", got="NaN or infinity")
    return log_w_BK


def _log_joint(
    router: Router,
    x_B: Tensor,
    t_B: Tensor,
    log_prior_K: Tensor,
) -> Tensor:
    """Return ``log pi_k + log p_t^k(x)``, shape (B, K)."""
    log_likelihood_BK: Any = router.log_likelihood(x_B, t_B)
    if not isinstance(log_likelihood_BK, Tensor):
        raise ShapeError(
            "router",
            expected="log-likelihoods, a tensor of shape (B, K)",
            got=type(log_likelihood_BK).__name__,
            remedy="Let the router's log_likelihood return a tensor.",
        )
    expected = (x_B.shape[0], log_prior_K.shape[-1])
    if tuple(log_likelihood_BK.shape) != expected:
        got = f"shape {tuple(log_likelihood_BK.shape)}"
        raise ShapeError("router", expected=f"log-likelihoods of shape {expected}", got=got)
    log_joint_BK: Tensor = log_likelihood_BK + log_prior_K.to(log_likelihood_BK.device)
    return log_joint_BK
