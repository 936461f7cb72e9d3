"""A small network on the sketch that corrects the mixture of Gaussians, trained on public images.

Every public image is in a public group, and the mixture states each silo's share of that group, which gives the label
``p(k | group)``. Public images can be noised to every t, so the network learns to correct the groups' Gaussians near
the data as well, and nothing further is drawn from private images.
"""

from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from ddm.diffusion.path import Path
from ddm.errors import NumericalError, ShapeError
from ddm.protocol.routers import LearnedSettings
from ddm.routers.base import LossCallback
from ddm.routers.counts import CountsRouter
from ddm.routers.sketch import Sketch

# Shape legend: K silos, G public groups, B batch, N public images, R sketch dimensions, I network inputs.

_NUM_TIME_FEATURES = 4
# Lower bound of times in the logarithm.
_EARLIEST = 0.01
_BATCH = 256
_LEARNING_RATE = 1e-3
_WEIGHT_DECAY = 0.1
_CHECK_SHARE = 0.25
_CHECK_DRAWS = 8
_NUM_CHECKS = 20
# Standard errors that a gain must exceed, since the best of many checks is kept.
_CLEAR = 2.0


class Residual(nn.Module):
    """A perceptron from a sketch and its time to one logit per silo; zero at initialisation, and at t = 1.

    Args:
        sketch: the public sketch; its groups' moments scale the input to unit variance at every t.
        num_silos: K.
        hidden: width of a layer.
        depth: number of hidden layers.
        path: the probability path.
    """

    def __init__(
        self,
        sketch: Sketch,
        num_silos: int,
        hidden: int,
        depth: int,
        path: Path,
    ) -> None:
        super().__init__()
        num_inputs = sketch.rank + _NUM_TIME_FEATURES
        widths = [num_inputs] + [hidden] * depth
        layers: list[nn.Module] = []
        for num_in, num_out in pairwise(widths):
            layers += [nn.Linear(num_in, num_out), nn.SiLU()]
        last = nn.Linear(hidden, num_silos)
        # Zero at the start: training that gains nothing leaves the mixture as it is.
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(*layers, last)
        self.path = path
        self.scale = sketch.scale
        self._variance_R = _public_variance(sketch)

    @property
    def is_nonzero(self) -> bool:
        """Whether the network has any effect; without a clear gain in training it stays at zero."""
        last = self.layers[-1]
        return any(bool(parameter.any()) for parameter in last.parameters())

    def forward(self, s_BR: Tensor, t_B: Tensor) -> Tensor:
        """Return ``alpha_t net(s, t)``, shape (B, K), float32; exactly 0 at t = 1, where every silo is the same noise.

        Args:
            s_BR: sketches ``s(x_t)``.
            t_B: their times.
        """
        t_B = t_B.to(s_BR.device, torch.float32)
        alpha_B = self.path.alpha(t_B)
        alpha_B1 = alpha_B[:, None]
        noise_B = self.path.sigma(t_B) / self.scale
        variance_R = self._variance_R.to(s_BR.device)
        variance_BR = alpha_B1.square() * variance_R + noise_B[:, None].square()
        # Of unit variance at every t.
        scaled_BR = s_BR.float() / variance_BR.sqrt()
        log_t_B = t_B.clamp(min=_EARLIEST).log()
        time_BI = torch.stack([t_B, t_B.square(), log_t_B, alpha_B], 1)
        net_BK: Tensor = self.layers(torch.cat([scaled_BR, time_BI], 1))
        return alpha_B1 * net_BK


