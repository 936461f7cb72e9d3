"""The commands that publish: `aggregator publish`, `release`, and `withdraw`, which takes a silo out of later ones."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aggregator.commands.log import say_witnessed, witnesses_of
from aggregator.commands.options import FederationArgument, PassphraseOption, federation_passphrase
from aggregator.commands.router import SeedOption, train_and_describe
from aggregator.config import Federation
from ddm.system.console import progress, say

if TYPE_CHECKING:
    from aggregator.release.publish import Publication


OutOption = Annotated[Path, typer.Option(help="Folder of the release; it must not exist.")]
QuorumOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Smallest number of silos in the release (default: that in federation.toml)."
    ),
]
RehearsalOption = Annotated[
    bool,
    typer.Option(
        "--rehearsal", help="Publish a rehearsal, whose experts draw noise; it is marked as one."
    ),
]
RenewOption = Annotated[
    bool, typer.Option("--renew", help="Publish a new version even if nothing has changed.")
]


@dataclass(frozen=True)
class PublishOptions:
    """How a version is published; see the options of the command."""

    out: Path
    quorum: int | None
    rehearsal: bool
    renew: bool


def publish(
    fed: FederationArgument,
    out: OutOption,
    quorum: QuorumOption = None,
    rehearsal: RehearsalOption = False,
    renew: RenewOption = False,
    passphrase_file: PassphraseOption = None,
) -> None:
    """Publish the accepted experts and the router as a signed release; if nothing changed, copy the newest version."""
    federation = Federation(fed).require_owner()
    secret = federation_passphrase(federation, passphrase_file)
    publish_version(federation, secret, PublishOptions(out, quorum, rehearsal, renew))


def release(
    fed: FederationArgument,
    out: OutOption,
    quorum: QuorumOption = None,
    rehearsal: RehearsalOption = False,
    renew: RenewOption = False,
    seed: SeedOption = 0,
    passphrase_file: PassphraseOption = None,
) -> None:
    """Train the router, then publish the release, in one command."""
    from aggregator.intake.inventory import take_inventory
    from aggregator.release.publish import check_quorum, check_rehearsal
    from ddm.publishing.keys import load_key
    from ddm.publishing.staging import reserve

    federation = Federation(fed).require_owner()
    # Whatever would end the second half shows before the minutes of the first.
    plan, _ = federation.current_plan()
    check_rehearsal(plan, is_intended=rehearsal)
    with reserve(out):
        pass
    secret = federation_passphrase(federation, passphrase_file)
    load_key(federation, "release", secret)
    inventory = take_inventory(federation)
    check_quorum(inventory, quorum or federation.settings().quorum)
    train_and_describe(federation, inventory, seed)
    publish_version(federation, secret, PublishOptions(out, quorum, rehearsal, renew))


def publish_version(federation: Federation, secret: bytes, options: PublishOptions) -> None:
    """Publish the next version, and say what became of it."""
    from aggregator.release.publish import publish as publish_release
    from ddm.publishing.witnesses import ask_witnesses

    # It may fail, and what follows may take minutes: so it comes first.
    witnesses = witnesses_of(federation)
    with progress("Drawing for the report") as advance:
        publication = publish_release(
            federation,
            secret,
            options.out,
            quorum=options.quorum,
            rehearsal=options.rehearsal,
            renew=options.renew,
            on_progress=advance,
        )
    say(announcement(publication, options.out))
    # The version is in force by now: a witness must never see a checkpoint that may not come into force.
    say_witnessed(ask_witnesses(federation, witnesses))
    root = federation.tuf / "1.root.json"
    say(f"Researchers: ddm verify {options.out} --root {root}")


def announcement(publication: "Publication", out: Path) -> str:
    """Say what was published, and which silos are missing."""
    manifest = publication.manifest
    num_planned = len(manifest.silos) + len(manifest.missing_silos) + len(manifest.withdrawn_silos)
    lines = [
        f"Published {manifest.plan_id}, version {manifest.version}, router {manifest.router.kind}: {out}"
    ]
    # The same content is one version, however often it is published (docs/adr/0013-a-version-is-published-once.md).
    if not publication.fresh:
        lines = [
            f"Version {manifest.version} of {manifest.plan_id} holds all of this already; nothing new was published.",
            f"Copied it to {out}; --renew makes a new version.",
        ]
    if num_planned > len(manifest.silos):
        lines.append(f"PARTIAL: {len(manifest.silos)} of the plan's {num_planned} silos.")
    if manifest.missing_silos:
        lines.append(f"  without a submission: {', '.join(manifest.missing_silos)}")
    if manifest.withdrawn_silos:
        lines.append(f"  withdrawn: {', '.join(manifest.withdrawn_silos)}")
    return "\n".join(lines)


def withdraw(
    fed: FederationArgument,
    silo_id: Annotated[str, typer.Argument(metavar="SILO", help="A silo of the present plan.")],
    reason: Annotated[str, typer.Option(help="The reason; sent to the silo, not published.")],
    passphrase_file: PassphraseOption = None,
) -> None:
    """Remove a silo from the present plan for good; later versions do not contain it."""
    from aggregator.membership.withdrawal import withdraw_silo
    from ddm.publishing.keys import load_key

    federation = Federation(fed).require_owner()
    # The notice to the silo is sealed like a receipt.
    key = load_key(federation, "receipts", federation_passphrase(federation, passphrase_file))
    record = withdraw_silo(federation, silo_id, reason, key)
    say(f"Withdrew {silo_id} from plan {record.plan_id}: {record.reason}")
    say(f"Next: aggregator release {fed} --out RELEASE.")
    # The notice is a receipt of the present plan, in which a carried silo does not take part.
    if record.carried_from is None:
        say(f"The silo learns of it once it and `aggregator run {fed}` run at the same time.")
    else:
        say(
            "Tell the silo: its expert was carried over into this plan, of which no notice reaches it."
        )
    say("Versions published so far keep its experts: replace them where you serve them.")
