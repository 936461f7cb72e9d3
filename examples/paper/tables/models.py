"""What models of all kinds have in common: recipe, cost, folder; and the dense one, trained once, resumable."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import torch
from torch import Tensor, nn

from ddm.ensemble import Ensemble
from ddm.errors import SetupError
from ddm.io.files import write_atomic
from ddm.io.tensors import save_tensors
from ddm.models import build_expert, count_flops, load_expert
from ddm.planning.training import TrainingRecipe
from ddm.protocol.architecture import ClassCondition, NoCondition
from ddm.protocol.base import File
from ddm.protocol.learning import LogitNormalT, TDistribution, Training
from ddm.protocol.routers import CountsSettings, SamplesSettings
from ddm.routers.samples import training_flops as router_flops
from ddm.system.console import progress
from ddm.system.devices import device_named
from ddm.training.batches import Examples
from ddm.training.config import Engine
from ddm.training.loop import FinishedTraining, TrainingRun, train
from ddm.training.objective import TrainingObjective
from ddm.training.progress import Progress
from examples.paper.recipes import ROWS as RECIPES
from examples.paper.tables.clock import Clock
from examples.paper.tables.data import Part, World
from examples.paper.tables.presets import Preset
from examples.paper.tables.results import Cost, commit
from examples.paper.tables.sources import AllImages, Images, Monolith, PublicImages, SiloImages

WEIGHTS = "model.safetensors"
RECORD = "cost.json"
_APART = 1000  # between two seeds: an expert adds its number, and each draws weights and batches of its own
FORMER = RECIPES["plain"]  # what plans left to the library before its defaults were measured

Weights = Mapping[str, Tensor]

Run = Callable[
    [nn.Module, Path, Engine, Callable[[Progress], None], Callable[[], bool]], FinishedTraining
]
"""Trains a fresh model, with its folder of checkpoints, the engine, where progress goes, and what is asked to stop."""


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

    @property
    def engine(self) -> Engine:
        """How this machine trains."""
        return Engine(device="cuda" if self.device.type == "cuda" else "cpu")

    def condition(self, conditional: bool) -> ClassCondition | NoCondition:
        """Return the condition of models of classes, or of those without conditions."""
        return ClassCondition(num_classes=self.world.num_classes) if conditional else NoCondition()

    def training(
        self, budget: float, batch_size: int, rate: float, seed: int, updates: int = 1
    ) -> TrainingRecipe:
        """The recipe of all models alike; what it leaves out is the library's default.

        Args:
            budget: of training, in units of the preset.
            batch_size: images in a step, before `updates`.
            rate: learning rate.
            seed: of weights and batches.
            updates: how many times as many steps, each of as many times fewer images.
        """
        num_steps = round(budget * self.preset.num_steps)
        return TrainingRecipe(
            num_steps=max(1, num_steps) * updates,
            batch_size=max(1, batch_size // updates),
            learning_rate=rate,
            warmup_steps=min(100, num_steps // 10) * updates,
            seed=_APART * seed,
        )

    def dense_training(
        self, budget: float, rate: float, seed: int, conditional: bool = False, updates: int = 1
    ) -> TrainingRecipe:
        """The same of a model of all images, with as many steps more as an ensemble's router costs."""
        settings = self.training(budget, self.preset.batch_size, rate, seed, updates)
        step_flops = (
            count_flops(self.preset.network, self.world.data.shape)[1] * settings.batch_size
        )
        extra = ceil(self.router_flops(budget, self.preset.num_islands, conditional) / step_flops)
        return settings.model_copy(update={"num_steps": settings.num_steps + extra})

    def router(self, budget: float, conditional: bool) -> CountsSettings | SamplesSettings:
        """The router of ensembles, at this budget."""
        if self.preset.router == "counts" and not conditional:
            return CountsSettings()
        settings = self.preset.transformer
        steps = max(1, round(budget * settings.num_steps))
        return settings.model_copy(update={"num_steps": steps, "conditional": conditional})

    def router_flops(self, budget: float, num: int, conditional: bool) -> int:
        """Return what training it takes."""
        settings = self.router(budget, conditional)
        return (
            router_flops(num, self.world.data.shape, settings)
            if isinstance(settings, SamplesSettings)
            else 0
        )

    def trained(
        self, name: str, conditional: bool, settings: Training, run: Run, *, teaching: float = 0.0
    ) -> None:
        """Train a dense model, unless it is there.

        Args:
            name: of its folder.
            conditional: whether it takes the class of an image as its condition.
            settings: its recipe.
            run: trains it.
            teaching: operations of its teacher.
        """
        folder = self.out / name
        network = self.preset.network
        if (folder / RECORD).exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        model = build_expert(
            network,
            self.world.data.shape,
            condition=self.condition(conditional),
            seed=settings.seed,
        )
        with (
            progress(f"{name}: training") as report_progress,
            self.clock.while_training() as is_over,
        ):
            checkpoints = folder / "checkpoints"
            training = run(
                model,
                checkpoints,
                self.engine,
                lambda at: report_progress(at.step, at.num_steps),
                is_over,
            )
        save_tensors(folder / WEIGHTS, training.ema)
        cost = Cost(
            steps=training.steps,
            batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            flops=training.flops + teaching,
            router_flops=0.0,
            seconds=training.seconds,
            commit=commit(),
        )
        write_atomic(folder / RECORD, cost.model_dump_json(indent=1).encode())
        shutil.rmtree(folder / "checkpoints")

    def opened(self, name: str, conditional: bool = False) -> Made:
        """Open a dense model as an ensemble of one expert."""
        folder = self.out / name
        shape = self.world.data.shape
        condition = self.condition(conditional)
        file = File.of(WEIGHTS, folder / WEIGHTS)
        expert = load_expert(self.preset.network, shape, folder, file, condition).to(self.device)
        cost = Cost.model_validate_json((folder / RECORD).read_bytes())
        chunk = self.preset.chunk
        ensemble = Ensemble(
            [expert], None, [1.0], shape, device=self.device, chunk_size=chunk, condition=condition
        )
        return Made(ensemble, cost)


