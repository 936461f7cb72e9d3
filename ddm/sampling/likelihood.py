"""Computes the likelihood of images: the density of what the ensemble draws, along its trajectories backwards.

Where ``dx/dt = u(x, t)`` leads from noise at t = 1 to data at t = 0, the change of variables gives

    log p(x_0) = log p_1(x_1) + integral of div u(x_t, t) dt from t = 0 to t = 1,    p_1 = N(0, sigma_1^2),

along the trajectory through x_0. Hutchinson's estimator takes ``eps^T J eps`` for the divergence, with J the Jacobian
of u in x and with independent signs eps, a *probe*, which stays the same along the trajectory. The estimator's mean is
the trace of J.

Source:
    Chen et al. 2018, theorem 1, arXiv 1806.07366; Grathwohl et al. 2019, for the probes, arXiv 1810.01367; Song et al.
    2021, for the velocity of a diffusion model, arXiv 2011.13456.
"""

# Shape legend: N images, B batch, K experts, P probes, D values of one image, ... all data dimensions.
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log, pi

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ddm.diffusion.multistep import SolverMemory, filled
from ddm.diffusion.path import Expert, Path, Velocity
from ddm.diffusion.rng import stream
from ddm.diffusion.solver import Solver, SolverName, Step, follow, solver_step
from ddm.errors import MathError, NumericalError
from ddm.io.array_input import whole_number
from ddm.sampling.mixture import Mixture
from ddm.sampling.precision import CastExperts
from ddm.sampling.strategies import Full, Strategy
from ddm.sampling.trajectories import StepReporter
from ddm.system.progress import ProgressCallback

# Of a message of torch, in an error.
_MAX_SHOWN = 200


@dataclass(frozen=True)
class LikelihoodOptions:
    """Options of `Ensemble.compute_likelihood`.

    Args:
        solver: a name, see `ddm.diffusion.solver`, other than dpm, which solves for x alone; or a `Solver`.
        exact: whether the divergence is the trace of the whole Jacobian, in place of probes: as many backward passes
            for each evaluation as an image has values.
        levels: the number of values that a pixel can have, such as 256. Each image then gets uniform noise of one step
            between two of them, of its own random stream, and bits per dimension are those of whole numbers. None for
            images of continuous values.
        condition_prior: each expert's share of the data with the condition, where the release does not state it.
        numbers: the numbers of the images, which name their random streams, in place of 0 to N - 1.
        dtype: the arithmetic of the experts, in place of the ensemble's.
        on_progress: called with the steps taken, summed over all images, and the total to take.
    """

    solver: SolverName | Solver = "rk4"
    exact: bool = False
    levels: int | None = None
    condition_prior: Sequence[float] | None = None
    numbers: Sequence[int] | None = None
    dtype: torch.dtype | None = None
    on_progress: ProgressCallback | None = None


DEFAULT_LIKELIHOOD_OPTIONS = LikelihoodOptions()


