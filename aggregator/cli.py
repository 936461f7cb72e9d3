"""The aggregator operator's commands: init, enroll, plan, run, router, publish."""

import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aggregator.commands.options import FederationArgument, PassphraseOption, federation_passphrase
from aggregator.config import Federation
from ddm.console import human_bytes, human_seconds, new_app, passphrase, progress, remembered, run_app, say, table
from ddm.errors import SetupError

if TYPE_CHECKING:
    from aggregator.planning import Draft
    from ddm.protocol.plan import Plan

app = new_app("Plan a federation of silos, take in their experts, train the router, publish a signed ensemble.")


@app.command()
def init(
    fed: FederationArgument,
    name: Annotated[str, typer.Option(help="The federation's name: a-z, 0-9, hyphens.")],
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where silos reach this aggregator.")],
    passphrase_file: PassphraseOption = None,
) -> None:
    """Make a federation: keys, TLS certificates, trust root, invitation."""
    from aggregator.setup import init_federation

    settings = _settings(name, address, passphrase_file)
    secret = passphrase(passphrase_file, None, "New passphrase for the federation's keys", confirm=True)
    invitation = init_federation(Federation(fed), settings, secret)
    say(f"Federation {name} in {fed}.")
    say(f"  root fingerprint  {invitation.root_digest}")
    say(f"Give every silo {fed / 'invitation.json'}, and the fingerprint by another way (telephone, letter).")


@app.command()
def enroll(
    fed: FederationArgument,
    card: Annotated[Path, typer.Argument(metavar="CARD", help="The card that `silo enroll` wrote.")],
) -> None:
    """Enroll a silo; compare the fingerprint with the silo by another way."""
    from aggregator.registry import enroll as keep_card
    from aggregator.registry import signing_key

    enrolled = keep_card(Federation(fed).require(), card)
    say(f"Enrolled {enrolled.silo_id}. Compare with the silo: {signing_key(enrolled).fingerprint}")


@app.command()
def plan(
    fed: FederationArgument,
    recipe: Annotated[Path, typer.Option(help="TOML; see examples/digits_three_silos/plan.toml.")],
    public: Annotated[Path, typer.Option(help="npz of public images.")],
    yes: Annotated[bool, typer.Option("--yes", help="Sign without asking.")] = False,
    passphrase_file: PassphraseOption = None,
) -> None:
    """Fit what is public, show size, time and epsilon, then sign the plan."""
    from pydantic import ValidationError

    from aggregator.planning import draft_plan, sign_plan
    from aggregator.recipe import Recipe
    from aggregator.setup import load_key
    from ddm.npz import read_images
    from ddm.settings import load_settings, misfit

    federation = Federation(fed).require()
    chosen = load_settings(Recipe, recipe)
    images = read_images(public, chosen.data)
    secret = federation_passphrase(federation, passphrase_file)
    load_key(federation, "targets", secret)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            with progress("Encoding public images") as on_progress:
                draft = draft_plan(federation, chosen, images, Path(scratch), on_progress)
        except ValidationError as error:
            # What only shows when the recipe meets the rest of the plan, e.g. a patch that does not divide the image.
            raise misfit(recipe, error) from error
        say(costs(draft))
        if not yes and not _confirmed():
            say("Not signed.")
            raise typer.Abort
        digest = sign_plan(federation, draft, secret)
    say(f"Signed plan {draft.plan.plan_id}, digest {digest}. Next: aggregator run {fed}")


@app.command()
def run(fed: FederationArgument, passphrase_file: PassphraseOption = None) -> None:
    """Deliver the plan, take in submissions, send receipts; ends when every silo has one."""
    from aggregator.setup import load_key

    federation = Federation(fed).require()
    federation.current_plan()
    key = load_key(federation, "receipts", federation_passphrase(federation, passphrase_file))

    from aggregator.running import run_federation

    run_federation(federation, key)


@app.command()
def router(
    fed: FederationArgument,
    seed: Annotated[int, typer.Option(min=0, help="Of batches and initial weights.")] = 0,
) -> None:
    """Train the router on the noised sketches and judge it on public data."""
    from aggregator.inventory import take_inventory
    from aggregator.router import describe, train_router

    federation = Federation(fed).require()
    inventory = take_inventory(federation)
    units = ", ".join(f"{silo_id} {number}" for silo_id, number in inventory.num_units.items())
    say(f"Training on releases of {units} {inventory.plan.releases.unit}s, as each silo states …")
    with progress("Training the router") as advance:
        report = train_router(federation, inventory, seed=seed, on_progress=lambda step, total, _: advance(step, total))
    say(describe(report))
    say(f"Next: aggregator publish {fed} --out RELEASE")


