import json

import numpy as np
import pytest
import torch
from torch import Tensor

from ddm.diffusion.path import LinearPath
from ddm.errors import NumericalError, ShapeError
from ddm.io.tensors import TensorSpec
from ddm.privacy.noise import discrete_laplace
from ddm.protocol.plan import Plan
from ddm.routers.conditional import ConditionalPrior
from ddm.routers.sketch import Sketch
from ddm.statistics.class_counts import ClassCounts
from tests.support.documents import plan_document
from tests.support.errors import has_subject
from tests.support.router_problems import (
    GROUPS,
    clustered_layout,
    make_problem,
    one_expert_per_silo,
)
from tests.support.seeded import SeededNoise

CLASSES = 3
NUM_UNITS = [2000, 1000]


@pytest.fixture(scope="module")
def sketch() -> Sketch:
    return make_problem([[0.25] * 4, [0.25] * 4], [50, 50]).sketch()


def _held() -> Tensor:
    """Silo 0 holds classes 0 and 1, silo 1 class 1 alone, nobody class 2; class c lies in group c and around."""
    rng = np.random.default_rng(0)
    held = np.zeros((2, CLASSES, GROUPS), dtype=np.int64)
    for silo, label, num in [(0, 0, 1500), (0, 1, 500), (1, 1, 1000)]:
        held[silo, label] = rng.multinomial(num, np.roll([0.7, 0.2, 0.05, 0.05], label))
    return torch.from_numpy(held)


def _noised(epsilon: float, seed: int = 0) -> Tensor:
    held = _held()
    return held + torch.from_numpy(
        discrete_laplace(held.numel(), epsilon, SeededNoise(seed)).reshape(held.shape)
    )


def test_conditional_prior_is_who_holds_the_class(sketch: Sketch) -> None:
    class_prior = ConditionalPrior.from_counts(
        sketch, _noised(2.0), NUM_UNITS, 2.0, one_expert_per_silo(2)
    )
    held = _held().double()
    expected = held.sum(2) / held.sum((0, 2)).clamp(min=1)
    for label in (0, 1):
        torch.testing.assert_close(
            class_prior.log_prior(label).exp(), expected[:, label], atol=0.03, rtol=0
        )
    shares = held[0, 0] / held[0, 0].sum()
    torch.testing.assert_close(class_prior.mass_ECG[0, 0], shares, atol=0.03, rtol=0)
    # not the plain prior
    assert float((class_prior.log_prior(0).exp() - torch.tensor([2 / 3, 1 / 3])).abs().max()) > 0.3


def test_class_that_nobody_holds_is_answered_by_the_prior(sketch: Sketch) -> None:
    prior = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
    off = []
    off_at_their_word = []
    for seed in range(20):
        noisy = _noised(1.0, seed)
        class_prior = ConditionalPrior.from_counts(
            sketch, noisy, NUM_UNITS, 1.0, one_expert_per_silo(2)
        )
        off.append(float((class_prior.log_prior(2).exp() - prior).abs().max()))
        counts = noisy[:, 2].clamp(min=0).sum(1) + 1e-3 * prior
        off_at_their_word.append(float((counts / counts.sum() - prior).abs().max()))
    # the noise alone would name a silo
    assert np.mean(off) < 0.15 < 0.25 < np.mean(off_at_their_word)


def test_experts_of_a_silo_split_its_share_of_a_class_by_their_groups(sketch: Sketch) -> None:
    silos = ConditionalPrior.from_counts(sketch, _held(), NUM_UNITS, 100.0, one_expert_per_silo(2))
    experts = ConditionalPrior.from_counts(sketch, _held(), NUM_UNITS, 100.0, clustered_layout())
    together = experts.prior_CE.view(CLASSES, 2, 2).sum(2)
    torch.testing.assert_close(together, silos.prior_CE)
    # class 0 lies in the first half of groups
    assert float(experts.prior_CE[0, 0]) == pytest.approx(0.9, abs=0.03)
    assert float(experts.mass_ECG[0, 0, GROUPS // 2 :].abs().max()) == 0


def test_class_counts_have_a_cell_for_each_class_and_group() -> None:
    document = plan_document()
    document["statistics"] |= {
        "class_counts": {"epsilon": 0.5, "num_classes": CLASSES},
        "counts": {"epsilon": 1.0, "num_groups": GROUPS},
    }
    plan = Plan.model_validate_json(json.dumps(document))
    assert ClassCounts(plan.statistics).tensor_specs(10) == {
        "counts": TensorSpec("I64", (CLASSES, GROUPS))
    }


def test_conditional_prior_refuses_what_is_no_prior(sketch: Sketch) -> None:
    class_prior = ConditionalPrior.from_counts(
        sketch, _held(), NUM_UNITS, 1.0, one_expert_per_silo(2)
    )
    with pytest.raises(NumericalError, check=has_subject("class priors")):
        ConditionalPrior(2 * class_prior.prior_CE, class_prior.mass_ECG)
    for label in (-1, CLASSES):
        with pytest.raises(ShapeError, check=has_subject("class")):
            class_prior.log_prior(label)


def test_router_given_a_class_tells_experts_apart_by_where_the_class_lies_in_them(
    sketch: Sketch,
) -> None:
    """Brute force at one point: the groups' Gaussians, weighted by where class 1 lies in each expert."""
    class_prior = ConditionalPrior.from_counts(
        sketch, _noised(2.0), NUM_UNITS, 2.0, one_expert_per_silo(2)
    )
    path = LinearPath()
    t = 0.4
    x_t = torch.randn(
        3, sketch.mean_D.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    s_BR = sketch.of(x_t, torch.full((3,), t), path).double()
    noise = (t / sketch.scale) ** 2 * torch.eye(sketch.rank, dtype=torch.float64)
    groups = [
        torch.distributions.MultivariateNormal((1 - t) * mean, (1 - t) ** 2 * cov + noise).log_prob(
            s_BR
        )
        for mean, cov in zip(
            sketch.group_mean_GR.double(), sketch.group_cov_GRR.double(), strict=True
        )
    ]
    density_BG = torch.stack(groups, 1)
    expected_BK = torch.stack(
        [(density_BG + class_prior.mass_ECG[k, 1].log()).logsumexp(1) for k in (0, 1)], 1
    )
    answer_BK = class_prior.router(1, sketch, path).log_likelihood(
        x_t, torch.full((3,), t, dtype=torch.float64)
    )
    difference = (answer_BK - expected_BK).double()
    assert float((difference - difference[:, :1]).abs().max()) < 1e-6
    other = class_prior.router(0, sketch, path).log_likelihood(
        x_t, torch.full((3,), t, dtype=torch.float64)
    )
    assert float(((other - answer_BK) - (other - answer_BK)[:, :1]).abs().max()) > 1e-3
    with pytest.raises(ShapeError):
        class_prior.router(CLASSES, sketch, path)
