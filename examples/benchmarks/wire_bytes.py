"""Compares the bytes on the wire of a whole federation with those of 100 rounds of FedAvg on the same model.

Ours goes through Flower with SuperLink, SuperNodes, TLS and node keys on loopback, and through a relay that counts what
passes between silos and aggregator, both ways: joining, plan, made-up experts, and the first receipt of each silo,
since screening keeps untrained experts back. FedAvg sends the weights down and up in each round. Only their bytes are
counted, without messages, so the true ratio is smaller; table 8 of examples/paper counts FedAvg on the wire too. Nobody
trains, since training sends nothing. The traffic of waiting is counted during an idle minute and reported per hour.
Target: under 1%. Writes build/bench/wire_bytes.csv.
"""

import shutil
import time
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from support.federation import ARCHITECTURES, PASSPHRASE, SHAPE, MadeUp, write_expert
from support.measuring import parse, report, require_space, say
from support.sites import running

from aggregator.intake.limits import submission_bytes
from aggregator.runtime.running import intake_program
from ddm.models import expected_tensors
from ddm.protocol.architecture import Dit
from ddm.system.processes import free_port
from examples.paper.federated.counting import Relay

TIMEOUT_S = 3600.0
IDLE_S = 60.0
ROUNDS = 100


def ours(work: Path, num_silos: int, architecture: Dit, idle_s: float) -> tuple[int, int, float]:
    """Bytes up and down of a whole federation, and bytes a second of one that waits."""
    shutil.rmtree(work, ignore_errors=True)
    made = MadeUp.create(work, num_silos, architecture)
    plan_id = made.plan.plan_id
    fed = made.federation
    port = free_port()
    sites = {silo_id: site.path for silo_id, site in made.sites.items()}
    settings: dict[str, Any] = {
        "shard_bytes": 64 * 2**20,
        "max_submission_bytes": submission_bytes(made.plan),
        "beside": (intake_program(fed, made.plan, PASSPHRASE),),
    }
    with Relay(port) as relay:
        with running(
            fed.path,
            sites,
            made.node_keys(),
            plan_id=plan_id,
            port=port,
            address=f"127.0.0.1:{relay.port}",
            **settings,
        ) as wait:
            wait(
                lambda: all(
                    (site.inbox / plan_id / "bundle").exists() for site in made.sites.values()
                ),
                TIMEOUT_S,
            )
            before = relay.total
            ended = time.monotonic() + idle_s
            wait(lambda: time.monotonic() > ended, TIMEOUT_S)
            idle = relay.total - before
            for number, silo_id in enumerate(made.sites):
                made.answer(silo_id, partial(write_expert, architecture=architecture, seed=number))
            wait(
                lambda: all(
                    any((fed.receipts / plan_id / silo_id).glob("1.*delivered"))
                    for silo_id in sites
                ),
                TIMEOUT_S,
            )
        result = (relay.up, relay.down, idle / idle_s)
    shutil.rmtree(work)
    return result


def main() -> None:
    """Command line: --silos N --quick --json --out FOLDER --work FOLDER."""
    arguments = parse(__doc__, silos=2)
    name = "64 MiB"
    architecture = (
        Dit(patch=2, hidden=256, depth=3, heads=8) if arguments.quick else ARCHITECTURES[name]
    )
    weights = 4 * sum(prod(spec.shape) for spec in expected_tensors(architecture, SHAPE).values())
    require_space(arguments.work, 6 * arguments.silos * weights)
    up, down, idle = ours(
        arguments.work / "wire", arguments.silos, architecture, 20.0 if arguments.quick else IDLE_S
    )
    say(f"ours: {up / 1e6:.2f} MB up, {down / 1e6:.2f} MB down")
    fedavg = 2 * ROUNDS * arguments.silos * weights
    rows = [
        ("model", 1, weights),
        ("ours, whole", arguments.silos, up + down),
        (f"FedAvg, {ROUNDS} rounds", arguments.silos, fedavg),
        ("waiting, an hour of all silos", arguments.silos, round(idle * 3600)),
    ]
    report(
        "wire_bytes",
        ("what", "silos", "bytes", "of_fedavg"),
        [(*row, f"{row[-1] / fedavg:.5f}") for row in rows],
        arguments,
    )
    say(f"ratio: {(up + down) / fedavg:.4%}")


if __name__ == "__main__":
    main()
