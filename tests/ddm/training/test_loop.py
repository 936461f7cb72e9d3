"""The training loop against a plain one, its averages against sums, and its checkpoints against kill -9 and damage."""

import json
import math
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddm.diffusion.path import CosinePath
from ddm.errors import DataError, MathError, NumericalError, SetupError, ShapeError
from ddm.models import build_expert, training_flops
from ddm.protocol.architecture import Dit
from ddm.protocol.learning import LogitNormalT, Training, UniformT
from ddm.training.averages import average_of_width, averaging_weight
from ddm.training.batches import Examples, draw_batch, draw_times
from ddm.training.config import Engine
from ddm.training.loop import FinishedTraining, TrainingRun, train
from ddm.training.objective import TrainingObjective
from ddm.training.progress import Progress
from tests.support.errors import has_subject
from tests.support.forked import fork_process, wait_for_exit
from tests.support.threads import THREADS

SMALL = Dit(patch=2, hidden=16, depth=1, heads=2)
SHAPE = (1, 4, 4)


# Saves a checkpoint before every step, in one process.
SAVING = Engine(device="cpu", checkpoint_s=0.0)


def settings(**changes: object) -> Training:
    values: dict[str, object] = {
        "num_steps": 30,
        "batch_size": 8,
        "learning_rate": 0.01,
        "weight_decay": 0.01,
        "ema_decay": 0.9,
        "seed": 3,
    }
    return Training.model_validate(values | changes)


def images(num: int = 40) -> Tensor:
    return torch.rand(num, *SHAPE, generator=torch.Generator().manual_seed(0)) * 2 - 1


@dataclass
class Run:
    """One call of `train` with everything that tests vary."""

    folder: Path
    recipe: Training = field(default_factory=settings)
    data: Tensor = field(default_factory=images)
    model: nn.Module = field(default_factory=lambda: build_expert(SMALL, SHAPE, seed=3))
    reports: list[Progress] = field(default_factory=list)
    engine: Engine = Engine(device="cpu")
    labels: Tensor | None = None

    def __call__(self, should_stop: Callable[[], bool] = lambda: False) -> FinishedTraining:
        return train(
            self.model,
            Examples(self.data, self.labels),
            self.recipe,
            TrainingObjective(),
            TrainingRun(
                self.folder,
                on_progress=self.reports.append,
                should_stop=should_stop,
                engine=self.engine,
            ),
        )


def same_bytes(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[k].numpy().tobytes() == other[k].numpy().tobytes() for k in one
    )


def stop_at(step: int) -> Callable[[], bool]:
    """A `should_stop` that says yes when asked before the given step of this process."""
    questions = iter(range(step + 1))
    return lambda: next(questions) == step


LONG = {"num_steps": 120}


class _ReportedProgress(list[Progress]):
    """Progress of a process that another one watches, which kills it before it finishes."""

    def __init__(self, pipe: int) -> None:
        super().__init__()
        self._pipe = pipe

    def append(self, progress: Progress) -> None:
        os.write(self._pipe, f"{progress.step}\n".encode())
        if progress.step >= 110:
            signal.pause()  # However slow the other one is, there is something to kill.


def kill_in_mid_training(folder: Path, after_step: int) -> None:
    reader, writer = os.pipe()

    def train_until_killed() -> None:
        torch.set_num_threads(THREADS)
        Run(folder, settings(**LONG), reports=_ReportedProgress(writer), engine=SAVING)()

    pid = fork_process(train_until_killed)
    os.close(writer)
    with os.fdopen(reader) as steps:
        for line in steps:
            if int(line) >= after_step:
                break
        os.kill(pid, signal.SIGKILL)
    assert wait_for_exit(pid) == -signal.SIGKILL


def test_resumed_weights_are_byte_identical_when_the_process_was_killed_twice_in_mid_training(
    tmp_path: Path,
) -> None:
    whole = Run(tmp_path / "whole", settings(**LONG))()
    kill_in_mid_training(tmp_path / "killed", after_step=20)
    kill_in_mid_training(tmp_path / "killed", after_step=60)
    run = Run(tmp_path / "killed", settings(**LONG))
    resumed = run()
    assert 50 < run.reports[0].step <= 120
    assert same_bytes(resumed.ema, whole.ema)
    assert resumed.loss == whole.loss
    assert resumed.steps == whole.steps == 120
    assert not list((tmp_path / "killed").glob(".*"))


