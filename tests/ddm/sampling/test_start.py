"""Samples that begin elsewhere than in noise of their own, and what a caller hears about their way."""

# Shape legend: N samples, K experts.
import doctest
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

import ddm.ensemble
from ddm.diffusion.path import CosinePath, LinearPath, Path, x_t
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
)
from ddm.errors import DataError, MathError, NumericalError, ShapeError
from ddm.sampling.options import sampling_keywords
from ddm.sampling.provenance import ProvenanceLog
from ddm.sampling.trajectories import draw_noise
from tests.support.case import case
from tests.support.errors import has_subject
from tests.support.gaussian_mixture import UninformedRouter, four_silos

ALL = (
    Full(),
    Sample(),
    Lock(),
    Lock(0.5),
    Lock(0.5, "full"),
    TopOne(),
    TopK(2),
    Nucleus(),
    Threshold(),
)
EXACT: tuple[Strategy, ...] = (Full(), Sample(), Lock(), Lock(0.3), Lock(0.3, "full"))


def exact(path: Path | None = None, **changes: object) -> Ensemble:
    mixture = four_silos(path)
    settings = {
        "experts": mixture.experts(),
        "router": mixture,
        "prior": mixture.prior_K,
        "shape": (2,),
    }
    return Ensemble(**(settings | {"path": path or LinearPath(), "chunk_size": 1024} | changes))  # type: ignore[arg-type]


def counts(x_N: Tensor) -> Tensor:
    return torch.bincount(four_silos().silo_of(x_N), minlength=4).double()


def test_examples_in_the_docstrings_run() -> None:
    results = doctest.testmod(ddm.ensemble)
    assert results.attempted > 15 and not results.failed


@pytest.mark.parametrize("path", [LinearPath(), CosinePath()])
def test_data_noised_and_followed_back_keep_their_law_and_change_silos_as_the_posterior_says(
    path: Path,
) -> None:
    """Silo j follows silo k with probability ``E[w_j(x_t) | x_0 of k]``; the law of all data stays as it was."""
    num = 1000
    t = 0.7
    mixture = four_silos(path)
    of_two = torch.tensor([2.0, -2.0]).expand(num, 2)  # a centre of silo 1
    noised = x_t(
        path,
        of_two.double(),
        torch.randn(num, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64),
        torch.full((num,), t).double(),
    )
    log_w = (
        mixture.log_likelihood(noised, torch.full((num,), t).double())
        + torch.tensor(mixture.prior_K, dtype=torch.float64).log()
    )
    expected = log_w.softmax(1).mean(0)
    assert 0.05 < expected[0] < 0.95
    for locked in (Lock(), Lock(0.7)):  # the expert that is drawn at x_t makes the whole sample
        with case(strategy=locked):
            drawn = exact(path).image_to_image(of_two, t, steps=12, strategy=locked)
            error = (expected * (1 - expected) / num).sqrt()
            assert ((counts(drawn.images) / num - expected).abs() < 7 * error + 5e-3).all()
    data = mixture.draw(num, seed=3).float()
    share = torch.tensor(mixture.prior_K)
    for strategy in EXACT:
        with case(strategy=strategy):
            back = exact(path).image_to_image(data, 0.8, steps=12, strategy=strategy).images
            assert (
                (counts(back) / num - share).abs() < 5 * (share * (1 - share) / num).sqrt() * 2**0.5
            ).all()
            near = mixture.mean_CD.float()
            assert torch.cdist(back, near).min(1).values.mean() == pytest.approx(
                float(torch.cdist(data, near).min(1).values.mean()), rel=0.12
            )
    stay = exact(path).image_to_image(data, 0.02, steps=2, strategy="sample").images
    assert (stay - data).abs().max() < 0.2 and not torch.equal(stay, data)


def test_router_is_asked_at_the_noised_image_and_not_at_the_prior() -> None:
    """At t_start below 1 even lock at 1 draws from the posterior; drawing from the prior would lose the silo."""
    of_three = torch.tensor([[-3.5, 0.0]]).expand(400, 2)  # the smallest silo's only centre
    drawn = exact().image_to_image(of_three, 0.4, steps=8)
    assert drawn.shares[3] > 0.5  # its prior is 0.02
    with pytest.raises(MathError, check=has_subject("strategy Lock")):
        exact(router=None).image_to_image(of_three, 0.4)
    assert exact(router=None).image_to_image(of_three, 1.0, steps=2).images.shape == (400, 2)


