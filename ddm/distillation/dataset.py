"""What a student is shown: public images, or the ensemble's own samples, drawn once and kept on disk.

Own samples are those of `lock` at t_lock = 1: an expert drawn from the prior, followed from noise to data, no router
asked. Under conditions, each sample has one of its own, and its expert is drawn among those that hold it. A share
`drop` of them has none, and the law of the whole: so what the student learns without a condition is right, though
nobody published how frequent each class is.
"""

# Shape legend: N images, B batch, C coarse clusters, K experts.
import hashlib
import json
import os
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
from ddm.ensemble import Ensemble
from ddm.errors import DataError, FormatError, MathError, NumericalError, SetupError, ShapeError
from ddm.io.files import require_file
from ddm.io.npz import read_array
from ddm.io.tensors import TensorSpec, load_tensors, save_tensors, stored_bytes
from ddm.loading.plan import PlanFiles
from ddm.models.conditions import check_text
from ddm.protocol.manifest import PublishedExpert
from ddm.protocol.plan import ClassCondition, Condition, NoCondition, TextCondition
from ddm.routers.base import log_prior
from ddm.sampling.guidance import conditional_log_prior
from ddm.sampling.mixture import Branch, mix_velocity
from ddm.sampling.strategies import draw_expert
from ddm.sampling.trajectories import randomness

_PART, _PART_BYTES = 256, 1 << 26  # most own samples that are drawn, and kept, together


@dataclass(frozen=True)
class Lessons:
    """What a student is shown.

    Args:
        images: x_0 as experts see it, images or their latents, shape (N, ...), float32.
        expert_N: the expert that each image belongs to, int64; None where nobody knows.
        told: what expert and student are told of each image, as `ddm.training.Examples.labels`; None: nothing, ever.
        drop: probability with which a step tells nothing; 0 for images that were drawn under what is told.
    """

    images: Tensor
    expert_N: Tensor | None = None
    told: Tensor | None = None
    drop: float = 0.0

    def __post_init__(self) -> None:
        if not len(self.images):
            raise DataError("images", expected="at least one", got="none")
        for subject, rows in (("experts", self.expert_N), ("conditions", self.told)):
            if rows is not None and len(rows) != len(self.images):
                raise ShapeError(subject, expected=f"{len(self.images)}, one per image", got=str(tuple(rows.shape)))


def check_told(told: Tensor, condition: Condition) -> None:
    """Refuse what experts of this condition cannot be told.

    Raises:
        ShapeError: texts of another shape, classes out of range, or anything at all where there is no condition.
    """
    match condition:
        case NoCondition():
            raise ShapeError("conditions", expected="none: these experts have none", got="some")
        case TextCondition():
            check_text(told, len(told), condition)
        case ClassCondition(num_classes=num):
            if told.dtype != torch.int64 or told.dim() != 1 or not -1 <= int(told.min()) <= int(told.max()) < num:
                got = f"{told.dtype} {tuple(told.shape)}, or classes out of range"
                raise ShapeError("classes", expected=f"int64 (N,), -1 (none) to {num - 1}", got=got)


