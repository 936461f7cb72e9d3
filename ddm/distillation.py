"""One dense student from an ensemble: as cheap as a single expert, with the law of the whole.

The student is trained like an expert, but at x_t it learns what a teacher answers there:

    L = E |v(x_t, t) - u_teacher(x_t, t)|^2

The best v is the mean of the teacher's answers at x_t. Where the teacher is the expert k that x_0 belongs to, k given
x_t has the router's posterior, so this mean is ``sum_k p(k | x_t) u_k(x_t, t)``, the mixture itself: one evaluation a
step, no router. McAllister et al. 2025, section 3.6, do this with each training image's cluster label. Without data,
x_0 and its k are the ensemble's own samples. Images that are not distributed like the ensemble's have no such label:
there k is drawn from the router's posterior at x_t, or the whole mixture is asked.

A teacher's answer is shown to the student as the x_0 and eps that it means at this x_t (`ddm.schedule.x_0_and_eps`), so
that a step on it is an ordinary training step.
"""

# Shape legend: N images, B batch, K experts, ... all data dimensions.
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Literal, assert_never

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from ddm.checkpoints import Checkpoints
from ddm.engine import Engine
from ddm.ensemble import Ensemble, mix_velocity
from ddm.errors import MathError, SetupError, ShapeError
from ddm.lessons import Lessons
from ddm.mixture import Branch
from ddm.protocol.plan import TDistribution, Training, UniformT
from ddm.routers.base import log_prior
from ddm.schedule import x_0_and_eps, x_t
from ddm.strategies import draw_expert
from ddm.streams import stream
from ddm.training import Examples, Progress, draw_batch
from ddm.training.batches import Batch
from ddm.training.loop import PROGRESS_STEPS
from ddm.training.machine import machine_of
from ddm.training.state import State

Teacher = Literal["label", "drawn", "mixture"]
"""Who answers at x_t: the expert that x_0 belongs to; one drawn from the posterior at x_t; all, weighted by it."""


@dataclass(frozen=True)
class Distilled:
    """A finished student.

    Attributes:
        ema: the averaged weights by name, float32, on the CPU.
        loss: mean squared distance from the teacher's answers per value, averaged over about the last hundred steps.
        seconds: time spent training, over all restarts.
    """

    ema: dict[str, Tensor]
    loss: float
    seconds: float


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
) -> Distilled:
    """Train a student on an ensemble's answers, from the last checkpoint where there is one.

    Args:
        ensemble: the teacher; whatever conditions its experts have, they are told none.
        student: freshly built; called as ``student(x_B, t_B)``.
        lessons: images, and for the teacher `label` the expert that each belongs to.
        settings: how; the same recipe as an expert's.
        teacher: who answers at x_t.
        source: names the ensemble; a run does not continue with another one.
        checkpoint_dir: the run's own folder.
        on_progress: as in `ddm.training.train`.
        should_stop: as in `ddm.training.train`.
        t_distribution: of the training times.
        engine: this machine's.

    Raises:
        KeyboardInterrupt: `should_stop` said yes; a checkpoint was written first.
        MathError: the teacher needs labels or a router that are not there.
        NumericalError: loss or gradient is no longer finite.
        SetupError: the checkpoints belong to another run, or several processes.
        ShapeError: images of another shape, or labels of other experts.
    """
    ask = asking(ensemble, lessons, teacher)
    machine = machine_of(engine)
    if machine.num_processes > 1:
        raise SetupError("distillation", expected="one process", got=f"{machine.num_processes}")
    state = State(student, settings, machine, engine.accumulate)
    recipe = [settings.model_dump(), repr(ensemble.path), t_distribution.model_dump(), teacher, source]
    checkpoints = Checkpoints(checkpoint_dir, _digest(recipe, lessons, student))
    state.restore(checkpoints)
    examples = Examples(lessons.images, lessons.expert_N)
    started, first, before = time.monotonic(), state.step, state.seconds

    while state.step < settings.num_steps:
        if should_stop():
            if state.step > first:
                state.save(checkpoints)
            raise KeyboardInterrupt
        uniform_B = torch.from_numpy(stream("distill", settings.seed, state.step).random(settings.batch_size))
        batch = draw_batch(examples, settings, state.step, t_distribution)
        state.advance(answered(ensemble, ask, batch, uniform_B), ensemble.path, "velocity")
        state.seconds = before + time.monotonic() - started
        done = state.step == settings.num_steps
        if done or state.step % PROGRESS_STEPS == 0:
            rate = (state.step - first) / (time.monotonic() - started)
            on_progress(Progress(state.step, settings.num_steps, state.finite_loss(), rate, state.seconds))
        if done or state.step % settings.checkpoint_steps == 0:
            state.save(checkpoints)
    return Distilled(state.averaged(), state.finite_loss(), state.seconds)


