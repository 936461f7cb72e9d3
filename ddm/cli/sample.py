"""The command `ddm sample`: check which options go together, then draw images from a verified release."""

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Annotated

import typer

from ddm.cli.editing_options import (
    EditingFiles,
    EditingOptions,
    read_interval,
)
from ddm.cli.options import (
    HOW,
    ConditionOptions,
    FirstOption,
    ImagesOption,
    MachineOptions,
    NumOption,
    ReleaseArgument,
    SolverOptions,
    Verification,
    fetch_progress,
    grouped,
    picture_bytes,
    read_memory,
    warn_if_expired,
)
from ddm.cli.settings import SampleSettings, read_settings, set_option
from ddm.cli.strategy_options import STRATEGY_NAMES, StrategyOptions, choose_strategy, read_priors
from ddm.errors import SetupError
from ddm.system.console import progress, say

if TYPE_CHECKING:
    from ddm.sampling.strategies import Strategy

StrategyOption = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        click_type=STRATEGY_NAMES,
        help="Strategy (default: lock, which is exact; with --inpaint: sample).",
        rich_help_panel=HOW,
    ),
]
SetOption = Annotated[list[str] | None, set_option(SampleSettings)]


@dataclass(frozen=True)
class DrawingOptions:
    """How samples are drawn."""

    strategy: StrategyOption = None
    following: StrategyOptions = StrategyOptions()
    solving: SolverOptions = SolverOptions()
    settings: SetOption = None


@grouped
def sample(
    release: ReleaseArgument,
    *,
    num: NumOption,
    first: FirstOption = 0,
    out: ImagesOption,
    conditioning: ConditionOptions,
    editing_files: EditingFiles,
    drawing: DrawingOptions,
    verification: Verification,
    machine: MachineOptions,
) -> None:
    """Sample images from a release; verifies first."""
    from ddm.io.pictures import prepare_output

    # Everything that options alone can get wrong is refused before the release is read, which may take minutes.
    rare = read_settings(SampleSettings, drawing.settings)
    editing = EditingOptions(
        editing_files.init,
        editing_files.t_start,
        editing_files.inpaint,
        editing_files.mask,
        rare.corrections,
    )
    guidance_interval = read_interval(rare.guidance_interval)
    following = drawing.following
    solving = drawing.solving
    strategy = drawing.strategy
    if strategy is None:
        strategy = "lock"
        if editing.inpaint:
            strategy = "sample"
    chosen_strategy = choose_strategy(strategy, following.settings(rare))
    _check_together(chosen_strategy, rare, conditioning, editing)
    prepare_output(out)

    from ddm.cli.conditions import condition_shares, describe_shares, expert_shares
    from ddm.cli.sampling import (
        ComputeSettings,
        ReleaseSource,
        SamplingJob,
        draw,
        expert_shares_of,
        needed_experts,
    )
    from ddm.footprint import condition_bytes, sampling_bytes
    from ddm.io.pictures import write_samples
    from ddm.loading.memory import expert_memory_bytes
    from ddm.sampling.guidance import class_names, knows_shares
    from ddm.system.memory import memory_limit

    computing = ComputeSettings(machine.device, machine.arithmetic(), rare.batch)
    num_processes = min(machine.processes, num)
    opened = verification.open(release, experts_later=True)
    plan = opened.plan
    manifest = opened.manifest
    # Now with the shape: volumes and pictures go to different files.
    prepare_output(out, plan.data.shape)

    # The memory of each process: its samples, and its part of what this process holds for all of them.
    process_bytes = sampling_bytes(
        plan,
        len(manifest.experts),
        num=ceil(num / num_processes),
        batch=rare.batch,
        steps=editing.num_moves(solving.steps),
    )
    shared_bytes = picture_bytes(out, num, plan.data.shape)
    if conditioning.text:
        shared_bytes += condition_bytes(plan.condition)
    expert_bytes = expert_memory_bytes(
        plan,
        manifest,
        memory_limit(read_memory(machine.memory)).part(num_processes),
        beside=process_bytes + ceil(shared_bytes / num_processes),
    )

    # Encoding a text takes the encoder, whose memory was counted above.
    condition = conditioning.value(plan.condition)
    source = ReleaseSource(plan, manifest, opened.folder, expert_bytes, computing)
    # Several processes load experts each for itself; this one then needs the router and the shares alone. Of a release
    # on a host only those are fetched that samples follow.
    ensemble = source.ensemble(lazily=num_processes > 1 or opened.hosted is not None)
    begin = editing.read(plan.data, num)
    weights, declared_shares = read_priors(manifest, following.prior, rare.class_prior)
    class_prior = condition_shares(ensemble, condition, declared_shares)
    how = {
        "steps": solving.steps,
        "solver": solving.solver.value,
        "prior": weights,
        "condition": condition,
        "condition_prior": class_prior,
        "guidance": conditioning.guidance or 0.0,
        "guidance_interval": guidance_interval,
        "router_every": rare.router_every or 1,
    }
    job = SamplingJob(
        source, chosen_strategy, solving.seed, how, editing, begin, first_number=first
    )
    weight_K = expert_shares(ensemble, weights, class_prior)
    if opened.hosted is not None:
        with fetch_progress(release) as advance:
            opened.fetch_experts(needed_experts(job, num, weight_K), advance)
    with progress(f"sampling {num} with {strategy}") as advance:
        drawn = draw(job, num, num_processes, weight_K, advance, ensemble)

    # Names and owners are written beside the images, so that files of samples can be evaluated later.
    names = class_names(plan.condition, condition, num)
    written = write_samples(
        drawn.images,
        drawn.expert_N.tolist(),
        out,
        opened.manifest_digest,
        names,
        plan.data.range,
        first_number=first,
    )
    class_name = names[0] if names else None
    shares = describe_shares(
        ensemble, expert_shares_of(drawn, ensemble), weights, class_prior, class_name
    )
    say(f"{num} samples in {out} ({written}). Experts: {shares}")
    is_prior_of_text_unknown = declared_shares is None and not knows_shares(ensemble.router)
    if conditioning.text is not None and is_prior_of_text_unknown:
        say(
            "No release states who holds images of this text: the prior is that of all images (or --set class-prior)."
        )
    warn_if_expired(opened)


def _check_together(
    strategy: "Strategy",
    rare: SampleSettings,
    conditioning: ConditionOptions,
    editing: EditingOptions,
) -> None:
    """Refuse options that change nothing beside the others."""
    if rare.guidance_interval is not None and not conditioning.guidance:
        raise SetupError(
            "--set guidance-interval",
            expected="--guidance as well",
            got="an interval without guidance",
        )
    # Lock at t = 1 draws the experts from the prior at once.
    if rare.router_every is not None and not strategy.needs_router:
        raise SetupError(
            "--set router-every",
            expected="a strategy that asks the router",
            got=f"{rare.router_every} with --strategy lock --tau 1, which asks no router",
        )
    if editing.inpaint and rare.router_every not in (None, 1):
        raise SetupError(
            "--set router-every",
            expected="1 with --inpaint, which asks the router at every step",
            got=str(rare.router_every),
        )
    if rare.class_prior != "data" and not conditioning.has_condition:
        raise SetupError(
            "--set class-prior",
            expected="--class or --text as well",
            got=f"{rare.class_prior!r} without a condition",
        )
