"""Divides a batch among processes and combines their gradients; a single process needs neither.

A process that has joined the others (`ddm.training.group`) takes device, DDP and accumulation from accelerate. Mixed
precision is the loop's own in both cases; see docs/adr/0014-one-process-trains-without-accelerate.md.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddm.errors import SetupError
from ddm.system.compiling import use_own_compiler_folder
from ddm.system.devices import device_named
from ddm.training.config import Engine

Call = Callable[..., Tensor]


class TrainingProcess(Protocol):
    """One process's view of the machine.

    Attributes:
        device: where this process computes.
        num_processes: how many share the work.
        rank: this one's number; 0 writes checkpoints and reports progress.
    """

    device: torch.device
    num_processes: int
    rank: int

    def prepare(self, model: nn.Module) -> Call:
        """Move a model to the device and wrap it; return the callable for a step, while the model keeps the weights."""
        ...

    def gathering(self, *, last: bool) -> AbstractContextManager[object]:
        """Return a context in which a backward pass need not reduce gradients, unless it is the last of a step."""
        ...

    def total(self, value: Tensor) -> Tensor:
        """Return the sum over processes."""
        ...


def training_process(engine: Engine) -> TrainingProcess:
    """Return this process's machine.

    Raises:
        SetupError: the device or the processes that the engine names are not there.
    """
    # Raises where the device is not there, before anything is started on it.
    device_named(engine.device, setting="training.device")
    # Not by what the environment says: accelerate would then join a group at an address that is named there.
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return DistributedProcess(engine)
    if num_processes(engine) > 1:
        raise SetupError(
            "training.processes",
            expected=f"{num_processes(engine)} processes",
            got="1 process",
            remedy="Train by `ddm train DIR --processes N`, or by a silo's worker with training.processes.",
        )
    return SingleProcess(engine)


def num_processes(engine: Engine) -> int:
    """Return how many processes train on this machine.

    Raises:
        SetupError: more processes than GPUs.
    """
    num_gpus = 0
    if engine.device != "cpu" and torch.cuda.is_available():
        num_gpus = torch.cuda.device_count()
    if engine.processes == "auto":
        return max(1, num_gpus)
    if 0 < num_gpus < engine.processes:
        raise SetupError(
            "training.processes",
            expected=f"at most {num_gpus}, one per GPU",
            got=str(engine.processes),
            remedy='Set it to "auto", or training.device to "cpu".',
        )
    return engine.processes


class SingleProcess:
    """A single process on one device."""

    num_processes = 1
    rank = 0

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.device = device_named(engine.device)

    def prepare(self, model: nn.Module) -> Call:
        """See `TrainingProcess.prepare`."""
        return _compiled(_saving_memory(model.to(self.device), self._engine), self._engine)

    def gathering(self, *, last: bool) -> AbstractContextManager[object]:
        """See `TrainingProcess.gathering`."""
        return nullcontext()

    def total(self, value: Tensor) -> Tensor:
        """See `TrainingProcess.total`."""
        return value


class DistributedProcess:
    """One of several processes, each with a part of every batch and, if sharded, of the weights."""

    def __init__(self, engine: Engine) -> None:
        from accelerate import Accelerator

        self._engine = engine
        self._accelerator = Accelerator(cpu=engine.device == "cpu", mixed_precision="no")
        self.device: torch.device = self._accelerator.device
        self.num_processes: int = self._accelerator.num_processes
        self.rank: int = self._accelerator.process_index
        self._replica: nn.parallel.DistributedDataParallel | None = None

    def prepare(self, model: nn.Module) -> Call:
        """See `TrainingProcess.prepare`."""
        model = _saving_memory(model.to(self.device), self._engine)
        if not self._engine.shard:
            self._replica = self._accelerator.prepare_model(model)
            return _compiled(self._replica, self._engine)
        # accelerate shards on GPUs only. This is the function that it calls; with gloo it runs on a CPU too.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.num_processes,))
        # Block by block, so that only one block at a time is gathered whole.
        for block in blocks_of(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return _compiled(model, self._engine)

    def gathering(self, *, last: bool) -> AbstractContextManager[object]:
        """See `TrainingProcess.gathering`."""
        # Sharded gradients are reduced in every backward pass: a process has no room for whole ones until the last.
        if last or self._replica is None:
            return nullcontext()
        return self._replica.no_sync()

    def total(self, value: Tensor) -> Tensor:
        """See `TrainingProcess.total`."""
        return torch.as_tensor(self._accelerator.reduce(value, reduction="sum"))


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a network's blocks: the members of its outermost module lists."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from blocks_of(child)


def _saving_memory(model: nn.Module, engine: Engine) -> nn.Module:
    """With `recompute`, compute each block's intermediate results again in the backward pass."""
    if engine.recompute:
        for block in blocks_of(model):
            # Wrapped inside the block, so that sharding stays outside and torch compiles the block whole.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def _compiled(call: Call, engine: Engine) -> Call:
    if not engine.compile:
        return call
    use_own_compiler_folder()
    compiled: Call = torch.compile(call)
    return compiled
