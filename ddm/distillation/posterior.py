"""The posterior of experts at a noised sample given its condition: for teachers, and to draw own samples by."""

# Shape legend: B batch, K experts, L tokens, D features of a token.
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ddm.ensemble import Ensemble
from ddm.errors import MathError
from ddm.sampling.guidance import (
    ConditionRequest,
    ConditionValue,
    SampledEnsemble,
    knows_shares,
)
from ddm.sampling.mixture import Branch

_NO_CLASS = -1


@dataclass(frozen=True)
class Posterior:
    """``p(k | x_t, c)`` of samples with conditions of their own.

    Each expert's share of a class is that of the release's class counts, or what its router has learned; its share of a
    text is what the router has learned, or its prior, since no release counts texts. The router reads the condition
    where it can.

    Attributes:
        of_class: the ensemble under each class; under -1, without a class.
        of_texts: the ensemble under texts, where there are any.
        together: most samples that a router evaluates at once.
    """

    of_class: Mapping[int, Branch]
    of_texts: Branch | None
    together: int

    @classmethod
    def of(cls, ensemble: Ensemble, labels: Tensor | None) -> Self:
        """Return the posterior of an ensemble.

        Args:
            ensemble: the teacher.
            labels: the conditions that will be asked for, classes (N,) or texts (N, L, D); None for none.

        Raises:
            MathError: classes whose holders are unknown.
        """
        # Always with the ensemble without a class: a step may hide the condition of any image.
        classes = {_NO_CLASS}
        of_texts = None
        if labels is not None and labels.dim() == 1:
            classes |= set(torch.unique(labels).tolist())
        if labels is not None and labels.dim() == 3:
            shares_known = knows_shares(ensemble.router)
            of_texts = _branch(ensemble, labels, shares_known=shares_known)
        of_class = {label: _class_branch(ensemble, label) for label in classes}
        return cls(of_class, of_texts, ensemble.chunk_size)

    @property
    def lacks_router(self) -> bool:
        """Whether a router is needed, and missing."""
        branches = list(self.of_class.values())
        if self.of_texts is not None:
            branches.append(self.of_texts)
        return any(branch.router is None and branch.num_active > 1 for branch in branches)

    def __call__(
        self,
        x_B: Tensor,
        t_B: Tensor,
        condition_B: Tensor | None,
    ) -> Tensor:
        """Return the weights (B, K), float64.

        Args:
            x_B: noised samples.
            t_B: their times; at t = 1 the weights are each expert's share of the condition, and no router is needed.
            condition_B: classes (B,), -1 for none, or texts (B, L, D), zeros for none; None for unconditional samples.
        """
        if self.of_texts is not None and condition_B is not None:
            log_w_BK = self.of_texts.log_posterior(
                x_B, t_B, chunk_size=self.together, condition_B=condition_B
            )
            return log_w_BK.double().exp()
        num_samples = len(x_B)
        if condition_B is None:
            label_B = torch.full((num_samples,), _NO_CLASS)
        else:
            label_B = condition_B.cpu()
        weights_BK: Tensor | None = None
        # Class by class, because each has its own prior of experts.
        for label in torch.unique(label_B).tolist():
            rows = (label_B == label).nonzero()[:, 0]
            branch = self.of_class[label]
            own_BK = branch.posterior(x_B[rows], t_B[rows], chunk_size=self.together).double()
            if weights_BK is None:
                num_experts = own_BK.shape[1]
                weights_BK = own_BK.new_empty(num_samples, num_experts)
            weights_BK[rows] = own_BK
        if weights_BK is None:
            return torch.empty(0, 0)
        return weights_BK


def _class_branch(ensemble: Ensemble, label: int) -> Branch:
    """Return the ensemble under a class; -1 for no class."""
    if label < 0:
        return _branch(ensemble, None, shares_known=True)
    if ensemble.class_prior is None and not knows_shares(ensemble.router):
        remedy = "Distil from images with classes and the teacher label, or distil without classes."
        expected = "class counts or a router that state each expert's share of a class"
        raise MathError("classes", expected=expected, got="a release without either", remedy=remedy)
    return _branch(ensemble, label, shares_known=True)


def _branch(
    ensemble: Ensemble,
    condition: ConditionValue | None,
    *,
    shares_known: bool,
) -> Branch:
    # A text's shares are unknown to a release, so the experts' priors stand in where the router has not learned them.
    if shares_known:
        declared = None
    else:
        declared = ensemble.prior
    request = ConditionRequest(condition=condition, condition_prior=declared)
    sampled = SampledEnsemble(
        ensemble.condition, ensemble.router, ensemble.prior, ensemble.class_prior
    )
    (branch,) = request.branches(sampled).conditional
    return branch
