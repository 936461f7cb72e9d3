"""One dense student from an ensemble: as cheap as a single expert, with the law of the whole.

The student is trained like an expert, but at x_t it learns what a teacher answers there:

    L = E |v(x_t, t) - u_teacher(x_t, t)|^2

The best v is the mean of the teacher's answers at x_t. Where the teacher is the expert k that x_0 belongs to, k given
x_t has the router's posterior, so this mean is ``sum_k p(k | x_t) u_k(x_t, t)``, the mixture itself: one evaluation a
step, no router. McAllister et al. 2025, section 3.6, do this with each training image's cluster label. Without data,
x_0 and its k are the ensemble's own samples. Images that are not distributed like the ensemble's have no such label:
there k is drawn from the router's posterior at x_t, or the whole mixture is asked.

Where experts have conditions, student and teacher are told the same, at a step where the student is told nothing both
are, and every letter above is given it: the label of an image of a class has the posterior given x_t and the class.

A teacher's answer is shown to the student as the x_0 and eps that it means at this x_t
(`ddm.diffusion.path.x_0_and_eps`), so that a step on it is an ordinary step of `ddm.training.loop.train`, whose loop,
checkpoints and machines these are.
"""

# Shape legend: B batch, K experts, ... all data dimensions.
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Literal, assert_never

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from ddm.diffusion.path import Expert, x_0_and_eps, x_t
from ddm.distillation.dataset import Lessons, check_told, holders
from ddm.ensemble import Ensemble, mix_velocity
from ddm.errors import MathError, ShapeError
from ddm.protocol.plan import TDistribution, Training, UniformT
from ddm.sampling.strategies import draw_expert
from ddm.training.batches import Batch
from ddm.training.config import Engine
from ddm.training.loop import Progress, Trained, train

Teacher = Literal["label", "drawn", "mixture"]
"""Who answers at x_t: the expert that x_0 belongs to; one drawn from the posterior at x_t; all, weighted by it."""

Ask = Callable[[Tensor, Batch], Tensor]
"""The weights (B, K) of the experts whose answers are mixed: at x_t, on the CPU, given the batch."""


def distill(
    ensemble: Ensemble,
    student: nn.Module,
    lessons: Lessons,
    settings: Training,
    *,
    teacher: Teacher,
    source: str,
    checkpoint_dir: FilePath,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
    t_distribution: TDistribution = UniformT(),
    engine: Engine = Engine(),
) -> Trained:
    """Train a student on an ensemble's answers, from the last checkpoint where there is one.

    Args:
        ensemble: the teacher; it answers where its experts live, which is best where the engine computes.
        student: freshly built; called as ``student(x_B, t_B)``, where lessons are told as ``student(x_B, t_B, c)``.
        lessons: images, what is told of each, and for the teacher `label` the expert that each belongs to.
        settings: how; the same recipe as an expert's.
        teacher: who answers at x_t.
        source: names the ensemble; a run does not continue with another one.
        checkpoint_dir: as in `ddm.training.loop.train`, as are the others.
        on_progress: told of progress.
        should_stop: asked before a step.
        t_distribution: of the training times.
        engine: this machine's.

    Raises:
        KeyboardInterrupt: `should_stop` said yes; a checkpoint was written first.
        MathError: the teacher needs labels, a router or a histogram of classes that are not there.
        NumericalError: loss or gradient is no longer finite.
        SetupError: the checkpoints belong to another run.
        ShapeError: images of another shape, labels of other experts, or conditions that the experts do not have.
    """
    return train(
        student,
        lessons.images,
        settings,
        ensemble.path,
        t_distribution,
        checkpoint_dir=checkpoint_dir,
        on_progress=on_progress,
        should_stop=should_stop,
        labels=lessons.told,
        drop=lessons.drop,
        engine=engine,
        teach=teaching(ensemble, lessons, teacher, source=source, precision=settings.precision),
    )


