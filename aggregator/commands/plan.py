"""The command `aggregator plan`: draft a plan, show what it costs, sign it."""

import tempfile
from collections.abc import Iterable, Iterator
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
    from aggregator.planning.cost import Cost
    from aggregator.planning.draft import Draft
    from aggregator.planning.recipe import Recipe
    from ddm.planning.bases import BaseSource
    from ddm.protocol.architecture import ClassCondition, TextCondition
    from ddm.protocol.plan import Plan


def plan(
    fed: FederationArgument,
    recipe: Annotated[
        Path, typer.Option(help="The recipe, a TOML file; examples/recipes has one for each case.")
    ],
    public: Annotated[
        Path | None,
        typer.Option(help="Public images in the form of the silos' images; not used with --carry."),
    ] = None,
    carry: Annotated[
        str | None,
        typer.Option(
            metavar="current|PLAN_ID",
            help="Carry over the accepted experts of the plan in force.",
        ),
    ] = None,
    replace: Annotated[
        list[str] | None,
        typer.Option(metavar="SILO", help="With --carry: this silo trains again; repeatable."),
    ] = None,
    from_release: Annotated[
        Path | None,
        typer.Option(
            metavar="RELEASE",
            help="Start training from an expert of this release, or from a student of it; verified first.",
        ),
    ] = None,
    expert: Annotated[
        str | None,
        typer.Option(
            metavar="EXPERT",
            help="With --from-release: the expert (default: the best one on the public images).",
        ),
    ] = None,
    student: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --from-release: a student's weights, with its record beside them.",
        ),
    ] = None,
    release_root: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --from-release: the root of an owner of islands who published it (default: this federation's).",
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Sign without asking for confirmation.")
    ] = False,
    passphrase_file: PassphraseOption = None,
) -> None:
    """Fit the public parts of a plan, show its size, time and epsilon, then sign it.

    With --carry the new plan keeps the public parts and accepted experts of the plan in force: only new silos train.
    With --from-release every silo that trains starts from one expert of an earlier release, if its silo agreed to that.
    """
    from pydantic import ValidationError

    from aggregator.planning.carrying import choose_carried
    from aggregator.planning.columns import read_columns
    from aggregator.planning.cost import estimate_cost
    from aggregator.planning.draft import draft_plan
    from aggregator.planning.recipe import Recipe
    from aggregator.planning.sign import check_signable, sign_plan
    from ddm.images.samples import open_image_set
    from ddm.io.settings import load_settings, settings_error
    from ddm.planning.networks import open_networks, open_networks_beside
    from ddm.publishing.keys import load_key

    federation = Federation(fed).require_owner()
    base_table = _base_table(from_release, expert, student, release_root)
    chosen = load_settings(Recipe, recipe, added=base_table)
    _check_source_options(public, carry, replace)
    # Fitting takes minutes, after which a plan that cannot be signed would be thrown away.
    check_signable(federation)
    source: Tensor | CarriedExperts
    columns = None
    if public is None:
        # `_check_source_options` has seen to it that --carry is there.
        source = choose_carried(federation, carry or "", replace or ())
        fitted_images = source.images.fitted
        released_base = _released_base(
            federation, chosen, [fitted_images], len(fitted_images), yes=yes
        )
        networks = open_networks_beside(chosen, source.plan, released_base)
    else:
        image_set = open_image_set(public, chosen.data, chosen.transform, subject="public images")
        released_base = _released_base(
            federation, chosen, image_set.blocks(), len(image_set), yes=yes
        )
        networks = open_networks(chosen, released_base)
        source = image_set.read()
        columns = read_columns(image_set, chosen)
        for remark in (*image_set.remarks, *image_set.range_remarks(source)):
            say(f"Public images: {remark}")
    # A wrong passphrase shows before the minutes that fitting takes.
    secret = federation_passphrase(federation, passphrase_file)
    load_key(federation, "plans", secret)
    # Nothing of a draft is in the federation's folder before the operator has said yes.
    with tempfile.TemporaryDirectory() as scratch:
        try:
            with progress("Encoding public images") as on_progress:
                draft = draft_plan(
                    federation,
                    chosen,
                    networks,
                    source,
                    Path(scratch),
                    on_progress,
                    columns=columns,
                )
        except ValidationError as error:
            # What only shows when the recipe meets the rest of the plan, e.g. a patch that does not divide the image.
            raise settings_error(recipe, error) from error
        cost = estimate_cost(draft.plan, draft.sketch, draft.images.expert_inputs)
        say(describe_draft(draft, cost))
        _refuse_contradictions(federation, draft, cost)
        if not yes:
            confirm("Sign this plan?", refused="Not signed.")
        missing = sign_plan(federation, draft, secret)
    if missing:
        say_missing(federation, missing)
    else:
        say(
            f"Signed plan {draft.plan.plan_id}, digest {draft.plan.digest}. Next: aggregator run {fed}"
        )


