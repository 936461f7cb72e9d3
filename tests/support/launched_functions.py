"""What processes that `ddm.training.launcher` starts do in tests; they import this module."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ddm.diffusion.path import LinearPath
from ddm.errors import NumericalError
from ddm.protocol.plan import Training, UniformT
from ddm.training.config import Engine
from ddm.training.loop import Progress, train
from tests.ddm.training.test_loop import settings
from tests.support.torchrun_program import fresh


@dataclass(frozen=True)
class Train:
    """Train for 100 steps, and save what came of it."""

    folder: Path
    kind: str
    engine: Engine

    def __call__(
        self, tensors: Mapping[str, Tensor], on_progress: Callable[[Progress], None], should_stop: Callable[[], bool]
    ) -> None:
        """The first process saves."""
        trained = train(
            fresh(self.kind),
            tensors["images"],
            self.recipe(),
            LinearPath(),
            UniformT(),
            checkpoint_dir=self.checkpoints(),
            on_progress=on_progress,
            should_stop=should_stop,
            labels=tensors.get("labels"),
            engine=self.engine,
        )
        if trained.ema:
            save_file(trained.ema, self.folder / "expert.safetensors")

    def recipe(self) -> Training:
        """What is asked for."""
        return settings(num_steps=100)

    def checkpoints(self) -> Path:
        """Where this process looks for them."""
        return self.folder


class TrainApart(Train):
    """As on several machines without a folder in common."""

    def checkpoints(self) -> Path:
        """Each process has its own."""
        return self.folder / str(torch.distributed.get_rank())


@dataclass(frozen=True)
class Tell:
    """Tell of what each process was handed, and of its surroundings, into a file of its own."""

    folder: Path

    def __call__(self, tensors: Mapping[str, Tensor], on_progress: Callable[[Any], None], _: object) -> None:
        """Write into the tensors too: no other process may see that."""
        rank = torch.distributed.get_rank()
        told = {name: (str(value.dtype), value.tolist()) for name, value in tensors.items()}
        for value in tensors.values():
            value.zero_()
        torch.distributed.barrier()
        again = {name: bool(value.any()) for name, value in tensors.items()}
        here = {"threads": torch.get_num_threads(), "environment": dict(os.environ), "tensors": told, "after": again}
        here |= {"temporary": mkdtemp()}
        (self.folder / f"{rank}.json").write_text(json.dumps(here))
        on_progress(rank)


def fail_in_the_second(tensors: Mapping[str, Tensor], _: object, should_stop: object) -> None:
    """The first waits for an answer that never comes."""
    if torch.distributed.get_rank() == 1:
        raise NumericalError("loss at step 3", expected="a finite number", got="nan", remedy="Learn slower.")
    torch.distributed.barrier()


def break_in_the_second(tensors: Mapping[str, Tensor], _: object, should_stop: object) -> None:
    """An error that is none of ours."""
    if torch.distributed.get_rank() == 1:
        raise ZeroDivisionError("by the second")
    torch.distributed.barrier()


def wait_for_the_end(tensors: Mapping[str, Tensor], on_progress: Callable[[Any], None], _: object) -> None:
    """Listens to nobody."""
    on_progress("waiting")
    torch.distributed.barrier()
    while True:
        torch.distributed.barrier()
