"""Paths and conversions against derivatives, closed forms and the Gaussian mixture."""

from typing import get_args

import pytest
import torch
from torch import Tensor

from ddm.diffusion.path import (
    CosinePath,
    LinearPath,
    Path,
    Prediction,
    as_velocity,
    path_named,
    score,
    target_of,
    velocity,
    x_0_and_eps,
    x_0_and_eps_of,
    x_t,
)
from ddm.errors import ShapeError
from tests.support.gaussian_mixture import four_silos

PATHS = [LinearPath(), CosinePath()]
INNER = torch.linspace(0.02, 0.98, 25, dtype=torch.float64)
WHOLE = torch.linspace(0.0, 1.0, 25, dtype=torch.float64)


def noised(path: Path, t_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Data, noise and x_t of the four silos at the given times."""
    x_0 = four_silos().draw(len(t_B), seed=0)
    eps = torch.randn(x_0.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x_0, eps, x_t(path, x_0, eps, t_B)


@pytest.mark.parametrize("path", PATHS)
def test_path_is_data_at_0_and_noise_at_1_exactly(path: Path) -> None:
    for dtype in (torch.float32, torch.float64):
        ends = torch.tensor([0.0, 1.0], dtype=dtype)
        assert path.alpha(ends).tolist() == [1.0, 0.0]
        assert path.sigma(ends).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("path", PATHS)
def test_path_derivatives_equal_autograd(path: Path) -> None:
    t = INNER.clone().requires_grad_()
    for value, derivative in ((path.alpha, path.d_alpha), (path.sigma, path.d_sigma)):
        total = value(t).sum()
        (slope,) = torch.autograd.grad(total, t) if total.requires_grad else (torch.zeros_like(t),)
        assert torch.allclose(slope, derivative(INNER), atol=1e-14)


@pytest.mark.parametrize("path", PATHS)
def test_time_of_finds_t_again_when_alpha_and_sigma_are_scaled(path: Path) -> None:
    times = path.time_of(3.0 * path.alpha(WHOLE), 3.0 * path.sigma(WHOLE))
    assert torch.allclose(times, WHOLE, atol=1e-14)


def test_cosine_path_is_variance_preserving_and_linear_is_not() -> None:
    def power(path: Path) -> Tensor:
        return path.alpha(INNER).square() + path.sigma(INNER).square()

    assert torch.allclose(power(CosinePath()), torch.ones_like(INNER))
    assert not torch.allclose(power(LinearPath()), torch.ones_like(INNER), atol=0.1)


def test_linear_velocity_is_noise_minus_data() -> None:
    x_0, eps, _ = noised(LinearPath(), WHOLE)
    assert torch.equal(velocity(LinearPath(), x_0, eps, WHOLE), eps - x_0)


@pytest.mark.parametrize("path", PATHS)
def test_x_0_and_eps_are_recovered_from_velocity_when_t_is_anywhere(path: Path) -> None:
    x_0, eps, x = noised(path, WHOLE)
    u = velocity(path, x_0, eps, WHOLE)
    found_x_0, found_eps = x_0_and_eps(path, x, u, WHOLE)
    assert torch.allclose(found_x_0, x_0, atol=1e-12)
    assert torch.allclose(found_eps, eps, atol=1e-12)
    other = CosinePath() if isinstance(path, LinearPath) else LinearPath()
    assert not torch.allclose(x_0_and_eps(other, x, u, WHOLE)[0], x_0, atol=1e-2)


@pytest.mark.parametrize("path", PATHS)
def test_data_and_noise_are_recovered_from_every_prediction(path: Path) -> None:
    x_0, eps, x = noised(path, INNER)
    for prediction in get_args(Prediction):
        predicted = target_of(path, prediction, x_0, eps, INNER)
        recovered_x_0, recovered_eps = x_0_and_eps_of(path, prediction, x, predicted, INNER)
        assert torch.allclose(recovered_x_0, x_0, atol=1e-10)
        assert torch.allclose(recovered_eps, eps, atol=1e-10)


@pytest.mark.parametrize("path", PATHS)
def test_score_equals_gradient_of_log_density_of_a_gaussian_mixture(path: Path) -> None:
    mixture = four_silos(path)
    x = noised(path, INNER)[2].requires_grad_()
    (gradient,) = torch.autograd.grad(mixture.log_density(x, INNER).sum(), x)
    actual = score(path, x.detach(), mixture.velocity(x.detach(), INNER), INNER)
    assert torch.allclose(actual, gradient, rtol=1e-9, atol=1e-9)
    later = score(
        path, x.detach(), mixture.velocity(x.detach(), INNER), (INNER + 0.01).clamp(max=1.0)
    )
    assert not torch.allclose(later, gradient, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("canonical", "other"), [(LinearPath(), CosinePath()), (CosinePath(), LinearPath())]
)
def test_velocity_expert_is_exact_on_the_canonical_path_when_trained_on_another(
    canonical: Path, other: Path
) -> None:
    x = noised(canonical, WHOLE)[2]
    converted = as_velocity(four_silos(other).velocity, "velocity", other, canonical)
    assert (converted(x, WHOLE) - four_silos(canonical).velocity(x, WHOLE)).abs().max() < 1e-10


@pytest.mark.parametrize(
    ("canonical", "other"), [(LinearPath(), CosinePath()), (CosinePath(), CosinePath())]
)
def test_eps_expert_is_exact_on_the_canonical_path_when_below_t_max(
    canonical: Path, other: Path
) -> None:
    t_B = WHOLE[WHOLE < 0.98]
    x = noised(canonical, t_B)[2]
    mixture = four_silos(other)
    eps = as_velocity(
        lambda x, t: mixture.denoised(x, t, mixture.weight_C)[1], "eps", other, canonical
    )
    assert (eps(x, t_B) - four_silos(canonical).velocity(x, t_B)).abs().max() < 1e-10


class TimeLeftOut(CosinePath):
    """Answers the linear path's t where the cosine path's t' is due."""

    def time_of(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        return LinearPath().time_of(alpha, sigma)


@pytest.mark.parametrize("prediction", ["velocity", "eps"])
def test_change_of_path_fails_when_the_time_or_the_scale_is_left_out(prediction: str) -> None:
    linear = LinearPath()
    cosine = CosinePath()
    t_B = WHOLE[(WHOLE > 0.1) & (WHOLE < 0.9)]
    x = noised(linear, t_B)[2]
    mixture = four_silos(cosine)

    def expert(x: Tensor, t: Tensor) -> Tensor:
        if prediction == "velocity":
            return mixture.velocity(x, t)
        return mixture.denoised(x, t, mixture.weight_C)[1]

    def unscaled(x: Tensor, t: Tensor) -> Tensor:
        alpha = linear.alpha(t_B)
        sigma = linear.sigma(t_B)
        return expert(x * torch.hypot(alpha, sigma)[:, None], t)

    truth = four_silos(linear).velocity(x, t_B)
    right = as_velocity(expert, prediction, cosine, linear)(x, t_B)  # type: ignore[arg-type]
    no_time = as_velocity(expert, prediction, TimeLeftOut(), linear)(x, t_B)  # type: ignore[arg-type]
    no_scale = as_velocity(unscaled, prediction, cosine, linear)(x, t_B)  # type: ignore[arg-type]
    assert (right - truth).abs().max() < 1e-10
    assert (no_time - truth).abs().max() > 0.1
    assert (no_scale - truth).abs().max() > 0.1


def test_eps_expert_stays_close_to_the_truth_at_pure_noise_and_is_singular_without_t_max() -> None:
    linear = LinearPath()
    cosine = CosinePath()
    t_B = torch.ones(50, dtype=torch.float64)
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    mixture = four_silos(cosine)

    def expert(x: Tensor, t: Tensor) -> Tensor:
        return mixture.denoised(x, t, mixture.weight_C)[1]

    truth = four_silos(linear).velocity(x, t_B)
    assert (as_velocity(expert, "eps", cosine, linear)(x, t_B) - truth).abs().max() < 0.2
    assert not torch.isfinite(as_velocity(expert, "eps", cosine, linear, t_max=1.0)(x, t_B)).all()


def test_path_named_finds_what_a_plan_names() -> None:
    assert path_named("linear") == LinearPath()
    assert path_named("cosine_vp") == CosinePath()


def test_x_t_is_refused_when_there_is_not_one_time_per_sample() -> None:
    with pytest.raises(ShapeError):
        x_t(LinearPath(), torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(2))