@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("solver", ["heun", "dpm"])
def test_given_noise_start_and_times_are_the_same_way(
    strategy: Strategy, solver: SolverName
) -> None:
    def draw(num: int | None = None, **keywords: Any) -> Tensor:
        return (
            exact(chunk_size=7)
            .sample(
                num, strategy=strategy, seed=3, **sampling_keywords(keywords | {"solver": solver})
            )
            .images
        )

    noise, _ = draw_noise(range(12), (2,), 3, 4)
    own = draw(12, steps=4)
    for same in (
        draw(noise=noise, steps=4),
        draw(x=noise, t_start=1.0, steps=4),
        draw(times=(1.0, 0.75, 0.5, 0.25, 0.0), num=12),
        torch.cat([draw(5, steps=4), draw(7, numbers=range(5, 12), steps=4)]),
        draw(12, steps=4, callback=lambda step, t, x, experts: None),
    ):
        torch.testing.assert_close(same, own, atol=2e-5, rtol=0)
    assert (draw(noise=-noise, steps=4) - own).abs().max() > 0.1


def test_variations_of_own_samples_have_the_law_of_the_data_under_the_same_seed() -> None:
    """Data of N(0, 1) are followed along ``x_t = sqrt((1 - t)^2 + t^2) eps``: a sample is its own noise."""

    def silo(x_B: Tensor, t_B: Tensor) -> Tensor:
        t = t_B[:, None]
        return (2 * t - 1) / ((1 - t) ** 2 + t**2) * x_B

    num = 20_000
    ensemble = Ensemble([silo], None, [1.0], shape=(1,), chunk_size=num)
    drawn = ensemble.sample(num, seed=7).images
    error = (2 / num) ** 0.5
    assert float(drawn.var()) == pytest.approx(1, abs=5 * error)
    # By its own noise a sample would become sqrt(2) times itself at t = 1/2, and come back as it is at t = 1.
    varied = ensemble.image_to_image(drawn, 0.5, seed=7).images
    assert float(varied.var()) == pytest.approx(1, abs=5 * error)
    again = ensemble.image_to_image(drawn, 1.0, seed=7).images
    assert abs(float(torch.corrcoef(torch.cat([drawn, again], 1).T)[0, 1])) < 5 / num**0.5


@pytest.mark.parametrize("strategy", ALL)
def test_samples_with_seeds_of_their_own_are_those_of_calls_with_these_seeds(
    strategy: Strategy,
) -> None:
    """With chunks of 1 an expert evaluates one sample at a time, so that company changes no bit."""
    one_by_one = exact(chunk_size=1)

    def draw(num: int, seed: int = 0, **options: Any) -> Samples:
        return one_by_one.sample(
            num, strategy=strategy, steps=4, seed=seed, options=SamplingOptions(**options)
        )

    together = draw(7, seeds=[3] * 4 + [5] * 3, numbers=[0, 1, 2, 3, 8, 9, 10])
    alone = [draw(4, seed=3), draw(3, seed=5, numbers=range(8, 11))]
    assert torch.equal(together.images, torch.cat([samples.images for samples in alone]))
    assert torch.equal(together.expert_N, torch.cat([samples.expert_N for samples in alone]))
    assert not torch.equal(draw(4, seed=5).images, alone[0].images)


def test_trajectory_in_two_parts_has_the_law_of_one() -> None:
    for strategy in (Full(), Sample(), Lock(0.4)):
        with case(strategy=strategy):
            half = exact().sample(
                1000,
                strategy=strategy,
                seed=1,
                options=SamplingOptions(times=[1 - n / 20 for n in range(11)]),
            )
            assert half.images.norm(dim=1).mean() < 2.2  # still half noise
            drawn = exact().sample(
                steps=10,
                strategy=strategy,
                seed=2,
                options=SamplingOptions(x=half.latents, t_start=0.5),
            )
            share = torch.tensor(four_silos().prior_K)
            error = (share * (1 - share) / 1000).sqrt()
            assert ((counts(drawn.images) / 1000 - share).abs() < 5.5 * error).all()


