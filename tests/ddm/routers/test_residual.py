import math
import re

import pytest
import torch
from torch import Tensor

from ddm.errors import NumericalError, ShapeError
from ddm.protocol.routers import LearnedSettings
from ddm.routers.counts import CountsRouter
from ddm.routers.residual import PublicSketches, Residual, fit_residual
from ddm.routers.sketch import Sketch
from tests.support.errors import has_subject
from tests.support.router_problems import GROUPS, PATH, make_problem

SETTINGS = LearnedSettings(hidden=32, depth=2, num_steps=300)
PRIOR = torch.tensor([0.5, 0.5])
SHARES = torch.tensor([[0.9, 0.1], [0.1, 0.9]])
LOBE = 3.0
SPREAD = 0.3


def _two_lobes(num: int, seed: int) -> tuple[Tensor, Tensor]:
    """Group 0 lies in two lobes around group 1, which no Gaussian describes; one direction of four matters."""
    generator = torch.Generator().manual_seed(seed)
    group_N = torch.arange(num) % 2
    side_N = 2.0 * torch.randint(2, (num,), generator=generator) - 1
    x = SPREAD * torch.randn(num, 4, generator=generator)
    x[:, 0] += torch.where(group_N == 0, LOBE * side_N, torch.zeros(()))
    return x.view(num, 1, 2, 2), group_N


def _lobes_log_likelihood(x_0: Tensor, t: float) -> Tensor:
    """The closed form: each silo is a mixture of three normals along the first direction."""
    alpha = 1 - t
    sigma = t
    std = math.hypot(alpha * SPREAD, sigma)
    normal = torch.distributions.Normal(alpha * torch.tensor([-LOBE, 0.0, LOBE]), std)
    density = normal.log_prob(x_0[:, None]).exp()
    group = torch.stack([(density[:, 0] + density[:, 2]) / 2, density[:, 1]], 1)
    return (group @ SHARES.T).log()


def test_residual_finds_what_the_gaussians_miss_near_the_data() -> None:
    public, group_N = _two_lobes(1200, seed=0)
    sketch = Sketch.fit(public, group_N, 2, 2)
    mixture = CountsRouter(sketch, SHARES.log(), PATH)
    residual = fit_residual(
        mixture, PublicSketches.of(public, group_N, sketch, PATH), PRIOR, SETTINGS, seed=0
    )
    assert residual.is_nonzero
    fresh, fresh_group = _two_lobes(2000, seed=1)
    target = SHARES.T[fresh_group]
    for t in (0.1, 0.3):
        noised = (1 - t) * fresh + t * torch.randn(
            fresh.shape, generator=torch.Generator().manual_seed(2)
        )
        t_B = torch.full((2000,), t)
        s_BR = sketch.of(noised, t_B, PATH)
        base = mixture.sketch_log_likelihood(s_BR, t_B).float()
        losses = [
            float(-(target * logits.log_softmax(1)).sum(1).mean())
            for logits in (
                base,
                base + residual(s_BR, t_B),
                _lobes_log_likelihood(noised[:, 0, 0, 0], t),
            )
        ]
        gaussians, corrected, exact = losses
        assert gaussians - exact > 0.02  # there is something to find
        assert corrected - exact < 0.4 * (gaussians - exact)


def test_residual_stays_silent_where_the_mixture_is_the_truth() -> None:
    world = make_problem([[0.7, 0.1, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4]], [50, 50])
    sketch = Sketch.fit(world.public, world.public_group, 16, GROUPS)
    mixture = CountsRouter(
        sketch, torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4]]).log(), PATH
    )
    lessons = PublicSketches.of(world.public, world.public_group, sketch, PATH)
    residual = fit_residual(mixture, lessons, PRIOR, SETTINGS, seed=0)
    s_BR = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    t_B = torch.full((64,), 0.3)
    assert not residual.is_nonzero
    assert not bool(residual(s_BR, t_B).any())


def test_residual_is_exactly_zero_at_t_1_and_only_there() -> None:
    world = make_problem([[0.25] * 4, [0.25] * 4], [40, 40])
    residual = Residual(world.sketch(), 2, 8, 1, PATH).requires_grad_(False)
    with torch.no_grad():
        residual.layers[-1].bias.fill_(1.0)
    s_BR = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    assert not bool(residual(s_BR, torch.ones(5)).any())
    assert float(residual(s_BR, torch.full((5,), 0.9)).abs().min()) > 0.05


def test_residual_answers_the_same_for_the_same_seed_and_another_for_another() -> None:
    public, group_N = _two_lobes(400, seed=0)
    sketch = Sketch.fit(public, group_N, 2, 2)
    mixture = CountsRouter(sketch, SHARES.log(), PATH)
    lessons = PublicSketches.of(public, group_N, sketch, PATH)
    few = SETTINGS.model_copy(update={"num_steps": 40})
    first, again, other = (
        fit_residual(mixture, lessons, PRIOR, few, seed=seed).layers[0].weight for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_training_that_diverges_is_refused_with_settings_that_its_router_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    public, group_N = _two_lobes(40, seed=0)
    sketch = Sketch.fit(public, group_N, 2, 2)
    mixture = CountsRouter(sketch, SHARES.log(), PATH)
    lessons = PublicSketches.of(public, group_N, sketch, PATH)
    broken = torch.tensor(float("nan"))
    monkeypatch.setattr("ddm.routers.residual._TrainingSet.batch_loss", lambda *_: broken)
    with pytest.raises(NumericalError, match="step 1") as refused:
        fit_residual(mixture, lessons, PRIOR, SETTINGS, seed=0)
    named = re.findall(r"router\.(\w+)", str(refused.value.remedy))
    assert named and set(named) <= LearnedSettings.model_fields.keys()


def test_residual_refuses_public_images_without_their_groups() -> None:
    public, group_N = _two_lobes(40, seed=0)
    sketch = Sketch.fit(public, group_N, 2, 2)
    with pytest.raises(ShapeError, check=has_subject("public images")):
        PublicSketches.of(public, group_N[:-1], sketch, PATH)
