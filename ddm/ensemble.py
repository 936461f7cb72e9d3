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
- sample: one expert, drawn again from the posterior w at every step, at the cost of one evaluation;
- lock: as sample until time t_lock, then the same expert to the end. At t_lock = 1, the default, the expert is drawn
  from the prior and no router is needed.

Strategies that follow only the most probable experts (top-1, top-k, nucleus, threshold) are biased towards large silos:
near t = 1 the posterior of every x is the prior, so the most probable expert is always that of the largest silo.

Under a condition c, a class or a text, every quantity above is conditioned on c. With classifier-free guidance of
scale g, a sample follows

    (1 + g) sum_k w_k(x, t | c) u_k(x, t | c) - g sum_k w_k(x, t) u_k(x, t)

Where a sample begins elsewhere than in noise, the router is evaluated at the x that it begins at: an image noised to
time t and followed back is an image-to-image translation, and noise beside known pixels becomes an inpainting.

The parts are in `ddm.sampling`: `mixture` mixes velocities, `guidance` computes what a condition changes, `strategies`
selects experts, `start` says where samples begin, `trajectories` integrates them from there to data with a solver of
`ddm.diffusion.solver`, `inpainting` does so beside known pixels, `likelihood` follows trajectories backwards for the
density of images, and `samples` holds and saves samples.
`ddm.open_ensemble` verifies a published release and builds an `Ensemble` from it.

Source:
    McAllister et al. 2025, Decentralized Diffusion Models, arXiv 2501.05450.
