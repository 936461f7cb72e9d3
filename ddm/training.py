"""The one training loop: an expert from images, exactly the same however often it was killed on the way.

Everything random about step n (which images, which times, which noise) is a function of (seed, n), and a checkpoint
holds everything else, so resuming is not an approximation: on one machine, with one number of threads, the bytes are
the same.
"""

# Shape legend: N images, B batch, C channels, H height, W width.
import copy
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ddm.checkpoints import Checkpoints
from ddm.errors import DataError, NumericalError, ShapeError
from ddm.protocol.plan import LogitNormalT, Training, UniformT
from ddm.schedule import Path, Prediction, velocity, x_t
from ddm.streams import stream

TDistribution = UniformT | LogitNormalT

MAX_GRADIENT_NORM = 1.0
WARMUP_STEPS = 100
LOSS_DECAY = 0.99
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
        ema: the averaged weights by name, float32, on the CPU; what is released.
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
) -> Trained:
    """Train a model to predict the velocity (or eps) of the images, from the last checkpoint where there is one.

    Args:
        model: freshly built, on the device to train on; called as ``model(x_BCHW, t_B)``. Afterwards it holds the last
            weights, not the averaged ones.
        images: shape (N, C, H, W), float32, in the plan's range.
        settings: the plan's recipe.
        path: how images become noise.
        t_distribution: of the training times.
        checkpoint_dir: the run's own folder.
        on_progress: called every few steps and at the end; what it raises ends the run.
        should_stop: asked before every step.
        prediction: what the model learns to answer.

    Returns:
        The finished run.

    Raises:
        KeyboardInterrupt: `should_stop` said yes; a checkpoint was written first.
        NumericalError: loss or gradient is no longer finite; the last checkpoint is from before.
        SetupError: the checkpoints belong to another run.
        DataError: no images.
        ShapeError: images that are not (N, C, H, W).
    """
    if images.dim() != 4:
        raise ShapeError("images", expected="shape (N, C, H, W)", got=str(tuple(images.shape)))
    if not len(images):
        raise DataError("images", expected="at least one", got="none")
    images = images.detach().to("cpu", torch.float32).contiguous()
    recipe = [settings.model_dump(), repr(path), t_distribution.model_dump(), prediction]
    state = _State(model, settings)
    checkpoints = Checkpoints(checkpoint_dir, _run_digest(recipe, images, model))
    state.restore(checkpoints)
    started, first, before = time.monotonic(), state.step, state.seconds

    while state.step < settings.num_steps:
        if should_stop():
            if state.step > first:
                state.save(checkpoints)
            raise KeyboardInterrupt
        state.advance(_batch(images, settings, state.step, t_distribution), path, prediction)
        state.seconds = before + time.monotonic() - started
        done = state.step == settings.num_steps
        if done or state.step % PROGRESS_STEPS == 0:
            rate = (state.step - first) / (time.monotonic() - started)
            on_progress(Progress(state.step, settings.num_steps, state.finite_loss(), rate, state.seconds))
        if done or state.step % settings.checkpoint_steps == 0:
            state.save(checkpoints)

    flops = float(_flops_per_image(model, images) * settings.batch_size * state.step)
    return Trained(state.averaged(), state.step, state.finite_loss(), state.seconds, flops)


def averaging_weight(decay: float, n: int) -> float:
    """The weight of the n-th value, n >= 1, that makes a running average the exact decayed mean of all n values.

    ``mean_n = sum_i decay^(n-i) v_i / sum_i decay^(n-i)``: the first value enters whole, and the
    value that the average was initialised with never counts.
    """
    return float((1 - decay) / (1 - decay**n))


def draw_times(distribution: TDistribution, num: int, random: np.random.Generator) -> Tensor:
    """Draw training times, one in each of `num` equal quantiles, so that every batch covers the whole path.

    Returns:
        Shape (num,), float32, in [0, 1]; each entry by itself has the distribution asked for.

    Source:
        Kingma et al. 2021, the low-discrepancy sampler.
    """
    quantile_B = torch.from_numpy((random.random() + np.arange(num) / num) % 1.0)
    match distribution:
        case UniformT():
            return quantile_B.float()
        case LogitNormalT(mean=mean, std=std):
            return torch.sigmoid(mean + std * torch.special.ndtri(quantile_B)).float()


def _batch(images: Tensor, settings: Training, step: int, distribution: TDistribution) -> tuple[Tensor, Tensor, Tensor]:
    """Everything random about one step: images, noise, times."""
    random = stream("train", settings.seed, step)
    chosen = torch.from_numpy(random.integers(len(images), size=settings.batch_size))
    x_0 = images[chosen]
    eps = torch.from_numpy(random.standard_normal(tuple(x_0.shape), dtype=np.float32))
    return x_0, eps, draw_times(distribution, settings.batch_size, random)