@app.command()
def publish(
    fed: FederationArgument,
    out: Annotated[Path, typer.Option(help="The release folder to make.")],
    passphrase_file: PassphraseOption = None,
) -> None:
    """Publish the accepted experts and the router as a signed release."""
    from aggregator.inventory import take_inventory
    from aggregator.publish import publish as publish_release

    federation = Federation(fed).require()
    inventory = take_inventory(federation)
    manifest = publish_release(federation, inventory, federation_passphrase(federation, passphrase_file), out)
    late = f"; without {', '.join(manifest.missing_silos)}" if manifest.missing_silos else ""
    say(f"Published {manifest.plan_id}, version {manifest.version}, router {manifest.router.kind}{late}: {out}")
    say(f"Researchers: ddm verify {out} --root {federation.tuf / '1.root.json'}")


def _settings(name: str, address: str, passphrase_file: Path | None):  # type: ignore[no-untyped-def]
    from pydantic import ValidationError

    from aggregator.config import FederationSettings

    host, _, port = address.rpartition(":")
    if not re.fullmatch(r"[A-Za-z0-9.-]{1,250}", host) or not re.fullmatch("[0-9]{1,5}", port):
        wanted = "HOST:PORT with a name or an IPv4 address, for example 127.0.0.1:9092"
        raise SetupError("--address", expected=wanted, got=repr(address[:100]))
    try:
        return FederationSettings(
            name=name,
            host=host,
            port=int(port),
            passphrase_file=remembered(passphrase_file),
        )
    except ValidationError as error:
        field = str(error.errors()[0]["loc"][0])
        raise SetupError(f"--{'name' if field == 'name' else 'address'}", got=error.errors()[0]["msg"]) from error


def costs(draft: "Draft") -> str:
    """Return what the operator is shown before a plan is signed."""
    made = draft.plan
    training, releases = made.expert.training, made.releases
    per_unit = f"per {releases.unit}, {releases.relation.replace('_', '-')}"
    rows = [
        ("silos", ", ".join(made.silos)),
        ("encoder", _encoder(made)),
        ("experts a silo", _experts(draft)),
        (
            "an expert",
            f"{made.expert.architecture.kind}, {human_bytes(draft.expert_bytes)}, {training.num_steps} steps",
        ),
        ("training", f"about {human_seconds(draft.train_s)} a silo (one thread of this machine, from a few steps)"),
        ("total, stated", f"epsilon {releases.total.epsilon:g}, delta {releases.total.delta:g} {per_unit}"),
        ("total, composed", f"epsilon {draft.epsilon:.4g} at that delta"),
        *_releases(draft),
        ("without privacy", "expert weights (no DP-SGD), number of units, losses"),
        ("valid until", made.expires_at.isoformat()),
    ]
    return f"Plan {made.plan_id}\n" + table(rows, ("what", "value"))


def _encoder(plan: "Plan") -> str:
    encoder = plan.encoder
    if encoder.kind == "pca":
        return f"{encoder.dim} principal components of the public images"
    warning = ", RANDOM WEIGHTS: clusters mean little" if encoder.weights == "random" else ""
    return f"{encoder.model}, {encoder.dim} features{warning}"


def _experts(draft: "Draft") -> str:
    kind = draft.plan.partition.kind
    if kind == "silo":
        return "1"
    one_each = "one a coarse cluster" if kind == "silo_cluster" else "on random shares, as a control"
    return f"at most {draft.num_experts}, {one_each}"


def _releases(draft: "Draft") -> list[tuple[str, str]]:
    asked = draft.plan.releases
    rows = [("  counts", f"epsilon {asked.counts.epsilon:g}, {asked.counts.num_groups} public groups")]
    if asked.class_counts:
        rows.append(
            ("  class counts", f"epsilon {asked.class_counts.epsilon:g}, {asked.class_counts.num_classes} classes")
        )
    if asked.moments:
        rows.append(
            (
                "  moments",
                f"epsilon {asked.moments.epsilon:g}, delta {asked.moments.delta:g}, rank {asked.moments.rank}",
            )
        )
    if asked.sketch:
        sketch = f"epsilon {asked.sketch.epsilon:g}, delta {asked.sketch.delta:g}, rank {asked.sketch.rank}"
        rows.append(("  sketches", f"{sketch}, t {draft.t_release:.3f}"))
    return rows


def _confirmed() -> bool:
    if not sys.stdin.isatty():
        raise SetupError("plan", expected="a person to confirm, or --yes", got="no terminal", remedy="Add --yes.")
    return typer.confirm("Sign this plan?")


def main() -> None:
    """Entry point of the `aggregator` command."""
    run_app(app)


if __name__ == "__main__":
    main()
