"""Whose sketch is this, and what does its image look like? Asked by one who has all images, and by one who has none."""

import gzip
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from ddm.encoders import PcaEncoder
from ddm.partition.clustering import fit_clustering
from ddm.privacy.accounting import GaussianMechanism, gaussian_mu, total_epsilon
from ddm.routers.sketch import Sketch
from ddm.statistics.base import StatisticSource
from examples.paper.privacy.attacks import Rates, error_reduction, reconstruct, reidentification
from examples.paper.privacy.drawing import make_plan, make_source, noise_of, sketches_in_order

RANK = 12
GROUPS = 16
EPSILON = 7.0
DELTA = 1e-5
TENTH_OF_THE_NOISE = total_epsilon([GaussianMechanism(mu=10 * gaussian_mu(EPSILON, DELTA))], DELTA)


@dataclass(frozen=True)
class Cohort:
    """Private images, their public groups and what is public about them."""

    images: Tensor
    group_N: Tensor
    sketch: Sketch
    group_mean_GD: Tensor

    @classmethod
    def of(cls, images: Tensor, public: Tensor, rank: int) -> "Cohort":
        encoder = PcaEncoder.fit(public, 32)
        clusters = fit_clustering(encoder.encode(public), GROUPS, 4, GROUPS, seed=0)
        public_N = clusters.groups(encoder.encode(public))
        mean_GD = torch.stack(
            [public[public_N == group].flatten(1).mean(0) for group in range(GROUPS)]
        )
        sketch = Sketch.fit(public, public_N, rank, GROUPS)
        return cls(images, clusters.groups(encoder.encode(images)), sketch, mean_GD)

    def source(self, epsilon: float) -> StatisticSource:
        terms = {"epsilon": epsilon, "delta": DELTA, "rank": self.sketch.rank}
        plan = make_plan({"sketch": terms}, rank=self.sketch.rank)
        return make_source(plan, self.sketch, self.images, torch.zeros(len(self.images)).long())

    def rates(self, epsilon: float, draws: int, *, together: bool = False) -> Rates:
        """The rates of right assignments, averaged over releases."""
        source = self.source(epsilon)
        alpha, _ = noise_of(source.plan, self.sketch)
        s_0_NR = self.sketch.project(self.images)
        results = [
            reidentification(s_0_NR, sketches_in_order(source), alpha, together=together)
            for _ in range(draws)
        ]
        return Rates(
            *(
                float(np.mean([getattr(one, name) for one in results]))
                for name in Rates.__dataclass_fields__
            )
        )

    def reductions(self, released_NR: Tensor, alpha: float, sigma: float) -> tuple[float, float]:
        """How much the sketches tell of images beyond the public mean, and beyond the mean of the image's group."""
        images_ND = self.images.flatten(1)
        sketch = self.sketch
        share_G = torch.bincount(self.group_N, minlength=GROUPS) / len(self.group_N)
        mean_R = share_G.double() @ sketch.group_mean_GR.double()
        apart_GR = sketch.group_mean_GR.double() - mean_R
        within_GRR = sketch.group_cov_GRR.double()
        whole_RR = (
            torch.einsum("g,gij->ij", share_G.double(), within_GRR)
            + (apart_GR.T * share_G) @ apart_GR
        )
        blind_ND = share_G @ self.group_mean_GD
        by_mean = reconstruct(released_NR, alpha, sigma, sketch, blind_ND, mean_R, whole_RR)
        grouped_ND = self.group_mean_GD[self.group_N]
        by_group = torch.empty_like(by_mean)
        for group in range(GROUPS):
            rows = self.group_N == group
            by_group[rows] = reconstruct(
                released_NR[rows],
                alpha,
                sigma,
                sketch,
                grouped_ND[rows],
                sketch.group_mean_GR[group],
                within_GRR[group],
            )
        return error_reduction(images_ND, blind_ND, by_mean), error_reduction(
            images_ND, grouped_ND, by_group
        )