"""

# Shape legend: K experts, B batch, N samples, ... all data dimensions.
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ddm.diffusion.path import Experts, LinearPath, Path
from ddm.diffusion.solver import solver_step, uniform_times
from ddm.encoders.autoencoder import Identity, Latent
from ddm.errors import MathError, ShapeError
from ddm.io.array_input import real_tensor, whole_number
from ddm.protocol.architecture import Condition, NoCondition
from ddm.routers.base import Router, log_prior
from ddm.sampling.expert_cache import move_experts
from ddm.sampling.guidance import (
    ClassPrior,
    ClassPriors,
    ConditionRequest,
    ConditionValue,
    SampledEnsemble,
    class_names,
)
from ddm.sampling.inpainting import Inpainting, KnownRegion, MaskedImages, inpainting_generators
from ddm.sampling.likelihood import (
    DEFAULT_LIKELIHOOD_OPTIONS,
    DensityIntegrator,
    Likelihood,
    LikelihoodOptions,
    dequantize,
    draw_probes,
    likelihood_step,
    unit_vectors,
    width_of_bins,
    with_recomputed_experts,
)
from ddm.sampling.mixture import Mixture, mix_velocity
from ddm.sampling.options import DEFAULT_OPTIONS, SamplingOptions
from ddm.sampling.precision import CastExperts, check_device, check_dtype
from ddm.sampling.progress import sampling_progress
from ddm.sampling.provenance import ProvenanceLog
from ddm.sampling.samples import Samples, check_finite
from ddm.sampling.start import (
    InitialState,
    at_times,
    check_tensor,
    make_initial_state,
    sample_numbers,
)
from ddm.sampling.strategies import (
    Full,
    Lock,
    Nucleus,
    Sample,
    Strategy,
    Threshold,
    TopK,
    TopOne,
    resolve_strategy,
    segments,
    strategy_named,
)
from ddm.sampling.trajectories import (
    EDIT_PURPOSE,
    Callback,
    Trajectories,
    TrajectoryState,
    draw_noise,
    resolve_seed,
    step_reporter,
)

__all__ = [
    "ClassPrior",
    "Ensemble",
    "Full",
    "Lock",
    "Nucleus",
    "Sample",
    "Samples",
    "SamplingOptions",
    "Strategy",
    "Threshold",
    "TopK",
    "TopOne",
    "mix_velocity",
    "strategy_named",
]

# Of the samples that are integrated at the same time, with their random numbers.
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
        ShapeError: the prior, the names or the router are for another number of experts, or are none.
        MathError: a `chunk_size` or a length in `shape` below 1, a dtype that experts are not sampled in, or a
            `value_range` in the wrong order.
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
        check_dtype(self.dtype)
        whole_number(self.chunk_size, "chunk_size", least=1)
        if not isinstance(self.experts, Experts):
            raise ShapeError(
                "experts", expected="a list of experts", got=type(self.experts).__name__
            )
        if self.router is not None and not isinstance(self.router, Router):
            raise ShapeError(
                "router",
                expected="an object with num_experts and log_likelihood(x_B, t_B), or None",
                got=type(self.router).__name__,
            )
        if not isinstance(self.path, Path):
            raise MathError("path", expected="a path, such as LinearPath()", got=repr(self.path))
        if isinstance(self.shape, str) or not isinstance(self.shape, Sequence):
            raise ShapeError(
                "shape", expected="whole numbers, such as (1, 28, 28)", got=repr(self.shape)
            )
        for length in self.shape:
            whole_number(length, "shape", least=1)
        lowest, highest = self.value_range
        if not lowest < highest:
            raise MathError(
                "value_range", expected="the lowest value first", got=repr(self.value_range)
            )
        # For its checks: every use of the prior begins with them, and here they fail where it is written.
        log_prior(self.prior, len(self.experts))
        if self.expert_ids and len(self.expert_ids) != len(self.experts):
            got = f"{len(self.expert_ids)} names"
            raise ShapeError(
                "expert_ids", expected=f"one name for each of {len(self.experts)} experts", got=got
            )
        if len(set(self.expert_ids)) < len(self.expert_ids):
            raise ShapeError(
                "expert_ids", expected="different names", got=", ".join(self.expert_ids)
            )
        if self.router and self.router.num_experts != len(self.experts):
            got = f"a router of {self.router.num_experts} experts"
            raise ShapeError("router", expected=f"a router of {len(self.experts)} experts", got=got)

    def __repr__(self) -> str:
        names = ", ".join(self.expert_ids[:4]) or "without names"
        if len(self.expert_ids) > 4:
            names += ", ..."
        # The family, without the calibration around it.
        router = getattr(self.router, "router", self.router)
        facts = [
            f"samples {tuple(self.shape)}",
            type(self.path).__name__,
            f"router {type(router).__name__}",
            f"condition {self.condition.kind}",
            f"{self.device}",
            f"{self.dtype}".removeprefix("torch."),
        ]
        return f"Ensemble of {len(self.experts)} experts ({names})\n  {', '.join(facts)}"

    def to(self, *where: torch.device | str | torch.dtype) -> "Ensemble":
        """Return the ensemble on another device, in another arithmetic, or both; this one stays as it is.

        Args:
            where: a device, a dtype, or both. Networks are copied to a device that they are not on; experts that are
                plain functions stay. See `dtype` for what the arithmetic changes; weights keep their dtype.

        Raises:
            MathError: a dtype that experts are not sampled in.
            SetupError: there is no such device.
        """
        ensemble = self
        for target in where:
            if isinstance(target, torch.dtype):
                check_dtype(target)
                ensemble = replace(ensemble, dtype=target)
            else:
                check_device(target)
                ensemble = ensemble._on_device(target)
        return ensemble

    def _on_device(self, device: torch.device | str) -> "Ensemble":
        router: Any = self.router
        # The project's own routers are not modules: they bring their tensors to the device of the samples at every
        # call.
        if isinstance(router, nn.Module):
            router = move_experts([router], device)[0]
        experts = move_experts(self.experts, device)
        return replace(self, device=device, experts=experts, router=router)

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
        request = ConditionRequest(prior, condition, condition_prior, guidance, guidance_interval)
        request.check_learned(self.condition)
        mixture = self._mixture(request, num_samples=len(x_B))
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
        request = ConditionRequest(prior, condition, condition_prior)
        return self._mixture(request, num_samples=len(x_B)).log_posterior(x_B, t_B)

    def sample(
        self,
        num: int | None = None,
        *,
        strategy: str | Strategy = "lock",
        tau: float | None = None,
        steps: int = 25,
        seed: int = 0,
        condition: ConditionValue | str | None = None,
        guidance: float = 0.0,
        prior: Sequence[float] | None = None,
        callback: Callback | None = None,
        progress: bool = True,
        options: SamplingOptions = DEFAULT_OPTIONS,
    ) -> Samples:
        """Draw samples; the same call returns the same bytes.

        Sample i has a random stream of its own, so it does not depend on `num` or `chunk_size`, except that
        floating-point rounding depends on which samples an expert evaluates together; with `chunk_size` 1 an expert
        evaluates one, and sample i has the same bytes for every `num`.

        >>> from ddm.ensemble import Ensemble, SamplingOptions
        >>> silos = [
        ...     lambda x, t: x / t.clamp(min=1e-3)[:, None] - 1,
        ...     lambda x, t: x / t.clamp(min=1e-3)[:, None] + 1,
        ... ]
        >>> ensemble = Ensemble(silos, None, [0.7, 0.3], shape=(2,))
        >>> drawn = ensemble.sample(1000, steps=20, options=SamplingOptions(solver="euler"))
        >>> drawn
        Samples of shape (1000, 2), shares of the experts 0.72, 0.28
        >>> drawn.provenance[0]  # sample 0 followed one expert from t = 1 on
        (Followed(t=1.0, experts=(0,)),)

        Args:
            num: number of samples, N; may be left out where a tensor of `options` or the condition states it.
            strategy: a `Strategy`, or its name: full, sample, lock, top-1, top-k, nucleus, threshold.
            tau: t_lock of the strategy named lock; 1 when omitted.
            steps: solver steps, evenly spaced in t; the default solver evaluates twice in each.
            seed: any integer >= 0.
            condition: a class, by number or by name, or the token embeddings (L, D) of a text, that all samples are
                drawn under; or one for each sample, int64 (N,) or (N, L, D).
            guidance: g; exact with the strategy full only, see docs/explanation/strategies.md.
            prior: weights in place of the ensemble's own, such as equal weights; 0 withdraws an expert.
            callback: called after each step with all samples, see `ddm.sampling.trajectories.Callback`. Samples then
                travel together, not expert by expert, which takes the memory of all of them at once.
            progress: whether a bar is shown, in a terminal or a notebook; `options.on_progress` takes its place.
            options: what is seldom changed: the solver, where samples begin, the shares of a condition, and more.

        Raises:
            MathError: an argument out of range, arguments that do not go together, or a strategy that needs a router
                where there is none.
            ShapeError: tensors of another shape, or of different numbers of samples.
            NumericalError: samples that are not finite.
        """
        _check_options(options, SamplingOptions)
        request = ConditionRequest(
            prior, condition, options.condition_prior, guidance, options.guidance_interval
        )
        request.check_learned(self.condition)
        mixture = self._mixture(request, dtype=options.dtype)
        known = options.known
        lengths = {"num": num, "condition": mixture.num_conditions}
        # One known region may serve any number of samples, and then states none.
        if known is not None and known.num_samples > 1:
            lengths["known"] = known.num_samples
        initial_state = make_initial_state(options, self.shape, steps, lengths)
        num_samples = initial_state.num_samples

        resolved_strategy = resolve_strategy(strategy, tau)
        num_moves = len(initial_state.times) - 1
        # A sample may change its experts only where a segment begins.
        max_changes = len(segments(resolved_strategy, initial_state.times, options.router_every))
        if known is not None:
            # Corrections move samples between steps, and may change their experts in each move.
            num_moves = known.num_moves(num_moves)
            max_changes = num_moves
        log = ProvenanceLog(mixture.active_K, num_samples, max_changes)
        chunk_size = self._samples_in_flight(num_moves)
        if callback is not None:
            if not callable(callback):
                raise MathError("callback", expected="a function", got=repr(callback))
            # It sees all samples after each step.
            chunk_size = num_samples
        resolved_seed = resolve_seed(seed, options.generator, options.seeds, num_samples)
        with sampling_progress(options.on_progress, is_shown=progress) as on_progress:
            trajectories = Trajectories(
                mixture=mixture,
                strategy=resolved_strategy,
                times=initial_state.times,
                step=solver_step(options.solver, self.path),
                router_every=options.router_every,
                report_step=step_reporter(on_progress, num_samples * num_moves),
                callback=callback,
                log=log,
            )
            run = _SamplingRun(trajectories, initial_state, known, resolved_seed, num_moves)
            latents, expert_N = self._integrate_all(run, chunk_size)
        check_finite(latents, expert_N, self.expert_ids)
        return Samples(
            images=self.latent.decode(latents),
            expert_N=expert_N,
            num_experts=len(self.experts),
            latents=latents,
            provenance=log.table(),
            release=self.release,
            classes=class_names(self.condition, condition, num_samples),
            value_range=self.value_range,
        )

    def image_to_image(
        self,
        images: Tensor,
        t_start: float,
        *,
        num: int | None = None,
        options: SamplingOptions = DEFAULT_OPTIONS,
        **keywords: Any,
    ) -> Samples:
        """Noise images to a time and follow them back to data: variations that keep what the noise left of each.

        >>> from ddm.ensemble import Ensemble
        >>> import torch
        >>> silo = lambda x, t: (x - 2) / t.clamp(min=1e-3)[:, None]  # whose data are all at 2
        >>> ensemble = Ensemble([silo], None, [1.0], shape=(2,))
        >>> ensemble.image_to_image(torch.zeros(1, 2), t_start=0.5, steps=10).images.round()
        tensor([[2., 2.]])

        Args:
            images: in the data's range, shape (N, C, H, W) or (N, C, D, H, W); encoded where experts work on latents.
            t_start: above 0, where images stay as they are, to 1, where nothing of them is left.
            num: number of variations of one image; of several images, each has one.
            options: as of `sample`.
            keywords: any of `sample`'s other arguments; every strategy evaluates the router at the noised images.

        Raises:
            MathError, ShapeError, NumericalError: see `sample`.
        """
        _check_options(options, SamplingOptions)
        x_0 = self.latent.encode(real_tensor(images, "images"))
        check_tensor("images", x_0, self.shape)
        if num is not None and len(x_0) == 1:
            x_0 = x_0.expand(whole_number(num, "num", least=1), *x_0.shape[1:])
        options = replace(options, x_0=x_0, t_start=t_start)
        return self.sample(num, options=options, **keywords)

    def inpaint(
        self,
        images: Tensor,
        known: Tensor,
        *,
        num: int | None = None,
        corrections: int = 9,
        strategy: str | Strategy = "sample",
        options: SamplingOptions = DEFAULT_OPTIONS,
        **keywords: Any,
    ) -> Samples:
        """Draw what is not known of images from its distribution given what is known; see `ddm.sampling.inpainting`.

        >>> from ddm.ensemble import Ensemble
        >>> import torch
        >>> silo = lambda x, t: (x - 2) / t.clamp(min=1e-3)[:, None, None, None]  # whose data are all 2
        >>> ensemble = Ensemble([silo], None, [1.0], shape=(1, 1, 2))
        >>> left = torch.tensor([[True, False]])
        >>> ensemble.inpaint(torch.full((1, 1, 1, 2), 1.5), left, steps=10).images
        tensor([[[[1.5000, 2.0000]]]])

        Args:
            images: in the data's range, shape (N, C, H, W) or (N, C, D, H, W); anything finite where not known.
            known: bool, true where images are known: of all samples, (H, W) or (C, H, W), or of each, (N, C, H, W).
            num: number of completions of one image; of several images, each has one.
            corrections: after each step, each at the cost of one evaluation; see `KnownRegion`.
            strategy: as of `sample`. One that locks at t = 1 draws its expert before it has seen what is known, and
                gives each silo its prior share.
            options: as of `sample`.
            keywords: any of `sample`'s other arguments.

        Raises:
            MathError, ShapeError, NumericalError: see `sample`.
        """
        _check_options(options, SamplingOptions)
        masked = MaskedImages.of(images, known)
        options = replace(options, known=masked.region(self.latent.encode, corrections))
        if num is None:
            num = len(masked.images)
        drawn = self.sample(num, strategy=strategy, options=options, **keywords)
        # The decoded latents differ from the images even where these are known.
        completed = torch.where(masked.mask, masked.images.to(drawn.images), drawn.images)
        return replace(drawn, images=completed)

    # What is made in a caller's inference mode could not be differentiated.
    @torch.inference_mode(False)
    @torch.no_grad()
    def compute_likelihood(
        self,
        images: Tensor,
        *,
        strategy: str | Strategy = "full",
        steps: int = 25,
        num_probes: int = 2,
        seed: int = 0,
        condition: ConditionValue | str | None = None,
        guidance: float = 0.0,
        prior: Sequence[float] | None = None,
        progress: bool = True,
        options: LikelihoodOptions = DEFAULT_LIKELIHOOD_OPTIONS,
    ) -> Likelihood:
        """Compute the density of images among what the ensemble draws; see `ddm.sampling.likelihood`.

        Image i has random streams of its own, so its numbers do not depend on `chunk_size`, except for rounding.

        >>> from ddm.ensemble import Ensemble
        >>> import torch
        >>> def silo(x, t):  # whose data are normal around 0 with a standard deviation of 1
        ...     t = t[:, None]
        ...     return (2 * t - 1) / ((1 - t) ** 2 + t**2) * x
        >>> ensemble = Ensemble([silo], None, [1.0], shape=(2,))
        >>> ensemble.compute_likelihood(torch.zeros(1, 2)).log_density_N  # -log(2 pi)
        tensor([-1.8379], dtype=torch.float64)

        Args:
            images: in the data's range, shape (N, C, H, W) or (N, C, D, H, W); encoded where experts work on latents,
                and then the density is that of the latents.
            strategy: full, or lock with t_lock = 1, for which the density is the experts' own, mixed by the prior.
            steps: solver steps, evenly spaced in t; the default solver evaluates four times in each.
            num_probes: Hutchinson's estimates for each image, each at the cost of one backward pass an evaluation.
            seed: any integer >= 0; draws the probes and the noise of `options.levels`.
            condition: see `sample`, as for the next two.
            guidance: g; the density is that of guided samples.
            prior: weights in place of the ensemble's own.
            progress: whether a bar is shown, in a terminal or a notebook; `options.on_progress` takes its place.
            options: what is seldom changed: the solver, the exact trace, whole numbers, and more.

        Raises:
            MathError: an argument out of range, arguments that do not go together, a strategy without a density, or an
                expert or router that cannot be differentiated.
            ShapeError: images of another shape, or another number of conditions than of images.
            NumericalError: images or densities that are not finite.
        """
        _check_options(options, LikelihoodOptions)
        x_0 = self.latent.encode(real_tensor(images, "images"))
        check_tensor("images", x_0, self.shape)
        num_images = len(x_0)
        num_dims = prod(self.shape)
        num_probes = whole_number(num_probes, "num_probes", least=1)
        numbers = sample_numbers(options.numbers, num_images) or range(num_images)
        seed = whole_number(seed, "seed", least=0)
        bin_width = 1.0
        if options.levels is not None:
            if not isinstance(self.latent, Identity):
                got = "experts that work on latents, which have no levels"
                raise MathError("levels", expected="no levels", got=got)
            bin_width = width_of_bins(x_0, options.levels, self.value_range)
            x_0 = dequantize(x_0, numbers, bin_width, seed)

        request = ConditionRequest(prior, condition, options.condition_prior, guidance)
        request.check_learned(self.condition)
        mixture = self._mixture(request, num_images, options.dtype)
        resolved_strategy = resolve_strategy(strategy, None)
        times = uniform_times(whole_number(steps, "steps", least=1))[::-1]
        num_steps = num_images * steps
        if resolved_strategy.keeps_first_expert:
            # Each expert has trajectories of its own.
            num_steps *= int(mixture.active_K.sum())
        on_progress = options.on_progress
        densities = []
        with sampling_progress(on_progress, is_shown=progress, label="likelihood") as report:
            integrator = DensityIntegrator(
                mixture=with_recomputed_experts(mixture),
                path=self.path,
                strategy=resolved_strategy,
                times=times,
                step=likelihood_step(options.solver, self.path),
                is_exact=options.exact,
                report_step=step_reporter(report, num_steps),
            )
            for first in range(0, num_images, self.chunk_size):
                rows = slice(first, first + self.chunk_size)
                x_0_B = x_0[rows].to(self.device, mixture.experts.dtype)
                if options.exact:
                    probe_BPD = unit_vectors(len(x_0_B), num_dims)
                else:
                    probe_BPD = draw_probes(numbers[rows], num_dims, num_probes, seed)
                log_density_BP = integrator.of(rows).log_density(x_0_B, probe_BPD.to(x_0_B))
                densities.append(log_density_BP.cpu())
        return Likelihood.of(torch.cat(densities), num_dims, bin_width, is_exact=options.exact)

    def _samples_in_flight(self, num_moves: int) -> int:
        """Return how many samples are integrated at the same time."""
        # A sample in float32, and one float64 that draws an expert for each move.
        sample_bytes = 4 * prod(self.shape) + 8 * num_moves
        # At least a whole chunk, so that large samples are still evaluated as many at once as the caller allows.
        return max(self.chunk_size, _IN_FLIGHT_BYTES // sample_bytes)

    def _integrate_all(self, run: "_SamplingRun", chunk_size: int) -> tuple[Tensor, Tensor]:
        """Draw all samples, `chunk_size` at a time; return them and the last expert of each, on the CPU."""
        num_samples = run.initial_state.num_samples
        latent_chunks = []
        expert_chunks = []
        with torch.inference_mode():
            for first in range(0, num_samples, chunk_size):
                rows = range(first, min(first + chunk_size, num_samples))
                arrived = self._integrate(run, rows)
                # The device holds the samples in flight alone, and main memory all of them.
                latent_chunks.append(arrived.x_B.cpu())
                expert_chunks.append(arrived.expert_B.cpu())
        return torch.cat(latent_chunks), torch.cat(expert_chunks)

    def _integrate(self, run: "_SamplingRun", rows: range) -> TrajectoryState:
        """Draw the samples of these rows."""
        trajectories = run.trajectories.of(rows)
        numbers = run.initial_state.numbers_of(rows)
        seed = run.seed_of(rows)
        noise, uniform = draw_noise(
            numbers, self.shape, seed, run.num_moves, purpose=run.noise_purpose
        )
        # Drawn on the CPU, whose random numbers are the same on every machine.
        noise = noise.to(self.device, trajectories.dtype)
        uniform = uniform.to(self.device)
        x = run.initial_state.x_of_rows(rows, noise, self.path)
        if run.known is None:
            return trajectories.integrate(x, uniform, rows.start)
        generators = inpainting_generators(seed, numbers)
        inpainting = Inpainting(trajectories, self.path, run.known.of(rows), generators)
        return inpainting.integrate(x, uniform, rows.start)

    def _mixture(
        self,
        request: ConditionRequest,
        num_samples: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> Mixture:
        """Return the mixture of a request; `num_samples` is how many conditions there may be, where it is known."""
        ensemble = SampledEnsemble(self.condition, self.router, self.prior, self.class_prior)
        branches = request.branches(ensemble)
        conditions = branches.sample_conditions
        # `sample` compares the numbers later, among all arguments that may state one.
        if num_samples is not None and conditions is not None and len(conditions) != num_samples:
            expected = f"one for each of {num_samples} samples"
            raise ShapeError("condition", expected=expected, got=str(len(conditions)))
        return Mixture(
            experts=CastExperts(self.experts, dtype or self.dtype, self.device),
            conditional=branches.conditional,
            chunk_size=self.chunk_size,
            unconditional=branches.unconditional,
            guidance=request.guidance,
            interval=request.interval,
            sample_conditions=conditions,
        )


def _check_options(options: object, expected_type: type) -> None:
    if not isinstance(options, expected_type):
        name = expected_type.__name__
        got = f"{type(options).__name__}"
        raise MathError(
            "options",
            expected=f"{name}(...)",
            got=got,
            remedy=f"Give an object of that class: options={name}(solver=...).",
        )


@dataclass(frozen=True)
class _SamplingRun:
    """One call of `Ensemble.sample`, whose samples are integrated some at a time.

    Attributes:
        trajectories: the trajectories of all samples.
        initial_state: where they begin.
        known: the part of them that is given.
        seed: the seed of their random streams, or one for each.
        num_moves: how often each sample moves.
    """

    trajectories: Trajectories
    initial_state: InitialState
    known: KnownRegion | None
    seed: int | Sequence[int]
    num_moves: int

    @property
    def noise_purpose(self) -> str:
        """What the random numbers of the samples are for.

        What samples begin at may itself have been drawn, with the same numbers and seed. Data that are noised by the
        noise that they came from would only be followed back to themselves, and a trajectory in two parts would draw
        the same experts in both.
        """
        if self.initial_state.x_0 is not None or self.known is not None:
            return EDIT_PURPOSE
        t_start = self.initial_state.times[0]
        if self.initial_state.x is not None and t_start < 1:
            return f"sample from {t_start}"
        return "sample"

    def seed_of(self, rows: range) -> int | Sequence[int]:
        """Return the seed of the samples in these rows, or one for each."""
        if isinstance(self.seed, int):
            return self.seed
        return self.seed[rows.start : rows.stop]
