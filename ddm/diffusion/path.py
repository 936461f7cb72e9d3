"""Probability paths from data to noise, and conversions between predictions and between paths.

Every path writes ``x_t = alpha_t x_0 + sigma_t eps`` with t = 0 data and t = 1 noise, and its velocity is
``u_t = d_alpha_t x_0 + d_sigma_t eps``. Given x_t and t, any one of u, eps, x_0, ``v = alpha_t eps - sigma_t x_0`` and
the score fixes the others: the definitions of x_t and u_t are two linear equations in x_0 and eps.
"""

# Shape legend: B batch, ... all data dimensions.
from collections.abc import Callable
from dataclasses import dataclass
from math import pi
from typing import Any, Literal, Protocol, assert_never, get_args, overload, runtime_checkable

import torch
from torch import Tensor, nn

from ddm.diffusion.schedules import DiscretePath, KarrasPath
from ddm.errors import MathError, ShapeError

Velocity = Callable[[Tensor, Tensor], Tensor]
"""Called as ``velocity(x_B, t_B)`` with samples (B, ...) and times (B,); returns the shape of ``x_B``."""

Expert = Callable[..., Tensor]
"""Called as ``expert(x_B, t_B)``, or as ``expert(x_B, t_B, c_B)`` where experts take a condition."""

PathName = Literal["linear", "cosine_vp", "ddpm_linear", "ddpm_cosine", "scaled_linear", "edm"]
Prediction = Literal["velocity", "eps", "v", "x_0"]


@runtime_checkable
class Experts(Protocol):
    """Experts by number: a list, or `ddm.sampling.expert_cache.LazyExperts`, which keeps only some in memory."""

    def __getitem__(self, k: int, /) -> Expert: ...

    def __len__(self) -> int: ...