def test_weights_differ_when_the_seed_differs(tmp_path: Path) -> None:
    one = Run(tmp_path / "one")()
    other = Run(tmp_path / "other", settings(seed=4))()
    assert same_bytes(one.ema, Run(tmp_path / "again")().ema)
    assert not same_bytes(one.ema, other.ema)


def test_stopped_run_raises_and_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole")()
    for step in (5, 6, 9):
        with pytest.raises(KeyboardInterrupt):
            Run(tmp_path / "stopped")(stop_at(step))
    run = Run(tmp_path / "stopped")
    assert same_bytes(run().ema, whole.ema)
    assert [progress.step for progress in run.reports] == [30]


def test_interrupted_run_goes_on_in_as_many_threads_as_it_began_with(tmp_path: Path) -> None:
    two_threads = Engine(device="cpu", threads=2)
    whole = Run(tmp_path / "whole", engine=two_threads)()
    with pytest.raises(KeyboardInterrupt):
        Run(tmp_path / "stopped", engine=two_threads)(stop_at(15))
    counts: list[int] = []

    def count_threads() -> bool:
        counts.append(torch.get_num_threads())
        return False

    resumed = Run(tmp_path / "stopped", engine=Engine(device="cpu", threads=1))(count_threads)
    assert set(counts) == {2}
    assert torch.get_num_threads() == THREADS
    assert same_bytes(resumed.ema, whole.ema)


def test_finished_run_is_returned_without_another_step(tmp_path: Path) -> None:
    first = Run(tmp_path)()
    again = Run(tmp_path)
    assert same_bytes(again().ema, first.ema)
    assert again.reports == []


OTHER = {"schedule": "cosine", "warmup_steps": 4, "betas": (0.8, 0.95), "max_gradient_norm": 0.1}


@pytest.mark.parametrize(
    "changes", [{}, OTHER, OTHER | {"loss_weighting": "sigmoid", "order": "epochs"}]
)
def test_training_equals_a_plain_loop_written_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    recipe = settings(num_steps=12, **changes)
    decay_1, decay_2 = recipe.betas
    trained = Run(tmp_path, recipe)()
    model = build_expert(SMALL, SHAPE, seed=3)
    weights = dict(model.named_parameters())
    mean = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    square = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    history: list[dict[str, Tensor]] = []
    for n in range(12):
        batch = draw_batch(Examples(images()), recipe, n, UniformT())
        x_0 = batch.x_0
        eps = batch.eps
        t_B = batch.t_B
        t = batch.t_B[:, None, None, None]
        squares = (model((1 - t) * x_0 + t * eps, t_B) - (eps - x_0)).square()
        # sigmoid(-1 - log snr) of eps, whose error is 1 - t of the velocity's
        if recipe.loss_weighting == "sigmoid":
            snr = ((1 - t) / t).square()
            squares = squares * torch.sigmoid(-1 - snr.log()) * (1 - t).square()
        loss = squares.mean()
        gradients = dict(
            zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True)
        )
        norm = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
        rate = 0.01 * min(1.0, (n + 1) / recipe.warmup_steps)
        if recipe.schedule == "cosine":
            rate *= (1 + math.cos(math.pi * n / 12)) / 2
        with torch.no_grad():
            for name, weight in weights.items():
                gradient = gradients[name] / max(1.0, norm / recipe.max_gradient_norm)
                mean[name] = decay_1 * mean[name] + (1 - decay_1) * gradient
                square[name] = decay_2 * square[name] + (1 - decay_2) * gradient.square()
                unbiased = square[name] / (1 - decay_2 ** (n + 1))
                step = (mean[name] / (1 - decay_1 ** (n + 1))) / (unbiased.sqrt() + 1e-8)
                weight.copy_(weight * (1 - rate * 0.01) - rate * step)
        history.append({name: weight.detach().clone() for name, weight in weights.items()})
    decay = [0.9 ** (11 - n) for n in range(12)]
    for name, value in trained.ema.items():
        expected = sum(d * step[name] for d, step in zip(decay, history, strict=True)) / sum(decay)
        assert torch.allclose(value, expected, atol=2e-5), name
        assert not torch.allclose(value, history[0][name], atol=2e-5), name


