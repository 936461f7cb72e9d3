"""The whole idea on one page: experts that never met, one distribution.

Each silo trains an expert on its own images: a velocity u_k(x, t) from noise (t = 1) to that silo's data (t = 0). The
velocity of all the data together is a weighted mean of theirs, exactly:

    u(x, t) = sum_k w_k(x, t) u_k(x, t),    w_k(x, t) = pi_k p_t^k(x) / sum_j pi_j p_t^j(x)

w_k is the probability that a sample x noised to time t came from silo k; a router models it. A sample may follow this
mean (K evaluations a step), or one expert drawn with these probabilities (one evaluation); both have the law of the
pooled data. Following the most probable expert does not: near t = 1 that is always the largest silo.

Given a condition c, every letter is given c as well, and with guidance g a sample follows

    (1 + g) sum_k w_k(x, t | c) u_k(x, t | c) - g sum_k w_k(x, t) u_k(x, t)

`ddm.sampling` holds the parts: `mixture` mixes velocities, `guidance` says what a condition changes, `strategies` what
a sample follows, `trajectories` how it travels; the solvers are in `ddm.diffusion.solver`. `ddm.open_ensemble` makes an
`Ensemble` of a published release.
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
from ddm.sampling.guidance import Asked, Given, GivenClass, conditional_log_prior, told
from ddm.sampling.mixture import Branch, Mixture, mix_velocity
from ddm.sampling.strategies import Full, Lock, Nucleus, Sample, Strategy, Threshold, TopK, TopOne, strategy_named
from ddm.sampling.trajectories import Journey, randomness

__all__ = [
    "Ensemble",
    "Full",
    "Given",
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

_TRAVELLING_BYTES = 1 << 26  # of the samples that are under way at the same time, with all that is drawn for them


@dataclass(frozen=True)
class Samples:
    """What an ensemble drew.

    Args:
        images: float32, shape (N, C, H, W) or (N, C, D, H, W), on the CPU, in the data's range but not clipped to it.
        expert_N: the last expert that each sample followed; of a mixture, one drawn from its last weights.
        num_experts: K.
        seen: what the experts drew: the images themselves, or their latents.
    """

    images: Tensor
    expert_N: Tensor
    num_experts: int
    seen: Tensor

    @property
    def shares(self) -> tuple[float, ...]:
        """The part of the samples that each expert accounts for; to be held against the prior."""
        counts_K = torch.bincount(self.expert_N, minlength=self.num_experts).double()
        return tuple((counts_K / counts_K.sum()).tolist())


@dataclass(frozen=True)
class Ensemble:
    """Experts and a router that together are one generative model.

    Args:
        experts: velocities on `path`, called as ``expert(x_B, t_B)``, or ``expert(x_B, t_B, c_B)`` where a condition is
            asked for; see `ddm.diffusion.path.as_velocity` for others.
        router: who could have made x_t; None leaves lock with t_lock = 1.
        prior: the weight of every expert, in any unit; 0 withdraws it.
        shape: what experts see of one sample, usually (C, H, W).
        path: the canonical path.
        expert_ids: the experts' names, in order.
        device: where the experts live.
        chunk_size: most samples that an expert is given at once; more need more memory.
        condition: what the experts can be told.
        given_class: who holds a class and who could have made x_t given it; None where nobody knows.
        latent: what turns the experts' samples into images.

    Raises:
        ShapeError: prior, names or router disagree with the number of experts.
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
    given_class: GivenClass | None = None
    latent: Latent = field(default_factory=Identity)

    def __post_init__(self) -> None:
        log_prior(self.prior, len(self.experts))
        others = {"names": len(self.expert_ids) or len(self.experts)}
        others["the router"] = self.router.num_experts if self.router else len(self.experts)
        for subject, number in others.items():
            if number != len(self.experts):
                raise ShapeError(subject, expected=f"{len(self.experts)} experts", got=str(number))

    def velocity(
        self,
        x_B: Tensor,
        t_B: Tensor,
        prior: Sequence[float] | None = None,
        *,
        condition: Asked | None = None,
        condition_prior: Sequence[float] | None = None,
        guidance: float = 0.0,
    ) -> Tensor:
        """The velocity of the pooled data at (x, t): the exact mixture, all experts evaluated.

        Args:
            x_B: samples on the canonical path, shape (B, ...).
            t_B: times in [0, 1], shape (B,).
            prior: see `sample`, as are the others.
            condition: a class or a text.
            condition_prior: who holds it.
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
        steps: int = 50,
        solver: SolverName = "heun",
        seed: int = 0,
        prior: Sequence[float] | None = None,
        condition: Asked | None = None,
        condition_prior: Sequence[float] | None = None,
        guidance: float = 0.0,
        router_every: int = 1,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Samples:
        """Draw samples: the same call gives the same bytes.

        Sample i has its own noise and its own draws, whatever `num` and `chunk_size`. Only the last digits of floating
        point depend on which samples an expert is given together.

        Args:
            num: how many, N.
            strategy: a `Strategy`, or its name: full, sample, lock, top-1, top-k, nucleus, threshold.
            tau: with the name lock, from which time on a sample keeps its expert; 1 when omitted.
            steps: solver steps, evenly spaced in t.
            solver: see `ddm.diffusion.solver`.
            seed: any integer >= 0.
            prior: weights other than the ensemble's own: equal silos, or 0 to withdraw one.
            condition: a class, or a text (L, D), that all samples shall have.
            condition_prior: every expert's share of the data with that condition, where the release does not say.
            guidance: g; exact with the strategy full alone, see docs/explanation/strategies.md.
            router_every: ask the router at every n-th step, and let its last answer hold until then.
            on_progress: told (steps taken by all samples, steps in all).

        Raises:
            MathError: an argument out of range, or a strategy that needs a router where there is none.
            NumericalError: samples that are not finite.
        """
        if num < 1 or seed < 0:
            raise MathError("sample", expected="num >= 1 and seed >= 0", got=f"{num} and {seed}")
        if tau is not None and not isinstance(strategy, str):
            raise MathError("tau", expected="the name of a strategy with it", got=f"{strategy}")
        chosen = strategy_named(strategy, tau=tau) if isinstance(strategy, str) else strategy
        mixture, done = self._mixture(prior, condition, condition_prior, guidance), 0
        if chosen.needs_router and self.router is None and mixture.num_active > 1:
            remedy = "Use the strategy lock with t_lock = 1, or an ensemble that has a router."
            raise MathError(f"strategy {type(chosen).__name__}", expected="a router", got="none", remedy=remedy)

        def tick(samples: int) -> None:
            nonlocal done
            done += samples
            if on_progress:
                on_progress(done, num * steps)

        journey = Journey(mixture, chosen, uniform_times(steps), solver_named(solver, self.path), router_every, tick)
        under_way = max(self.chunk_size, _TRAVELLING_BYTES // (4 * prod(self.shape) + 8 * steps))
        with torch.inference_mode():
            parts = [
                self._carried(journey, range(first, min(first + under_way, num)), seed)
                for first in range(0, num, under_way)
            ]
        seen, expert_N = (torch.cat(part) for part in zip(*parts, strict=True))
        return Samples(self.latent.decode(seen), expert_N, len(self.experts), seen)

    def _carried(self, journey: Journey, samples: range, seed: int) -> tuple[Tensor, Tensor]:
        noise, uniform_BS = randomness(samples, self.shape, seed, len(journey.times) - 1)
        x_1 = noise.to(self.device) * self.path.sigma(torch.ones(()))
        images, expert_B = (part.cpu() for part in journey.carry(x_1, uniform_BS.to(self.device)))
        broken_B = ~images.flatten(1).isfinite().all(1)
        if bool(broken_B.any()):
            names = self.expert_ids or range(len(self.experts))
            got = f"others, of {', '.join(str(names[k]) for k in sorted(set(expert_B[broken_B].tolist())))}"
            remedy = "Take more steps or less guidance; if that does not help, leave these experts out by a prior of 0."
            raise NumericalError("samples", expected="finite numbers", got=got, remedy=remedy)
        return images, expert_B

    def _mixture(
        self,
        prior: Sequence[float] | None,
        condition: Asked | None,
        condition_prior: Sequence[float] | None,
        guidance: float,
    ) -> Mixture:
        """The experts under no condition, or under the one asked for and, with guidance, under none beside it."""
        alone = Branch(1.0, log_prior(self.prior if prior is None else prior, len(self.experts)), self.router)
        if condition is None:
            if guidance or condition_prior is not None:
                raise MathError("guidance", expected="a condition with it", got="none")
            return Mixture(self.experts, (alone,), self.chunk_size)
        if not 0 <= guidance < inf:
            raise MathError("guidance", expected="a finite number of at least 0", got=str(guidance))
        told_with, told_without = told(self.condition, condition)
        given = self._given(condition, condition_prior)
        log_prior_K = conditional_log_prior(given.prior, self.prior, prior)
        with_it = Branch(1 + guidance, log_prior_K, given.router or self.router, told_with.to(self.device))
        without = replace(alone, factor=-guidance, condition=told_without.to(self.device))
        return Mixture(self.experts, (with_it, without) if guidance else (with_it,), self.chunk_size)

    def _given(self, condition: Asked, declared: Sequence[float] | None) -> Given:
        """Who holds the condition: as the caller declares, else as the release says; one expert alone holds all."""
        if declared is None and len(self.experts) == 1:
            declared = [1.0]
        known = self.given_class(condition) if self.given_class and isinstance(condition, int) else None
        if declared is not None:
            return Given(declared, known.router if known else None)
        if known is None:
            remedy = "Declare condition_prior; the ensemble's own prior says that all experts hold it alike."
            raise MathError("condition", expected="to be known who holds it", got="no histogram of it", remedy=remedy)
        return known
