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
from ddm.system.progress import ProgressCallback

# Most own samples that are drawn at once and kept in one file, and most bytes of them.
_PART = 256
_PART_BYTES = 1 << 26


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
            raise DataError(
                "images",
                expected="at least 1 image",
                got="0 images",
                remedy="Give at least one image.",
            )
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
            raise ShapeError(
                "conditions",
                expected="no conditions: these experts are unconditional",
                got=f"conditions of shape {tuple(labels.shape)}",
            )
        case TextCondition():
            check_text(labels, len(labels), condition)
        case ClassCondition(num_classes=num):
            if labels.dtype != torch.int64 or labels.dim() != 1:
                raise ShapeError(
                    "classes",
                    expected="int64 (N,)",
                    got=f"{labels.dtype} {tuple(labels.shape)}",
                )
            lowest = int(labels.min())
            highest = int(labels.max())
            if not -1 <= lowest <= highest < num:
                raise ShapeError(
                    "classes",
                    expected=f"-1 (no class) to {num - 1}",
                    got=f"{lowest} to {highest}",
                )


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
    accepted_kinds = "f"
    dtype: type[np.generic] = np.float32
    if isinstance(condition, ClassCondition):
        accepted_kinds = "iu"
        dtype = np.int64
    if array.dtype.kind not in accepted_kinds or array.size == 0 or array.ndim == 0:
        raise _wrong_labels(f"{array.dtype} {array.shape}")
    # An overflow becomes infinite, and is refused below.
    with np.errstate(over="ignore"):
        numbers = array.astype(dtype)
    if not np.isfinite(numbers).all():
        raise _wrong_labels("NaN or infinity")
    labels = torch.from_numpy(numbers)
    check_labels(labels, condition)
    return labels


def _wrong_labels(got: str) -> DataError:
    return DataError(
        "labels", expected="whole numbers for classes, or finite numbers for texts", got=got
    )


