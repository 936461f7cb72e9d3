"""The researcher's commands: verify, info, sample."""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddm.console import new_app, run_app, say, table
from ddm.errors import ArchivedWarningError, SetupError

if TYPE_CHECKING:
    from ddm.release import Release

app = new_app("Verify a published ensemble of diffusion experts, and sample from it.")

ReleaseArgument = Annotated[Path, typer.Argument(metavar="RELEASE", help="The published folder.")]
RootOption = Annotated[Path, typer.Option("--root", metavar="FILE", help="The pinned 1.root.json.")]
StateOption = Annotated[
    Path | None, typer.Option("--state", metavar="DIR", help="Where versions seen are kept, so that a rollback shows.")
]
SiloKeyOption = Annotated[
    list[str] | None, typer.Option("--silo-key", metavar="ID=FPR", help="Pin a silo's key by its fingerprint.")
]
ArchivedOption = Annotated[bool, typer.Option("--archived", help="Accept an expired timestamp, loudly.")]


class StrategyName(StrEnum):
    """How experts are combined along a trajectory."""

    FULL = "full"
    SAMPLE = "sample"
    LOCK = "lock"
    TOP_1 = "top-1"


class SolverName(StrEnum):
    """The ODE solver."""

    EULER = "euler"
    HEUN = "heun"


class Prefix(StrEnum):
    """What lock does before it locks."""

    SAMPLE = "sample"
    FULL = "full"


@app.command()
def verify(
    release: ReleaseArgument,
    root: RootOption,
    state: StateOption = None,
    silo_key: SiloKeyOption = None,
    archived: ArchivedOption = False,
) -> None:
    """Check every signature, digest, role and version; exit 0 only if all of them hold."""
    opened = _open(release, root, state, silo_key, archived)
    pins = _pins(silo_key)
    verified, manifest = opened.verified, opened.manifest
    total = sum(file.bytes for file in verified.files.values())
    say(f"Verified {release}: ensemble {manifest.plan_id}, version {manifest.version}.")
    say(f"  root       {verified.root_fingerprint}")
    say(f"  files      {len(verified.files)} signed files, {total} bytes; none missing, none unlisted")
    say(f"  timestamp  valid until {verified.expires.isoformat()}")
    for silo_id, fingerprint in sorted(verified.silo_keys.items()):
        by = "by the key you pinned" if silo_id in pins else "by the key that targets enrolled for this silo"
        say(f"  silo {silo_id:<9} signed {by}: {fingerprint}")
    _warn_if_expired(opened)


@app.command()
def info(
    release: ReleaseArgument,
    root: RootOption,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
    state: StateOption = None,
    silo_key: SiloKeyOption = None,
    archived: ArchivedOption = False,
) -> None:
    """Show what a release holds: silos, experts, privacy, router; verifies first."""
    opened = _open(release, root, state, silo_key, archived)
    if as_json:
        say(json.dumps(opened.manifest.model_dump(mode="json"), indent=2))
        _warn_if_expired(opened)
        return
    manifest, plan = opened.manifest, opened.plan
    shape = " x ".join(str(side) for side in plan.data.shape)
    say(f"Ensemble {manifest.plan_id}, version {manifest.version}, published {manifest.published_at.isoformat()}")
    say(f"  images {shape}, {len(manifest.experts)} experts of kind {plan.expert.architecture.kind}")
    say(f"  router {manifest.router.kind}, licence {manifest.licence}\n")
    priors: dict[str, list[float]] = {}
    for expert in manifest.experts:
        priors.setdefault(expert.silo_id, []).append(expert.prior)
    rows = [
        (
            silo.silo_id,
            f"{opened.submissions[silo.silo_id].num_units}",
            f"{len(priors[silo.silo_id])}",
            f"{sum(priors[silo.silo_id]):.3f}",
            f"{silo.epsilon:g}",
            f"{silo.delta:g}",
            silo.audit,
            silo.isolation,
        )
        for silo in manifest.silos
    ]
    say(table(rows, ("silo", f"{plan.releases.unit}s", "experts", "prior", "epsilon", "delta", "audit", "isolation")))
    say("\nThe experts' weights were trained without differential privacy; epsilon covers the router's inputs only.")
    _warn_if_expired(opened)


