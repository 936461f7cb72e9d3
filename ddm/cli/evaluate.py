"""The command `ddm evaluate`: draw samples from a verified release, or read them, and measure them."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddm.cli.options import (
    HOW,
    WHAT,
    AcceptKeyOption,
    ArchivedOption,
    DeviceOption,
    MemoryOption,
    ReleaseArgument,
    RootOption,
    SeedOption,
    SiloKeyOption,
    SolverName,
    SolverOption,
    StateOption,
    StepsOption,
    open_verified,
    read_memory,
    warn_if_expired,
)
from ddm.cli.sample import (
    FLAGS,
    Prefix,
    PrefixOption,
    PriorOption,
    StrategyName,
    TauOption,
    TopKOption,
    chosen_strategy,
    expert_weights,
)
from ddm.cli.settings import SampleSettings, read_settings, set_option
from ddm.errors import SetupError
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
    int | None, typer.Option("--num", min=8, help="How many samples; with --samples, the first.", rich_help_panel=WHAT)
]
Given = Annotated[
    Path | None,
    typer.Option("--samples", metavar="FILE", help="npz that ddm sample wrote; draws nothing.", rich_help_panel=WHAT),
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Writes a page with pictures.", rich_help_panel=WHAT)
]
AsJson = Annotated[bool, typer.Option("--json", help="For scripts.", rich_help_panel=WHAT)]
ReferenceFile = Annotated[
    Path, typer.Option("--reference", metavar="PATH", help="npz of real images.", rich_help_panel=COMPARE)
]
Holdout = Annotated[
    Path | None,
    typer.Option(
        "--holdout", metavar="PATH", help="npz of other real images, the scale for copies.", rich_help_panel=COMPARE
    ),
]
By = Annotated[
    str | None,
    typer.Option("--by", metavar="NAME", help="Array of the reference that groups it.", rich_help_panel=COMPARE),
]
FeaturesOption = Annotated[
    str,
    typer.Option(
        "--features", help="encoder, timm:NAME=FILE, clip:FOLDER, or a classifier's FILE.", rich_help_panel=COMPARE
    ),
]
Neighbours = Annotated[
    int,
    typer.Option("--neighbours", min=1, max=100, help="k of precision, recall and so on.", rich_help_panel=COMPARE),
]
Strategies = Annotated[
    list[StrategyName] | None,
    typer.Option("--strategy", help="Which expert each step follows; repeatable.", rich_help_panel=HOW),
]
Set = Annotated[list[str] | None, set_option(SampleSettings)]


def evaluate(
    release: ReleaseArgument,
    *,
    num: Num = None,
    samples: Given = None,
    as_json: AsJson = False,
    out: Out = None,
    reference: ReferenceFile,
    holdout: Holdout = None,
    by: By = None,
    features: FeaturesOption = "encoder",
    neighbours: Neighbours = 5,
    strategy: Strategies = None,
    tau: TauOption = None,
    prefix: PrefixOption = None,
    top_k: TopKOption = None,
    prior: PriorOption = "data",
    steps: StepsOption = 25,
    solver: SolverOption = SolverName.MIDPOINT,
    seed: SeedOption = 0,
    settings: Set = None,
    root: RootOption,
    state: StateOption = None,
    silo_key: SiloKeyOption = None,
    accept_key: AcceptKeyOption = None,
    archived: ArchivedOption = False,
    device: DeviceOption = "auto",
    memory: MemoryOption = None,
) -> None:
    """Measure samples against real images: FID, KID, precision, recall, shares, copies; verifies first."""
    rare = read_settings(SampleSettings, settings)
    if num is None and samples is None:
        raise SetupError("--num", expected="--num or --samples", got="neither a number of samples nor a file of them")
    if samples is not None and strategy:
        raise SetupError("--strategy", expected="either --strategy or --samples", got=f"both, with --samples {samples}")
    names = list(dict.fromkeys(each.value for each in strategy or [StrategyName.LOCK]))
    wanted = {"tau": tau, "prefix": prefix and Prefix(prefix).value, "k": top_k, "mass": rare.mass, "least": rare.least}
    given_settings = {name: value for name, value in wanted.items() if value is not None}
    if samples is not None and given_settings:
        flag = FLAGS[next(iter(given_settings))]
        raise SetupError(flag, expected=f"either {flag} or --samples", got=f"both, with --samples {samples}")
    chosen = _strategies(names, given_settings)
    memory_bytes = read_memory(memory)
    if out is not None:
        from ddm.io.pictures import prepare

        if out.suffix:
            raise SetupError("--out", expected="a folder, by a name without ending", got=out.name)
        prepare(out)

    from ddm.evaluation.features import open_features
    from ddm.evaluation.measuring import Yardstick
    from ddm.evaluation.metrics import metrics_bytes
    from ddm.evaluation.reference import open_reference
    from ddm.system.memory import memory_limit

    limit = memory_limit(memory_bytes)
    opened = open_verified(release, root, state, silo_key, accept_key, archived, experts_later=True)
    plan = opened.plan
    real = open_reference(reference, plan.data, by)
    held = open_reference(holdout, plan.data) if holdout else None
    network = open_features(features, plan, opened.folder)
    owners = [expert.silo_id for expert in opened.manifest.experts]
    weights = expert_weights("--prior", prior, owners, [expert.prior for expert in opened.manifest.experts])
    given = _given(opened, samples, num) if samples is not None else None
    count = num or 0 if given is None else len(given[0])
    beside = metrics_bytes(count, real.num + (held.num if held else 0), network.dim, min(plan.data.dim, 4096))
    limit.check(
        "memory", beside + 4 * count * plan.data.dim, "Evaluate fewer images, or raise the limit with --memory."
    )
    drawn = (
        [(samples.name, *given)]
        if samples is not None and given is not None
        else _draw(opened, chosen, num or 0, weights, beside, limit, steps, solver.value, seed, rare, device, as_json)
    )
    with _told(f"comparing {real.num} reference images", as_json) as advance:
        yardstick = Yardstick.of(real, network, holdout=held, k=neighbours, seed=seed, on_progress=advance)
    silos = [silo.silo_id for silo in opened.manifest.silos]
    due = [sum(w for w, owner in zip(weights, owners, strict=True) if owner == silo) for silo in silos]
    results = []
    for name, images, expert_N in drawn:
        with _told(f"comparing {len(images)} samples, {name}", as_json) as advance:
            silo_N = _silos_of(expert_N, owners, silos)
            found = yardstick.judge(images, silo_N=silo_N, silos=silos, prior=due, on_progress=advance)
        results.append((name, images, silo_N, found))
    origin = _origin(opened, real, held, network, seed, neighbours, None if given else (steps, solver.value), samples)
    document = _document([(name, found) for name, _, _, found in results], origin)
    if out is not None:
        _write_page(out, document, results, yardstick, silos, plan.data.range)
    say(json.dumps(document, indent=2) if as_json else _tables(results, network))
    if out is not None and not as_json:
        say(f"\nThe page: {out / 'index.html'}; the figures: {out / 'evaluation.json'}.")
    warn_if_expired(opened)


@contextmanager
def _told(label: str, as_json: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Show progress; beside JSON, which has standard output to itself, only a line on standard error."""
    if as_json:
        say(label, error=True)
        yield None
        return
    with progress(label) as advance:
        yield advance


