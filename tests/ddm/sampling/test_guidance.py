"""Guidance and conditional priors against the closed form of a mixture whose components have classes."""

# Shape legend: K experts, C components, B batch.
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddm.diffusion.path import Expert
from ddm.ensemble import Ensemble, Lock, Sample, SamplingOptions, Strategy, TopK, TopOne
from ddm.errors import MathError, ShapeError
from ddm.protocol.architecture import ClassCondition, TextCondition
from ddm.sampling.guidance import ClassPrior
from ddm.sampling.options import sampling_keywords
from tests.support.case import case
from tests.support.errors import has_subject
from tests.support.gaussian_mixture import GaussianMixture, UninformedRouter, four_silos

CLASS_C = torch.tensor([0, 1, 1, 0, 1, 1, 0])
"""Silo 2 holds no image of class 0, silo 3 none of class 1."""


def within(label: int) -> Tensor:
    """The weights of a class's components."""
    return torch.where(label == CLASS_C, four_silos().weight_C, 0.0)


def prior_given(label: int) -> list[float]:
    return [float(within(label)[four_silos().silo_C == k].sum()) for k in range(4)]


class ClassRouter:
    """The exact ``log p(x_t | k, c, t)``; of an expert that never saw the class it says anything."""

    num_experts = 4

    def __init__(self, label: int) -> None:
        self.label = label

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        mixture = four_silos()
        columns = []
        for k in range(4):
            weight_C = torch.where(mixture.silo_C == k, within(self.label), 0.0)
            known = float(weight_C.sum()) > 0
            weight_C = weight_C / weight_C.sum() if known else mixture.weights_of(k)
            columns.append(
                mixture.log_joint(x_B, t_B, weight_C).logsumexp(dim=-1) + (0.0 if known else 50.0)
            )
        return torch.stack(columns, dim=-1)


def conditional_expert(mixture: GaussianMixture, k: int) -> Expert:
    """Silo k's exact expert, told a class per sample or -1; it refuses a class that it never saw."""

    def expert(x_B: Tensor, t_B: Tensor, c_B: Tensor | None = None) -> Tensor:
        u_B = mixture.expert(k)(x_B, t_B)
        for label in () if c_B is None else sorted({*c_B.tolist()} - {-1}):
            weight_C = torch.where(mixture.silo_C == k, within(int(label)), 0.0)
            if float(weight_C.sum()) == 0:
                raise RuntimeError("an expert was asked about a class that it never saw")
            assert c_B is not None
            u_B = torch.where(
                (c_B == label)[:, None], mixture.velocity_under(weight_C)(x_B, t_B), u_B
            )
        return u_B

    return expert


def exact(**changes: object) -> Ensemble:
    mixture = four_silos()
    settings = {
        "experts": [conditional_expert(mixture, k) for k in range(4)],
        "router": mixture,
        "prior": mixture.prior_K,
        "shape": (2,),
        "chunk_size": 1024,
        "condition": ClassCondition(num_classes=2),
        "class_prior": lambda label: ClassPrior(prior_given(label), ClassRouter(label)),
    }
    return Ensemble(**(settings | changes))  # type: ignore[arg-type]


def noised() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = 2 * torch.randn(300, 2, generator=generator, dtype=torch.float64)
    return x, torch.linspace(0.05, 1.0, 300, dtype=torch.float64)


def truth(label: int, guidance: float, x: Tensor, t_B: Tensor) -> Tensor:
    """Guidance of the pooled data's own velocities: no silo appears in it."""
    mixture = four_silos()
    return (1 + guidance) * mixture.velocity_under(within(label))(
        x, t_B
    ) - guidance * mixture.velocity(x, t_B)


def test_guided_mixture_is_the_guided_velocity_of_the_pooled_data() -> None:
    for label, guidance in product([0, 1], [0.0, 0.5, 4.0]):
        with case(label=label, guidance=guidance):
            x, t_B = noised()
            velocity = exact().velocity(x, t_B, condition=label, guidance=guidance)
            assert (velocity - truth(label, guidance, x, t_B)).abs().max() < 1e-9 * (1 + guidance)


