"""The exact decomposition and the strategies against brute force on a mixture whose law is known."""

# Shape legend: K experts, B batch.
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ddm.diffusion.path import CosinePath, LinearPath, Velocity, as_velocity, x_t
from ddm.diffusion.solver import SolverName
from ddm.ensemble import (
    Ensemble,
    Full,
    Lock,
    Nucleus,
    Sample,
    Samples,
    SamplingOptions,
    Strategy,
    Threshold,
    TopK,
    TopOne,
    mix_velocity,
    strategy_named,
)
from ddm.errors import MathError, NumericalError, ShapeError
from ddm.routers.base import log_prior, posterior
from ddm.sampling.options import sampling_keywords
from ddm.sampling.strategies import StepRule, draw_expert, segments
from ddm.sampling.trajectories import draw_noise
from tests.support.case import case
from tests.support.gaussian_mixture import UninformedRouter, four_silos

PRIOR = (0.7, 0.2, 0.08, 0.02)
NUM = 3072


def exact(**changes: object) -> Ensemble:
    """The ensemble of exact experts and the exact router; large chunks, since the experts cost little."""
    mixture = four_silos()
    settings = {
        "experts": mixture.experts(),
        "router": mixture,
        "prior": PRIOR,
        "shape": (2,),
        "chunk_size": 1024,
    }
    return Ensemble(**(settings | changes))  # type: ignore[arg-type]


