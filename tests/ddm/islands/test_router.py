"""The router of islands: judged on labelled images without an assumption, trained on labels, not on groups."""

import numpy as np
import pytest
import torch

from ddm.diffusion.path import LinearPath
from ddm.partition.layout import ExpertPart, Layout
from ddm.protocol.partition import SiloPartition
from ddm.protocol.routers import LearnedSettings
from ddm.protocol.statistics import EXACT
from ddm.routers.comparison import minus_prior
from ddm.routers.counts import CountsRouter
from ddm.routers.evaluation import BANDS, cross_entropy
from ddm.routers.public import Evidence, PublicData
from ddm.routers.residual import PublicSketches, fit_residual
from ddm.routers.sketch import Sketch

PATH = LinearPath()


def problem(num: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two islands on a line through one group: their means differ, and no group tells them apart."""
    generator = torch.Generator().manual_seed(seed)
    label_N = (torch.rand(num, generator=generator) < 0.3).long()
    images = torch.randn(num, 1, 2, 2, generator=generator) * 0.3
    images[:, 0, 0, 0] += 2.0 * label_N - 1.0
    return images, label_N


def one_group_router() -> tuple[CountsRouter, torch.Tensor, torch.Tensor]:
    images, label_N = problem(2000, 0)
    sketch = Sketch.fit(images, torch.zeros(2000, dtype=torch.int64), 4, 1)
    num_units = torch.bincount(label_N).tolist()
    return (
        CountsRouter.from_counts(sketch, torch.tensor(num_units)[:, None], num_units, EXACT, PATH),
        images,
        label_N,
    )


def test_labelled_images_judge_a_router_as_its_cross_entropy_by_label_does() -> None:
    """The weights of a federation's public images, with islands as groups, against the plain mean over labels."""
    router, _, _ = one_group_router()
    images, label_N = problem(400, 1)
    num_units = [1300, 700]
    parts = [[ExpertPart(f"{k}", None, (0, 1))] for k in range(2)]
    evidence = Evidence(
        torch.diag(torch.tensor(num_units)), num_units, EXACT, Layout.of(_silos(), parts)
    )
    judged = PublicData(images, label_N, evidence, [0.65, 0.35], PATH, seed=3)
    shifted = _Leaning(router)
    by_label = cross_entropy(shifted, images, label_N, [0.65, 0.35], BANDS, 3)
    means = judged.weights.means(np.stack(judged.losses(shifted)))
    assert means.tolist() == pytest.approx([band.value for band in by_label], rel=1e-5)
    value, low, high = minus_prior(shifted, judged)
    entropy = -(0.65 * torch.tensor(0.65).log() + 0.35 * torch.tensor(0.35).log())
    assert value == pytest.approx(
        sum(band.value for band in by_label) / len(BANDS) - float(entropy), rel=1e-5
    )
    assert low < value < high


class _Leaning:
    """A router that answers something, unlike the one of a single group."""

    num_experts = 2

    def __init__(self, router: CountsRouter) -> None:
        self.router = router

    def log_likelihood(self, x_B: torch.Tensor, t_B: torch.Tensor) -> torch.Tensor:
        lean_B = (1 - t_B) * x_B[:, 0, 0, 0]
        return torch.stack([-lean_B, lean_B], 1)


def _silos() -> SiloPartition:
    return SiloPartition(min_images=1)


def test_network_trained_on_labels_tells_islands_apart_that_share_a_group() -> None:
    counts, images, label_N = one_group_router()
    settings = LearnedSettings(hidden=16, depth=1, num_steps=200)
    prior_K = torch.tensor([0.7, 0.3])
    s_NR = counts.sketch.of(images, torch.zeros(len(images)), PATH).float()
    group_N = torch.zeros(len(images), dtype=torch.int64)
    fresh, fresh_N = problem(500, 2)
    s_BR = counts.sketch.of(fresh, torch.zeros(500), PATH).float()
    t_B = torch.zeros(500)

    def share_right(public: PublicSketches) -> float:
        residual = fit_residual(counts, public, prior_K, settings, seed=0)
        logits_BK = counts.sketch_log_likelihood(s_BR, t_B) + residual(s_BR, t_B) + prior_K.log()
        return float((logits_BK.argmax(1) == fresh_N).double().mean())

    assert share_right(PublicSketches(s_NR, group_N, label_N)) > 0.95
    # the control: shares of a group tell nothing
    assert share_right(PublicSketches(s_NR, group_N)) < 0.8
