"""Draws samples of which a part is given: images with known pixels, volumes with known voxels, latents.

At every time the known part is that of the given data, noised to this time, and each solver step is followed by
corrections: the velocity that the strategy follows is split into its estimates of data and noise, and in the unknown
part most of the noise is replaced by new,

    x_t <- alpha_t x_0 + sigma_t (rho eps + sqrt(1 - rho^2) n),    n standard normal,

while the known part gets new noise throughout. A correction leaves the distribution at time t as it is where nothing is
known, since it takes noise away and adds as much; where something is known it makes the unknown part fit it. Every
correction evaluates the router at the very x_t that the experts see.

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

from ddm.diffusion.multistep import SolverMemory, filled
from ddm.diffusion.path import Path, Velocity, x_0_and_eps, x_t
from ddm.diffusion.rng import streams
from ddm.errors import MathError, NumericalError, ShapeError
from ddm.io.array_input import real_tensor, whole_number
from ddm.sampling.trajectories import Trajectories, TrajectoryState

RHO = 0.5


@dataclass(frozen=True)
class KnownRegion:
    """The part of samples that is given.

    Args:
        x_0: data in the experts' space; what is not known may be anything finite. Shape (N, ...).
        mask: where data are given, bool, (N, ...) or one for all samples, (1, ...).
        corrections: after each step, each at the cost of one evaluation; 0 only puts the known part in.

    Raises:
        ShapeError: the mask has another shape than the data.
        MathError: a negative number of corrections, or nothing that is unknown.
    """

    x_0: Tensor
    mask: Tensor
    corrections: int = 9

    def __post_init__(self) -> None:
        num_samples = len(self.x_0)
        fits = self.mask.shape[1:] == self.x_0.shape[1:]
        if not fits or len(self.mask) not in (1, num_samples):
            shape = (num_samples, *self.x_0.shape[1:])
            expected = f"a mask of shape {shape}, or of 1 for all samples"
            raise ShapeError("known", expected=expected, got=f"shape {tuple(self.mask.shape)}")
        if self.mask.dtype is not torch.bool:
            expected = "a mask of bool, true where data are given"
            raise ShapeError("known", expected=expected, got=str(self.mask.dtype))
        if not bool(self.x_0.isfinite().all()):
            raise NumericalError("known", expected="finite data", got="NaN or infinity")
        whole_number(self.corrections, "corrections", least=0)
        if bool(self.mask.all()):
            expected = "a mask with an unknown part"
            raise MathError("known", expected=expected, got="a mask that is true everywhere")

    @property
    def num_samples(self) -> int:
        """The number of samples, or 1 for data that all samples have."""
        return len(self.x_0)

    def of(self, samples: range) -> "KnownRegion":
        """Return the known part of some samples."""
        rows = slice(samples.start, samples.stop)
        return replace(self, x_0=_rows_of(self.x_0, rows), mask=_rows_of(self.mask, rows))

    def num_moves(self, steps: int) -> int:
        """Return how often each sample moves: in `steps` steps, and in the corrections after all but the last."""
        return steps + (steps - 1) * self.corrections

    def put_into(
        self,
        x_B: Tensor,
        t: float,
        eps_B: Tensor,
        path: Path,
    ) -> Tensor:
        """Return samples at time t whose known part is that of the data, noised to t by `eps_B`."""
        data_B = self.x_0.to(x_B).expand_as(x_B)
        noised_B = x_t(path, data_B, eps_B, filled(x_B, t))
        return torch.where(self.mask.to(x_B.device), noised_B, x_B)


def _rows_of(tensor: Tensor, rows: slice) -> Tensor:
    """Return some rows of a tensor; the only row of one that all samples have."""
    if len(tensor) == 1:
        return tensor
    return tensor[rows]


@dataclass(frozen=True)
class Inpainting:
    """The completion of samples beside what is known of them.

    Args:
        trajectories: the trajectories of these samples.
        path: the ensemble's.
        known: the known part of these samples.
        generators: each sample's own stream of random numbers.

    Raises:
        MathError: times that end above 0, where what is known is noised, or a router that is not evaluated at every
            step.
    """

    trajectories: Trajectories
    path: Path
    known: KnownRegion
    generators: Sequence[np.random.Generator]

    def __post_init__(self) -> None:
        end = self.trajectories.times[-1]
        if end > 0:
            expected = "times that end at 0 where a part is known"
            raise MathError("times", expected=expected, got=f"{end:g} as the last one")
        every = self.trajectories.router_every
        if every != 1:
            raise MathError("router_every", expected="1 where a part is known", got=str(every))

    def integrate(self, x_B: Tensor, uniform_BM: Tensor, first: int) -> TrajectoryState:
        """Integrate samples from noise to data that agree with what is known.

        Args:
            x_B: where they start, shape (B, ...).
            uniform_BM: in [0, 1), one number for every move; draws the experts.
            first: the row of the first sample.
        """
        times = self.trajectories.times
        x_B = self._with_known_part(x_B, times[0])
        samples = self.trajectories.start(x_B)
        num_moves = 0
        for t, t_next in pairwise(times):
            unused_BM = uniform_BM[:, num_moves:]
            samples = self.trajectories.move(samples, (t, t_next), unused_BM, first)
            num_moves += 1
            # Data have no noise that a correction could replace.
            if t_next <= 0:
                break
            for _ in range(self.known.corrections):
                unused_BM = uniform_BM[:, num_moves:]
                samples = self._correct(samples, t_next, unused_BM, first)
                num_moves += 1
            x_B = self._with_known_part(samples.x_B, t_next)
            samples = samples.moved_to(x_B)
        x_B = self._with_known_part(samples.x_B, times[-1])
        return samples.moved_to(x_B)

    def _correct(
        self,
        samples: TrajectoryState,
        t: float,
        uniform_BM: Tensor,
        first: int,
    ) -> TrajectoryState:
        """Replace most of the noise of the unknown part by new noise, at the same time t."""
        noise_B = self._noise(samples.x_B)
        x_B = self.known.put_into(samples.x_B, t, noise_B, self.path)
        # A step from t to t that returns the velocity in the place of where it leads.
        probe = replace(self.trajectories, step=_velocity_alone, callback=None)
        probed = probe.move(samples.moved_to(x_B), (t, t), uniform_BM, first)
        t_B = filled(x_B, t)
        x_0_B, eps_B = x_0_and_eps(self.path, x_B, probed.x_B, t_B)
        # Of unit variance again: rho^2 + (1 - rho^2) = 1.
        new_share = (1 - RHO**2) ** 0.5
        new_eps_B = RHO * eps_B + new_share * noise_B
        corrected_B = x_t(self.path, x_0_B, new_eps_B, t_B)
        mask_B = self.known.mask.to(x_B.device)
        # A correction is not a step: the numbers that a callback sees, and the first entry in the log, depend on the
        # steps.
        corrected = replace(probed, num_steps=samples.num_steps)
        return corrected.moved_to(torch.where(mask_B, x_B, corrected_B))

    def _with_known_part(self, x_B: Tensor, t: float) -> Tensor:
        noise_B = self._noise(x_B)
        return self.known.put_into(x_B, t, noise_B, self.path)

    def _noise(self, x_B: Tensor) -> Tensor:
        """Return new noise, of each sample's own stream."""
        shape = tuple(x_B.shape[1:])
        rows = [generator.standard_normal(shape, dtype=np.float32) for generator in self.generators]
        noise_B = torch.from_numpy(np.stack(rows))
        return noise_B.to(x_B)


