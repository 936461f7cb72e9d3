"""Measures the memory that each process needs to take in large experts.

First eight silos send an expert of 1 GiB each at the same time, then one silo sends one of 12 GiB that is zeros (3.2
billion parameters in float32). Everything is real but training: SuperLink with database, nginx where it is installed,
ServerApp, SuperNodes, couriers, intake with signatures, digests, values, screening. A made-up expert is of no use, so
screening may quarantine it; it counts as taken in all the same. Target: at most 1 GiB resident in each process.
Writes build/bench/intake_size.csv.
"""

import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

from support.federation import ARCHITECTURES, PASSPHRASE, MadeUp, expert_bytes, write_expert
from support.measuring import PROCESS_COLUMNS, Processes, parse, report, require_space, say
from support.sites import running

from aggregator.intake.limits import submission_bytes
from aggregator.runtime.proxy import find_nginx
from aggregator.runtime.running import intake_program

TIMEOUT_S = 4 * 3600.0
TARGET_MIB = 1024


def take_in(
    work: Path, num_silos: int, size: str, *, sparse: bool, shard_bytes: int
) -> list[tuple[str, str, int, float]]:
    """Peak memory and processor time of every process while so many silos send an expert of that size."""
    shutil.rmtree(work, ignore_errors=True)
    architecture = ARCHITECTURES[size]
    name = f"{num_silos} x {size}"
    made = MadeUp.create(work, num_silos, architecture)
    for number, silo_id in enumerate(made.sites):
        say(f"{name}: {silo_id} makes its expert")
        made.answer(
            silo_id, partial(write_expert, architecture=architecture, seed=number, sparse=sparse)
        )
    plan_id = made.plan.plan_id
    fed = made.federation
    answers = [
        [fed.receipts / plan_id / s / "1.json", fed.path / "quarantine" / plan_id / s / "1"]
        for s in made.sites
    ]
    settings: dict[str, Any] = {
        "shard_bytes": shard_bytes,
        "max_submission_bytes": submission_bytes(made.plan),
        "nginx": find_nginx(),
        "beside": (intake_program(fed, made.plan, PASSPHRASE),),
    }
    reported = 0

    def finished() -> bool:
        nonlocal reported
        num = sum(any(path.exists() for path in paths) for paths in answers)
        if num != reported:
            reported = num
            say(f"{name}: {num} taken in")
        return num == num_silos

    sites = {silo_id: site.path for silo_id, site in made.sites.items()}
    with (
        Processes() as processes,
        running(fed.path, sites, made.node_keys(), plan_id=plan_id, **settings) as wait,
    ):
        before = processes.cpu_s()
        started = time.monotonic()
        wait(finished, TIMEOUT_S)
        seconds = time.monotonic() - started
        rows = processes.rows(name, before)
    say(f"{name}: {seconds:.0f} s")
    shutil.rmtree(work)
    return [row for row in rows if row[1] not in ("this process", "other")]


def main() -> None:
    """Command line: --silos N --size "64 MiB" (or 1, 12 GiB) --shard MIB --quick --json --out FOLDER --work FOLDER."""
    arguments = parse(__doc__, silos=8, shard=64, size="")
    runs = [(arguments.silos, "1 GiB", False), (1, "12 GiB", True)]
    if arguments.quick:
        runs = [(2, "64 MiB", False)]
    elif arguments.size:
        runs = [(arguments.silos, arguments.size, arguments.size == "12 GiB")]
    rows: list[tuple[str, str, int, float]] = []
    for num_silos, size, sparse in runs:
        # On the site, on its way, and verified; the database and nginx hold shards.
        require_space(arguments.work, 3 * num_silos * expert_bytes(ARCHITECTURES[size]))
        rows += take_in(
            arguments.work / "intake",
            num_silos,
            size,
            sparse=sparse,
            shard_bytes=arguments.shard * 2**20,
        )
    report("intake_size", PROCESS_COLUMNS, rows, arguments)
    over = [f"{row[1]} ({row[0]}): {row[2]} MiB" for row in rows if row[2] > TARGET_MIB]
    say(f"over {TARGET_MIB} MiB: {', '.join(over) or 'none'}")


if __name__ == "__main__":
    main()
