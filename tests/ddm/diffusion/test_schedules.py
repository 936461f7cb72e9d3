"""Schedules of the wider field against diffusers' schedulers, and predictions against closed forms of Gaussian data."""

import itertools
import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from ddm.diffusion.path import (
    CosinePath,
    Expert,
    LinearPath,
    Path,
    PathName,
    Prediction,
    as_velocity,
    expand_time,
    path_named,
    target_of,
    velocity,
    x_0_and_eps_of,
    x_t,
)
from ddm.diffusion.schedules import DiscretePath, KarrasPath
from ddm.protocol.learning import ExpertObjective
from tests.support.gaussian_mixture import GaussianMixture, four_silos

DISCRETE = {
    "ddpm_linear": "linear",
    "ddpm_cosine": "squaredcos_cap_v2",
    "scaled_linear": "scaled_linear",
}
PATHS: list[PathName] = list(get_args(PathName))
PREDICTIONS: list[Prediction] = list(get_args(Prediction))
INNER = torch.linspace(0.02, 0.97, 41, dtype=torch.float64)


def scheduler(name: str, kind: str = "DDPMScheduler", **changes: object) -> Any:
    """What diffusers calls the schedule."""
    pytest.importorskip("diffusers", reason="needs diffusers: pip install '.[diffusers]'")
    import diffusers

    betas = {"beta_start": 0.00085, "beta_end": 0.012} if name == "scaled_linear" else {}
    return getattr(diffusers, kind)(
        num_train_timesteps=1000, beta_schedule=DISCRETE[name], **betas, **changes
    )


def exact(mixture: GaussianMixture, prediction: Prediction) -> Expert:
    """The best prediction on the mixture's path, by Gaussian conditioning."""

    def expert(x: Tensor, t: Tensor) -> Tensor:
        x_0, eps = mixture.denoised(x, t, mixture.weight_C)
        return target_of(mixture.path, prediction, x_0, eps, t)

    return expert


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete_schedule_is_the_one_of_diffusers_at_every_step(name: PathName) -> None:
    path = path_named(name)
    assert isinstance(path, DiscretePath)
    theirs = scheduler(name).alphas_cumprod.double()
    t_S = torch.arange(1000, dtype=torch.float64) / 999
    # In log space, since the last alphas are almost 0; diffusers multiplies a thousand factors in float32.
    assert torch.allclose(path.alphas_cumprod().log(), theirs.log(), rtol=0, atol=2e-3)
    assert torch.allclose(
        path.alpha(t_S).square().log(), path.alphas_cumprod().log(), rtol=0, atol=1e-9
    )
    assert torch.allclose(path.step(t_S), torch.arange(1000, dtype=torch.float64))
    shifted = path.alpha((t_S + 1 / 999).clamp(max=1)).square().log()
    assert not torch.allclose(shifted, theirs.log(), rtol=0, atol=2e-3), (
        "one step later it is another"
    )


