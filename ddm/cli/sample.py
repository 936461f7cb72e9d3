"""The command `ddm sample`: check which options go together, then draw images from a verified release."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddm.cli.editing import Editing, InitOption, InpaintOption, MaskOption, TStartOption, interval
from ddm.cli.options import (
    HOW,
    AcceptKeyOption,
    ArchivedOption,
    ClassOption,
    CompileOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    GuidanceOption,
    ImagesOption,
    MemoryOption,
    NumOption,
    ProcessesOption,
    ReleaseArgument,
    RootOption,
    SeedOption,
    SiloKeyOption,
    SolverName,
    SolverOption,
    StateOption,
    StepsOption,
    TextEncoderOption,
    TextOption,
    open_verified,
    picture_bytes,
    read_memory,
    warn_if_expired,
)
from ddm.cli.settings import SampleSettings, read_settings, set_option
from ddm.errors import SetupError
from ddm.system.console import progress, say

if TYPE_CHECKING:
    import torch

    from ddm.ensemble import Ensemble
    from ddm.loading.release import Release
    from ddm.sampling.strategies import Strategy

# How a strategy's setting is written on the command line.
FLAGS = {"tau": "--tau", "prefix": "--prefix", "k": "--top-k", "mass": "--set mass", "least": "--set least"}


class StrategyName(StrEnum):
    """How experts are combined along a trajectory."""

    FULL = "full"
    SAMPLE = "sample"
    LOCK = "lock"
    TOP_1 = "top-1"
    TOP_K = "top-k"
    NUCLEUS = "nucleus"
    THRESHOLD = "threshold"


class Prefix(StrEnum):
    """What lock does before it locks."""

    SAMPLE = "sample"
    FULL = "full"


StrategyOption = Annotated[
    StrategyName | None,
    typer.Option("--strategy", help="Default lock, which is exact; with --inpaint sample.", rich_help_panel=HOW),
]
TauOption = Annotated[
    float | None,
    typer.Option("--tau", min=0.0, max=1.0, help="lock: t_lock; at 1, the default, no router.", rich_help_panel=HOW),
]
PrefixOption = Annotated[
    Prefix | None, typer.Option("--prefix", help="lock: what to do before t_lock.", rich_help_panel=HOW)
]
TopKOption = Annotated[
    int | None, typer.Option("--top-k", min=1, help="top-k: mix this many experts; default 2.", rich_help_panel=HOW)
]
PriorOption = Annotated[
    str, typer.Option("--prior", help="data, equal, or ID=W,...; 0 leaves a silo out.", rich_help_panel=HOW)
]
Set = Annotated[list[str] | None, set_option(SampleSettings)]


def sample(
    release: ReleaseArgument,
    *,
    num: NumOption,
    out: ImagesOption,
    label: ClassOption = None,
    text: TextOption = None,
    text_encoder: TextEncoderOption = None,
    guidance: GuidanceOption = None,
    init: InitOption = None,
    t_start: TStartOption = None,
    inpaint: InpaintOption = None,
    mask: MaskOption = None,
    strategy: StrategyOption = None,
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
    dtype: DtypeOption = Dtype.FLOAT32,
    compiled: CompileOption = False,
    processes: ProcessesOption = 1,
    memory: MemoryOption = None,
) -> None:
    """Sample images from a release; verifies first."""
    from ddm.io.pictures import prepare

    rare = read_settings(SampleSettings, settings)
    editing, within = Editing(init, t_start, inpaint, mask, rare.corrections), interval(rare.guidance_interval)
    strategy = strategy or (StrategyName.SAMPLE if inpaint else StrategyName.LOCK)
    wanted = {"tau": tau, "prefix": prefix and prefix.value, "k": top_k, "mass": rare.mass, "least": rare.least}
    chosen = chosen_strategy(strategy.value, {name: value for name, value in wanted.items() if value is not None})
    _check_together(chosen, rare, guidance, label is not None or text is not None)
    check_text(label, text, text_encoder)
    memory_bytes = read_memory(memory)
    prepare(out)

    from ddm.cli.conditions import condition_shares, describe_shares, encoded, expert_shares
    from ddm.cli.drawing import Job, Source, draw_together, shares_of
    from ddm.io.pictures import write_samples
    from ddm.loading.memory import room_for_experts
    from ddm.models.arithmetic import Arithmetic
    from ddm.protocol.footprint import condition_bytes, sampling_bytes
    from ddm.sampling.guidance import knows_shares
    from ddm.system.devices import device_named
    from ddm.system.memory import memory_limit

    where = device_named(device, setting="--device")
    arithmetic = Arithmetic(dtype.value, compiled and _compiles(where))
    arithmetic.check(where)
    processes = min(processes, num)
    opened = open_verified(release, root, state, silo_key, accept_key, archived, experts_later=True)
    plan, manifest = opened.plan, opened.manifest
    moves = editing.num_moves(steps)
    each = sampling_bytes(plan, len(manifest.experts), num=-(-num // processes), batch=rare.batch, steps=moves)
    beside = picture_bytes(out, num, plan.data.shape) + (condition_bytes(plan.condition) if text is not None else 0)
    limit = memory_limit(memory_bytes).part(processes)
    room = room_for_experts(plan, manifest, limit, beside=each + -(-beside // processes))
    condition = label if text is None or text_encoder is None else encoded(text, text_encoder, plan.condition)
    source = Source(plan, manifest, opened.folder, room, device, arithmetic, rare.batch)
    ensemble, begin = source.ensemble(lazily=processes > 1), editing.read(plan.data, num)
    weights, declared = _priors(opened, ensemble, prior, rare.class_prior)
    class_prior = condition_shares(ensemble, condition, declared)
    how = {
        "steps": steps,
        "solver": solver.value,
        "prior": weights,
        "condition": condition,
        "condition_prior": class_prior,
        "guidance": guidance or 0.0,
        "guidance_interval": within,
        "router_every": rare.router_every or 1,
    }
    job = Job(source, chosen, seed, how, editing, begin)
    with progress(f"sampling {num} with {strategy.value}") as advance:
        if processes == 1:
            drawn = job.draw(ensemble, range(num), advance)
        else:
            weight_K = expert_shares(ensemble, weights, class_prior)
            drawn = draw_together(job, num, processes, weight_K, out.parent, advance)
    written = write_samples(drawn.images, drawn.expert_N.tolist(), out, opened.manifest_digest)
    shares = describe_shares(ensemble, shares_of(drawn, ensemble), weights, class_prior, label)
    say(f"{num} samples in {out} ({written}). Experts: {shares}")
    if text is not None and declared is None and not knows_shares(ensemble.router):
        say("No release states who holds images of this text: the prior is that of all images (or --set class-prior).")
    warn_if_expired(opened)


def _compiles(where: "torch.device") -> bool:
    """Return whether torch can compile here; say so where it cannot."""
    from ddm.models.arithmetic import why_not_compiled

    why = why_not_compiled(where)
    if why is not None:
        say(f"note: --compile is left out, since torch cannot compile here: {why}", error=True)
    return why is None


def chosen_strategy(name: str, wanted: dict[str, Any]) -> "Strategy":
    """Return the strategy, and refuse settings that mean nothing to it."""
    from ddm.sampling.strategies import SETTINGS, strategy_named

    for setting, value in wanted.items():
        if setting not in SETTINGS[name]:
            owner = next(other for other, settings in SETTINGS.items() if setting in settings)
            got = f"{value} with --strategy {name}"
            raise SetupError(FLAGS[setting], expected=f"--strategy {owner}", got=got)
    if wanted.get("prefix") and wanted.get("tau", 1.0) == 1.0:
        got = "--tau 1, where lock draws its experts from the prior at once and nothing comes before"
        raise SetupError("--prefix", expected="--tau below 1", got=got)
    return strategy_named(name, **wanted)


def _check_together(chosen: "Strategy", rare: SampleSettings, guidance: float | None, conditioned: bool) -> None:
    """Refuse options that change nothing beside the others."""
    if rare.guidance_interval is not None and not guidance:
        raise SetupError("--set guidance-interval", expected="--guidance as well", got="an interval without guidance")
    if rare.router_every is not None and not chosen.needs_router:
        expected = "a strategy that asks the router"
        got = f"{rare.router_every} with --strategy lock --tau 1, which asks no router"
        raise SetupError("--set router-every", expected=expected, got=got)
    alone = {"--guidance": guidance, "--set class-prior": None if rare.class_prior == "data" else rare.class_prior}
    for flag, value in alone.items():
        if value is not None and not conditioned:
            raise SetupError(flag, expected="--class or --text as well", got=f"{value!r} without a condition")


def check_text(label: int | None, text: str | None, folder: Path | None) -> None:
    """Refuse a text without its encoder, beside a class, or blank.

    Raises:
        SetupError: the options do not go together, or the text is blank.
    """
    if text is None and folder is not None:
        raise SetupError("--text-encoder", expected="--text as well", got=f"the folder {folder.name} without a text")
    if text is None:
        return
    if label is not None:
        raise SetupError("--text", expected="either --text or --class", got=f"both, with --class {label}")
    if folder is None:
        expected = "--text-encoder as well, the folder of the encoder that the plan pins"
        raise SetupError("--text", expected=expected, got="a text without an encoder")
    if not text.strip():
        raise SetupError("--text", expected="a text", got=f"{len(text)} blank characters")


def _priors(
    opened: "Release", ensemble: "Ensemble", prior: str, class_prior: str
) -> tuple[list[float], list[float] | None]:
    """Return each expert's weight, and its share of the class or text if one was declared."""
    silo_ids, own = [expert.silo_id for expert in opened.manifest.experts], list(ensemble.prior)
    declared = None if class_prior == "data" else expert_weights("--set class-prior", class_prior, silo_ids, own)
    return expert_weights("--prior", prior, silo_ids, own), declared


