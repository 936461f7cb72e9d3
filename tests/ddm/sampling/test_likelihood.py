"""Likelihoods against densities that are known in closed form, and what is refused because it has none."""

# Shape legend: N images, B batch, K experts.
import re
from dataclasses import replace
from math import erf, log, log2, pi, sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddm.diffusion.path import CosinePath, LinearPath
from ddm.diffusion.solver import SolverName
from ddm.ensemble import Ensemble
from ddm.errors import MathError, NumericalError, ShapeError
from ddm.sampling.expert_cache import LazyExperts
from ddm.sampling.likelihood import LikelihoodOptions, velocity_and_divergence
from tests.ddm.sampling import test_guidance as guided
from tests.ddm.sampling.test_expert_cache import Disk
from tests.ddm.system.test_devices import CLASS, DIT, SHAPE, experts
from tests.support.case import case
from tests.support.errors import has_subject
from tests.support.gaussian_mixture import GaussianMixture, UninformedRouter, four_silos

EXACT = LikelihoodOptions(exact=True)
HOW_TO = Path(__file__).parents[3] / "docs" / "how-to" / "likelihood.md"


def four(**changes: object) -> Ensemble:
    """The ensemble of exact experts and the exact router of four silos, in double precision."""
    mixture = four_silos()
    settings = {
        "experts": mixture.experts(),
        "router": mixture,
        "prior": mixture.prior_K,
        "shape": (2,),
        "dtype": torch.float64,
    }
    return Ensemble(**(settings | changes))  # type: ignore[arg-type]


def one_gaussian(variance: float = 0.25, dims: int = 2) -> GaussianMixture:
    mean = torch.linspace(-0.5, 0.5, dims)[None]
    ones = torch.ones(1)
    return GaussianMixture(
        mean.double(),
        torch.full((1, dims), variance).double(),
        ones.double(),
        torch.zeros(1).long(),
    )


def density(mixture: GaussianMixture, x: Tensor) -> Tensor:
    return mixture.log_density(x, torch.zeros(len(x), dtype=torch.float64))


def deviation(ensemble: Ensemble, x: Tensor, truth: Tensor, **keywords: Any) -> float:
    """The largest error of an exact trace, nats."""
    keywords = {"options": EXACT, **keywords}
    found = ensemble.compute_likelihood(x, progress=False, **keywords)
    assert bool((found.standard_error_N == 0).all())
    return float((found.log_density_N - truth).abs().max())


def test_exact_trace_gives_the_density_of_the_mixture_and_not_with_an_uninformed_router() -> None:
    x = four_silos().draw(24, seed=0)
    truth = density(four_silos(), x)
    assert deviation(four(), x, truth) < 0.03
    cosine = four_silos(CosinePath())
    on_cosine = four(experts=cosine.experts(), router=cosine, path=CosinePath())
    assert deviation(on_cosine, x, truth) < 0.1

    class AlmostUninformed(UninformedRouter):
        def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
            return 1e-6 * four_silos().log_likelihood(x_B, t_B)

    assert deviation(four(router=AlmostUninformed(4)), x, truth, steps=10) > 0.5


def test_likelihood_converges_with_the_order_of_the_solver() -> None:
    gaussian = one_gaussian(variance=0.09)
    ensemble = four(experts=gaussian.experts(), router=None, prior=[1.0])
    x = gaussian.draw(5, seed=1)
    truth = density(gaussian, x)
    orders: dict[SolverName, int] = {"euler": 1, "midpoint": 2, "heun": 2, "rk4": 4}
    for solver, order in orders.items():
        with case(solver=solver):
            options = replace(EXACT, solver=solver)
            coarse = deviation(ensemble, x, truth, steps=16, options=options)
            fine = deviation(ensemble, x, truth, steps=32, options=options)
            assert abs(log2(coarse / fine) - order) < 0.4
            assert fine < 0.4


def test_probes_have_the_exact_trace_as_their_mean_and_state_their_error() -> None:
    x = four_silos().draw(64, seed=2)
    exact = four().compute_likelihood(x, steps=8, options=EXACT, progress=False)
    found = four().compute_likelihood(x, steps=8, num_probes=16, progress=False)
    error_N = found.log_density_N - exact.log_density_N
    standard_error = float(found.standard_error_N.square().sum().sqrt()) / len(x)
    assert abs(float(error_N.mean())) < 5 * standard_error
    # Without an error of the probes this test would show nothing.
    spread = float(error_N.square().mean().sqrt())
    assert 0.6 < spread / float(found.standard_error_N.square().mean().sqrt()) < 1.6
    assert spread > 0.01
    alone = four().compute_likelihood(x[:2], steps=2, num_probes=1, progress=False)
    assert bool(alone.standard_error_N.isnan().all())


