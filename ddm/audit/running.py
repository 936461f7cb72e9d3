"""Runs an expert over many images, or draws samples from it, block by block."""

# Shape legend: N images, A attacks, B of one block, S samples, ... all data dimensions.
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from ddm.audit.attacks import AttackedExpert, scores
from ddm.audit.effort import SAMPLE_STEPS
from ddm.diffusion.path import Path, as_velocity
from ddm.diffusion.rng import stream
from ddm.diffusion.solver import integrate
from ddm.images.rows import Images

_BLOCK_SIZE = 64
OnImages = Callable[[int], None]
"""Called with the number of images of each finished block; an exception that it raises ends the work."""


def score_images(
    expert: AttackedExpert,
    images: Images,
    image_N: Tensor,
    condition_I: Tensor | None,
    seed: int,
    on_images: OnImages,
) -> Tensor:
    """Attack images, each with noise that depends on seed and its place alone.

    Args:
        expert: the expert.
        images: in the expert's space.
        image_N: the numbers of those that are attacked, int64.
        condition_I: the condition of every image of `images`, None for an unconditional expert.
        seed: the seed of the noise.
        on_images: see `OnImages`.

    Returns:
        Shape (N, A), float64.
    """
    blocks = []
    for start in range(0, len(image_N), _BLOCK_SIZE):
        image_B = image_N[start : start + _BLOCK_SIZE]
        # A seed for each block: a block has the same noise whether or not others came before it.
        random = stream("audit noise", seed, start)
        noise_seed = int(random.integers(2**63))
        noise = torch.Generator().manual_seed(noise_seed)
        condition_B = None
        if condition_I is not None:
            condition_B = condition_I[image_B]
        score_BA = scores(expert, images[image_B], condition_B, noise)
        blocks.append(score_BA)
        on_images(len(image_B))
    return torch.cat(blocks)


def draw_samples(
    expert: AttackedExpert,
    path: Path,
    shape: tuple[int, ...],
    condition_S: Tensor | None,
    num: int,
    seed: int,
    on_images: OnImages,
) -> Iterator[Tensor]:
    """Yield blocks of samples in the expert's space, float32, on the CPU.

    Args:
        expert: the expert.
        path: on which samples move.
        shape: the shape of one sample.
        condition_S: of each sample, None for an unconditional expert.
        num: S.
        seed: the seed of their noise.
        on_images: see `OnImages`.
    """
    velocity = as_velocity(expert.network, expert.prediction, expert.path, path)
    times = np.linspace(1, 0, SAMPLE_STEPS + 1).tolist()
    for start in range(0, num, _BLOCK_SIZE):
        size = min(_BLOCK_SIZE, num - start)
        random = stream("audit sample", seed, start)
        noise = random.standard_normal((size, *shape), dtype=np.float32)
        x_1 = torch.from_numpy(noise).to(expert.device)
        condition: tuple[Tensor, ...] = ()
        if condition_S is not None:
            condition = (condition_S[start : start + size].to(expert.device),)

        # The condition as a default: a closure would take that of a later block.
        def conditioned_velocity(
            x_B: Tensor,
            t_B: Tensor,
            condition: tuple[Tensor, ...] = condition,
        ) -> Tensor:
            return velocity(x_B, t_B, *condition)

        with torch.inference_mode():
            x_0 = integrate(conditioned_velocity, x_1, times, "dpm", path)
            samples = x_0.float().cpu()
        on_images(size)
        # A tensor made in inference mode cannot be used in computations with gradients.
        yield samples.clone()