def _base_table(
    from_release: Path | None,
    expert: str | None,
    student: Path | None,
    release_root: Path | None,
) -> dict[str, object]:
    """Return the recipe's table [base] that these options stand for.

    Raises:
        SetupError: options of --from-release without it.
    """
    others = {"expert": expert, "student": student, "root": release_root}
    table: dict[str, object] = {name: str(value) for name, value in others.items() if value}
    if from_release is not None:
        return {"base": {"kind": "release", "release": str(from_release), **table}}
    if table:
        raise SetupError(
            "plan",
            expected="--from-release RELEASE beside --expert, --student and --release-root",
            got="one of these without it",
            remedy=(
                "For a plan that trains every silo: `aggregator plan FED --recipe FILE --public FILE`. "
                "For one that goes on with trained experts: `aggregator plan FED --recipe FILE --carry "
                "PLAN_ID`."
            ),
        )
    return {}


def _released_base(
    federation: Federation,
    recipe: "Recipe",
    public_blocks: "Iterable[Tensor]",
    num_public: int,
    *,
    yes: bool,
) -> "BaseSource | None":
    """Open the base of a recipe that names a release; where it names no expert, propose the best on public images.

    The public images come in blocks, which are read only for this comparison.
    """
    from aggregator.planning.released_base import (
        compare_experts,
        draw_compared_images,
        silos_that_left,
        student_source,
        verify_base_release,
    )
    from ddm.planning.recipe import ReleaseBaseRecipe
    from ddm.planning.released_base import expert_source

    chosen = recipe.base
    if not isinstance(chosen, ReleaseBaseRecipe):
        return None
    release = verify_base_release(federation, chosen)
    left = silos_that_left(federation, release)
    if chosen.student is not None:
        return student_source(release, Path(chosen.student), left)
    if chosen.expert is not None:
        return expert_source(release, chosen.expert, left)
    images = draw_compared_images(public_blocks, num_public)
    compared = compare_experts(release, images, recipe.data, left)
    rows = [(expert.expert_id, expert.silo_id, f"{expert.loss:.4f}") for expert in compared]
    say(table(rows, ("expert", "silo", "loss on public images")))
    best = compared[0].expert_id
    if not yes:
        confirm(f"Start training from {best}?", refused="Name another one with --expert.")
    return expert_source(release, best, left)


def _refuse_contradictions(federation: Federation, draft: "Draft", cost: "Cost") -> None:
    """Show the contradictions in a draft, and refuse it if silos, intake or every device would fail on it.

    Raises:
        SetupError: at least one finding is more than a warning.
    """
    from aggregator.planning.contradictions import DraftedPlan, find_contradictions

    max_influence = federation.settings().max_influence
    drafted = DraftedPlan(draft.plan, draft.training_cards, max_influence, cost)
    num_refusals = 0
    for finding in find_contradictions(drafted):
        word = "Warning"
        if finding.level == "fail":
            word = "Refused"
            num_refusals += 1
        say(f"\n{word}: {finding.subject}")
        say(finding.indented(2))
    # --yes skips a question, and no rule.
    if num_refusals:
        raise SetupError(
            "plan",
            expected="numbers that agree with each other, with the cards of the silos and with federation.toml",
            got=f"{num_refusals} that do not, marked Refused above",
            remedy="Do what is said there, then run the command again. Nothing was signed.",
        )


def _check_source_options(
    public: Path | None, carry: str | None, replace: list[str] | None
) -> None:
    """Refuse anything but --public alone, or --carry with or without --replace.

    Raises:
        SetupError: on these.
    """
    # A carried expert has its meaning from the public files of its own plan, so that no others can be fitted.
    has_one_source = (public is None) != (carry is None)
    if has_one_source and (carry is not None or not replace):
        return
    options = {"--public": public, "--carry": carry, "--replace": replace}
    present = [name for name, value in options.items() if value]
    raise SetupError(
        "plan",
        expected="--public FILE; or --carry current, and with it --replace SILO where a silo trains again",
        got=", ".join(present) or "no --public and no --carry",
        remedy=(
            "For a plan that trains every silo: `aggregator plan FED --recipe FILE --public FILE`. "
            "For one that goes on with trained experts: `aggregator plan FED --recipe FILE --carry "
            "current`."
        ),
    )