def test_image_has_the_same_likelihood_in_any_company() -> None:
    x = four_silos().draw(7, seed=3)
    keywords: dict[str, Any] = {"steps": 3, "progress": False}
    together = four().compute_likelihood(x, **keywords).log_density_N
    in_chunks = four(chunk_size=2).compute_likelihood(x, **keywords).log_density_N
    torch.testing.assert_close(together, in_chunks)
    options = LikelihoodOptions(numbers=range(3, 7))
    some = four().compute_likelihood(x[3:], options=options, **keywords).log_density_N
    torch.testing.assert_close(together[3:], some)
    reseeded = four().compute_likelihood(x, seed=1, **keywords).log_density_N
    assert float((reseeded - together).abs().max()) > 1e-3


def test_lock_has_the_densities_of_its_experts_mixed_by_the_prior_without_a_router() -> None:
    mixture = four_silos()
    x = mixture.draw(6, seed=4)
    locked = four(router=None)
    assert deviation(locked, x, density(mixture, x), strategy="lock") < 0.03
    # Only the first silo, whose own components are then all the data.
    alone = replace(mixture, weight_C=mixture.weights_of(0) / mixture.weights_of(0).sum())
    first = [1.0, 0.0, 0.0, 0.0]
    truth = density(alone, x)
    near = truth > -20
    assert deviation(locked, x[near], truth[near], strategy="lock", prior=first) < 0.03
    # The standard error is that of the sum, which is at most that of its least certain part.
    found = locked.compute_likelihood(x, strategy="lock", steps=4, num_probes=4, progress=False)
    assert 0 < float(found.standard_error_N.max()) < 1


def test_condition_of_each_image_gives_the_density_of_its_class() -> None:
    mixture = four_silos()
    label_N = torch.tensor([0, 1] * 8)
    weights = [guided.within(label) / guided.within(label).sum() for label in (0, 1)]
    rows = []
    for row, label in enumerate(label_N.tolist()):
        rows.append(replace(mixture, weight_C=weights[label]).draw(1, seed=row))
    x = torch.cat(rows)
    truths = [density(replace(mixture, weight_C=weight_C), x) for weight_C in weights]
    truth = torch.where(label_N == 0, truths[0], truths[1])
    ensemble = guided.exact(dtype=torch.float64)
    for strategy in ("full", "lock"):
        with case(strategy=strategy):
            assert deviation(ensemble, x, truth, strategy=strategy, condition=label_N) < 0.05
    swapped = deviation(ensemble, x, truth, condition=1 - label_N, steps=10)
    assert swapped > 0.5


def test_guided_likelihood_is_that_of_the_guided_mean_where_the_data_are_normal() -> None:
    """The velocity of normal data is affine in their mean, so guidance moves the mean alone."""
    mean_of = {-1: 0.0, 0: 1.0, 1: -1.0, 2: 0.5}

    def expert(x_B: Tensor, t_B: Tensor, c_B: Tensor) -> Tensor:
        parts = []
        for x_D, t, label in zip(x_B, t_B, c_B.tolist(), strict=True):
            gaussian = replace(one_gaussian(), mean_CD=torch.full((1, 2), mean_of[label]).double())
            parts.append(gaussian.velocity(x_D[None], t[None]))
        return torch.cat(parts)

    ensemble = four(experts=[expert], router=None, prior=[1.0], condition=CLASS)
    x = torch.linspace(-1, 2, 6, dtype=torch.float64).view(3, 2)
    shifted = replace(one_gaussian(), mean_CD=torch.full((1, 2), 2.5 * 1.0).double())
    for strategy in ("full", "lock"):
        with case(strategy=strategy):
            found = deviation(
                ensemble, x, density(shifted, x), strategy=strategy, condition=0, guidance=1.5
            )
            assert found < 5e-3


