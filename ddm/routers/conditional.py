"""The prior given a class: each expert's share of a class, from noised histograms over classes and groups."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddm.diffusion.path import Path
from ddm.errors import NumericalError, ShapeError
from ddm.partition.layout import Layout
from ddm.routers.counts import CountsRouter
from ddm.routers.histograms import expected_counts
from ddm.routers.sketch import Sketch

# Shape legend: K silos, E experts, C classes, G public groups.


@dataclass(frozen=True)
class ConditionalPrior:
    """Each expert's share of each class, and the distribution of the class over its groups.

    Attributes:
        prior_CE: share of each expert in a class; rows sum to 1.
        mass_ECG: shares of the groups in each class of an expert; rows sum to 1.
    """

    prior_CE: Tensor
    mass_ECG: Tensor

    def __post_init__(self) -> None:
        parts = {"class priors": self.prior_CE, "class masses": self.mass_ECG}
        for subject, shares in parts.items():
            off = float((shares.sum(-1) - 1).abs().max())
            # Written with `not`, so that NaN is refused too.
            if not bool((shares >= 0).all()) or off > 1e-3:
                lowest = float(shares.min())
                got = f"shares down to {lowest:g} and sums that differ from 1 by up to {off:g}"
                raise NumericalError(subject, expected="shares >= 0 that sum to 1", got=got)

    @classmethod
    def from_counts(
        cls,
        sketch: Sketch,
        noisy_KCG: Tensor,
        num_units: Sequence[int],
        epsilon: float,
        layout: Layout,
        *,
        counted_K: Sequence[int] | None = None,
    ) -> "ConditionalPrior":
        """Estimate the shares from the silos' histograms and their noise; a class without units gets the prior.

        ``pi_{k|c} = (n_kc + a_c pi_k) / (sum_j n_jc + a_c)``, with n from `expected_counts` and a_c the posterior
        standard deviation of the class's number of units.

        Args:
            sketch: the plan's public sketch, for the public shares of the groups.
            noisy_KCG: noised counts by silo, class and group.
            num_units: the public number of units of each silo.
            epsilon: the epsilon of the statistic.
            layout: the experts.
            counted_K: the number of units that each silo counts as beside the others, where it is not `num_units`; its
                counts are scaled to it.
        """
        num_classes = noisy_KCG.shape[1]
        count_KCG, error_KCG = expected_class_counts(sketch, noisy_KCG, num_units, epsilon)
        units_K = torch.tensor(num_units, dtype=torch.float64)
        if counted_K is not None:
            counted_units_K = torch.tensor(counted_K, dtype=torch.float64)
            scale_K = counted_units_K / units_K
            count_KCG = count_KCG * scale_K[:, None, None]
            error_KCG = error_KCG * scale_K[:, None, None]
            units_K = counted_units_K
        prior_K = units_K / units_K.sum()
        # a_c of the docstring: errors of cells are independent, so that their squares add up.
        unknown_C = error_KCG.square().sum((0, 2)).sqrt()
        count_KC = count_KCG.sum(2)
        of_prior_KC = prior_K[:, None] * unknown_C
        total_C = count_KC.sum(0) + unknown_C
        prior_KC = (count_KC + of_prior_KC) / total_C
        silo_E = list(layout.silo_E)
        masses = []
        priors = []
        for c in range(num_classes):
            # Within a class a silo's experts divide its data by their groups, as they do over all classes.
            mass_KG = count_KCG[:, c] / count_KC[:, c, None]
            mass_EG, share_E = layout.split(mass_KG)
            masses.append(mass_EG)
            priors.append(prior_KC[silo_E, c] * share_E)
        return cls(torch.stack(priors), torch.stack(masses, 1))

    def log_prior(self, label: int) -> Tensor:
        """Return the log of each expert's share of a class, shape (E,), float64.

        Raises:
            ShapeError: there is no such class.
        """
        num_classes = len(self.prior_CE)
        if not 0 <= label < num_classes:
            raise ShapeError("class", expected=f"a class, 0 to {num_classes - 1}", got=str(label))
        return self.prior_CE[label].double().log()

    def router(self, label: int, sketch: Sketch, path: Path) -> CountsRouter:
        """Return the router ``log p(x_t | k, c, t)``: the mixture of the public groups with the class's shares.

        Raises:
            ShapeError: there is no such class, or the sketch has other groups.
        """
        # Refuses a class that there is not.
        self.log_prior(label)
        log_mass_EG = self.mass_ECG[:, label].double().log()
        return CountsRouter(sketch, log_mass_EG, path)


def expected_class_counts(
    sketch: Sketch,
    noisy_KCG: Tensor,
    num_units: Sequence[int],
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """Return `expected_counts` of histograms over classes and groups, and their deviations, both (K, C, G)."""
    num_classes = noisy_KCG.shape[1]
    # The public shares are of groups alone, so that the prior takes all classes for equally frequent.
    weight_CG = sketch.group_weight_G.double().repeat(num_classes, 1) / num_classes
    weight_J = weight_CG.flatten().numpy()
    counts = []
    errors = []
    for noisy_CG, num in zip(noisy_KCG, num_units, strict=True):
        noisy_J = noisy_CG.flatten().numpy()
        estimate = expected_counts(noisy_J, num, epsilon, weight_J)
        counts.append(torch.from_numpy(estimate.mean_G))
        errors.append(torch.from_numpy(estimate.deviation_G))
    count_KCG = torch.stack(counts).view(noisy_KCG.shape)
    error_KCG = torch.stack(errors).view(noisy_KCG.shape)
    return count_KCG, error_KCG
