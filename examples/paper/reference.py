"""The non-private reference: networks on x_t itself, trained on every private image with its true silo."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from worlds import World

from ddm.schedule import LinearPath, x_t

VALIDATION_SHARE = 0.05
MIN_T = 0.02
NUM_CHECKS = 4


class Mlp(nn.Module):
    """A perceptron on the pixels and the time."""

    def __init__(self, num_values: int, num_experts: int, hidden: int, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in (num_values + 4, hidden, hidden):
            layers += [nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.SiLU(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers, nn.Linear(hidden, num_experts))

    def forward(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """Return logits (B, K)."""
        return self.layers(torch.cat([_scaled(x_B, t_B).flatten(1), _time(t_B)], 1))


class ConvNet(nn.Module):
    """Three strided convolutions, modulated by the time."""

    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        widths = (1, width, 2 * width, 4 * width)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, 2, 1) for before, after in zip(widths, widths[1:], strict=False)
        )
        self.modulation = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 64), nn.SiLU(), nn.Linear(64, 2 * after)) for after in widths[1:]
        )
        self.head = nn.Sequential(nn.LazyLinear(256), nn.SiLU(), nn.Dropout(0.2), nn.Linear(256, num_experts))

    def forward(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """Return logits (B, K)."""
        h = _scaled(x_B, t_B)
        for convolve, modulate in zip(self.convolutions, self.modulation, strict=True):
            scale, shift = modulate(_time(t_B))[:, :, None, None].chunk(2, 1)
            h = F.silu(F.group_norm(convolve(h), 4) * (1 + scale) + shift)
        return self.head(h.flatten(1))


class Network:
    """A trained network as a router: its logits less the log of the silos' shares that it was trained with."""

    def __init__(self, net: nn.Module, prior_K: Tensor) -> None:
        self.net = net.eval()
        self.log_prior_K = prior_K.log().float()
        self.num_experts = len(prior_K)

    @torch.inference_mode()
    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """See `ddm.routers.base.Router`."""
        return self.net(x_B, t_B) - self.log_prior_K


@dataclass(frozen=True)
class Candidate:
    """A network that the reference is tuned over; `share` is its part of the training steps."""

    build: Callable[[], nn.Module]
    share: float


def candidates(world: World) -> dict[str, Candidate]:
    """What the reference is tuned over, by name; the best on held-out private images is taken."""
    num_values, num_experts = world.test[0].numel(), len(world.silos)
    built = {"perceptron": Candidate(lambda: Mlp(num_values, num_experts, 512, 0.1), 1.0)}
    if world.test.shape[-1] >= 16:
        built["convolutional"] = Candidate(lambda: ConvNet(num_experts, 24), 0.25)  # as long as the other takes
    else:
        built["smaller perceptron"] = Candidate(lambda: Mlp(num_values, num_experts, 128, 0.3), 1.0)
    return built


def train_reference(world: World, seed: int, num_steps: int, say: Callable[[str], None]) -> tuple[str, Network]:
    """Train every candidate on the private images and return the best by held-out private images."""
    x = torch.cat(world.silos)
    k = torch.arange(len(world.silos)).repeat_interleave(torch.tensor(world.num_units))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    num_check = max(200, int(VALIDATION_SHARE * len(x)))
    check, train = order[:num_check], order[num_check:]
    found: list[tuple[float, str, nn.Module]] = []
    for name, candidate in candidates(world).items():
        torch.manual_seed(seed)
        net = candidate.build()
        _fit(net, x[train], k[train], int(candidate.share * num_steps), seed)
        loss = _check(net, x[check], k[check], seed)
        say(f"reference: {name}, held-out cross-entropy {loss:.4f}")
        found.append((loss, name, net))
    _, name, net = min(found, key=lambda each: each[0])
    return name, Network(net, world.prior_K)


def _fit(net: nn.Module, x: Tensor, k: Tensor, num_steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    net(x[:2], torch.full((2,), 0.5))  # shapes of lazy layers
    rate = 1.5e-3
    optimizer = torch.optim.AdamW(net.parameters(), rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, num_steps)
    for _ in range(num_steps):
        pick = torch.randint(len(x), (256,), generator=generator)
        loss = F.cross_entropy(net(*_noised(x[pick], generator)), k[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.inference_mode()
def _check(net: nn.Module, x: Tensor, k: Tensor, seed: int) -> float:
    net.eval()
    generator = torch.Generator().manual_seed(seed + 1)
    losses = [F.cross_entropy(net(*_noised(x, generator)), k) for _ in range(NUM_CHECKS)]
    return float(torch.stack(losses).mean())


def _noised(x_0: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    t_B = MIN_T + (1 - MIN_T) * torch.rand(len(x_0), generator=generator)
    return x_t(LinearPath(), x_0, torch.randn(x_0.shape, generator=generator), t_B), t_B


def _scaled(x_B: Tensor, t_B: Tensor) -> Tensor:
    return x_B / ((1 - t_B).square() / 2 + t_B.square()).sqrt()[:, None, None, None]


def _time(t_B: Tensor) -> Tensor:
    return torch.stack([t_B, t_B.square(), t_B.clamp(min=0.01).log(), 1 - t_B], 1)