def noised(num: int = 400) -> tuple[Tensor, Tensor]:
    x_0 = four_silos().draw(num, seed=5)
    eps = torch.randn(x_0.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    t_B = torch.linspace(0.0, 1.0, num, dtype=torch.float64)
    return x_t(LinearPath(), x_0, eps, t_B), t_B


def shares_of(images: Tensor) -> Tensor:
    """The part of finished samples that lie in each silo's components, whatever label they carry."""
    return torch.bincount(four_silos().silo_of(images), minlength=4).double() / len(images)


def deviation(
    found_K: Sequence[float] | Tensor, expected_K: Sequence[float], num: int = NUM
) -> float:
    """The largest deviation of shares in standard errors of a sample of `num`."""
    expected = torch.tensor(expected_K, dtype=torch.float64)
    standard_error = (expected * (1 - expected) / num).sqrt().clamp(min=1e-12)
    return float(((torch.as_tensor(found_K) - expected).abs() / standard_error).max())


def test_oracle_holds_the_prior_of_the_four_silos() -> None:
    assert four_silos().prior_K == pytest.approx(PRIOR)
    assert deviation(shares_of(four_silos().draw(NUM, seed=1)), PRIOR) < 4


def test_decomposition_is_exact_with_the_true_posterior_and_not_with_a_uniform_one() -> None:
    x, t_B = noised()
    truth = four_silos().velocity(x, t_B)
    assert (exact().velocity(x, t_B) - truth).abs().max() < 1e-10
    uniform = torch.full((len(x), 4), 0.25, dtype=torch.float64)
    assert (mix_velocity(four_silos().experts(), x, t_B, uniform) - truth).abs().max() > 0.5


def test_decomposition_fails_when_the_router_is_uninformed_or_the_prior_is_wrong() -> None:
    x, t_B = noised()
    truth = four_silos().velocity(x, t_B)
    assert (exact(router=UninformedRouter(4)).velocity(x, t_B) - truth).abs().max() > 0.5
    assert (exact().velocity(x, t_B, prior=(0.25,) * 4) - truth).abs().max() > 0.1


def test_decomposition_is_exact_when_one_expert_predicts_eps_on_another_path() -> None:
    cosine = four_silos(CosinePath())
    experts = four_silos().experts()
    experts[1] = as_velocity(cosine.eps_expert(1), "eps", CosinePath(), LinearPath())
    experts[2] = as_velocity(cosine.expert(2), "velocity", CosinePath(), LinearPath())
    x, t_B = noised()
    x = x[t_B < 0.98]
    t_B = t_B[t_B < 0.98]
    mixed = exact(experts=list(experts))
    assert (mixed.velocity(x, t_B) - four_silos().velocity(x, t_B)).abs().max() < 1e-10
    experts[1] = cosine.eps_expert(1)
    unconverted = exact(experts=list(experts))
    assert (unconverted.velocity(x, t_B) - four_silos().velocity(x, t_B)).abs().max() > 0.1


def test_shares_are_kept_when_an_expert_that_predicts_eps_on_another_path_is_locked_from_pure_noise() -> (
    None
):
    experts = four_silos().experts()
    experts[0] = as_velocity(
        four_silos(CosinePath()).eps_expert(0), "eps", CosinePath(), LinearPath()
    )
    drawn = exact(experts=experts, router=None).sample(
        NUM, steps=40, options=SamplingOptions(solver="heun")
    )
    assert deviation(shares_of(drawn.images), PRIOR) < 4
    mean = drawn.images[drawn.expert_N == 0].mean(dim=0).double()
    own = four_silos().weight_C[:3, None] / 0.7
    assert torch.allclose(mean, (own * four_silos().mean_CD[:3]).sum(dim=0), atol=0.2)


def test_posterior_is_the_prior_at_pure_noise_for_every_x() -> None:
    x, _ = noised()
    w_BK = posterior(four_silos(), x, torch.ones(len(x), dtype=torch.float64), log_prior(PRIOR, 4))
    assert torch.allclose(
        w_BK, torch.tensor(PRIOR, dtype=torch.float64).expand_as(w_BK), atol=1e-12
    )


def test_strategy_keeps_the_shares_of_the_silos() -> None:
    for strategy in [
        Full(),
        Sample(),
        Lock(1.0),
        Lock(0.8),
        Lock(0.5),
        Lock(0.8, prefix="full"),
        Lock(0.5, prefix="full"),
    ]:
        with case(strategy=strategy):
            drawn = exact().sample(
                NUM, strategy=strategy, steps=30, seed=1, options=SamplingOptions(solver="heun")
            )
            assert deviation(shares_of(drawn.images), PRIOR) < 4
            assert deviation(drawn.shares, PRIOR) < 4
            assert (four_silos().silo_of(drawn.images) == drawn.expert_N).double().mean() > 0.99


def test_top_1_does_not_keep_the_shares_of_the_silos() -> None:
    drawn = exact().sample(
        NUM, strategy=TopOne(), steps=30, seed=1, options=SamplingOptions(solver="heun")
    )
    assert deviation(shares_of(drawn.images), PRIOR) > 12
    assert shares_of(drawn.images)[0] > 0.8


@pytest.mark.parametrize("strategy", [Full(), Sample()])
def test_shares_are_lost_when_the_strategy_follows_an_uninformed_router(strategy: Strategy) -> None:
    """Only a locked sample is safe from it: its expert was drawn from the prior, and then made the whole picture."""
    uninformed = exact(router=UninformedRouter(4))
    how: dict[str, Any] = {"steps": 20, "options": SamplingOptions(solver="heun")}
    assert deviation(shares_of(uninformed.sample(NUM, strategy=strategy, **how).images), PRIOR) > 12
    assert deviation(shares_of(exact().sample(NUM, strategy=strategy, **how).images), PRIOR) < 4
    assert deviation(shares_of(uninformed.sample(NUM, strategy=Lock(0.5), **how).images), PRIOR) < 4


@pytest.mark.parametrize("strategy", ["full", "sample", "lock"])
def test_shares_follow_another_prior_when_one_is_asked_for(strategy: str) -> None:
    equal = (0.25,) * 4
    tau = 0.7 if strategy == "lock" else None
    drawn = exact().sample(
        2048,
        strategy=strategy,
        tau=tau,
        prior=(3, 3, 3, 3),
        steps=25,
        options=SamplingOptions(solver="heun"),
    )
    assert deviation(shares_of(drawn.images), equal, 2048) < 4
    assert deviation(shares_of(drawn.images), PRIOR, 2048) > 12


def test_withdrawn_expert_is_never_asked_and_makes_nothing() -> None:
    for strategy in ["full", "sample", Lock(0.7), "top-1", "top-k", "nucleus", Threshold(0.0)]:
        with case(strategy=strategy):

            def withdrawn(x: Tensor, t: Tensor) -> Tensor:
                raise RuntimeError("a withdrawn expert was asked")

            experts = four_silos().experts()
            experts[0] = withdrawn
            drawn = exact(experts=experts).sample(
                1024,
                strategy=strategy,
                prior=(0, 0.2, 0.08, 0.02),
                steps=20,
                options=SamplingOptions(solver="heun"),
            )
            assert drawn.shares[0] == 0.0
            assert (four_silos().silo_of(drawn.images) == 0).double().mean() < 0.01


def test_posterior_gives_exactly_zero_to_a_withdrawn_expert() -> None:
    x, t_B = noised()
    w_BK = posterior(four_silos(), x, t_B, log_prior((0.0, 1.0, 1.0, 1.0), 4))
    assert torch.equal(w_BK[:, 0], torch.zeros(len(x), dtype=torch.float64))
    assert torch.allclose(w_BK.sum(dim=1), torch.ones(len(x), dtype=torch.float64))


def test_sampling_needs_no_router_when_locked_at_1_or_when_one_expert_is_left() -> None:
    alone = exact(router=None)
    assert torch.equal(alone.sample(10, steps=4).images, exact().sample(10, steps=4).images)
    assert alone.sample(10, strategy="full", steps=4, prior=(0, 0, 1, 0)).shares == (0, 0, 1, 0)


@pytest.mark.parametrize("strategy", [Full(), Sample(), Lock(0.5), TopOne()])
def test_sampling_is_refused_when_the_strategy_needs_a_router_and_there_is_none(
    strategy: Strategy,
) -> None:
    with pytest.raises(MathError, match="expected a router"):
        exact(router=None).sample(4, strategy=strategy)


def test_the_same_call_gives_the_same_bytes_and_another_seed_others() -> None:
    def draw(seed: int) -> Tensor:
        return exact().sample(100, strategy="sample", steps=6, seed=seed).images

    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))
    assert len(draw(3).unique(dim=0)) == 100


