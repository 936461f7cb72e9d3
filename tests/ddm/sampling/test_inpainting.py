"""Inpainting against the conditional law of a Gaussian mixture, which has a closed form."""

# Shape legend: C components, D dimensions, N samples.
from typing import Any

import pytest
import torch
from torch import Tensor

from ddm.diffusion.path import CosinePath, LinearPath, Path
from ddm.diffusion.solver import SolverName
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
from ddm.errors import MathError, NumericalError, ShapeError
from ddm.sampling.inpainting import mask_of_latents
from ddm.sampling.options import sampling_keywords
from tests.support.case import case
from tests.support.errors import has_subject
from tests.support.gaussian_mixture import GaussianMixture, four_silos

NUM = 300
LEFT = torch.tensor([True, False])


def two_silos(path: Path | None = None) -> GaussianMixture:
    """Silo 0 above, silo 1 below; what is known of the first axis tells how probable each is, without deciding it."""
    return GaussianMixture(
        torch.tensor([[0.0, 1.5], [1.0, -1.5]], dtype=torch.float64),
        torch.tensor([[0.3, 0.1], [0.3, 0.1]], dtype=torch.float64),
        torch.tensor([0.5, 0.5], dtype=torch.float64),
        torch.tensor([0, 1]),
        path or LinearPath(),
    )


def of_mixture(mixture: GaussianMixture, **changes: object) -> Ensemble:
    settings = {
        "experts": mixture.experts(),
        "router": mixture,
        "prior": mixture.prior_K,
        "shape": (2,),
    }
    return Ensemble(**(settings | {"path": mixture.path, "chunk_size": 1024} | changes))  # type: ignore[arg-type]


def share_above(mixture: GaussianMixture, first: float) -> float:
    """The conditional probability of silo 0, by Bayes' rule on the first axis alone."""
    log_C = -0.5 * ((first - mixture.mean_CD[:, 0]).square() / mixture.variance_CD[:, 0])
    return float((log_C.exp() * mixture.weight_C)[0] / (log_C.exp() * mixture.weight_C).sum())


def inpainted(mixture: GaussianMixture, first: float, **how: Any) -> Tensor:
    images = torch.tensor([[first, 77.0]]).expand(NUM, 2)
    keywords = sampling_keywords({"steps": 20, "solver": "euler"} | how)
    drawn = of_mixture(mixture).inpaint(images, LEFT, **keywords)
    assert torch.equal(drawn.images[:, 0], images[:, 0])
    return drawn.images[:, 1]


@pytest.mark.parametrize("path", [LinearPath(), CosinePath()])
def test_unknown_part_follows_its_conditional_law_with_corrections_and_not_without(
    path: Path,
) -> None:
    mixture = two_silos(path)
    samples = inpainted(mixture, -1.5, strategy="full")
    assert share_above(mixture, -1.5) > 0.99
    assert float((samples > 0).double().mean()) > 0.92
    above = samples[samples > 0]
    assert float(above.mean()) == pytest.approx(1.5, abs=0.12)
    assert float(above.std()) == pytest.approx(0.1**0.5, abs=0.1)
    assert float((inpainted(mixture, -1.5, corrections=0) > 0).double().mean()) < 0.85
    assert float((inpainted(mixture, 0.5) > 0).double().mean()) == pytest.approx(0.5, abs=0.12)


def by_repaint(mixture: GaussianMixture, first: float, steps: int, resampling: int) -> Tensor:
    """RePaint with jumps of one step, written out for the linear path."""
    generator = torch.Generator().manual_seed(1)

    def noise() -> Tensor:
        return torch.randn(NUM, 2, generator=generator, dtype=torch.float64)

    def put(x: Tensor, t: float) -> Tensor:
        return torch.stack([(1 - t) * first + t * noise()[:, 0], x[:, 1]], 1)

    x = noise()
    for n in range(steps):
        t = 1 - n / steps
        t_next = 1 - (n + 1) / steps
        for again in range(resampling):
            x = put(
                x + (t_next - t) * mixture.velocity(x, torch.full((NUM,), t, dtype=torch.float64)),
                t_next,
            )
            if again < resampling - 1:
                kept = (1 - t) / (1 - t_next)
                x = put(kept * x + (t**2 - (kept * t_next) ** 2) ** 0.5 * noise(), t)
    return x[:, 1]


def test_corrections_come_closer_than_the_resampling_of_repaint_with_as_many_evaluations() -> None:
    mixture = two_silos()
    expected = share_above(two_silos(), -1.0)
    ours = float((inpainted(mixture, -1.0, strategy="full") > 0).double().mean())
    theirs = float((by_repaint(mixture, -1.0, 20, 10) > 0).double().mean())
    assert expected - ours < 0.75 * (expected - theirs)


