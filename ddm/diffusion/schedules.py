"""Noise schedules of the wider field, as variance-preserving paths: DDPM's discrete betas, and Karras et al.'s sigmas.

Each is given by ``r(t) = log(sigma_t / alpha_t)`` with ``alpha^2 + sigma^2 = 1``. They end before pure noise, and the
discrete ones begin after pure data: `time_of` answers times beyond [0, 1] for what is outside, by extrapolation.
"""

# Shape legend: S discrete steps.
from dataclasses import dataclass
from functools import lru_cache
from math import pi
from typing import Literal

import torch
from torch import Tensor

Betas = Literal["linear", "scaled_linear", "cosine"]

# Nichol and Dhariwal 2021, section 3.2.
_COSINE_OFFSET = 0.008
_MAX_BETA = 0.999


class _VariancePreservingPath:
    """The coefficients of a path that `log_ratio` and its derivative describe; see `ddm.diffusion.path.Path`."""

    def log_ratio(self, t: Tensor) -> Tensor:
        """``log(sigma / alpha)`` at t."""
        raise NotImplementedError

    def d_log_ratio(self, t: Tensor) -> Tensor:
        """Derivative of `log_ratio` in t."""
        raise NotImplementedError

    def alpha(self, t: Tensor) -> Tensor:
        """See `ddm.diffusion.path.Path.alpha`."""
        # alpha^2 = 1 / (1 + (sigma / alpha)^2), where (sigma / alpha)^2 = exp(2 r).
        log_ratio = self.log_ratio(t)
        alpha_squared = torch.sigmoid(-2 * log_ratio)
        return alpha_squared.sqrt()

    def sigma(self, t: Tensor) -> Tensor:
        """See `ddm.diffusion.path.Path.sigma`."""
        log_ratio = self.log_ratio(t)
        sigma_squared = torch.sigmoid(2 * log_ratio)
        return sigma_squared.sqrt()

    def d_alpha(self, t: Tensor) -> Tensor:
        """``-r' alpha sigma^2``."""
        d_log_ratio = self.d_log_ratio(t)
        alpha = self.alpha(t)
        sigma = self.sigma(t)
        return -d_log_ratio * alpha * sigma.square()

    def d_sigma(self, t: Tensor) -> Tensor:
        """``r' alpha^2 sigma``."""
        d_log_ratio = self.d_log_ratio(t)
        alpha = self.alpha(t)
        sigma = self.sigma(t)
        return d_log_ratio * alpha.square() * sigma


