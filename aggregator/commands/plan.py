"""The command `aggregator plan`: draft a plan, show what it costs, sign it."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aggregator.commands.keys import say_missing
from aggregator.commands.options import FederationArgument, PassphraseOption, federation_passphrase
from aggregator.config import Federation
from ddm.errors import SetupError
from ddm.system.console import (
    confirm,
    human_bytes,
    human_flops,
    human_seconds,
    progress,
    say,
    table,
)

if TYPE_CHECKING:
    from torch import Tensor

    from aggregator.planning.carrying import CarriedExperts
    from aggregator.planning.draft import Draft
    from ddm.protocol.plan import Plan


def plan(
    fed: FederationArgument,
    recipe: Annotated[Path, typer.Option(help="TOML; examples/recipes has one for each case.")],
    public: Annotated[
        Path | None,
        typer.Option(
            help="Public images, as silos bring theirs: arrays, or pictures with a transform; not needed with --carry."
        ),
    ] = None,
    carry: Annotated[
        str | None,
        typer.Option(
            metavar="PLAN_ID", help="Carry over the accepted experts of the plan in force."
        ),
    ] = None,
    replace: Annotated[
        list[str] | None,
        typer.Option(metavar="SILO", help="With --carry: this silo trains again; may be repeated."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Sign without asking.")] = False,
    passphrase_file: PassphraseOption = None,
) -> None:
    """Fit the public parts of a plan, show size, time and epsilon, then sign it.

    With --carry the public parts of the plan in force go on, and so do its accepted experts: only new silos train.
    """
    from pydantic import ValidationError

    from aggregator.planning.carrying import choose_carried
    from aggregator.planning.columns import read_columns
    from aggregator.planning.draft import draft_plan
    from aggregator.planning.recipe import Recipe
    from aggregator.planning.sign import check_signable, sign_plan
    from ddm.images.samples import open_image_set
    from ddm.io.settings import load_settings, settings_error
    from ddm.publishing.keys import load_key

    federation = Federation(fed).require()
    chosen = load_settings(Recipe, recipe)
    given = {"--public": public, "--carry": carry, "--replace": replace}
    if (public is None) != (carry is not None) or (replace and carry is None):
        expected = "--public FILE; or --carry PLAN_ID, and with it --replace SILO where a silo trains again"
        got = (
            ", ".join(name for name, each in given.items() if each) or "no --public and no --carry"
        )
        raise SetupError("plan", expected=expected, got=got, remedy="See `aggregator plan --help`.")
    check_signable(federation)
    source: Tensor | CarriedExperts
    columns = None
    if public is None:
        source = choose_carried(federation, carry or "", replace or ())
    else:
        opened = open_image_set(public, chosen.data, chosen.transform, subject="public images")
        source = opened.read()
        columns = read_columns(opened, chosen)
        for remark in (*opened.remarks, *opened.range_remarks(source)):
            say(f"Public images: {remark}")
    secret = federation_passphrase(federation, passphrase_file)
    load_key(federation, "plans", secret)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            with progress("Encoding public images") as on_progress:
                draft = draft_plan(
                    federation, chosen, source, Path(scratch), on_progress, columns=columns
                )
        except ValidationError as error:
            # What only shows when the recipe meets the rest of the plan, e.g. a patch that does not divide the image.
            raise settings_error(recipe, error) from error
        say(costs(draft))
        if not yes:
            confirm("Sign this plan?", refused="Not signed.")
        missing = sign_plan(federation, draft, secret)
    if missing:
        say_missing(federation, missing)
    else:
        say(
            f"Signed plan {draft.plan.plan_id}, digest {draft.plan.digest}. Next: aggregator run {fed}"
        )


def costs(draft: "Draft") -> str:
    """Return what the operator is shown before a plan is signed."""
    made, cost = draft.plan, draft.cost
    training, statistics = made.expert.training, made.statistics
    per_unit = f"per {statistics.unit}, {statistics.relation.replace('_', '-')}"
    rate = f"rate {training.learning_rate:.2g} ({training.schedule})"
    measured = f"one thread of this machine, from {'a few steps' if cost.timed else 'its rate of matrix products'}"
    rows = [
        *([("REHEARSAL", "experts draw noise: publish nothing of it")] if made.rehearsal else []),
        ("silos that train" if made.carried else "silos", ", ".join(made.silos)),
        *((f"carried from {plan_id}", names) for plan_id, names in _carried(made).items()),
        (f"agreed {statistics.unit}s", _agreed(made)),
        *(_transform(made)),
        ("encoder", _encoder(made)),
        *_condition(made),
        ("experts a silo", _experts(draft)),
        ("an expert", f"{made.expert.architecture.kind}, {human_bytes(cost.expert_bytes)}"),
        (
            "its steps",
            f"{training.num_steps} of {training.batch_size} images, {rate}, {training.precision}",
        ),
        *_network(draft),
        ("training", f"about {human_seconds(cost.train_s)} a silo ({measured})"),
        (
            "total, stated",
            f"epsilon {statistics.total.epsilon:g}, delta {statistics.total.delta:g} {per_unit}",
        ),
        ("total, composed", f"epsilon {cost.epsilon:.4g} at that delta"),
        *_statistics(draft),
        *_weights(made),
        ("valid until", made.expires_at.isoformat()),
    ]
    return f"Plan {made.plan_id}\n" + table(rows, ("what", "value"))


def _weights(made: "Plan") -> list[tuple[str, str]]:
    """Return how private the experts' weights are, and what has no privacy."""
    from aggregator.planning.cost import estimate_private_step
    from ddm.privacy.accounting import noise_multiplier_for  # takes seconds

    private = made.expert.privacy
    if private is None:
        return [("without privacy", "expert weights (no DP-SGD), number of units")]
    terms = f"epsilon {private.epsilon:g}, delta {private.delta:g} per {made.statistics.unit}, replace-one"
    most = max(agreed.units(made.statistics.unit) or 1 for agreed in made.agreed.values())
    rate, steps = private.rate(most), made.expert.training.num_steps
    noise = noise_multiplier_for(private.epsilon, private.delta, rate, steps)
    step = estimate_private_step(made)
    return [
        ("expert weights", f"DP-SGD: {terms}"),
        (
            "its noise",
            f"{noise:.3g} x clip of {private.clip:g} for {most} {made.statistics.unit}s, more for fewer",
        ),
        (
            "its sampling",
            f"{round(rate * most)} of {most} a step, each by chance, with probability {rate:.3g}",
        ),
        (
            "a private step",
            f"about {step.samples:.4g} samples, each {step.slower:g} times as slow as in a plain step: "
            f"{step.factor:.3g} times a plain step of {made.expert.training.batch_size}",
        ),
        ("all together", f"epsilon {made.spends.epsilon:g}, delta {made.spends.delta:g} at most"),
        ("without privacy", "number of units"),
    ]