@dataclass(frozen=True, repr=False)
class Likelihood:
    """How likely images are under an ensemble.

    Attributes:
        log_density_N: ``log p(x)`` of each image in the experts' space, nats, float64; the mean over the probes.
        standard_error_N: of `log_density_N`, over the probes, nats; NaN with one probe, and 0 for the exact trace. The
            error of the solver is not in it.
        num_dims: the number of values of one image in the experts' space, D.
        bin_width: the distance of two neighbouring values of a pixel, 1 for continuous values.
    """

    log_density_N: Tensor
    standard_error_N: Tensor
    num_dims: int
    bin_width: float = 1.0

    @classmethod
    def of(
        cls, log_density_NP: Tensor, num_dims: int, bin_width: float, *, is_exact: bool
    ) -> "Likelihood":
        """Average over the probes.

        Args:
            log_density_NP: the log-density of each image by each probe.
            num_dims: D.
            bin_width: see `Likelihood`.
            is_exact: whether there is no error to estimate.

        Raises:
            NumericalError: a density that is not finite.
        """
        is_finite_N = log_density_NP.isfinite().all(1)
        if not bool(is_finite_N.all()):
            num_broken = int((~is_finite_N).sum())
            raise NumericalError(
                "likelihood",
                expected="finite numbers",
                got=f"NaN or infinity for {num_broken} of {len(log_density_NP)} images",
                remedy="Take more steps; if that does not help, draw samples: that names an expert that fails.",
            )
        log_density_N = log_density_NP.mean(1)
        standard_error_N = torch.zeros_like(log_density_N)
        if not is_exact:
            num_probes = log_density_NP.shape[1]
            deviation_NP = log_density_NP - log_density_N[:, None]
            # With one probe 0 / 0, which is NaN: nothing is known of the error.
            variance_N = deviation_NP.square().sum(1) / (num_probes - 1)
            standard_error_N = (variance_N / num_probes).sqrt()
        return cls(log_density_N, standard_error_N, num_dims, bin_width)

    def __repr__(self) -> str:
        mean = float(self.bits_per_dim_N.mean())
        return f"Likelihood of {len(self)} images, {mean:.4f} bits per dimension"

    def __len__(self) -> int:
        return len(self.log_density_N)

    @property
    def bits_per_dim_N(self) -> Tensor:
        """``-log2(p(x) width^D) / D`` of each image, with the width of one bin; lower is more likely."""
        nats_per_dim_N = -self.log_density_N / self.num_dims - log(self.bin_width)
        return nats_per_dim_N / log(2)

    @property
    def bits_per_dim_error_N(self) -> Tensor:
        """The standard error of `bits_per_dim_N` over the probes."""
        return self.standard_error_N / (self.num_dims * log(2))


@dataclass(frozen=True)
class RecomputedExperts(CastExperts):
    """Experts whose gradient in x is computed one expert at a time.

    Intermediate results are computed again in the backward pass: those of all experts of a mixture, and with
    `LazyExperts` all their weights, would not fit into memory together.
    """

    def __getitem__(self, k: int) -> Expert:
        expert = super().__getitem__(k)

        def recomputed(x_B: Tensor, t_B: Tensor, *condition_B: Tensor) -> Tensor:
            u_B: Tensor = checkpoint(
                expert, x_B, t_B, *condition_B, use_reentrant=False, preserve_rng_state=False
            )
            # A mixture of several would be differentiated without this one's share, and nobody would notice.
            if not u_B.requires_grad:
                raise _no_gradient(f"expert {k}")
            return u_B

        return recomputed


def with_recomputed_experts(mixture: Mixture) -> Mixture:
    """Return a mixture whose gradient in x is computed one expert at a time."""
    experts = mixture.experts
    recomputed = RecomputedExperts(experts.experts, experts.arithmetic, experts.device)
    return replace(mixture, experts=recomputed)


