"""What a student is shown: public images, or the ensemble's own samples, drawn once and kept on disk."""

# Shape legend: N images, C coarse clusters, K experts.
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ddm.ensemble import Ensemble
from ddm.errors import DataError, FormatError, SetupError, ShapeError
from ddm.plan_files import PlanFiles
from ddm.protocol.manifest import PublishedExpert
from ddm.strategies import draw_expert
from ddm.streams import stream
from ddm.tensors import TensorSpec, load_tensors, save_tensors, stored_bytes

_PART = 256  # own samples that are drawn, and kept, together


@dataclass(frozen=True)
class Lessons:
    """What a student is shown.

    Args:
        images: x_0, shape (N, ...), float32.
        expert_N: the expert that each image belongs to, int64; None where nobody knows.
    """

    images: Tensor
    expert_N: Tensor | None = None

    def __post_init__(self) -> None:
        if not len(self.images):
            raise DataError("images", expected="at least one", got="none")
        if self.expert_N is not None and self.expert_N.shape != self.images.shape[:1]:
            raise ShapeError(
                "labels", expected=f"{len(self.images)}, one per image", got=str(tuple(self.expert_N.shape))
            )


def own_samples(
    ensemble: Ensemble,
    num: int,
    folder: Path,
    *,
    source: str,
    strategy: str = "lock",
    steps: int = 50,
    seed: int = 0,
    on_progress: Callable[[int, int], None],
) -> Lessons:
    """Draw lessons from the ensemble itself, each image with the expert that made it, and keep them for a later run.

    Args:
        ensemble: the teacher.
        num: how many images.
        folder: where they are kept, in parts; samples of another ensemble or seed there are left alone.
        source: names the ensemble.
        strategy: an exact one: under lock with t_lock = 1 no router is asked; see docs/explanation/strategies.md.
        steps: of the solver.
        seed: any integer >= 0.
        on_progress: told (images there, images in all).
    """
    key = hashlib.sha256(json.dumps([source, strategy, steps, seed]).encode()).hexdigest()[:16]
    specs = {"images": TensorSpec("F32", (_PART, *ensemble.shape)), "expert": TensorSpec("I64", (_PART,))}
    parts = []
    for number in range(-(-num // _PART)):
        path = folder / f"{key}-{number:05d}.safetensors"
        found = _kept(path, specs)
        if found is None:
            part_seed = int(stream("own samples", seed, number).integers(2**62))
            drawn = ensemble.sample(_PART, strategy=strategy, steps=steps, seed=part_seed)
            found = {"images": drawn.images.float(), "expert": drawn.expert_N}
            folder.mkdir(parents=True, exist_ok=True)
            save_tensors(path, found)
        parts.append(found)
        on_progress(min(num, (number + 1) * _PART), num)
    return Lessons(*(torch.cat([part[name] for part in parts])[:num] for name in ("images", "expert")))


def _kept(path: Path, specs: dict[str, TensorSpec]) -> dict[str, Tensor] | None:
    """Load a part that an earlier run drew; None where there is none, or a damaged one."""
    try:
        return load_tensors(path, specs, max_bytes=stored_bytes(specs)) if path.is_file() else None
    except FormatError:
        return None


def by_cluster(images: Tensor, files: PlanFiles, experts: Sequence[PublishedExpert], seed: int) -> Lessons:
    """Let each image belong to an expert of its coarse cluster; of several silos', to one drawn by their priors.

    Images of clusters that no expert is made of are left out.

    Args:
        images: shape (N, C, H, W), in the plan's range.
        files: the plan's encoder and clusters.
        experts: the manifest's.
        seed: of the draw.

    Raises:
        SetupError: these experts are not made of clusters.
        DataError: no image is left.
    """
    weight_CK = torch.zeros(int(files.clusters.coarse_F.max()) + 1, len(experts), dtype=torch.float64)
    for k, expert in enumerate(experts):
        if expert.cluster is None:
            remedy = "Let the teacher be drawn or the mixture."
            raise SetupError("teacher label", expected="one expert per silo and cluster", got="others", remedy=remedy)
        weight_CK[expert.cluster, k] = expert.prior
    weight_NK = weight_CK[files.clusters.coarse_F[files.clusters.assign(files.encoder.encode(images))]]
    known_N = weight_NK.sum(1) > 0
    if not bool(known_N.any()):
        raise DataError("images", expected="some of the experts' clusters", got="none")
    uniform_N = torch.from_numpy(stream("by cluster", seed, 0).random(int(known_N.sum())))
    return Lessons(images[known_N], draw_expert(weight_NK[known_N], uniform_N))
