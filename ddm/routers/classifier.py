"""A router made from a network that tells experts apart, such as one that a researcher trained."""

# Shape legend: B batch, K experts, ... all data dimensions.
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, log_softmax, nn

from ddm.errors import MathError, ShapeError
from ddm.routers.base import log_prior


class ClassifierRouter(nn.Module):
    """A router by Bayes' rule: ``log p(x_t | k, t) = log p(k | x_t, t) - log p(k)``, up to a term common to all k.

    A network that was trained to name the expert of a noised sample answers with the posterior under the shares of the
    experts in its training. Dividing by these shares gives the likelihood, which can be combined with any other prior.

    >>> import torch
    >>> from ddm.ensemble import Ensemble
    >>> from ddm.routers.classifier import ClassifierRouter
    >>> logits = lambda x, t: torch.tensor([[0.75, 0.25]]).log().expand(len(x), 2)  # no image
    >>> router = ClassifierRouter(logits, training_prior=[0.75, 0.25])
    >>> silos = [lambda x, t: x - 1, lambda x, t: x + 1]
    >>> ensemble = Ensemble(silos, router, [0.5, 0.5], shape=(2,))
    >>> ensemble.posterior(torch.zeros(1, 2), torch.full((1,), 0.3)).exp()
    tensor([[0.5000, 0.5000]], dtype=torch.float64)

    Args:
        network: called as ``network(x_B, t_B)`` on the ensemble's path; returns logits, shape (B, K).
        training_prior: the share of each expert among the samples that the network was trained on, in any unit.

    Raises:
        ShapeError, MathError, DataError: shares that are none; see `log_prior`.
    """

    log_shares_K: Tensor

    def __init__(
        self, network: Callable[[Tensor, Tensor], Tensor], training_prior: Sequence[float] | Tensor
    ) -> None:
        super().__init__()
        # A module becomes a part of this one, and moves with it.
        self.network = network
        if not callable(network):
            got = type(network).__name__
            raise MathError("network", expected="a function or a network", got=got)
        log_shares_K = log_prior(training_prior, len(training_prior))
        if not bool(log_shares_K.isfinite().all()):
            raise ShapeError(
                "training_prior",
                expected="shares above 0: a network says nothing about an expert that it never saw",
                got=str([float(share) for share in training_prior]),
            )
        self.register_buffer("log_shares_K", log_shares_K)

    @property
    def num_experts(self) -> int:
        """The number of experts, K."""
        return len(self.log_shares_K)

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """See `ddm.routers.base.Router`."""
        if isinstance(self.network, nn.Module):
            # Samples of an ensemble in float64 meet a network that was trained in float32.
            dtype = next((p.dtype for p in self.network.parameters()), x_B.dtype)
            x_B = x_B.to(dtype)
            t_B = t_B.to(dtype)
        logits_BK: Any = self.network(x_B, t_B)
        if not isinstance(logits_BK, Tensor):
            got = type(logits_BK).__name__
            raise ShapeError("the classifier's logits", expected="a tensor", got=got)
        if tuple(logits_BK.shape) != (len(x_B), self.num_experts):
            raise ShapeError(
                "the classifier's logits",
                expected=f"shape {(len(x_B), self.num_experts)}",
                got=str(tuple(logits_BK.shape)),
            )
        return log_softmax(logits_BK.double(), dim=-1) - self.log_shares_K.to(logits_BK.device)
