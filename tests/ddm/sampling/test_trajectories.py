"""Samples carried in groups against the same journeys written out: one sample, one step, one formula at a time."""

# Shape legend: K experts, B batch, S steps.
from math import isfinite

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
from ddm.sampling.trajectories import draw_noise
from tests.support.gaussian_mixture import GaussianMixture, four_silos

STEPS = 6
NUM = 5
SEED = 3
STRATEGIES = (
    Full(),
    Sample(),
    Lock(),
    Lock(0.7),
    Lock(0.7, prefix="full"),
    TopOne(),
    TopK(2),
    Nucleus(0.8),
    Threshold(0.2),
)


class Alone:
    """One sample on its way: what it may follow, and what the multistep solver remembers."""

    def __init__(
        self, mixture: GaussianMixture, strategy: Strategy, every: int, uniform_S: Tensor
    ) -> None:
        self.mixture = mixture
        self.strategy = strategy
        self.every = every
        self.uniform_S = uniform_S
        self.prior_K = torch.tensor(mixture.prior_K, dtype=torch.float64)
        self.allowed: set[int] = set()
        self.held_K = self.prior_K
        self.before: tuple[Tensor, float] | None = None

    def posterior(self, x_D: Tensor, t: float) -> Tensor:
        joint_K = (
            self.prior_K
            * self.mixture.log_likelihood(x_D[None], torch.full((1,), t).double())[0].exp()
        )
        return joint_K / joint_K.sum() if t < 1 else self.prior_K

    def decide(self, n: int, x_D: Tensor, t: float) -> None:
        w_K = self.posterior(x_D, t)
        fresh = n % self.every == 0
        before = self.allowed
        order = sorted(range(4), key=lambda k: -float(w_K[k]))
        drawn = {next(k for k in range(4) if float(w_K[: k + 1].sum()) > float(self.uniform_S[n]))}
        match self.strategy:
            case Full():
                chosen = set(range(4))
            case Sample():
                chosen = drawn
            case Lock(t_lock=t_lock, prefix=prefix) if t > t_lock:
                chosen = drawn if prefix == "sample" else set(range(4))
            case Lock(t_lock=t_lock):
                first = n == 0 or 1 - (n - 1) / STEPS > t_lock
                fresh = first
                chosen = drawn
            case TopK(k=k):
                chosen = set(order[:k])
            case Nucleus(mass=mass):
                chosen = {
                    k for place, k in enumerate(order) if float(w_K[order[:place]].sum()) < mass
                }
            case Threshold(least=least):
                chosen = {k for k in range(4) if float(w_K[k]) >= least} | {order[0]}
        if fresh:
            self.allowed = chosen
            self.held_K = w_K
        if self.allowed != before:
            self.before = None

    def velocity(self, x_D: Tensor, t: float) -> Tensor:
        w_K = self.posterior(x_D, t) if self.every == 1 else self.held_K
        ask_B = torch.full((1,), t).double()
        total = sum(float(w_K[k]) for k in self.allowed)
        parts = [w_K[k] / total * self.mixture.expert(k)(x_D[None], ask_B)[0] for k in self.allowed]
        return torch.stack(parts).sum(0)

    def step(self, solver: SolverName, x_D: Tensor, t: float, t_next: float) -> Tensor:
        u_D = self.velocity(x_D, t)
        h = t_next - t
        path = self.mixture.path
        if solver == "heun":
            return x_D + h / 2 * (u_D + self.velocity(x_D + h * u_D, t_next))
        at = torch.tensor(t).double()
        then = torch.tensor(t_next).double()
        noise = (path.alpha(at) * u_D - path.d_alpha(at) * x_D) / (
            path.alpha(at) * path.d_sigma(at) - path.sigma(at) * path.d_alpha(at)
        )
        data = (u_D - path.d_sigma(at) * noise) / path.d_alpha(at)
        log_snr = float((path.alpha(at) / path.sigma(at)).log())
        log_snr_next = float((path.alpha(then) / path.sigma(then)).log())
        held = data
        if self.before is not None:
            data_before, log_snr_before = self.before
            if all(isfinite(value) for value in (log_snr, log_snr_next, log_snr_before)):
                share = (log_snr_next - log_snr) / (2 * (log_snr - log_snr_before))
                held = data + share * (data - data_before)
        self.before = data, log_snr
        return path.alpha(then) * held + path.sigma(then) * (
            x_D - path.alpha(at) * held
        ) / path.sigma(at)


@pytest.mark.parametrize("path", [LinearPath(), CosinePath()])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("solver", "every"), [("heun", 1), ("heun", 3), ("dpm", 1)])
def test_samples_travel_in_groups_as_each_would_alone(
    path: Path, strategy: Strategy, solver: SolverName, every: int
) -> None:
    mixture = four_silos(path)
    together = Ensemble(
        mixture.experts(), mixture, mixture.prior_K, (2,), path, chunk_size=4
    ).sample(
        NUM,
        strategy=strategy,
        steps=STEPS,
        seed=SEED,
        options=SamplingOptions(solver=solver, router_every=every),
    )
    noise, uniform_BS = draw_noise(range(NUM), (2,), SEED, STEPS)
    for i in range(NUM):
        alone = Alone(mixture, strategy, every, uniform_BS[i])
        x_D = noise[i].double()
        for n in range(STEPS):
            t = 1 - n / STEPS
            t_next = 1 - (n + 1) / STEPS
            alone.decide(n, x_D, t)
            x_D = alone.step(solver, x_D, t, t_next)
        torch.testing.assert_close(together.images[i].double(), x_D, atol=1e-4, rtol=0)
        assert len(alone.allowed) > 1 or alone.allowed == {int(together.expert_N[i])}


def test_strategies_lead_elsewhere() -> None:
    """Otherwise the journeys above could agree whatever is followed."""
    mixture = four_silos()
    ensemble = Ensemble(mixture.experts(), mixture, mixture.prior_K, (2,))
    ends = [
        ensemble.sample(40, strategy=strategy, steps=STEPS, seed=SEED).images
        for strategy in STRATEGIES
    ]
    for i, one in enumerate(ends):
        assert all((one - other).abs().max() > 1e-2 for other in ends[:i])
