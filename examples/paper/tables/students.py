"""Distils an ensemble into one dense student, as `ddm distill` does, with a quarter of the monolith's batch."""

from collections.abc import Callable
from pathlib import Path

from torch import nn

from ddm.distillation.dataset import DistillationData, SampleRecipe, own_samples
from ddm.distillation.distill import distill
from ddm.models import count_flops
from ddm.protocol.base import sha256_hex
from ddm.protocol.learning import LogitNormalT
from ddm.training.config import Engine
from ddm.training.loop import FinishedTraining, TrainingRun
from ddm.training.progress import Progress
from examples.paper.tables.models import RECORD, Made, Workshop, weights_of
from examples.paper.tables.sharing import alone
from examples.paper.tables.sources import Student

QUARTER = 0.25


def student(
    shop: Workshop, source: Student, teachers: Made, rate: float, seed: int, name: str
) -> Made:
    """Train a student by a quarter of the monolith's batch; its cost includes its teachers' evaluations.

    Args:
        shop: where.
        source: which.
        teachers: the ensemble.
        rate: learning rate.
        seed: of weights, samples and batches.
        name: of its folder.
    """
    recipe = shop.dense_training(source.budget, rate, seed, updates=source.updates)
    batch = max(1, round(QUARTER * shop.preset.batch_size))
    settings = recipe.model_copy(update={"batch_size": batch}).plain(shop.preset.network)
    evaluations = (
        settings.num_steps
        * settings.batch_size
        * (source.num if source.teacher == "mixture" else 1)
    )
    own = 2 * source.steps * source.num_samples if source.images == "own samples" else 0
    forward = count_flops(shop.preset.network, shop.world.data.shape)[0]
    if (shop.out / name / RECORD).exists():
        return shop.opened(name)
    data = _images(shop, source, teachers, seed, name)

    def run(
        model: nn.Module,
        checkpoints: Path,
        engine: Engine,
        on_progress: Callable[[Progress], None],
        should_stop: Callable[[], bool],
    ) -> FinishedTraining:
        if source.start == "expert":
            prior = list(teachers.ensemble.prior)
            largest = weights_of(teachers.ensemble, prior.index(max(prior)))
            model.load_state_dict(largest)
        return distill(
            teachers.ensemble,
            model,
            data,
            settings,
            TrainingRun(checkpoints, on_progress, should_stop, engine),
            teacher=source.teacher,
            source=teachers.ensemble.release,
            t_distribution=LogitNormalT(),
        )

    shop.trained(name, False, settings, run, teaching=float(forward) * (evaluations + own))
    return shop.opened(name)


def _images(
    shop: Workshop, source: Student, teachers: Made, seed: int, name: str
) -> DistillationData:
    """Return the ensemble's own samples, drawn once, or the training images, each with its expert."""
    if source.images == "training images":
        expert_N = shop.world.train.label_N.new_empty(len(shop.world.train))
        for k, rows in enumerate(teachers.own_K):
            expert_N[rows] = k
        return DistillationData(shop.world.train.images, expert_N)
    drawn = repr((teachers.ensemble.release, source.num_samples, source.steps))
    folder = shop.out / f"samples-{sha256_hex(drawn.encode())[:10]}"
    label = f"{name}: drawing {source.num_samples} samples of the ensemble"
    with alone(shop.out, folder.name), shop.clock.progress(label) as step:
        return own_samples(
            teachers.ensemble,
            source.num_samples,
            folder,
            SampleRecipe(source=teachers.ensemble.release, steps=source.steps, seed=seed),
            on_progress=step,
        )
