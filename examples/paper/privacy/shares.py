"""Compares the silos' shares of samples under the private router with those under the exact one.

A router that always answers the prior keeps the shares as well, whatever it does to the images. So the shares of silos
*within each public cluster* are compared too: who a sample ends with, beside what it shows. Routers that know nothing,
or take one silo for another, must stand out there, else the comparison could not have shown anything.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from ddm.ensemble import Ensemble
from ddm.models import build_expert
from ddm.protocol.architecture import Dit
from ddm.protocol.learning import Training
from ddm.routers.base import Router
from ddm.sampling.strategies import Full, Lock, Strategy
from ddm.training.batches import Examples
from ddm.training.loop import TrainingRun, train
from ddm.training.objective import TrainingObjective
from examples.paper.privacy.public import PublicParts
from examples.paper.privacy.results import Shares
from examples.paper.privacy.worlds import PrivateWorld

STRATEGIES: dict[str, Strategy] = {"lock(.5)": Lock(0.5), "full": Full()}
STEPS = 16
_DRAWS = 4000


def architecture(world: PrivateWorld) -> Dit:
    """A small transformer: what these experts lack in quality the routers do not see."""
    side = world.test.shape[-1]
    return Dit(patch=4 if side >= 16 else 2, hidden=64, depth=3, heads=4)


def train_experts(
    world: PrivateWorld, folder: Path, num_steps: int, seed: int, say: Callable[[str], None]
) -> list[nn.Module]:
    """Train one expert a silo; an interrupted training goes on from its last checkpoint."""
    settings = Training(
        num_steps=num_steps,
        batch_size=64,
        learning_rate=2e-3,
        weight_decay=0.01,
        ema_decay=0.995,
        seed=seed,
    )
    shape = tuple(world.test.shape[1:])
    experts = []
    for k, images in enumerate(world.silos):
        expert = build_expert(architecture(world), shape, seed=seed)
        trained = train(
            expert,
            Examples(images),
            settings,
            TrainingObjective(),
            TrainingRun(folder / f"expert-{k}"),
        )
        expert.load_state_dict(trained.ema)
        experts.append(expert.eval().requires_grad_(False))
        say(
            f"expert {k + 1} of {len(world.silos)}: loss {trained.loss:.4f}, {trained.seconds:.0f} s"
        )
    return experts


class PriorOnly:
    """A control: knows nothing of x_t."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """See `ddm.routers.base.Router`."""
        return x_B.new_zeros(len(x_B), self.num_experts)


class Confused:
    """A control: takes each silo for the next one."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.num_experts = router.num_experts

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """See `ddm.routers.base.Router`."""
        return self.router.log_likelihood(x_B, t_B).roll(1, dims=1)


@dataclass(frozen=True)
class Sampler:
    """Draws samples of the same experts under any router.

    Attributes:
        world: the silos.
        parts: the public clusters that samples are sorted into.
        experts: one a silo.
        num: how many samples.
        seed: of the noise.
    """

    world: PrivateWorld
    parts: PublicParts
    experts: list[nn.Module]
    num: int
    seed: int

    def joint_shares(self, router: Router, strategy: Strategy, seed: int) -> np.ndarray:
        """Return the share of samples that end with each silo's expert in each coarse cluster, shape (K, C)."""
        shape = tuple(self.world.test.shape[1:])
        prior = self.world.prior_K.tolist()
        ensemble = Ensemble(experts=self.experts, router=router, prior=prior, shape=shape)
        samples = ensemble.sample(self.num, strategy=strategy, steps=STEPS, seed=seed)
        cluster_N = self.parts.coarse(samples.images.clamp(-1, 1))
        num_clusters = int(self.parts.clusters.coarse_F.max()) + 1
        cell_N = samples.expert_N * num_clusters + cluster_N
        counts = np.bincount(cell_N.numpy(), minlength=len(self.experts) * num_clusters)
        return counts.reshape(len(self.experts), num_clusters) / self.num

    def compare(
        self, private: Router, exact: Router, say: Callable[[str], None]
    ) -> tuple[Shares, ...]:
        """Compare shares under the private router, and under controls, with those under the exact one."""
        compared = []
        controls: dict[str, Router] = {
            "prior only": PriorOnly(len(self.experts)),
            "silos confused": Confused(exact),
        }
        for name, strategy in STRATEGIES.items():
            # Independent samples: with the same noise, two routers that answer alike draw the same silos by design.
            theirs = self.joint_shares(exact, strategy, self.seed + 1)
            ours = self.joint_shares(private, strategy, self.seed)
            shares = Shares(
                strategy=name,
                distance=total_variation(ours.sum(1), theirs.sum(1)),
                sampling_error=sampling_error(theirs.sum(1), self.num, self.seed),
                within=total_variation(ours, theirs),
                within_error=sampling_error(theirs, self.num, self.seed),
                controls={
                    label: total_variation(self.joint_shares(router, strategy, self.seed), theirs)
                    for label, router in controls.items()
                },
            )
            say(f"shares under {shares}")
            compared.append(shares)
        return tuple(compared)


def sampling_error(share: np.ndarray, num: int, seed: int) -> float:
    """Return what two independent sets of `num` samples with the same law differ by at most, 95 times in 100.

    Total variation distance of their shares, of any shape.
    """
    rng = np.random.default_rng(seed)
    first, second = (rng.multinomial(num, share.ravel(), size=_DRAWS) / num for _ in range(2))
    return float(np.quantile(np.abs(first - second).sum(1) / 2, 0.95))


def total_variation(first: np.ndarray, second: np.ndarray) -> float:
    """Return half the sum of absolute differences."""
    return float(np.abs(first - second).sum() / 2)
