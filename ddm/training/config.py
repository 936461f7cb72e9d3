"""What a machine brings to training: device, processes, memory; it changes what is learned by no more than rounding."""

from typing import Annotated, Literal

from pydantic import Field

from ddm.io.settings import Settings
from ddm.system.devices import DeviceName


class Engine(Settings):
    """How one machine trains; the table [training] of silo.toml. No torch: a setting is read long before training.

    Attributes:
        device: where to train; auto is the GPU where there is one.
        processes: how many share the work; auto is one a GPU, and one where there is none. `ddm.training.launcher`
            starts them.
        accumulate: parts that each process cuts its share of a batch into, for less memory.
        compile: whether torch compiles the expert; minutes before the first step, fewer seconds a step.
        recompute: whether a block's intermediate results are computed again in the backward pass, for less memory.
        shard: whether several processes share weights, averages and moments instead of each holding all of them.
    """

    device: DeviceName = "auto"
    processes: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = 1
    accumulate: Annotated[int, Field(ge=1, le=4096)] = 1
    compile: bool = False
    recompute: bool = False
    shard: bool = False