def test_guided_mixture_is_wrong_with_one_set_of_weights_for_both_branches() -> None:
    """Each of the three parts of a branch's weights matters: prior, router and mask."""
    x, t_B = noised()
    for class_prior in (
        ClassPrior(prior_given(0), four_silos()),  # the router of no condition
        ClassPrior(
            [p if q else 0.0 for p, q in zip(four_silos().prior_K, prior_given(0), strict=True)],
            ClassRouter(0),
        ),
        ClassPrior(prior_given(0), UninformedRouter(4)),
    ):
        wrong = exact(class_prior=lambda label, class_prior=class_prior: class_prior)
        off = (
            (wrong.velocity(x, t_B, condition=0, guidance=1.0) - truth(0, 1.0, x, t_B)).abs().max()
        )
        assert off > 0.05


def test_prior_of_a_class_follows_another_prior_of_the_experts() -> None:
    x, t_B = noised()
    own = four_silos()
    wanted = (0.1, 0.6, 0.2, 0.1)
    weight_C = own.weight_C * torch.tensor(
        [wanted[k] / own.prior_K[k] for k in own.silo_C.tolist()], dtype=torch.float64
    )
    other = replace(own, weight_C=weight_C)
    velocity = exact().velocity(x, t_B, wanted, condition=1, guidance=2.0)
    branch = other.velocity_under(torch.where(CLASS_C == 1, weight_C, 0.0))(x, t_B)
    assert (velocity - (3 * branch - 2 * other.velocity(x, t_B))).abs().max() < 1e-9
    assert (velocity - exact().velocity(x, t_B, condition=1, guidance=2.0)).abs().max() > 0.1


def test_conditional_samples_have_the_class_and_the_shares_of_those_who_hold_it() -> None:
    """Without guidance every exact strategy stays exact, and no expert is asked about a class that it never saw."""
    for strategy in ["full", Sample(), Lock(), Lock(0.6), TopK(4)]:
        with case(strategy=strategy):
            num = 2000
            expected = torch.tensor(prior_given(0), dtype=torch.float64)
            expected = expected / expected.sum()
            drawn = exact().sample(
                num,
                strategy=strategy,
                steps=25,
                condition=0,
                options=SamplingOptions(solver="heun"),
            )
            silo_N = four_silos().silo_of(drawn.images)
            component_N = (
                four_silos()
                .log_joint(drawn.images, torch.zeros(num), four_silos().weight_C)
                .argmax(dim=-1)
            )
            assert (CLASS_C[component_N] == 0).double().mean() > 0.99
            share_K = torch.bincount(silo_N, minlength=4).double() / num
            error = (expected * (1 - expected) / num).sqrt()
            assert ((share_K - expected).abs() <= 4 * error + 2e-3).all()
            assert share_K[2] < 0.01


def test_sample_and_lock_are_approximations_under_guidance_alone() -> None:
    """Guidance draws a class's samples together; following one expert at a time it does so less."""

    def spread(strategy: str, guidance: float) -> float:
        drawn = exact().sample(
            1000,
            strategy=strategy,
            steps=16,
            condition=1,
            guidance=guidance,
            options=SamplingOptions(solver="heun"),
        )
        return float(drawn.images[:, 0].std())

    plain, guided = (
        [spread(strategy, g) for strategy in ("full", "sample", "lock")] for g in (0.0, 3.0)
    )
    assert max(plain) - min(plain) < 0.05
    assert guided[1] - guided[0] > 0.05
    assert guided[2] - guided[0] > 0.1


def test_expert_is_visited_once_for_both_branches() -> None:
    experts: list[int] = []

    def watched(k: int) -> Expert:
        def expert(x_B: Tensor, t_B: Tensor, c_B: Tensor) -> Tensor:
            experts.append(k)
            return conditional_expert(four_silos(), k)(x_B, t_B, c_B)

        return expert

    exact(experts=[watched(k) for k in range(4)]).sample(
        20,
        strategy="full",
        steps=3,
        condition=0,
        guidance=1,
        options=SamplingOptions(solver="euler"),
    )
    assert experts == [0, 1, 2, 3] * 3


