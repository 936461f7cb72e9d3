"""What a caller of `Ensemble.sample` may say beyond the common keywords."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from ddm.diffusion.solver import Solver, SolverName
from ddm.sampling.inpainting import KnownRegion
from ddm.system.progress import ProgressCallback


@dataclass(frozen=True)
class SamplingOptions:
    """Options of sampling: numbers, starts, solver and arithmetic.

    Args:
        solver: a name, see `ddm.diffusion.solver`; or a `Solver` of your own.
        generator: draws the seed, in place of `seed`; it has moved on afterwards, so that another call with it draws
            other samples.
        x: where samples begin, at `t_start`, in the experts' space, shape (N, ...); noise when omitted.
        x_0: data in the experts' space, which are noised to `t_start`; see `Ensemble.image_to_image`.
        noise: standard normal noise in place of the samples' own, shape (N, ...).
        t_start: the time at which `x` are, or to which `x_0` are noised; below 1 lock needs a router too.
        times: all times, descending from `t_start`, in place of `t_start` and `steps`; where the last one is above 0,
            samples are returned as they are then.
        known: the part of samples that is given; see `Ensemble.inpaint`.
        condition_prior: each expert's share of the data with the condition, where the release does not state it.
        guidance_interval: the lowest and the highest time at which guidance applies.
        router_every: evaluate the router at every n-th step only, and keep its weights in between.
        numbers: the numbers of the samples, N of them, in place of 0 to N - 1: sample i is the same in any company.
        seeds: the seeds of the samples, N of them, in place of `seed`: sample i is that of a call with ``seeds[i]``.
        dtype: the arithmetic of the experts, in place of the ensemble's.
        on_progress: called with the steps taken, summed over all samples, and the total to take.
    """

    solver: SolverName | Solver = "midpoint"
    generator: torch.Generator | None = None
    # Tensors or arrays; checked where samples start.
    x: Any = None
    x_0: Any = None
    noise: Any = None
    t_start: float | None = None
    times: Sequence[float] | None = None
    known: KnownRegion | None = None
    condition_prior: Sequence[float] | None = None
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    router_every: int = 1
    numbers: Sequence[int] | None = None
    seeds: Sequence[int] | None = None
    dtype: torch.dtype | None = None
    on_progress: ProgressCallback | None = None


DEFAULT_OPTIONS = SamplingOptions()


def sampling_keywords(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as keywords of `Ensemble.sample`, those of `SamplingOptions` put into one.

    For callers that collect arguments by name, such as the command line.
    """
    names = {field.name for field in fields(SamplingOptions)}
    options = {}
    keywords = {}
    for name, value in arguments.items():
        if name in names:
            options[name] = value
        else:
            keywords[name] = value
    return keywords | {"options": SamplingOptions(**options)}
