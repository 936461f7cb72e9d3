"""Measures the speed of a submission from one silo to the aggregator: several shards in flight against one.

Real SuperLink with database, ServerApp, SuperNode and courier, TLS and node keys, on loopback. Both variants run one
after the other in this program, on the same file. Clock: from the submission's appearance in the outbox, after the
plan's bundle arrived, to the rename of the whole folder on the aggregator's side, everything on disk and fsynced.
Writes build/bench/transfer.csv, and the peak memory and processor time of every process.
"""

import shutil
import time
from pathlib import Path
from typing import Any

from support.federation import TINY, MadeUp
from support.measuring import PROCESS_COLUMNS, Processes, parse, report, require_space, say
from support.sites import running, submit, write_random

from aggregator.transfer.dispatcher import MAX_IN_FLIGHT

TIMEOUT_S = 1800.0


def transfer(
    work: Path, num_bytes: int, in_flight: int, shard_bytes: int
) -> tuple[float, list[tuple[str, str, int, float]]]:
    """Return the seconds that a submission of `num_bytes` takes, and the resources that each process used."""
    shutil.rmtree(work, ignore_errors=True)
    made = MadeUp.create(work, 1, TINY)
    plan_id = made.plan.plan_id
    fed = made.federation
    ((silo_id, site),) = made.sites.items()
    write_random(work / "expert", num_bytes)
    settings: dict[str, Any] = {
        "plan_id": plan_id,
        "shard_bytes": shard_bytes,
        "max_submission_bytes": 2 * num_bytes + 2**20,
        "max_in_flight": in_flight,
    }
    with (
        Processes() as processes,
        running(fed.path, {silo_id: site.path}, made.node_keys(), **settings) as wait,
    ):
        wait((site.inbox / plan_id / "bundle").exists, TIMEOUT_S)
        arrived = fed.incoming / plan_id / silo_id / "1"
        before = processes.cpu_s()
        started = time.monotonic()
        submit(site.path, plan_id, silo_id, work / "expert")
        wait(arrived.exists, TIMEOUT_S)
        seconds = time.monotonic() - started
        used = processes.rows(f"{in_flight} in flight", before)
        if (
            found := (arrived / "silos" / silo_id / "expert.safetensors").stat().st_size
        ) != num_bytes:
            raise SystemExit(f"received file: expected {num_bytes} bytes, got {found}")
    shutil.rmtree(work)
    return seconds, used


def main() -> None:
    """Command line: --gib SIZE --shard MIB --quick --json --out FOLDER --work FOLDER."""
    arguments = parse(__doc__, gib=1.0, shard=64, flight=MAX_IN_FLIGHT)
    num_bytes = int((0.125 if arguments.quick else arguments.gib) * 2**30)
    require_space(arguments.work, 2 * num_bytes)
    rows: list[tuple[int, int, float, float]] = []
    memory: list[tuple[str, str, int, float]] = []
    for in_flight in dict.fromkeys((arguments.flight, 1)):
        seconds, used = transfer(
            arguments.work / "transfer", num_bytes, in_flight, arguments.shard * 2**20
        )
        rows.append((in_flight, num_bytes, round(seconds, 1), round(num_bytes / 1e6 / seconds, 1)))
        memory += used
        say(f"{in_flight} in flight: {num_bytes / 1e6 / seconds:.1f} MB/s")
    say(f"ratio: {rows[0][3] / rows[-1][3]:.2f}")
    report("transfer", ("in_flight", "bytes", "seconds", "mb_per_s"), rows, arguments)
    report("transfer_processes", PROCESS_COLUMNS, memory, arguments)


if __name__ == "__main__":
    main()
