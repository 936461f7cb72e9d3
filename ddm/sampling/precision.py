"""The arithmetic that experts compute in; routers, posteriors and solvers keep full precision beside it."""

# Shape legend: B batch, ... all data dimensions.
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ddm.diffusion.path import Expert, Experts, checked_answer
from ddm.errors import MathError, SetupError

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class CastExperts:
    """Experts that compute in one arithmetic and answer in the dtype of the samples.

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
        check_dtype(self.arithmetic)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of samples between two evaluations."""
        # Also in bfloat16: a solver that adds small steps to samples needs more than 8 bits.
        if self.arithmetic is torch.float64:
            return torch.float64
        return torch.float32

    def __len__(self) -> int:
        return len(self.experts)

    def __getitem__(self, k: int) -> Expert:
        device_type = torch.device(self.device).type
        autocast_dtype: torch.dtype | None = None
        if self.arithmetic is torch.bfloat16:
            autocast_dtype = torch.bfloat16
        elif self.arithmetic is torch.float32 and torch.is_autocast_enabled(device_type):
            autocast_dtype = torch.get_autocast_dtype(device_type)

        def expert(x_B: Tensor, t_B: Tensor, *condition_B: Tensor) -> Tensor:
            # The expert is looked up at each call, so that nothing keeps it in memory (`LazyExperts`).
            if autocast_dtype is None or x_B.dtype is torch.float64:
                return evaluate(self.experts[k], x_B, t_B, *condition_B)
            with torch.autocast(device_type, autocast_dtype):
                return evaluate(self.experts[k], x_B, t_B, *condition_B)

        return expert


def evaluate(
    expert: Expert,
    x_B: Tensor,
    t_B: Tensor,
    *condition_B: Tensor,
) -> Tensor:
    """Return an expert's velocity in the dtype of ``x_B``; a network with weights of another dtype computes in it.

    Raises:
        ShapeError: the expert's answer is no tensor of the shape of ``x_B``.
    """
    t_B = t_B.to(x_B.dtype)
    condition = [_cast(part, x_B.dtype) for part in condition_B]
    if isinstance(expert, nn.Module):
        state = {**dict(expert.named_parameters()), **dict(expert.named_buffers())}
        floating = {}
        for name, value in state.items():
            if value.is_floating_point():
                floating[name] = value
        # The weights are cast for this call alone: the network is the caller's, who may use it in its own dtype
        # meanwhile.
        if any(value.dtype != x_B.dtype for value in floating.values()):
            cast = {name: value.to(x_B.dtype) for name, value in floating.items()}
            u_B = functional_call(expert, cast, (x_B, t_B, *condition))
            return checked_answer(u_B, x_B).to(x_B.dtype)
    u_B = expert(x_B, t_B, *condition)
    return checked_answer(u_B, x_B).to(x_B.dtype)


def _cast(condition: Tensor, dtype: torch.dtype) -> Tensor:
    """Return texts in a dtype, and classes, which are whole numbers, as they are."""
    if not condition.is_floating_point():
        return condition
    return condition.to(dtype)


def check_dtype(dtype: torch.dtype) -> None:
    """Refuse an arithmetic that experts cannot be sampled in.

    Raises:
        MathError: a dtype that is not one of `DTYPES`.
    """
    if dtype not in DTYPES:
        expected = ", ".join(str(allowed) for allowed in DTYPES)
        remedy = "float16 overflows where bfloat16 does not; integers cannot hold a velocity."
        raise MathError("dtype", expected=expected, got=str(dtype), remedy=remedy)


def check_device(device: torch.device | str) -> None:
    """Refuse a device that a caller names and torch does not have.

    Raises:
        SetupError: there is no such device, or torch sees no GPU.
    """
    try:
        device_type = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise SetupError(
            "device",
            expected="a device of torch, such as cpu or cuda, or a dtype, such as torch.bfloat16",
            got=repr(device),
            remedy="Name cpu, or cuda for a GPU.",
        ) from error
    if device_type == "cuda" and not torch.cuda.is_available():
        raise SetupError(
            "device",
            expected="a GPU that torch sees",
            got="no GPU",
            remedy="Name cpu, or install a build of torch for this machine's GPU.",
        )


def full_precision(x_B: Tensor) -> AbstractContextManager[None]:
    """Return a context in which an autocast region of the caller's does not change a dtype."""
    return _without_autocast(x_B.device.type)


@contextmanager
def _without_autocast(device_type: str) -> Iterator[None]:
    if not torch.is_autocast_enabled(device_type):
        yield
        return
    with torch.autocast(device_type, enabled=False):
        yield