@pytest.mark.parametrize(
    "strategy",
    [
        Full(),
        Sample(),
        Lock(),
        Lock(0.8),
        Lock(0.8, prefix="full"),
        TopOne(),
        TopK(2),
        Nucleus(),
        Threshold(),
    ],
)
@pytest.mark.parametrize("solver", ["heun", "dpm"])
def test_sample_i_is_the_same_for_every_num_and_grouping(
    strategy: Strategy, solver: SolverName
) -> None:
    """To rounding: the order of sums depends on which samples an expert is given together. One by one, to the bit."""

    def draw(num: int, chunk_size: int) -> Samples:
        return exact(chunk_size=chunk_size).sample(
            num, strategy=strategy, steps=6, seed=3, options=SamplingOptions(solver=solver)
        )

    many = draw(150, 64)
    for num, chunk_size in ((1, 64), (64, 64), (100, 7), (150, 1024)):
        few = draw(num, chunk_size)
        assert torch.equal(few.expert_N, many.expert_N[:num])
        torch.testing.assert_close(few.images, many.images[:num], atol=2e-5, rtol=0)
    assert (many.images[:64] - draw(128, 64).images[64:]).abs().max() > 1
    alone = draw(12, 1)
    assert all(torch.equal(draw(num, 1).images, alone.images[:num]) for num in (1, 5))


def test_samples_are_the_same_when_not_all_of_them_travel_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = exact(chunk_size=16).sample(100, strategy="sample", steps=5)
    monkeypatch.setattr("ddm.ensemble._IN_FLIGHT_BYTES", 30 * (2 * 4 + 5 * 8))
    apart = exact(chunk_size=16).sample(100, strategy="sample", steps=5)
    assert torch.equal(together.expert_N, apart.expert_N)
    torch.testing.assert_close(together.images, apart.images, atol=2e-5, rtol=0)


