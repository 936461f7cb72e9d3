"""Small experts of Fashion-MNIST, one per group of its classes, with a router of counts: trained once, then kept."""

import gzip
from pathlib import Path

import numpy as np
import torch
from sklearn.cluster import KMeans
from torch import Tensor, nn

from ddm.diffusion.path import LinearPath
from ddm.io.tensors import TensorSpec, load_tensors, save_tensors
from ddm.models import build_expert
from ddm.protocol.architecture import Dit
from ddm.protocol.learning import Training
from ddm.routers.counts import CountsRouter
from ddm.routers.sketch import Sketch
from ddm.training.batches import Examples
from ddm.training.config import Engine
from ddm.training.loop import TrainingRun, train
from ddm.training.objective import TrainingObjective
from ddm.training.progress import Progress
from support.measuring import say

ARCHITECTURE = Dit(patch=2, hidden=64, depth=3, heads=4)
SHAPE = (1, 14, 14)
CLASSES = ((0, 2, 3, 4, 6), (5, 7, 9), (1, 8))  # tops; shoes; trousers and bags
PRIOR = (0.5, 0.3, 0.2)
RANK = 32
NUM_GROUPS = 64
PUBLIC = 8000


def read_fashion(folder: Path) -> tuple[Tensor, Tensor]:
    """Read the training images in [-1, 1], halved to (N, 1, 14, 14), and their classes."""
    pixels, label = (
        np.frombuffer(
            gzip.decompress((folder / f"train-{name}.gz").read_bytes()), np.uint8, offset=offset
        )
        for name, offset in (("images-idx3-ubyte", 16), ("labels-idx1-ubyte", 8))
    )
    images = torch.from_numpy(pixels.astype(np.float32) / 127.5 - 1.0).view(-1, 1, 28, 28)
    return torch.nn.functional.avg_pool2d(images, 2), torch.from_numpy(label.astype(np.int64))


def trained_experts(data: Path, work: Path, num_steps: int) -> list[nn.Module]:
    """Train an expert on each group of classes, unless `work` has it already."""
    images, label = read_fashion(data)
    experts = []
    for k, classes in enumerate(CLASSES):
        expert = build_expert(ARCHITECTURE, SHAPE, seed=k)
        kept = work / f"island-{k}-{num_steps}.safetensors"
        if not kept.exists():
            own = images[torch.isin(label, torch.tensor(classes))]
            save_tensors(kept, _train(expert, own, work / f"island-{k}-{num_steps}", num_steps))
        specs = {
            name: TensorSpec("F32", tuple(value.shape))
            for name, value in expert.state_dict().items()
        }
        weights = load_tensors(kept, specs, max_bytes=kept.stat().st_size, max_abs=1e4)
        expert.load_state_dict(weights)
        experts.append(expert.eval().requires_grad_(False))
    return experts


def _train(expert: nn.Module, images: Tensor, folder: Path, num_steps: int) -> dict[str, Tensor]:
    recipe = Training(
        num_steps=num_steps,
        batch_size=64,
        learning_rate=2e-3,
        weight_decay=0.01,
        ema_decay=0.995,
    )

    def report_progress(progress: Progress) -> None:
        if progress.step % 200 == 0:
            say(
                f"{folder.name}: step {progress.step}, loss {progress.loss:.4f}, {progress.seconds:.0f} s"
            )

    folder.mkdir(parents=True, exist_ok=True)
    training = train(
        expert,
        Examples(images),
        recipe,
        TrainingObjective(),
        TrainingRun(folder, on_progress=report_progress, engine=Engine(device="cpu")),
    )
    return training.ema


def counts_router(data: Path) -> CountsRouter:
    """Fit groups on some of the images as if they were public, and count each expert's images in them."""
    images, label = read_fashion(data)
    images = images[:PUBLIC]
    label = label[:PUBLIC]
    groups = KMeans(NUM_GROUPS, n_init=1, random_state=0).fit_predict(images.flatten(1).numpy())
    group_N = torch.from_numpy(groups.astype(np.int64))
    sketch = Sketch.fit(images, group_N, RANK, NUM_GROUPS)
    count_KG = torch.stack(
        [
            torch.bincount(group_N[torch.isin(label, torch.tensor(own))], minlength=NUM_GROUPS)
            for own in CLASSES
        ]
    )
    share_KG = count_KG.double() / count_KG.sum(1, keepdim=True)
    return CountsRouter(sketch, share_KG.log(), LinearPath())