def _network(draft: "Draft") -> list[tuple[str, str]]:
    """Return the size of an expert's network, and what it takes to train and to evaluate."""
    cost, training = draft.cost, draft.plan.expert.training
    whole = cost.training_flops * training.batch_size * training.num_steps
    step = f"{human_flops(cost.training_flops)} an image, {human_flops(whole)} in all"
    evaluated = f"{human_flops(cost.forward_flops)}, {human_bytes(cost.sampling_bytes)} of memory an image, in float32"
    return [
        ("  parameters", f"{cost.parameters:,}"),
        (
            "  a training step",
            f"{step}, {human_bytes(cost.training_bytes)} of memory in batches of {training.batch_size}",
        ),
        ("  an evaluation", evaluated),
    ]


def _agreed(plan: "Plan") -> str:
    """Return the most units of each silo, and its share of the prior if all bring as many."""
    units = {silo_id: plan.agreed[silo_id].units(plan.statistics.unit) for silo_id in plan.members}
    return ", ".join(
        f"{silo_id} {num} ({num / sum(units.values()):.0%})" for silo_id, num in units.items()
    )


def _carried(plan: "Plan") -> dict[str, str]:
    """Return the silos whose experts go on, by the plan for which they trained."""
    found: dict[str, list[str]] = {}
    for each in plan.carried:
        found.setdefault(each.plan_id, []).append(each.silo_id)
    return {plan_id: ", ".join(names) for plan_id, names in found.items()}


def _transform(plan: "Plan") -> list[tuple[str, str]]:
    """Return what becomes of every picture, one step a line."""
    steps = plan.transform.words if plan.transform else ()
    return [("each picture" if number == 0 else "", step) for number, step in enumerate(steps)]


def _encoder(plan: "Plan") -> str:
    encoder = plan.encoder
    if encoder.kind == "pca":
        return f"{encoder.dim} principal components of the public images"
    if encoder.kind == "hog":
        both = ", an image and its mirror image alike" if encoder.mirrored else ""
        return f"{encoder.dim} principal components of their gradients in {encoder.cells} x {encoder.cells} cells{both}"
    warning = ", RANDOM WEIGHTS: clusters mean little" if encoder.weights == "random" else ""
    return f"{encoder.model}, {encoder.dim} features{warning}"


def _condition(plan: "Plan") -> list[tuple[str, str]]:
    condition = plan.condition
    if condition.kind == "none":
        return []
    if condition.kind == "class":
        return [
            ("condition", f"one of {condition.num_classes} classes, {condition.classes.words()}")
        ]
    name = condition.encoder.name if condition.encoder else "vectors"
    tokens = f"{condition.max_tokens} tokens of {condition.dim} values"
    return [("condition", f"a text, by {name}: {tokens}; not in the bundle")]


def _experts(draft: "Draft") -> str:
    kind = draft.plan.partition.kind
    if kind == "silo":
        return "1"
    one_each = (
        "one a coarse cluster" if kind == "silo_cluster" else "on random shares, as a control"
    )
    return f"at most {draft.cost.num_experts}, {one_each}"


def _statistics(draft: "Draft") -> list[tuple[str, str]]:
    from ddm.statistics.of_plan import statistics_of

    rows = []
    for kind, statistic in statistics_of(draft.plan.statistics).items():
        terms = draft.plan.statistics.terms[kind]
        cost = f"epsilon {terms.epsilon:g}"
        if terms.delta > 0:
            cost += f", delta {terms.delta:g}"
        cost += f", {statistic.size_in_words()}"
        if kind == "sketch":
            cost += f", t {draft.cost.t_release:.3f}"
        rows.append((f"  {statistic.name}", cost))
    return rows
