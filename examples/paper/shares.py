"""Do samples keep the silos' shares? Trained experts under the private router and under the exact one."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import nn
from worlds import World

from ddm.ensemble import Ensemble
from ddm.models import build_expert
from ddm.protocol.plan import Dit, Training, UniformT
from ddm.routers.base import Router
from ddm.schedule import LinearPath
from ddm.strategies import Full, Lock, Strategy
from ddm.training import train

STRATEGIES: dict[str, Strategy] = {"lock(.5)": Lock(0.5), "full": Full()}
STEPS = 16
_DRAWS = 4000


def architecture(world: World) -> Dit:
    """A small transformer: what these experts lack in quality the routers do not see."""
    side = world.test.shape[-1]
    return Dit(patch=4 if side >= 16 else 2, hidden=64, depth=3, heads=4)


def train_experts(world: World, folder: Path, num_steps: int, seed: int, say: Callable[[str], None]) -> list[nn.Module]:
    """Train one expert a silo; an interrupted training goes on from its last checkpoint."""
    settings = Training(
        num_steps=num_steps,
        batch_size=64,
        learning_rate=2e-3,
        weight_decay=0.01,
        ema_decay=0.995,
        checkpoint_steps=min(200, num_steps),
        seed=seed,
    )
    shape = tuple(world.test.shape[1:])
    experts = []
    for k, images in enumerate(world.silos):
        expert = build_expert(architecture(world), shape, seed=seed)
        trained = train(
            expert,
            images,
            settings,
            LinearPath(),
            UniformT(),
            checkpoint_dir=folder / f"expert-{k}",
            on_progress=lambda progress: None,
            should_stop=lambda: False,
        )
        expert.load_state_dict(trained.ema)
        experts.append(expert.eval().requires_grad_(False))
        say(f"expert {k + 1} of {len(world.silos)}: loss {trained.loss:.4f}, {trained.seconds:.0f} s")
    return experts


def silo_shares(
    world: World, experts: list[nn.Module], router: Router, strategy: Strategy, num: int, seed: int
) -> np.ndarray:
    """Return the share of samples that end with each silo's expert, shape (K,)."""
    ensemble = Ensemble(experts=experts, router=router, prior=world.prior_K.tolist(), shape=tuple(world.test.shape[1:]))
    samples = ensemble.sample(num, strategy=strategy, steps=STEPS, seed=seed)
    return np.bincount(samples.expert_N.numpy(), minlength=len(experts)) / num


def sampling_error(share_K: np.ndarray, num: int, seed: int) -> float:
    """Return what two independent sets of `num` samples with the same law differ by at most, 95 times in 100.

    Total variation distance of their silo shares.
    """
    rng = np.random.default_rng(seed)
    first, second = (rng.multinomial(num, share_K, size=_DRAWS) / num for _ in range(2))
    return float(np.quantile(np.abs(first - second).sum(1) / 2, 0.95))


def total_variation(first: np.ndarray, second: np.ndarray) -> float:
    """Return half the sum of absolute differences."""
    return float(np.abs(first - second).sum() / 2)
