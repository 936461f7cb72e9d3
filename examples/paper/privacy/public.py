"""Fits the public parts of a plan on public images alone: an encoder, clusters of its features, the sketch."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddm.diffusion.path import LinearPath
from ddm.encoders import HogEncoder, PcaEncoder
from ddm.encoders.timm import TimmEncoder, create_model
from ddm.io.tensors import save_tensors
from ddm.partition.clustering import Clusters, fit_clustering
from ddm.protocol.data import DataSpec
from ddm.routers.residual import PublicSketches
from ddm.routers.sketch import Sketch
from examples.paper.privacy.worlds import PrivateWorld

TIMM_MODEL = "test_resnet"
IMAGE_SIZE = (56, 56)
LEARNING_RATE = 4e-3
LABEL_SMOOTHING = 0.05
MAX_SHIFT = 2
_CELLS = 7


@dataclass(frozen=True)
class PublicParts:
    """What a plan's files hold, and each image's public group.

    Attributes:
        clusters: fine centroids, one a group here.
        sketch: the wide public sketch.
        public_group_N: the group of each public image.
        held_out_group_N: of each held-out public image.
        silo_groups: the groups of each silo's images; what a silo finds out by itself.
        encode: the public features of images.
    """

    clusters: Clusters
    sketch: Sketch
    public_group_N: Tensor
    held_out_group_N: Tensor
    silo_groups: tuple[Tensor, ...]
    encode: Callable[[Tensor], Tensor]

    def coarse(self, images: Tensor) -> Tensor:
        """Return the coarse public cluster of each image."""
        return self.clusters.coarse_F[self.clusters.assign(self.encode(images))]

    def lessons(self, world: PrivateWorld) -> PublicSketches:
        """The training data of the learned router's network."""
        return PublicSketches.of(world.public, self.public_group_N, self.sketch, LinearPath())


def fit_public_parts(
    world: PrivateWorld, encoder: str, num_steps: int, seed: int, say: Callable[[str], None]
) -> PublicParts:
    """Fit the public parts.

    Args:
        world: its public images are used; for the encoder `timm` their classes as well.
        encoder: `pca`, or `hog`, which no class is used for, or `timm`, a small network trained here on the public
            images' classes, in place of weights from elsewhere.
        num_steps: of that training.
        seed: of that training and of k-means.
        say: called with messages about the progress.
    """
    encode = None
    dim = world.dataset.pca_dim
    match encoder:
        case "timm":
            encode = _timm(world, num_steps, seed, say)
        case "hog":
            encode = HogEncoder.fit(world.public, dim, cells=_CELLS, mirrored=True).encode
        case _:
            encode = PcaEncoder.fit(world.public, dim).encode
    features = encode(world.public)
    num_groups = world.dataset.num_groups
    clusters = fit_clustering(features, num_groups, min(8, num_groups), num_groups, seed=seed)
    rank = world.dataset.rank
    released = world.dataset.released_rank
    group_N = clusters.groups(features)
    sketch = Sketch.fit(world.public, group_N, rank, num_groups, released_rank=released)
    return PublicParts(
        clusters=clusters,
        sketch=sketch,
        public_group_N=group_N,
        held_out_group_N=clusters.groups(encode(world.held_out)),
        silo_groups=tuple(clusters.groups(encode(images)) for images in world.silos),
        encode=encode,
    )


def _timm(
    world: PrivateWorld, num_steps: int, seed: int, say: Callable[[str], None]
) -> Callable[[Tensor], Tensor]:
    """Train a small timm network on the public images' classes, save it, and open it as a plan would."""
    data = DataSpec(shape=tuple(world.public.shape[1:]), range=(-1.0, 1.0))
    untrained = TimmEncoder.random(TIMM_MODEL, data, seed, IMAGE_SIZE)
    torch.manual_seed(seed)
    net: nn.Module = create_model(
        TIMM_MODEL, in_chans=1, num_classes=int(world.public_label.max()) + 1
    )
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(net.parameters(), LEARNING_RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, num_steps)
    for _ in range(num_steps):
        pick = torch.randint(len(world.public), (128,), generator=generator)
        x = untrained.prepare(_moved(world.public[pick], generator))
        loss = F.cross_entropy(net(x), world.public_label[pick], label_smoothing=LABEL_SMOOTHING)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    say(f"encoder: {TIMM_MODEL} trained on {len(world.public)} public images and their classes")
    with tempfile.TemporaryDirectory() as scratch:
        weights = Path(scratch) / "weights.safetensors"
        save_tensors(weights, {name: tensor.detach() for name, tensor in net.state_dict().items()})
        return TimmEncoder.from_file(TIMM_MODEL, weights, data, IMAGE_SIZE).encode


def _moved(images: Tensor, generator: torch.Generator) -> Tensor:
    down, right = torch.randint(-MAX_SHIFT, MAX_SHIFT + 1, (2,), generator=generator).tolist()
    flipped = images.flip(3) if torch.rand(1, generator=generator) < 0.5 else images
    return torch.roll(flipped, (down, right), (2, 3))
