"""A GPU for machines without one: it computes what a CPU computes, and refuses what a GPU would refuse.

Tensors that are sent to "cuda" stay in memory and are remembered; they say that they are there. An operation over some
that were sent and some that were not is an error, and so is reading one as numpy's that was not fetched.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
_READING = (Tensor.numpy, Tensor.__array__)
# Copies go either way, and where weights are replaced torch compares the old ones with the new.
_CROSSING = (Tensor.copy_, Tensor.data.__set__, torch._has_compatible_shallow_copy_type)  # type: ignore[attr-defined]
_POOL = "ddm.loading.ensemble.ThreadPoolExecutor"
_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)  # of a GPU's tensor by a CPU's


class PretendGpu(TorchFunctionMode):
    """While this is entered, in this thread, there is a GPU.

    Raises:
        RuntimeError: tensors of both in one operation.
        TypeError: a tensor is read as numpy's that is not on the CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        # kept alive, so that no other takes the address
        self._sent: dict[int, torch.UntypedStorage] = {}

    def device_of(self, tensor: Tensor) -> torch.device:
        """Where a tensor is: sent here or computed here, or not."""
        return GPU if tensor.untyped_storage().data_ptr() in self._sent else CPU

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return self.device_of(args[0])
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return self.device_of(args[0]) == GPU
        # of a tensor on the CPU; what is pinned is as good as what is not
        if func == Tensor.pin_memory:
            return args[0]
        if func in (Tensor.to, Tensor.cuda, Tensor.cpu):
            return self._move(func, *args, **options)
        tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
        here = [self.device_of(tensor) == GPU for tensor in tensors]
        self._check(func, tensors, here)
        becomes_gpus = any(here)
        if options.get("device") is not None:
            becomes_gpus = torch.device(options["device"]).type == "cuda"
            options["device"] = CPU
        result = func(*args, **options)
        if becomes_gpus:
            self._keep(result)
        return result

    def _check(self, func: Callable[..., Any], tensors: list[Tensor], here: list[bool]) -> None:
        """Refuse what has both; a number, a tensor without a dimension, may be the CPU's if it is not changed."""
        if func in _READING and any(here):
            raise TypeError(f"{func.__name__} of a tensor on {GPU}")
        # torch names a function that changes its first argument with one underscore at the end.
        changes_first = func.__name__.endswith("_") and not func.__name__.endswith("__")
        fewest = 1
        if changes_first and not here[0]:
            fewest = 0
        others = [
            tensor
            for tensor, is_here in zip(tensors, here, strict=True)
            if not is_here and tensor.dim() >= fewest
        ]
        if any(here) and others and func not in _CROSSING and not (func in _INDEXING and here[0]):
            places = ", ".join(
                f"{tuple(tensor.shape)} on {self.device_of(tensor)}" for tensor in tensors
            )
            raise RuntimeError(f"{func.__name__} of tensors on two devices: {places}")

    def _move(
        self,
        func: Callable[..., Any],
        tensor: Tensor,
        *args: Any,
        copy: bool = False,
        **options: Any,
    ) -> Tensor:
        before = self.device_of(tensor)
        dtype = None
        if func == Tensor.to and args and isinstance(args[0], Tensor):
            after = self.device_of(args[0])
            dtype = args[0].dtype
        elif func == Tensor.to:
            device, dtype, *_ = torch._C._nn._parse_to(*args, **options)
            after = before
            if device is not None:
                after = GPU if device.type == "cuda" else CPU
        else:
            after = GPU if func == Tensor.cuda else CPU
        result = tensor.to(dtype or tensor.dtype)
        if copy or (
            after != before
            and result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        ):
            result = result.clone()
        if after == GPU:
            self._keep(result)
        return result

    def _keep(self, result: Any) -> None:
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr():
                self._sent[leaf.untyped_storage().data_ptr()] = leaf.untyped_storage()


@contextmanager
def pretend_gpu() -> Iterator[PretendGpu]:
    """A GPU that torch says is there; what would be done in other threads is done in this one."""
    there = mock.patch("torch.cuda.is_available", lambda: True)
    in_turn = mock.patch(_POOL, _InTurn)
    in_line = mock.patch("ddm.training.loop.drawing_threads", lambda device, num_processes: 0)
    with there, in_turn, in_line, PretendGpu() as gpu:
        yield gpu


class _InTurn:
    """As `ThreadPoolExecutor`, without threads, which this mode does not reach."""

    def __init__(self, max_workers: int) -> None:
        pass

    def __enter__(self) -> "_InTurn":
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def map(self, work: Callable[..., Any], *columns: Iterable[Any]) -> Iterator[Any]:
        """Work through it."""
        return map(work, *columns)
