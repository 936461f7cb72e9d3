"""Our training loop as benchmarks call it: on the CPU, from random weights, without anybody who watches or stops it."""

import tempfile
import time
from pathlib import Path

from torch import Tensor

from ddm.models import build_expert
from ddm.protocol.architecture import Dit
from ddm.protocol.learning import Training
from ddm.training.batches import Examples
from ddm.training.config import Engine
from ddm.training.loop import FinishedTraining, TrainingRun, train
from ddm.training.objective import TrainingObjective


def train_expert(
    architecture: Dit, images: Tensor, settings: Training
) -> tuple[FinishedTraining, float]:
    """Train an expert on images (N, C, H, W); return what came of it, and the seconds of the whole call."""
    model = build_expert(architecture, tuple(images.shape[1:]))
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        trained = train(
            model,
            Examples(images),
            settings,
            TrainingObjective(),
            TrainingRun(Path(folder), engine=Engine(device="cpu")),
        )
        return trained, time.perf_counter() - started
