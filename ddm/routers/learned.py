"""The learned router: what do the noised sketches add to the counts?

Two parts. (a) The mixture's shares, refitted by maximum a posteriori under the sketches' known noise with the counts
release as evidence: valid for every t. (b) A small network on top, ``log p = (a) + g(t) net(s, t)``, with g = 0 below
t_release, where no sketch was ever seen, and at t = 1, where every expert is the same noise.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddm.errors import NumericalError, ShapeError
from ddm.protocol.plan import LearnedRouter as Settings
from ddm.routers.counts import CountsRouter, counts_router_specs
from ddm.schedule import Path
from ddm.sketch import Sketch
from ddm.tensors import TensorSpec

# Shape legend: K experts, G public groups, B batch, N sketches of one silo, R sketch dimensions.

HELD_OUT_SHARE = 0.2
_RAMP = 0.2  # share of [t_release, 1] over which g rises from 0
_EM_STEPS = 500
_EM_TOLERANCE = 1e-10
_BATCH = 256
_LEARNING_RATE = 1e-3
_WEIGHT_DECAY = 0.1
_CHECKS = 20
_CHECK_DRAWS = 16
_CLEAR = 2.0

Progress = Callable[[int, int, float], None]


class Residual(nn.Module):
    """A perceptron from a sketch and its noise level to one number per expert; starts at zero."""

    def __init__(self, rank: int, num_experts: int, hidden: int, depth: int) -> None:
        super().__init__()
        widths = [rank + 1] + [hidden] * depth
        layers: list[nn.Module] = []
        for num_in, num_out in pairwise(widths):
            layers += [nn.Linear(num_in, num_out), nn.SiLU()]
        last = nn.Linear(hidden, num_experts)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(*layers, last)

    @property
    def speaks(self) -> bool:
        """Does the network say anything, or was it set back to zero?"""
        return any(bool(parameter.any()) for parameter in self.layers[-1].parameters())

    def forward(self, input_BI: Tensor) -> Tensor:
        """Return shape (B, K)."""
        return torch.as_tensor(self.layers(input_BI))


class LearnedRouter:
    """Refitted mixture and residual.

    Args:
        mixture: a counts router whose shares were refitted on sketches.
        residual: the network.
        t_release: noise level of the sketches; the network is silent below it.
    """

    def __init__(self, mixture: CountsRouter, residual: Residual, t_release: float) -> None:
        self.num_experts = mixture.num_experts
        self.mixture = mixture
        self.residual = residual.requires_grad_(False)
        self.t_release = t_release

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """Return ``log p(x_t | k, t)`` up to a term common to all k, shape (B, K); equal for all k at t = 1.

        Args:
            x_B: noised images, shape (B, ...).
            t_B: shape (B,), 0 is data, 1 is noise.
        """
        return self.sketch_log_likelihood(self.mixture.sketch.of(x_B, t_B, self.mixture.path), t_B)

    def sketch_log_likelihood(self, s_BR: Tensor, t_B: Tensor) -> Tensor:
        """Return `log_likelihood` of sketches ``s(x_t)``, shape (B, K)."""
        base_BK = self.mixture.sketch_log_likelihood(s_BR, t_B)
        if not bool((t_B > self.t_release).any()):
            return base_BK
        return base_BK + self.correction(s_BR, t_B).to(base_BK)

    def correction(self, s_BR: Tensor, t_B: Tensor) -> Tensor:
        """Return ``g(t) net(s, t)``, shape (B, K), float32."""
        t_B = t_B.to(s_BR.device, torch.float32)
        beyond_B = ((t_B - self.t_release) / (1 - self.t_release)).clamp(0.0, 1.0)
        rise_B = (beyond_B / _RAMP).clamp(max=1.0)
        gate_B = rise_B.square() * (3 - 2 * rise_B) * (1 - beyond_B)
        noise_B = (self.mixture.path.sigma(t_B) / self.mixture.sketch.scale).clamp(min=1e-6)
        input_BI = torch.cat([s_BR.float() / noise_B[:, None], beyond_B[:, None]], dim=1)
        net_BK: Tensor = self.residual.to(s_BR.device)(input_BI)
        return gate_B[:, None] * net_BK

    def tensors(self) -> dict[str, Tensor]:
        """Return what a release stores of this router; the sketch is the plan's, t_release the manifest's."""
        return self.mixture.tensors() | {f"residual.{k}": v.detach() for k, v in self.residual.state_dict().items()}

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], sketch: Sketch, settings: Settings, path: Path, t_release: float
    ) -> "LearnedRouter":
        """Rebuild the router from tensors loaded against `learned_router_specs`."""
        mixture = CountsRouter.from_tensors(tensors, sketch, path)
        residual = Residual(sketch.rank, mixture.num_experts, settings.hidden, settings.depth)
        prefix = "residual."
        residual.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
        return cls(mixture, residual, t_release)


def learned_router_specs(num_experts: int, num_groups: int, rank: int, settings: Settings) -> dict[str, TensorSpec]:
    """Return the names, dtypes and shapes of a stored learned router."""
    with torch.device("meta"):
        state = Residual(rank, num_experts, settings.hidden, settings.depth).state_dict()
    residual = {f"residual.{name}": TensorSpec("F32", tuple(tensor.shape)) for name, tensor in state.items()}
    return counts_router_specs(num_experts, num_groups) | residual


def split_sketches(
    sketches: Mapping[str, Tensor], seed: int, share: float = HELD_OUT_SHARE
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Set `share` of every silo's sketches aside (at least one), so that a trained router can be judged on them.

    Returns:
        The sketches to train on and those held out, by silo.

    Raises:
        ShapeError: a silo has fewer than two sketches.
    """
    train, held_out = {}, {}
    generator = torch.Generator().manual_seed(seed)
    for silo, s_NR in sketches.items():
        if len(s_NR) < 2:
            raise ShapeError(f"sketches of {silo}", expected="at least 2", got=str(len(s_NR)))
        order_N = torch.randperm(len(s_NR), generator=generator)
        num = max(1, round(share * len(s_NR)))
        held_out[silo], train[silo] = s_NR[order_N[:num]], s_NR[order_N[num:]]
    return train, held_out


