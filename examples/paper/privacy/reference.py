"""Trains the non-private reference: networks on x_t itself, on every private image with its true silo."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddm.diffusion.path import LinearPath, x_t
from ddm.routers.base import Router
from examples.paper.privacy.worlds import PrivateWorld

VALIDATION_SHARE = 0.05
MIN_T = 0.02
NUM_CHECKS = 4
TEMPERATURES = (0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0)


class Mlp(nn.Module):
    """A perceptron on the pixels and the time."""

    def __init__(self, num_values: int, num_experts: int, hidden: int, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in (num_values + 4, hidden, hidden):
            layers += [
                nn.Linear(width, hidden),
                nn.LayerNorm(hidden),
                nn.SiLU(),
                nn.Dropout(dropout),
            ]
        self.layers = nn.Sequential(*layers, nn.Linear(hidden, num_experts))

    def forward(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """Return logits (B, K)."""
        logits: Tensor = self.layers(torch.cat([_scaled(x_B, t_B).flatten(1), _time(t_B)], 1))
        return logits


class ConvNet(nn.Module):
    """Three strided convolutions, modulated by the time."""

    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        widths = (1, width, 2 * width, 4 * width)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, 2, 1)
            for before, after in zip(widths, widths[1:], strict=False)
        )
        self.modulation = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 64), nn.SiLU(), nn.Linear(64, 2 * after))
            for after in widths[1:]
        )
        self.head = nn.Sequential(
            nn.LazyLinear(256), nn.SiLU(), nn.Dropout(0.2), nn.Linear(256, num_experts)
        )

    def forward(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """Return logits (B, K)."""
        h = _scaled(x_B, t_B)
        for convolve, modulate in zip(self.convolutions, self.modulation, strict=True):
            scale, shift = modulate(_time(t_B))[:, :, None, None].chunk(2, 1)
            h = F.silu(F.group_norm(convolve(h), 4) * (1 + scale) + shift)
        logits: Tensor = self.head(h.flatten(1))
        return logits


class Beside(nn.Module):
    """A network that corrects a router."""

    def __init__(self, net: nn.Module, router: Router, prior_K: Tensor) -> None:
        super().__init__()
        self.net = net
        self.router = router
        self.log_prior_K = prior_K.log().float()

    def forward(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """Return logits (B, K)."""
        with torch.no_grad():
            known_BK = self.router.log_likelihood(x_B, t_B).float()
        log_joint_BK: Tensor = self.net(x_B, t_B) + known_BK + self.log_prior_K
        return log_joint_BK


class Network:
    """A trained network as a router: its logits less the log of the silos' shares that it was trained with."""

    def __init__(self, net: nn.Module, prior_K: Tensor, temperature: float) -> None:
        self.net = net.eval()
        self.log_prior_K = prior_K.log().float()
        self.temperature = temperature
        self.num_experts = len(prior_K)

    @torch.inference_mode()
    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """See `ddm.routers.base.Router`."""
        log_likelihood_BK: Tensor = (self.net(x_B, t_B) / self.temperature).log_softmax(
            1
        ) - self.log_prior_K
        return log_likelihood_BK


@dataclass(frozen=True)
class Candidate:
    """A network that the reference is tuned over; `share` is its part of the training steps."""

    build: Callable[[], nn.Module]
    share: float


def candidates(world: PrivateWorld) -> dict[str, Candidate]:
    """The candidates for the reference, by name; the best on held-out private images is used."""
    num_values = world.test[0].numel()
    num_experts = len(world.silos)
    built = {"perceptron": Candidate(lambda: Mlp(num_values, num_experts, 512, 0.1), 1.0)}
    if world.test.shape[-1] >= 16:
        # as long as the other takes
        built["convolutional"] = Candidate(lambda: ConvNet(num_experts, 24), 0.25)
    else:
        built["smaller perceptron"] = Candidate(lambda: Mlp(num_values, num_experts, 128, 0.3), 1.0)
    return built


class Bench:
    """Private images with their silos, some held out: where networks are trained and compared."""

    def __init__(self, world: PrivateWorld, seed: int) -> None:
        self.world = world
        self.seed = seed
        x = torch.cat(world.silos)
        k = torch.arange(len(world.silos)).repeat_interleave(torch.tensor(world.num_units))
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        check, train = order.split([num := max(200, int(VALIDATION_SHARE * len(x))), len(x) - num])  # type: ignore[no-untyped-call]
        self._check = (x[check], k[check])
        self._train = (x[train], k[train])

    def best(self, num_steps: int, say: Callable[[str], None]) -> tuple[str, Network]:
        """Train every candidate; return the best by held-out private images."""
        trained = {}
        for name, candidate in candidates(self.world).items():
            torch.manual_seed(self.seed)
            trained[name] = self.train(candidate.build(), int(candidate.share * num_steps))
            say(f"reference: {name}, held-out cross-entropy {trained[name][0]:.4f}")
        name = min(trained, key=lambda each: trained[each][0])
        return name, trained[name][1]

    def beside(self, router: Router, num_steps: int, say: Callable[[str], None]) -> Network:
        """Train a network that corrects a router."""
        torch.manual_seed(self.seed)
        net = Mlp(self.world.test[0].numel(), len(self.world.silos), 512, 0.1)
        nn.init.zeros_(next(net.layers[-1].parameters()))  # its weight
        loss, network = self.train(Beside(net, router, self.world.prior_K), num_steps)
        say(f"reference: network beside exact counts, held-out cross-entropy {loss:.4f}")
        return network

    def train(self, net: nn.Module, num_steps: int) -> tuple[float, Network]:
        """Train one network; return its held-out cross-entropy at the best temperature, and the router."""
        _fit(net, *self._train, num_steps, self.seed)
        losses = _check(net, *self._check, self.seed)
        temperature = min(losses, key=lambda each: losses[each])
        return losses[temperature], Network(net, self.world.prior_K, temperature)


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
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()


@torch.inference_mode()
def _check(net: nn.Module, x: Tensor, k: Tensor, seed: int) -> dict[float, float]:
    """Return the cross-entropy at every temperature."""
    net.eval()
    generator = torch.Generator().manual_seed(seed + 1)
    logits = torch.cat([net(*_noised(x, generator)) for _ in range(NUM_CHECKS)])
    return {t: F.cross_entropy(logits / t, k.repeat(NUM_CHECKS)).item() for t in TEMPERATURES}


def _noised(x_0: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    t_B = MIN_T + (1 - MIN_T) * torch.rand(len(x_0), generator=generator)
    return x_t(LinearPath(), x_0, torch.randn(x_0.shape, generator=generator), t_B), t_B


def _scaled(x_B: Tensor, t_B: Tensor) -> Tensor:
    return x_B / ((1 - t_B).square() / 2 + t_B.square()).sqrt()[:, None, None, None]


def _time(t_B: Tensor) -> Tensor:
    return torch.stack([t_B, t_B.square(), t_B.clamp(min=0.01).log(), 1 - t_B], 1)
