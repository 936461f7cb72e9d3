"""How a machine trains: device, processes, memory, and what starts the processes.

Device, processes, threads and memory change the result by no more than rounding.
"""

import re
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from ddm.io.settings import Settings
from ddm.system.cores import NumThreads
from ddm.system.devices import DeviceName

CHECKPOINT_S = 300.0
PLACEHOLDERS = ("folder", "launch", "processes", "python")
# Any name in braces, so that a misspelt one is refused instead of handed on.
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]*)\}")
# Signs that would mean something to a shell; anybody who writes them expects one to read the command.
_OF_A_SHELL = re.compile(r"[|;&<>`$\n]")
# By torchrun's agents, also those that `accelerate launch` starts.
_TORCHRUN = re.compile(
    r"(?:^|[\s/])torchrun(?:\s|$)"
    r"|\btorch\.distributed\.(?:run|launch)\b"
    r"|\baccelerate(?:\.commands\.|\s+)launch\b"
)
TORCHRUN_REMEDY = (
    "On one machine, leave training.launcher out and set training.processes in silo.toml, or "
    "use `ddm train DIR --processes N`; on several machines, let srun, mpirun or Kubernetes "
    "start the processes."
)
Word = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]


class Engine(Settings):
    """How one machine trains: most of the table [training] of silo.toml. Imports no torch: settings are read earlier.

    Attributes:
        device: where to train; auto is the GPU where there is one.
        processes: how many share the work, on all machines together; auto is one per GPU, or one without a GPU, and
            with a launcher as many as it starts.
        accumulate: parts into which each process splits its share of a batch, to save memory.
        compile: whether torch compiles the expert: minutes before the first step, then faster steps.
        recompute: whether a block's intermediate results are computed again in the backward pass, to save memory.
        shard: whether several processes share weights, averages and moments instead of each holding all of them.
        threads: the number of threads of each process; None is as many as `ddm.system.cores.default_threads` says,
            divided among the processes if this machine starts them.
        checkpoint_s: most seconds between two checkpoints, see `ddm.training.saving.CheckpointSchedule`.
    """

    device: DeviceName = "auto"
    processes: Annotated[int, Field(ge=1, le=4096)] | Literal["auto"] = 1
    accumulate: Annotated[int, Field(ge=1, le=4096)] = 1
    compile: bool = False
    recompute: bool = False
    shard: bool = False
    threads: NumThreads | None = None
    checkpoint_s: Annotated[float, Field(ge=0, le=86400)] = CHECKPOINT_S


class TrainingSettings(Engine):
    """The table [training] of silo.toml: how a machine trains, and which program starts the processes that do.

    Attributes:
        launcher: local, or the command that starts the processes of a job, as a list of words or as one text that is
            split into words. No shell reads it. `{folder}` becomes the job's folder and must be there, `{processes}`
            their number, `{python}` this interpreter, `{launch}` the name of this start.
        jobs: the folder that holds the jobs' folders, seen under the same path by every machine; the images are
            copied there. None is the worker's own folder.
        start_s: seconds that a job may wait in a queue, once its command has ended well.
        silence_s: seconds without a sign of life after which a job is lost.
        retries: how many starts in a row may come no step further.
    """

    launcher: Literal["local"] | tuple[Word, ...] = "local"
    jobs: Path | None = None
    start_s: Annotated[float, Field(ge=1, le=30 * 86400)] = 7 * 86400.0
    silence_s: Annotated[float, Field(ge=10, le=86400)] = 600.0
    retries: Annotated[int, Field(ge=1, le=100)] = 3

    @field_validator("launcher", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        if isinstance(value, list | tuple) and all(isinstance(word, str) for word in value):
            return tuple(value)
        if not isinstance(value, str):
            raise ValueError("expected a list of words, or one text that is split into words")
        if value == "local":
            return value
        sign = _OF_A_SHELL.search(value)
        if sign is not None:
            raise ValueError(
                f"no shell reads this command, so {sign[0]!r} means nothing in it; give a list of words"
            )
        return tuple(shlex.split(value))

    @field_validator("launcher")
    @classmethod
    def _names_the_folder(
        cls, value: "Literal['local'] | tuple[str, ...]"
    ) -> "Literal['local'] | tuple[str, ...]":
        if value == "local":
            return value
        used = set()
        for word in value:
            used.update(_PLACEHOLDER.findall(word))
        # An empty pair of braces is part of the command, as in JSON.
        unknown = sorted(name for name in used - {*PLACEHOLDERS} if name)
        if unknown:
            known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
            raise ValueError(f"{{{unknown[0]}}} is none of {known}")
        if "folder" not in used:
            raise ValueError("the command must name the job's folder: {folder}")
        if _TORCHRUN.search(" ".join(value)):
            # See `ddm.training.group`, which refuses one that a script hides.
            raise ValueError(
                "torchrun runs the commands of whoever reaches its ports. " + TORCHRUN_REMEDY
            )
        return value

    @model_validator(mode="after")
    def _fits_the_launcher(self) -> Self:
        if self.launcher == "local" and self.jobs is not None:
            raise ValueError("jobs is for a launcher that starts processes on other machines")
        if self.jobs is not None and not self.jobs.is_absolute():
            raise ValueError("jobs must be an absolute path, the same on every machine")
        # With a launcher they are on many machines.
        if self.launcher == "local" and isinstance(self.processes, int) and self.processes > 64:
            raise ValueError("processes is at most 64 on one machine")
        return self

    @property
    def engine(self) -> Engine:
        """What every machine needs to know."""
        return Engine.model_validate({name: getattr(self, name) for name in Engine.model_fields})


def filled(launcher: tuple[str, ...], values: dict[str, str]) -> list[str]:
    """Return a launcher's words with every placeholder replaced; other braces stay as they are."""
    return [
        _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), word) for word in launcher
    ]
