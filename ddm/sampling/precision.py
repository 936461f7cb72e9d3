"""The arithmetic that experts compute in; routers, posteriors and solvers keep full precision beside it."""

# Shape legend: B batch, ... all data dimensions.
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ddm.diffusion.path import Expert, Experts
from ddm.errors import MathError

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class InArithmetic:
    """Experts that compute in one arithmetic and answer in the dtype that they are asked in.

    An autocast region of the caller's decides for float32, the default, as it would for any network.

    Args:
        experts: velocities.
        arithmetic: one of `DTYPES`; bfloat16 is that of matrix products, as `torch.autocast` chooses them.
        device: where they compute.

    Raises:
        MathError: another dtype.
    """

    experts: Experts
    arithmetic: torch.dtype = torch.float32
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        checked(self.arithmetic)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of samples between two evaluations."""
        return torch.float64 if self.arithmetic is torch.float64 else torch.float32

    def __len__(self) -> int:
        return len(self.experts)

    def __getitem__(self, k: int) -> Expert:
        kind = torch.device(self.device).type
        lower = self.arithmetic if self.arithmetic is torch.bfloat16 else None
        if self.arithmetic is torch.float32 and torch.is_autocast_enabled(kind):
            lower = torch.get_autocast_dtype(kind)

        def expert(x_B: Tensor, t_B: Tensor, *condition_B: Tensor) -> Tensor:
            if lower is None or x_B.dtype is torch.float64:
                return evaluate(self.experts[k], x_B, t_B, *condition_B)
            with torch.autocast(kind, lower):
                return evaluate(self.experts[k], x_B, t_B, *condition_B)

        return expert


def evaluate(expert: Expert, x_B: Tensor, t_B: Tensor, *condition_B: Tensor) -> Tensor:
    """Return an expert's velocity in the dtype of ``x_B``; a network with weights of another dtype computes in it."""
    t_B = t_B.to(x_B.dtype)
    given = [each.to(x_B.dtype) if each.is_floating_point() else each for each in condition_B]
    if isinstance(expert, nn.Module):
        state = {**dict(expert.named_parameters()), **dict(expert.named_buffers())}
        if any(each.is_floating_point() and each.dtype != x_B.dtype for each in state.values()):
            cast = {
                name: each.to(x_B.dtype) for name, each in state.items() if each.is_floating_point()
            }
            answer: Tensor = functional_call(expert, cast, (x_B, t_B, *given))
            return answer.to(x_B.dtype)
    return expert(x_B, t_B, *given).to(x_B.dtype)


def checked(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype.

    Raises:
        MathError: experts cannot be sampled in it.
    """
    if dtype not in DTYPES:
        expected = ", ".join(str(each) for each in DTYPES)
        remedy = "float16 overflows where bfloat16 does not; integers cannot hold a velocity."
        raise MathError("dtype", expected=expected, got=str(dtype), remedy=remedy)
    return dtype


def full_precision(x_B: Tensor) -> AbstractContextManager[None]:
    """Return a context in which an autocast region of the caller's does not change a dtype."""
    return _without_autocast(x_B.device.type)


@contextmanager
def _without_autocast(kind: str) -> Iterator[None]:
    if not torch.is_autocast_enabled(kind):
        yield
        return
    with torch.autocast(kind, enabled=False):
        yield
