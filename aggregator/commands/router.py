"""The command `aggregator router`: train the router on what silos released, and judge it."""

from typing import Annotated

import typer

from aggregator.commands.options import FederationArgument
from aggregator.config import Federation
from ddm.system.console import progress, say


def router(
    fed: FederationArgument,
    seed: Annotated[int, typer.Option(min=0, help="Of batches and initial weights.")] = 0,
) -> None:
    """Train the router on the silos' statistics, and judge it on public images."""
    from aggregator.intake.inventory import take_inventory
    from aggregator.router.train import train_router
    from ddm.publishing.router_table import describe_router

    federation = Federation(fed).require()
    inventory = take_inventory(federation)
    counted = inventory.counted_units
    units = ", ".join(
        f"{silo_id} {number}"
        + (f" (counted as {counted[silo_id]})" if counted[silo_id] < number else "")
        for silo_id, number in inventory.num_units.items()
    )
    say(
        f"Training on statistics of {units} {inventory.plan.statistics.unit}s, as each silo states …"
    )
    with progress("Training the router") as advance:
        report = train_router(
            federation,
            inventory,
            seed=seed,
            on_progress=lambda step, total, _: advance(step, total),
        )
    say(describe_router(report))
    say(f"Next: aggregator publish {fed} --out RELEASE")
