"""The training loop: trains an expert on images, and reaches the same weights however often it is interrupted.

Everything random about step n (images, times, noise) is a function of (seed, n), and a checkpoint holds everything
else, so resuming is exact: on one machine, with one number of threads, the bytes are the same. Several processes take
parts of the same batches, so that only rounding depends on their number.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from ddm.errors import SetupError
from ddm.images.rows import Images, feed
from ddm.protocol.learning import Training
from ddm.system.cores import computing_in
from ddm.training.averages import kept_steps
from ddm.training.batches import Batch, Examples, Teach, draw_batch
from ddm.training.checkpoints import Checkpoints
from ddm.training.config import Engine
from ddm.training.distributed import TrainingProcess, training_process
from ddm.training.masking import first_whole_step, num_kept, tokens_of
from ddm.training.objective import TrainingObjective
from ddm.training.prefetch import drawing_threads, drawn_ahead
from ddm.training.private import PrivateSteps, PrivateTraining, check_engine
from ddm.training.progress import PROGRESS_STEPS, Progress, StepInterval
from ddm.training.saving import CheckpointSchedule, ProcessAgreement
from ddm.training.schedule import learning_rate
from ddm.training.state import TrainingState

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FinishedTraining:
    """A finished run.

    Args:
        ema: the averaged weights by name, float32, on the CPU, as they are published; empty in all processes but the
            first.
        steps: steps taken, always all of the recipe's.
        loss: as in `Progress`.
        seconds: time spent training, over all restarts.
        flops: operations of all matrix products, forward and backward.
        threads: in which each process computed, from the first step to the last.
    """

    ema: dict[str, Tensor]
    steps: int
    loss: float
    seconds: float
    flops: float
    threads: int


def _ignore_progress(progress: Progress) -> None:
    """Report a run's progress to nobody."""


def _never_stop() -> bool:
    return False


@dataclass(frozen=True)
class TrainingRun:
    """Where a model is trained, on which machine, and who follows it.

    Args:
        checkpoint_dir: the run's own folder, shared by all processes.
        on_progress: called every few steps and at the end, in the first process; an exception that it raises ends the
            run.
        should_stop: called before every step, with several processes every few steps; True in one of them is enough.
        engine: this machine's; it says how often the run saves a checkpoint.
        stops: see `ddm.training.state.TrainingState`.
    """

    checkpoint_dir: FilePath
    on_progress: Callable[[Progress], None] = _ignore_progress
    should_stop: Callable[[], bool] = _never_stop
    engine: Engine = Engine()
    stops: bool = True


def train(
    model: nn.Module,
    examples: Examples,
    settings: Training,
    objective: TrainingObjective,
    run: TrainingRun,
    *,
    teach: Teach | None = None,
    private: PrivateTraining | None = None,
) -> FinishedTraining:
    """Train a model to predict the velocity (or eps) of the images, from the last checkpoint where there is one.

    Args:
        model: freshly built; called as ``model(x_B, t_B)``, with labels as ``model(x_B, t_B, c)``. Afterwards it holds
            the last weights, not the averaged ones, where the engine computes.
        examples: the images, in the plan's range, and their labels.
        settings: the plan's recipe.
        objective: what the model predicts.
        run: where it is trained.
        teach: replaces the target at a step's x_t, as in `ddm.distillation.distill`; None trains on the images' own.
        private: trains privately, see `ddm.training.private`; without a teacher.

    Returns:
        The finished run.

    Raises:
        KeyboardInterrupt: `should_stop` returned True; a checkpoint was written first.
        NumericalError: loss or gradient is no longer finite; the last checkpoint is from before that.
        SetupError: the checkpoints belong to another run, the machine lacks a device or processes that the engine
            needs, or the GPU has too little memory.
        DataError: private training without a unit for each image.
        ShapeError: a recipe for another kind of model.
    """
    if private is not None:
        check_engine(run.engine)
    examples = examples.on_cpu()
    process = _training_process(run.engine, settings)
    num_tokens = tokens_of(model, settings)
    recipe = _recipe(settings, objective, teach, private)
    # Before the first step: the digest covers the initial weights.
    checkpoints = Checkpoints(run.checkpoint_dir, _run_digest(recipe, examples, model))
    num_samples = settings.batch_size
    if private is not None:
        # As the plan implies it: how many images a unit has stays hidden.
        num_samples = private.terms.units_per_step * private.terms.draws
    flops = num_samples * _flops(model, examples, settings, num_tokens)
    state = TrainingState(model, settings, process, run.engine.accumulate, stops=run.stops)
    if run.engine.threads is not None:
        state.threads = run.engine.threads
    # A run that continues keeps the number of threads with which it began.
    state.restore(checkpoints)
    steps: _Steps
    if private is not None:
        steps = PrivateSteps(state, private, examples, objective)
    else:
        steps = _BatchSteps(state, examples, objective, num_tokens, teach)
    with computing_in(state.threads):
        _take_steps(state, steps, checkpoints, run, num_samples)
    return FinishedTraining(
        ema=state.averaged(),
        steps=state.step,
        loss=state.finite_loss(),
        seconds=state.seconds,
        flops=flops,
        threads=state.threads,
    )


