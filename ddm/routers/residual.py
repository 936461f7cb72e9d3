"""A small network on the sketch that corrects the mixture of Gaussians, trained on public images.

Every public image lies in a public group, and the mixture states each silo's share of that group, which gives the label
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
from ddm.routers.base import Progress
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
        widths = [sketch.rank + _NUM_TIME_FEATURES] + [hidden] * depth
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
        return any(bool(parameter.any()) for parameter in self.layers[-1].parameters())

    def forward(self, s_BR: Tensor, t_B: Tensor) -> Tensor:
        """Return ``alpha_t net(s, t)``, shape (B, K), float32; exactly 0 at t = 1, where every silo is the same noise.

        Args:
            s_BR: sketches ``s(x_t)``.
            t_B: their times.
        """
        t_B = t_B.to(s_BR.device, torch.float32)
        alpha_B = self.path.alpha(t_B)
        noise_B = self.path.sigma(t_B) / self.scale
        data_variance_BR = alpha_B[:, None].square() * self._variance_R.to(s_BR.device)
        variance_BR = data_variance_BR + noise_B[:, None].square()
        time_BI = torch.stack([t_B, t_B.square(), t_B.clamp(min=_EARLIEST).log(), alpha_B], 1)
        net_BK: Tensor = self.layers(torch.cat([s_BR.float() / variance_BR.sqrt(), time_BI], 1))
        return alpha_B[:, None] * net_BK


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
        if len(self.s_NR) != len(self.group_N) or len(self.s_NR) < 4:
            got = f"{len(self.s_NR)} sketches and {len(self.group_N)} groups"
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
        return cls(sketch.of(images, torch.zeros(len(images)), path).float(), group_N)


def fit_residual(
    mixture: CountsRouter,
    public: PublicSketches,
    prior_K: Tensor,
    settings: LearnedSettings,
    seed: int,
    on_progress: Progress | None = None,
) -> Residual:
    """Train the network by cross-entropy on public images, weighted to the silos' distribution over groups.

    The weights with the best loss on held-out public images are kept; without a gain of two standard errors the network
    stays at zero.

    Args:
        mixture: the silos' shares of the groups.
        public: the training data.
        prior_K: the silos' shares of all units.
        settings: the plan's sizes and number of steps.
        seed: of batches, noise and initial weights.
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
            raise NumericalError("router training", expected="a finite loss", got=got)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        if step % every and step != settings.num_steps:
            continue
        now_N = data.check_losses(residual)
        # Better than the best so far, and clearly better than no network at all.
        if data.mean(now_N) < best_loss and data.gain_is_clear(start_N - now_N):
            best_loss = data.mean(now_N)
            best_weights = deepcopy(residual.state_dict())
        if on_progress:
            on_progress(step, settings.num_steps, data.mean(now_N))
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
        size_G = torch.bincount(public.group_N, minlength=joint_KG.shape[1]).clamp(min=1)
        self.target_NK = (joint_KG / joint_KG.sum(0)).T[public.group_N]
        self.weight_N = (joint_KG.sum(0) / size_G)[public.group_N]
        # Known labels take the place of those that the mixture states.
        if public.silo_N is not None:
            size_K = torch.bincount(public.silo_N, minlength=len(prior_K)).clamp(min=1)
            self.target_NK = torch.eye(len(prior_K), dtype=torch.float64)[public.silo_N]
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
        return self._losses(self._base(s_BR, t_B) + residual(s_BR, t_B), rows).mean()

    @torch.no_grad()
    def check_losses(self, residual: Residual) -> Tensor:
        """Return the loss of each held-out image, averaged over times and noise, shape (N,)."""
        logits_BK = self.check_base + residual(self.check_s, self.check_t)
        losses = self._losses(logits_BK, self.check.repeat(_CHECK_DRAWS))
        return losses.view(_CHECK_DRAWS, -1).mean(0)

    def mean(self, loss_N: Tensor) -> float:
        """Return the weighted mean over held-out images."""
        weight_N = self.weight_N[self.check]
        return float((weight_N * loss_N).sum() / weight_N.sum())

    def gain_is_clear(self, gain_N: Tensor) -> bool:
        """Whether the weighted mean gain exceeds `_CLEAR` of its standard errors."""
        weight_N = self.weight_N[self.check] / self.weight_N[self.check].sum()
        mean = float((weight_N * gain_N).sum())
        standard_error = float((weight_N * (gain_N - mean)).square().sum().sqrt())
        return mean > _CLEAR * standard_error

    def _noised(self, s_BR: Tensor) -> tuple[Tensor, Tensor]:
        """Return sketches noised to uniform times, and these times."""
        path = self.mixture.path
        t_B = torch.rand(len(s_BR), generator=self.generator)
        n_BR = torch.randn(s_BR.shape, generator=self.generator)
        noise_B1 = (path.sigma(t_B) / self.mixture.sketch.scale)[:, None]
        return path.alpha(t_B)[:, None] * s_BR + noise_B1 * n_BR, t_B

    @torch.no_grad()
    def _base(self, s_BR: Tensor, t_B: Tensor) -> Tensor:
        return (self.mixture.sketch_log_likelihood(s_BR, t_B) + self.log_prior_K).float()

    def _losses(self, logits_BK: Tensor, rows: Tensor) -> Tensor:
        return -(self.target_NK[rows] * logits_BK.log_softmax(1)).sum(1)


def _public_variance(sketch: Sketch) -> Tensor:
    """Return the variance of public sketches in each dimension, shape (R,), float32."""
    weight_G1 = sketch.group_weight_G.double()[:, None]
    mean_GR = sketch.group_mean_GR.double()
    spread_R = (weight_G1 * (mean_GR - (weight_G1 * mean_GR).sum(0)).square()).sum(0)
    within_R = (weight_G1 * sketch.group_cov_GRR.double().diagonal(dim1=1, dim2=2)).sum(0)
    return (spread_R + within_R).float()
