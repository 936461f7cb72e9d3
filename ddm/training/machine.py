"""One process alone, or one of several: who computes which part of a batch, and how the parts come together.

A process that torchrun or `accelerate launch` started finds the others through accelerate: device, process group, DDP,
accumulation. A process alone needs none of it. Mixed precision is the loop's own, the same for both; see
docs/adr/0014-one-process-trains-without-accelerate.md.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from ddm.engine import Engine
from ddm.errors import SetupError

Call = Callable[..., Tensor]


class Machine(Protocol):
    """One process's view of the machine.

    Attributes:
        device: where this process computes.
        num_processes: how many share the work.
        rank: this one's number; 0 writes and speaks for all.
    """

    device: torch.device
    num_processes: int
    rank: int

    def prepare(self, model: nn.Module) -> Call:
        """Put a model in its place; return what a step calls, while the model keeps the weights."""
        ...

    def gathering(self, *, last: bool) -> AbstractContextManager[object]:
        """Within it a backward pass need not gather gradients from all processes, unless it is the last of a step."""
        ...

    def total(self, value: Tensor) -> Tensor:
        """Return the sum over processes."""
        ...


def machine_of(engine: Engine) -> Machine:
    """Return this process's machine.

    Raises:
        SetupError: the engine asks for what is not there.
    """
    if engine.device == "cuda" and not torch.cuda.is_available():
        raise SetupError("training.device", expected="a GPU that torch sees", got="none", remedy="Set it to auto.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return Together(engine)
    return Alone(engine)


class Alone:
    """One process on one device."""

    num_processes, rank = 1, 0

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.device = torch.device("cuda" if engine.device != "cpu" and torch.cuda.is_available() else "cpu")

    def prepare(self, model: nn.Module) -> Call:
        """See `Machine.prepare`."""
        return _compiled(_saving_memory(model.to(self.device), self._engine), self._engine)

    def gathering(self, *, last: bool) -> AbstractContextManager[object]:
        """See `Machine.gathering`."""
        return nullcontext()

    def total(self, value: Tensor) -> Tensor:
        """See `Machine.total`."""
        return value


class Together:
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
        """See `Machine.prepare`."""
        model = _saving_memory(model.to(self.device), self._engine)
        if not self._engine.shard:
            self._replica = self._accelerator.prepare_model(model)
            return _compiled(self._replica, self._engine)
        # accelerate shards on GPUs alone; this is the function that it calls, and gloo runs it on a CPU.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.num_processes,))
        for block in blocks_of(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return _compiled(model, self._engine)

    def gathering(self, *, last: bool) -> AbstractContextManager[object]:
        """See `Machine.gathering`."""
        return nullcontext() if last or self._replica is None else self._replica.no_sync()

    def total(self, value: Tensor) -> Tensor:
        """See `Machine.total`."""
        return torch.as_tensor(self._accelerator.reduce(value, reduction="sum"))


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a network's blocks: what stands in its outermost lists."""
    for child in model.children():
        yield from child if isinstance(child, nn.ModuleList) else blocks_of(child)


def _saving_memory(model: nn.Module, engine: Engine) -> nn.Module:
    """Let each block compute its intermediate results again when they are needed, if that is asked for."""
    if engine.recompute:
        from torch.distributed._composable.checkpoint_activation import checkpoint

        for block in blocks_of(model):
            checkpoint(block)
    return model


def _compiled(call: Call, engine: Engine) -> Call:
    return torch.compile(call) if engine.compile else call