def test_bits_of_whole_numbers_bound_and_nearly_reach_those_of_the_exact_probabilities() -> None:
    gaussian = one_gaussian(variance=0.16, dims=1)
    ensemble = four(experts=gaussian.experts(), router=None, prior=[1.0], shape=(1,))
    width = 2 / 15
    x = torch.full((300, 1), -1 + 8 * width, dtype=torch.float64)
    options = replace(EXACT, levels=16)
    found = ensemble.compute_likelihood(x, steps=8, options=options, progress=False)
    mean = float(gaussian.mean_CD[0, 0])
    edges = [(float(x[0, 0]) + side * width / 2 - mean) / 0.4 for side in (-1, 1)]
    probability = (erf(edges[1] / sqrt(2)) - erf(edges[0] / sqrt(2))) / 2
    mean_bits = float(found.bits_per_dim_N.mean())
    standard_error = float(found.bits_per_dim_N.std()) / sqrt(len(x))
    assert standard_error > 0
    # Jensen's inequality costs less than a hundredth of a bit in so narrow a bin.
    assert -4 * standard_error < mean_bits + log2(probability) < 4 * standard_error + 0.01
    continuous = ensemble.compute_likelihood(x[:1], steps=8, options=EXACT, progress=False)
    assert continuous.bits_per_dim_N == -continuous.log_density_N / log(2)


def test_likelihood_of_a_network_is_differentiated_through_every_layer() -> None:
    """Against differences of the velocity along the probes, in double precision."""
    nets = experts(DIT, CLASS, "cpu")
    ensemble = Ensemble(
        nets, UninformedRouter(2), [1.0, 2.0], SHAPE, condition=CLASS, dtype=torch.float64
    )
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, *SHAPE, generator=generator, dtype=torch.float64)
    t = torch.tensor([0.3, 0.8], dtype=torch.float64)
    probe = torch.randn(2, 1, 64, generator=generator, dtype=torch.float64)
    eps = probe.view(2, *SHAPE)

    def velocity(x_B: Tensor, t_B: Tensor) -> Tensor:
        return ensemble.velocity(x_B, t_B, condition=1, condition_prior=[0.5, 0.5])

    u, divergence = velocity_and_divergence(velocity, x, t, probe)
    torch.testing.assert_close(u, velocity(x, t).detach())
    step = 1e-5
    difference = (velocity(x + step * eps, t) - velocity(x - step * eps, t)).detach() / (2 * step)
    expected = (difference * eps).flatten(1).sum(1)
    torch.testing.assert_close(divergence[:, 0], expected, rtol=1e-6, atol=1e-6)
    assert float(expected.abs().min()) > 1e-3