@cache
def digits() -> Cohort:
    """All 1,797 digits; public parts are fitted on the same images, which only helps the attacker."""
    images = torch.from_numpy(load_digits().images).float().unsqueeze(1) / 8 - 1
    return Cohort.of(images, images, RANK)


def fashion_mnist(rank: int) -> Cohort:
    """2,000 private images, and 12,000 others that are public."""
    folder = os.environ.get("FASHION_MNIST")
    if not folder:
        pytest.skip("the variable FASHION_MNIST does not name the folder of the data set's files")
    with gzip.open(Path(folder) / "train-images-idx3-ubyte.gz") as packed:
        pixels = np.frombuffer(packed.read(), dtype=np.uint8, offset=16).reshape(-1, 1, 28, 28)[
            :14_000
        ]
    images = torch.from_numpy(pixels.astype(np.float32)) / 127.5 - 1
    return Cohort.of(images[12_000:], images[:12_000], rank)


def test_released_sketches_of_digits_are_not_matched_to_their_images() -> None:
    rates = digits().rates(EPSILON, 15)
    assert rates.average < 0.01
    assert rates.outlying < 0.05
    loud = digits().rates(TENTH_OF_THE_NOISE, 2)
    assert loud.average > 0.2
    assert loud.outlying > 0.4


def test_matching_all_sketches_of_digits_at_once_does_no_better() -> None:
    assert digits().rates(EPSILON, 3, together=True).average < 0.01
    assert digits().rates(TENTH_OF_THE_NOISE, 1, together=True).average > 0.2


def test_released_sketches_of_digits_hardly_improve_a_guess_of_the_image() -> None:
    cohort = digits()
    source = cohort.source(EPSILON)
    alpha, sigma_over_scale = noise_of(source.plan, cohort.sketch)
    reductions = cohort.reductions(
        sketches_in_order(source), alpha, sigma_over_scale * cohort.sketch.scale
    )
    assert -0.02 < reductions[0] < 0.06
    assert -0.02 < reductions[1] < 0.03
    bare = cohort.reductions(cohort.sketch.project(cohort.images), 1.0, 1e-9)
    assert bare[0] > 0.7
    assert bare[1] > 0.5


def test_no_linear_guess_from_sketches_is_better_than_the_reconstruction() -> None:
    cohort = digits()
    s_0_NR = cohort.sketch.project(cohort.images)
    images_ND = cohort.images.flatten(1).double()
    guess_D = images_ND.mean(0)
    mean_R = s_0_NR.mean(0)
    cov_RR = torch.cov(s_0_NR.T)
    noise = 0.3 * torch.randn(
        s_0_NR.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    found_ND = reconstruct(
        s_0_NR + noise, 1.0, 0.3 * cohort.sketch.scale, cohort.sketch, guess_D, mean_R, cov_RR
    )
    design = torch.cat([s_0_NR + noise, torch.ones(len(noise), 1, dtype=torch.float64)], 1)
    fitted_ND = design @ torch.linalg.lstsq(design, images_ND).solution
    ours, best = (error_reduction(images_ND, guess_D, guess) for guess in (found_ND, fitted_ND))
    assert best - 0.02 < ours <= best
    assert (
        error_reduction(images_ND, guess_D, (s_0_NR + noise) @ cohort.sketch.basis_RD.double())
        < best - 0.1
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "epsilon"), [(12, 7.0), (12, 3.0), (12, 1.0), (8, 7.0), (16, 7.0)]
)
def test_released_sketches_of_fashion_mnist_are_not_matched_to_their_images(
    rank: int, epsilon: float
) -> None:
    cohort = fashion_mnist(rank)
    rates = cohort.rates(epsilon, 40)
    assert rates.average < 0.01
    assert rates.outlying < 0.05
    assert cohort.rates(epsilon, 3, together=True).average < 0.01
    assert cohort.rates(TENTH_OF_THE_NOISE, 2).average > 0.08
