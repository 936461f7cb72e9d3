"""One process alone, or one of several: who computes which part of a batch, and how the parts come together.

A process that `ddm.training.launcher`, torchrun or `accelerate launch` started finds the others through accelerate:
device, process group, DDP, accumulation. A process alone needs none of it. Mixed precision is the loop's own, the same
for both; see docs/adr/0014-one-process-trains-without-accelerate.md.
"""

import atexit
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from tempfile import mkdtemp
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddm.errors import SetupError
from ddm.system.devices import device_named
from ddm.training.config import Engine

Call = Callable[..., Tensor]
_COMPILER_FILES = "TORCHINDUCTOR_CACHE_DIR"


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
    device_named(engine.device, setting="training.device")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return Together(engine)
    if num_processes(engine) > 1:
        expected, remedy = (
            f"{num_processes(engine)} processes",
            "Start them with ddm.training.launcher, or with torchrun.",
        )
        raise SetupError("training.processes", expected=expected, got="a process alone", remedy=remedy)
    return Alone(engine)


def num_processes(engine: Engine) -> int:
    """Return how many processes shall train on this machine.

    Raises:
        SetupError: more than there are GPUs to train on.
    """
    num_gpus = torch.cuda.device_count() if engine.device != "cpu" and torch.cuda.is_available() else 0
    if engine.processes == "auto":
        return max(1, num_gpus)
    if 0 < num_gpus < engine.processes:
        remedy = 'Set it to "auto", or training.device to "cpu".'
        expected, got = f"at most one a GPU, {num_gpus}", str(engine.processes)
        raise SetupError("training.processes", expected=expected, got=got, remedy=remedy)
    return engine.processes


class Alone:
    """One process on one device."""

    num_processes, rank = 1, 0

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.device = device_named(engine.device)

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
        for block in blocks_of(model):
            # Inside the block: what shards it stays around, and torch compiles it whole.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def _compiled(call: Call, engine: Engine) -> Call:
    """Compile if that is asked for, in this process's own folder: a kill leaves files there that nobody can load."""
    if not engine.compile:
        return call
    if _COMPILER_FILES not in os.environ:
        os.environ[_COMPILER_FILES] = mkdtemp(prefix="archipelago-compiled-")
        atexit.register(shutil.rmtree, os.environ[_COMPILER_FILES], ignore_errors=True)
    compiled: Call = torch.compile(call)
    return compiled