def _strategies(names: list[str], wanted: dict[str, Any]) -> "dict[str, Strategy]":
    """Build each strategy with the settings that are its own; a setting that none of them has is refused."""
    from ddm.sampling.strategies import SETTINGS

    for setting, value in wanted.items():
        if not any(setting in SETTINGS[name] for name in names):
            chosen_strategy(names[0], {setting: value})  # refuses it
    return {name: chosen_strategy(name, {s: v for s, v in wanted.items() if s in SETTINGS[name]}) for name in names}


def _given(opened: "Release", path: Path, num: int | None) -> "tuple[Tensor, Tensor | None]":
    """Read samples that were drawn before, clipped to the range, and the expert of each where the file has it."""
    import numpy as np
    import torch

    from ddm.errors import DataError
    from ddm.io.files import require_file
    from ddm.io.npz import read_array
    from ddm.io.sources import check_row, fit
    from ddm.system.memory import available_bytes

    spec = opened.plan.data
    require_file(path, "an npz that ddm sample wrote")
    array = read_array(path, "images", max_bytes=available_bytes())[:num]
    if array.dtype.kind == "f":
        array = np.clip(array, *spec.range)
    check_row(array.dtype, array.shape[1:], spec)
    images = fit(array, range(len(array)), spec=spec)
    with np.load(path, allow_pickle=False) as archive:
        if "expert" not in archive.files:
            return images, None
    expert_N = read_array(path, "expert", max_bytes=1 << 28)[:num]
    most = len(opened.manifest.experts)
    if (
        expert_N.dtype.kind not in "iu"
        or expert_N.shape != (len(images),)
        or not ((expert_N >= 0) & (expert_N < most)).all()
    ):
        raise DataError(
            "expert", expected=f"{len(images)} numbers below {most}", got=f"{expert_N.dtype}, other numbers"
        )
    return images, torch.from_numpy(expert_N.astype(np.int64))


