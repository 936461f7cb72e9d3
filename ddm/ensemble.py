"""The whole idea on one page: a decentralized diffusion model is a set of experts and a router.

Each silo trains an *expert* on its own images and on nothing else: a velocity field u_k(x, t) that transports noise
(t = 1) to that silo's data (t = 0). The velocity field of the pooled data, which no silo could train alone, is exactly
a weighted mean of the experts' fields:

    u(x, t) = sum_k w_k(x, t) u_k(x, t),    w_k(x, t) = pi_k p_t^k(x) / sum_j pi_j p_t^j(x)

p_t^k is the density of silo k's data after noising to time t, and the prior pi_k is the silo's share of all the data.
So w_k(x, t) is the posterior probability that the noised sample x came from silo k. The *router* models it. All this
holds for any partition of the data, so a silo may also train several experts, each on a part of its images.

A sample starts as noise and follows dx/dt = u(x, t) from t = 1 to t = 0. The *strategy* decides what each solver step
follows. Three strategies draw from the distribution of the pooled data, up to the solver's error:

- full: the mixture u itself, at the cost of K expert evaluations;
- sample: one expert, drawn anew from the posterior w at every step, at the cost of one evaluation;
- lock: as sample until time t_lock, then the same expert to the end. At t_lock = 1, the default, the expert is drawn
  from the prior and no router is needed.

Strategies that follow only the most probable experts (top-1, top-k, nucleus, threshold) are biased towards large silos:
near t = 1 the posterior of every x is the prior, so the most probable expert is always that of the largest silo.

Under a condition c, a class or a text, every quantity above is conditioned on c. With classifier-free guidance of
scale g, a sample follows

    (1 + g) sum_k w_k(x, t | c) u_k(x, t | c) - g sum_k w_k(x, t) u_k(x, t)

The parts are in `ddm.sampling`: `mixture` mixes velocities, `guidance` computes what a condition changes, `strategies`
selects experts, `trajectories` integrates samples from noise to data with a solver of `ddm.diffusion.solver`.
`ddm.open_ensemble` verifies a published release and builds an `Ensemble` from it.

Source:
    McAllister et al. 2025, Decentralized Diffusion Models, arXiv 2501.05450.
"""

# Shape legend: K experts, B batch, N samples, ... all data dimensions.
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod

import torch
from torch import Tensor

from ddm.diffusion.path import Experts, LinearPath, Path, expand_time
from ddm.diffusion.solver import SolverName, solver_named, uniform_times
from ddm.encoders.autoencoder import Identity, Latent
from ddm.errors import MathError, NumericalError, ShapeError
from ddm.protocol.plan import Condition, NoCondition
from ddm.routers.base import Router, log_prior
from ddm.sampling.guidance import (
    ClassPrior,
    ClassPriors,
    ConditionValue,
    condition_and_null,
    conditional_log_prior,
)
from ddm.sampling.mixture import Branch, Mixture, mix_velocity
from ddm.sampling.strategies import Full, Lock, Nucleus, Sample, Strategy, Threshold, TopK, TopOne, strategy_named
from ddm.sampling.trajectories import Trajectories, draw_noise

__all__ = [
    "ClassPrior",
    "Ensemble",
    "Full",
    "Lock",
    "Nucleus",
    "Sample",
    "Samples",
    "Strategy",
    "Threshold",
    "TopK",
    "TopOne",
    "mix_velocity",
    "strategy_named",
]

_IN_FLIGHT_BYTES = 1 << 26  # of the samples that are integrated at the same time, with their random numbers


