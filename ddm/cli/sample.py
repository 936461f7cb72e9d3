"""The command `ddm sample`: which flags go together, and images from a verified release."""

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddm.cli.options import (
    ArchivedOption,
    DeviceOption,
    ReleaseArgument,
    RootOption,
    SiloKeyOption,
    StateOption,
    open_verified,
    warn_if_expired,
)
from ddm.errors import SetupError
from ddm.system.console import say

if TYPE_CHECKING:
    from ddm.sampling.strategies import Strategy

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class StrategyName(StrEnum):
    """How experts are combined along a trajectory."""

    FULL = "full"
    SAMPLE = "sample"
    LOCK = "lock"
    TOP_1 = "top-1"
    TOP_K = "top-k"
    NUCLEUS = "nucleus"
    THRESHOLD = "threshold"


class SolverName(StrEnum):
    """The ODE solver."""

    EULER = "euler"
    HEUN = "heun"
    MIDPOINT = "midpoint"
    RK4 = "rk4"
    EXPONENTIAL = "exponential"


class Prefix(StrEnum):
    """What lock does before it locks."""

    SAMPLE = "sample"
    FULL = "full"


Tau = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, help="t_lock of lock; at 1 (default) no router is needed.")
]
Mass = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="nucleus: their probability; default 0.9.")]
Least = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="threshold: that of each; default 0.1.")]
Guidance = Annotated[
    float | None, typer.Option(min=0.0, max=1000.0, help="g, with --class or --text; exact with full alone.")
]
Text = Annotated[str | None, typer.Option(metavar="PROMPT", help="The text that all images shall fit.")]
EncoderFolder = Annotated[
    Path | None, typer.Option("--text-encoder", metavar="FOLDER", help="With --text: the encoder that the plan pins.")
]
Every = Annotated[int | None, typer.Option("--router-every", min=1, help="Ask the router every N steps; default 1.")]
Memory = Annotated[str | None, typer.Option(metavar="SIZE", help="Most that experts may take of memory, as 2GiB.")]