Ask = Callable[[Tensor, Tensor, Batch, Tensor], Tensor]
"""The weights (B, K) of the experts whose answers are mixed: at x_t and t, given the batch and uniform numbers."""


def answered(ensemble: Ensemble, ask: Ask, batch: Batch, uniform_B: Tensor) -> Batch:
    """Return the batch with the teacher's x_0 and eps: at the same x_t, their velocity is the teacher's answer."""
    with torch.inference_mode():
        x_B = x_t(ensemble.path, batch.x_0, batch.eps, batch.t_B).to(ensemble.device)
        t_B = batch.t_B.to(ensemble.device)
        w_BK = ask(x_B, t_B, batch, uniform_B).to(x_B)
        u_B = mix_velocity(ensemble.experts, x_B, t_B, w_BK, together=ensemble.chunk_size)
        x_0, eps = x_0_and_eps(ensemble.path, x_B, u_B, t_B)
    # Cloned, because tensors made in inference mode take no part in a backward pass.
    return Batch(x_0.cpu().clone(), eps.cpu().clone(), batch.t_B)


def asking(ensemble: Ensemble, lessons: Lessons, teacher: Teacher) -> Ask:
    """Return who is asked, once it is clear that he can answer."""
    num_experts = len(ensemble.experts)
    if tuple(lessons.images.shape[1:]) != tuple(ensemble.shape):
        raise ShapeError("images", expected=str(tuple(ensemble.shape)), got=str(tuple(lessons.images.shape[1:])))
    if teacher == "label":
        if lessons.expert_N is None:
            remedy = "Let the teacher be drawn or the mixture."
            raise MathError("teacher label", expected="the expert of each image", got="none", remedy=remedy)
        if not 0 <= int(lessons.expert_N.min()) <= int(lessons.expert_N.max()) < num_experts:
            raise ShapeError("labels", expected=f"experts 0 to {num_experts - 1}", got="others")
        return lambda x_B, t_B, batch, uniform_B: one_hot(torch.as_tensor(batch.told), num_experts)
    branch = Branch(1.0, log_prior(ensemble.prior, num_experts), ensemble.router)
    if ensemble.router is None and int(branch.log_prior_K.isfinite().sum()) > 1:
        raise MathError(f"teacher {teacher}", expected="a router", got="none", remedy="Let the teacher be the label.")

    def posterior(x_B: Tensor, t_B: Tensor, batch: Batch, uniform_B: Tensor) -> Tensor:
        return branch.posterior(x_B, t_B, together=ensemble.chunk_size)

    match teacher:
        case "mixture":
            return posterior
        case "drawn":
            return lambda x_B, t_B, batch, uniform_B: one_hot(
                draw_expert(posterior(x_B, t_B, batch, uniform_B), uniform_B.to(x_B.device)), num_experts
            )
        case _:
            assert_never(teacher)


def _digest(recipe: Sequence[object], lessons: Lessons, student: nn.Module) -> str:
    """The sha256 of all that determines a run: recipe, teacher, lessons, and the weights it starts from."""
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode())
    labels = {} if lessons.expert_N is None else {"labels": lessons.expert_N}
    for name, value in ({"images": lessons.images} | labels | student.state_dict()).items():
        digest.update(f"\0{name} {value.dtype} {tuple(value.shape)}\0".encode())
        digest.update(np.ascontiguousarray(value.detach().cpu().numpy()).data)
    return digest.hexdigest()