@dataclass(frozen=True)
class DiscretePath(_VariancePreservingPath):
    """The steps of DDPM, ``alpha_n^2 = prod_{i <= n} (1 - beta_i)``, at t = n / (S - 1), as diffusers numbers them.

    Between two steps `log_ratio` is linear in t, so every signal-to-noise ratio has its time, and a network that takes
    step numbers is called at a fraction of one, `step`.

    Args:
        betas: `linear`, from DDPM; `scaled_linear`, whose square roots are linear, from Stable Diffusion; `cosine`.
        first: the first beta; the betas `cosine` do not use it, nor the last.
        last: the last beta.
        num_steps: S.

    Source:
        Ho et al. 2020; Rombach et al. 2022; Nichol and Dhariwal 2021, equation 17.
    """

    betas: Betas
    first: float = 1e-4
    last: float = 0.02
    num_steps: int = 1000

    def alphas_cumprod(self) -> Tensor:
        """``alpha_n^2`` of every step, float64, shape (S,)."""
        betas_S = _betas(self.betas, self.first, self.last, self.num_steps)
        return torch.cumprod(1 - betas_S, 0)

    def step(self, t: Tensor) -> Tensor:
        """Return the number of the step at t, from 0 to S - 1, with a fraction between two steps."""
        return (self.num_steps - 1) * t

    def log_ratio(self, t: Tensor) -> Tensor:
        """See `_VariancePreservingPath.log_ratio`."""
        segment = self._segment(t)
        log_ratio = segment.low + segment.fraction * segment.rise
        return log_ratio.to(t)

    def d_log_ratio(self, t: Tensor) -> Tensor:
        """See `_VariancePreservingPath.d_log_ratio`."""
        segment = self._segment(t)
        d_log_ratio = (self.num_steps - 1) * segment.rise
        return d_log_ratio.to(t)

    def time_of(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        """See `ddm.diffusion.path.Path.time_of`; below 0 or above 1 for ratios that no step has."""
        ratio_S = self._log_ratio_of_steps(alpha)
        ratio = sigma.double().log() - alpha.double().log()
        step_after = torch.searchsorted(ratio_S, ratio.contiguous(), right=True)
        # Beyond the first and last step, their segments are extended.
        last_segment = self.num_steps - 2
        step_before = (step_after - 1).clamp(0, last_segment)
        low = ratio_S[step_before]
        rise = ratio_S[step_before + 1] - low
        fraction = (ratio - low) / rise
        t = (step_before + fraction) / (self.num_steps - 1)
        return t.to(alpha)

    def _segment(self, t: Tensor) -> "_Segment":
        """Return the segment between two steps in which t lies."""
        ratio_S = self._log_ratio_of_steps(t)
        position = (self.num_steps - 1) * t.double()
        # Without a gradient: within a segment the step before is constant.
        whole_steps = position.detach().floor()
        last_segment = self.num_steps - 2
        step_before = whole_steps.clamp(0, last_segment).long()
        low = ratio_S[step_before]
        high = ratio_S[step_before + 1]
        return _Segment(
            fraction=position - step_before,
            low=low,
            rise=high - low,
        )

    def _log_ratio_of_steps(self, like: Tensor) -> Tensor:
        ratio_S = _log_ratios(self.betas, self.first, self.last, self.num_steps)
        return ratio_S.to(like.device)


@dataclass(frozen=True)
class _Segment:
    """A place between two steps of a discrete path; all float64.

    Attributes:
        fraction: how far behind the step before, in steps.
        low: the log ratio at the step before.
        rise: from there to the next step.
    """

    fraction: Tensor
    low: Tensor
    rise: Tensor


@dataclass(frozen=True)
class KarrasPath(_VariancePreservingPath):
    """The sigmas of EDM, ``s(t) = (s_min^(1/rho) + t (s_max^(1/rho) - s_min^(1/rho)))^rho``, on data of unit variance.

    ``sigma / alpha = s``. EDM noises to ``x_0 + s eps`` and hands its network ``x / sqrt(s^2 + 1)``: this path's x_t.
    Its network then answers the negative of this path's v, under the same loss.

    Source:
        Karras et al. 2022, equation 5 and table 1, with sigma_data = 1.
    """

    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0

    def log_ratio(self, t: Tensor) -> Tensor:
        """See `_VariancePreservingPath.log_ratio`."""
        low, high = self._ends
        # The rho-th root of s(t), which is linear in t.
        root = low + t * (high - low)
        return self.rho * torch.log(root)

    def d_log_ratio(self, t: Tensor) -> Tensor:
        """See `_VariancePreservingPath.d_log_ratio`."""
        low, high = self._ends
        rise = high - low
        root = low + t * rise
        return self.rho * rise / root

    def time_of(self, alpha: Tensor, sigma: Tensor) -> Tensor:
        """See `ddm.diffusion.path.Path.time_of`; below 0 for ratios below `sigma_min`, above 1 beyond `sigma_max`."""
        low, high = self._ends
        root = (sigma / alpha) ** (1 / self.rho)
        return (root - low) / (high - low)

    @property
    def _ends(self) -> tuple[float, float]:
        """The rho-th roots of both sigmas."""
        low = self.sigma_min ** (1 / self.rho)
        high = self.sigma_max ** (1 / self.rho)
        return low, high


def _betas(
    kind: Betas,
    first: float,
    last: float,
    num_steps: int,
) -> Tensor:
    """Return the betas of every step, float64, shape (S,)."""
    if kind == "linear":
        return torch.linspace(first, last, num_steps, dtype=torch.float64)
    if kind == "scaled_linear":
        first_root = first**0.5
        last_root = last**0.5
        roots_S = torch.linspace(first_root, last_root, num_steps, dtype=torch.float64)
        return roots_S.square()
    # The cosine schedule states alpha_n^2 itself, and the betas are what leads from one step to the next.
    steps = torch.arange(num_steps + 1, dtype=torch.float64)
    t = steps / num_steps
    shifted = (t + _COSINE_OFFSET) / (1 + _COSINE_OFFSET)
    alpha_bar = torch.cos(pi / 2 * shifted).square()
    alpha_bar_before = alpha_bar[:-1]
    betas_S = 1 - alpha_bar[1:] / alpha_bar_before
    # The last beta would be 1: no data would be left, and the logarithm of the ratio would be infinite.
    return betas_S.clamp(max=_MAX_BETA)


@lru_cache
def _log_ratios(
    kind: Betas,
    first: float,
    last: float,
    num_steps: int,
) -> Tensor:
    """``log(sigma / alpha)`` of every step, float64, on the CPU."""
    betas_S = _betas(kind, first, last, num_steps)
    # By log1p and expm1, since alpha^2 is next to 1 in the first steps.
    log_step_S = torch.log1p(-betas_S)
    log_alpha_squared = torch.cumsum(log_step_S, 0)
    sigma_squared = -torch.expm1(log_alpha_squared)
    return (torch.log(sigma_squared) - log_alpha_squared) / 2