@pytest.mark.parametrize("name", DISCRETE)
def test_x_t_and_v_are_those_of_diffusers(name: PathName) -> None:
    theirs = scheduler(name, "DDIMScheduler")
    path = path_named(name)
    steps = torch.tensor([0, 1, 250, 700, 998])
    x_0, eps = (torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    t_B = steps / 999
    v = target_of(path, "v", x_0, eps, t_B)
    assert torch.allclose(v, theirs.get_velocity(x_0, eps, steps), atol=2e-4)
    x = path.alpha(t_B)[:, None] * x_0 + path.sigma(t_B)[:, None] * eps
    assert torch.allclose(x, theirs.add_noise(x_0, eps, steps), atol=2e-4)


@pytest.mark.parametrize("name", DISCRETE)
@pytest.mark.parametrize(
    ("prediction", "theirs"), [("eps", "epsilon"), ("v", "v_prediction"), ("x_0", "sample")]
)
def test_x_0_from_a_prediction_is_the_one_of_diffusers(
    name: PathName, prediction: Prediction, theirs: str
) -> None:
    scheduled = scheduler(name, "DDIMScheduler", prediction_type=theirs, clip_sample=False)
    scheduled.set_timesteps(1000)
    x, answer = (
        torch.randn(1, 3, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)
    )
    for step in (1, 400, 800):
        t_B = torch.tensor([step / 999])
        x_0, _ = x_0_and_eps_of(path_named(name), prediction, x, answer, t_B)
        expected = scheduled.step(answer, step, x, eta=0.0).pred_original_sample
        assert torch.allclose(x_0, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("sigma", [0.003, 0.5, 7.0, 60.0])
def test_karras_path_and_v_are_the_preconditioning_of_edm(sigma: float) -> None:
    pytest.importorskip("diffusers", reason="needs diffusers: pip install '.[diffusers]'")
    from diffusers import EDMEulerScheduler

    theirs = EDMEulerScheduler(sigma_min=0.002, sigma_max=80.0, sigma_data=1.0)
    noised, answer = (
        torch.randn(1, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)
    )
    path = KarrasPath()
    s = torch.tensor([sigma])
    t_B = path.time_of(torch.ones(1), s)
    assert torch.allclose(path.sigma(t_B) / path.alpha(t_B), s, rtol=1e-4)
    seen = noised * path.alpha(t_B)
    assert torch.allclose(seen, theirs.precondition_inputs(noised, s), rtol=1e-4)
    denoised = theirs.precondition_outputs(noised, answer, s)
    assert torch.allclose(
        x_0_and_eps_of(path, "v", seen, -answer, t_B)[0], denoised, rtol=1e-3, atol=1e-4
    )


def test_karras_path_has_the_sigmas_of_table_1() -> None:
    path = KarrasPath()
    grid = torch.linspace(0, 1, 5, dtype=torch.float64)
    ends = 0.002 ** (1 / 7), 80 ** (1 / 7)
    sigmas = torch.tensor(
        [(ends[0] + t * (ends[1] - ends[0])) ** 7 for t in grid.tolist()], dtype=torch.float64
    )
    assert torch.allclose(path.sigma(grid) / path.alpha(grid), sigmas, rtol=1e-9)


@pytest.mark.parametrize("name", [*DISCRETE, "edm"])
def test_schedule_preserves_variance_and_its_derivatives_are_those_of_autograd(
    name: PathName,
) -> None:
    path = path_named(name)
    t = INNER.clone().requires_grad_()
    assert torch.allclose(
        path.alpha(INNER).square() + path.sigma(INNER).square(), torch.ones_like(INNER)
    )
    for value, derivative in ((path.alpha, path.d_alpha), (path.sigma, path.d_sigma)):
        (slope,) = torch.autograd.grad(value(t).sum(), t)
        assert torch.allclose(slope, derivative(INNER), rtol=1e-9)
    assert torch.allclose(
        path.time_of(3 * path.alpha(INNER), 3 * path.sigma(INNER)), INNER, rtol=1e-9
    )


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_exact_velocity_of_gaussian_data_is_recovered_from_each_prediction_on_each_path(
    name: PathName, prediction: Prediction
) -> None:
    path = path_named(name)
    for canonical in (LinearPath(), CosinePath()):
        own_B = path.time_of(canonical.alpha(INNER), canonical.sigma(INNER))
        t_B = INNER[(own_B > 0.01) & (own_B < 0.99)]
        assert len(t_B) > 35
        x = torch.randn(
            len(t_B), 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
        )
        truth = four_silos(canonical).velocity(x, t_B)
        velocity = as_velocity(exact(four_silos(path), prediction), prediction, path, canonical)(
            x, t_B
        )
        other: Prediction = "eps" if prediction != "eps" else "v"
        mistaken = as_velocity(exact(four_silos(path), prediction), other, path, canonical)(x, t_B)
        assert (velocity - truth).abs().max() < 1e-7
        assert (mistaken - truth).abs().max() > 0.1, "taken for another prediction"


@pytest.mark.parametrize(("name", "prediction"), [*itertools.product(PATHS, PREDICTIONS)])
def test_velocity_is_finite_and_close_to_the_truth_where_the_schedule_ends(
    name: PathName, prediction: Prediction
) -> None:
    path = path_named(name)
    canonicals: list[Path] = [LinearPath(), CosinePath()]
    for canonical, t in itertools.product(canonicals, (0.0, 1e-4, 0.9999, 1.0)):
        t_B = torch.full((50,), t, dtype=torch.float64)
        x_0 = four_silos().draw(50, seed=0)
        eps = torch.randn(50, 2, generator=torch.Generator().manual_seed(1))
        x = x_t(canonical, x_0, eps, t_B)
        truth = four_silos(canonical).velocity(x, t_B)
        velocity = as_velocity(exact(four_silos(path), prediction), prediction, path, canonical)(
            x, t_B
        )
        # scaled_linear ends at alpha = 0.07, so its experts take pure noise for a twentieth of an image
        assert (velocity - truth).abs().max() < (2.0 if name == "scaled_linear" else 0.6)
        assert bool(velocity.isfinite().all())


@pytest.mark.parametrize("name", PATHS)
def test_float32_times_find_their_steps(name: PathName) -> None:
    path = path_named(name)
    t_B = torch.linspace(0, 1, 1000)
    times = path.time_of(path.alpha(t_B), path.sigma(t_B))
    assert (
        (times - t_B).abs().max() < 1e-3
        if name == "ddpm_cosine"
        else (times - t_B).abs().max() < 1e-4
    )


def test_as_velocity_hands_the_condition_on() -> None:
    conditions = []

    def expert(x_B: Tensor, t_B: Tensor, c_B: Tensor) -> Tensor:
        conditions.append(c_B)
        return x_B

    as_velocity(expert, "v", DiscretePath("linear"), LinearPath())(
        torch.ones(2, 1), torch.full((2,), 0.5), "class"
    )
    assert conditions == ["class"]


def test_plans_name_the_paths_and_predictions_that_there_are() -> None:
    fields = ExpertObjective.model_fields
    assert set(get_args(fields["path"].annotation)) == set(PATHS)
    assert set(get_args(fields["prediction"].annotation)) == set(PREDICTIONS)
    assert {
        name for name in PATHS if ExpertObjective(path=name, prediction="v").ensemble_path == name
    } == {name for name in PATHS if path_is_whole(path_named(name))}


def path_is_whole(path: Path) -> bool:
    """Whether it begins at pure data and ends at pure noise, as an ensemble's must."""
    ends = torch.tensor([0.0, 1.0])
    return path.alpha(ends).tolist() == [1.0, 0.0] and path.sigma(ends).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("name", [*DISCRETE, "edm"])
def test_velocity_on_a_schedule_that_is_uneven_in_t_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="needs the prediction eps, v or x_0"):
        ExpertObjective(path=name)


def test_samples_of_an_exact_expert_on_ddpm_steps_have_the_law_of_the_data() -> None:
    """One Gaussian, from noise by 200 Euler steps: mean and deviation in closed form."""
    mean = 0.7
    deviation = 0.4
    path = DiscretePath("linear")

    def eps(x: Tensor, t: Tensor) -> Tensor:
        alpha, sigma = (
            expand_time(coefficient, x) for coefficient in (path.alpha(t), path.sigma(t))
        )
        return sigma * (x - alpha * mean) / (alpha.square() * deviation**2 + sigma.square())

    u = as_velocity(eps, "eps", path, CosinePath())
    canonical = CosinePath()
    x = torch.randn(4000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    start = x.clone()
    for n in range(200):
        x = x - u(x, torch.full((4000,), 1 - n / 200, dtype=torch.float64)) / 200
    expected = mean + deviation * start
    assert (x - expected).abs().max() < 0.02
    assert velocity(canonical, x, start, torch.ones(4000)).isfinite().all()
    assert math.isclose(float(x.std()), deviation, rel_tol=0.05)