@app.command()
def sample(
    release: ReleaseArgument,
    root: RootOption,
    num: Annotated[int, typer.Option(min=1, help="How many images.")],
    out: Annotated[Path, typer.Option(help="FILE.png (grid), FILE.npz (float32) or a folder of PNG files.")],
    strategy: Annotated[StrategyName, typer.Option(help="lock is exact; top-1 is biased.")] = StrategyName.LOCK,
    tau: Annotated[float, typer.Option(min=0.0, max=1.0, help="t_lock of lock; at 1 no router is needed.")] = 1.0,
    prefix: Annotated[Prefix, typer.Option(help="What lock does before it locks.")] = Prefix.SAMPLE,
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="Solver steps.")] = 50,
    solver: Annotated[SolverName, typer.Option(help="ODE solver.")] = SolverName.HEUN,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same bytes.")] = 0,
    prior: Annotated[str, typer.Option(help="data, equal, or ID=W,... (0 leaves a silo out).")] = "data",
    state: StateOption = None,
    silo_key: SiloKeyOption = None,
    archived: ArchivedOption = False,
) -> None:
    """Sample images from a release; verifies first."""
    from ddm.pictures import prepare, write_samples

    prepare(out)

    from ddm.artifact import load_ensemble
    from ddm.strategies import strategy_named

    opened = _open(release, root, state, silo_key, archived, experts_later=True)
    ensemble = load_ensemble(opened)
    wanted = _prior(prior, [expert.silo_id for expert in opened.manifest.experts], list(ensemble.prior))
    chosen = strategy_named(strategy.value, tau=tau, prefix=prefix.value)
    with typer.progressbar(length=100, label=f"sampling {num} with {strategy.value}", width=30) as bar:

        def advance(done: int, total: int) -> None:
            bar.update(100 * done // total - bar.pos)

        drawn = ensemble.sample(
            num,
            strategy=chosen,
            steps=steps,
            solver=solver.value,
            seed=seed,
            prior=wanted,
            on_progress=advance,
        )
    owners = drawn.expert_N.tolist()
    written = write_samples(drawn.images, owners, out)
    shares = ", ".join(
        f"{name} {owners.count(index) / num:.2f} (prior {share:.2f})"
        for index, (name, share) in enumerate(zip(ensemble.expert_ids, wanted, strict=True))
    )
    say(f"{num} samples in {out} ({written}). Experts: {shares}")
    _warn_if_expired(opened)


def _open(
    release: Path,
    root: Path,
    state: Path | None,
    silo_key: list[str] | None,
    archived: bool,
    *,
    experts_later: bool = False,
) -> "Release":
    from ddm.release import open_release
    from ddm.trust.verify import default_state

    return open_release(
        release,
        root=root,
        state=state or default_state(),
        silo_keys=_pins(silo_key),
        archived=archived,
        experts_later=experts_later,
    )


def _pins(silo_key: list[str] | None) -> dict[str, str]:
    from ddm.trust.keys import parse_fingerprint

    pins: dict[str, str] = {}
    for text in silo_key or []:
        silo_id, equals, fingerprint = text.partition("=")
        if not equals or not silo_id:
            raise SetupError("--silo-key", expected="ID=FINGERPRINT, 64 hexadecimal digits", got=text[:100])
        pins[silo_id] = parse_fingerprint(fingerprint)
    return pins


def _prior(text: str, silo_ids: list[str], data_prior: list[float]) -> list[float]:
    """Return a weight for each expert; a silo's weight goes to its experts in proportion to their data."""
    if text == "data":
        return data_prior
    shares = dict.fromkeys(silo_ids, 0.0)
    for silo_id, prior in zip(silo_ids, data_prior, strict=True):
        shares[silo_id] += prior
    weights = dict.fromkeys(silo_ids, 1.0) if text == "equal" else _silo_weights(text, list(shares))
    total = sum(weights.values())
    return [
        weights[silo_id] / total * prior / shares[silo_id] if weights[silo_id] else 0.0
        for silo_id, prior in zip(silo_ids, data_prior, strict=True)
    ]


def _silo_weights(text: str, silo_ids: list[str]) -> dict[str, float]:
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
            raise SetupError("--prior", expected=wanted, got=repr(part[:60]))
        given.add(silo_id)
        weights[silo_id] = weight
    if sum(weights.values()) <= 0:
        raise SetupError("--prior", expected="a weight above 0", got="none")
    return weights


def _warn_if_expired(release: "Release") -> None:
    if release.verified.expired:
        raise ArchivedWarningError(
            "WARNING: the timestamp has expired; everything else verified",
            expected="a timestamp that is still valid",
            got=f"one that ended {release.verified.expires.isoformat()}",
        )


def main() -> None:
    """Entry point of the `ddm` command."""
    run_app(app)


if __name__ == "__main__":
    main()