def read_told(path: Path, condition: Condition) -> Tensor:
    """Read what images or samples are told: the array `labels` of an npz.

    Args:
        path: the file; the array is (N,), whole numbers, of classes, -1 for none; or (N, L, D_text), floating point, of
            texts, as the plan's encoder sees them, zeros for none and for padding.
        condition: the experts'.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not an npz, no such array in it, or numbers of another kind.
        ShapeError: not what these experts can be told.
    """
    require_file(path, "an npz with labels")
    array = read_array(path, "labels", max_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    kinds, kind = ("iu", np.int64) if isinstance(condition, ClassCondition) else ("f", np.float32)
    fits = array.dtype.kind in kinds and array.size > 0 and array.ndim > 0
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused as that
        labels = array.astype(kind) if fits else None
    if labels is None or not np.isfinite(labels).all():
        got = f"{array.dtype} {array.shape}" if labels is None else "some that are not finite"
        raise DataError("labels", expected="whole numbers of classes, or finite ones of texts", got=got)
    told = torch.from_numpy(labels)
    check_told(told, condition)
    return told


def holders(ensemble: Ensemble, label: int) -> Branch:
    """Return who holds a class and who could have made x_t given it; -1: no class.

    Raises:
        MathError: nobody published who holds it.
    """
    if label < 0:
        return Branch(1.0, log_prior(ensemble.prior, len(ensemble.experts)), ensemble.router)
    if ensemble.given_class is None:
        remedy = "Show the student images with their classes and let the teacher be the label, or distil without."
        raise MathError("classes", expected="to be known who holds them", got="no histogram of them", remedy=remedy)
    given = ensemble.given_class(label)
    return Branch(1.0, conditional_log_prior(given.prior, ensemble.prior, None), given.router or ensemble.router)


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
) -> Lessons:
    """Draw lessons from the ensemble itself, each with the expert that made it, and keep them for a later run.

    Args:
        ensemble: the teacher.
        num: how many.
        folder: where they are kept, in parts; samples of another ensemble or seed there are left alone.
        source: names the ensemble.
        condition: what the student will be told: what the experts are, or nothing.
        texts: what to draw texts from, shape (M, L, D_text). Nobody knows who holds a text, so all do, alike.
        steps: of the solver.
        seed: any integer >= 0.
        on_progress: told (steps taken by all samples, steps in all).

    Raises:
        MathError: nobody published who holds the classes.
        NumericalError: samples that are not finite.
        ShapeError: texts that the experts cannot be told.
        SetupError: no texts for experts that read them.
    """
    texts_digest = None if texts is None else hashlib.sha256(texts.contiguous().numpy().data).hexdigest()
    recipe = [source, steps, seed, condition.model_dump(mode="json"), texts_digest]
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    part = max(1, min(_PART, _PART_BYTES // (4 * prod(ensemble.shape))))
    specs = {"images": TensorSpec("F32", (part, *ensemble.shape)), "expert": TensorSpec("I64", (part,))}
    images, expert_N = torch.empty(num, *ensemble.shape), torch.empty(num, dtype=torch.int64)
    uniform_N = torch.empty(num, dtype=torch.float64)

    def tell(first: int, taken: int) -> None:
        on_progress(first * steps + taken * (min(first + part, num) - first), num * steps)

    for number, first in enumerate(range(0, num, part)):
        path, rows = folder / f"{key}-{number:05d}.safetensors", slice(first, min(first + part, num))
        noise, uniform_BS = randomness(range(first, first + part), ensemble.shape, seed, 2)
        found = _kept(path, specs)
        if found is None:
            told_B = _draw_told(condition, texts, uniform_BS[:, 1])
            found = _drawn(ensemble, noise, uniform_BS[:, 0], told_B, steps, partial(tell, first))
            folder.mkdir(parents=True, exist_ok=True)
            save_tensors(path, found)
        drawn = ((images, found["images"]), (expert_N, found["expert"]), (uniform_N, uniform_BS[:, 1]))
        for whole, some in drawn:
            whole[rows] = some[: rows.stop - first]
        tell(first, steps)
    return Lessons(images, expert_N, _draw_told(condition, texts, uniform_N))


def _draw_told(condition: Condition, texts: Tensor | None, uniform_B: Tensor) -> Tensor | None:
    """Draw what each sample is told: nothing with probability `drop`, else any class or text alike."""
    match condition:
        case NoCondition():
            return None
        case ClassCondition(num_classes=num, drop=drop):
            choices = torch.arange(num)
        case TextCondition(drop=drop):
            if texts is None:
                remedy = "Give texts, or images with texts, or distil without."
                raise SetupError("texts", expected="some that samples are told", got="none", remedy=remedy)
            check_told(texts, condition)
            choices = texts
    chosen_B = ((uniform_B - drop).clamp(min=0) / (1 - drop) * len(choices)).long().clamp(max=len(choices) - 1)
    nothing = -1 if choices.dim() == 1 else 0
    return choices[chosen_B].masked_fill_((uniform_B < drop).view(-1, *[1] * (choices.dim() - 1)), nothing)


def _drawn(
    ensemble: Ensemble,
    noise: Tensor,
    uniform_B: Tensor,
    told_B: Tensor | None,
    steps: int,
    on_step: Callable[[int], None],
) -> dict[str, Tensor]:
    """Draw one sample from each noise, given what it is told."""
    labels = told_B.tolist() if told_B is not None and told_B.dim() == 1 else [-1] * len(noise)
    prior = {label: holders(ensemble, label).log_prior_K.exp() for label in set(labels)}
    prior_BK = torch.stack([prior[label] for label in labels])
    k_B = draw_expert(prior_BK, uniform_B)
    w_BK = one_hot(k_B, prior_BK.shape[1]).to(ensemble.device, torch.float32)
    if told_B is not None:
        told_B = told_B.to(ensemble.device)
    images, times = noise.to(ensemble.device) * ensemble.path.sigma(torch.ones(())), uniform_times(steps)

    def velocity(x_B: Tensor, t_B: Tensor) -> Tensor:
        return mix_velocity(ensemble.experts, x_B, t_B, w_BK.to(x_B), told_B, together=ensemble.chunk_size)

    with torch.no_grad():
        for taken, (t, t_next) in enumerate(pairwise(times), start=1):
            images = heun_step(velocity, images, t, t_next)
            on_step(taken)
    if not bool(torch.isfinite(images).all()):
        raise NumericalError("the ensemble's own samples", expected="finite numbers", got="some that are not")
    return {"images": images.float().cpu(), "expert": k_B}


def _kept(path: Path, specs: dict[str, TensorSpec]) -> dict[str, Tensor] | None:
    """Load a part that an earlier run drew; None where there is none, or a damaged one."""
    try:
        return load_tensors(path, specs, max_bytes=stored_bytes(specs)) if path.is_file() else None
    except FormatError:
        return None


def by_cluster(
    images: Tensor, files: PlanFiles, experts: Sequence[PublishedExpert], seed: int
) -> tuple[Tensor, Tensor]:
    """Let each image belong to an expert of its coarse cluster; of several silos', to one drawn by their priors.

    Args:
        images: samples, not their latents, shape (N, ...), in the plan's range.
        files: the plan's encoder and clusters.
        experts: the manifest's.
        seed: of the draw.

    Returns:
        Which images belong to an expert, bool (N,): of some clusters no expert is made. And those images' experts.

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
    return known_N, draw_expert(weight_NK[known_N], uniform_N)