def test_average_of_another_width_is_found_after_an_interrupted_run(tmp_path: Path) -> None:
    recipe = settings(num_steps=40, ema_decay=None, ema_width=0.1, ema_snapshots=8)
    with pytest.raises(KeyboardInterrupt):
        Run(tmp_path, recipe)(stop_at(17))
    trained = Run(tmp_path, recipe)()
    assert same_bytes(trained.ema, Run(tmp_path / "whole", recipe)().ema)
    for width in (0.1, 0.08):  # the average changes nothing about the training itself
        other = Run(tmp_path / f"{width}", settings(num_steps=40, ema_decay=None, ema_width=width))
        expected = flat(other().ema)
        last = flat(other.model.state_dict())
        afterwards = flat(average_of_width(tmp_path, recipe, width, trained.ema))
        assert (afterwards - expected).norm() < 0.05 * (expected - last).norm()
    with pytest.raises(MathError, check=has_subject("ema_snapshots")):
        average_of_width(tmp_path / "0.1", settings(), 0.1, trained.ema)


def flat(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in state.values()])


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.999])
def test_running_average_is_the_exact_decayed_mean_and_a_constant_weight_is_not(
    decay: float,
) -> None:
    values = np.random.default_rng(0).normal(size=50)
    running = 123.0
    constant = 123.0
    for n, value in enumerate(values, start=1):
        running += averaging_weight(decay, n) * (value - running)
        constant += (1 - decay) * (value - constant)
        weights = decay ** np.arange(n - 1, -1, -1, dtype=float)
        assert running == pytest.approx((weights * values[:n]).sum() / weights.sum())
    assert decay == 0.0 or constant != pytest.approx(running, abs=0.1)


@pytest.mark.parametrize("distribution", [UniformT(), LogitNormalT(mean=-0.5, std=1.2)])
def test_times_cover_every_quantile_of_their_distribution_in_each_batch(
    distribution: UniformT | LogitNormalT,
) -> None:
    for seed in range(20):
        t_B = draw_times(distribution, 64, np.random.default_rng(seed)).double()
        if isinstance(distribution, LogitNormalT):
            t_B = torch.special.ndtr((torch.logit(t_B) - distribution.mean) / distribution.std)
        assert sorted((t_B * 64).floor().clamp(max=63).int().tolist()) == pytest.approx(
            list(range(64)), abs=1
        )
        assert t_B.sort().values.diff().max() < 2 / 64


