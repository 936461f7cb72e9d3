"""A samples router that reads the class or the text, against the closed form of Gaussians by expert and class."""

import math

import pytest
import torch
from torch import Tensor

from ddm.cli.conditions import condition_shares
from ddm.diffusion.path import LinearPath
from ddm.ensemble import Ensemble, SamplingOptions
from ddm.errors import MathError
from ddm.protocol.architecture import ClassCondition, Condition, TextCondition
from ddm.protocol.routers import SamplesSettings
from ddm.routers.base import ConditionalRouter, posterior
from ddm.routers.calibration import Calibrated
from ddm.routers.labelled import Labelled
from ddm.routers.samples import SamplesRouter, draw_from_experts, fit_samples
from tests.support.errors import has_subject

PATH = LinearPath()
SHAPE = (2, 1, 1)
SETTINGS = SamplesSettings(
    patch=1,
    hidden=32,
    depth=1,
    heads=2,
    num_steps=400,
    batch_size=128,
    learning_rate=4e-3,
    warmup_steps=20,
    weight_decay=0.0,
    conditional=True,
    drop=0.2,
)
MEAN_KCD = torch.tensor([[[-1.5, 0.0], [1.5, 1.0]], [[1.5, 0.0], [-1.5, 1.0]]], dtype=torch.float64)
SHARE_KC = torch.tensor([[0.8, 0.2], [0.35, 0.65]], dtype=torch.float64)
STD = 0.5
PRIOR = [0.3, 0.7]
TEXTS = torch.eye(2)[:, None]  # each a text of one token
CONDITIONS: list[Condition] = [ClassCondition(num_classes=2), TextCondition(dim=2, max_tokens=2)]


def log_joint(x_B: Tensor, t: float) -> Tensor:
    """``log p(x_t, c | k)``, (B, K, C)."""
    variance = ((1 - t) * STD) ** 2 + t**2
    square_BKC = (x_B.flatten(1).double()[:, None, None] - (1 - t) * MEAN_KCD).square().sum(-1)
    return SHARE_KC.log() - square_BKC / (2 * variance) - math.log(2 * math.pi * variance)


