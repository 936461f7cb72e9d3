"""Draws samples of which a part is given: images with known pixels, volumes with known voxels, latents.

At every time the known part is that of the given data, noised to this time, and each solver step is followed by
corrections: the velocity that the strategy follows is split into its estimates of data and noise, and in the unknown
part most of the noise is replaced by new,

    x_t <- alpha_t x_0 + sigma_t (rho eps + sqrt(1 - rho^2) n),    n standard normal,

while the known part gets new noise throughout. A correction leaves the distribution at time t as it is where nothing is
known, since it takes noise away and adds as much; where something is known it makes the unknown part fit it. Every
correction asks the router at the very x_t that the experts see.

RePaint does the same by going back in time by a step's length and forth again. Its resampling moves a sample by the
noise of one step, a correction by nearly all the noise of its time, so that the same number of evaluations brings the
unknown part closer to its conditional distribution: docs/how-to/edit-images.md has the figures.

Source:
    Lugmayr et al. 2022, RePaint, arXiv 2201.09865, for the noised known part and resampling; Song et al. 2021, for
    correctors, arXiv 2011.13456.
"""

# Shape legend: N samples, B batch, ... all data dimensions.
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import max_pool2d, max_pool3d

from ddm.diffusion.multistep import Memory, filled
from ddm.diffusion.path import Path, Velocity, x_0_and_eps, x_t
from ddm.diffusion.rng import stream
from ddm.errors import MathError, NumericalError, ShapeError
from ddm.io.array_input import real_tensor
from ddm.sampling.trajectories import Trajectories

RHO = 0.5


@dataclass(frozen=True)
class Known:
    """The part of samples that is given.

    Args:
        x_0: data in the experts' space; what is not known may be anything finite. Shape (N, ...).
        known: where data are given, bool, (N, ...) or one for all samples, (1, ...).
        corrections: after each step, each at the cost of one evaluation; 0 only puts the known part in.

    Raises:
        ShapeError: the mask has another shape than the data.
        MathError: a negative number of corrections, or nothing that is unknown.
    """

    x_0: Tensor
    known: Tensor
    corrections: int = 9

    def __post_init__(self) -> None:
        lengths = (1, len(self.x_0))
        if self.known.shape[1:] != self.x_0.shape[1:] or len(self.known) not in lengths:
            expected = (
                f"a mask of shape {(len(self.x_0), *self.x_0.shape[1:])}, or of 1 for all samples"
            )
            raise ShapeError("known", expected=expected, got=f"shape {tuple(self.known.shape)}")
        if self.known.dtype is not torch.bool:
            raise ShapeError(
                "known",
                expected="a mask of bool, true where data are given",
                got=str(self.known.dtype),
            )
        if not bool(self.x_0.isfinite().all()):
            raise NumericalError("known", expected="finite data", got="NaN or infinity")
        if self.corrections < 0:
            raise MathError("corrections", expected="at least 0", got=str(self.corrections))
        if bool(self.known.all()):
            raise MathError(
                "known",
                expected="something that is not known",
                got="a mask that is true everywhere",
            )

    @property
    def num(self) -> int:
        """The number of samples, or 1 for data that all samples have."""
        return len(self.x_0)

    def of(self, samples: range) -> "Known":
        """Return the known part of some samples."""
        x_0, known = (
            each if len(each) == 1 else each[samples.start : samples.stop]
            for each in (self.x_0, self.known)
        )
        return replace(self, x_0=x_0, known=known)

    def num_moves(self, steps: int) -> int:
        """Return how often each sample moves: in `steps` steps, and in the corrections after all but the last."""
        return steps + (steps - 1) * self.corrections