def expert_weights(flag: str, text: str, silo_ids: list[str], data_prior: list[float]) -> list[float]:
    """Return a weight for each expert; a silo's goes to its experts in proportion to their data, if it has any."""
    if text == "data":
        return data_prior
    shares = dict.fromkeys(silo_ids, 0.0)
    for silo_id, prior in zip(silo_ids, data_prior, strict=True):
        shares[silo_id] += prior
    present = [silo_id for silo_id, share in shares.items() if share > 0]
    weights = dict.fromkeys(present, 1.0) if text == "equal" else _silo_weights(flag, text, present)
    total = sum(weights.values())
    return [
        weights[silo_id] / total * prior / shares[silo_id] if weights.get(silo_id) else 0.0
        for silo_id, prior in zip(silo_ids, data_prior, strict=True)
    ]


def _silo_weights(flag: str, text: str, silo_ids: list[str]) -> dict[str, float]:
    weights = dict.fromkeys(silo_ids, 0.0)
    seen: set[str] = set()
    for part in text.split(","):
        silo_id, _, number = part.strip().partition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = -1.0
        if silo_id not in weights or silo_id in seen or not 0.0 <= weight < float("inf"):
            wanted = f"data, equal, or ID=WEIGHT,... with each ID once, among {', '.join(silo_ids)}"
            raise SetupError(flag, expected=wanted, got=repr(part[:60]))
        seen.add(silo_id)
        weights[silo_id] = weight
    if sum(weights.values()) <= 0:
        raise SetupError(flag, expected="at least one weight above 0", got=repr(text[:60]))
    return weights