@dataclass(frozen=True)
class Samples:
    """Samples drawn from an ensemble.

    Args:
        images: float32, shape (N, C, H, W) or (N, C, D, H, W), on the CPU, in the data's range but not clipped to it.
        expert_N: the last expert that each sample followed; for a mixture, one drawn from its last weights.
        num_experts: K.
        latents: the samples as the experts produced them; the same as `images` where experts work on pixels.
    """

    images: Tensor
    expert_N: Tensor
    num_experts: int
    latents: Tensor

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of the samples that each expert accounts for; to be compared with the prior."""
        counts_K = torch.bincount(self.expert_N, minlength=self.num_experts).double()
        return tuple((counts_K / counts_K.sum()).tolist())


@dataclass(frozen=True)
class Ensemble:
    """Experts and a router that form one generative model.

    Args:
        experts: velocities on `path`, called as ``expert(x_B, t_B)``, or ``expert(x_B, t_B, c_B)`` under a condition;
            `ddm.diffusion.path.as_velocity` adapts experts of other paths and predictions.
        router: models which expert's data a noised sample came from; without one only lock with t_lock = 1 works.
        prior: the weight of each expert, in any unit; 0 withdraws an expert.
        shape: the shape of one sample in the experts' space, usually (C, H, W).
        path: the canonical probability path.
        expert_ids: the experts' names, in order.
        device: where the experts compute.
        chunk_size: most samples that an expert evaluates at once; more samples need more memory.
        condition: the kind of condition that the experts take.
        class_prior: returns the experts' shares of a class and, if there is one, a router for that class; None where
            the release has no class counts.
        latent: decodes the experts' samples into images.

    Raises:
        ShapeError: the prior, the names or the router are for another number of experts.
    """

    experts: Experts
    router: Router | None
    prior: Sequence[float]
    shape: Sequence[int]
    path: Path = field(default_factory=LinearPath)
    expert_ids: Sequence[str] = ()
    device: torch.device | str = "cpu"
    chunk_size: int = 64
    condition: Condition = field(default_factory=NoCondition)
    class_prior: ClassPriors | None = None
    latent: Latent = field(default_factory=Identity)

    def __post_init__(self) -> None:
        log_prior(self.prior, len(self.experts))
        if self.expert_ids and len(self.expert_ids) != len(self.experts):
            got = f"{len(self.expert_ids)} names"
            raise ShapeError("expert_ids", expected=f"one name for each of {len(self.experts)} experts", got=got)
        if self.router and self.router.num_experts != len(self.experts):
            got = f"a router of {self.router.num_experts} experts"
            raise ShapeError("router", expected=f"a router of {len(self.experts)} experts", got=got)

    def velocity(
        self,
        x_B: Tensor,
        t_B: Tensor,
        prior: Sequence[float] | None = None,
        *,
        condition: ConditionValue | None = None,
        condition_prior: Sequence[float] | None = None,
        guidance: float = 0.0,
    ) -> Tensor:
        """Return the velocity of the pooled data at (x, t): the exact mixture of all experts.

        Args:
            x_B: samples on the canonical path, shape (B, ...).
            t_B: times in [0, 1], shape (B,).
            prior: see `sample`, as for the next three.
            condition: a class or a text.
            condition_prior: each expert's share of the data with the condition.
            guidance: g.

        Returns:
            Shape (B, ...).
        """
        expand_time(t_B, x_B)
        mixture = self._mixture(prior, condition, condition_prior, guidance)
        return mixture.velocity(x_B, t_B, mixture.weights(x_B, t_B))

    def sample(
        self,
        num: int,
        *,
        strategy: str | Strategy = "lock",
        tau: float | None = None,
        steps: int = 25,
        solver: SolverName = "midpoint",
        seed: int = 0,
        prior: Sequence[float] | None = None,
        condition: ConditionValue | None = None,
        condition_prior: Sequence[float] | None = None,
        guidance: float = 0.0,
        router_every: int = 1,
        numbers: Sequence[int] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Samples:
        """Draw samples; the same call returns the same bytes.

        Sample i has a random stream of its own, so it does not depend on `num` or `chunk_size`, except that
        floating-point rounding depends on which samples an expert evaluates together; with `chunk_size` 1 an expert
        evaluates one, and sample i has the same bytes for every `num`.

        Args:
            num: number of samples, N.
            strategy: a `Strategy`, or its name: full, sample, lock, top-1, top-k, nucleus, threshold.
            tau: t_lock of the strategy named lock; 1 when omitted.
            steps: solver steps, evenly spaced in t; the default solver evaluates twice in each.
            solver: see `ddm.diffusion.solver`.
            seed: any integer >= 0.
            prior: weights in place of the ensemble's own, such as equal weights; 0 withdraws an expert.
            condition: a class, or the token embeddings (L, D) of a text, that all samples are drawn under.
            condition_prior: each expert's share of the data with that condition, where the release does not state it.
            guidance: g; exact with the strategy full only, see docs/explanation/strategies.md.
            router_every: evaluate the router at every n-th step only, and keep its weights in between.
            numbers: the numbers of the samples, N of them, in place of 0 to N - 1: sample i is the same in any company.
            on_progress: called with the steps taken, summed over all samples, and the total to take.

        Raises:
            MathError: an argument out of range, or a strategy that needs a router where there is none.
            NumericalError: samples that are not finite.
        """
        if num < 1 or seed < 0:
            raise MathError("sample", expected="num >= 1 and seed >= 0", got=f"num={num} and seed={seed}")
        numbers = range(num) if numbers is None else numbers
        if len(numbers) != num or min(numbers, default=0) < 0:
            expected = f"{num} numbers of samples, each at least 0"
            raise MathError("numbers", expected=expected, got=f"{len(numbers)}, from {min(numbers, default=0)}")
        if tau is not None and not isinstance(strategy, str):
            remedy = "Leave tau out and give the time to the strategy itself: strategy=Lock(t_lock=...)."
            raise MathError("tau", expected='tau with strategy="lock"', got=f"strategy={strategy}", remedy=remedy)
        chosen = strategy_named(strategy, tau=tau) if isinstance(strategy, str) else strategy
        mixture, done = self._mixture(prior, condition, condition_prior, guidance), 0
        if chosen.needs_router and self.router is None and mixture.num_active > 1:
            remedy = "Use the strategy lock with t_lock = 1, or an ensemble that has a router."
            got = "an ensemble without a router"
            raise MathError(f"strategy {type(chosen).__name__}", expected="a router", got=got, remedy=remedy)

        def tick(samples: int) -> None:
            nonlocal done
            done += samples
            if on_progress:
                on_progress(done, num * steps)

        step = solver_named(solver, self.path)
        trajectories = Trajectories(mixture, chosen, uniform_times(steps), step, router_every, tick)
        at_once = max(self.chunk_size, _IN_FLIGHT_BYTES // (4 * prod(self.shape) + 8 * steps))
        with torch.inference_mode():
            parts = [
                self._integrate(trajectories, numbers[first : first + at_once], seed)
                for first in range(0, num, at_once)
            ]
        latents, expert_N = (torch.cat(part) for part in zip(*parts, strict=True))
        return Samples(self.latent.decode(latents), expert_N, len(self.experts), latents)

    def _integrate(self, trajectories: Trajectories, samples: Sequence[int], seed: int) -> tuple[Tensor, Tensor]:
        """Draw the samples of these numbers; return them, and the expert of each."""
        noise, uniform_BS = draw_noise(samples, self.shape, seed, len(trajectories.times) - 1)
        x_1 = noise.to(self.device) * self.path.sigma(torch.ones(()))
        x_0, expert_B = (part.cpu() for part in trajectories.integrate(x_1, uniform_BS.to(self.device)))
        broken_B = ~x_0.flatten(1).isfinite().all(1)
        if bool(broken_B.any()):
            names = self.expert_ids or range(len(self.experts))
            found = ", ".join(str(names[k]) for k in sorted(set(expert_B[broken_B].tolist())))
            got = f"NaN or infinity in {int(broken_B.sum())} of {len(x_0)} samples, of experts {found}"
            remedy = "Take more steps or less guidance; if that does not help, leave these experts out by a prior of 0."
            raise NumericalError("samples", expected="finite numbers", got=got, remedy=remedy)
        return x_0, expert_B

    def _mixture(
        self,
        prior: Sequence[float] | None,
        condition: ConditionValue | None,
        condition_prior: Sequence[float] | None,
        guidance: float,
    ) -> Mixture:
        """Build the unconditional branch, or the conditional one and, with guidance, both."""
        unconditional = Branch(1.0, log_prior(self.prior if prior is None else prior, len(self.experts)), self.router)
        if condition is None:
            if guidance or condition_prior is not None:
                subject, got = ("guidance", f"{guidance:g}") if guidance else ("condition_prior", "a prior")
                raise MathError(subject, expected="a condition together with it", got=f"{got} without a condition")
            return Mixture(self.experts, (unconditional,), self.chunk_size)
        if not 0 <= guidance < inf:
            raise MathError("guidance", expected="a finite number of at least 0", got=str(guidance))
        value, null = condition_and_null(self.condition, condition)
        known = self._class_prior(condition, condition_prior)
        log_prior_K = conditional_log_prior(known.prior, self.prior, prior)
        conditional = Branch(1 + guidance, log_prior_K, known.router or self.router, value.to(self.device))
        unconditional = replace(unconditional, factor=-guidance, condition=null.to(self.device))
        return Mixture(self.experts, (conditional, unconditional) if guidance else (conditional,), self.chunk_size)

    def _class_prior(self, condition: ConditionValue, declared: Sequence[float] | None) -> ClassPrior:
        """Return the experts' shares of a condition as the caller declares them, else as the release states them.

        An ensemble of one expert needs neither: that expert's share is 1.
        """
        if declared is None and len(self.experts) == 1:
            declared = [1.0]
        known = self.class_prior(condition) if self.class_prior and isinstance(condition, int) else None
        if declared is not None:
            return ClassPrior(declared, known.router if known else None)
        if known is None:
            remedy = "Pass condition_prior; the ensemble's own prior assumes that all experts hold equal shares of it."
            expected = "each expert's share of the data with this condition"
            got = "a release without class counts" if isinstance(condition, int) else "a text, which no release counts"
            raise MathError("condition_prior", expected=expected, got=got, remedy=remedy)
        return known