class _State:
    """Everything that changes while training, and nothing else."""

    def __init__(self, model: nn.Module, settings: Training) -> None:
        self.model, self.settings = model.train(), settings
        self.named = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.weights: list[Tensor] = list(self.named.values())
        self.device = self.weights[0].device
        # One implementation, named: the default depends on the device and on the version of torch.
        self.optimizer = torch.optim.AdamW(
            self.weights, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
        )
        self.ema = [weight.detach().clone() for weight in self.weights]
        self.loss = torch.zeros((), device=self.device)
        self.step = 0
        self.seconds = 0.0

    def advance(self, batch: tuple[Tensor, Tensor, Tensor], path: Path, prediction: Prediction) -> None:
        """Take one step on a batch of (x_0, eps, t)."""
        x_0, eps, t_B = (part.to(self.device) for part in batch)
        target = velocity(path, x_0, eps, t_B) if prediction == "velocity" else eps
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.precision == "bf16"):
            answer = self.model(x_t(path, x_0, eps, t_B), t_B)
        loss = (answer.float() - target).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.weights, MAX_GRADIENT_NORM)
        warmup = min(1.0, (self.step + 1) / WARMUP_STEPS)
        self.optimizer.param_groups[0]["lr"] = self.settings.learning_rate * warmup
        self.optimizer.step()
        self.step += 1
        with torch.no_grad():
            torch._foreach_lerp_(self.ema, self.weights, averaging_weight(self.settings.ema_decay, self.step))
            # A gradient that is not finite makes this NaN too, and it stays NaN: one number to watch, read rarely.
            self.loss.lerp_(loss.detach() + 0.0 * norm, averaging_weight(LOSS_DECAY, self.step))

    def finite_loss(self) -> float:
        """The smoothed loss.

        Raises:
            NumericalError: at some step since the last call the loss or the gradient was not finite.
        """
        loss = float(self.loss)
        if not np.isfinite(loss):
            remedy = "Ask the aggregator for a plan with a smaller learning rate, or with precision fp32."
            raise NumericalError(f"loss at step {self.step}", expected="a finite number", got=str(loss), remedy=remedy)
        return loss

    def averaged(self) -> dict[str, Tensor]:
        """The model's state with the averaged weights in place of the last ones, on the CPU."""
        state = dict(self.model.state_dict()) | dict(zip(self.named, self.ema, strict=True))
        return {name: value.detach().to("cpu", copy=True) for name, value in state.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that a later step depends on, by name; views, not copies."""
        moments = [self.optimizer.state.get(weight) or _no_moments(weight) for weight in self.weights]
        parts: Mapping[str, list[Tensor]] = {
            "ema": self.ema,
            "first_moment": [each["exp_avg"] for each in moments],
            "second_moment": [each["exp_avg_sq"] for each in moments],
        }
        named = {f"model/{name}": value for name, value in self.model.state_dict().items()}
        for part, values in parts.items():
            named |= {f"{part}/{name}": value for name, value in zip(self.named, values, strict=True)}
        return named

    def save(self, checkpoints: Checkpoints) -> None:
        """Write a checkpoint; refuses to when the loss is not finite."""
        checkpoints.save(self.tensors(), step=self.step, loss=self.finite_loss(), seconds=self.seconds)

    def restore(self, checkpoints: Checkpoints) -> None:
        """Continue from the last whole checkpoint, if there is one."""
        found = checkpoints.load(self.tensors())
        if found is None:
            return
        record, tensors = found
        self.step, self.seconds = record.step, record.seconds
        self.loss.fill_(record.loss)
        for weight in self.weights:
            self.optimizer.state[weight] = _no_moments(weight) | {
                "step": torch.tensor(float(self.step), device=self.device)
            }
        with torch.no_grad():
            # Copied in place, so that memory is laid out as in a run that never stopped.
            for name, value in self.tensors().items():
                value.copy_(tensors[name])


def _no_moments(weight: Tensor) -> dict[str, Tensor]:
    return {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}


def _run_digest(recipe: object, images: Tensor, model: nn.Module) -> str:
    """The sha256 of all that determines a run: recipe, data, and the weights it starts from."""
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode())
    for name, value in [("images", images), *model.state_dict().items()]:
        digest.update(f"\0{name} {value.dtype} {tuple(value.shape)}\0".encode())
        digest.update(np.ascontiguousarray(value.detach().cpu().numpy()).data)
    return digest.hexdigest()


def _flops_per_image(model: nn.Module, images: Tensor) -> int:
    """Count the operations of one image's forward and backward pass, on tensors without memory."""
    twin = copy.deepcopy(model).to("meta")
    image = torch.empty((1, *images.shape[1:]), device="meta")
    with FlopCounterMode(display=False) as counter:
        twin(image, torch.empty(1, device="meta")).sum().backward()
    return int(counter.get_total_flops())