def _draw(
    opened: "Release",
    chosen: "dict[str, Strategy]",
    num: int,
    weights: list[float],
    beside: int,
    limit: Any,
    steps: int,
    solver: Any,
    seed: int,
    rare: SampleSettings,
    device: Any,
    as_json: bool,
) -> "list[tuple[str, Tensor, Tensor | None]]":
    """Draw samples with every strategy, from the same noise; clipped to the data's range, as pictures are."""
    from ddm.loading.ensemble import build_ensemble
    from ddm.loading.memory import room_for_experts
    from ddm.protocol.footprint import sampling_bytes
    from ddm.system.devices import device_named

    plan, manifest = opened.plan, opened.manifest
    drawing = sampling_bytes(plan, len(manifest.experts), num=num, batch=rare.batch, steps=steps)
    kept = 4 * num * prod(plan.data.shape) * len(chosen)
    room = room_for_experts(plan, manifest, limit, beside=max(drawing, beside) + kept)
    where = device_named(device, setting="--device")
    built = build_ensemble(plan, manifest, opened.folder, memory_bytes=room, device=where)
    ensemble = replace(built, chunk_size=rare.batch)
    found: list[tuple[str, Tensor, Tensor | None]] = []
    for name, strategy in chosen.items():
        with _told(f"sampling {num} with {name}", as_json) as advance:
            drawn = ensemble.sample(
                num,
                strategy=strategy,
                steps=steps,
                solver=solver,
                seed=seed,
                prior=weights,
                router_every=rare.router_every or 1,
                on_progress=advance,
            )
        found.append((name, drawn.images.clamp(*plan.data.range), drawn.expert_N))
    return found


def _silos_of(expert_N: "Tensor | None", owners: list[str], silos: list[str]) -> "Tensor | None":
    import torch

    return None if expert_N is None else torch.tensor([silos.index(owner) for owner in owners])[expert_N]


def _origin(
    opened: "Release",
    real: "Reference",
    held: "Reference | None",
    network: "Features",
    seed: int,
    neighbours: int,
    drawing: tuple[int, str] | None,
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
        "sampling": drawing and {"steps": drawing[0], "solver": drawing[1]},
        "samples": samples and {"digest": sha256_file(samples)},
        "seed": seed,
        "neighbours": neighbours,
        "confidence": LEVEL,
    }


def _document(results: "list[tuple[str, Evaluation]]", origin: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of the first strategy, those of further ones under `compared`, and their origin."""
    first, *rest = [{"strategy": name, **found.to_json()} for name, found in results]
    return {**first, "compared": rest, **origin}


def _tables(results: "list[tuple[str, Tensor, Tensor | None, Evaluation]]", network: "Features") -> str:
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
    from ddm.evaluation.page import Shown, write_page

    shown: list[Shown] = [Shown(*each) for each in results]
    write_page(out, document, shown, yardstick.reference, silos, value_range)