Row = tuple[str, str]
"""What is described, and its value."""


def describe_draft(draft: "Draft", cost: "Cost") -> str:
    """Return what the operator is shown before a plan is signed."""
    rows = [
        *_silo_rows(draft.plan),
        *_data_rows(draft.plan),
        *_expert_rows(draft, cost),
        *_statistic_rows(draft.plan, cost),
        *_weight_rows(draft.plan),
        ("licence of the releases", draft.plan.licence),
        ("valid until", draft.plan.expires_at.isoformat()),
    ]
    return f"Plan {draft.plan.plan_id}\n" + table(rows, ("what", "value"))


def _silo_rows(plan: "Plan") -> Iterator[Row]:
    """Yield who trains, whose experts are carried over, and the agreed size and share of the prior of each silo."""
    if plan.rehearsal:
        yield "REHEARSAL", "experts draw noise; see `aggregator publish --rehearsal`"
    silos = ", ".join(plan.silos)
    if plan.carried:
        yield "silos that train", silos
    else:
        yield "silos", silos
    for plan_id in sorted({carried.plan_id for carried in plan.carried}):
        names = [carried.silo_id for carried in plan.carried if carried.plan_id == plan_id]
        yield f"carried from {plan_id}", ", ".join(names)

    unit = plan.statistics.unit
    units = {silo_id: plan.agreed[silo_id].units(unit) for silo_id in plan.members}
    # What was agreed bounds what silos may state, so that these are the largest shares and not the final ones.
    total_units = sum(units.values())
    shares = [f"{silo_id} {num} ({num / total_units:.0%})" for silo_id, num in units.items()]
    yield f"agreed {unit}s", ", ".join(shares)


def _data_rows(plan: "Plan") -> Iterator[Row]:
    """Yield what becomes of every picture, one step a line, and what encoder and experts see of it."""
    title = "each picture"
    for step in plan.transform.words if plan.transform else ():
        yield title, step
        title = ""
    yield "encoder", _encoder(plan)
    if plan.condition.kind != "none":
        yield "condition", _condition(plan.condition)


def _expert_rows(draft: "Draft", cost: "Cost") -> Iterator[Row]:
    """Yield the number and size of the experts, and what it takes to train, evaluate and audit one."""
    plan = draft.plan
    training = plan.expert.training
    yield "experts a silo", _num_experts(draft, cost)
    yield "an expert", f"{plan.expert.architecture.kind}, {human_bytes(cost.expert_bytes)}"
    if plan.base is not None:
        yield "its start", plan.base.words
        for change in plan.base.changes:
            yield "", change
        learned = plan.base.objective
        if (learned.path, learned.prediction) != (plan.objective.path, plan.objective.prediction):
            yield (
                "",
                f"it learned {learned.prediction} on {learned.path}; training turns it to "
                f"{plan.objective.prediction} on {plan.objective.path}",
            )
    rate = f"rate {training.learning_rate:.2g} ({training.schedule})"
    yield (
        "its steps",
        f"{training.num_steps} of {training.batch_size} images, {rate}, {training.precision}",
    )

    yield "  parameters", f"{cost.parameters:,}"
    total_flops = cost.training_flops * training.batch_size * training.num_steps
    yield (
        "  a training step",
        f"{human_flops(cost.training_flops)} an image, {human_flops(total_flops)} in all, "
        f"{human_bytes(cost.work.memory_bytes)} of memory in batches of {training.batch_size}",
    )
    yield (
        "  an evaluation",
        f"{human_flops(cost.forward_flops)}, {human_bytes(cost.sampling_bytes)} of memory an image, in float32",
    )
    # The operator must know whether the time was measured or follows from the number of operations.
    source = "a few steps" if cost.timed else "its rate of matrix products"
    yield (
        "training",
        f"about {human_seconds(cost.train_s)} a silo (one thread of this machine, from {source})",
    )
    if plan.audit.required:
        ratio = cost.audit_s / cost.train_s
        share = f"{ratio:.0%} of the training" if ratio < 2 else "longer than the training"
        duration = human_seconds(cost.audit_s)
        yield ("leak audit", f"about {duration} a silo that holds out enough units, {share}")
    yield from _device_rows(cost)
    yield (
        "  disk of a silo",
        f"about {human_bytes(cost.work.disk_bytes)}, without its copy of the images",
    )