def fit_learned(
    counts_router: CountsRouter,
    sketches: Mapping[str, Tensor],
    num_units: Sequence[int],
    settings: Settings,
    path: Path,
    seed: int,
    on_progress: Progress | None = None,
    *,
    t_release: float,
) -> LearnedRouter:
    """Train the router on released sketches.

    Args:
        counts_router: of the same plan; its shares and their errors are the evidence that the refit starts from.
        sketches: released sketches (N, R) at `t_release` by silo, in the order of the router's experts.
        num_units: the public number of units of each expert.
        settings: the plan's sizes and number of steps.
        path: the probability path.
        seed: of batches, re-noising and initial weights; the sketches have their privacy already.
        on_progress: called with step, number of steps, and held-out loss.
        t_release: noise level of the sketches.

    Raises:
        ShapeError: another number of silos than experts.
        NumericalError: the training diverged.
    """
    if len(sketches) != counts_router.num_experts or len(num_units) != counts_router.num_experts:
        raise ShapeError("sketches", expected=f"{counts_router.num_experts} silos", got=str(len(sketches)))
    mixture = refit_shares(counts_router, list(sketches.values()), num_units, t_release)
    train, check = split_sketches(sketches, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        residual = Residual(mixture.sketch.rank, mixture.num_experts, settings.hidden, settings.depth)
    router = LearnedRouter(mixture, residual, t_release)
    _train_residual(router, list(train.values()), list(check.values()), settings.num_steps, seed, on_progress)
    return router


def refit_shares(
    counts_router: CountsRouter, sketches: Sequence[Tensor], num_units: Sequence[int], t_release: float
) -> CountsRouter:
    """Return the mixture whose shares best explain counts and sketches together, by expectation-maximisation.

    The counts release enters as Gamma evidence on each count, of its posterior mean and variance; in log space its mode
    is the counts router itself, which is what no sketches would give back.

    Args:
        counts_router: shares known from the counts release, with errors.
        sketches: released sketches (N, R) at `t_release`, one tensor per expert.
        num_units: the public number of units of each expert.
        t_release: noise level of the sketches.
    """
    rows = []
    for log_mass_G, error_G, s_NR, n in zip(
        counts_router.log_mass_KG, counts_router.error_KG, sketches, num_units, strict=True
    ):
        at_N = torch.full((len(s_NR),), t_release, dtype=torch.float64)
        log_NG = counts_router.group_log_density(s_NR.double(), at_N)
        rows.append(_em(log_mass_G.exp(), error_G, (log_NG - log_NG.amax(1, keepdim=True)).exp(), n))
    mass_KG = torch.stack(rows)
    return CountsRouter(counts_router.sketch, mass_KG.log(), counts_router.path, counts_router.error_KG)


def _em(mass_G: Tensor, error_G: Tensor, density_NG: Tensor, num_units: int) -> Tensor:
    """Maximise ``sum_i log sum_c mass_c density_ic + sum_c shape_c log mass_c - rate_c n mass_c`` on the simplex."""
    error_G = error_G.clamp(min=1e-9)
    shape_G, rate_G = (mass_G / error_G).square(), mass_G / error_G.square()  # rate per unit of mass
    for _ in range(_EM_STEPS):
        joint_NG = mass_G * density_NG
        expected_G = (joint_NG / joint_NG.sum(1, keepdim=True)).sum(0) + shape_G
        new_G = _on_simplex(expected_G, rate_G)
        change, mass_G = float((new_G - mass_G).abs().sum()), new_G
        if change < _EM_TOLERANCE:
            break
    return mass_G


def _on_simplex(expected_G: Tensor, rate_G: Tensor) -> Tensor:
    """Return ``expected / (lambda + rate)`` with the lambda that makes it sum to 1, by bisection."""
    low = float((expected_G - rate_G).max())  # here one entry alone is at least 1
    high = float(expected_G.sum() - rate_G.min())
    for _ in range(200):
        middle = (low + high) / 2
        if float((expected_G / (middle + rate_G)).sum()) > 1:
            low = middle
        else:
            high = middle
    mass_G = expected_G / (high + rate_G)
    return mass_G / mass_G.sum()


def _train_residual(
    router: LearnedRouter,
    train: Sequence[Tensor],
    check: Sequence[Tensor],
    num_steps: int,
    seed: int,
    on_progress: Progress | None,
) -> None:
    """Train by cross-entropy on re-noised sketches, every expert equally often; keep what held-out sketches prefer.

    Equal sampling adds the same log rho to every logit, so none is taken off. Below a gain of `_CLEAR`
    standard errors the network goes back to zero: with few sketches it must stay silent.
    """
    generator = torch.Generator().manual_seed(seed)
    residual = router.residual.requires_grad_(True)
    optimizer = torch.optim.AdamW(residual.parameters(), lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY)
    checks = [_batch_of(router, s_NR.repeat(_CHECK_DRAWS, 1), generator) for s_NR in check]
    start = _held_out_losses(router, checks)
    best, kept = _mean(start), deepcopy(residual.state_dict())
    every = max(1, num_steps // _CHECKS)
    each = max(1, _BATCH // len(train))
    label_B = torch.arange(len(train)).repeat_interleave(each)
    for step in range(1, num_steps + 1):
        s_BR = torch.cat([_pick(s_NR, each, generator) for s_NR in train])
        loss = _loss(router, *_batch_of(router, s_BR, generator), label_B).mean()
        if not bool(torch.isfinite(loss)):
            raise NumericalError("router training", expected="a finite loss", got="another")
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        if step % every and step != num_steps:
            continue
        losses = _held_out_losses(router, checks)
        if _mean(losses) < best and _gain_is_clear(start, losses):
            best, kept = _mean(losses), deepcopy(residual.state_dict())
        if on_progress:
            on_progress(step, num_steps, _mean(losses))
    residual.load_state_dict(kept)
    residual.requires_grad_(False)


def _pick(s_NR: Tensor, num: int, generator: torch.Generator) -> Tensor:
    return s_NR[torch.randint(len(s_NR), (num,), generator=generator)]


def _batch_of(router: LearnedRouter, s_BR: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Carry released sketches to uniform times in [t_release, 1)."""
    t_B = router.t_release + (1 - router.t_release) * torch.rand(len(s_BR), generator=generator)
    t_B = t_B.clamp(min=router.t_release)
    mixture = router.mixture
    return mixture.sketch.renoise(s_BR, router.t_release, t_B, mixture.path, generator), t_B


def _loss(router: LearnedRouter, s_BR: Tensor, t_B: Tensor, label_B: Tensor) -> Tensor:
    """Return the cross-entropy of each row under equal priors."""
    return cross_entropy(router.sketch_log_likelihood(s_BR, t_B), label_B, reduction="none")


@torch.no_grad()
def _held_out_losses(router: LearnedRouter, checks: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return each held-out sketch's loss, averaged over its re-noisings, one tensor per expert."""
    losses = (_loss(router, s_BR, t_B, torch.full((len(t_B),), k)) for k, (s_BR, t_B) in enumerate(checks))
    return [loss_B.view(_CHECK_DRAWS, -1).mean(0) for loss_B in losses]


def _mean(losses: Sequence[Tensor]) -> float:
    return float(torch.stack([loss_N.mean() for loss_N in losses]).mean())


def _gain_is_clear(start: Sequence[Tensor], now: Sequence[Tensor]) -> bool:
    """Is the paired gain over `start` more than `_CLEAR` of its standard errors?"""
    gains = [before_N - after_N for before_N, after_N in zip(start, now, strict=True)]
    errors = [gain_N.var(correction=0) / max(len(gain_N) - 1, 1) for gain_N in gains]
    return _mean(gains) > _CLEAR * float(torch.stack(errors).sum().sqrt()) / len(gains)
