"""How a machine trains: device, processes, memory. These settings change the result by no more than rounding."""

from typing import Annotated, Literal

from pydantic import Field

from ddm.io.settings import Settings
from ddm.system.devices import DeviceName


class Engine(Settings):
    """How one machine trains: the table [training] of silo.toml. Imports no torch: settings are read much earlier.

    Attributes:
        device: where to train; auto is the GPU where there is one.
        processes: how many share the work; auto is one per GPU, or one without a GPU. `ddm.training.launcher` starts
            them.
        accumulate: parts into which each process splits its share of a batch, to save memory.
        compile: whether torch compiles the expert: minutes before the first step, then faster steps.
        recompute: whether a block's intermediate results are computed again in the backward pass, to save memory.
        shard: whether several processes share weights, averages and moments instead of each holding all of them.
    """

    device: DeviceName = "auto"
    processes: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = 1
    accumulate: Annotated[int, Field(ge=1, le=4096)] = 1
    compile: bool = False
    recompute: bool = False
    shard: bool = False
