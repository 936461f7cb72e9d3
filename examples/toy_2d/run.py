"""Trains three experts on separate data and compares their ensemble's velocity with the closed form, in the plane.

`python examples/toy_2d/run.py --out DIR` trains one small network per silo, each on its own island alone, with the
library's training loop; makes a counts router from how many of its points each silo has in each public group; mixes
them with `ddm.Ensemble`; draws fields and samples into DIR/toy_2d.png, and samples alone into DIR/idea.png; and prints,
last, how far the mixture is from the closed form. Exit code 1 above the bound. Well under a minute of one thread; a
second run in the same folder takes the experts from the first one's checkpoints. `--weights uniform` and `--weights
top-1` combine the same experts wrongly and exceed the bound.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import pairwise
from math import pi
from pathlib import Path

import torch
from picture import draw_picture
from sklearn.cluster import KMeans
from torch import Tensor, nn
from torch.nn.functional import one_hot
from world import SHARES, SILOS, ToyWorld, islands

from ddm.diffusion.path import LinearPath
from ddm.ensemble import Ensemble, mix_velocity
from ddm.protocol.learning import Training
from ddm.routers.base import log_prior, posterior
from ddm.routers.counts import CountsRouter
from ddm.routers.sketch import Sketch
from ddm.training.batches import Examples
from ddm.training.loop import TrainingRun, train
from ddm.training.objective import TrainingObjective

# Shape legend: B batch, K silos, G public groups, D = 2 dimensions.

BOUND = 0.1
NUM_POINTS = 20_000
NUM_PUBLIC = 8_000
NUM_GROUPS = 24
NUM_CHECKED = 20_000
WEIGHTS = ("posterior", "uniform", "top-1")


class Field(nn.Module):
    """A velocity in the plane: a small network on x and on waves of x and t."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.waves: Tensor
        self.register_buffer("waves", pi * torch.tensor([0.25, 0.5, 1.0]), persistent=False)
        sizes = [3 * 7, width, width, width]
        hidden = [
            layer for one, two in pairwise(sizes) for layer in (nn.Linear(one, two), nn.SiLU())
        ]
        self.layers = nn.Sequential(*hidden, nn.Linear(width, 2))

    def forward(self, x_BD: Tensor, t_B: Tensor) -> Tensor:
        """Return u(x, t), (B, D)."""
        point = torch.cat([x_BD, t_B[:, None]], dim=1)
        phase = (point[..., None] * self.waves).flatten(1)
        answer: Tensor = self.layers(torch.cat([point, phase.sin(), phase.cos()], dim=1))
        return answer


def train_expert(points: Tensor, folder: Path, seed: int, num_steps: int) -> nn.Module:
    """Train one silo's expert on its own points; from its checkpoint where there is one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        field = Field()
    settings = Training(
        num_steps=num_steps,
        batch_size=256,
        learning_rate=0.005,
        weight_decay=0.0,
        ema_decay=0.99,
        seed=seed,
    )
    trained = train(
        field,
        Examples(points),
        settings,
        TrainingObjective(),
        TrainingRun(folder),
    )
    field.load_state_dict(trained.ema)
    return field.eval().requires_grad_(False)


def counts_router(public: Tensor, silos: Sequence[Tensor], seed: int) -> CountsRouter:
    """The library's counts router: public groups, and how much of each silo lies in each of them."""
    groups = KMeans(NUM_GROUPS, n_init=1, random_state=seed).fit(public.numpy())
    sketch = Sketch.fit(
        public, torch.from_numpy(groups.labels_).long(), rank=2, num_groups=NUM_GROUPS
    )
    held_KG = torch.stack(
        [
            torch.from_numpy(groups.predict(points.numpy())).long().bincount(minlength=NUM_GROUPS)
            for points in silos
        ]
    )
    return CountsRouter(sketch, (held_KG / held_KG.sum(1, keepdim=True)).log(), LinearPath())


def weights_at(ensemble: Ensemble, x_BD: Tensor, t_B: Tensor, kind: str) -> Tensor:
    """The weights (B, K) of the experts: the router's posterior, or a wrong combination."""
    num_experts = len(ensemble.experts)
    if kind == "uniform" or ensemble.router is None:
        return torch.full((len(x_BD), num_experts), 1 / num_experts)
    w_BK = posterior(ensemble.router, x_BD, t_B, log_prior(ensemble.prior, num_experts)).float()
    return one_hot(w_BK.argmax(1), num_experts).float() if kind == "top-1" else w_BK


def relative_error(world: ToyWorld, ensemble: Ensemble, kind: str, seed: int) -> float:
    """``sqrt(E |u_hat - u|^2 / E |u|^2)`` over t uniform in [0, 1] and x drawn from p_t."""
    random = torch.Generator().manual_seed(seed)
    t_B = torch.rand(NUM_CHECKED, generator=random)
    eps_BD = torch.randn(NUM_CHECKED, 2, generator=random)
    x_BD = (1 - t_B)[:, None] * world.draw(NUM_CHECKED, seed) + t_B[:, None] * eps_BD
    found_BD = mix_velocity(ensemble.experts, x_BD, t_B, weights_at(ensemble, x_BD, t_B, kind))
    exact_BD = world.velocity(x_BD.double(), t_B.double())
    return float(((found_BD - exact_BD).square().sum() / exact_BD.square().sum()).sqrt())


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, measure, draw; return the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500, help="training steps of each expert")
    parser.add_argument(
        "--weights", choices=WEIGHTS, default="posterior", help="how the experts are combined"
    )
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)

    world = islands()
    silos = [
        world.draw(round(NUM_POINTS * share), args.seed * 10 + k, k)
        for k, share in enumerate(SHARES)
    ]
    experts = []
    for k, (silo, points) in enumerate(zip(SILOS, silos, strict=True)):
        folder = args.out / "checkpoints" / f"{silo}-{args.seed}-{args.steps}"
        experts.append(train_expert(points, folder, args.seed * 10 + k, args.steps))
        print(f"trained {silo} on its own {len(points)} points alone")
    router = counts_router(world.draw(NUM_PUBLIC, args.seed + 1000), silos, args.seed)
    ensemble = Ensemble(experts, router, SHARES, shape=(2,), expert_ids=SILOS)

    errors = {kind: relative_error(world, ensemble, kind, args.seed + 2000) for kind in WEIGHTS}
    path = draw_picture(
        world, ensemble, lambda x, t: weights_at(ensemble, x, t, "uniform"), errors, args.out
    )
    print(f"fields and samples: {path}")
    for kind in WEIGHTS[1:]:
        print(
            f"the same experts, {kind} weights: relative error {errors[kind]:.3f}, a wrong combination"
        )
    error = errors[args.weights]
    print(
        f"relative error of the ensemble's velocity, {args.weights} weights: {error:.4f} (bound {BOUND:g})"
    )
    return int(not error <= BOUND)


if __name__ == "__main__":
    sys.exit(main())
