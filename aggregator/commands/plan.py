"""The command `aggregator plan`: draft a plan, show what it costs, sign it."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aggregator.commands.keys import confirm, say_missing
from aggregator.commands.options import FederationArgument, PassphraseOption, federation_passphrase
from aggregator.config import Federation
from ddm.system.console import human_bytes, human_seconds, progress, say, table

if TYPE_CHECKING:
    from aggregator.planning.draft import Draft
    from ddm.protocol.plan import Plan


def plan(
    fed: FederationArgument,
    recipe: Annotated[Path, typer.Option(help="TOML; examples/digits_three_silos/plan.toml is one.")],
    public: Annotated[Path, typer.Option(help="npz of public images.")],
    yes: Annotated[bool, typer.Option("--yes", help="Sign without asking.")] = False,
    passphrase_file: PassphraseOption = None,
) -> None:
    """Fit the public parts of a plan, show size, time and epsilon, then sign it."""
    from pydantic import ValidationError

    from aggregator.planning.draft import draft_plan
    from aggregator.planning.recipe import Recipe
    from aggregator.planning.sign import sign_plan
    from ddm.io.npz import read_images
    from ddm.io.settings import load_settings, misfit
    from ddm.publishing.keys import load_key

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


def costs(draft: "Draft") -> str:
    """Return what the operator is shown before a plan is signed."""
    made, cost = draft.plan, draft.cost
    training, statistics = made.expert.training, made.statistics
    per_unit = f"per {statistics.unit}, {statistics.relation.replace('_', '-')}"
    rows = [
        ("silos", ", ".join(made.silos)),
        (f"agreed {statistics.unit}s", _agreed(made)),
        ("encoder", _encoder(made)),
        *_condition(made),
        ("experts a silo", _experts(draft)),
        ("an expert", f"{made.expert.architecture.kind}, {human_bytes(cost.expert_bytes)}, {training.num_steps} steps"),
        ("training", f"about {human_seconds(cost.train_s)} a silo (one thread of this machine, from a few steps)"),
        ("total, stated", f"epsilon {statistics.total.epsilon:g}, delta {statistics.total.delta:g} {per_unit}"),
        ("total, composed", f"epsilon {cost.epsilon:.4g} at that delta"),
        *_statistics(draft),
        ("without privacy", "expert weights (no DP-SGD), number of units, losses"),
        ("valid until", made.expires_at.isoformat()),
    ]
    return f"Plan {made.plan_id}\n" + table(rows, ("what", "value"))


def _agreed(plan: "Plan") -> str:
    """Return the most units of each silo, and its share of the prior if all bring as many."""
    units = {silo_id: plan.agreed[silo_id].units(plan.statistics.unit) for silo_id in plan.silos}
    return ", ".join(f"{silo_id} {num} ({num / sum(units.values()):.0%})" for silo_id, num in units.items())


def _encoder(plan: "Plan") -> str:
    encoder = plan.encoder
    if encoder.kind == "pca":
        return f"{encoder.dim} principal components of the public images"
    warning = ", RANDOM WEIGHTS: clusters mean little" if encoder.weights == "random" else ""
    return f"{encoder.model}, {encoder.dim} features{warning}"


def _condition(plan: "Plan") -> list[tuple[str, str]]:
    condition = plan.condition
    if condition.kind == "none":
        return []
    if condition.kind == "class":
        return [("condition", f"one of {condition.num_classes} classes")]
    name = condition.encoder.name if condition.encoder else "vectors"
    tokens = f"{condition.max_tokens} tokens of {condition.dim} values"
    return [("condition", f"a text, by {name}: {tokens}; not in the bundle")]


def _experts(draft: "Draft") -> str:
    kind = draft.plan.partition.kind
    if kind == "silo":
        return "1"
    one_each = "one a coarse cluster" if kind == "silo_cluster" else "on random shares, as a control"
    return f"at most {draft.cost.num_experts}, {one_each}"


def _statistics(draft: "Draft") -> list[tuple[str, str]]:
    wanted = draft.plan.statistics
    rows = [("  counts", f"epsilon {wanted.counts.epsilon:g}, {wanted.counts.num_groups} public groups")]
    if part := wanted.class_counts:
        rows.append(("  class counts", f"epsilon {part.epsilon:g}, {part.num_classes} classes"))
    if moments := wanted.moments:
        cost = f"epsilon {moments.epsilon:g}, delta {moments.delta:g}"
        rows.append(("  moments", f"{cost}, rank {moments.rank}"))
    if sketch := wanted.sketch:
        cost = f"epsilon {sketch.epsilon:g}, delta {sketch.delta:g}"
        rows.append(("  sketches", f"{cost}, rank {sketch.rank}, t {draft.cost.t_release:.3f}"))
    return rows