def test_silo_that_holds_no_image_of_a_class_declared_so_is_never_asked() -> None:
    declared = (0.0, 1.0, 0.0, 1.0)
    drawn = exact(class_prior=None).sample(
        200,
        strategy="sample",
        steps=5,
        condition=0,
        options=SamplingOptions(condition_prior=declared),
    )
    assert drawn.shares[0] == drawn.shares[2] == 0.0


@pytest.mark.parametrize("strategy", ["full", Lock(), TopOne()])
def test_expert_of_prior_0_makes_nothing_under_a_condition_whatever_it_holds(
    strategy: str | Strategy,
) -> None:
    """Without a condition it makes nothing either; the histograms of a class still tell what it once held."""
    prior = (0.0, *four_silos().prior_K[1:])
    drawn = exact(prior=prior).sample(200, strategy=strategy, steps=4, condition=0, guidance=1.0)
    assert drawn.shares[0] == 0.0
    assert (
        exact().sample(200, strategy=strategy, steps=4, condition=0, guidance=1.0).shares[0] > 0.1
    )
    back = exact(prior=prior).sample(200, steps=4, condition=0, prior=(1.0, 1.0, 0.0, 0.0))
    assert back.shares[0] > 0.1  # asked for by name


def test_text_is_told_with_zeros_as_no_text() -> None:
    conditions: list[Tensor] = []

    def expert(x_B: Tensor, t_B: Tensor, c_B: Tensor) -> Tensor:
        conditions.append(c_B)
        return torch.zeros_like(x_B)

    spoken = Ensemble([expert], None, (1.0,), (2,), condition=TextCondition(dim=3, max_tokens=4))
    text = torch.ones(4, 3)
    spoken.sample(
        2,
        steps=1,
        condition=text,
        guidance=1.0,
        options=SamplingOptions(solver="euler", condition_prior=(1.0,)),
    )
    assert torch.equal(conditions[0], torch.cat([text.expand(2, 4, 3), torch.zeros(2, 4, 3)]))
    wrong: list[Any] = [
        0,
        "a text",
        np.ones((4, 3)),
        torch.ones(5, 3),
        torch.ones(4, 2),
        torch.ones(0, 3),
    ]
    for condition in wrong:
        with pytest.raises(ShapeError, check=has_subject("condition")):
            spoken.sample(2, condition=condition, options=SamplingOptions(condition_prior=(1.0,)))


