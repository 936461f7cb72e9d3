"""Runs an expert over many images, or draws samples from it, block by block."""

# Shape legend: N images, A attacks, B of one block, S samples, ... all data dimensions.
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from ddm.audit.attacks import Target, scores
from ddm.audit.effort import SAMPLE_STEPS
from ddm.diffusion.path import Path, as_velocity
from ddm.diffusion.rng import stream
from ddm.diffusion.solver import integrate
from ddm.images.rows import Images

AT_ONCE = 64
Advance = Callable[[int], None]
"""Called with the images of each block that is done; an exception that it raises ends the work."""


def score_images(
    target: Target,
    images: Images,
    chosen_N: Tensor,
    condition_N: Tensor | None,
    seed: int,
    advance: Advance,
) -> Tensor:
    """Attack images, each with noise that depends on seed and its place alone.

    Args:
        target: the expert.
        images: in the expert's space.
        chosen_N: which of them, int64.
        condition_N: of every image, None for an unconditional expert.
        seed: of the noise.
        advance: see `Advance`.

    Returns:
        Shape (N, A), float64.
    """
    parts = []
    for start in range(0, len(chosen_N), AT_ONCE):
        rows = slice(start, start + AT_ONCE)
        noise = torch.Generator().manual_seed(
            int(stream("audit noise", seed, start).integers(2**63))
        )
        condition_B = None if condition_N is None else condition_N[chosen_N[rows]]
        parts.append(scores(target, images[chosen_N[rows]], condition_B, noise))
        advance(len(parts[-1]))
    return torch.cat(parts)


def draw_samples(
    target: Target,
    path: Path,
    shape: tuple[int, ...],
    condition_S: Tensor | None,
    num: int,
    seed: int,
    advance: Advance,
) -> Iterator[Tensor]:
    """Yield blocks of samples in the expert's space, float32, on the CPU.

    Args:
        target: the expert.
        path: on which samples travel.
        shape: of one sample.
        condition_S: of each sample, None for an unconditional expert.
        num: S.
        seed: of their noise.
        advance: see `Advance`.
    """
    velocity = as_velocity(target.network, target.prediction, target.path, path)
    times = np.linspace(1, 0, SAMPLE_STEPS + 1).tolist()
    for start in range(0, num, AT_ONCE):
        size = min(AT_ONCE, num - start)
        random = stream("audit sample", seed, start)
        x_1 = torch.from_numpy(random.standard_normal((size, *shape), dtype=np.float32)).to(
            target.device
        )
        condition = (
            () if condition_S is None else (condition_S[start : start + size].to(target.device),)
        )

        def moving(x_B: Tensor, t_B: Tensor, condition: tuple[Tensor, ...] = condition) -> Tensor:
            return velocity(x_B, t_B, *condition)

        with torch.inference_mode():
            drawn = integrate(moving, x_1, times, "dpm", path).float().cpu()
        advance(size)
        yield drawn.clone()
