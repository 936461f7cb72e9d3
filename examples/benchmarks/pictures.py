"""Measures the memory of every process while pictures become a cohort: scanned, decoded, transformed, read by batches.

Made pictures lie in files of many (npy, uint8), which separate decoders read: 1,000,000 of 64 x 64 by default, and
20,000 of 512 x 512. A process of its own calls what a worker calls: a first scan, the cohort, the same cohort found
again, and random batches of it. Peaks are VmHWM: anonymous memory and mapped files together. Needs 12 GB of disk for a
while. Writes build/bench/pictures.csv and targets/pictures.csv.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from support.measuring import Processes, parse, report, require_space, say
from support.targets import Target, report_targets

from ddm.protocol.data import DataSpec
from ddm.protocol.transform import FullRange, TransformSpec
from silo.data.cohort import Cohort, CohortRequest, load_cohort
from silo.data.first_look import look_at
from silo.images.source import FOLDER, ImageSource

FILES = 8
BLOCK_BYTES = 1 << 24
BATCH = 64
BATCHES = 200
TARGET_GIB = 1.5
T = TypeVar("T")


def write_data(folder: Path, num: int, side: int) -> None:
    """Write smooth pictures with noise, each unlike all others, into a few files."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    rows = max(1, BLOCK_BYTES // side**2)
    y, x = np.mgrid[:side, :side] / side
    for file in range(FILES):
        count = (num * (file + 1)) // FILES - (num * file) // FILES
        with (folder / f"part-{file}.npy").open("wb") as handle:
            header = {"descr": "|u1", "fortran_order": False, "shape": (count, side, side)}
            np.lib.format.write_array_header_1_0(handle, header)
            for start in range(0, count, rows):
                tilt = rng.uniform(-60, 60, (2, min(rows, count - start), 1, 1)).astype(np.float32)
                noise = rng.integers(0, 16, (tilt.shape[1], side, side), np.uint8)
                handle.write(
                    (112 + tilt[0] * (x - 0.5) + tilt[1] * (y - 0.5) + noise)
                    .astype(np.uint8)
                    .tobytes()
                )


def stages(folder: Path, side: int) -> None:
    """In a process of its own: print each stage's name and seconds as JSON."""
    torch.set_num_threads(1)
    spec = DataSpec(shape=(1, side, side), range=(-1.0, 1.0))
    transform = TransformSpec(range=FullRange(), storage="uint8")
    source = ImageSource(folder / "data", folder / "private" / FOLDER)

    def stage(name: str, work: Callable[[], T]) -> T:
        wall = time.perf_counter()
        result = work()
        print(json.dumps([name, round(time.perf_counter() - wall, 1)]), flush=True)
        return result

    def load() -> Cohort:
        request = CohortRequest(data=spec, min_images=1, unit="image", transform=transform)
        return load_cohort(source, request, b"s" * 32, folder / "private")

    def read() -> None:
        chosen = torch.Generator().manual_seed(0)
        for _ in range(BATCHES):
            cohort.images[torch.randint(len(cohort.images), (BATCH,), generator=chosen)]

    look = stage("scan", lambda: look_at(source))
    cohort = stage("cohort", load)
    again = stage("found again", load)
    if (
        not look.summary
        or look.summary.accepted != len(cohort.images)
        or again.digest != cohort.digest
    ):
        sys.exit("pictures were lost")
    stage(f"{BATCHES} batches", read)


def measure(work: Path, num: int, side: int) -> list[tuple[object, ...]]:
    """Return a row for each process: its peak; and each stage's seconds."""
    folder = work / f"pictures-{side}"
    rows = list[tuple[object, ...]]()
    shutil.rmtree(folder, ignore_errors=True)
    try:
        say(f"writing {num} pictures of {side} x {side}")
        write_data(folder / "data", num, side)
        command = [sys.executable, __file__, "--stages", str(folder), str(side)]
        with (
            Processes() as processes,
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child,
        ):
            for line in child.stdout or ():
                name, seconds = json.loads(line)
                rows.append((num, side, f"{name}, s", seconds))
                say(f"{name}: {seconds} s")
        if child.returncode:
            sys.exit(f"the stages ended with exit code {child.returncode}")
        peaks = {
            role: peak for role, peak in processes.peak_bytes.items() if role != "this process"
        }
        rows += [
            (num, side, f"peak of {role}, MiB", round(peak / 2**20))
            for role, peak in sorted(peaks.items())
        ]
        return rows
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Command line: --num N --large N --quick --json --out FOLDER --work FOLDER."""
    if sys.argv[1:2] == ["--stages"]:
        stages(Path(sys.argv[2]), int(sys.argv[3]))
        return
    arguments = parse(__doc__, num=1_000_000, large=20_000)
    sizes = {64: arguments.num, 512: arguments.large}
    if arguments.quick:
        sizes = {64: 4000, 512: 80}
    require_space(arguments.work, max(2 * num * side**2 for side, num in sizes.items()))
    rows = list[tuple[object, ...]]()
    targets = list[Target]()
    for side, num in sizes.items():
        measurements = measure(arguments.work, num, side) if num else []
        gib = [
            float(str(value)) / 1024
            for _, _, what, value in measurements
            if str(what).startswith("peak")
        ]
        figure = f"largest peak of a process, {num} pictures of {side} x {side}, GiB"
        targets += [Target(figure, [max(gib)], TARGET_GIB, at_least=False)] if gib else []
        rows += measurements
    report("pictures", ("pictures", "side", "what", "value"), rows, arguments)
    report_targets("pictures", targets, arguments)


if __name__ == "__main__":
    main()