def refused(ensemble: Ensemble, subject: str, **arguments: object) -> None:
    with pytest.raises(MathError, match=subject):
        ensemble.sample(2, steps=1, **sampling_keywords(arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize("prior", [None, (1.0, 1.0, 1.0, 1.0)])
def test_condition_is_refused_when_it_means_nothing_or_nobody_knows_who_holds_it(
    prior: Sequence[float] | None,
) -> None:
    refused(exact(), "condition", condition=2, condition_prior=prior)
    refused(exact(), "condition", condition=torch.ones(1, 3), condition_prior=prior)
    refused(
        Ensemble(four_silos().experts(), None, (1.0,) * 4, (2,)),
        "condition",
        condition=0,
        condition_prior=prior,
    )
    refused(exact(), "guidance", guidance=1.0, condition_prior=prior)
    refused(exact(), "guidance", condition=0, guidance=-1.0)
    refused(exact(), "guidance", condition=0, guidance=float("nan"))
    refused(exact(class_prior=None), "each expert.s share", condition=0)
    refused(exact(), "data of this condition", condition=0, prior=(0.0, 0.0, 1.0, 0.0))
    refused(exact(), "a class, 0 to 1, got 'red'", condition="red")
    assert torch.equal(
        exact().sample(2, condition=" 1").images, exact().sample(2, condition=1).images
    )
    refused(exact(), "int, 0 to 1, got int64", condition=np.int64(1))


def test_each_sample_may_have_a_class_of_its_own() -> None:
    """Alone it would have gone the same way: prior, router and the experts' condition are those of its class."""
    label_N = torch.tensor([0, 1, 1, 0, 0, 1] * 4)
    for strategy, guidance in product(
        ["full", Sample(), Lock(), Lock(0.5), TopK(2), TopOne()], [0.0, 2.0]
    ):
        with case(strategy=strategy, guidance=guidance):
            how: dict[str, Any] = {
                "strategy": strategy,
                "steps": 5,
                "seed": 4,
                "guidance": guidance,
            }
            together = exact(chunk_size=7).sample(condition=label_N, **how)
            for label in (0, 1):
                alone = exact(chunk_size=7).sample(24, condition=label, **how)
                rows = label_N == label
                assert torch.equal(together.expert_N[rows], alone.expert_N[rows])
                torch.testing.assert_close(
                    together.images[rows], alone.images[rows], atol=5e-5, rtol=0
                )
    x, t_B = noised()
    mixed_B = torch.arange(300) % 2
    velocity = exact().velocity(x, t_B, condition=mixed_B, guidance=1.5)
    expected = torch.where((mixed_B == 0)[:, None], truth(0, 1.5, x, t_B), truth(1, 1.5, x, t_B))
    assert (velocity - expected).abs().max() < 1e-8
    of_class = exact().posterior(x, t_B, mixed_B)
    assert torch.equal(of_class[0::2], exact().posterior(x[0::2], t_B[0::2], 0))
    assert torch.equal(of_class[1::2], exact().posterior(x[1::2], t_B[1::2], 1))


def test_each_sample_may_have_a_text_of_its_own() -> None:
    conditions: list[Tensor] = []

    def expert(x_B: Tensor, t_B: Tensor, c_B: Tensor) -> Tensor:
        conditions.append(c_B)
        # all data are the text's mean
        return (x_B - c_B.mean((1, 2))[:, None]) / t_B.clamp(min=1e-3)[:, None]

    spoken = Ensemble(
        [expert, expert], None, (1.0, 1.0), (2,), condition=TextCondition(dim=3, max_tokens=4)
    )
    text_N = torch.arange(5.0)[:, None, None].expand(5, 4, 3)
    drawn = spoken.sample(
        condition=text_N,
        steps=3,
        options=SamplingOptions(condition_prior=(1.0, 1.0), solver="euler"),
    )
    torch.testing.assert_close(
        drawn.images, torch.arange(5.0)[:, None].expand(5, 2), atol=1e-4, rtol=0
    )
    assert sum(len(condition) for condition in conditions) == 15
    for wrong in (text_N[:, :, :2], text_N[:0], torch.ones(5, 5, 3)):
        with pytest.raises(ShapeError, check=has_subject("condition")):
            spoken.sample(condition=wrong, options=SamplingOptions(condition_prior=(1.0, 1.0)))
    refused(exact(), "0 to 1", condition=torch.tensor([0, 2]))
    for classes in (torch.tensor([0.0, 1.0]), torch.tensor([0, 1, 1])):
        with pytest.raises(ShapeError):
            exact().sample(2, steps=1, condition=classes)
    with pytest.raises(ShapeError, check=has_subject("condition")):
        exact().velocity(*noised(), condition=torch.tensor([0, 1]))


class Largest(TorchDispatchMode):
    """Notes the most values that a tensor had which was computed meanwhile."""

    values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = (
            isinstance(result, Tensor)
            and result.untyped_storage().nbytes() // result.element_size()
        )
        self.values = max(self.values, made)
        return result


@pytest.mark.parametrize("own", [False, True])
def test_texts_of_a_mixture_are_laid_out_for_as_many_samples_as_an_expert_is_given_at_once(
    own: bool,
) -> None:
    text = torch.ones(64, 8)

    def expert(x_B: Tensor, t_B: Tensor, c_B: Tensor) -> Tensor:
        assert len(c_B) == len(x_B) <= 4
        return c_B.mean((1, 2))[:, None] * x_B

    spoken = Ensemble([expert, expert], UninformedRouter(2), (1.0, 1.0), (2,), chunk_size=4)
    spoken = replace(spoken, condition=TextCondition(dim=8, max_tokens=64))
    condition = text.expand(100, 64, 8) if own else text
    for guidance in (0.0, 2.0):
        with Largest() as largest:
            options = SamplingOptions(solver="euler", condition_prior=(1.0, 1.0))
            spoken.sample(
                100,
                strategy="full",
                steps=1,
                condition=condition,
                guidance=guidance,
                options=options,
            )
        assert largest.values <= 4 * text.numel()


def test_guidance_applies_within_its_interval_alone_and_costs_nothing_outside() -> None:
    x, t_B = noised()
    velocity = exact().velocity(x, t_B, condition=1, guidance=2.0, guidance_interval=(0.3, 0.6))
    inside = ((t_B >= 0.3) & (t_B <= 0.6))[:, None]
    assert (
        velocity - torch.where(inside, truth(1, 2.0, x, t_B), truth(1, 0.0, x, t_B))
    ).abs().max() < 1e-8
    calls: list[tuple[float, int]] = []

    def watched(k: int) -> Expert:
        def expert(x_B: Tensor, t_B: Tensor, c_B: Tensor) -> Tensor:
            calls.append((round(float(t_B[0]), 3), len(x_B)))
            return conditional_expert(four_silos(), k)(x_B, t_B, c_B)

        return expert

    ensemble = exact(experts=[watched(k) for k in range(4)])
    for every in (1, 2):
        calls.clear()
        ensemble.sample(
            20,
            steps=5,
            condition=0,
            guidance=1.0,
            options=SamplingOptions(
                solver="euler", guidance_interval=(0.4, 0.6), router_every=every
            ),
        )
        rows = {t: sum(num for at, num in calls if at == t) for t in (1.0, 0.8, 0.6, 0.4, 0.2)}
        assert rows == {1.0: 20, 0.8: 20, 0.6: 40, 0.4: 40, 0.2: 20}
    for strategy in ("full", "top-k"):
        ensemble.sample(
            9,
            steps=5,
            strategy=strategy,
            condition=0,
            guidance=1.0,
            options=SamplingOptions(guidance_interval=(0.4, 0.6), router_every=2),
        )
    plain, guided, within = (
        exact()
        .sample(500, steps=10, strategy="full", condition=1, **sampling_keywords(more))
        .images  # type: ignore[arg-type]
        for more in ({}, {"guidance": 3.0}, {"guidance": 3.0, "guidance_interval": (0.0, 1.0)})
    )
    assert torch.equal(guided, within) and not torch.equal(guided, plain)
    for wrong in ((0.5, 0.5), (-0.1, 0.5), (0.2, 1.1)):
        refused(exact(), "guidance_interval", condition=0, guidance=1.0, guidance_interval=wrong)
    refused(exact(), "guidance_interval", condition=0, guidance_interval=(0.2, 0.8))


def test_experts_that_always_had_a_class_are_not_evaluated_without_one() -> None:
    """Their null condition was never trained: what it answers is noise of the initial weights."""
    always = exact(condition=ClassCondition(num_classes=2, drop=0.0))
    x, t_B = noised()
    # With a class, and no guidance away from none, nothing changes.
    velocity = always.velocity(x, t_B, condition=1)
    assert (velocity - truth(1, 0.0, x, t_B)).abs().max() < 1e-9
    calls = (
        always.sample,
        lambda num, **keywords: always.velocity(x[:num], t_B[:num], **keywords),
        lambda num, **keywords: always.compute_likelihood(x[:num].float(), **keywords),
    )
    for call, (subject, keywords) in product(
        calls, (("condition", {}), ("guidance", {"condition": 1, "guidance": 2.0}))
    ):
        with case(subject=subject), pytest.raises(MathError, check=has_subject(subject)) as refused:
            call(2, **keywords)
        assert "drop = 0" in str(refused.value)
    # The router alone is not asked for an answer of an expert.
    assert torch.equal(always.posterior(x, t_B), exact().posterior(x, t_B))
