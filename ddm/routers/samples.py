"""The samples router: a transformer on x_t itself, trained on images that the submitted experts draw.

It costs no statistic. It is as private as the experts' weights: not at all, where these were trained without noise.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ddm.diffusion.path import Experts, Path, expand_time, x_t
from ddm.diffusion.rng import stream
from ddm.diffusion.solver import integrate, uniform_times
from ddm.errors import NumericalError, ShapeError
from ddm.io.tensors import TensorSpec
from ddm.models.token_router import TokenRouter
from ddm.protocol.plan import Dit
from ddm.protocol.plan import SamplesRouter as Settings
from ddm.routers.base import Progress

# Shape legend: E experts, N images of one expert, B batch, ... all data dimensions.

_SOLVER_STEPS = 16
_DRAWN_TOGETHER = 256
_HELD_OUT_SHARE = 0.1
_BATCH = 128
_LEARNING_RATE = 1e-3
_WEIGHT_DECAY = 0.05
_CHECKS = 10
_CHECK_DRAWS = 4


class SamplesRouter:
    """``log p(x_t | e, t) = alpha_t net_e(x_t, t)``: exactly equal for all experts at t = 1.

    Args:
        net: trained with every expert equally often, so that it answers likelihoods.
        path: the probability path.
    """

    def __init__(self, net: TokenRouter, path: Path) -> None:
        self.num_experts = net.num_experts
        self.net = net.eval().requires_grad_(False)
        self.path = path

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """Return ``log p(x_t | e, t)`` up to a term common to all e, shape (B, E); equal for all e at t = 1.

        Args:
            x_B: noised images, shape (B, C, H, W).
            t_B: shape (B,), 0 is data, 1 is noise.
        """
        self.net.to(x_B.device)
        return _gated(self.net, x_B.float(), t_B.to(x_B.device, torch.float32), self.path)

    def tensors(self) -> dict[str, Tensor]:
        """Return what a release stores of this router."""
        return {f"net.{name}": tensor.detach() for name, tensor in self.net.state_dict().items()}

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], num_experts: int, shape: Sequence[int], settings: Settings, path: Path
    ) -> "SamplesRouter":
        """Rebuild the router from tensors loaded against `samples_router_specs`."""
        net = _build(num_experts, shape, settings)
        net.load_state_dict({k.removeprefix("net."): v for k, v in tensors.items() if k.startswith("net.")})
        return cls(net, path)


def samples_router_specs(num_experts: int, shape: Sequence[int], settings: Settings) -> dict[str, TensorSpec]:
    """Return the names, dtypes and shapes of a stored samples router."""
    with torch.device("meta"):
        state = _build(num_experts, shape, settings).state_dict()
    return {f"net.{name}": TensorSpec("F32", tuple(tensor.shape)) for name, tensor in state.items()}


@torch.no_grad()
def draw_from_experts(
    experts: Experts,
    shape: Sequence[int],
    num: int,
    seed: int,
    path: Path,
    on_progress: Progress | None,
    *,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Let every expert draw images by itself, one expert after the other.

    Args:
        experts: velocities on `path`.
        shape: one image.
        num: images of each.
        seed: of the noise that they start from.
        path: the probability path.
        on_progress: told experts done, experts in all, and nan, since nothing is lost yet.
        device: where the experts live.

    Returns:
        Shape (E, N, ...), float32, on the CPU.

    Raises:
        NumericalError: an expert draws images that are not finite.
    """
    drawn, times = [], uniform_times(_SOLVER_STEPS)
    for e in range(len(experts)):
        noise = torch.from_numpy(stream("router samples", seed, e).standard_normal((num, *shape), dtype="float32"))
        x_1 = noise * path.sigma(torch.ones(()))
        parts = [integrate(experts[e], part.to(device), times).cpu() for part in torch.split(x_1, _DRAWN_TOGETHER)]
        drawn.append(torch.cat(parts))
        if not bool(torch.isfinite(drawn[-1]).all()):
            raise NumericalError(f"expert {e}", expected="finite images", got="others")
        if on_progress:
            on_progress(e + 1, len(experts), float("nan"))
    return torch.stack(drawn)