@runtime_checkable
class Path(Protocol):
    """The coefficients of ``x_t = alpha_t x_0 + sigma_t eps`` and their derivatives in t, element by element."""

    def alpha(self, t: Tensor) -> Tensor:
        """Weight of the data: 1 at t = 0, 0 at t = 1; nearly so on the paths of `ddm.diffusion.schedules`."""
        ...

    def sigma(self, t: Tensor) -> Tensor:
        """Weight of the noise: 0 at t = 0, 1 at t = 1; nearly so on the paths of `ddm.diffusion.schedules`."""
        ...

    def d_alpha(self, t: Tensor) -> Tensor:
        """Derivative of alpha in t."""
        ...

    def d_sigma(self, t: Tensor) -> Tensor:
        """Derivative of sigma in t."""
        ...

    def time_of(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Return the t at which this path has the ratio ``alpha / sigma``; a common factor does not matter."""
        ...


@dataclass(frozen=True)
class LinearPath:
    """``alpha = 1 - t``, ``sigma = t``: rectified flow, ``u = eps - x_0``.

    Source:
        Liu, Gong, Liu 2022; Lipman et al. 2022.
    """

    def alpha(self, t: Tensor) -> Tensor:
        """See `Path.alpha`."""
        return 1 - t

    def sigma(self, t: Tensor) -> Tensor:
        """See `Path.sigma`."""
        return t

    def d_alpha(self, t: Tensor) -> Tensor:
        """See `Path.d_alpha`."""
        return torch.full_like(t, -1.0)

    def d_sigma(self, t: Tensor) -> Tensor:
        """See `Path.d_sigma`."""
        return torch.ones_like(t)

    def time_of(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        """See `Path.time_of`."""
        return sigma / (alpha + sigma)


@dataclass(frozen=True)
class CosinePath:
    """``alpha = cos(pi t / 2)``, ``sigma = sin(pi t / 2)``: variance preserving.

    The cosine is written ``sin(pi (1 - t) / 2)``, which is exactly 0 at t = 1 in floating point.

    Source:
        Nichol and Dhariwal 2021, without their offset.
    """

    def alpha(self, t: Tensor) -> Tensor:
        """See `Path.alpha`."""
        return torch.sin(pi / 2 * (1 - t))

    def sigma(self, t: Tensor) -> Tensor:
        """See `Path.sigma`."""
        return torch.sin(pi / 2 * t)

    def d_alpha(self, t: Tensor) -> Tensor:
        """See `Path.d_alpha`."""
        return -pi / 2 * self.sigma(t)

    def d_sigma(self, t: Tensor) -> Tensor:
        """See `Path.d_sigma`."""
        return pi / 2 * self.alpha(t)

    def time_of(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        """See `Path.time_of`."""
        return 2 / pi * torch.atan2(sigma, alpha)


@overload
def path_named(name: Literal["ddpm_linear", "ddpm_cosine", "scaled_linear"]) -> DiscretePath: ...
@overload
def path_named(name: PathName) -> Path: ...
def path_named(name: PathName) -> Path:
    """Return the path that a plan's objective names.

    Raises:
        MathError: there is no such path.
    """
    _check_name("path", name, PathName)
    match name:
        case "linear":
            return LinearPath()
        case "cosine_vp":
            return CosinePath()
        case "ddpm_linear":
            return DiscretePath("linear")
        case "ddpm_cosine":
            return DiscretePath("cosine")
        case "scaled_linear":
            # The first and the last beta of Stable Diffusion (Rombach et al. 2022).
            return DiscretePath("scaled_linear", 0.00085, 0.012)
        case "edm":
            return KarrasPath()
        case _:
            assert_never(name)


def _check_name(subject: str, name: str, names: Any) -> None:
    """Refuse a name that a caller misspelt, or took from another library."""
    if name not in get_args(names):
        raise MathError(subject, expected=", ".join(get_args(names)), got=repr(name))


def expand_time(t_B: Tensor, x_B: Tensor) -> Tensor:
    """Return `t_B`, in the dtype and on the device of `x_B`, shaped (B, 1, ...) to multiply it.

    Raises:
        ShapeError: not one time per sample.
    """
    # A solver or a network of a caller's own may pass a number.
    if not isinstance(t_B, Tensor) or t_B.shape != x_B.shape[:1]:
        got = repr(t_B)
        if isinstance(t_B, Tensor):
            got = f"shape {tuple(t_B.shape)}"
        raise ShapeError(
            "t",
            expected=f"{x_B.shape[0]} times, one per sample",
            got=got,
            remedy=f"Give one time for each sample: torch.full(({x_B.shape[0]},), 0.5).",
        )
    # Broadcast over all data dimensions, images and volumes alike.
    num_inner = x_B.dim() - 1
    shape = (-1, *[1] * num_inner)
    return t_B.to(x_B).view(shape)


def x_t(
    path: Path,
    x_0: Tensor,
    eps: Tensor,
    t_B: Tensor,
) -> Tensor:
    """``alpha_t x_0 + sigma_t eps``, shape (B, ...)."""
    t = expand_time(t_B, x_0)
    alpha = path.alpha(t)
    sigma = path.sigma(t)
    return alpha * x_0 + sigma * eps


def velocity(
    path: Path,
    x_0: Tensor,
    eps: Tensor,
    t_B: Tensor,
) -> Tensor:
    """``u = d_alpha_t x_0 + d_sigma_t eps``, shape (B, ...)."""
    t = expand_time(t_B, x_0)
    d_alpha = path.d_alpha(t)
    d_sigma = path.d_sigma(t)
    return d_alpha * x_0 + d_sigma * eps


def x_0_and_eps(
    path: Path,
    x: Tensor,
    u: Tensor,
    t_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """Solve x_t and u for data and noise; nowhere singular on any path.

    ``x_0 = (d_sigma x - sigma u) / D``, ``eps = (alpha u - d_alpha x) / D``, ``D = alpha d_sigma - sigma d_alpha``;
    on the linear path D = 1 and these are ``x - t u`` and ``x + (1 - t) u``.

    Args:
        path: the path that `u` lives on.
        x: noised samples, shape (B, ...).
        u: velocity at (x, t), same shape.
        t_B: times in [0, 1], shape (B,).

    Returns:
        x_0 and eps, each of the shape of `x`.
    """
    t = expand_time(t_B, x)
    alpha = path.alpha(t)
    sigma = path.sigma(t)
    d_alpha = path.d_alpha(t)
    d_sigma = path.d_sigma(t)
    # 1 on the linear path, pi / 2 on the cosine path, and above 0 on every path from data to noise.
    determinant = alpha * d_sigma - sigma * d_alpha
    x_0 = (d_sigma * x - sigma * u) / determinant
    eps = (alpha * u - d_alpha * x) / determinant
    return x_0, eps


def target_of(
    path: Path,
    prediction: Prediction,
    x_0: Tensor,
    eps: Tensor,
    t_B: Tensor,
) -> Tensor:
    """Return the quantity that an expert learns to predict, shape (B, ...)."""
    match prediction:
        case "velocity":
            return velocity(path, x_0, eps, t_B)
        case "eps":
            return eps
        case "v":
            t = expand_time(t_B, x_0)
            alpha = path.alpha(t)
            sigma = path.sigma(t)
            return alpha * eps - sigma * x_0
        case "x_0":
            return x_0
        case _:
            assert_never(prediction)


def x_0_and_eps_of(
    path: Path,
    prediction: Prediction,
    x: Tensor,
    predicted: Tensor,
    t_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """Solve x_t and a prediction for data and noise.

    Singular for eps at alpha = 0 and for x_0 at sigma = 0, and nowhere for velocity and v:
    ``x_0 = (alpha x - sigma v) / (alpha^2 + sigma^2)``, ``eps = (sigma x + alpha v) / (alpha^2 + sigma^2)``.

    Args:
        path: the path that the prediction lives on.
        prediction: what `predicted` is.
        x: noised samples, shape (B, ...).
        predicted: the prediction at (x, t), same shape.
        t_B: times in [0, 1], shape (B,).

    Returns:
        x_0 and eps, each of the shape of `x`.

    Source:
        Salimans and Ho 2022, appendix D, for v on variance-preserving paths.
    """
    if prediction == "velocity":
        return x_0_and_eps(path, x, predicted, t_B)
    t = expand_time(t_B, x)
    alpha = path.alpha(t)
    sigma = path.sigma(t)
    match prediction:
        case "eps":
            x_0 = (x - sigma * predicted) / alpha
            return x_0, predicted
        case "x_0":
            eps = (x - alpha * predicted) / sigma
            return predicted, eps
        case "v":
            power = alpha.square() + sigma.square()
            x_0 = (alpha * x - sigma * predicted) / power
            eps = (sigma * x + alpha * predicted) / power
            return x_0, eps
        case _:
            assert_never(prediction)


def score(
    path: Path,
    x: Tensor,
    u: Tensor,
    t_B: Tensor,
) -> Tensor:
    """The score ``grad log p_t(x) = -eps / sigma``; singular at sigma = 0, so t > 0."""
    _, eps = x_0_and_eps(path, x, u, t_B)
    sigma = path.sigma(expand_time(t_B, x))
    return -eps / sigma


def as_velocity(
    expert: Expert,
    prediction: Prediction,
    path: Path,
    canonical: Path,
    *,
    t_min: float = 0.01,
    t_max: float = 0.99,
) -> "CanonicalVelocity":
    """Convert an expert that was trained on another path, or predicts something else, to the canonical velocity.

    The expert is called at t', where its path (a', s') has the canonical ratio ``a'/s' = alpha/sigma``, on
    ``x' = c x`` with ``c = hypot(a', s') / hypot(alpha, sigma)``: the same x_0 and eps, at the same signal-to-noise
    ratio. The x_0 and eps that it predicts are then written as a canonical velocity. Where the expert's path has no
    such t', because its noise begins above 0 or ends below pure noise, and where its prediction is singular, it is
    called at the nearest t': with more noise than there, the estimate of x_0 is kept and eps follows from x_t; with
    less, eps is kept and x_0 follows.

    Args:
        expert: predicts `prediction` on `path`, as ``expert(x_B, t_B)``, or with the condition as third.
        prediction: what it predicts.
        path: the path it was trained on.
        canonical: the ensemble's path.
        t_min: for x_0-prediction only, which is singular at sigma = 0: the smallest t' at which the expert is called,
            on a path that begins there.
        t_max: for eps-prediction only, which is singular at alpha = 0 and near it divides the expert's error by alpha:
            the largest t' at which the expert is called.

    Returns:
        The velocity on the canonical path, called as the expert is; a module, in which a network moves along.

    Raises:
        MathError: there is no such prediction, or a path is none.

    Source:
        Karras et al. 2022, for the equivalence of paths up to time and scale.
    """
    _check_name("prediction", prediction, Prediction)
    for subject, own_path in (("path", path), ("canonical", canonical)):
        if not isinstance(own_path, Path):
            expected = "a path, such as LinearPath() or path_named('ddpm_linear')"
            raise MathError(subject, expected=expected, got=repr(own_path))
    lowest = 0.0
    highest = 1.0
    # The paths of `ddm.diffusion.schedules` have noise at t = 0 already, so that an x_0-prediction is not singular
    # there.
    sigma_at_0 = float(path.sigma(torch.zeros(())))
    begins_at_data = sigma_at_0 == 0.0
    if prediction == "x_0" and begins_at_data:
        lowest = t_min
    if prediction == "eps":
        highest = t_max
    return CanonicalVelocity(expert, prediction, path, canonical, (lowest, highest))


def checked_answer(answer: Any, x_B: Tensor) -> Tensor:
    """Return what an expert answered at ``x_B``, a tensor of the same shape.

    Raises:
        ShapeError: something else.
    """
    # A network of another library may return an object around its tensor, or a second output in further channels.
    if not isinstance(answer, Tensor):
        raise ShapeError(
            "expert",
            expected=f"a tensor of the shape of x, {tuple(x_B.shape)}",
            got=type(answer).__name__,
            remedy="Return the tensor alone: for a network of diffusers, net(..., return_dict=False)[0].",
        )
    if answer.shape != x_B.shape:
        raise ShapeError(
            "expert",
            expected=f"a tensor of the shape of x, {tuple(x_B.shape)}",
            got=f"shape {tuple(answer.shape)}",
            remedy="Return as many channels as x has. If a network also predicts a variance, leave it out: "
            "answer[:, : x_B.shape[1]].",
        )
    return answer


class CanonicalVelocity(nn.Module):
    """A velocity on the canonical path, made from an expert of another kind; see `as_velocity`.

    Args:
        expert: predicts `prediction` on `path`.
        prediction: what it predicts.
        path: the path it was trained on.
        canonical: the ensemble's path.
        called_at: the lowest and the highest time of its path at which it is called.
    """

    def __init__(
        self,
        expert: Expert,
        prediction: Prediction,
        path: Path,
        canonical: Path,
        called_at: tuple[float, float],
    ) -> None:
        super().__init__()
        # Where it is a module, it becomes a part of this one.
        self.expert = expert
        self.prediction = prediction
        self.path = path
        self.canonical = canonical
        self.called_at = called_at

    __call__: Callable[..., Tensor]

    def forward(self, x_B: Tensor, t_B: Tensor, *condition: Tensor) -> Tensor:
        """Return the velocity on the canonical path, of the shape of `x_B`."""
        path = self.path
        t_B = t_B.to(x_B)
        alpha_B = self.canonical.alpha(t_B)
        sigma_B = self.canonical.sigma(t_B)
        # The time of the same signal-to-noise ratio on the expert's path, and the nearest one that it can be called at.
        same_ratio_B = path.time_of(alpha_B, sigma_B)
        called_B = same_ratio_B.clamp(*self.called_at)
        # c of the docstring: the scale of the expert's path at t' over that of the canonical path at t.
        own_scale_B = torch.hypot(path.alpha(called_B), path.sigma(called_B))
        canonical_scale_B = torch.hypot(alpha_B, sigma_B)
        scale_B = own_scale_B / canonical_scale_B
        x_own = expand_time(scale_B, x_B) * x_B
        predicted = checked_answer(self.expert(x_own, called_B, *condition), x_own)
        x_0, eps = x_0_and_eps_of(path, self.prediction, x_own, predicted, called_B)

        # Beyond the expert's times one of its two estimates is kept, and the other follows from x_t.
        alpha = expand_time(alpha_B, x_B)
        sigma = expand_time(sigma_B, x_B)
        has_more_noise = expand_time(same_ratio_B - called_B, x_B) > 0
        has_less_noise = expand_time(called_B - same_ratio_B, x_B) > 0
        # Divided by 1 where the quotient is not used, since sigma and alpha may be 0 there.
        sigma_or_1 = torch.where(has_more_noise, sigma, 1.0)
        alpha_or_1 = torch.where(has_less_noise, alpha, 1.0)
        eps_from_x_0 = (x_B - alpha * x_0) / sigma_or_1
        x_0_from_eps = (x_B - sigma * eps) / alpha_or_1
        used_eps = torch.where(has_more_noise, eps_from_x_0, eps)
        used_x_0 = torch.where(has_less_noise, x_0_from_eps, x_0)
        return velocity(self.canonical, used_x_0, used_eps, t_B)