def _recipe(
    settings: Training,
    objective: TrainingObjective,
    teach: Teach | None,
    private: PrivateTraining | None,
) -> list[object]:
    """Return what a run is trained by; the engine is not part of it, so that a run may continue with another one."""
    recipe: list[object] = [
        settings.model_dump(),
        repr(objective.path),
        objective.t_distribution.model_dump(),
        objective.prediction,
    ]
    if teach is not None:
        recipe.append(teach.digest)
    elif private is not None:
        recipe += private.recipe
    return recipe


def _take_steps(
    state: TrainingState,
    steps: "_Steps",
    checkpoints: Checkpoints,
    run: TrainingRun,
    images_per_step: int,
) -> None:
    """Take the steps that the recipe still has, write averages at theirs, and checkpoints by the clock and at the end.

    Args:
        state: the state of the run.
        steps: draws and takes each step.
        checkpoints: of the run.
        run: where it is trained.
        images_per_step: that a step learns from.

    Raises:
        KeyboardInterrupt, NumericalError, SetupError: see `train`.
    """
    process = state.process
    num_steps = state.settings.num_steps
    steps_of_averages = kept_steps(state.settings)
    schedule = CheckpointSchedule(run.engine.checkpoint_s)
    agreement = ProcessAgreement(process, run.should_stop, schedule)
    started_at = time.monotonic()
    reported_at = started_at
    first_step = state.step
    saved_step = state.step
    seconds_before = state.seconds
    threads = drawing_threads(process.device, process.num_processes)
    with drawn_ahead(steps.draw, first_step, num_steps, threads) as next_batch:
        while state.step < num_steps:
            decision = agreement.decide(state.step)
            # Without a step since the last checkpoint, that one is still the newest.
            if (decision.save or decision.stop) and state.step > saved_step:
                _save(state, checkpoints, schedule)
                saved_step = state.step
            if decision.stop:
                raise KeyboardInterrupt
            try:
                steps.advance(next_batch())
            except torch.OutOfMemoryError as error:
                if isinstance(steps, PrivateSteps):
                    raise _too_large_unit() from error
                raise _too_large(run.engine) from error
            elapsed_s = time.monotonic() - started_at
            state.seconds = seconds_before + elapsed_s
            is_last = state.step == num_steps
            if is_last or state.step % PROGRESS_STEPS == 0:
                # Every process takes part in the sum of the loss; the first one reports it.
                measured = state.measure()
                now = time.monotonic()
                interval = StepInterval(
                    num_steps=measured.num_steps,
                    loss=measured.loss,
                    learning_rate=learning_rate(state.settings, state.step - 1),
                    gradient_norm=measured.gradient_norm,
                    num_images=measured.num_steps * images_per_step,
                    seconds=now - reported_at,
                )
                reported_at = now
                progress = Progress(
                    step=state.step,
                    num_steps=num_steps,
                    loss=measured.smoothed_loss,
                    steps_per_second=(state.step - first_step) / elapsed_s,
                    seconds=state.seconds,
                    interval=interval,
                )
                if process.rank == 0:
                    run.on_progress(progress)
            # Before the checkpoint. After a crash between the two the step is taken again and the averages are written
            # again; in the other order they would be missing for good.
            if state.step in steps_of_averages:
                state.keep_averages(run.checkpoint_dir)
            if is_last:
                state.save(checkpoints)

    num_lost = int(state.num_lost)
    if num_lost and process.rank == 0:
        _log.warning(
            "%d of %d steps had no finite gradient and took none",
            num_lost,
            state.step - first_step,
        )


class _Steps(Protocol):
    """Draws what each step learns from, and takes it."""

    def draw(self, step: int) -> Any:
        """Return what step number `step` learns from."""
        ...

    def advance(self, drawn: Any) -> None:
        """Take the step."""
        ...


