"""Measures the memory of strategy lock with eight experts and a budget of two, and the time to load an expert.

The peak is that of a process of its own (VmHWM): one process draws from all eight with a budget of two, one with a
budget of one expert that is the only one; what the second takes besides its expert (Python, torch, activations) is
what the first is allowed on top of 2.2 experts. Loading is timed against safetensors' own loading and against hashing,
file cache warm, one thread, in turns, each time in another order. safetensors maps a file and reads nothing of it until
somebody looks, so its tensors are copied to memory of their own, as ours lie. The bound is 1.1 times that and once
hashing; what we do besides, looking at every value, has to fit into it. Processor time stands beside the wall's, which
also tells of what else the machine was doing. Targets: at most 2.2 experts; at most the bound. Writes
build/bench/memory.csv and targets/memory.csv.
"""

import gc
import hashlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
from support.federation import ARCHITECTURES, SHAPE, expert_bytes, write_expert
from support.measuring import parse, report, require_memory, require_space, say
from support.targets import Target, report_targets

from ddm.diffusion.path import Expert
from ddm.ensemble import Ensemble, SamplingOptions
from ddm.models import load_expert
from ddm.protocol.architecture import Dit
from ddm.protocol.base import File
from ddm.sampling.expert_cache import LazyExperts

NUM_EXPERTS = 8
BUDGET = 2
MEMORY_TARGET = 2.2
TIME_TARGET = 1.1


def listed(folder: Path, k: int) -> File:
    """The file of an expert as a manifest lists it."""
    path = folder / f"{k}.safetensors"
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    return File(path=path.name, bytes=path.stat().st_size, digest=digest)


def draw(folder: Path, size: str, num_experts: int, budget: int) -> None:
    """In a process of its own: draw with lock, print the peak."""
    torch.set_num_threads(1)
    files = [listed(folder, k) for k in range(num_experts)]
    architecture: Dit = ARCHITECTURES[size]

    def load(k: int) -> Expert:
        return load_expert(architecture, SHAPE, folder, files[k])

    sizes = [file.bytes for file in files]
    experts = LazyExperts(load, sizes, budget * max(sizes))
    Ensemble(experts, None, [1.0] * num_experts, SHAPE).sample(
        16 * num_experts, steps=2, options=SamplingOptions(solver="euler")
    )
    status = Path("/proc/self/status").read_text().splitlines()
    print(json.dumps(int(next(line for line in status if "VmHWM" in line).split()[1]) * 1024))


def peak(folder: Path, size: str, num_experts: int, budget: int) -> int:
    """The peak of `draw`, bytes."""
    command = [sys.executable, __file__, "--draw", str(folder), size, str(num_experts), str(budget)]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(json.loads(completed.stdout))


def load_times(folder: Path, architecture: Dit, turn: int) -> dict[str, tuple[float, float]]:
    """Wall and processor seconds to load one expert our way, by safetensors alone, and to hash its file."""
    file = listed(folder, 0)
    path = folder / "0.safetensors"

    def hashed() -> str:
        with path.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()

    works: list[tuple[str, Callable[[], object]]] = [
        ("ours", lambda: load_expert(architecture, SHAPE, folder, file)),
        (
            "safetensors",
            lambda: {
                name: value.clone() for name, value in safetensors.torch.load_file(path).items()
            },
        ),
        ("hashing", hashed),
    ]
    times = {}
    for name, work in works[turn % 3 :] + works[: turn % 3]:
        wall = time.perf_counter()
        processor = time.process_time()
        result = work()
        times[name] = (time.perf_counter() - wall, time.process_time() - processor)
        del result
        gc.collect()
    return times


def of_bound(times: dict[str, tuple[float, float]], clock: int) -> float:
    """Our loading as a share of what it may take; clock 0 is the wall's, 1 the processor's."""
    return times["ours"][clock] / (
        TIME_TARGET * times["safetensors"][clock] + times["hashing"][clock]
    )


def main() -> None:
    """Command line: --rounds N --quick --json --out FOLDER --work FOLDER."""
    if sys.argv[1:2] == ["--draw"]:
        folder, size, num_experts, budget = sys.argv[2:]
        draw(Path(folder), size, int(num_experts), int(budget))
        return
    arguments = parse(__doc__, rounds=5)
    size = "64 MiB" if arguments.quick else "1 GiB"
    architecture = ARCHITECTURES[size]
    one = expert_bytes(architecture)
    require_space(arguments.work, NUM_EXPERTS * one)
    require_memory(4 * one + 2**30)
    torch.set_num_threads(1)
    folder = arguments.work / "memory"
    for k in range(NUM_EXPERTS):
        write_expert(folder / f"{k}.safetensors", architecture, seed=k)
    alone = peak(folder, size, 1, 1)
    eight = peak(folder, size, NUM_EXPERTS, BUDGET)
    experts = 1 + (eight - alone) / one
    say(
        f"one expert {alone >> 20} MiB, eight within two {eight >> 20} MiB: {experts:.2f} experts and the rest"
    )
    rounds = [load_times(folder, architecture, turn) for turn in range(arguments.rounds + 1)][1:]
    for k in range(NUM_EXPERTS):
        (folder / f"{k}.safetensors").unlink()
    rows = [
        (
            name,
            *(
                round(statistics.median(times[name][clock] for times in rounds), 3)
                for clock in (0, 1)
            ),
        )
        for name in ("ours", "safetensors", "hashing")
    ]
    report("memory", ("loading " + size, "wall_s", "processor_s"), rows, arguments)
    say(
        f"of the bound by processor time: {statistics.median(of_bound(times, 1) for times in rounds):.3f}"
    )
    targets = [
        Target(
            "experts in memory at the peak, eight within two",
            [experts],
            MEMORY_TARGET,
            at_least=False,
        ),
        Target(
            "loading over 1.1 safetensors and hashing",
            [of_bound(t, 0) for t in rounds],
            1.0,
            at_least=False,
        ),
    ]
    report_targets("memory", targets, arguments)


if __name__ == "__main__":
    main()
