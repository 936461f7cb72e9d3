"""Every family answers ``posterior(x_t, t, condition)``, with classes, with texts, and with one for each sample."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ddm.ensemble import Ensemble
from ddm.errors import MathError
from ddm.protocol.architecture import ClassCondition, Condition, NoCondition, TextCondition
from ddm.protocol.routers import SamplesSettings
from ddm.protocol.statistics import EXACT
from ddm.routers.calibration import Calibrated
from ddm.routers.conditional import ConditionalPrior
from ddm.routers.counts import CountsRouter
from ddm.routers.labelled import Labelled
from ddm.routers.learned import LearnedRouter
from ddm.routers.residual import Residual
from ddm.routers.samples import SamplesRouter, fit_samples
from ddm.sampling.guidance import ClassPrior
from tests.support.errors import has_subject
from tests.support.router_problems import GROUPS, PATH, clustered_layout, make_problem

WORLD = make_problem([[0.7, 0.1, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4]], [60, 40])
SKETCH = WORLD.sketch()
LAYOUT = clustered_layout()
PRIOR = [0.4, 0.2, 0.1, 0.3]
CLASSES = ClassCondition(num_classes=3)
TEXTS = TextCondition(dim=2, max_tokens=3)
TEXT_BLD = torch.randn(6, 2, 2, generator=torch.Generator().manual_seed(1))


def counts() -> CountsRouter:
    return CountsRouter.from_counts(SKETCH, WORLD.histogram(), WORLD.num_units, 5.0, PATH)


def learned() -> LearnedRouter:
    residual = Residual(SKETCH, 2, 8, 1, PATH)
    with torch.no_grad():
        residual.layers[-1].bias.copy_(torch.tensor([1.0, -1.0]))
    return LearnedRouter(counts(), residual)


def samples(condition: Condition, *, knows: bool) -> SamplesRouter:
    """A router with weights of chance."""
    settings = SamplesSettings(
        patch=2,
        hidden=8,
        depth=1,
        heads=2,
        num_steps=1,
        conditional=not isinstance(condition, NoCondition),
    )
    labels = {"none": None, "class": torch.arange(8) % 3, "text": TEXT_BLD[torch.arange(8) % 6]}[
        condition.kind
    ]
    images = Labelled.of_experts(torch.randn(8, 1, 4, 4), torch.arange(8) // 2, 4, labels)
    router = fit_samples(images, settings, PATH, 0, condition=condition, knows_shares=knows)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in router.net.parameters():
            weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
    return router


def family(name: str, condition: Condition) -> Any:
    match name:
        case "counts":
            return counts().split(LAYOUT)
        case "learned":
            return learned().split(LAYOUT)
        case "samples":
            return samples(NoCondition(), knows=False)
    return samples(condition, knows=name == "knowing samples")


FAMILIES = ["counts", "learned", "samples", "conditional samples", "knowing samples"]


def ensemble(name: str, condition: Condition, **more: Any) -> Ensemble:
    router = Calibrated(family(name, condition), 1.5, [1.0] * 4, PATH)
    return Ensemble([lambda x, t, c: x] * 4, router, PRIOR, (1, 4, 4), condition=condition, **more)


def noised(num: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.cat(WORLD.silos)[:num] + 0.1 * torch.randn(
        num, 1, 4, 4, generator=generator
    ), torch.full((num,), 0.3)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("condition", [CLASSES, TEXTS], ids=["class", "text"])
def test_posterior_under_a_condition_is_likelihood_times_the_shares_that_the_caller_declares(
    name: str, condition: Condition
) -> None:
    opened = ensemble(name, condition)
    (x, at) = noised()
    shares = [0.1, 0.5, 0.2, 0.2]
    several = (
        torch.tensor([0, 1, 2, 0, 1, 2]) if isinstance(condition, ClassCondition) else TEXT_BLD
    )
    log_posterior = opened.posterior(x, at, several, condition_prior=shares)
    assert log_posterior.shape == (6, 4)
    torch.testing.assert_close(log_posterior.exp().sum(1), torch.ones(6, dtype=log_posterior.dtype))
    for row in range(6):
        one = int(several[row]) if several.dim() == 1 else several[row]
        alone = opened.posterior(x[row : row + 1], at[:1], one, condition_prior=shares)
        torch.testing.assert_close(
            alone, log_posterior[row : row + 1], atol=1e-4, rtol=0, check_dtype=False
        )
    pure = opened.posterior(x, torch.ones(6), several, condition_prior=shares).exp()
    torch.testing.assert_close(
        pure, torch.tensor(shares).expand(6, 4), check_dtype=False, atol=1e-6, rtol=0
    )
    same_shares = opened.posterior(x, at, several, condition_prior=PRIOR)
    reads = "samples" in name and name != "samples"
    assert torch.allclose(same_shares.double(), opened.posterior(x, at).double(), atol=1e-4) == (
        not reads
    )


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("condition", [CLASSES, TEXTS], ids=["class", "text"])
def test_without_declared_shares_only_a_router_that_learned_them_answers(
    name: str, condition: Condition
) -> None:
    opened = ensemble(name, condition)
    (x, at) = noised()
    one = 1 if isinstance(condition, ClassCondition) else TEXT_BLD[0]
    if name != "knowing samples":
        with pytest.raises(MathError, check=has_subject("condition_prior")):
            opened.posterior(x, at, one)
        return
    posterior = opened.posterior(x, torch.ones(6), one).exp()
    net = opened.router.router.net  # type: ignore[union-attr]
    label = torch.tensor([1]) if isinstance(condition, ClassCondition) else TEXT_BLD[:1]
    wanted = (torch.tensor(PRIOR).log() + net.log_shares(label, 1)).softmax(1)
    torch.testing.assert_close(posterior, wanted.expand(6, 4), check_dtype=False, atol=1e-6, rtol=0)
    assert float((wanted - torch.tensor(PRIOR)).abs().max()) > 0.01


def test_class_counts_state_the_shares_of_a_class_whatever_the_family() -> None:
    (x, at) = noised()
    class_N = torch.tensor([0, 1, 2, 0, 1, 2])
    cells = torch.randint(1, 9, (2, 3, GROUPS), generator=torch.Generator().manual_seed(3))
    conditional = ConditionalPrior.from_counts(
        SKETCH, cells, cells.sum((1, 2)).tolist(), EXACT, LAYOUT
    )
    for name in FAMILIES:
        opened = ensemble(name, CLASSES)

        def known(label: int, name: str = name) -> ClassPrior:  # as a release is loaded
            own = None if name.endswith(" samples") else conditional.router(label, SKETCH, PATH)
            return ClassPrior(conditional.prior_CE[label].tolist(), own)

        opened = Ensemble(
            opened.experts, opened.router, PRIOR, (1, 4, 4), condition=CLASSES, class_prior=known
        )
        pure = opened.posterior(x, torch.ones(6), class_N).exp()
        torch.testing.assert_close(
            pure, conditional.prior_CE[class_N], check_dtype=False, atol=1e-6, rtol=0
        )
        assert bool(opened.posterior(x, at, class_N).isfinite().all())
