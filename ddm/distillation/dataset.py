"""The training data of a student: given images, or the ensemble's own samples, drawn once and kept on disk.

Own samples are drawn with `lock` at t_lock = 1: an expert drawn from the prior and followed from noise to data, which
needs no router. With conditions, each sample has a condition of its own, and its expert is drawn among those with data
of that condition. A share `drop` of the samples is unconditional and follows the law of the pooled data, so that the
student's unconditional velocity is right although no release states how frequent each class is.
"""

# Shape legend: N images, B batch, C coarse clusters, K experts.
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ddm.diffusion.rng import stream
from ddm.diffusion.solver import heun_step, uniform_times
from ddm.distillation.posterior import Posterior
from ddm.ensemble import Ensemble
from ddm.errors import DataError, FormatError, NumericalError, SetupError, ShapeError
from ddm.images.npz import read_array
from ddm.io.files import require_file
from ddm.io.tensors import TensorSpec, load_tensors, save_tensors, stored_bytes
from ddm.loading.plan import PlanFiles
from ddm.models.conditions import check_text
from ddm.protocol.architecture import ClassCondition, Condition, NoCondition, TextCondition
from ddm.protocol.manifest import PublishedExpert
from ddm.sampling.mixture import mix_velocity
from ddm.sampling.strategies import draw_expert
from ddm.sampling.trajectories import draw_noise
from ddm.system.memory import machine_bytes

_PART, _PART_BYTES = 256, 1 << 26  # most own samples that are drawn at once and kept in one file


@dataclass(frozen=True)
class DistillationData:
    """The training data of a student.

    Args:
        images: x_0 in the experts' space, images or their latents, shape (N, ...), float32.
        expert_N: the expert that each image belongs to, int64; None where it is unknown.
        labels: the condition of each image, as in `ddm.training.batches.Examples`; None for an unconditional student.
        drop: probability with which a step hides the condition; 0 for samples that were drawn under their conditions.
    """

    images: Tensor
    expert_N: Tensor | None = None
    labels: Tensor | None = None
    drop: float = 0.0

    def __post_init__(self) -> None:
        if not len(self.images):
            raise DataError("images", expected="at least 1 image", got="0 images")
        for subject, rows in (("experts", self.expert_N), ("conditions", self.labels)):
            if rows is not None and len(rows) != len(self.images):
                raise ShapeError(
                    subject,
                    expected=f"{len(self.images)}, one per image",
                    got=str(tuple(rows.shape)),
                )


def check_labels(labels: Tensor, condition: Condition) -> None:
    """Refuse conditions that experts of this kind do not take.

    Raises:
        ShapeError: texts of another shape, classes out of range, or any condition for unconditional experts.
    """
    match condition:
        case NoCondition():
            got = f"conditions of shape {tuple(labels.shape)}"
            raise ShapeError(
                "conditions", expected="no conditions: these experts are unconditional", got=got
            )
        case TextCondition():
            check_text(labels, len(labels), condition)
        case ClassCondition(num_classes=num):
            if labels.dtype != torch.int64 or labels.dim() != 1:
                got = f"{labels.dtype} {tuple(labels.shape)}"
                raise ShapeError("classes", expected="int64 (N,)", got=got)
            if not -1 <= int(labels.min()) <= int(labels.max()) < num:
                got = f"{int(labels.min())} to {int(labels.max())}"
                raise ShapeError("classes", expected=f"-1 (no class) to {num - 1}", got=got)