@dataclass(frozen=True)
class _BatchSteps:
    """Draws the batch of each step, and takes it."""

    state: TrainingState
    examples: Examples
    objective: TrainingObjective
    num_tokens: int
    teach: Teach | None

    def draw(self, step: int) -> Batch:
        batch = draw_batch(
            self.examples,
            self.state.settings,
            step,
            self.objective.t_distribution,
            self.num_tokens,
        )
        if self.state.process.device.type == "cuda":
            return batch.pinned()
        return batch

    def advance(self, drawn: Batch) -> None:
        self.state.advance(drawn, self.objective, self.teach)


def _training_process(engine: Engine, settings: Training) -> TrainingProcess:
    process = training_process(engine)
    if engine.accumulate * process.num_processes > settings.batch_size:
        raise SetupError(
            "training.accumulate",
            expected=f"at most {settings.batch_size} parts of a batch, one per image",
            got=f"{process.num_processes} processes of {engine.accumulate} parts",
            remedy="Lower training.accumulate or training.processes.",
        )
    return process


def _too_large(engine: Engine) -> SetupError:
    expected = f"room for a step in {engine.accumulate} parts"
    if engine.recompute:
        expected += ", recomputed"
    return SetupError(
        "memory of the GPU",
        expected=expected,
        got="too little free memory",
        remedy="Raise training.accumulate, set training.recompute, or shard it over several GPUs.",
    )


def _too_large_unit() -> SetupError:
    # A unit is computed alone and as a whole, so that no setting of the engine divides it.
    return SetupError(
        "memory of the GPU",
        expected="room for the images and draws of one unit",
        got="too little free memory",
        remedy=(
            'Set training.device = "cpu", or use a GPU with more memory. A plan with fewer images_per_unit or draws in '
            "expert.privacy needs less."
        ),
    )


def _save(
    state: TrainingState,
    checkpoints: Checkpoints,
    schedule: CheckpointSchedule,
) -> None:
    """Save a checkpoint, and let the schedule know how long that took."""
    # Waits for the steps that are queued on a GPU, whose time is not the checkpoint's.
    state.finite_loss()
    with schedule.saving():
        state.save(checkpoints)


def _run_digest(
    recipe: Sequence[object],
    examples: Examples,
    model: nn.Module,
) -> str:
    """Return the sha256 of everything that determines a run: recipe, data and initial weights."""
    named: dict[str, Images] = {"images": examples.images}
    if examples.labels is not None:
        recipe = [*recipe, examples.drop]
        named["labels"] = examples.labels
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode())
    for name, value in [*named.items(), *model.state_dict().items()]:
        # Images that are read as they are drawn come as float32.
        dtype = value.dtype if isinstance(value, Tensor) else torch.float32
        digest.update(f"\0{name} {dtype} {tuple(value.shape)}\0".encode())
        feed(digest.update, value)
    return digest.hexdigest()


def _flops(
    model: nn.Module,
    examples: Examples,
    settings: Training,
    num_tokens: int,
) -> float:
    """Count the operations of a run of one image a step, forward and backward."""
    num_masked_steps = first_whole_step(settings)
    num_whole_steps = settings.num_steps - num_masked_steps
    total = num_whole_steps * _flops_per_image(model, examples, None)
    if num_masked_steps:
        # Which tokens are kept does not change the number of operations.
        shape = (1, num_kept(num_tokens, settings.mask_ratio))
        kept_BM = torch.zeros(shape, dtype=torch.int64, device="meta")
        total += num_masked_steps * _flops_per_image(model, examples, kept_BM)
    return float(total)


def _flops_per_image(
    model: nn.Module,
    examples: Examples,
    kept_BM: Tensor | None,
) -> int:
    """Count the operations of one image's forward and backward pass, on tensors without memory."""
    # On the device "meta" tensors have shapes and no values, so that counting takes no memory and hardly any time.
    parameters = {
        name: torch.empty_like(value, device="meta").requires_grad_(value.requires_grad)
        for name, value in model.named_parameters()
    }
    buffers = {
        name: torch.empty_like(value, device="meta") for name, value in model.named_buffers()
    }
    inputs = [
        torch.empty((1, *examples.images.shape[1:]), device="meta"),
        torch.empty(1, device="meta"),
    ]
    if examples.labels is not None:
        inputs.append(torch.empty_like(examples.labels[:1], device="meta"))
    options = {}
    if kept_BM is not None:
        options["kept_BM"] = kept_BM
    with FlopCounterMode(display=False) as counter:
        prediction = functional_call(model, parameters | buffers, tuple(inputs), options)
        prediction.sum().backward()
    return int(counter.get_total_flops())
