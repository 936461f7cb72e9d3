"""The one training loop: an expert from images, exactly the same however often it was killed on the way.

Everything random about step n (which images, which times, which noise) is a function of (seed, n), and a checkpoint
holds everything else, so resuming is not an approximation: on one machine, with one number of threads, the bytes are
the same. Several processes take parts of the same batches, so that only rounding depends on how many there are.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from ddm.diffusion.path import Path, Prediction
from ddm.errors import SetupError
from ddm.protocol.plan import TDistribution, Training
from ddm.training.batches import Examples, Teach, draw_batch
from ddm.training.checkpoints import Checkpoints
from ddm.training.config import Engine
from ddm.training.distributed import Machine, machine_of
from ddm.training.masking import first_whole_step, num_kept, tokens_of
from ddm.training.state import State

PROGRESS_STEPS = 10


@dataclass(frozen=True)
class Progress:
    """Where a run stands.

    Args:
        step: steps taken, of `num_steps`.
        num_steps: steps asked for.
        loss: mean squared error per value, averaged over about the last hundred steps.
        steps_per_second: since this process started on the run.
        seconds: time spent training, over all restarts.
    """

    step: int
    num_steps: int
    loss: float
    steps_per_second: float
    seconds: float


@dataclass(frozen=True)
class Trained:
    """A finished run.

    Args:
        ema: the averaged weights by name, float32, on the CPU; what is released. Of several processes the first has
            them, the others nothing.
        steps: steps taken; always all of them.
        loss: as in `Progress`.
        seconds: time spent training, over all restarts.
        flops: operations of all matrix products, forward and backward.
    """

    ema: dict[str, Tensor]
    steps: int
    loss: float
    seconds: float
    flops: float


def train(
    model: nn.Module,
    images: Tensor,
    settings: Training,
    path: Path,
    t_distribution: TDistribution,
    *,
    checkpoint_dir: FilePath,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
    prediction: Prediction = "velocity",
    labels: Tensor | None = None,
    drop: float = 0.0,
    engine: Engine = Engine(),
    teach: Teach | None = None,
) -> Trained:
    """Train a model to predict the velocity (or eps) of the images, from the last checkpoint where there is one.

    Args:
        model: freshly built; called as ``model(x_B, t_B)``, with labels as ``model(x_B, t_B, c)``. Afterwards it holds
            the last weights, not the averaged ones, where the engine computes.
        images: shape (N, ...), float32, in the plan's range.
        settings: the plan's recipe.
        path: how images become noise.
        t_distribution: of the training times.
        checkpoint_dir: the run's own folder; several processes must all see it.
        on_progress: called every few steps and at the end, in the first process; what it raises ends the run.
        should_stop: asked before every step; among several processes every few steps, and one that says yes is enough.
        prediction: what the model learns to answer.
        labels: each image's class, int64 (N,), or text, float32 (N, L, D_text).
        drop: probability with which a step hides an image's label from the model.
        engine: this machine's.
        teach: changes what is learned at a step's x_t, as in `ddm.distillation.distill`; None learns the images' own.

    Returns:
        The finished run.

    Raises:
        KeyboardInterrupt: `should_stop` said yes; a checkpoint was written first.
        NumericalError: loss or gradient is no longer finite; the last checkpoint is from before.
        SetupError: the checkpoints belong to another run, or the engine asks for what the machine does not have, or
            its GPU has too little memory.
        DataError: no images.
        ShapeError: not a label for each image, or a recipe for another kind of model.
    """
    images = images.detach().to("cpu", torch.float32).contiguous()
    examples = Examples(images, None if labels is None else labels.detach().cpu().contiguous(), drop)
    machine, num_tokens = _machine(engine, settings), tokens_of(model, settings)
    taught = [teach.digest] if teach else []
    recipe = [settings.model_dump(), repr(path), t_distribution.model_dump(), prediction, *taught]
    checkpoints = Checkpoints(checkpoint_dir, _run_digest(recipe, examples, model))
    flops = _flops(model, examples, settings, num_tokens)
    state = State(model, settings, machine, engine.accumulate)
    state.restore(checkpoints)
    started, first, before = time.monotonic(), state.step, state.seconds

    while state.step < settings.num_steps:
        if _stopped(machine, state.step, should_stop):
            if state.step > first:
                state.save(checkpoints)
            raise KeyboardInterrupt
        batch = draw_batch(examples, settings, state.step, t_distribution, num_tokens)
        try:
            state.advance(batch, path, prediction, teach)
        except torch.OutOfMemoryError as error:
            raise _too_large(engine) from error
        state.seconds = before + time.monotonic() - started
        done = state.step == settings.num_steps
        if done or state.step % PROGRESS_STEPS == 0:
            rate = (state.step - first) / (time.monotonic() - started)
            told = Progress(state.step, settings.num_steps, state.finite_loss(), rate, state.seconds)
            if machine.rank == 0:
                on_progress(told)
        if done or state.step % settings.checkpoint_steps == 0:
            state.save(checkpoints)

    return Trained(state.averaged(), state.step, state.finite_loss(), state.seconds, flops)


def _machine(engine: Engine, settings: Training) -> Machine:
    machine = machine_of(engine)
    if engine.accumulate * machine.num_processes > settings.batch_size:
        expected = f"at most {settings.batch_size} parts of a batch, one image each"
        got = f"{machine.num_processes} processes of {engine.accumulate} parts"
        remedy = "Accumulate less, or in fewer processes."
        raise SetupError("training.accumulate", expected=expected, got=got, remedy=remedy)
    return machine


def _too_large(engine: Engine) -> SetupError:
    return SetupError(
        "memory of the GPU",
        expected=f"room for a step in {engine.accumulate} parts" + (", recomputed" if engine.recompute else ""),
        got="less",
        remedy="Raise training.accumulate, set training.recompute, or shard it over several GPUs.",
    )


def _stopped(machine: Machine, step: int, should_stop: Callable[[], bool]) -> bool:
    """Whether to stop: what one process decides all do, and to agree takes a moment."""
    if machine.num_processes == 1:
        return should_stop()
    if step % PROGRESS_STEPS:
        return False
    return bool(machine.total(torch.tensor(float(should_stop()), device=machine.device)))


def _run_digest(recipe: Sequence[object], examples: Examples, model: nn.Module) -> str:
    """The sha256 of all that determines a run: recipe, data, and the weights it starts from."""
    named = {"images": examples.images}
    if examples.labels is not None:
        recipe, named = [*recipe, examples.drop], named | {"labels": examples.labels}
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode())
    for name, value in [*named.items(), *model.state_dict().items()]:
        digest.update(f"\0{name} {value.dtype} {tuple(value.shape)}\0".encode())
        digest.update(np.ascontiguousarray(value.detach().cpu().numpy()).data)
    return digest.hexdigest()


def _flops(model: nn.Module, examples: Examples, settings: Training, num_tokens: int) -> float:
    """Count the operations of the whole run, forward and backward."""
    masked = first_whole_step(settings)
    total = (settings.num_steps - masked) * _flops_per_image(model, examples, None)
    if masked:
        kept_BM = torch.zeros(1, num_kept(num_tokens, settings.mask_ratio), dtype=torch.int64, device="meta")
        total += masked * _flops_per_image(model, examples, kept_BM)
    return float(total * settings.batch_size)


def _flops_per_image(model: nn.Module, examples: Examples, kept_BM: Tensor | None) -> int:
    """Count the operations of one image's forward and backward pass, on tensors without memory."""
    parameters = {
        name: torch.empty_like(value, device="meta").requires_grad_(value.requires_grad)
        for name, value in model.named_parameters()
    }
    buffers = {name: torch.empty_like(value, device="meta") for name, value in model.named_buffers()}
    asked = [torch.empty((1, *examples.images.shape[1:]), device="meta"), torch.empty(1, device="meta")]
    if examples.labels is not None:
        asked.append(torch.empty_like(examples.labels[:1], device="meta"))
    kept = {} if kept_BM is None else {"kept_BM": kept_BM}
    with FlopCounterMode(display=False) as counter:
        functional_call(model, parameters | buffers, tuple(asked), kept).sum().backward()
    return int(counter.get_total_flops())
