"""The command `ddm sample`: check which options go together, then draw images from a verified release."""

from typing import TYPE_CHECKING, Annotated

import typer

from ddm.cli.editing import Editing, InitOption, InpaintOption, MaskOption, TStartOption, interval
from ddm.cli.following import STRATEGY_NAMES, Following, chosen_strategy, priors
from ddm.cli.options import (
    HOW,
    ImagesOption,
    Machine,
    NumOption,
    ReleaseArgument,
    Solving,
    Told,
    Verification,
    grouped,
    picture_bytes,
    read_memory,
    warn_if_expired,
)
from ddm.cli.settings import SampleSettings, read_settings, set_option
from ddm.errors import SetupError
from ddm.system.console import progress, say

if TYPE_CHECKING:
    from ddm.sampling.strategies import Strategy

StrategyOption = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        click_type=STRATEGY_NAMES,
        help="Default lock, which is exact; with --inpaint sample.",
        rich_help_panel=HOW,
    ),
]
Set = Annotated[list[str] | None, set_option(SampleSettings)]


@grouped
def sample(
    release: ReleaseArgument,
    *,
    num: NumOption,
    out: ImagesOption,
    told: Told,
    init: InitOption = None,
    t_start: TStartOption = None,
    inpaint: InpaintOption = None,
    mask: MaskOption = None,
    strategy: StrategyOption = None,
    following: Following,
    solving: Solving,
    settings: Set = None,
    verification: Verification,
    machine: Machine,
) -> None:
    """Sample images from a release; verifies first."""
    from ddm.io.pictures import prepare_output

    rare = read_settings(SampleSettings, settings)
    editing, within = (
        Editing(init, t_start, inpaint, mask, rare.corrections),
        interval(rare.guidance_interval),
    )
    strategy = strategy or ("sample" if inpaint else "lock")
    chosen = chosen_strategy(strategy, following.settings(rare))
    _check_together(chosen, rare, told, editing)
    prepare_output(out)

    from ddm.cli.conditions import condition_shares, describe_shares, expert_shares
    from ddm.cli.drawing import Computing, Job, ReleaseSource, draw, shares_of
    from ddm.footprint import condition_bytes, sampling_bytes
    from ddm.io.pictures import write_samples
    from ddm.loading.memory import expert_memory_bytes
    from ddm.sampling.guidance import class_names, knows_shares
    from ddm.system.memory import memory_limit

    computing = Computing(machine.device, machine.arithmetic(), rare.batch)
    processes, steps = min(machine.processes, num), solving.steps
    opened = verification.open(release, experts_later=True)
    plan, manifest = opened.plan, opened.manifest
    prepare_output(out, plan.data.shape)
    moves = editing.num_moves(steps)
    each = sampling_bytes(
        plan, len(manifest.experts), num=-(-num // processes), batch=rare.batch, steps=moves
    )
    beside = picture_bytes(out, num, plan.data.shape) + (
        condition_bytes(plan.condition) if told.text else 0
    )
    limit = memory_limit(read_memory(machine.memory)).part(processes)
    room = expert_memory_bytes(plan, manifest, limit, beside=each + -(-beside // processes))
    condition = told.value(plan.condition)
    source = ReleaseSource(plan, manifest, opened.folder, room, computing)
    ensemble, begin = source.ensemble(lazily=processes > 1), editing.read(plan.data, num)
    weights, declared = priors(manifest, following.prior, rare.class_prior)
    class_prior = condition_shares(ensemble, condition, declared)
    how = {
        "steps": steps,
        "solver": solving.solver.value,
        "prior": weights,
        "condition": condition,
        "condition_prior": class_prior,
        "guidance": told.guidance or 0.0,
        "guidance_interval": within,
        "router_every": rare.router_every or 1,
    }
    job = Job(source, chosen, solving.seed, how, editing, begin)
    with progress(f"sampling {num} with {strategy}") as advance:
        weight_K = expert_shares(ensemble, weights, class_prior)
        drawn = draw(job, num, processes, weight_K, advance, ensemble)
    classes = class_names(plan.condition, condition, num)
    owners = drawn.expert_N.tolist()
    written = write_samples(
        drawn.images, owners, out, opened.manifest_digest, classes, plan.data.range
    )
    name = classes[0] if classes else None
    shares = describe_shares(ensemble, shares_of(drawn, ensemble), weights, class_prior, name)
    say(f"{num} samples in {out} ({written}). Experts: {shares}")
    if told.text is not None and declared is None and not knows_shares(ensemble.router):
        say(
            "No release states who holds images of this text: the prior is that of all images (or --set class-prior)."
        )
    warn_if_expired(opened)


def _check_together(chosen: "Strategy", rare: SampleSettings, told: Told, editing: Editing) -> None:
    """Refuse options that change nothing beside the others."""
    if rare.guidance_interval is not None and not told.guidance:
        raise SetupError(
            "--set guidance-interval",
            expected="--guidance as well",
            got="an interval without guidance",
        )
    if rare.router_every is not None and not chosen.needs_router:
        expected = "a strategy that asks the router"
        got = f"{rare.router_every} with --strategy lock --tau 1, which asks no router"
        raise SetupError("--set router-every", expected=expected, got=got)
    if editing.inpaint and rare.router_every not in (None, 1):
        expected = "1 with --inpaint, which asks the router at every step"
        raise SetupError("--set router-every", expected=expected, got=str(rare.router_every))
    if rare.class_prior != "data" and not told.anything:
        got = f"{rare.class_prior!r} without a condition"
        raise SetupError("--set class-prior", expected="--class or --text as well", got=got)
