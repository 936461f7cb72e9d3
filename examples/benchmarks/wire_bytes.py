"""Compares the bytes on the wire of a whole federation with those of 100 rounds of FedAvg on the same model.

Both go through Flower with the same SuperLink, SuperNodes, TLS and node keys on loopback, and through a relay that
counts what passes between silos and aggregator, both ways. Ours is counted whole: joining, plan, made-up experts,
receipts. Of FedAvg (Flower's own strategy, training messages only, nothing evaluated) a few rounds are counted, and
each later round is assumed to cost what the second one did. Nobody trains, since training sends nothing; the traffic of
waiting is counted during an idle minute and reported per hour. Target: under 1%.
Writes build/bench/wire_bytes.csv.
"""

import json
import os
import shutil
import time
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from support.federation import ARCHITECTURES, SHAPE, MadeUp, write_expert
from support.measuring import parse, report, require_space, say
from support.sites import running

import aggregator.runtime.flower_commands
from aggregator.intake.limits import submission_bytes
from ddm.models import expected_tensors
from ddm.protocol.architecture import Dit
from ddm.system.processes import free_port
from examples.paper.federated.counting import Relay

TIMEOUT_S = 3600.0
IDLE_S = 60.0
ROUNDS = 100
APP = Path(__file__).parent / "support" / "fedavg_app"


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
    }
    address: dict[str, Any] = {"port": port, "plan_id": plan_id}
    with Relay(port) as relay:
        with running(
            fed.path,
            sites,
            made.node_keys(),
            address=f"127.0.0.1:{relay.port}",
            **address,
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
            incoming = fed.incoming / plan_id
            wait(lambda: all((incoming / silo_id / "1").exists() for silo_id in sites), TIMEOUT_S)
            for silo_id in sites:
                receipts = fed.receipts / plan_id / silo_id
                receipts.mkdir(parents=True)
                (receipts / "1.json").write_bytes(os.urandom(1200))
                (receipts / "final").touch()
            wait(
                lambda: all(
                    (fed.receipts / plan_id / silo_id / "1.delivered").exists() for silo_id in sites
                ),
                TIMEOUT_S,
            )
        result = (relay.up, relay.down, idle / idle_s)
    shutil.rmtree(work)
    return result


def fedavg(work: Path, num_silos: int, architecture: Dit, num_rounds: int) -> list[int]:
    """Bytes so far, both ways, after each round."""
    shutil.rmtree(work, ignore_errors=True)
    made = MadeUp.create(work, num_silos, architecture)
    fed = made.federation
    port = free_port()
    sizes = [prod(spec.shape) for spec in expected_tensors(architecture, SHAPE).values()]
    settings: dict[str, Any] = {
        "num_silos": num_silos,
        "num_rounds": num_rounds,
        "tensor_sizes": sizes,
    }
    (fed.path / "fedavg.json").write_text(json.dumps(settings))
    sites = {silo_id: site.path for silo_id, site in made.sites.items()}
    counted = []
    aggregator.runtime.flower_commands._APP = APP
    with (
        Relay(port) as relay,
        running(
            fed.path,
            sites,
            made.node_keys(),
            plan_id=made.plan.plan_id,
            port=port,
            address=f"127.0.0.1:{relay.port}",
            restart=False,
            shard_bytes=2**20,
            max_submission_bytes=2**20,
        ) as wait,
    ):
        for number in range(1, num_rounds + 1):
            wait((fed.path / f"round{number}").exists, TIMEOUT_S)
            counted.append(relay.total)
            say(f"FedAvg, round {number}: {relay.total / 1e6:.1f} MB so far")
    shutil.rmtree(work)
    return counted


def main() -> None:
    """Command line: --silos N --rounds N --quick --json --out FOLDER --work FOLDER."""
    arguments = parse(__doc__, silos=2, rounds=3)
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
    rounds = max(arguments.rounds, 2)
    counted = fedavg(arguments.work / "wire", arguments.silos, architecture, rounds)
    bytes_per_round = counted[1] - counted[0]
    scaled = counted[-1] + (ROUNDS - rounds) * bytes_per_round
    rows = [
        ("model", arguments.silos, weights, 1.0),
        ("ours, whole", arguments.silos, up + down, (up + down) / scaled),
        (f"FedAvg, {rounds} rounds counted", arguments.silos, counted[-1], counted[-1] / scaled),
        (f"FedAvg, {ROUNDS} rounds by the second", arguments.silos, scaled, 1.0),
        (
            "waiting, an hour of all silos",
            arguments.silos,
            round(idle * 3600),
            idle * 3600 / scaled,
        ),
    ]
    report(
        "wire_bytes",
        ("what", "silos", "bytes", "of_fedavg"),
        [(*r[:3], f"{r[3]:.5f}") for r in rows],
        arguments,
    )
    say(f"ratio: {(up + down) / scaled:.4%}")


if __name__ == "__main__":
    main()