@dataclass(frozen=True)
class SampleRecipe:
    """What decides which samples an ensemble gives; samples of another recipe are not taken for these.

    Args:
        source: names the ensemble.
        condition: the student's: the same as the experts', or none.
        texts: texts to draw from, shape (M, L, D_text).
        steps: the number of steps of the solver.
        seed: any integer >= 0.
    """

    source: str
    condition: Condition = NoCondition()
    texts: Tensor | None = None
    steps: int = 50
    seed: int = 0

    @property
    def key(self) -> str:
        """The start of the names of its files."""
        texts_digest = None
        if self.texts is not None:
            texts_digest = hashlib.sha256(self.texts.contiguous().numpy().data).hexdigest()
        condition = self.condition.model_dump(mode="json")
        fields = [self.source, self.steps, self.seed, condition, texts_digest]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def own_samples(
    ensemble: Ensemble,
    num: int,
    folder: Path,
    recipe: SampleRecipe,
    *,
    on_progress: ProgressCallback,
) -> DistillationData:
    """Draw samples from the ensemble, each labelled with its expert, and keep them on disk for a later run.

    Args:
        ensemble: the teacher.
        num: number of samples.
        folder: where they are kept, in parts; samples of another recipe there are left alone.
        recipe: which samples.
        on_progress: called with the steps taken, summed over all samples, and the total to take.

    Raises:
        MathError: classes whose holders are unknown.
        NumericalError: samples that are not finite.
        ShapeError: texts that the experts do not take.
        SetupError: no texts for experts that are conditioned on texts.
    """
    key = recipe.key
    steps = recipe.steps
    # Four bytes for each value, float32: large samples come in smaller parts.
    part_size = max(1, min(_PART, _PART_BYTES // (4 * prod(ensemble.shape))))
    specs = {
        "images": TensorSpec("F32", (part_size, *ensemble.shape)),
        "expert": TensorSpec("I64", (part_size,)),
    }
    images = torch.empty(num, *ensemble.shape)
    expert_N = torch.empty(num, dtype=torch.int64)
    label_uniform_N = torch.empty(num, dtype=torch.float64)

    def report(first: int, steps_taken: int) -> None:
        size = min(first + part_size, num) - first
        on_progress(first * steps + steps_taken * size, num * steps)

    # A part is always drawn whole, so that its file is the same whatever `num` is.
    for number, first in enumerate(range(0, num, part_size)):
        path = folder / f"{key}-{number:05d}.safetensors"
        sample_numbers = range(first, first + part_size)
        noise, uniform_B2 = draw_noise(sample_numbers, ensemble.shape, recipe.seed, 2)
        # Two numbers from each sample's own stream: the first chooses its expert, the second its condition.
        expert_uniform_B, label_uniform_B = uniform_B2.unbind(1)
        part = _stored_part(path, specs)
        if part is None:
            label_B = _draw_labels(recipe.condition, recipe.texts, label_uniform_B)
            # Samples that are not finite raise an error here, so that a later run cannot take them from the disk.
            part = _draw_part(
                ensemble, noise, expert_uniform_B, label_B, steps, partial(report, first)
            )
            # Written at once, so that a run that ends here continues from the next part.
            folder.mkdir(parents=True, exist_ok=True)
            save_tensors(path, part)
        rows = slice(first, min(first + part_size, num))
        size = rows.stop - first
        images[rows] = part["images"][:size]
        expert_N[rows] = part["expert"][:size]
        label_uniform_N[rows] = label_uniform_B[:size]
        report(first, steps)
    # Conditions are not kept on disk: the same numbers give the same ones again.
    labels = _draw_labels(recipe.condition, recipe.texts, label_uniform_N)
    return DistillationData(images, expert_N, labels)


def _draw_labels(condition: Condition, texts: Tensor | None, uniform_B: Tensor) -> Tensor | None:
    """Draw each sample's condition: none with probability `drop`, else one of all classes or texts, uniformly."""
    match condition:
        case NoCondition():
            return None
        case ClassCondition(num_classes=num, drop=drop):
            choices = torch.arange(num)
        case TextCondition(drop=drop):
            if texts is None:
                raise SetupError(
                    "texts",
                    expected="texts to condition samples on",
                    got="experts conditioned on texts, and no texts",
                    remedy="Give texts, or images with texts, or distil without.",
                )
            check_labels(texts, condition)
            choices = texts
    # Below `drop` no condition; the rest of the interval is divided evenly among the choices.
    share_B = (uniform_B - drop).clamp(min=0) / (1 - drop)
    # The product may round up to the number of choices, though no share reaches 1.
    choice_B = (share_B * len(choices)).long().clamp(max=len(choices) - 1)
    num_inner = choices.dim() - 1
    is_dropped = (uniform_B < drop).view(-1, *[1] * num_inner)
    null = 0
    if choices.dim() == 1:
        null = -1
    return choices[choice_B].masked_fill_(is_dropped, null)


def _draw_part(
    ensemble: Ensemble,
    noise: Tensor,
    uniform_B: Tensor,
    label_B: Tensor | None,
    steps: int,
    on_step: Callable[[int], None],
) -> dict[str, Tensor]:
    """Draw one sample from each noise, under its condition."""
    # At t = 1 the posterior is each expert's share of the condition, and needs no router.
    prior_BK = Posterior.of(ensemble, label_B)(noise, torch.ones(len(noise)), label_B)
    expert_B = draw_expert(prior_BK, uniform_B)
    weights_BK = one_hot(expert_B, prior_BK.shape[1]).to(ensemble.device, torch.float32)
    if label_B is not None:
        label_B = label_B.to(ensemble.device)

    def velocity(x_B: Tensor, t_B: Tensor) -> Tensor:
        return mix_velocity(
            ensemble.experts, x_B, t_B, weights_BK.to(x_B), label_B, chunk_size=ensemble.chunk_size
        )

    # x_t at t = 1 without the little data that a path of `ddm.diffusion.schedules` has left there.
    x_B = noise.to(ensemble.device) * ensemble.path.sigma(torch.ones(()))
    with torch.no_grad():
        for steps_taken, (t, t_next) in enumerate(pairwise(uniform_times(steps)), start=1):
            x_B = heun_step(velocity, x_B, t, t_next)
            on_step(steps_taken)
    num_broken = int((~x_B.flatten(1).isfinite().all(1)).sum())
    if num_broken:
        raise NumericalError(
            "the ensemble's own samples",
            expected="finite numbers",
            got=f"NaN or infinity in {num_broken} of {len(x_B)}",
            remedy=(
                "`ddm sample RELEASE --root FILE --num 64 --out samples.npz` names the experts that fail: ask the "
                "publisher of the release to withdraw them. In Python, take more steps, or an ensemble with a "
                "prior of 0 for them."
            ),
        )
    return {"images": x_B.float().cpu(), "expert": expert_B}


def _stored_part(path: Path, specs: dict[str, TensorSpec]) -> dict[str, Tensor] | None:
    """Load a part that an earlier run drew; None where it is missing or damaged."""
    if not path.is_file():
        return None
    try:
        return load_tensors(path, specs, max_bytes=stored_bytes(specs))
    # The part is drawn again and overwritten; its noise is the same each time.
    except FormatError:
        return None


def by_cluster(
    images: Tensor,
    files: PlanFiles,
    experts: Sequence[PublishedExpert],
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Label each image with an expert of its coarse cluster, drawn by the priors where several silos have one.

    Args:
        images: samples, not their latents, shape (N, ...), in the plan's range.
        files: the plan's encoder and clusters.
        experts: the manifest's.
        seed: the seed of the draw.

    Returns:
        Which images belong to an expert, bool (N,), since some clusters have none; and those images' experts.

    Raises:
        SetupError: the experts are not of a partition by clusters.
        DataError: no image is in a cluster that has an expert.
    """
    num_clusters = int(files.clusters.coarse_F.max()) + 1
    weight_CK = torch.zeros(num_clusters, len(experts), dtype=torch.float64)
    for number, expert in enumerate(experts):
        if expert.cluster is None:
            raise SetupError(
                "teacher label",
                expected="one expert per silo and cluster",
                got=f"expert {expert.expert_id}, which has no cluster",
                remedy="Choose the teacher drawn or mixture.",
            )
        weight_CK[expert.cluster, number] = expert.prior
    fine_N = files.clusters.assign(files.encoder.encode(images))
    weight_NK = weight_CK[files.clusters.coarse_F[fine_N]]
    # A cluster may have no expert: its images are left out, rather than given to a wrong one.
    has_expert_N = weight_NK.sum(1) > 0
    if not bool(has_expert_N.any()):
        raise DataError(
            "images",
            expected="images in clusters that have an expert",
            got=f"{len(images)} images, all in clusters without an expert",
            remedy=(
                "Give images of the clusters that have an expert, or leave --data out, to distil from "
                "the ensemble's own samples."
            ),
        )
    uniform_N = torch.from_numpy(stream("by cluster", seed, 0).random(int(has_expert_N.sum())))
    return has_expert_N, draw_expert(weight_NK[has_expert_N], uniform_N)