@dataclass(frozen=True)
class Teaching:
    """A teacher as the training loop asks it; see `ddm.training.Teach`.

    Args:
        ensemble: whose experts answer.
        ask: whose answers count.
        digest: names ensemble, teacher and the experts that images belong to.
        precision: bf16 lets experts compute in it, as the student does; it is the teacher's time that counts.
    """

    ensemble: Ensemble
    ask: Ask
    digest: str
    precision: Literal["fp32", "bf16"] = "fp32"

    def __call__(self, part: Batch) -> Batch:
        """Return the part with the teacher's x_0 and eps: at the same x_t, their velocity is the teacher's answer."""
        ensemble, (x_0, eps, t_B, told) = self.ensemble, (part.x_0, part.eps, part.t_B, part.told)
        with torch.no_grad():
            x_B = x_t(ensemble.path, x_0, eps, t_B)
            w_BK = self.ask(x_B.cpu(), part)
            asked_B, times_B, w_BK = (each.to(ensemble.device) for each in (x_B, t_B, w_BK.to(x_B.dtype)))
            told_B = None if told is None else told.to(ensemble.device)
            u_B = mix_velocity(self._experts(), asked_B, times_B, w_BK, told_B, together=ensemble.chunk_size)
            x_0, eps = x_0_and_eps(ensemble.path, x_B, u_B.to(x_B), t_B)
        return replace(part, x_0=x_0, eps=eps)

    def _experts(self) -> Sequence[Expert]:
        return [self._asked(k) for k in range(len(self.ensemble.experts))]

    def _asked(self, k: int) -> Expert:
        def answer(x_B: Tensor, *told_B: Tensor) -> Tensor:
            with torch.autocast(x_B.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
                return self.ensemble.experts[k](x_B, *told_B).to(x_B)

        return answer


def teaching(
    ensemble: Ensemble, lessons: Lessons, teacher: Teacher, *, source: str, precision: Literal["fp32", "bf16"] = "fp32"
) -> Teaching:
    """Return the teacher, once it is clear that he can answer; see `distill`."""
    if tuple(lessons.images.shape[1:]) != tuple(ensemble.shape):
        raise ShapeError("images", expected=str(tuple(ensemble.shape)), got=str(tuple(lessons.images.shape[1:])))
    if lessons.told is not None:
        check_told(lessons.told, ensemble.condition)
    digest = hashlib.sha256(json.dumps([teacher, source]).encode())
    match teacher:
        case "label":
            ask = _by_label(lessons, len(ensemble.experts))
            digest.update(torch.as_tensor(lessons.expert_N).contiguous().numpy().data)
        case "mixture" | "drawn":
            ask = _by_posterior(ensemble, lessons, drawn=teacher == "drawn")
        case _:
            assert_never(teacher)
    return Teaching(ensemble, ask, digest.hexdigest(), precision)


def _by_label(lessons: Lessons, num_experts: int) -> Ask:
    expert_N = lessons.expert_N
    if expert_N is None:
        remedy = "Let the teacher be drawn or the mixture."
        raise MathError("teacher label", expected="the expert of each image", got="none", remedy=remedy)
    if not 0 <= int(expert_N.min()) <= int(expert_N.max()) < num_experts:
        raise ShapeError("labels", expected=f"experts 0 to {num_experts - 1}", got="others")
    return lambda x_B, batch: one_hot(expert_N[torch.as_tensor(batch.chosen_B).cpu()], num_experts)


def _by_posterior(ensemble: Ensemble, lessons: Lessons, *, drawn: bool) -> Ask:
    """Weigh experts by the posterior at x_t, given the class; who holds a text nobody knows, so it tells nothing."""
    classes = lessons.told if lessons.told is not None and lessons.told.dim() == 1 else torch.tensor([-1])
    branches = {label: holders(ensemble, label) for label in {-1, *classes.tolist()}}
    if any(each.router is None and int(each.log_prior_K.isfinite().sum()) > 1 for each in branches.values()):
        raise MathError("teacher's posterior", expected="a router", got="none", remedy="Let the teacher be the label.")

    def posterior(x_B: Tensor, batch: Batch) -> Tensor:
        w_BK, t_B = torch.empty(len(x_B), len(ensemble.experts), dtype=torch.float64), batch.t_B.cpu()
        told_B = batch.told if batch.told is not None and batch.told.dim() == 1 else torch.full((len(x_B),), -1)
        for label in set(told_B.tolist()):
            rows = (told_B == label).nonzero()[:, 0].cpu()
            w_BK[rows] = branches[label].posterior(x_B[rows], t_B[rows], together=ensemble.chunk_size).double()
        return w_BK

    def one(x_B: Tensor, batch: Batch) -> Tensor:
        uniform_B = torch.as_tensor(batch.uniform_B).cpu()
        return one_hot(draw_expert(posterior(x_B, batch), uniform_B), len(ensemble.experts))

    return one if drawn else posterior