def test_velocity_and_posterior_keep_the_gradient_of_their_callers_samples() -> None:
    mixture = four_silos()
    x = torch.tensor([[0.5, 1.0], [-1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    t = torch.tensor([0.4, 0.6], dtype=torch.float64)
    (ours,) = torch.autograd.grad(four().velocity(x, t)[:, 0].sum(), x)
    (truth,) = torch.autograd.grad(mixture.velocity(x, t)[:, 0].sum(), x)
    torch.testing.assert_close(ours, truth)
    (ours,) = torch.autograd.grad(four().posterior(x, t)[:, 0].sum(), x)
    log_joint_BK = mixture.log_likelihood(x, t) + torch.tensor(mixture.prior_K).log()
    (truth,) = torch.autograd.grad(log_joint_BK.log_softmax(1)[:, 0].sum(), x)
    torch.testing.assert_close(ours, truth)


def test_lazy_experts_stay_within_their_memory_also_after_sampling() -> None:
    disk = Disk()
    lazy = LazyExperts(disk, (10, 10, 10, 10), 10)
    x = four_silos().draw(3, seed=6)
    kept = four(experts=lazy).compute_likelihood(x, steps=2, progress=False)
    assert disk.most_alive == 1
    expected = four().compute_likelihood(x, steps=2, progress=False)
    torch.testing.assert_close(kept.log_density_N, expected.log_density_N)

    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x_B: Tensor, t_B: Tensor) -> Tensor:
            return self.layer(x_B).square()  # type: ignore[no-any-return]

    # Sampling loads them in inference mode, and torch differentiates through no weights that were made in it.
    networks = LazyExperts(lambda k: Slope(), (10,), 10)
    ensemble = Ensemble(networks, None, [1.0], (2,))
    ensemble.sample(1, steps=1, progress=False)
    with torch.inference_mode():
        found = ensemble.compute_likelihood(torch.zeros(1, 2), steps=1, progress=False)
    assert bool(found.log_density_N.isfinite().all())


class DoublingLatent:
    """Latents that are twice the samples."""

    def encode(self, samples: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        return 2 * samples

    def decode(self, latents: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        return latents / 2


def test_likelihood_under_an_autoencoder_is_that_of_the_latents_and_has_no_levels() -> None:
    x = four_silos().draw(2, seed=8)
    encoded = four(latent=DoublingLatent())
    plain = four().compute_likelihood(x, steps=2, progress=False)
    found = encoded.compute_likelihood(x / 2, steps=2, progress=False)
    torch.testing.assert_close(found.log_density_N, plain.log_density_N)
    with pytest.raises(MathError, check=has_subject("levels")):
        encoded.compute_likelihood(x / 8, options=LikelihoodOptions(levels=256))


def test_strategies_and_solvers_without_a_density_are_refused() -> None:
    x = torch.zeros(1, 2)
    for strategy in ("sample", "top-k", "top-1", "nucleus", "threshold"):
        with pytest.raises(MathError, check=has_subject("strategy")):
            four().compute_likelihood(x, strategy=strategy)
    for solver in ("dpm", "rk45"):
        with pytest.raises(MathError, check=has_subject("solver")):
            four().compute_likelihood(x, options=LikelihoodOptions(solver=solver))  # type: ignore[arg-type]


def test_images_and_numbers_that_do_not_fit_are_refused_by_name() -> None:
    x = torch.zeros(2, 2)
    refused: list[tuple[type[MathError], str, Any, dict[str, Any]]] = [
        (ShapeError, "images", torch.zeros(2, 3), {}),
        (ShapeError, "images", torch.zeros(2, 2, dtype=torch.uint8), {}),
        (NumericalError, "images", torch.full((2, 2), torch.nan), {}),
        (MathError, "images", 255 * torch.ones(2, 2), {"options": LikelihoodOptions(levels=256)}),
        (MathError, "levels", x, {"options": LikelihoodOptions(levels=1)}),
        (MathError, "numbers", x, {"options": LikelihoodOptions(numbers=[1])}),
        (MathError, "num_probes", x, {"num_probes": 0}),
        (MathError, "steps", x, {"steps": 0}),
        (MathError, "seed", x, {"seed": -1}),
    ]
    for kind, subject, images, keywords in refused:
        with (
            case(subject=subject, keywords=keywords),
            pytest.raises(kind, check=has_subject(subject)),
        ):
            four().compute_likelihood(images, **keywords)


def test_what_torch_cannot_differentiate_is_refused_by_name() -> None:
    mixture = four_silos()
    x = mixture.draw(2, seed=7)

    class Detached(UninformedRouter):
        @torch.no_grad()
        def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
            return mixture.log_likelihood(x_B, t_B)

    class NoBackward(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x_B: Tensor) -> Tensor:
            return x_B.clone()

    def without_backward(x_B: Tensor, t_B: Tensor) -> Tensor:
        return NoBackward.apply(x_B)  # type: ignore[no-any-return,no-untyped-call]

    detached = torch.no_grad()(mixture.expert(1))
    cases = [
        ("router", four(router=Detached(4))),
        ("expert 1", four(experts=[*mixture.experts()[:1], detached, *mixture.experts()[2:]])),
        ("velocity", four(experts=[without_backward], router=None, prior=[1.0])),
    ]
    for subject, ensemble in cases:
        with case(subject=subject), pytest.raises(MathError, check=has_subject(subject)):
            ensemble.compute_likelihood(x, steps=1, progress=False)
    wild = four(experts=[lambda x_B, t_B: 1e300 * x_B], router=None, prior=[1.0])
    with pytest.raises(NumericalError, check=has_subject("likelihood")):
        wild.compute_likelihood(x, steps=2, progress=False)


def test_page_on_likelihoods_runs_as_typed() -> None:
    namespace: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", HOW_TO.read_text("utf-8"), flags=re.DOTALL):
        exec(block, namespace)
    images = namespace["images"].double()
    squares = [((images - mean) ** 2).sum(1) / (2 * 0.2**2) for mean in (-0.4, 0.4)]
    joint = torch.stack([log(0.5) - log(2 * pi * 0.2**2) - square for square in squares])
    found = namespace["likelihood"]
    torch.testing.assert_close(found.log_density_N, joint.logsumexp(0), atol=5e-3, rtol=0)
    assert isinstance(namespace["ensemble"].path, LinearPath)
