"""Compares the time to verify and open a release with that of reading and hashing the same bytes.

Eight experts of 1 GiB each, made up, in a genuine release: keys, signatures, documents, router. All is done in this
process, in turns, after one round that is not counted; the figure is the median of the rounds' ratios. The release is
hashed as any program would do it: every file once, through one buffer. Target: at most 1.2 times that. An opened
release occupies new memory, though, which is slow to allocate on some virtual machines; so the files are also hashed
while they are read into new memory, all of them, one after the other.
Needs 9 GiB of memory and, for a while, 25 GiB of disk. Writes build/bench/open_release.csv.
"""

import gc
import hashlib
import mmap
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from support.federation import ARCHITECTURES, PASSPHRASE, MadeUp, expert_bytes, write_expert
from support.measuring import parse, report, require_memory, require_space, say

from aggregator.intake.inventory import take_inventory
from aggregator.release.publish import publish
from aggregator.router.train import train_router
from ddm.io.files import link_or_copy, write_atomic
from ddm.loading.ensemble import open_ensemble
from ddm.protocol.architecture import Dit
from ddm.publishing.pages import PAGE_NAMES

NUM_EXPERTS = 8
TARGET = 1.2


def make_release(work: Path, architecture: Dit) -> tuple[Path, bytes]:
    """Publish made-up experts; return the release and the root that its reader pins."""
    made = MadeUp.create(work, NUM_EXPERTS, architecture)
    plan_id = made.plan.plan_id
    for number, silo_id in enumerate(made.sites):
        say(f"{silo_id} makes its expert")
        made.answer(silo_id, partial(write_expert, architecture=architecture, seed=number))
        outbox = made.sites[silo_id].outbox / plan_id / "1"
        for path in outbox.rglob("*.*"):
            if path.is_file():
                link_or_copy(
                    path, made.federation.accepted / plan_id / silo_id / path.relative_to(outbox)
                )
    train_router(made.federation, take_inventory(made.federation), seed=0)
    say("publishing")
    # Pages show samples, which experts that nobody trained cannot draw; opening the release is what is measured below.
    with patch("ddm.publishing.signing.write_pages", _write_empty_pages):
        publish(made.federation, PASSPHRASE, work / "release", rehearsal=True)
    return work / "release", (made.federation.tuf / "1.root.json").read_bytes()


def _write_empty_pages(contents: object, manifest: object, targets: Path, **_: object) -> None:
    for name in PAGE_NAMES:
        write_atomic(targets / name, b"none")


def hash_files(folder: Path) -> None:
    """Read and hash every file once."""
    buffer = memoryview(bytearray(2**20))
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as handle:
            while size := handle.readinto(buffer):
                digest.update(buffer[:size])
        digest.hexdigest()


def hash_into_memory(folder: Path) -> None:
    """Read every file into memory of its own, and hash it there, a block at a time."""
    kept = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        memory = mmap.mmap(-1, path.stat().st_size)
        digest = hashlib.sha256()
        start = 0
        with path.open("rb", buffering=0) as handle, memoryview(memory) as view:
            while size := handle.readinto(view[start : start + 2**20]):
                digest.update(view[start : start + size])
                start += size
        kept.append((memory, digest.hexdigest()))


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor seconds of some work; what it returns is thrown away after the clock stopped."""
    wall = time.perf_counter()
    cpu = time.process_time()
    result = work()
    elapsed = (time.perf_counter() - wall, time.process_time() - cpu)
    del result
    gc.collect()
    return elapsed


def main() -> None:
    """Command line: --rounds N --quick --json --out FOLDER --work FOLDER."""
    arguments = parse(__doc__, rounds=3)
    architecture = ARCHITECTURES["64 MiB" if arguments.quick else "1 GiB"]
    total = NUM_EXPERTS * expert_bytes(architecture)
    require_space(arguments.work, 2 * total)
    require_memory(total + 2**30)
    torch.set_num_threads(1)
    work = arguments.work / "open"
    shutil.rmtree(work, ignore_errors=True)
    release, root = make_release(work, architecture)
    rows = []
    for number in range(arguments.rounds + 1):
        hashed = timed(lambda: hash_files(release))
        kept = timed(lambda: hash_into_memory(release))
        opened = timed(lambda: open_ensemble(release, root=root, state=work / "state"))
        say(
            f"hashed in {hashed[0]:.1f} s, into memory in {kept[0]:.1f} s, verified and opened in {opened[0]:.1f} s"
        )
        if number:
            measured = [round(value, 2) for value in (*hashed, *kept, *opened)]
            rows.append(
                (
                    number,
                    total,
                    *measured,
                    round(opened[0] / hashed[0], 3),
                    round(opened[0] / kept[0], 3),
                )
            )
    shutil.rmtree(work)
    times = ("hash_s", "hash_cpu_s", "into_memory_s", "into_memory_cpu_s", "open_s", "open_cpu_s")
    report("open_release", ("round", "bytes", *times, "of_hash", "of_into_memory"), rows, arguments)
    medians = [statistics.median(row[column] for row in rows) for column in (-2, -1)]
    say(
        f"median: {medians[0]:.2f} of hashing (target {TARGET}), {medians[1]:.2f} of hashing into memory"
    )


if __name__ == "__main__":
    main()