@dataclass(frozen=True)
class DensityIntegrator:
    """Integrates the log-density of samples along their trajectories.

    Args:
        mixture: the experts and their posteriors.
        path: the ensemble's.
        strategy: what samples follow: the mixture of all experts, or one expert from pure noise to data.
        times: S + 1 times, ascending from 0 to 1.
        step: the solver's step.
        is_exact: whether probes are the unit vectors, whose terms add up to the trace.
        report_step: reports progress.

    Raises:
        MathError: samples of this strategy have no density that a trajectory gives.
    """

    mixture: Mixture
    path: Path
    strategy: Strategy
    times: Sequence[float]
    step: Step
    is_exact: bool
    report_step: StepReporter

    def __post_init__(self) -> None:
        if isinstance(self.strategy, Full) or self.strategy.keeps_first_expert:
            return
        # `sample` draws on the way, and selected experts change at borders where the velocity jumps: there the
        # trajectories of two samples meet or part, which the divergence on either side does not show.
        raise MathError(
            "strategy",
            expected="full, or lock with t_lock = 1",
            got=self.strategy.name,
            remedy="Compute the likelihood under full, which every strategy approximates.",
        )

    def of(self, rows: Tensor | slice) -> "DensityIntegrator":
        """Return the integrator of some of the samples."""
        return replace(self, mixture=self.mixture.of(rows))

    def log_density(self, x_0_B: Tensor, probe_BPD: Tensor) -> Tensor:
        """Return the log-density by each probe, float64, shape (B, P), or (B, 1) where it is exact.

        Args:
            x_0_B: samples at t = 0, shape (B, ...).
            probe_BPD: the probes of each.
        """
        if not self.strategy.keeps_first_expert:
            return self._integrate(self._mixture_velocity, x_0_B, probe_BPD)
        # An expert is drawn from the prior and then followed: p(x) = sum_k pi_k p_k(x).
        log_prior_BK = self.mixture.log_posterior(x_0_B, filled(x_0_B, 1.0))
        active_experts = log_prior_BK.isfinite().any(0).nonzero()[:, 0].tolist()
        densities = []
        for k in active_experts:
            # An expert without data of a sample's condition was never trained on the condition.
            rows = log_prior_BK[:, k].isfinite().nonzero()[:, 0]
            expert_velocity = self.of(rows)._expert_velocity(k)
            of_rows_RP = self._integrate(expert_velocity, x_0_B[rows], probe_BPD[rows])
            density_BP = of_rows_RP.new_zeros(len(x_0_B), of_rows_RP.shape[1])
            density_BP[rows] = of_rows_RP
            densities.append(density_BP)
        log_density_KBP = torch.stack(densities)
        log_mean_KB = log_density_KBP.mean(2)
        log_joint_KB = log_mean_KB + log_prior_BK.T[active_experts].to(log_mean_KB)
        # To first order in the deviations of the probes, so that the mean over them is the logarithm of the sum.
        share_KB = log_joint_KB.softmax(0)
        deviation_KBP = log_density_KBP - log_mean_KB[:, :, None]
        deviation_BP = (share_KB[:, :, None] * deviation_KBP).sum(0)
        return log_joint_KB.logsumexp(0)[:, None] + deviation_BP

    def _mixture_velocity(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        w_RK = self.mixture.weights(x_B, t_B)
        # At t = 1 the weights are the prior's, and where one expert is left its weight is 1.
        is_mixed = bool((t_B < 1).any()) and bool(((w_RK > 0) & (w_RK < 1)).any())
        if is_mixed and not w_RK.requires_grad:
            raise _no_gradient("router")
        return self.mixture.velocity(x_B, t_B, w_RK)

    def _expert_velocity(self, k: int) -> Velocity:
        def velocity(x_B: Tensor, t_B: Tensor) -> Tensor:
            # The weight of the one expert is 1 in both branches of guidance.
            w_RK = x_B.new_zeros(2 * len(x_B), len(self.mixture.experts))
            w_RK[:, k] = 1
            return self.mixture.velocity(x_B, t_B, w_RK)

        return velocity

    def _integrate(self, velocity: Velocity, x_0_B: Tensor, probe_BPD: Tensor) -> Tensor:
        """Follow one velocity from t = 0 to t = 1; see `log_density`."""
        num_dims = probe_BPD.shape[2]
        num_terms = probe_BPD.shape[1]
        if self.is_exact:
            num_terms = 1

        # Solvers add up velocities, so that they integrate the divergence as further coordinates of x.
        def joint_velocity(joint_B: Tensor, t_B: Tensor) -> Tensor:
            x_B = joint_B[:, :num_dims].reshape(x_0_B.shape)
            u_B, divergence_BP = velocity_and_divergence(velocity, x_B, t_B, probe_BPD)
            if self.is_exact:
                divergence_BP = divergence_BP.sum(1, keepdim=True)
            return torch.cat([u_B.flatten(1), divergence_BP], 1)

        def step(
            u: Velocity, x_B: Tensor, t: float, t_next: float, memory: SolverMemory
        ) -> tuple[Tensor, SolverMemory]:
            result = self.step(u, x_B, t, t_next, memory)
            self.report_step(len(x_B))
            return result

        joint_B = torch.cat([x_0_B.flatten(1), x_0_B.new_zeros(len(x_0_B), num_terms)], 1)
        memory = SolverMemory.empty(joint_B)
        joint_B, _ = follow(joint_velocity, joint_B, self.times, step, memory)
        x_1_BD = joint_B[:, :num_dims].double()
        integral_BP = joint_B[:, num_dims:].double()
        # On the schedules of diffusion models sigma is not quite 1 at t = 1; samples begin with this sigma too.
        variance = float(self.path.sigma(torch.ones(()))) ** 2
        square_B = x_1_BD.square().sum(1) / variance
        log_noise_B = -0.5 * (square_B + num_dims * log(2 * pi * variance))
        return log_noise_B[:, None] + integral_BP


def draw_probes(
    numbers: Sequence[int],
    num_dims: int,
    num_probes: int,
    seed: int,
) -> Tensor:
    """Return probes of some images, each with its own random stream: 1 or -1 with equal probability, (B, P, D)."""
    probe_BPD = np.empty((len(numbers), num_probes, num_dims), np.float32)
    for row, number in enumerate(numbers):
        generator = stream("divergence", seed, number)
        probe_BPD[row] = 2 * generator.integers(0, 2, (num_probes, num_dims)) - 1
    return torch.from_numpy(probe_BPD)


def unit_vectors(num_images: int, num_dims: int) -> Tensor:
    """Return the probes whose terms add up to the trace, of every image, (B, D, D)."""
    return torch.eye(num_dims).expand(num_images, -1, -1)


def width_of_bins(images: Tensor, levels: int, value_range: tuple[float, float]) -> float:
    """Return the distance of two neighbouring values of a pixel, of which the lowest and the highest are the range's.

    Raises:
        MathError: fewer than two levels, or images beyond the range.
    """
    levels = whole_number(levels, "levels", least=2)
    low, high = value_range
    bin_width = (high - low) / (levels - 1)
    if bool((images < low).any()) or bool((images > high).any()):
        raise MathError(
            "images",
            expected=f"values from {low:g} to {high:g}",
            got="values beyond them",
            remedy=f"Scale the images first: 0 becomes {low:g}, and {levels - 1} becomes {high:g}.",
        )
    return bin_width


def dequantize(images: Tensor, numbers: Sequence[int], bin_width: float, seed: int) -> Tensor:
    """Spread each value evenly over its bin, so that a density of continuous values bounds the whole numbers'.

    Source:
        Theis et al. 2016, section 3.1, arXiv 1511.01844.
    """
    noise = np.empty(tuple(images.shape))
    for row, number in enumerate(numbers):
        generator = stream("dequantization", seed, number)
        noise[row] = generator.random(tuple(images.shape[1:])) - 0.5
    spread = torch.from_numpy(noise).to(images.device) * bin_width
    return images + spread.to(images.dtype)


def velocity_and_divergence(
    velocity: Velocity,
    x_B: Tensor,
    t_B: Tensor,
    probe_BPD: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the velocity, shape (B, ...), and ``eps^T J eps`` of every probe, shape (B, P).

    Raises:
        MathError: torch cannot differentiate the velocity in x.
    """
    with torch.enable_grad():
        x_B = x_B.detach().requires_grad_()
        u_B = velocity(x_B, t_B)
    if not u_B.requires_grad:
        raise _no_gradient("velocity")
    products = []
    for eps_BD in probe_BPD.unbind(1):
        eps_B = eps_BD.to(u_B).reshape(u_B.shape)
        try:
            (gradient_B,) = torch.autograd.grad(u_B, x_B, eps_B, retain_graph=True)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            raise _no_gradient("velocity", first_line[:_MAX_SHOWN]) from error
        products.append((gradient_B * eps_B).flatten(1).sum(1))
    return u_B.detach(), torch.stack(products, 1)


def likelihood_step(solver: SolverName | Solver, path: Path) -> Step:
    """Return the step of a solver that may integrate a divergence beside x.

    Raises:
        MathError: there is no such solver, or it solves for x alone.
    """
    # Its step is linear in x and x_0, which a divergence does not have.
    if solver == "dpm":
        raise MathError("solver", expected="euler, heun, midpoint, rk4, or a function", got="dpm")
    return solver_step(solver, path)


def _no_gradient(subject: str, message: str = "no gradient") -> MathError:
    return MathError(
        subject,
        expected="a function of x that torch can differentiate",
        got=message,
        remedy="Compute it with torch alone, and neither detach x nor turn gradients off.",
    )