def weights_of(ensemble: Ensemble, number: int) -> dict[str, Tensor]:
    """Return an expert's weights, in the memory of the processor.

    Raises:
        SetupError: it is no network.
    """
    expert = ensemble.experts[number]
    if not isinstance(expert, nn.Module):
        raise SetupError(
            "the start of the training",
            expected="an expert that is a network",
            got=type(expert).__name__,
        )
    return {name: weight.cpu() for name, weight in expert.state_dict().items()}


def images_of(world: World, images: Images, seed: int) -> Part:
    """Return what a dense model is trained on.

    Raises:
        SetupError: the data set has no public image of these classes, and there are none of another origin.
    """
    match images:
        case AllImages():
            return world.train
        case PublicImages() if world.base is not None:
            return world.base
        case PublicImages():
            part = world.public.at(torch.isin(world.public.label_N, torch.tensor(images.classes)))
            if not len(part):
                raise SetupError(
                    "the public base",
                    expected=f"public images of the classes {images.classes}",
                    got=f"a data set of {world.num_classes} classes",
                    remedy="Name images of another origin: --base FILE.npz.",
                )
            return part
        case SiloImages():
            silo_N = world.silos(images.num, seed, images.concentration)
            num_K = silo_N.bincount(minlength=images.num)
            silo = num_K.argmax() if images.silo == "largest" else num_K.argmin()
            return world.train.at(silo_N == silo)


def monolith(
    shop: Workshop,
    source: Monolith,
    rate: float,
    seed: int,
    name: str,
    start: Weights | None = None,
) -> Made:
    """Train one model on its images for as many operations as an ensemble and its router take.

    Args:
        shop: where.
        source: which.
        rate: learning rate.
        seed: of weights and batches.
        name: of its folder.
        start: the weights that it starts with; None for random ones.
    """
    recipe = shop.dense_training(source.budget, rate, seed, source.conditional, source.updates)
    recipe = recipe.model_copy(
        update={"batch_size": max(1, round(source.batch * recipe.batch_size))}
    )
    settings = recipe.plain(shop.preset.network)
    times: TDistribution = LogitNormalT()
    if source.recipe == "former":
        same = {"num_steps": recipe.num_steps, "batch_size": recipe.batch_size, "seed": recipe.seed}
        settings = FORMER.training.model_copy(update=same | {"learning_rate": rate})
        times = FORMER.times
    part = images_of(shop.world, source.images, seed)
    condition = shop.condition(source.conditional)

    def run(
        model: nn.Module,
        checkpoints: Path,
        engine: Engine,
        on_progress: Callable[[Progress], None],
        should_stop: Callable[[], bool],
    ) -> FinishedTraining:
        if start is not None:
            model.load_state_dict(start)
        label_N = None
        if source.conditional:
            label_N = part.label_N
        drop = 0.0
        if not isinstance(condition, NoCondition):
            drop = condition.drop
        return train(
            model,
            Examples(part.images, label_N, drop),
            settings,
            TrainingObjective(t_distribution=times),
            TrainingRun(
                checkpoints, on_progress=on_progress, should_stop=should_stop, engine=engine
            ),
        )

    shop.trained(name, source.conditional, settings, run)
    return shop.opened(name, source.conditional)