class Watched(list[Velocity]):
    """Exact experts that note who was asked about how many samples."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, float]] = []
        super().__init__(self._watched(k) for k in range(4))

    def _watched(self, k: int) -> Velocity:
        def expert(x: Tensor, t: Tensor) -> Tensor:
            self.asked.append((k, len(x), float(t[0])))
            return four_silos().expert(k)(x, t)

        return expert


def test_expert_is_held_within_a_step_and_asked_once_an_evaluation() -> None:
    experts = Watched()
    exact(experts=experts).sample(
        640, strategy="sample", steps=5, options=SamplingOptions(solver="heun")
    )
    times = [1 - n / 5 for n in range(6)]
    for n in range(5):
        visits = experts.asked[: 2 * 4]
        experts.asked = experts.asked[2 * 4 :]
        # heun, expert by expert
        assert [t for _, _, t in visits] == pytest.approx([times[n], times[n + 1]] * 4)
        assert [(k, num) for k, num, _ in visits[::2]] == [(k, num) for k, num, _ in visits[1::2]]
        assert sum(num for _, num, _ in visits[::2]) == 640
        assert len({k for k, _, _ in visits}) == 4
    assert not experts.asked


def test_locked_samples_travel_expert_by_expert_all_the_way() -> None:
    experts = Watched()
    exact(experts=experts).sample(640, steps=5, options=SamplingOptions(solver="heun"))
    order = [k for k, _, _ in experts.asked]
    assert order == sorted(order)
    assert len(order) == 4 * 5 * 2


def test_expert_is_given_no_more_samples_at_once_than_the_chunk_holds() -> None:
    for strategy in ("full", "sample", "lock"):
        experts = Watched()
        exact(experts=experts, chunk_size=10).sample(95, strategy=strategy, steps=3)
        assert max(num for _, num, _ in experts.asked) == 10


def test_strategy_follows_what_it_promises_on_a_grid_of_five_steps() -> None:
    promised: list[tuple[Strategy, str]] = [
        (Full(), "MMMMM"),
        (Sample(), "DDDDD"),
        (TopOne(), "SSSSS"),
        (Nucleus(0.5), "SSSSS"),
        (Lock(1.0), "LKKKK"),
        (Lock(0.6), "DDLKK"),
        (Lock(0.5, prefix="full"), "MMMLK"),
        (Lock(0.0), "DDDDD"),
    ]
    for strategy, expected in promised:
        with case(strategy=strategy, expected=expected):
            times = [1.0, 0.8, 0.6, 0.4, 0.2]
            letters = {
                StepRule.MIXTURE: "M",
                StepRule.DRAW: "D",
                StepRule.LOCK: "L",
                StepRule.KEEP: "K",
                StepRule.SELECT: "S",
            }
            befores = [float("inf"), *times]
            assert (
                "".join(
                    letters[strategy.step_rule(t, b)] for t, b in zip(times, befores, strict=False)
                )
                == expected
            )
            cut = segments(strategy, [*times, 0.0])
            assert [segment.first_step for segment in cut] == [
                n for n, letter in enumerate(expected) if letter != "K"
            ]
            assert [t for segment in cut for t in segment.times[:-1]] == times


def test_draw_expert_has_the_law_of_its_weights_and_never_draws_zero_weight() -> None:
    w_BK = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0]).expand(4000, -1)
    uniform_B = (torch.arange(4000).double() + 0.5) / 4000
    found_K = torch.bincount(draw_expert(w_BK, uniform_B), minlength=5) / 4000
    assert found_K.tolist() == pytest.approx([0, 0.3, 0, 0.7, 0], abs=1e-3)
    edges = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert draw_expert(w_BK[:2], edges).tolist() == [1, 3]


@pytest.mark.parametrize("strategy", ["full", "sample", "lock"])
def test_sampling_reports_the_steps_that_samples_have_taken(strategy: str) -> None:
    reports: list[tuple[int, int]] = []
    exact(chunk_size=8).sample(
        20,
        strategy=strategy,
        steps=3,
        options=SamplingOptions(on_progress=lambda *now: reports.append(now)),
    )
    assert reports[-1] == (60, 60)
    assert sorted(set(reports)) == reports


def test_samples_can_be_used_with_autograd_afterwards() -> None:
    images = exact().sample(4, steps=2).images
    (images * torch.ones(2, requires_grad=True)).sum().backward()
    assert images.dtype == torch.float32


@pytest.mark.parametrize("prior", [(1, 1), (0, 0, 0, 0), (1, 1, 1, -1), (1, 1, 1, float("nan"))])
def test_prior_is_refused_when_it_is_not_one_weight_per_expert(prior: tuple[float, ...]) -> None:
    with pytest.raises(MathError):
        exact(prior=prior)
    with pytest.raises(MathError):
        exact().sample(4, prior=prior)


def test_ensemble_is_refused_when_names_or_router_are_of_another_number() -> None:
    with pytest.raises(ShapeError):
        exact(expert_ids=("north", "east"))
    with pytest.raises(ShapeError):
        exact(router=UninformedRouter(3))


def test_arguments_out_of_range_are_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"strategy": "argmax"},
        {"tau": 1.5},
        {"steps": 0},
        {"solver": "rk45"},
        {"seed": -1},
    ]
    wrong += [
        {"router_every": 0},
        {"strategy": "full", "tau": 0.5},
        {"guidance": 1.0},
        {"condition": 1},
    ]
    wrong += [{"strategy": Lock(), "tau": 0.5}]
    for arguments in wrong:
        with pytest.raises(MathError):
            exact().sample(4, **sampling_keywords(arguments))
    for build in (lambda: TopK(0), lambda: Nucleus(0.0), lambda: Threshold(1.1)):
        with pytest.raises(MathError):
            build()
    with pytest.raises(MathError):
        exact().sample(0)
    with pytest.raises(MathError):
        Lock(0.5, prefix="top-1")  # type: ignore[arg-type]
    assert strategy_named("lock", tau=0.4, prefix="full") == Lock(0.4, "full")


@pytest.mark.parametrize(
    ("subject", "changes"),
    [
        ("shape", {"shape": "ab"}),
        ("shape", {"shape": (0,)}),
        ("expert_ids", {"expert_ids": ("a", "b", "a", "c")}),
        ("value_range", {"value_range": (1.0, -1.0)}),
    ],
)
def test_ensemble_is_refused_when_its_facts_make_no_sense(
    subject: str, changes: dict[str, object]
) -> None:
    with pytest.raises(MathError) as caught:
        exact(**changes)
    assert caught.value.subject == subject


def test_settings_that_are_no_numbers_are_refused_by_name() -> None:
    for build in (
        lambda: Lock("0.5"),  # type: ignore[arg-type]
        lambda: TopK(1.5),  # type: ignore[arg-type]
        lambda: Nucleus("all"),  # type: ignore[arg-type]
        lambda: exact().sample(2, strategy="lock", tau="x"),  # type: ignore[arg-type]
        lambda: exact().sample(2, callback=3),  # type: ignore[arg-type]
    ):
        with pytest.raises(MathError):
            build()


def test_no_samples_have_no_shares() -> None:
    assert "nan" not in repr(exact().sample(4)[0:0])


def test_mixing_is_refused_when_weights_and_velocities_disagree() -> None:
    with pytest.raises(ShapeError):
        mix_velocity(
            four_silos().experts(), torch.zeros(10, 2), torch.zeros(10), torch.zeros(4, 10)
        )
    with pytest.raises(ShapeError):
        exact().velocity(torch.zeros(4, 2), torch.zeros(3))


def test_router_that_answers_nan_is_refused() -> None:
    class Broken(UninformedRouter):
        def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
            return torch.full((len(x_B), 4), float("nan"))

    with pytest.raises(NumericalError):
        exact(router=Broken(4)).sample(4, strategy="sample", steps=2)


@pytest.mark.parametrize("strategy", ["lock", "sample"])
def test_samples_that_are_not_finite_are_refused_and_their_expert_is_named(strategy: str) -> None:
    def broken(x: Tensor, t: Tensor) -> Tensor:
        return torch.where((t < 0.5)[:, None], torch.inf, four_silos().expert(1)(x, t))

    experts = four_silos().experts()
    ensemble = exact(
        experts=[experts[0], broken, *experts[2:]], expert_ids=("north", "east", "south", "west")
    )
    # Only the last step of two asks below 0.5, so that no router sees what is not finite.
    with pytest.raises(NumericalError, match="east") as refusal:
        ensemble.sample(200, strategy=strategy, steps=2, options=SamplingOptions(solver="heun"))
    assert "north" not in str(refusal.value)
    assert (
        ensemble.sample(200, strategy=strategy, steps=2, prior=(1, 0, 1, 1)).images.isfinite().all()
    )


def test_fewer_samples_are_under_way_when_more_is_drawn_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[int] = []

    def watched(
        samples: range, shape: Sequence[int], seed: int, steps: int, *, purpose: str
    ) -> tuple[Tensor, Tensor]:
        drawn.append(len(samples))
        return draw_noise(samples, shape, seed, steps, purpose=purpose)

    monkeypatch.setattr("ddm.ensemble.draw_noise", watched)
    # of a sample: 2 floats of noise, 8 bytes a step
    monkeypatch.setattr("ddm.ensemble._IN_FLIGHT_BYTES", 960)
    for steps, most in ((1, 60), (5, 20)):
        drawn.clear()
        exact(chunk_size=1).sample(60, steps=steps, options=SamplingOptions(solver="euler"))
        assert drawn == [most] * (60 // most)