def test_parts_of_a_trajectory_draw_their_experts_independently_under_the_same_seed() -> None:
    """A router that knows nothing gives each part either expert with probability 1/2, whatever came before."""
    num = 4000
    ensemble = Ensemble(
        [lambda x, t: torch.zeros_like(x)] * 2, UninformedRouter(2), [0.5, 0.5], shape=(1,)
    )
    parts = [
        ensemble.sample(num, strategy="sample", options=SamplingOptions(times=[1.0, 0.7])),
    ]
    for times in ([0.7, 0.4], [0.4, 0.0]):
        options = SamplingOptions(x=parts[-1].latents, times=times)
        parts.append(ensemble.sample(strategy="sample", options=options))
    for earlier, later in combinations(parts, 2):
        share = (earlier.expert_N == later.expert_N).double().mean()
        assert float(share) == pytest.approx(0.5, abs=5 * 0.5 / num**0.5)


def test_generator_takes_the_place_of_the_seed_and_moves_on() -> None:
    def draw(generator: torch.Generator) -> Tensor:
        return exact().sample(20, steps=2, options=SamplingOptions(generator=generator)).images

    generator = torch.Generator().manual_seed(7)
    first = draw(generator)
    second = draw(generator)
    assert not torch.equal(first, second)
    assert torch.equal(draw(torch.Generator().manual_seed(7)), first)
    alone = exact(chunk_size=1).sample(
        3, steps=2, options=SamplingOptions(generator=torch.Generator().manual_seed(7))
    )
    torch.testing.assert_close(alone.images, first[:3], atol=1e-5, rtol=0)


def test_callback_sees_every_step_of_all_samples_and_may_move_them() -> None:
    seen: list[tuple[int, float]] = []
    last: list[Tensor] = []
    followed: list[Tensor] = []

    def watch(step: int, t: float, x: Tensor, experts: Tensor) -> None:
        seen.append((step, round(t, 6)))
        last.append(x.clone())
        followed.append(experts.clone())

    for strategy in ALL:
        with case(strategy=strategy):
            for log in (seen, last, followed):
                log.clear()  # type: ignore[attr-defined]
            drawn = exact(chunk_size=4).sample(
                30,
                steps=4,
                strategy=strategy,
                callback=watch,
                options=SamplingOptions(router_every=2),
            )
            assert seen == [(0, 0.75), (1, 0.5), (2, 0.25), (3, 0.0)]
            assert torch.equal(last[-1], drawn.images)
            torch.testing.assert_close(
                exact(chunk_size=4)
                .sample(30, steps=4, strategy=strategy, options=SamplingOptions(router_every=2))
                .images,
                drawn.images,
                atol=2e-5,
                rtol=0,
            )
            assert drawn.provenance is not None
            for i in (0, 17):
                changes = {t: set(experts) for t, experts in drawn.provenance[i]}
                current: set[int] = set()
                for n, t in enumerate((1.0, 0.75, 0.5, 0.25)):
                    current = changes.get(t, current)
                    assert set(followed[n][i].nonzero()[:, 0].tolist()) == current
    held = (
        exact().sample(5, steps=3, callback=lambda step, t, x, experts: torch.zeros_like(x)).images
    )
    assert not held.any()
    with pytest.raises(ShapeError, check=has_subject("what the callback returned")):
        exact().sample(5, steps=3, callback=lambda step, t, x, experts: x[:2])


def test_provenance_tells_each_change_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = exact(chunk_size=16).sample(300, strategy="sample", steps=8)
    table = drawn.provenance
    assert table is not None and len(table) == 300
    for i in range(300):
        assert table[i][0].t == 1.0 and all(len(experts) == 1 for _, experts in table[i])
        assert table[i][-1].experts == (int(drawn.expert_N[i]),)
        assert all(
            one.experts != two.experts for one, two in zip(table[i], table[i][1:], strict=False)
        )
        assert [part.t for part in table[i]] == sorted((part.t for part in table[i]), reverse=True)
    assert max(len(table[i]) for i in range(300)) > 2
    full = exact().sample(2, strategy="full", steps=3, prior=(0.5, 0.5, 0, 0)).provenance
    assert full is not None and [tuple(part) for part in full[1]] == [(1.0, (0, 1))]
    halves = (range(150), range(150, 300))
    parts = [
        exact(chunk_size=16).sample(
            150, strategy="sample", steps=8, options=SamplingOptions(numbers=half)
        )
        for half in halves
    ]
    for part, half in zip(parts, halves, strict=True):
        assert part.provenance is not None
        assert [part.provenance[i] for i in range(150)] == [table[i] for i in half]
    assert torch.equal(torch.cat([part.expert_N for part in parts]), drawn.expert_N)
    assert "300 samples" in repr(table)
    monkeypatch.setattr("ddm.sampling.provenance.MAX_BYTES", 17 * 8 * 20)
    few = exact(chunk_size=16).sample(300, strategy="sample", steps=8).provenance
    assert few is not None and len(few) == 20
    assert [few[i] for i in range(20)] == [table[i] for i in range(20)]
    with pytest.raises(MathError, check=has_subject("sample's number")):
        few[20]
    assert ProvenanceLog(torch.ones(9, dtype=torch.bool), 5, 1).num == 5