def read_labels(path: Path, condition: Condition) -> Tensor:
    """Read the conditions of images or samples: the array `labels` of an npz.

    Args:
        path: the file. Its array holds classes, (N,), whole numbers, -1 for no class; or texts, (N, L, D_text), as
            token embeddings of the plan's encoder, floating point, zeros for no text and for padding.
        condition: the experts'.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not an npz, no such array in it, or numbers of another kind.
        ShapeError: conditions that these experts do not take.
    """
    require_file(path, "an npz with labels")
    array = read_array(path, "labels", max_bytes=machine_bytes())
    kinds, kind = ("iu", np.int64) if isinstance(condition, ClassCondition) else ("f", np.float32)
    fits = array.dtype.kind in kinds and array.size > 0 and array.ndim > 0
    with np.errstate(over="ignore"):  # an overflow becomes infinite and is refused below
        labels = array.astype(kind) if fits else None
    if labels is None or not np.isfinite(labels).all():
        got = f"{array.dtype} {array.shape}" if labels is None else "NaN or infinity"
        raise DataError(
            "labels", expected="whole numbers for classes, or finite numbers for texts", got=got
        )
    found = torch.from_numpy(labels)
    check_labels(found, condition)
    return found


def own_samples(
    ensemble: Ensemble,
    num: int,
    folder: Path,
    *,
    source: str,
    condition: Condition = NoCondition(),
    texts: Tensor | None = None,
    steps: int = 50,
    seed: int = 0,
    on_progress: Callable[[int, int], None],
) -> DistillationData:
    """Draw samples from the ensemble, each labelled with its expert, and keep them on disk for a later run.

    Args:
        ensemble: the teacher.
        num: number of samples.
        folder: where they are kept, in parts; samples of another ensemble or seed there are left alone.
        source: names the ensemble.
        condition: the student's: the same as the experts', or none.
        texts: texts to draw from, shape (M, L, D_text).
        steps: of the solver.
        seed: any integer >= 0.
        on_progress: called with the steps taken, summed over all samples, and the total to take.

    Raises:
        MathError: classes of which nobody knows who holds them.
        NumericalError: samples that are not finite.
        ShapeError: texts that the experts do not take.
        SetupError: no texts for experts that are conditioned on texts.
    """
    texts_digest = (
        None if texts is None else hashlib.sha256(texts.contiguous().numpy().data).hexdigest()
    )
    recipe = [source, steps, seed, condition.model_dump(mode="json"), texts_digest]
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    part = max(1, min(_PART, _PART_BYTES // (4 * prod(ensemble.shape))))
    specs = {
        "images": TensorSpec("F32", (part, *ensemble.shape)),
        "expert": TensorSpec("I64", (part,)),
    }
    images, expert_N = torch.empty(num, *ensemble.shape), torch.empty(num, dtype=torch.int64)
    uniform_N = torch.empty(num, dtype=torch.float64)

    def report(first: int, taken: int) -> None:
        on_progress(first * steps + taken * (min(first + part, num) - first), num * steps)

    for number, first in enumerate(range(0, num, part)):
        path, rows = (
            folder / f"{key}-{number:05d}.safetensors",
            slice(first, min(first + part, num)),
        )
        noise, uniform_BS = draw_noise(range(first, first + part), ensemble.shape, seed, 2)
        found = _kept(path, specs)
        if found is None:
            label_B = _draw_labels(condition, texts, uniform_BS[:, 1])
            found = _drawn(
                ensemble, noise, uniform_BS[:, 0], label_B, steps, partial(report, first)
            )
            folder.mkdir(parents=True, exist_ok=True)
            save_tensors(path, found)
        drawn = (
            (images, found["images"]),
            (expert_N, found["expert"]),
            (uniform_N, uniform_BS[:, 1]),
        )
        for whole, some in drawn:
            whole[rows] = some[: rows.stop - first]
        report(first, steps)
    return DistillationData(images, expert_N, _draw_labels(condition, texts, uniform_N))


def _draw_labels(condition: Condition, texts: Tensor | None, uniform_B: Tensor) -> Tensor | None:
    """Draw each sample's condition: none with probability `drop`, else one of all classes or texts, uniformly."""
    match condition:
        case NoCondition():
            return None
        case ClassCondition(num_classes=num, drop=drop):
            choices = torch.arange(num)
        case TextCondition(drop=drop):
            if texts is None:
                remedy = "Give texts, or images with texts, or distil without."
                got = "experts conditioned on texts, and no texts"
                raise SetupError(
                    "texts", expected="texts to condition samples on", got=got, remedy=remedy
                )
            check_labels(texts, condition)
            choices = texts
    chosen_B = (
        ((uniform_B - drop).clamp(min=0) / (1 - drop) * len(choices))
        .long()
        .clamp(max=len(choices) - 1)
    )
    null = -1 if choices.dim() == 1 else 0
    return choices[chosen_B].masked_fill_(
        (uniform_B < drop).view(-1, *[1] * (choices.dim() - 1)), null
    )


def _drawn(
    ensemble: Ensemble,
    noise: Tensor,
    uniform_B: Tensor,
    label_B: Tensor | None,
    steps: int,
    on_step: Callable[[int], None],
) -> dict[str, Tensor]:
    """Draw one sample from each noise, under its condition."""
    prior_BK = Posterior.of(ensemble, label_B)(noise, torch.ones(len(noise)), label_B)
    k_B = draw_expert(prior_BK, uniform_B)
    w_BK = one_hot(k_B, prior_BK.shape[1]).to(ensemble.device, torch.float32)
    if label_B is not None:
        label_B = label_B.to(ensemble.device)
    images, times = (
        noise.to(ensemble.device) * ensemble.path.sigma(torch.ones(())),
        uniform_times(steps),
    )

    def velocity(x_B: Tensor, t_B: Tensor) -> Tensor:
        return mix_velocity(
            ensemble.experts, x_B, t_B, w_BK.to(x_B), label_B, chunk_size=ensemble.chunk_size
        )

    with torch.no_grad():
        for taken, (t, t_next) in enumerate(pairwise(times), start=1):
            images = heun_step(velocity, images, t, t_next)
            on_step(taken)
    if num_broken := int((~images.flatten(1).isfinite().all(1)).sum()):
        got = f"NaN or infinity in {num_broken} of {len(images)}"
        raise NumericalError("the ensemble's own samples", expected="finite numbers", got=got)
    return {"images": images.float().cpu(), "expert": k_B}


def _kept(path: Path, specs: dict[str, TensorSpec]) -> dict[str, Tensor] | None:
    """Load a part that an earlier run drew; None where it is missing or damaged."""
    try:
        return load_tensors(path, specs, max_bytes=stored_bytes(specs)) if path.is_file() else None
    except FormatError:
        return None


def by_cluster(
    images: Tensor, files: PlanFiles, experts: Sequence[PublishedExpert], seed: int
) -> tuple[Tensor, Tensor]:
    """Label each image with an expert of its coarse cluster, drawn by the priors where several silos have one.

    Args:
        images: samples, not their latents, shape (N, ...), in the plan's range.
        files: the plan's encoder and clusters.
        experts: the manifest's.
        seed: of the draw.

    Returns:
        Which images belong to an expert, bool (N,), since some clusters have none; and those images' experts.

    Raises:
        SetupError: the experts are not of a partition by clusters.
        DataError: no image lies in a cluster that has an expert.
    """
    weight_CK = torch.zeros(
        int(files.clusters.coarse_F.max()) + 1, len(experts), dtype=torch.float64
    )
    for k, expert in enumerate(experts):
        if expert.cluster is None:
            remedy = "Choose the teacher drawn or mixture."
            got = f"expert {expert.expert_id}, which has no cluster"
            raise SetupError(
                "teacher label", expected="one expert per silo and cluster", got=got, remedy=remedy
            )
        weight_CK[expert.cluster, k] = expert.prior
    weight_NK = weight_CK[
        files.clusters.coarse_F[files.clusters.assign(files.encoder.encode(images))]
    ]
    known_N = weight_NK.sum(1) > 0
    if not bool(known_N.any()):
        got = f"{len(images)} images, all in clusters without an expert"
        raise DataError("images", expected="images in clusters that have an expert", got=got)
    uniform_N = torch.from_numpy(stream("by cluster", seed, 0).random(int(known_N.sum())))
    return known_N, draw_expert(weight_NK[known_N], uniform_N)