@pytest.mark.parametrize(
    "strategy",
    [
        Full(),
        Sample(),
        Lock(0.3),
        Lock(0.3, "full"),
        TopK(2),
        Nucleus(0.9),
        Threshold(0.1),
        TopOne(),
    ],
)
def test_every_strategy_fits_the_unknown_part_to_what_is_known(strategy: Strategy) -> None:
    samples = inpainted(two_silos(), -1.5, strategy=strategy, steps=12)
    assert float((samples > 0).double().mean()) > 0.85


def test_strategy_that_locks_in_noise_gives_every_silo_its_prior_share() -> None:
    """As documented: its expert was drawn before anything was known."""
    samples = inpainted(two_silos(), -1.5, strategy="lock", steps=8, corrections=2)
    assert float((samples > 0).double().mean()) == pytest.approx(0.5, abs=0.12)


@pytest.mark.parametrize("solver", ["heun", "midpoint", "rk4", "dpm"])
def test_every_solver_inpaints(solver: SolverName) -> None:
    samples = inpainted(two_silos(), 2.5, solver=solver, steps=12, corrections=6)
    assert float((samples < 0).double().mean()) > 0.8


def test_experts_and_router_are_asked_where_the_known_part_is_noised_to_their_time() -> None:
    """At every time the known axis has the mean ``alpha_t y`` and the deviation ``sigma_t``."""
    mixture = two_silos()
    calls = list[tuple[float, Tensor]]()

    class Watching:
        num_experts = 2

        def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
            calls.append((float(t_B[0]), x_B[:, 0].clone()))
            return mixture.log_likelihood(x_B, t_B)

    images = torch.tensor([[3.0, 0.0]]).expand(NUM, 2)
    of_mixture(mixture, router=Watching()).inpaint(
        images, LEFT, steps=5, corrections=2, options=SamplingOptions(solver="euler")
    )
    times = [0.8, 0.6, 0.4, 0.2]
    # two corrections and a step
    assert [t for t, _ in calls] == pytest.approx([t for t in times for _ in range(3)])
    for t, x in calls:
        assert float(x.mean()) == pytest.approx((1 - t) * 3.0, abs=6 * t / NUM**0.5)
        assert float(x.std()) == pytest.approx(t, rel=0.2)


def test_sample_i_is_inpainted_the_same_for_every_number_and_grouping() -> None:
    mixture = four_silos()

    def draw(num: int, chunk_size: int, strategy: str) -> Tensor:
        images = torch.tensor([[2.0, 0.0]]).expand(num, 2)
        ensemble = of_mixture(mixture, chunk_size=chunk_size)
        return ensemble.inpaint(
            images, LEFT, strategy=strategy, steps=4, corrections=2, seed=5
        ).images

    for strategy in ("sample", "full", "lock", "top-k"):
        with case(strategy=strategy):
            torch.testing.assert_close(
                draw(9, 4, strategy), draw(30, 64, strategy)[:9], atol=5e-5, rtol=0
            )
            assert torch.equal(draw(3, 1, strategy), draw(8, 1, strategy)[:3])


def test_inpainted_samples_with_seeds_of_their_own_are_those_of_calls_with_these_seeds() -> None:
    images = torch.zeros(4, 2)
    one_by_one = of_mixture(two_silos(), chunk_size=1)

    def draw(num: int, seed: int = 0, **options: Any) -> Tensor:
        drawn = one_by_one.inpaint(
            images[:num], LEFT, steps=4, seed=seed, options=SamplingOptions(**options)
        )
        return drawn.images

    together = draw(4, seeds=[3, 3, 5, 5], numbers=[0, 1, 0, 1])
    assert torch.equal(together, torch.cat([draw(2, seed=3), draw(2, seed=5)]))


def test_completions_of_own_samples_forget_what_is_not_known_under_the_same_seed() -> None:
    """The two values of N(0, I) are independent: the left one says nothing of the right one that was there before."""

    def silo(x_B: Tensor, t_B: Tensor) -> Tensor:
        t = t_B[:, None]
        return (2 * t - 1) / ((1 - t) ** 2 + t**2) * x_B

    num = 4000
    ensemble = Ensemble([silo], None, [1.0], shape=(2,), chunk_size=num)
    drawn = ensemble.sample(num, steps=10, seed=7).images
    completed = ensemble.inpaint(drawn, LEFT, steps=10, seed=7, corrections=0).images
    assert torch.equal(completed[:, 0], drawn[:, 0])
    before_and_after = torch.stack([drawn[:, 1], completed[:, 1]])
    assert abs(float(torch.corrcoef(before_and_after)[0, 1])) < 5 / num**0.5