def fit_samples(
    drawn_EN: Tensor,
    settings: Settings,
    path: Path,
    seed: int,
    on_progress: Progress | None = None,
    *,
    device: torch.device | str = "cpu",
) -> SamplesRouter:
    """Train the router by cross-entropy on noised images of every expert, each equally often, t uniform.

    The weights that held-out drawn images like best are kept, the untrained ones included.

    Args:
        drawn_EN: images drawn from the experts, shape (E, N, C, H, W).
        settings: the plan's sizes and number of steps.
        path: the probability path.
        seed: of initial weights, batches and noise.
        on_progress: called with step, number of steps, and held-out loss.
        device: where to train; the router is on the CPU afterwards.

    Raises:
        ShapeError: fewer than two images of each expert.
        NumericalError: the training diverged.
    """
    num_experts, num = drawn_EN.shape[:2]
    if num < 2:
        raise ShapeError("drawn images", expected="at least 2 of each expert", got=str(num))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = _build(num_experts, drawn_EN.shape[2:], settings)
    num_check = max(1, round(_HELD_OUT_SHARE * num))
    generator = torch.Generator().manual_seed(seed)
    check_EN = drawn_EN[:, :num_check].repeat(1, _CHECK_DRAWS, *[1] * (drawn_EN.dim() - 2))
    check = _noised(check_EN.flatten(0, 1), path, generator)
    _train(net.to(device), drawn_EN[:, num_check:], check, settings.num_steps, path, generator, on_progress)
    return SamplesRouter(net.cpu(), path)


def _train(
    net: TokenRouter,
    train_EN: Tensor,
    check: tuple[Tensor, Tensor],
    num_steps: int,
    path: Path,
    generator: torch.Generator,
    on_progress: Progress | None,
) -> None:
    num_experts, each = len(train_EN), max(1, _BATCH // len(train_EN))
    optimizer = torch.optim.AdamW(net.parameters(), lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    best, kept = _check(net, check, path), deepcopy(net.state_dict())
    every = max(1, num_steps // _CHECKS)
    for step in range(1, num_steps + 1):
        pick_EB = torch.randint(train_EN.shape[1], (num_experts, each), generator=generator)
        x_B = train_EN[torch.arange(num_experts)[:, None], pick_EB].flatten(0, 1)
        loss = _loss(net, *_noised(x_B, path, generator), path)
        if not bool(torch.isfinite(loss)):
            raise NumericalError("router training", expected="a finite loss", got="another")
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        if step % every and step != num_steps:
            continue
        now = _check(net, check, path)
        if now < best:
            best, kept = now, deepcopy(net.state_dict())
        if on_progress:
            on_progress(step, num_steps, now)
    net.load_state_dict(kept)


def _noised(x_B: Tensor, path: Path, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Carry images to uniform times."""
    t_B = torch.rand(len(x_B), generator=generator)
    return x_t(path, x_B, torch.randn(x_B.shape, generator=generator), t_B), t_B


@torch.no_grad()
def _check(net: TokenRouter, check: tuple[Tensor, Tensor], path: Path) -> float:
    return _loss(net, *check, path).item()


def _loss(net: TokenRouter, x_B: Tensor, t_B: Tensor, path: Path) -> Tensor:
    """Return the mean cross-entropy of rows that lie expert by expert, the same number of each; where the net is."""
    device = net.class_token.device
    label_B = torch.arange(net.num_experts, device=device).repeat_interleave(len(x_B) // net.num_experts)
    return cross_entropy(_gated(net, x_B.to(device), t_B.to(device), path), label_B)


def _gated(net: TokenRouter, x_B: Tensor, t_B: Tensor, path: Path) -> Tensor:
    answer_BE: Tensor = net(x_B, t_B)
    return expand_time(path.alpha(t_B), answer_BE) * answer_BE


def _build(num_experts: int, shape: Sequence[int], settings: Settings) -> TokenRouter:
    sizes = Dit(patch=settings.patch, hidden=settings.hidden, depth=settings.depth, heads=settings.heads)
    return TokenRouter(sizes, tuple(shape), num_experts)
