"""The batch of training step n: images, noise, times, conditions and tokens, as functions of the seed, n and data."""

# Shape legend: N images, B batch, M tokens kept, ... all data dimensions.
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, assert_never

import numpy as np
import torch
from torch import Tensor

from ddm.diffusion.rng import stream
from ddm.errors import DataError, ShapeError
from ddm.images.rows import Images
from ddm.protocol.learning import LogitNormalT, TDistribution, Training, UniformT
from ddm.training.augmentation import augment
from ddm.training.masking import draw_kept, leaves_out
from ddm.training.order import in_epochs


@dataclass(frozen=True)
class Examples:
    """The training data of an expert.

    Attributes:
        images: shape (N, ...), float32; in memory, or read as they are drawn.
        labels: each image's class, int64 (N,), or text, float32 (N, L, D_text); None for an unconditional expert.
        drop: probability with which a step hides an image's class or text.
    """

    images: Images
    labels: Tensor | None = None
    drop: float = 0.0

    def __post_init__(self) -> None:
        shape = tuple(self.images.shape)
        if len(shape) < 2:
            raise ShapeError("images", expected="shape (N, ...)", got=str(shape))
        if not len(self.images):
            raise DataError(
                "images",
                expected="at least 1 image",
                got="0 images",
                remedy="Give at least one image.",
            )
        if self.labels is not None and len(self.labels) != len(self.images):
            raise ShapeError(
                "labels", expected=f"{len(self.images)}, one per image", got=str(len(self.labels))
            )

    def on_cpu(self) -> "Examples":
        """Return the examples on the CPU, where batches are drawn: its random numbers are the same on every machine."""
        images = self.images
        if isinstance(images, Tensor):
            images = images.detach().to("cpu", torch.float32).contiguous()
        labels = self.labels
        if labels is not None:
            labels = labels.detach().cpu().contiguous()
        return replace(self, images=images, labels=labels)


@dataclass(frozen=True)
class Batch:
    """One step's images, noise and times; where there are any, conditions and the numbers of the kept tokens.

    A teacher also uses `chosen_B`, the images' indices, and `uniform_B`, a random number in [0, 1) for each.
    """

    x_0: Tensor
    eps: Tensor
    t_B: Tensor
    condition: Tensor | None = None
    kept_BM: Tensor | None = None
    chosen_B: Tensor | None = None
    uniform_B: Tensor | None = None

    def part(
        self,
        index: int,
        num: int,
        device: torch.device,
    ) -> "Batch":
        """Return one of `num` parts of about equal size, on a device; from pinned memory without waiting for it."""
        return self._map_fields(
            lambda field: field.tensor_split(num)[index].to(device, non_blocking=True)
        )

    def pinned(self) -> "Batch":
        """Return the batch in memory that a GPU reads by itself."""
        return self._map_fields(Tensor.pin_memory)

    def _map_fields(self, call: Callable[[Tensor], Tensor]) -> "Batch":
        fields = (
            self.x_0,
            self.eps,
            self.t_B,
            self.condition,
            self.kept_BM,
            self.chosen_B,
            self.uniform_B,
        )
        changed = [None if field is None else call(field) for field in fields]
        return Batch(*changed)  # type: ignore[arg-type]  # the first three are never None

    def __len__(self) -> int:
        return len(self.t_B)


class Teach(Protocol):
    """Replaces the target of a training step, as distillation does."""

    @property
    def digest(self) -> str:
        """Identifies everything besides the batch that the target depends on; a run does not continue under another."""
        ...

    def __call__(self, part: Batch, /) -> Batch:
        """Return part of a batch, already on the device of the step, with another x_0 and eps."""
        ...


def draw_batch(
    examples: Examples,
    settings: Training,
    step: int,
    distribution: TDistribution,
    num_tokens: int = 0,
) -> Batch:
    """Draw everything random about one step.

    Args:
        examples: the data.
        settings: the plan's recipe.
        step: its number, from 0.
        distribution: of the times.
        num_tokens: the number of tokens of one image; used where the recipe masks tokens.
    """
    random = stream("train", settings.seed, step)
    num = settings.batch_size
    num_images = len(examples.images)
    if settings.order == "epochs":
        numbers = in_epochs(settings.seed, step, num, num_images)
    else:
        numbers = random.integers(num_images, size=num)
    chosen = torch.from_numpy(numbers)
    x_0 = rows(examples.images, chosen)
    noise = random.standard_normal(tuple(x_0.shape), dtype=np.float32)
    eps = torch.from_numpy(noise)
    t_B = draw_times(distribution, num, random)
    # Drawn last, so that the numbers above do not depend on whether there are conditions.
    condition = None
    if examples.labels is not None:
        hidden_B = torch.from_numpy(random.random(num) < examples.drop)
        condition = hide(rows(examples.labels, chosen), hidden_B)
    kept_BM = None
    if leaves_out(settings, step):
        kept_BM = draw_kept(num, num_tokens, settings.mask_ratio, random)
    uniform_B = torch.from_numpy(random.random(num))
    return Batch(
        x_0=augment(x_0, settings, random),
        eps=eps,
        t_B=t_B,
        condition=condition,
        kept_BM=kept_BM,
        chosen_B=chosen,
        uniform_B=uniform_B,
    )


def rows(images: Images, chosen: Tensor) -> Tensor:
    """Return rows by their numbers; of a tensor through numpy, as torch would start threads in the one that draws."""
    if isinstance(images, Tensor):
        return torch.from_numpy(images.numpy()[chosen.numpy()])
    return images[chosen]


def hide(labels: Tensor, hidden_B: Tensor) -> Tensor:
    """Return the labels with some hidden: a class becomes -1, a text zeros."""
    null: float = -1
    if labels.is_floating_point():
        null = 0.0
    num_inner = labels.dim() - 1
    is_hidden = hidden_B.view(-1, *[1] * num_inner)
    return labels.masked_fill(is_hidden, null)


def draw_times(
    distribution: TDistribution,
    num: int,
    random: np.random.Generator,
) -> Tensor:
    """Draw training times, one in each of `num` equal quantiles, so that every batch covers the whole path.

    Returns:
        Shape (num,), float32, in [0, 1]; the marginal of each entry is the distribution.

    Source:
        Kingma et al. 2021, the low-discrepancy sampler; Esser et al. 2024, section 5.3.2, the shift.
    """
    # One random offset for all of them, so that neighbouring times are exactly 1 / num apart.
    quantiles = (random.random() + np.arange(num) / num) % 1.0
    quantile_B = torch.from_numpy(quantiles)
    match distribution:
        case UniformT():
            t_B = quantile_B
        case LogitNormalT(mean=mean, std=std):
            normal_B = torch.special.ndtri(quantile_B)
            t_B = torch.sigmoid(mean + std * normal_B)
        case _:
            assert_never(distribution)
    shift = distribution.shift
    if shift != 1.0:
        t_B = shift * t_B / (1 + (shift - 1) * t_B)
    return t_B.float()
