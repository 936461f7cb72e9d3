"""The aggregator operator's commands."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aggregator.commands.doctor import doctor
from aggregator.commands.keys import complete, confirm, holder, rotate, say_missing, sign
from aggregator.commands.membership import init, remove
from aggregator.commands.options import FederationArgument, PassphraseOption, federation_passphrase
from aggregator.commands.publish import publish, withdraw
from aggregator.commands.quarantine import admit, quarantine, refuse
from aggregator.commands.status import status
from aggregator.config import Federation
from ddm.system.console import human_bytes, human_seconds, new_app, progress, run_app, say, table

if TYPE_CHECKING:
    from aggregator.planning.plan import Draft
    from ddm.protocol.plan import Plan

app = new_app("Plan a federation of silos, take in their experts, train the router, publish a signed ensemble.")


app.command("init")(init)
app.command("holder")(holder)
app.command("sign")(sign)
app.command("complete")(complete)
app.command("rotate")(rotate)
app.command("remove")(remove)
app.command("status")(status)
app.command("doctor")(doctor)


@app.command()
def enroll(
    fed: FederationArgument,
    card: Annotated[Path, typer.Argument(metavar="CARD", help="The card that `silo enroll` wrote.")],
) -> None:
    """Enroll a silo; compare the fingerprint with the silo by another way."""
    from aggregator.membership.registry import enroll as keep_card
    from aggregator.membership.registry import signing_key

    enrolled = keep_card(Federation(fed).require(), card)
    say(f"Enrolled {enrolled.silo_id}. Compare with the silo: {signing_key(enrolled).fingerprint}")


@app.command()
def plan(
    fed: FederationArgument,
    recipe: Annotated[Path, typer.Option(help="TOML; see examples/digits_three_silos/plan.toml.")],
    public: Annotated[Path, typer.Option(help="npz of public images.")],
    yes: Annotated[bool, typer.Option("--yes", help="Sign without asking.")] = False,
    passphrase_file: PassphraseOption = None,
) -> None:
    """Fit what is public, show size, time and epsilon, then sign the plan."""
    from pydantic import ValidationError

    from aggregator.keys.store import load_key
    from aggregator.planning.plan import draft_plan, sign_plan
    from aggregator.planning.recipe import Recipe
    from ddm.io.npz import read_images
    from ddm.io.settings import load_settings, misfit

    federation = Federation(fed).require()
    chosen = load_settings(Recipe, recipe)
    images = read_images(public, chosen.data)
    secret = federation_passphrase(federation, passphrase_file)
    load_key(federation, "plans", secret)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            with progress("Encoding public images") as on_progress:
                draft = draft_plan(federation, chosen, images, Path(scratch), on_progress)
        except ValidationError as error:
            # What only shows when the recipe meets the rest of the plan, e.g. a patch that does not divide the image.
            raise misfit(recipe, error) from error
        say(costs(draft))
        if not yes:
            confirm("Sign this plan?")
        missing = sign_plan(federation, draft, secret)
    if missing:
        say_missing(federation, missing)
    else:
        say(f"Signed plan {draft.plan.plan_id}, digest {draft.plan.digest}. Next: aggregator run {fed}")


@app.command()
def run(fed: FederationArgument, passphrase_file: PassphraseOption = None) -> None:
    """Deliver the plan, take in submissions, send receipts; ends when every silo has one."""
    from aggregator.keys.store import load_key

    federation = Federation(fed).require()
    federation.current_plan()
    secret = federation_passphrase(federation, passphrase_file)
    load_key(federation, "receipts", secret)

    from aggregator.runtime.running import run_federation

    run_federation(federation, secret)


@app.command()
def router(
    fed: FederationArgument,
    seed: Annotated[int, typer.Option(min=0, help="Of batches and initial weights.")] = 0,
) -> None:
    """Train the router on the noised sketches and judge it on public data."""
    from aggregator.intake.inventory import take_inventory
    from aggregator.router.report import describe
    from aggregator.router.train import train_router

    federation = Federation(fed).require()
    inventory = take_inventory(federation)
    units = ", ".join(f"{silo_id} {number}" for silo_id, number in inventory.num_units.items())
    say(f"Training on statistics of {units} {inventory.plan.statistics.unit}s, as each silo states …")
    with progress("Training the router") as advance:
        report = train_router(federation, inventory, seed=seed, on_progress=lambda step, total, _: advance(step, total))
    say(describe(report))
    say(f"Next: aggregator publish {fed} --out RELEASE")


app.command("quarantine")(quarantine)
app.command("admit")(admit)
app.command("refuse")(refuse)
app.command("publish")(publish)
app.command("withdraw")(withdraw)


def costs(draft: "Draft") -> str:
    """Return what the operator is shown before a plan is signed."""
    made = draft.plan
    training, statistics = made.expert.training, made.statistics
    per_unit = f"per {statistics.unit}, {statistics.relation.replace('_', '-')}"
    rows = [
        ("silos", ", ".join(made.silos)),
        ("encoder", _encoder(made)),
        *_told(made),
        ("experts a silo", _experts(draft)),
        (
            "an expert",
            f"{made.expert.architecture.kind}, {human_bytes(draft.expert_bytes)}, {training.num_steps} steps",
        ),
        ("training", f"about {human_seconds(draft.train_s)} a silo (one thread of this machine, from a few steps)"),
        ("total, stated", f"epsilon {statistics.total.epsilon:g}, delta {statistics.total.delta:g} {per_unit}"),
        ("total, composed", f"epsilon {draft.epsilon:.4g} at that delta"),
        *_releases(draft),
        ("without privacy", "expert weights (no DP-SGD), number of units, losses"),
        ("valid until", made.expires_at.isoformat()),
    ]
    return f"Plan {made.plan_id}\n" + table(rows, ("what", "value"))


def _encoder(plan: "Plan") -> str:
    encoder = plan.encoder
    if encoder.kind == "pca":
        return f"{encoder.dim} principal components of the public images"
    warning = ", RANDOM WEIGHTS: clusters mean little" if encoder.weights == "random" else ""
    return f"{encoder.model}, {encoder.dim} features{warning}"


def _told(plan: "Plan") -> list[tuple[str, str]]:
    condition = plan.condition
    if condition.kind == "none":
        return []
    if condition.kind == "class":
        return [("told", f"one of {condition.num_classes} classes")]
    name = condition.encoder.name if condition.encoder else "vectors"
    return [("told", f"a text, by {name}: {condition.max_tokens} tokens of {condition.dim} values; not in the bundle")]


def _experts(draft: "Draft") -> str:
    kind = draft.plan.partition.kind
    if kind == "silo":
        return "1"
    one_each = "one a coarse cluster" if kind == "silo_cluster" else "on random shares, as a control"
    return f"at most {draft.num_experts}, {one_each}"


def _releases(draft: "Draft") -> list[tuple[str, str]]:
    asked = draft.plan.statistics
    rows = [("  counts", f"epsilon {asked.counts.epsilon:g}, {asked.counts.num_groups} public groups")]
    if asked.class_counts:
        rows.append(
            ("  class counts", f"epsilon {asked.class_counts.epsilon:g}, {asked.class_counts.num_classes} classes")
        )
    if asked.moments:
        rows.append(
            (
                "  moments",
                f"epsilon {asked.moments.epsilon:g}, delta {asked.moments.delta:g}, rank {asked.moments.rank}",
            )
        )
    if asked.sketch:
        sketch = f"epsilon {asked.sketch.epsilon:g}, delta {asked.sketch.delta:g}, rank {asked.sketch.rank}"
        rows.append(("  sketches", f"{sketch}, t {draft.t_release:.3f}"))
    return rows


def main() -> None:
    """Entry point of the `aggregator` command."""
    run_app(app)


if __name__ == "__main__":
    main()