@dataclass(frozen=True)
class PublicSketches:
    """The sketches and groups of public images, the network's training data.

    Attributes:
        s_NR: their sketches at t = 0, never clipped, float32.
        group_N: the public group of each.
        silo_N: the silo of each where it is known, as one owner knows the islands of all images.

    Raises:
        ShapeError: not one group per sketch, or fewer than four images.
    """

    s_NR: Tensor
    group_N: Tensor
    silo_N: Tensor | None = None

    def __post_init__(self) -> None:
        num_sketches = len(self.s_NR)
        num_with_group = len(self.group_N)
        if num_sketches != num_with_group or num_sketches < 4:
            got = f"{num_sketches} sketches and {num_with_group} groups"
            raise ShapeError("public images", expected="at least 4, with one group each", got=got)

    @classmethod
    def of(
        cls,
        images: Tensor,
        group_N: Tensor,
        sketch: Sketch,
        path: Path,
    ) -> "PublicSketches":
        """Sketch public images, shape (N, ...)."""
        at_data_N = torch.zeros(len(images))
        s_NR = sketch.of(images, at_data_N, path)
        return cls(s_NR.float(), group_N)


def fit_residual(
    mixture: CountsRouter,
    public: PublicSketches,
    prior_K: Tensor,
    settings: LearnedSettings,
    seed: int,
    on_progress: LossCallback | None = None,
) -> Residual:
    """Train the network by cross-entropy on public images, weighted to the silos' distribution over groups.

    The weights with the best loss on held-out public images are kept; without a gain of two standard errors the network
    stays at zero.

    Args:
        mixture: the silos' shares of the groups.
        public: the training data.
        prior_K: the silos' shares of all units.
        settings: the plan's sizes and number of steps.
        seed: the seed of batches, noise and initial weights.
        on_progress: called with step, number of steps, and held-out loss, nats.

    Raises:
        NumericalError: the training diverged.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        residual = Residual(
            mixture.sketch, mixture.num_experts, settings.hidden, settings.depth, mixture.path
        )
    data = _TrainingSet(mixture, public, prior_K.double(), seed)
    optimizer = torch.optim.AdamW(
        residual.parameters(), lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, _LEARNING_RATE, total_steps=settings.num_steps
    )
    start_N = data.check_losses(residual)
    best_loss = data.mean(start_N)
    best_weights = deepcopy(residual.state_dict())
    every = max(1, settings.num_steps // _NUM_CHECKS)
    for step in range(1, settings.num_steps + 1):
        loss = data.batch_loss(residual)
        if not bool(torch.isfinite(loss)):
            got = f"{float(loss)} at step {step}"
            raise NumericalError(
                "router training",
                expected="a finite loss",
                got=got,
                remedy='Use a smaller router.hidden or router.depth in the recipe, or router.kind = "counts".',
            )
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        if step % every and step != settings.num_steps:
            continue
        now_N = data.check_losses(residual)
        check_loss = data.mean(now_N)
        # Better than the best so far, and clearly better than no network at all.
        if check_loss < best_loss and data.gain_is_clear(start_N - now_N):
            best_loss = check_loss
            best_weights = deepcopy(residual.state_dict())
        if on_progress:
            on_progress(step, settings.num_steps, check_loss)
    residual.load_state_dict(best_weights)
    return residual.requires_grad_(False)


class _TrainingSet:
    """Public sketches with their labels and weights by the mixture, split into training and held-out images."""

    def __init__(
        self,
        mixture: CountsRouter,
        public: PublicSketches,
        prior_K: Tensor,
        seed: int,
    ) -> None:
        self.mixture = mixture
        self.log_prior_K = prior_K.log()
        self.generator = torch.Generator().manual_seed(seed)
        joint_KG = prior_K[:, None] * mixture.log_mass_KG.exp()
        num_silos, num_groups = joint_KG.shape
        total_G = joint_KG.sum(0)
        size_G = torch.bincount(public.group_N, minlength=num_groups).clamp(min=1)
        posterior_GK = (joint_KG / total_G).T
        self.target_NK = posterior_GK[public.group_N]
        self.weight_N = (total_G / size_G)[public.group_N]
        # Known labels take the place of those that the mixture states.
        if public.silo_N is not None:
            size_K = torch.bincount(public.silo_N, minlength=num_silos).clamp(min=1)
            one_hot_KK = torch.eye(num_silos, dtype=torch.float64)
            self.target_NK = one_hot_KK[public.silo_N]
            self.weight_N = (prior_K / size_K)[public.silo_N]
        self.public_NR = public.s_NR
        order_N = torch.randperm(len(self.public_NR), generator=self.generator)
        num_check = max(1, round(_CHECK_SHARE * len(order_N)))
        self.check = order_N[:num_check]
        self.train = order_N[num_check:]
        rows = self.check.repeat(_CHECK_DRAWS)
        # Drawn once: the losses of two checks then differ by the weights alone.
        self.check_s, self.check_t = self._noised(self.public_NR[rows])
        self.check_base = self._base(self.check_s, self.check_t)

    def batch_loss(self, residual: Residual) -> Tensor:
        """Return the mean loss of a batch sampled by weight."""
        pick = torch.multinomial(
            self.weight_N[self.train], _BATCH, replacement=True, generator=self.generator
        )
        rows = self.train[pick]
        s_BR, t_B = self._noised(self.public_NR[rows])
        logits_BK = self._base(s_BR, t_B) + residual(s_BR, t_B)
        return self._losses(logits_BK, rows).mean()

    @torch.no_grad()
    def check_losses(self, residual: Residual) -> Tensor:
        """Return the loss of each held-out image, averaged over times and noise, shape (N,)."""
        logits_BK = self.check_base + residual(self.check_s, self.check_t)
        rows = self.check.repeat(_CHECK_DRAWS)
        loss_B = self._losses(logits_BK, rows)
        return loss_B.view(_CHECK_DRAWS, -1).mean(0)

    def mean(self, loss_N: Tensor) -> float:
        """Return the weighted mean over held-out images."""
        weight_N = self.weight_N[self.check]
        weighted_sum = (weight_N * loss_N).sum()
        return float(weighted_sum / weight_N.sum())

    def gain_is_clear(self, gain_N: Tensor) -> bool:
        """Whether the weighted mean gain exceeds `_CLEAR` of its standard errors."""
        weight_N = self.weight_N[self.check]
        weight_N = weight_N / weight_N.sum()
        mean = float((weight_N * gain_N).sum())
        # Of a weighted mean of independent gains: the root of the sum of (weight x deviation)^2.
        deviation_N = weight_N * (gain_N - mean)
        standard_error = float(deviation_N.square().sum().sqrt())
        return mean > _CLEAR * standard_error

    def _noised(self, s_BR: Tensor) -> tuple[Tensor, Tensor]:
        """Return sketches noised to uniform times, and these times."""
        path = self.mixture.path
        t_B = torch.rand(len(s_BR), generator=self.generator)
        n_BR = torch.randn(s_BR.shape, generator=self.generator)
        noise_B = path.sigma(t_B) / self.mixture.sketch.scale
        alpha_B = path.alpha(t_B)
        noised_BR = alpha_B[:, None] * s_BR + noise_B[:, None] * n_BR
        return noised_BR, t_B

    @torch.no_grad()
    def _base(self, s_BR: Tensor, t_B: Tensor) -> Tensor:
        log_likelihood_BK = self.mixture.sketch_log_likelihood(s_BR, t_B)
        return (log_likelihood_BK + self.log_prior_K).float()

    def _losses(self, logits_BK: Tensor, rows: Tensor) -> Tensor:
        log_posterior_BK = logits_BK.log_softmax(1)
        return -(self.target_NK[rows] * log_posterior_BK).sum(1)


def _public_variance(sketch: Sketch) -> Tensor:
    """Return the variance of public sketches in each dimension, shape (R,), float32."""
    weight_G1 = sketch.group_weight_G.double()[:, None]
    mean_GR = sketch.group_mean_GR.double()
    variance_GR = sketch.group_cov_GRR.double().diagonal(dim1=1, dim2=2)
    # The law of total variance: that between the groups, and that within them.
    mean_R = (weight_G1 * mean_GR).sum(0)
    between_R = (weight_G1 * (mean_GR - mean_R).square()).sum(0)
    within_R = (weight_G1 * variance_GR).sum(0)
    return (between_R + within_R).float()