def _velocity_alone(
    u: Velocity,
    x_B: Tensor,
    t: float,
    t_next: float,
    memory: SolverMemory,
) -> tuple[Tensor, SolverMemory]:
    """Return the velocity in the place of where it leads."""
    u_B = u(x_B, filled(x_B, t))
    return u_B, memory


def mask_of_latents(known: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return where latents are known: where all pixels that a latent stands for are.

    Args:
        known: bool, (N, C, H, W) or (N, C, D, H, W), in pixels.
        shape: the shape of one sample's latents, whose sides divide those of the pixels.
    """
    if tuple(known.shape[1:]) == shape:
        return known
    # One unknown pixel makes the latent unknown that stands for it, so that the maximum over a window decides.
    unknown = (~known).any(1, keepdim=True).float()
    window = [side // small for side, small in zip(known.shape[2:], shape[1:], strict=True)]
    if len(window) == 2:
        is_unknown = max_pool2d(unknown, window)
    else:
        is_unknown = max_pool3d(unknown, window)
    is_known = is_unknown == 0
    return is_known.expand(-1, *shape)


@dataclass(frozen=True)
class MaskedImages:
    """Images of which a part is known.

    Attributes:
        images: shape (N, C, H, W) or (N, C, D, H, W).
        mask: bool, true where images are known, of the same number of dimensions; its first may be 1.
    """

    images: Tensor
    mask: Tensor

    @classmethod
    def of(cls, images: Any, known: Any) -> "MaskedImages":
        """Check images and a mask, arrays or tensors.

        Args:
            images: shape (N, C, H, W) or (N, C, D, H, W).
            known: bool, true where images are known; dimensions before (H, W) or (D, H, W) may be missing.

        Raises:
            DataError: images or a mask that hold no real numbers.
            ShapeError: a mask that does not fit the images.
        """
        images = real_tensor(images, "images")
        known = real_tensor(known, "known")
        shape = tuple(images.shape[1:])
        mask = known
        while mask.dim() < images.dim():
            mask = mask[None]
        fits = mask.shape[2:] == images.shape[2:] and mask.shape[1] in (1, *shape[:1])
        if not fits or mask.dtype is not torch.bool:
            expected = f"bool, true where images are known, shape {shape[1:]}, {shape} or {tuple(images.shape)}"
            got = f"{known.dtype} {tuple(known.shape)}".removeprefix("torch.")
            raise ShapeError("known", expected=expected, got=got)
        return cls(images, mask.expand(-1, *shape))

    def region(self, encode: Callable[[Tensor], Tensor], corrections: int) -> KnownRegion:
        """Return the known part in the experts' space.

        Args:
            encode: encodes images into that space.
            corrections: see `KnownRegion`.

        Raises:
            MathError: see `KnownRegion`.
        """
        latents = encode(self.images)
        mask = mask_of_latents(self.mask, tuple(latents.shape[1:]))
        return KnownRegion(latents, mask, corrections)


def inpainting_generators(
    seed: int | Sequence[int], samples: Sequence[int]
) -> list[np.random.Generator]:
    """Return the random stream of each sample, from which the noise of its corrections comes."""
    return streams("inpaint", seed, samples)
