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

Where a sample begins elsewhere than in noise, the router is asked at the x that it begins at: an image noised to time t
and followed back is an image-to-image translation, and noise beside known pixels becomes an inpainting.

The parts are in `ddm.sampling`: `mixture` mixes velocities, `guidance` computes what a condition changes, `strategies`
selects experts, `start` says where samples begin, `trajectories` integrates them from there to data with a solver of
`ddm.diffusion.solver`, `inpainting` does so beside known pixels, and `samples` holds and saves them.
`ddm.open_ensemble` verifies a published release and builds an `Ensemble` from it.

Source:
    McAllister et al. 2025, Decentralized Diffusion Models, arXiv 2501.05450.
"""

# Shape legend: K experts, B batch, N samples, ... all data dimensions.
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ddm.diffusion.path import Experts, LinearPath, Path
from ddm.diffusion.solver import SolverName, solver_named
from ddm.encoders.autoencoder import Identity, Latent
from ddm.errors import ShapeError
from ddm.protocol.architecture import Condition, NoCondition
from ddm.routers.base import Router, log_prior
from ddm.sampling.expert_cache import moved
from ddm.sampling.guidance import Asked, ClassPrior, ClassPriors, ConditionValue, names_of
from ddm.sampling.inpainting import Known, complete, known_part, streams
from ddm.sampling.mixture import Mixture, mix_velocity
from ddm.sampling.precision import InArithmetic, checked
from ddm.sampling.provenance import Log
from ddm.sampling.samples import Samples, check_finite
from ddm.sampling.start import Start, at_times, start
from ddm.sampling.strategies import (
    Full,
    Lock,
    Nucleus,
    Sample,
    Strategy,
    Threshold,
    TopK,
    TopOne,
    chosen_strategy,
    segments,
    strategy_named,
)
from ddm.sampling.trajectories import Callback, Trajectories, draw_noise, seed_of, ticking

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

# of the samples that are integrated at the same time, with their random numbers
_IN_FLIGHT_BYTES = 1 << 26


@dataclass(frozen=True, repr=False)
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
        latent: encodes images into the experts' space, and decodes their samples.
        dtype: the arithmetic of the experts: float32, bfloat16 for matrix products in it, or float64.
        release: digest of the manifest of the release that the experts are from, which saved samples bear.
        value_range: the lowest and the highest value of the data, to which saved samples are clipped.

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
    dtype: torch.dtype = torch.float32
    release: str = ""
    value_range: tuple[float, float] = (-1.0, 1.0)

    def __post_init__(self) -> None:
        checked(self.dtype)
        log_prior(self.prior, len(self.experts))
        if self.expert_ids and len(self.expert_ids) != len(self.experts):
            got = f"{len(self.expert_ids)} names"
            raise ShapeError(
                "expert_ids", expected=f"one name for each of {len(self.experts)} experts", got=got
            )
        if self.router and self.router.num_experts != len(self.experts):
            got = f"a router of {self.router.num_experts} experts"
            raise ShapeError("router", expected=f"a router of {len(self.experts)} experts", got=got)

    def __repr__(self) -> str:
        names = ", ".join([*self.expert_ids[:4], *(["..."] if len(self.expert_ids) > 4 else [])])
        router = getattr(self.router, "router", self.router)  # without the layers around it
        parts = [
            f"samples {tuple(self.shape)}",
            type(self.path).__name__,
            f"router {type(router).__name__}",
        ]
        parts += [
            f"condition {self.condition.kind}",
            f"{self.device}",
            f"{self.dtype}".removeprefix("torch."),
        ]
        return f"Ensemble of {len(self.experts)} experts ({names or 'without names'})\n  {', '.join(parts)}"

    def to(self, *where: torch.device | str | torch.dtype) -> "Ensemble":
        """Return the ensemble on another device, in another arithmetic, or both; this one stays as it is.

        Args:
            where: a device, a dtype, or both. Networks are copied to a device that they are not on; experts that are
                plain functions stay. See `dtype` for what the arithmetic changes; weights keep their dtype.

        Raises:
            MathError: a dtype that experts are not sampled in.
        """
        found = self
        for each in where:
            if isinstance(each, torch.dtype):
                found = replace(found, dtype=checked(each))
                continue
            router: Any = self.router
            router = moved([router], each)[0] if isinstance(router, nn.Module) else router
            found = replace(found, device=each, experts=moved(self.experts, each), router=router)
        return found

    def velocity(
        self,
        x_B: Tensor,
        t_B: Tensor,
        prior: Sequence[float] | None = None,
        *,
        condition: ConditionValue | str | None = None,
        condition_prior: Sequence[float] | None = None,
        guidance: float = 0.0,
        guidance_interval: tuple[float, float] = (0.0, 1.0),
    ) -> Tensor:
        """Return the velocity of the pooled data at (x, t): the exact mixture of all experts.

        Args:
            x_B: samples on the canonical path, shape (B, ...), in whose dtype experts and router answer.
            t_B: times in [0, 1], shape (B,).
            prior: see `sample`, as for the rest.
            condition: a class or a text, for all samples or for each of them.
            condition_prior: each expert's share of the data with the condition.
            guidance: g.
            guidance_interval: where guidance applies.

        Returns:
            Shape (B, ...).
        """
        x_B, t_B = at_times(x_B, t_B, self.shape)
        mixture = self._mixture(
            Asked(prior, condition, condition_prior, guidance, guidance_interval), len(x_B)
        )
        return mixture.velocity(x_B, t_B, mixture.weights(x_B, t_B))

    def posterior(
        self,
        x_B: Tensor,
        t_B: Tensor,
        condition: ConditionValue | str | None = None,
        *,
        prior: Sequence[float] | None = None,
        condition_prior: Sequence[float] | None = None,
    ) -> Tensor:
        """Return the log-probability of every expert at noised samples: ``log w_k(x, t)``, given the condition.

        >>> from ddm.ensemble import Ensemble
        >>> import torch
        >>> silos = [lambda x, t: x - 1, lambda x, t: x + 1]
        >>> ensemble = Ensemble(silos, None, [0.7, 0.3], shape=(2,))
        >>> ensemble.posterior(torch.randn(1, 2), torch.ones(1)).exp()  # in pure noise: the prior
        tensor([[0.7000, 0.3000]], dtype=torch.float64)

        Args:
            x_B: samples on the canonical path, shape (B, ...).
            t_B: times in [0, 1], shape (B,).
            condition: see `sample`, as for the next two.
            prior: weights in place of the ensemble's own.
            condition_prior: each expert's share of the data with the condition.

        Returns:
            Shape (B, K); minus infinity for an expert left out.

        Raises:
            MathError: an ensemble without a router, below t = 1.
        """
        x_B, t_B = at_times(x_B, t_B, self.shape)
        return self._mixture(Asked(prior, condition, condition_prior), len(x_B)).log_posterior(
            x_B, t_B
        )

    def sample(
        self,
        num: int | None = None,
        *,
        strategy: str | Strategy = "lock",
        tau: float | None = None,
        steps: int = 25,
        solver: SolverName = "midpoint",
        seed: int = 0,
        generator: torch.Generator | None = None,
        x: Tensor | None = None,
        x_0: Tensor | None = None,
        noise: Tensor | None = None,
        t_start: float | None = None,
        times: Sequence[float] | None = None,
        known: Known | None = None,
        prior: Sequence[float] | None = None,
        condition: ConditionValue | str | None = None,
        condition_prior: Sequence[float] | None = None,
        guidance: float = 0.0,
        guidance_interval: tuple[float, float] = (0.0, 1.0),
        router_every: int = 1,
        numbers: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        callback: Callback | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Samples:
        """Draw samples; the same call returns the same bytes.

        Sample i has a random stream of its own, so it does not depend on `num` or `chunk_size`, except that
        floating-point rounding depends on which samples an expert evaluates together; with `chunk_size` 1 an expert
        evaluates one, and sample i has the same bytes for every `num`.

        >>> from ddm.ensemble import Ensemble
        >>> silos = [
        ...     lambda x, t: x / t.clamp(min=1e-3)[:, None] - 1,
        ...     lambda x, t: x / t.clamp(min=1e-3)[:, None] + 1,
        ... ]
        >>> ensemble = Ensemble(silos, None, [0.7, 0.3], shape=(2,))
        >>> drawn = ensemble.sample(1000, steps=20, solver="euler")
        >>> drawn
        Samples of shape (1000, 2), shares of the experts 0.72, 0.28
        >>> drawn.provenance[0]  # sample 0 followed one expert from t = 1 on
        (Followed(t=1.0, experts=(0,)),)

        Args:
            num: number of samples, N; may be left out where a tensor below tells it.
            strategy: a `Strategy`, or its name: full, sample, lock, top-1, top-k, nucleus, threshold.
            tau: t_lock of the strategy named lock; 1 when omitted.
            steps: solver steps, evenly spaced in t; the default solver evaluates twice in each.
            solver: see `ddm.diffusion.solver`.
            seed: any integer >= 0.
            generator: draws the seed, in place of `seed`; it has moved on afterwards, so that another call with it
                draws other samples.
            x: where samples begin, at `t_start`, in the experts' space, shape (N, ...); noise when omitted.
            x_0: data in the experts' space, which are noised to `t_start`; see `image_to_image`.
            noise: standard normal noise in place of the samples' own, shape (N, ...).
            t_start: the time at which `x` are, or to which `x_0` are noised; below 1 lock needs a router too.
            times: all times, descending from `t_start`, in place of `t_start` and `steps`; where the last one is above
                0, samples are returned as they are then.
            known: the part of samples that is given; see `inpaint`.
            prior: weights in place of the ensemble's own, such as equal weights; 0 withdraws an expert.
            condition: a class, by number or by name, or the token embeddings (L, D) of a text, that all samples are
                drawn under; or one for each sample, int64 (N,) or (N, L, D).
            condition_prior: each expert's share of the data with that condition, where the release does not state it.
            guidance: g; exact with the strategy full only, see docs/explanation/strategies.md.
            guidance_interval: the lowest and the highest time at which guidance applies.
            router_every: evaluate the router at every n-th step only, and keep its weights in between.
            numbers: the numbers of the samples, N of them, in place of 0 to N - 1: sample i is the same in any company.
            dtype: the arithmetic of the experts, in place of the ensemble's.
            callback: called after each step with all samples, see `ddm.sampling.trajectories.Callback`. Samples then
                travel together, not expert by expert, which takes the memory of all of them at once.
            on_progress: called with the steps taken, summed over all samples, and the total to take.

        Raises:
            MathError: an argument out of range, arguments that do not go together, or a strategy that needs a router
                where there is none.
            ShapeError: tensors of another shape, or of different numbers of samples.
            NumericalError: samples that are not finite.
        """
        mixture = self._mixture(
            Asked(prior, condition, condition_prior, guidance, guidance_interval), dtype=dtype
        )
        nums = {
            "num": num,
            "condition": mixture.num,
            "known": known.num if known and known.num > 1 else None,
        }
        begin = start(
            nums, self.shape, {"x": x, "x_0": x_0, "noise": noise}, t_start, times, steps, numbers
        )
        moves = known.num_moves(len(begin.times) - 1) if known else len(begin.times) - 1
        step, chosen, seed = (
            solver_named(solver, self.path),
            chosen_strategy(strategy, tau),
            seed_of(seed, generator),
        )
        changes = moves if known else len(segments(chosen, begin.times, router_every))
        log, tick = (
            Log(mixture.active_K, begin.num, changes),
            ticking(on_progress, begin.num * moves),
        )
        trajectories = Trajectories(
            mixture, chosen, begin.times, step, router_every, tick, callback, log
        )
        at_once = max(self.chunk_size, _IN_FLIGHT_BYTES // (4 * prod(self.shape) + 8 * moves))
        at_once = begin.num if callback else at_once
        with torch.inference_mode():
            parts = [
                self._integrate(
                    trajectories, range(row, min(row + at_once, begin.num)), seed, begin, known
                )
                for row in range(0, begin.num, at_once)
            ]
        latents, expert_N = (torch.cat(part) for part in zip(*parts, strict=True))
        check_finite(latents, expert_N, self.expert_ids)
        told = (
            log.table(),
            self.release,
            names_of(self.condition, condition, begin.num),
            self.value_range,
        )
        return Samples(self.latent.decode(latents), expert_N, len(self.experts), latents, *told)

    def image_to_image(self, images: Tensor, t_start: float, **how: Any) -> Samples:
        """Noise images to a time and follow them back to data: variations that keep what the noise left of each.

        >>> from ddm.ensemble import Ensemble
        >>> import torch
        >>> silo = lambda x, t: (x - 2) / t.clamp(min=1e-3)[:, None]  # whose data are all at 2
        >>> ensemble = Ensemble([silo], None, [1.0], shape=(2,))
        >>> ensemble.image_to_image(torch.zeros(1, 2), t_start=0.5, steps=10, solver="euler").images
        tensor([[2., 2.]])

        Args:
            images: in the data's range, shape (N, C, H, W) or (N, C, D, H, W); encoded where experts work on latents.
            t_start: above 0, where images stay as they are, to 1, where nothing of them is left.
            how: any of `sample`'s other arguments; every strategy asks the router at the noised images.

        Raises:
            MathError, ShapeError, NumericalError: see `sample`.
        """
        return self.sample(x_0=self.latent.encode(images), t_start=t_start, **how)

    def inpaint(
        self, images: Tensor, known: Tensor, *, corrections: int = 9, **how: Any
    ) -> Samples:
        """Draw what is not known of images from its distribution given what is known; see `ddm.sampling.inpainting`.

        >>> from ddm.ensemble import Ensemble
        >>> import torch
        >>> silo = lambda x, t: (x - 2) / t.clamp(min=1e-3)[:, None, None, None]  # whose data are all 2
        >>> ensemble = Ensemble([silo], None, [1.0], shape=(1, 1, 2))
        >>> left = torch.tensor([[True, False]])
        >>> ensemble.inpaint(torch.full((1, 1, 1, 2), 1.5), left, steps=10, solver="euler").images
        tensor([[[[1.5000, 2.0000]]]])

        Args:
            images: in the data's range, shape (N, C, H, W) or (N, C, D, H, W); anything finite where not known.
            known: bool, true where images are known: of all samples, (H, W) or (C, H, W), or of each, (N, C, H, W).
            corrections: after each step, each at the cost of one evaluation; see `ddm.sampling.inpainting.Known`.
            how: any of `sample`'s other arguments; the strategy is "sample" when omitted. One that locks at t = 1
                draws its expert before it has seen what is known, and gives each silo its prior share.

        Raises:
            MathError, ShapeError, NumericalError: see `sample`.
        """
        given, mask, images = known_part(images, known, self.latent.encode, corrections)
        drawn = self.sample(len(images), known=given, **({"strategy": "sample"} | how))
        return replace(drawn, images=torch.where(mask, images.to(drawn.images), drawn.images))

    def _integrate(
        self, whole: Trajectories, rows: range, seed: int, begin: Start, known: Known | None
    ) -> tuple[Tensor, Tensor]:
        """Draw the samples of these rows; return them, and the expert of each, on the CPU."""
        trajectories, numbers, steps = whole.of(rows), begin.numbers(rows), len(whole.times) - 1
        noise, uniform = draw_noise(
            numbers, self.shape, seed, known.num_moves(steps) if known else steps
        )
        x, uniform = (
            begin.at(rows, noise.to(self.device, whole.dtype), self.path),
            uniform.to(self.device),
        )
        if known:
            found = complete(
                trajectories,
                self.path,
                known.of(rows),
                x,
                uniform,
                rows.start,
                streams(seed, numbers),
            )
        else:
            found = trajectories.integrate(x, uniform, rows.start)
        return found[0].cpu(), found[1].cpu()

    def _mixture(
        self, asked: Asked, num: int | None = None, dtype: torch.dtype | None = None
    ) -> Mixture:
        """Return the mixture that is asked for; `num` is how many conditions there may be, where it is known."""
        experts = InArithmetic(self.experts, dtype or self.dtype, self.device)
        conditional, null, of_samples = asked.branches(
            self.condition, self.router, self.prior, self.class_prior
        )
        if num is not None and of_samples and len(of_samples) != num:
            raise ShapeError(
                "condition", expected=f"one for each of {num} samples", got=str(len(of_samples))
            )
        return Mixture(
            experts, conditional, self.chunk_size, null, asked.guidance, asked.interval, of_samples
        )
