"""The command `aggregator router`: train the router on what silos released, and judge it."""

from typing import TYPE_CHECKING, Annotated

import typer

from aggregator.commands.options import FederationArgument
from aggregator.config import Federation
from ddm.system.console import progress, say

if TYPE_CHECKING:
    from aggregator.intake.inventory import Inventory

SeedOption = Annotated[int, typer.Option(min=0, help="Seed of batches and initial weights.")]


def router(fed: FederationArgument, seed: SeedOption = 0) -> None:
    """Train the router on the silos' statistics, and evaluate it on public images."""
    from aggregator.intake.inventory import take_inventory

    federation = Federation(fed).require_owner()
    # Verified once more: a document or a role that has changed since intake ends the command here.
    train_and_describe(federation, take_inventory(federation), seed)
    say(f"Next: aggregator publish {fed} --out RELEASE")


def train_and_describe(federation: Federation, inventory: "Inventory", seed: int) -> None:
    """Train the router of the plan in force, and say how it was judged."""
    from aggregator.router.train import train_router
    from ddm.publishing.router_table import describe_router

    units = []
    for silo_id, stated_units in inventory.num_units.items():
        counted_units = inventory.counted_units[silo_id]
        text = f"{silo_id} {stated_units}"
        if counted_units < stated_units:
            text += f" (counted as {counted_units})"
        units.append(text)
    # Nobody can verify these numbers: they are the silos' own claims, bounded by what was agreed.
    unit = inventory.plan.statistics.unit
    say(f"Training on statistics of {', '.join(units)} {unit}s, as each silo states …")
    with progress("Training the router") as advance:
        report = train_router(
            federation,
            inventory,
            seed=seed,
            on_progress=lambda step, total, _: advance(step, total),
        )
    say(describe_router(report))