def test_progress_and_provenance_count_corrections(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[tuple[int, int]] = []
    monkeypatch.setattr("ddm.ensemble._IN_FLIGHT_BYTES", 1)
    images = torch.tensor([[2.0, 0.0]]).expand(20, 2)
    drawn = of_mixture(four_silos(), chunk_size=8).inpaint(
        images,
        LEFT,
        steps=4,
        corrections=3,
        options=SamplingOptions(on_progress=lambda *now: reports.append(now)),
    )
    assert reports[-1] == (20 * (4 + 3 * 3),) * 2 and reports == sorted(reports)
    assert drawn.provenance is not None and len(drawn.provenance) == 20
    assert all(drawn.provenance[i][0].t == 1.0 for i in range(20))
    assert all(drawn.provenance[i][-1].experts == (int(drawn.expert_N[i]),) for i in range(20))


class RepeatingLatents:
    """A latent space of one value for each two pixels of a row."""

    def encode(self, samples: Tensor, on_progress: object = None) -> Tensor:
        return samples.unflatten(3, (-1, 2)).mean(4)

    def decode(self, latents: Tensor, on_progress: object = None) -> Tensor:
        return latents.repeat_interleave(2, 3)


def test_latents_are_known_where_all_their_pixels_are_and_known_pixels_are_put_back() -> None:
    known = torch.tensor([True, True, True, False]).expand(1, 1, 1, 4)
    assert mask_of_latents(known, (1, 1, 2)).flatten().tolist() == [True, False]
    volume = torch.ones(1, 1, 2, 2, 2, dtype=torch.bool)
    volume[0, 0, 0, 0, 0] = False
    assert mask_of_latents(volume, (3, 1, 1, 1)).flatten().tolist() == [False] * 3
    seen: list[Tensor] = []

    def expert(x_B: Tensor, t_B: Tensor) -> Tensor:  # all data are 5
        seen.append(x_B)
        return (x_B - 5) / t_B.clamp(min=1e-3).view(-1, 1, 1, 1)

    ensemble = Ensemble([expert], None, [1.0], (1, 1, 2), latent=RepeatingLatents())  # type: ignore[arg-type]
    drawn = ensemble.inpaint(
        torch.tensor([[[[1.0, 2.0, 3.0, 0.0]]]]),
        known[0],
        steps=6,
        options=SamplingOptions(solver="euler"),
    )
    torch.testing.assert_close(
        drawn.images.flatten(), torch.tensor([1.0, 2.0, 3.0, 5.0]), atol=1e-3, rtol=0
    )
    assert drawn.latents.flatten()[0] == pytest.approx(1.5)
    varied = ensemble.image_to_image(
        torch.ones(2, 1, 1, 4), 0.5, steps=3, options=SamplingOptions(solver="euler")
    )
    torch.testing.assert_close(varied.images, torch.full((2, 1, 1, 4), 5.0), atol=1e-3, rtol=0)


def test_times_that_end_in_noise_and_a_router_asked_now_and_then_are_refused_beside_known_parts() -> (
    None
):
    ensemble = of_mixture(two_silos())
    images = torch.zeros(3, 2)
    for corrections in (0, 9):
        with case(corrections=corrections), pytest.raises(MathError, check=has_subject("times")):
            ensemble.inpaint(
                images,
                LEFT,
                corrections=corrections,
                options=SamplingOptions(times=[1.0, 0.5, 0.1]),
            )
    for every in (0, 2):
        with case(every=every), pytest.raises(MathError, check=has_subject("router_every")):
            ensemble.inpaint(images, LEFT, steps=2, options=SamplingOptions(router_every=every))


def test_mask_that_means_nothing_is_refused() -> None:
    ensemble = of_mixture(two_silos())
    images = torch.zeros(3, 2)
    wrong: list[tuple[Tensor, Tensor, type[Exception]]] = [
        (images, torch.tensor([True, True]), MathError),
        (images, torch.tensor([True, False, False]), ShapeError),
        (images, torch.tensor([1.0, 0.0]), ShapeError),
        (images, torch.ones(2, 2, dtype=torch.bool), ShapeError),
        (torch.full((3, 2), float("inf")), LEFT, NumericalError),
        (torch.zeros(3, 3), LEFT, ShapeError),
    ]
    for wrong_images, known, kind in wrong:
        with case(shape=wrong_images.shape, known=known), pytest.raises(kind):
            ensemble.inpaint(wrong_images, known, steps=2)
    with pytest.raises(MathError, check=has_subject("corrections")):
        ensemble.inpaint(images, LEFT, corrections=-1)
    with pytest.raises(MathError, check=has_subject("strategy Sample")):
        of_mixture(two_silos(), router=None).inpaint(images, LEFT, steps=2)