def draw(num: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """As many images of both experts, their experts and classes."""
    generator = torch.Generator().manual_seed(seed)
    expert_N = torch.arange(num) % 2
    class_N = (torch.rand(num, generator=generator) > SHARE_KC[expert_N, 0]).long()
    x = MEAN_KCD[expert_N, class_N] + STD * torch.randn(
        num, 2, generator=generator, dtype=torch.float64
    )
    return x.float().view(-1, *SHAPE), expert_N, class_N


def told(class_B: Tensor, condition: Condition) -> Tensor:
    """The condition as experts receive it; no class, no text."""
    if isinstance(condition, ClassCondition):
        return class_B
    return torch.where((class_B >= 0)[:, None, None], TEXTS[class_B.clamp(min=0)], 0.0)


@pytest.fixture(scope="module", params=CONDITIONS, ids=lambda condition: condition.kind)
def trained(request: pytest.FixtureRequest) -> tuple[Condition, SamplesRouter]:
    condition = request.param
    x, expert_N, class_N = draw(4000, 0)
    images = Labelled.of_experts(x, expert_N, 2, told(class_N, condition))
    return condition, fit_samples(images, SETTINGS, PATH, 0, condition=condition, knows_shares=True)


def test_posterior_given_a_condition_comes_close_to_bayes_rule(
    trained: tuple[Condition, SamplesRouter],
) -> None:
    condition, router = trained
    ensemble = Ensemble([lambda x, t, c: x] * 2, router, PRIOR, SHAPE, condition=condition)
    x, _, class_N = draw(400, 1)
    log_prior_K = torch.tensor(PRIOR, dtype=torch.float64).log()
    for t in (0.1, 0.4, 0.7, 1.0):
        x_t = (1 - t) * x + t * torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
        at = torch.full((400,), t)
        joint = log_joint(x_t, t)
        rows = torch.arange(400)
        exact = (joint[rows, :, class_N] + log_prior_K).softmax(1)
        wrong = (joint[rows, :, 1 - class_N] + log_prior_K).softmax(1)
        posterior = ensemble.posterior(x_t, at, told(class_N, condition)).exp()
        assert float((posterior - exact).abs().mean()) < 0.08
        assert float((posterior - wrong).abs().mean()) > 0.2  # the control: the other condition
        without = ensemble.posterior(x_t, at).exp()
        assert float((without - (joint.logsumexp(2) + log_prior_K).softmax(1)).abs().mean()) < 0.08


def test_at_pure_noise_the_posterior_is_the_experts_share_of_the_condition(
    trained: tuple[Condition, SamplesRouter],
) -> None:
    condition, router = trained
    ensemble = Ensemble([lambda x, t, c: x] * 2, router, PRIOR, SHAPE, condition=condition)
    x = torch.randn(5, *SHAPE)
    at = torch.ones(5)
    for label in (0, 1):
        one = label if isinstance(condition, ClassCondition) else TEXTS[label]
        share_K = torch.tensor(PRIOR).double() * SHARE_KC[:, label]
        posterior = ensemble.posterior(x, at, one).exp()
        torch.testing.assert_close(
            posterior, (share_K / share_K.sum()).expand(5, 2), atol=0.08, rtol=0
        )
        # what the command `ddm sample` says and samples by
        known = condition_shares(ensemble, one, None)
        torch.testing.assert_close(
            torch.tensor([known]).expand(5, 2), posterior, atol=1e-6, rtol=0, check_dtype=False
        )
        declared = ensemble.posterior(x, at, one, condition_prior=[0.9, 0.1]).exp()
        torch.testing.assert_close(declared, torch.tensor([[0.9, 0.1]]).double().expand(5, 2))
    torch.testing.assert_close(
        ensemble.posterior(x, at).exp(), torch.tensor([PRIOR]).double().expand(5, 2)
    )
    drawn = ensemble.sample(2000, steps=1, condition=one, options=SamplingOptions(solver="euler"))
    assert drawn.shares[0] == pytest.approx(
        float(share_K[0] / share_K.sum()), abs=0.08 + 5 * 0.5 / 2000**0.5
    )


def test_conditions_of_samples_are_read_row_by_row(
    trained: tuple[Condition, SamplesRouter],
) -> None:
    condition, router = trained
    ensemble = Ensemble(
        [lambda x, t, c: x] * 2,
        Calibrated(router, 2.0, [1, 1], router.path),
        PRIOR,
        SHAPE,
        condition=condition,
    )
    x, _, class_N = draw(12, 3)
    t_B = torch.linspace(0.05, 0.95, 12)
    posterior = ensemble.posterior(x, t_B, told(class_N, condition))
    for row in range(12):
        one = int(class_N[row]) if isinstance(condition, ClassCondition) else TEXTS[class_N[row]]
        alone = ensemble.posterior(x[row : row + 1], t_B[row : row + 1], one)
        torch.testing.assert_close(posterior[row : row + 1], alone, atol=1e-5, rtol=0)
    assert not torch.allclose(
        posterior, ensemble.posterior(x, t_B, told(1 - class_N, condition)), atol=0.1
    )


def test_temperature_divides_the_likelihood_and_not_the_shares(
    trained: tuple[Condition, SamplesRouter],
) -> None:
    condition, router = trained
    hot = Calibrated(router, 3.0, [1, 1], router.path)
    assert isinstance(hot, ConditionalRouter) and hot.knows_shares
    x, _, class_N = draw(8, 4)
    c_B = told(class_N, condition)
    at = torch.full((8,), 0.3)
    torch.testing.assert_close(hot.log_shares(c_B), router.log_shares(c_B))
    odds, cooled = (
        compared.given(c_B).log_likelihood(x, at).diff(dim=1) for compared in (router, hot)
    )
    torch.testing.assert_close((1 + 2 * 0.7**2) * cooled, odds)
    null = told(torch.full((8,), -1), condition)
    torch.testing.assert_close(
        router.given(null).log_likelihood(x, at), router.log_likelihood(x, at)
    )
    uniform = posterior(hot.given(c_B), x, torch.ones(8), torch.tensor([0.5, 0.5]).log())
    assert torch.equal(uniform, torch.full((8, 2), 0.5))


def test_router_that_only_saw_what_experts_were_told_to_draw_leaves_the_shares_to_the_caller() -> (
    None
):
    condition = ClassCondition(num_classes=2)
    x, expert_N, class_N = draw(60, 0)
    images = Labelled.of_experts(x, expert_N, 2, class_N)
    few = SETTINGS.model_copy(update={"num_steps": 2})
    router = fit_samples(images, few, PATH, 0, condition=condition)
    ensemble = Ensemble([lambda x, t, c: x] * 2, router, PRIOR, SHAPE, condition=condition)
    with pytest.raises(MathError, check=has_subject("condition_prior")):
        ensemble.posterior(x, torch.ones(60), 0)
    posterior = ensemble.posterior(x, torch.ones(60), 0, condition_prior=[1, 3]).exp()
    torch.testing.assert_close(posterior, torch.tensor([[0.25, 0.75]]).double().expand(60, 2))


def test_experts_draw_what_they_are_told() -> None:
    def expert(x_B: Tensor, t_B: Tensor, c_B: Tensor) -> Tensor:  # its data are all 4 c
        return (x_B - 4.0 * c_B.view(-1, 1, 1, 1)) / t_B.clamp(min=1e-3).view(-1, 1, 1, 1)

    class_EN = torch.tensor([[0, 1, 1], [1, 0, 0]])
    drawn = draw_from_experts([expert, expert], SHAPE, 3, 0, PATH, None, condition_EN=class_EN)
    torch.testing.assert_close(
        drawn, (4.0 * class_EN).view(2, 3, 1, 1, 1).expand(2, 3, *SHAPE), atol=0.4, rtol=0
    )
