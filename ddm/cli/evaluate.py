"""The command `ddm evaluate`: draw samples from a verified release, or read them, and measure them."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddm.cli.editing import interval
from ddm.cli.evaluated_conditions import Asked, conditions_for, held_of_class
from ddm.cli.following import FLAGS, STRATEGY_NAMES, Following, chosen_strategy, priors
from ddm.cli.options import (
    HOW,
    WHAT,
    GuidanceOption,
    Machine,
    ReleaseArgument,
    Solving,
    TextOption,
    Verification,
    check_null,
    grouped,
    read_memory,
    warn_if_expired,
)
from ddm.cli.settings import DrawingSettings, read_settings, set_option
from ddm.errors import SetupError
from ddm.protocol.architecture import ClassCondition, NoCondition
from ddm.sampling.strategies import STRATEGIES
from ddm.system.console import progress, say, table

if TYPE_CHECKING:
    from torch import Tensor

    from ddm.evaluation.features import Features
    from ddm.evaluation.measuring import Evaluation, Yardstick
    from ddm.evaluation.reference import Reference
    from ddm.loading.release import Release
    from ddm.sampling.strategies import Strategy

COMPARE = "What to compare with"

Num = Annotated[
    int | None,
    typer.Option(
        "--num", min=8, help="How many samples; with --samples, the first.", rich_help_panel=WHAT
    ),
]
Given = Annotated[
    Path | None,
    typer.Option(
        "--samples",
        metavar="FILE",
        help="npz that ddm sample wrote; draws nothing.",
        rich_help_panel=WHAT,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Writes a page with pictures.", rich_help_panel=WHAT),
]
AsJson = Annotated[bool, typer.Option("--json", help="For scripts.", rich_help_panel=WHAT)]
ReferenceFile = Annotated[
    Path,
    typer.Option(
        "--reference",
        metavar="PATH",
        help="npz of real images; with a plan that transforms also pictures.",
        rich_help_panel=COMPARE,
    ),
]
Holdout = Annotated[
    Path | None,
    typer.Option(
        "--holdout",
        metavar="PATH",
        help="Other real images, the scale for copies.",
        rich_help_panel=COMPARE,
    ),
]
By = Annotated[
    str | None,
    typer.Option(
        "--by",
        metavar="NAME",
        help="Array of the reference that groups it.",
        rich_help_panel=COMPARE,
    ),
]
FeaturesOption = Annotated[
    str,
    typer.Option(
        "--features",
        help="encoder, timm:NAME=FILE, clip:FOLDER, or a classifier's FILE.",
        rich_help_panel=COMPARE,
    ),
]
Neighbours = Annotated[
    int,
    typer.Option(
        "--neighbours",
        min=1,
        max=100,
        help="k of precision, recall and so on.",
        rich_help_panel=COMPARE,
    ),
]
Strategies = Annotated[
    list[str] | None,
    typer.Option(
        "--strategy",
        click_type=STRATEGY_NAMES,
        help="Which expert each step follows; repeatable.",
        rich_help_panel=HOW,
    ),
]
ClassesOption = Annotated[
    str | None,
    typer.Option(
        "--class",
        metavar="WAY",
        help="data (as the reference), equal, none, or one class.",
        rich_help_panel=WHAT,
    ),
]
EncoderOption = Annotated[
    Path | None,
    typer.Option(
        "--text-encoder",
        metavar="FOLDER",
        help="The plan's; without --text for the reference's captions.",
        rich_help_panel=WHAT,
    ),
]
Set = Annotated[list[str] | None, set_option(DrawingSettings)]


@grouped
def evaluate(
    release: ReleaseArgument,
    *,
    num: Num = None,
    samples: Given = None,
    label: ClassesOption = None,
    text: TextOption = None,
    text_encoder: EncoderOption = None,
    guidance: GuidanceOption = None,
    as_json: AsJson = False,
    out: Out = None,
    reference: ReferenceFile,
    holdout: Holdout = None,
    by: By = None,
    features: FeaturesOption = "encoder",
    neighbours: Neighbours = 5,
    strategy: Strategies = None,
    following: Following,
    solving: Solving,
    settings: Set = None,
    verification: Verification,
    machine: Machine,
) -> None:
    """Measure samples against real images: FID, KID, precision, recall, shares, copies; verifies first."""
    rare = read_settings(DrawingSettings, settings)
    if num is None and samples is None:
        raise SetupError(
            "--num",
            expected="--num or --samples",
            got="neither a number of samples nor a file of them",
        )
    asked, within = Asked(label, text, text_encoder), interval(rare.guidance_interval)
    names = list(dict.fromkeys(strategy or ["lock"]))
    wanted = following.settings(rare)
    if samples is not None:
        _check_nothing_is_drawn(
            samples, {"--strategy": strategy, **{FLAGS[name]: name for name in wanted}}
        )
        _check_nothing_is_drawn(samples, {str(asked.flag): asked.flag, "--guidance": guidance})
    chosen = _strategies(names, wanted)
    if out is not None:
        from ddm.io.pictures import prepare_output

        if out.suffix:
            raise SetupError("--out", expected="a folder, by a name without ending", got=out.name)
        prepare_output(out)

    from ddm.cli.drawing import Computing
    from ddm.cli.evaluated_samples import Drawing, given_samples
    from ddm.evaluation.features import open_features
    from ddm.evaluation.measuring import Yardstick
    from ddm.evaluation.metrics import metrics_bytes
    from ddm.evaluation.reference import open_reference
    from ddm.footprint import condition_bytes, labels_bytes
    from ddm.system.memory import memory_limit

    computing = Computing(machine.device, machine.arithmetic(), rare.batch)
    limit = memory_limit(read_memory(machine.memory))
    opened = verification.open(release, experts_later=True)
    plan, manifest = opened.plan, opened.manifest
    if plan.transform:
        say("reading the images to compare with", error=True)
    real = open_reference(reference, plan.data, by, plan.transform)
    held = open_reference(holdout, plan.data, None, plan.transform) if holdout else None
    network = open_features(features, plan, opened.folder)
    weights, declared = priors(manifest, following.prior, rare.class_prior)
    given = None if samples is None else given_samples(opened, samples, num)
    count = num or 0 if given is None else len(given.images)
    beside = real.num_bytes + (held.num_bytes if held else 0)
    beside += metrics_bytes(
        count, real.num + (held.num if held else 0), network.dim, min(plan.data.dim, 4096)
    )
    if given is None:
        beside += 2 * labels_bytes(plan.condition, count) + (
            condition_bytes(plan.condition) if text_encoder else 0
        )
    limit.check(
        "memory",
        beside + 4 * count * plan.data.dim,
        "Evaluate fewer images, or raise the limit with --memory.",
    )
    if given is not None:
        drawn, due_E, words = [given], weights, None
    else:
        counted = (
            declared is not None or plan.statistics.class_counts is not None or len(weights) == 1
        )
        under = conditions_for(asked, plan.condition, real, count, solving.seed, counted=counted)
        _check_told(under.value is not None, rare, guidance)
        if guidance:
            check_null(plan.condition, "--guidance", "Leave --guidance out.")
        words = under.words
        if (
            under.kept is not None
            and isinstance(under.value, int)
            and isinstance(plan.condition, ClassCondition)
        ):
            real = real.select(under.kept)
            held = held and held_of_class(under.value, plan.condition, held)
        how = {
            "steps": solving.steps,
            "solver": solving.solver.value,
            "prior": weights,
            "condition": under.value,
            "guidance": guidance or 0.0,
            "guidance_interval": within,
            "router_every": rare.router_every or 1,
        }
        drawing = Drawing(
            opened, computing, min(machine.processes, count), solving.seed, how, declared
        )
        drawn, due_E = drawing.draw(chosen, count, beside, limit, partial(_told, as_json=as_json))
    with _told(f"comparing {real.num} reference images", as_json) as advance:
        yardstick = Yardstick.of(
            real, network, holdout=held, k=neighbours, seed=solving.seed, on_progress=advance
        )
    owners, silos = (
        [expert.silo_id for expert in manifest.experts],
        [silo.silo_id for silo in manifest.silos],
    )
    due = [
        sum(w for w, owner in zip(due_E, owners, strict=True) if owner == silo) for silo in silos
    ]
    results = []
    for each in drawn:
        with _told(f"comparing {count} samples, {each.name}", as_json) as advance:
            silo_N = each.silo_N(owners, silos)
            found = yardstick.judge(
                each.images, silo_N=silo_N, silos=silos, prior=due, on_progress=advance
            )
            found = replace(found, notes=(*each.notes, *found.notes))
        results.append((each.name, each.images, silo_N, found))
    sampling = None if words is None else _sampling(solving, words, guidance)
    origin = _origin(opened, real, held, network, solving.seed, neighbours, sampling, samples)
    document = _document([(name, found) for name, _, _, found in results], origin)
    if out is not None:
        _write_page(out, document, results, yardstick, silos, plan.data.range)
    say(json.dumps(document, indent=2) if as_json else _tables(results, network))
    if sampling and not as_json and not isinstance(plan.condition, NoCondition):
        say(f"\nThe samples were drawn {words}, with guidance {guidance or 0:g}.")
    if out is not None and not as_json:
        say(f"\nThe page: {out / 'index.html'}; the figures: {out / 'evaluation.json'}.")
    warn_if_expired(opened)


def _check_nothing_is_drawn(samples: Path, given: dict[str, Any]) -> None:
    """Refuse options that say how samples are drawn."""
    for flag, value in given.items():
        if value is not None and value != []:
            raise SetupError(
                flag, expected=f"either {flag} or --samples", got=f"both, with --samples {samples}"
            )


def _check_told(told: bool, rare: DrawingSettings, guidance: float | None) -> None:
    """Refuse what changes nothing where samples are told nothing."""
    options = {
        "--guidance": guidance,
        "--set class-prior": None if rare.class_prior == "data" else rare.class_prior,
    }
    for flag, value in options.items():
        if value is not None and not told:
            got = f"{value!r} with samples that are told nothing"
            raise SetupError(flag, expected="samples with a class or a text", got=got)
    if rare.guidance_interval is not None and not guidance:
        raise SetupError(
            "--set guidance-interval",
            expected="--guidance as well",
            got="an interval without guidance",
        )


def _sampling(solving: Solving, words: str, guidance: float | None) -> dict[str, Any]:
    named = {"steps": solving.steps, "solver": solving.solver.value}
    return {**named, "conditions": words, "guidance": guidance or 0.0}


@contextmanager
def _told(label: str, as_json: bool) -> Iterator[Callable[[int, int], None]]:
    """Show progress; beside JSON, which has standard output to itself, only a line on standard error."""
    if as_json:
        say(label, error=True)
        yield lambda done, total: None
        return
    with progress(label) as advance:
        yield advance


def _strategies(names: list[str], wanted: dict[str, Any]) -> "dict[str, Strategy]":
    """Build each strategy with the settings that are its own; a setting that none of them has is refused."""
    for setting, value in wanted.items():
        if not any(setting in STRATEGIES[name].settings for name in names):
            chosen_strategy(names[0], {setting: value})  # refuses it
    return {
        name: chosen_strategy(
            name, {s: v for s, v in wanted.items() if s in STRATEGIES[name].settings}
        )
        for name in names
    }


def _origin(
    opened: "Release",
    real: "Reference",
    held: "Reference | None",
    network: "Features",
    seed: int,
    neighbours: int,
    sampling: dict[str, Any] | None,
    samples: Path | None,
) -> dict[str, Any]:
    """Return what the figures follow from: run with the same, they are the same."""
    from ddm.evaluation.intervals import LEVEL
    from ddm.protocol.base import sha256_file

    manifest = opened.manifest
    return {
        "release": {
            "plan_id": manifest.plan_id,
            "version": manifest.version,
            "manifest": opened.verified.files["manifest.json"].digest,
        },
        "features": {"name": network.name, "dim": network.dim, "digest": network.digest},
        "reference": {"num": real.num, "digest": real.digest, "groups": real.group_name},
        "holdout": held and {"num": held.num, "digest": held.digest},
        "sampling": sampling,
        "samples": samples and {"digest": sha256_file(samples)},
        "seed": seed,
        "neighbours": neighbours,
        "confidence": LEVEL,
    }


def _document(results: "list[tuple[str, Evaluation]]", origin: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of the first strategy, those of further ones under `compared`, and their origin."""
    first, *rest = [{"strategy": name, **found.to_json()} for name, found in results]
    return {**first, "compared": rest, **origin}


def _tables(
    results: "list[tuple[str, Tensor, Tensor | None, Evaluation]]", network: "Features"
) -> str:
    """Lay the figures out for a terminal."""
    from ddm.evaluation.tables import tables

    return tables([(name, found) for name, _, _, found in results], network, table)


def _write_page(
    out: Path,
    document: dict[str, Any],
    results: "list[tuple[str, Tensor, Tensor | None, Evaluation]]",
    yardstick: "Yardstick",
    silos: list[str],
    value_range: tuple[float, float],
) -> None:
    from ddm.evaluation.page import EvaluatedSamples, write_page

    shown = [EvaluatedSamples(*each) for each in results]
    write_page(out, document, shown, yardstick.reference, silos, value_range)