def test_loss_reaches_the_known_optimum_when_the_data_is_gaussian(tmp_path: Path) -> None:
    class LinearVelocity(nn.Module):
        """``a(t) x`` with a table over t: the optimum for N(0, v) data is known in closed form."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(20))

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return self.table[(t * 20).long().clamp(max=19)][:, None, None, None] * x

    data = 0.5 * torch.randn(2000, *SHAPE, generator=torch.Generator().manual_seed(1))
    recipe = settings(
        num_steps=400,
        batch_size=128,
        weight_decay=0.0,
        learning_rate=0.03,
        ema_decay=0.98,
    )
    trained = Run(tmp_path, recipe, data, LinearVelocity())()
    t = (torch.arange(20) + 0.5) / 20
    optimum = (t - (1 - t) * 0.25) / ((1 - t) ** 2 * 0.25 + t**2)
    assert (trained.ema["table"] - optimum).abs().max() < 0.1
    residual = 0.25 + 1 - (t - (1 - t) * 0.25) ** 2 / ((1 - t) ** 2 * 0.25 + t**2)
    assert trained.loss == pytest.approx(float(residual.mean()), abs=0.02)


def test_prediction_of_eps_and_another_path_train_to_other_weights(tmp_path: Path) -> None:
    def trained(name: str, objective: TrainingObjective) -> dict[str, Tensor]:
        return train(
            build_expert(SMALL, SHAPE),
            Examples(images()),
            settings(),
            objective,
            TrainingRun(tmp_path / name),
        ).ema

    runs = [
        trained("velocity", TrainingObjective()),
        trained("eps", TrainingObjective(prediction="eps")),
        trained("cosine", TrainingObjective(CosinePath())),
        trained("logit", TrainingObjective(t_distribution=LogitNormalT())),
    ]
    assert all(not same_bytes(runs[i], runs[j]) for i in range(4) for j in range(i))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [truncate, flip_a_byte, Path.unlink])
@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_run_falls_back_to_the_checkpoint_before_when_the_last_one_is_torn(
    tmp_path: Path, damage: Callable[[Path], None], suffix: str
) -> None:
    whole = Run(tmp_path / "whole")()
    with pytest.raises(KeyboardInterrupt):
        Run(tmp_path / "torn", engine=SAVING)(stop_at(23))
    names = sorted(path.name for path in (tmp_path / "torn").iterdir())
    assert [int(name[5:15]) for name in names] == [22, 22, 23, 23]
    damage(tmp_path / "torn" / f"step-0000000023{suffix}")
    questions: list[int] = []
    run = Run(tmp_path / "torn")
    assert same_bytes(run(lambda: bool(questions.append(1))).ema, whole.ema)
    assert len(questions) == 30 - 22


def test_run_starts_again_when_every_checkpoint_is_damaged(tmp_path: Path) -> None:
    whole = Run(tmp_path)()
    for path in tmp_path.iterdir():
        truncate(path)
    questions: list[int] = []
    assert same_bytes(Run(tmp_path)(lambda: bool(questions.append(1))).ema, whole.ema)
    assert len(questions) == 30


@pytest.mark.parametrize("change", ["settings", "data", "weights"])
def test_checkpoint_of_another_plan_data_or_start_is_refused(tmp_path: Path, change: str) -> None:
    Run(tmp_path)()
    run = Run(tmp_path)
    if change == "settings":
        run.recipe = settings(learning_rate=0.02)
    elif change == "data":
        run.data = images()
        run.data[7, 0, 0, 0] += 1e-6
    else:
        run.model = build_expert(SMALL, SHAPE, seed=4)
    with pytest.raises(SetupError, match="another training"):
        run()


class Breaking(nn.Module):
    """Finite until its weight has been moved `after` times, then its answer or its gradient is not."""

    def __init__(self, after: int, *, gradient_only: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.calls = 0
        self.after = after
        self.gradient_only = gradient_only

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        self.calls += 1
        if self.calls <= self.after:
            return x * self.weight
        # The square root of 0 is finite, its derivative is not.
        return (
            x * (self.weight * 0).sqrt() if self.gradient_only else x * self.weight * float("inf")
        )


@pytest.mark.parametrize("gradient_only", [True, False])
def test_training_ends_with_an_error_and_a_finite_checkpoint_when_loss_or_gradient_is_not_finite(
    tmp_path: Path, gradient_only: bool
) -> None:
    run = Run(tmp_path, model=Breaking(10, gradient_only=gradient_only), engine=SAVING)
    with pytest.raises(NumericalError):
        run()
    # Counting the operations took one of the ten calls.
    assert max(path.stem for path in tmp_path.iterdir()) == "step-0000000009"


def test_step_that_needs_more_memory_than_a_gpu_has_is_refused_with_what_to_change(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)

    def full(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if not inputs[0].is_meta:  # on which operations are counted
            raise torch.OutOfMemoryError("CUDA out of memory.")

    run.model.register_forward_pre_hook(full)
    with pytest.raises(SetupError, check=has_subject("memory of the GPU")) as refused:
        run()
    assert "training.accumulate" in refused.value.remedy


def test_progress_and_result_tell_steps_loss_rate_time_and_operations(tmp_path: Path) -> None:
    run = Run(tmp_path)
    trained = run()
    assert [(progress.step, progress.num_steps) for progress in run.reports] == [
        (10, 30),
        (20, 30),
        (30, 30),
    ]
    assert run.reports[-1].loss == trained.loss
    assert run.reports[0].seconds < run.reports[1].seconds < trained.seconds + 1e-9
    assert run.reports[-1].steps_per_second == pytest.approx(30 / run.reports[-1].seconds, rel=0.5)
    assert trained.flops == training_flops(SMALL, SHAPE, 30 * 8)


def test_seconds_add_up_over_restarts(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Run(tmp_path)(stop_at(15))
    record = json.loads((tmp_path / "step-0000000015.json").read_text())
    assert Run(tmp_path)().seconds > record["seconds"] > 0


def test_bf16_training_gives_finite_float32_weights_that_differ_from_fp32(tmp_path: Path) -> None:
    half = Run(tmp_path / "bf16", settings(precision="bf16"))()
    assert all(
        value.dtype == torch.float32 and bool(value.isfinite().all()) for value in half.ema.values()
    )
    assert not same_bytes(half.ema, Run(tmp_path / "fp32")().ema)


def test_training_without_images_or_with_another_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        Run(tmp_path, data=images(0))()
    with pytest.raises(ShapeError):
        Run(tmp_path, data=images()[0])()