def sample(
    release: ReleaseArgument,
    root: RootOption,
    num: Annotated[int, typer.Option(min=1, help="How many images.")],
    out: Annotated[Path, typer.Option(help="FILE.png (grid), FILE.npz (float32) or a folder of PNG files.")],
    strategy: Annotated[StrategyName, typer.Option(help="lock is exact; top-1 is biased.")] = StrategyName.LOCK,
    tau: Tau = None,
    prefix: Annotated[Prefix | None, typer.Option(help="What lock does before it locks.")] = None,
    k: Annotated[int | None, typer.Option("--k", min=1, help="top-k: how many experts are mixed; default 2.")] = None,
    mass: Mass = None,
    least: Least = None,
    router_every: Every = None,
    label: Annotated[int | None, typer.Option("--class", min=0, help="The class of all images.")] = None,
    text: Text = None,
    text_encoder: EncoderFolder = None,
    class_prior: Annotated[str, typer.Option(help="Who holds the class or the text: data, or ID=W,...")] = "data",
    guidance: Guidance = None,
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="Solver steps.")] = 50,
    solver: Annotated[SolverName, typer.Option(help="ODE solver.")] = SolverName.HEUN,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same images.")] = 0,
    prior: Annotated[str, typer.Option(help="data, equal, or ID=W,... (0 leaves a silo out).")] = "data",
    batch: Annotated[int, typer.Option(min=1, help="Most images that an expert is given at once.")] = 64,
    memory: Memory = None,
    device: DeviceOption = "auto",
    state: StateOption = None,
    silo_key: SiloKeyOption = None,
    archived: ArchivedOption = False,
) -> None:
    """Sample images from a release; verifies first."""
    from ddm.io.pictures import prepare, write_samples

    settings = {"tau": tau, "prefix": prefix.value if prefix else None, "k": k, "mass": mass, "least": least}
    chosen = _chosen(strategy.value, {name: value for name, value in settings.items() if value is not None})
    _check_together(chosen, router_every, class_prior, guidance, label is not None or text is not None)
    check_text(label, text, text_encoder)
    memory_bytes = None if memory is None else _bytes(memory)
    prepare(out)

    from dataclasses import replace

    from ddm.cli.conditions import encoded, holders_of, shares_of
    from ddm.loading.ensemble import load_ensemble
    from ddm.system.devices import device_named

    where = device_named(device, setting="--device")
    opened = open_verified(release, root, state, silo_key, archived, experts_later=True)
    asked = label if text is None or text_encoder is None else encoded(text, text_encoder, opened.plan.condition)
    ensemble = replace(load_ensemble(opened, memory_bytes=memory_bytes, device=where), chunk_size=batch)
    silo_ids, own = [expert.silo_id for expert in opened.manifest.experts], list(ensemble.prior)
    wanted = _weights("--prior", prior, silo_ids, own)
    declared = None if class_prior == "data" else _weights("--class-prior", class_prior, silo_ids, own)
    holders = holders_of(ensemble, asked, declared)
    with typer.progressbar(length=100, label=f"sampling {num} with {strategy.value}", width=30) as bar:
        drawn = ensemble.sample(
            num,
            strategy=chosen,
            steps=steps,
            solver=solver.value,
            seed=seed,
            prior=wanted,
            condition=asked,
            condition_prior=holders,
            guidance=guidance or 0.0,
            router_every=router_every or 1,
            on_progress=lambda done, total: bar.update(100 * done // total - bar.pos),
        )
    written = write_samples(drawn.images, drawn.expert_N.tolist(), out)
    say(f"{num} samples in {out} ({written}). Experts: {shares_of(ensemble, drawn.shares, wanted, holders, label)}")
    if text is not None and declared is None:
        say("Who holds images of such a text is not known: the prior is that of all images (see --class-prior).")
    warn_if_expired(opened)


def _chosen(name: str, given: dict[str, Any]) -> "Strategy":
    """Return the strategy, and refuse settings that mean nothing to it."""
    from ddm.sampling.strategies import SETTINGS, strategy_named

    for setting in given:
        if setting not in SETTINGS[name]:
            owner = next(other for other, settings in SETTINGS.items() if setting in settings)
            raise SetupError(f"--{setting}", expected=f"--strategy {owner} with it", got=f"--strategy {name}")
    if given.get("prefix") and given.get("tau", 1.0) == 1.0:
        raise SetupError("--prefix", expected="a --tau below 1 with it", got="a lock from the start")
    return strategy_named(name, **given)


def _check_together(
    chosen: "Strategy", router_every: int | None, class_prior: str, guidance: float | None, conditioned: bool
) -> None:
    if router_every is not None and not chosen.needs_router:
        raise SetupError("--router-every", expected="a strategy that asks a router", got="lock at 1, which asks none")
    if not conditioned and guidance is not None:
        raise SetupError("--guidance", expected="a --class or --text with it", got="none")
    if not conditioned and class_prior != "data":
        raise SetupError("--class-prior", expected="a --class or --text with it", got="none")


def check_text(label: int | None, text: str | None, folder: Path | None) -> None:
    """Refuse a text without its encoder, beside a class, or blank.

    Raises:
        SetupError: on any of them.
    """
    if text is None and folder is not None:
        raise SetupError("--text-encoder", expected="a --text with it", got="none")
    if text is None:
        return
    if label is not None:
        raise SetupError("--text", expected="no --class with it", got="both")
    if folder is None:
        raise SetupError("--text", expected="a --text-encoder with it", got="none")
    if not text.strip():
        raise SetupError("--text", expected="a text", got="a blank one")


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,3})?) ?(KiB|MiB|GiB|TiB|)", text.strip())
    if not match:
        raise SetupError("--memory", expected="a size, as 2GiB or 500MiB", got=repr(text[:40]))
    return int(float(match[1]) * _UNITS[match[2]])


def _weights(flag: str, text: str, silo_ids: list[str], data_prior: list[float]) -> list[float]:
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
    given: set[str] = set()
    for part in text.split(","):
        silo_id, _, number = part.strip().partition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = -1.0
        if silo_id not in weights or silo_id in given or not 0.0 <= weight < float("inf"):
            wanted = f"data, equal, or ID=WEIGHT,... with each ID once, among {', '.join(silo_ids)}"
            raise SetupError(flag, expected=wanted, got=repr(part[:60]))
        given.add(silo_id)
        weights[silo_id] = weight
    if sum(weights.values()) <= 0:
        raise SetupError(flag, expected="a weight above 0", got="none")
    return weights
