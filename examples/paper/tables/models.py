"""Trains monoliths and ensembles with the library's own functions, each once, resumable, in a folder of its own."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from time import monotonic

import numpy as np
import torch
from torch import Tensor, nn

from ddm.diffusion.path import LinearPath
from ddm.ensemble import Ensemble
from ddm.io.files import write_atomic
from ddm.io.tensors import save_tensors
from ddm.islands.arrays import map_array
from ddm.islands.assemble import assemble
from ddm.islands.data import Dataset
from ddm.islands.folder import Islands
from ddm.islands.recipe import IslandsRecipe
from ddm.islands.split import split
from ddm.islands.train import train_island
from ddm.loading.ensemble import open_ensemble
from ddm.models import build_expert, count_flops, load_expert
from ddm.planning.training import TrainingRecipe
from ddm.protocol.base import File
from ddm.protocol.plan import LogitNormalT
from ddm.routers.samples import training_flops as router_flops
from ddm.system.console import progress
from ddm.system.devices import device_named
from ddm.training.config import Engine, TrainingSettings
from ddm.training.loop import Progress, train
from examples.paper.tables.clock import Clock
from examples.paper.tables.contents import Experts, Monolith
from examples.paper.tables.data import World
from examples.paper.tables.presets import Preset
from examples.paper.tables.results import Cost

# Shape legend: B batch, N images, K experts.

_PASSPHRASE = b"of a folder that is thrown away"
_FINE, _GROUPS = 256, 64
_HELD_OUT = 0.1  # of the images that a router is fitted on: judging it takes longer than fitting it
_WEIGHTS, _RECORD = "model.safetensors", "cost.json"


@dataclass(frozen=True)
class Made:
    """A trained model, ready to sample.

    Attributes:
        ensemble: of one expert for a monolith.
        cost: of its training.
        own_K: the training images of each expert, by their rows; empty for a monolith.
    """

    ensemble: Ensemble
    cost: Cost
    own_K: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Workshop:
    """Where models are trained.

    Attributes:
        world: the data set.
        preset: the sizes.
        out: the folder of models and columns.
        clock: says when to stop.
        device: where to compute.
    """

    world: World
    preset: Preset
    out: Path
    clock: Clock
    device: torch.device = device_named()

    def monolith(self, source: Monolith, rate: float, seed: int, name: str) -> Made:
        """Train one model on all images for as many operations as an ensemble and its router take.

        Args:
            source: which.
            rate: learning rate.
            seed: of weights and batches.
            name: of its folder.
        """
        folder, shape = self.out / name, self.world.data.shape
        settings = self._training(source.budget, self.preset.batch_size, rate, seed)
        each = count_flops(self.preset.network, shape)[1] * settings.batch_size
        extra = ceil(self._router_flops(source.budget, self.preset.num_islands) / each)
        settings = settings.model_copy(update={"num_steps": settings.num_steps + extra})
        if not (folder / _RECORD).exists():
            folder.mkdir(parents=True, exist_ok=True)
            model = build_expert(self.preset.network, shape, seed=seed)
            with progress(f"{name}: training") as tell, self.clock.while_training() as is_over:
                trained = train(
                    model,
                    self.world.train.images,
                    settings.plain(self.preset.network),
                    LinearPath(),
                    LogitNormalT(),
                    checkpoint_dir=folder / "checkpoints",
                    on_progress=lambda done: tell(done.step, done.num_steps),
                    should_stop=is_over,
                    engine=Engine(device="cuda" if self.device.type == "cuda" else "cpu"),
                )
            save_tensors(folder / _WEIGHTS, trained.ema)
            cost = Cost(
                steps=trained.steps,
                batch_size=settings.batch_size,
                learning_rate=rate,
                flops=trained.flops,
                router_flops=0.0,
                seconds=trained.seconds,
            )
            write_atomic(folder / _RECORD, cost.model_dump_json(indent=1).encode())
            shutil.rmtree(folder / "checkpoints")
        file = File.of(_WEIGHTS, folder / _WEIGHTS)
        expert = load_expert(self.preset.network, shape, folder, file).to(self.device)
        cost = Cost.model_validate_json((folder / _RECORD).read_bytes())
        ensemble = Ensemble([expert], None, [1.0], shape, device=self.device, chunk_size=self.preset.chunk)
        return Made(ensemble, cost)

    def experts(self, source: Experts, rate: float, seed: int, name: str) -> Made:
        """Split, train and assemble an ensemble; see `monolith`."""
        folder = self.out / name
        islands, release = Islands(folder / "islands"), folder / "release"
        if not islands.path.exists():
            self._split(source, rate, seed, islands.path)
        if not (folder / _RECORD).exists():
            seconds, flops = self._train(islands, source.num, name)
            started, own = monotonic(), self._router_flops(source.budget, source.num)
            self._assemble(islands, release, seed, name)
            training = islands.plan.expert.training
            cost = Cost(
                steps=training.num_steps,
                batch_size=training.batch_size,
                learning_rate=training.learning_rate,
                flops=flops + own,
                router_flops=own,
                seconds=seconds + monotonic() - started,
            )
            write_atomic(folder / _RECORD, cost.model_dump_json(indent=1).encode())
            for images in folder.glob("islands/*/*/images.npy"):
                images.unlink()  # a copy of the training images for every ensemble
        opened = open_ensemble(release, root=islands.root, state=folder / "state", device=self.device)
        own_K = tuple(map_array(islands.island(k).rows).clone() for k in range(source.num))
        cost = Cost.model_validate_json((folder / _RECORD).read_bytes())
        return Made(replace(opened, chunk_size=self.preset.chunk), cost, own_K)

    def _train(self, islands: Islands, num: int, name: str) -> tuple[float, float]:
        """Train all experts, and return the seconds and the operations that they took."""
        seconds = flops = 0.0
        settings = TrainingSettings(device="cuda" if self.device.type == "cuda" else "cpu")
        for number in range(num):
            with progress(f"{name}: expert {number + 1} of {num}") as tell, self.clock.while_training() as is_over:

                def show(done: Progress, tell: Callable[[int, int], None] = tell) -> None:
                    tell(done.step, done.num_steps)

                done = train_island(islands, number, settings, on_progress=show, should_stop=is_over)
            if done is not None:
                seconds, flops = seconds + done.training.seconds, flops + done.training.flops
        return seconds, flops

    def _assemble(self, islands: Islands, release: Path, seed: int, name: str) -> None:
        """Fit the router and publish the ensemble; whatever an interrupted run left is published anew."""
        if release.exists():
            shutil.rmtree(release)
        with progress(f"{name}: router") as tell:

            def show(step: int, num_steps: int, _: float) -> None:
                self.clock.check()
                tell(step, num_steps)

            assemble(
                islands, release, _PASSPHRASE, seed=seed, device=self.device, on_progress=show, on_draw=self.clock.check
            )

    def _training(self, budget: float, batch_size: int, rate: float, seed: int) -> TrainingRecipe:
        """The recipe of monolith and experts alike; what it leaves out is the library's default."""
        return TrainingRecipe(
            num_steps=max(1, round(budget * self.preset.num_steps)),
            batch_size=batch_size,
            learning_rate=rate,
            warmup_steps=min(100, round(budget * self.preset.num_steps) // 10),
            seed=seed,
        )

    def _router(self, budget: float) -> dict[str, object]:
        router = self.preset.router
        return router.model_dump() | {"num_steps": max(1, round(budget * router.num_steps))}

    def _router_flops(self, budget: float, num: int) -> int:
        settings = type(self.preset.router).model_validate(self._router(budget))
        return router_flops(num, self.world.data.shape, settings)

    def _split(self, source: Experts, rate: float, seed: int, path: Path) -> None:
        num, images = source.num, self._images(source, seed)
        num_fine = max(num, min(_FINE, len(self.world.train) // 16))
        training = self._training(source.budget, max(1, self.preset.batch_size // num), rate, seed)
        recipe = IslandsRecipe.model_validate(
            {
                "data": self.world.data.model_dump(),
                "public": {"seed": seed, "holdout_share": _HELD_OUT},
                "encoder": {"kind": "pca", "dim": self.preset.pca_dim},
                "clustering": {"num_fine": num_fine, "num_coarse": num, "balanced": True},
                "sketch": {"rank": self.preset.pca_dim},
                "partition": {"kind": "silo_cluster", "min_images": 2},
                "expert": {"architecture": self.preset.network.model_dump(), "training": training.model_dump()},
                "router": self._router(source.budget),
                "owner": {
                    "name": "paper",
                    "fit_images": self.preset.fit_images,
                    "num_groups": max(num, min(_GROUPS, num_fine)),
                },
            }
        )
        known = source.partition in ("clusters", "random")
        by = source.partition if known else _column(source, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        dataset = Dataset(images, self.world.train.images)
        split(dataset, recipe, num if known else None, by, path, _PASSPHRASE, self.clock.check)

    def _images(self, source: Experts, seed: int) -> Path:
        """Return the folder of the training images, with the column that divides them where one does."""
        folder, images = self.out / "data", self.world.train.images
        folder.mkdir(parents=True, exist_ok=True)
        if source.partition == "unequal":
            np.save(folder / f"{_column(source, seed)}.npy", self.world.unequal(images).numpy())
        elif source.partition == "silos":
            np.save(folder / f"{_column(source, seed)}.npy", self.world.silos(source.num, seed).numpy())
        if not (folder / "images.npy").exists():
            np.save(self.out / "written.npy", images.numpy())
            (self.out / "written.npy").replace(folder / "images.npy")
        return folder


def _column(source: Experts, seed: int) -> str:
    return f"{source.partition}{source.num}_{seed}"


class ExactRouter:
    """The exact posterior of the training images themselves: ``p(x_t | k) = mean_i N(x_t; alpha x_i, sigma^2)``.

    No network can know it better; it costs a product with all training images at every step.

    Args:
        images_K: each expert's images.
    """

    def __init__(self, images_K: list[Tensor]) -> None:
        self.num_experts = len(images_K)
        self._images_K = [images.flatten(1) for images in images_K]
        self._squared_K = [rows.square().sum(1) for rows in self._images_K]

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """See `ddm.routers.base.Router`."""
        rows_B, t_B1 = x_B.flatten(1).float(), t_B.float()[:, None]
        alpha_B1, precision_B1 = 1 - t_B1, 0.5 / t_B1.clamp(min=1e-2).square()
        found = []
        for images, squared in zip(self._images_K, self._squared_K, strict=True):
            images, squared = images.to(rows_B.device), squared.to(rows_B.device)
            near_BN = precision_B1 * (2 * alpha_B1 * rows_B @ images.T - alpha_B1.square() * squared)
            found.append(near_BN.logsumexp(1) - torch.tensor(float(len(images))).log())
        return torch.stack(found, 1)


class Counted(nn.Module):
    """An expert that counts how many samples it has evaluated."""

    def __init__(self, expert: nn.Module) -> None:
        super().__init__()
        self.expert, self.num = expert, 0

    def forward(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """Evaluate the expert."""
        self.num += len(x_B)
        answer: Tensor = self.expert(x_B, t_B)
        return answer