def test_arguments_that_do_not_go_together_are_refused_in_one_sentence() -> None:
    x = torch.zeros(3, 2)
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({}, MathError, "num"),
        ({"x": x}, MathError, "t_start or times"),
        ({"x_0": x}, MathError, "t_start or times"),
        ({"num": 3, "t_start": 0.5}, MathError, "begin in noise"),
        ({"num": 3, "times": (0.5, 0.0)}, MathError, "begin in noise"),
        ({"x": x, "t_start": 0.5, "times": (0.5, 0.0)}, MathError, "both"),
        ({"x": x, "x_0": x, "t_start": 0.5}, MathError, "x alone"),
        ({"x": x, "noise": x, "t_start": 0.5}, MathError, "x alone"),
        ({"x": x, "t_start": 0.0}, MathError, "above 0"),
        ({"x": x, "t_start": 1.5}, MathError, "at most 1"),
        ({"x": x, "times": (0.2, 0.5)}, MathError, "descending"),
        ({"x": x, "times": (0.5,)}, MathError, "descending"),
        ({"x": x, "num": 4, "t_start": 0.5}, ShapeError, "4 in num, 3 in x"),
        ({"noise": torch.zeros(3, 3)}, ShapeError, "noise"),
        ({"noise": torch.zeros(3, 2, dtype=torch.int64)}, ShapeError, "int64"),
        ({"noise": torch.full((3, 2), float("nan"))}, NumericalError, "noise"),
        ({"num": 3, "seed": 1, "generator": torch.Generator()}, MathError, "both"),
        ({"num": 3, "numbers": [0, -1, 2]}, MathError, "numbers"),
        ({"num": 3, "seeds": [0, 1]}, MathError, "one for each of 3"),
        ({"num": 3, "seeds": [0, -1, 2]}, MathError, "seeds"),
        ({"num": 3, "seeds": [0, 1, 2], "seed": 4}, MathError, "seeds alone"),
        ({"num": 3, "seeds": [0, 1, 2], "generator": torch.Generator()}, MathError, "seeds alone"),
        ({"num": 3, "numbers": [0, 1.5, 2]}, MathError, "numbers"),
        ({"num": 3, "numbers": [0, 1]}, MathError, "3 numbers"),
        ({"num": 3, "numbers": 3}, MathError, r"such as range\(3\)"),
        ({"num": 3, "prior": {"a": 1.0}}, DataError, "in the order of `expert_ids`"),
        ({"num": 3, "dtype": torch.float16}, MathError, "float32"),
        ({"num": 3, "guidance_interval": (0.2, 0.8)}, MathError, "guidance above 0"),
    ]
    for keywords, kind, message in wrong:
        with case(keywords=keywords), pytest.raises(kind, match=message):
            exact().sample(steps=2, **sampling_keywords(keywords))


def test_posterior_is_the_log_probability_of_each_expert_even_where_it_is_too_small_for_a_number() -> (
    None
):
    mixture = four_silos()
    x = torch.cat([four_silos().draw(50, seed=1), torch.tensor([[2.0, 2.0]])])
    t = torch.full((51,), 0.3, dtype=torch.float64)
    expected = torch.log_softmax(
        mixture.log_likelihood(x, t) + torch.tensor(mixture.prior_K, dtype=torch.float64).log(), 1
    )
    torch.testing.assert_close(exact().posterior(x, t), expected, atol=1e-9, rtol=0)
    tiny = exact().posterior(x[-1:], torch.full((1,), 0.01, dtype=torch.float64))
    assert bool(tiny.isfinite().all()) and float(tiny.min()) < -800
    without = exact().posterior(x, t, prior=(0, 1, 1, 1))
    assert bool((without[:, 0] == -torch.inf).all()) and bool(without[:, 1:].isfinite().all())
    with pytest.raises(MathError, match="router"):
        exact(router=None).posterior(x, t)
    with pytest.raises(ShapeError) as caught:
        exact().posterior(x, 0.3)
    assert "torch.full((51,), 0.5)" in caught.value.remedy