def _device_rows(cost: "Cost") -> Iterator[Row]:
    """Yield how long training and leak audit of a silo take on each named device."""
    for estimate in cost.on_devices:
        words = f"about {human_seconds(estimate.train_s)}"
        if estimate.audit_s:
            words += f", the audit {human_seconds(estimate.audit_s)}"
        if estimate.needs_parts:
            words += f"; its {human_bytes(estimate.device.memory_bytes)} are too small for a whole batch (accumulate)"
        yield f"  on {estimate.device.name}", f"{words}; by published rates, not measured"


def _statistic_rows(plan: "Plan", cost: "Cost") -> Iterator[Row]:
    """Yield what the statistics cost together, and each of them."""
    from ddm.statistics.of_plan import statistics_of

    statistics = plan.statistics
    total = statistics.total
    relation = statistics.relation.replace("_", "-")
    yield (
        "total, stated",
        f"epsilon {total.epsilon:g}, delta {total.delta:g} per {statistics.unit}, {relation}",
    )
    # What the statistics cost together by composition, which is less than the sum and at most the total.
    yield "total, composed", f"epsilon {cost.epsilon:.4g} at that delta"
    for kind, statistic in statistics_of(statistics).items():
        terms = statistics.terms[kind]
        words = f"epsilon {terms.epsilon:g}"
        if terms.delta > 0:
            words += f", delta {terms.delta:g}"
        words += f", {statistic.size_in_words()}"
        # Sketches leave with noise up to this t, which follows from their epsilon.
        if kind == "sketch":
            words += f", t {cost.t_release:.3f}"
        yield f"  {statistic.name}", words


def _weight_rows(plan: "Plan") -> Iterator[Row]:
    """Yield how private the experts' weights are, and what has no privacy."""
    from ddm.planning.estimates import estimate_private_step
    from ddm.privacy.accounting import noise_multiplier_for  # takes seconds

    terms = plan.expert.privacy
    if terms is None:
        yield "without privacy", "expert weights (no DP-SGD), number of units"
        return
    unit = plan.statistics.unit
    training = plan.expert.training
    # Noise and sampling of the largest silo: smaller ones need more noise for the same epsilon.
    num_units = max(agreed.units(unit) for agreed in plan.agreed.values())
    rate = terms.rate(num_units)
    noise = noise_multiplier_for(terms.epsilon, terms.delta, rate, training.num_steps)
    yield (
        "expert weights",
        f"DP-SGD: epsilon {terms.epsilon:g}, delta {terms.delta:g} per {unit}, replace-one",
    )
    yield (
        "its noise",
        f"{noise:.3g} x clip of {terms.clip:g} for {num_units} {unit}s, more for fewer",
    )
    yield (
        "its sampling",
        f"{round(rate * num_units)} of {num_units} a step, each by chance, with probability {rate:.3g}",
    )
    step = estimate_private_step(plan)
    yield (
        "a private step",
        f"about {step.samples:.4g} samples, each {step.slower:g} times as slow as in a plain step: "
        f"{step.factor:.3g} times a plain step of {training.batch_size}",
    )
    yield "all together", f"epsilon {plan.spends.epsilon:g}, delta {plan.spends.delta:g} at most"
    yield "without privacy", "number of units"


def _encoder(plan: "Plan") -> str:
    encoder = plan.encoder
    if encoder.kind == "pca":
        return f"{encoder.dim} principal components of the public images"
    if encoder.kind == "hog":
        text = f"{encoder.dim} principal components of their gradients in {encoder.cells} x {encoder.cells} cells"
        if encoder.mirrored:
            text += ", an image and its mirror image alike"
        return text
    text = f"{encoder.model}, {encoder.dim} features"
    if encoder.weights == "random":
        text += ", RANDOM WEIGHTS: clusters mean little"
    return text


def _condition(condition: "ClassCondition | TextCondition") -> str:
    if condition.kind == "class":
        return f"one of {condition.num_classes} classes, {condition.classes.words()}"
    encoder = condition.encoder.name if condition.encoder else "vectors"
    tokens = f"{condition.max_tokens} tokens of {condition.dim} values"
    return f"a text, by {encoder}: {tokens}; not in the bundle"


def _num_experts(draft: "Draft", cost: "Cost") -> str:
    match draft.plan.partition.kind:
        case "silo":
            return "1"
        case "silo_cluster":
            return f"at most {cost.num_experts}, one a coarse cluster"
        case "random":
            return f"at most {cost.num_experts}, on random shares, as a control"