def complete(
    trajectories: Trajectories,
    path: Path,
    given: Known,
    x_B: Tensor,
    uniform_BM: Tensor,
    first: int,
    own: Sequence[np.random.Generator],
) -> tuple[Tensor, Tensor]:
    """Integrate samples from noise to data that agree with what is known.

    Args:
        trajectories: of these samples.
        path: the ensemble's.
        given: the known part of these samples.
        x_B: where they start, shape (B, ...).
        uniform_BM: in [0, 1), one number for every move; draws the experts.
        first: the row of the first sample.
        own: each sample's own stream of random numbers.

    Returns:
        See `Trajectories.integrate`.

    Raises:
        MathError: times that end above 0, where what is known is noised, or a router that is not asked at every step.
    """
    end, every = trajectories.times[-1], trajectories.router_every
    if end > 0:
        raise MathError(
            "times",
            expected="times that end at 0 where a part is known",
            got=f"{end:g} as the last one",
        )
    if every != 1:
        raise MathError("router_every", expected="1 where a part is known", got=str(every))
    known_B, data_B = given.known.to(x_B.device), given.x_0.to(x_B)
    probe = replace(trajectories, step=_velocity_alone, callback=None)

    def noise() -> Tensor:
        drawn = np.stack(
            [each.standard_normal(tuple(x_B.shape[1:]), dtype=np.float32) for each in own]
        )
        return torch.from_numpy(drawn).to(x_B)

    def put(x: Tensor, t: float, eps_B: Tensor) -> Tensor:
        return torch.where(known_B, x_t(path, data_B.expand_as(x), eps_B, filled(x, t)), x)

    moved, move = trajectories.start(put(x_B, trajectories.times[0], noise())), 0
    for t, t_next in pairwise(trajectories.times):
        moved = trajectories.move(moved, (t, t_next), uniform_BM[:, move:], first)
        move += 1
        if t_next <= 0:
            break
        for _ in range(given.corrections):
            n_B = noise()
            x = put(moved.state.x_B, t_next, n_B)
            asked = probe.move(moved.at(x), (t_next, t_next), uniform_BM[:, move:], first)
            x_0_B, eps_B = x_0_and_eps(path, x, asked.state.x_B, filled(x, t_next))
            renewed_B = x_t(path, x_0_B, RHO * eps_B + (1 - RHO**2) ** 0.5 * n_B, filled(x, t_next))
            moved = replace(asked, num_steps=moved.num_steps).at(torch.where(known_B, x, renewed_B))
            move += 1
        moved = moved.at(put(moved.state.x_B, t_next, noise()))
    return put(moved.state.x_B, trajectories.times[-1], noise()), moved.k_B


def _velocity_alone(
    u: Velocity, x_B: Tensor, t: float, t_next: float, memory: Memory
) -> tuple[Tensor, Memory]:
    """Return the velocity in the place of where it leads."""
    return u(x_B, filled(x_B, t)), memory


def mask_of_latents(known: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return where latents are known: where all pixels that a latent stands for are.

    Args:
        known: bool, (N, C, H, W) or (N, C, D, H, W), in pixels.
        shape: of one sample's latents, whose sides divide those of the pixels.
    """
    if tuple(known.shape[1:]) == shape:
        return known
    unknown = (~known).any(1, keepdim=True).float()
    window = [side // small for side, small in zip(known.shape[2:], shape[1:], strict=True)]
    pooled = (max_pool2d if len(window) == 2 else max_pool3d)(unknown, window)
    return (pooled == 0).expand(-1, *shape)


def known_part(
    images: Any, known: Any, encode: Callable[[Tensor], Tensor], corrections: int
) -> tuple[Known, Tensor, Tensor]:
    """Return the known part in the experts' space, the mask of the images, and the images as a tensor.

    Args:
        images: shape (N, C, H, W) or (N, C, D, H, W).
        known: bool, true where images are known; dimensions before (H, W) or (D, H, W) may be missing.
        encode: encodes images.
        corrections: see `Known`.

    Raises:
        DataError: images or a mask that hold no real numbers.
        ShapeError: a mask that does not fit the images.
        MathError: see `Known`.
    """
    images = real_tensor(images, "images")
    known = real_tensor(known, "known")
    mask, shape = known, tuple(images.shape[1:])
    while mask.dim() < images.dim():
        mask = mask[None]
    if (
        mask.shape[2:] != images.shape[2:]
        or mask.shape[1] not in (1, *shape[:1])
        or mask.dtype is not torch.bool
    ):
        expected = f"bool, true where images are known, shape {shape[1:]}, {shape} or {tuple(images.shape)}"
        raise ShapeError(
            "known",
            expected=expected,
            got=f"{known.dtype} {tuple(known.shape)}".removeprefix("torch."),
        )
    mask, latents = mask.expand(-1, *shape), encode(images)
    return (
        Known(latents, mask_of_latents(mask, tuple(latents.shape[1:])), corrections),
        mask,
        images,
    )


def streams(seed: int, samples: Sequence[int]) -> list[np.random.Generator]:
    """Return the random stream of each sample, from which the noise of its corrections comes."""
    return [stream("inpaint", seed, i) for i in samples]
