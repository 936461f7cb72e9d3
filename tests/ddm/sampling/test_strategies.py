"""The strategies that select several experts, and a router that is asked only now and then."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ddm.ensemble import (
    Ensemble,
    Full,
    Lock,
    Nucleus,
    Sample,
    SamplingOptions,
    Strategy,
    Threshold,
    TopK,
    TopOne,
)
from ddm.errors import MathError
from ddm.sampling.strategies import STRATEGIES, Prefix, StepRule, segments, strategy_named
from tests.support.case import case
from tests.support.errors import has_subject
from tests.support.gaussian_mixture import four_silos

W_BK = torch.tensor(
    [[0.5, 0.3, 0.2, 0.0], [0.1, 0.1, 0.7, 0.1], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64
)


def exact(**changes: object) -> Ensemble:
    mixture = four_silos()
    settings = {
        "experts": mixture.experts(),
        "router": mixture,
        "prior": mixture.prior_K,
        "shape": (2,),
    }
    return Ensemble(**(settings | {"chunk_size": 1024} | changes))  # type: ignore[arg-type]


def test_strategy_selects_the_experts_that_its_name_says() -> None:
    promised: list[tuple[TopK | Nucleus | Threshold, list[str]]] = [
        (TopOne(), ["0", "2", "0"]),
        (TopK(2), ["01", "02", "01"]),
        (TopK(9), ["012", "0123", "0123"]),
        (Nucleus(0.5), ["0", "2", "01"]),
        (Nucleus(0.51), ["01", "2", "012"]),
        (Nucleus(1.0), ["012", "0123", "0123"]),
        (Threshold(0.25), ["01", "2", "0123"]),
        (Threshold(0.9), ["0", "2", "0"]),
        (Threshold(0.0), ["012", "0123", "0123"]),
    ]
    for strategy, expected in promised:
        with case(strategy=strategy, expected=expected):
            chosen = strategy.select(W_BK)
            assert [
                "".join(str(k) for k in row.nonzero()[:, 0].tolist()) for row in chosen
            ] == expected


@pytest.mark.parametrize("strategy", [TopK(4), Nucleus(1.0), Threshold(0.0)])
def test_strategy_that_selects_all_is_the_full_mixture(strategy: Strategy) -> None:
    full, other = (
        exact().sample(
            64, strategy=compared, steps=8, seed=2, options=SamplingOptions(solver="heun")
        )
        for compared in (Full(), strategy)
    )
    torch.testing.assert_close(full.images, other.images, atol=1e-5, rtol=0)
    assert torch.equal(full.expert_N, other.expert_N)


def weighted(x: Tensor, t_B: Tensor, k: int) -> Tensor:
    """Brute force, sample by sample: the k most probable experts, their probabilities divided by their sum."""
    mixture = four_silos()
    rows = []
    w_BK = (
        mixture.log_likelihood(x, t_B) + torch.tensor(mixture.prior_K, dtype=x.dtype).log()
    ).softmax(1)
    for n in range(len(x)):
        chosen = sorted(range(4), key=lambda j: -float(w_BK[n, j]))[:k]
        total = sum(float(w_BK[n, j]) for j in chosen)
        parts = [
            float(w_BK[n, j]) / total * mixture.expert(j)(x[n : n + 1], t_B[n : n + 1])
            for j in chosen
        ]
        rows.append(torch.stack(parts).sum(0))
    return torch.cat(rows)


def test_weights_of_the_selected_are_renormalised() -> None:
    ensemble = exact()
    for k in (1, 2, 3):
        drawn = ensemble.sample(
            12, strategy=TopK(k), steps=3, seed=1, options=SamplingOptions(solver="euler")
        )
        x = torch.stack([noise(i) for i in range(12)])
        for t in (1.0, 2 / 3, 1 / 3):
            x = x - weighted(x, torch.full((12,), t, dtype=torch.float64), k) / 3
        torch.testing.assert_close(drawn.images.double(), x, atol=1e-4, rtol=0)
        assert (
            drawn.images
            - ensemble.sample(
                12, strategy=Full(), steps=3, seed=1, options=SamplingOptions(solver="euler")
            ).images
        ).abs().max() > 0.1


def noise(i: int) -> Tensor:
    from ddm.diffusion.rng import stream

    return torch.from_numpy(stream("sample", 1, i).standard_normal(2, dtype="float32")).double()


def shares_off(strategy: Strategy, num: int = 2048, **options: Any) -> float:
    images = (
        exact()
        .sample(
            num,
            strategy=strategy,
            steps=24,
            seed=1,
            options=SamplingOptions(solver="heun", **options),
        )
        .images
    )
    expected = torch.tensor(four_silos().prior_K, dtype=torch.float64)
    share_K = torch.bincount(four_silos().silo_of(images), minlength=4).double() / num
    return float(((share_K - expected).abs() / (expected * (1 - expected) / num).sqrt()).max())


@pytest.mark.parametrize("strategy", [TopK(1), Nucleus(0.5), Threshold(0.5)])
def test_selecting_does_not_keep_the_shares_of_the_silos(strategy: Strategy) -> None:
    """At t = 1 each of them selects the largest silo alone, for every sample."""
    assert shares_off(strategy, 1024) > 6


@pytest.mark.parametrize(
    ("strategy", "every"), [(Sample(), 3), (Sample(), 24), (Lock(0.5), 5), (Lock(0.5, "full"), 1)]
)
def test_shares_are_kept_when_a_drawn_expert_is_held_until_the_router_is_asked_again(
    strategy: Strategy, every: int
) -> None:
    assert shares_off(strategy, router_every=every) < 4


class CountingRouter:
    num_experts = 4

    def __init__(self) -> None:
        self.times: list[float] = []

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        self.times.append(round(float(t_B[0]), 3))
        return four_silos().log_likelihood(x_B, t_B)


@pytest.mark.parametrize("strategy", [Full(), Sample(), TopK(2), Lock(0.0)])
def test_router_is_asked_at_every_nth_step_alone(strategy: Strategy) -> None:
    router = CountingRouter()
    exact(router=router).sample(
        8, strategy=strategy, steps=10, options=SamplingOptions(router_every=4)
    )
    assert set(router.times) == {0.6, 0.2}
    router = CountingRouter()
    exact(router=router).sample(
        8, strategy=strategy, steps=10, options=SamplingOptions(solver="euler")
    )
    assert len(set(router.times)) == 9


@pytest.mark.parametrize(
    ("prefix", "before"), [("full", StepRule.MIXTURE), ("sample", StepRule.DRAW)]
)
def test_lock_draws_at_its_time_even_where_the_router_would_rest(
    prefix: Prefix, before: StepRule
) -> None:
    cut = segments(Lock(0.7, prefix), (1.0, 0.8, 0.6, 0.4, 0.2, 0.0), router_every=4)
    assert [(part.first_step, part.rule) for part in cut] == [(0, before), (2, StepRule.LOCK)]
    router = CountingRouter()
    exact(router=router).sample(
        8, strategy="lock", tau=0.8, steps=10, options=SamplingOptions(router_every=5)
    )
    assert router.times == [0.8]


def test_strategy_is_named_with_its_own_settings_and_with_no_others() -> None:
    values = {"tau": 0.5, "prefix": "full", "k": 3, "mass": 0.5, "least": 0.2}
    for name, kind in STRATEGIES.items():
        settings = kind.settings
        strategy_named(name, **{setting: values[setting] for setting in settings})  # type: ignore[arg-type]
        for setting in set(values) - set(settings):
            with pytest.raises(MathError, check=has_subject(name)):
                strategy_named(name, **{setting: values[setting]})  # type: ignore[arg-type]
    assert strategy_named("top-k", k=3) == TopK(3)
    assert strategy_named("nucleus", mass=0.5) == Nucleus(0.5)
    assert strategy_named("threshold", least=0.2) == Threshold(0.2)
