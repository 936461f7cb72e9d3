"""The commands `aggregator publish` and `withdraw`: publish the next version, take a silo out of later ones."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aggregator.commands.log import say_witnessed, witnesses_of
from aggregator.commands.options import FederationArgument, PassphraseOption, federation_passphrase
from aggregator.config import Federation
from ddm.system.console import progress, say

if TYPE_CHECKING:
    from aggregator.release.publish import Publication


def publish(
    fed: FederationArgument,
    out: Annotated[Path, typer.Option(help="Folder of the release; it must not exist.")],
    quorum: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Smallest number of silos in the release (default: that in federation.toml).",
        ),
    ] = None,
    rehearsal: Annotated[
        bool,
        typer.Option(
            "--rehearsal",
            help="Publish a rehearsal, whose experts draw noise; it is marked as one.",
        ),
    ] = False,
    renew: Annotated[
        bool, typer.Option("--renew", help="Publish a new version even if nothing has changed.")
    ] = False,
    passphrase_file: PassphraseOption = None,
) -> None:
    """Publish the accepted experts and the router as a signed release; if nothing changed, copy the newest version."""
    from aggregator.release.publish import publish as publish_release
    from ddm.publishing.witnesses import ask_witnesses

    federation = Federation(fed).require()
    # Both may fail, and what follows may take minutes: so they come first.
    secret = federation_passphrase(federation, passphrase_file)
    witnesses = witnesses_of(federation)
    with progress("Drawing for the report") as advance:
        publication = publish_release(
            federation,
            secret,
            out,
            quorum=quorum,
            rehearsal=rehearsal,
            renew=renew,
            on_progress=advance,
        )
    say(announcement(publication, out))
    # The version is in force by now: a witness must never see a checkpoint that may not come into force.
    say_witnessed(ask_witnesses(federation, witnesses))
    say(f"Researchers: ddm verify {out} --root {federation.tuf / '1.root.json'}")


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

    federation = Federation(fed).require()
    # The notice to the silo is sealed like a receipt.
    key = load_key(federation, "receipts", federation_passphrase(federation, passphrase_file))
    record = withdraw_silo(federation, silo_id, reason, key)
    say(f"Withdrew {silo_id} from plan {record.plan_id}: {record.reason}")
    say(f"Next: aggregator router {fed}, then aggregator publish {fed} --out RELEASE.")
    # The notice is a receipt of the present plan, in which a carried silo does not take part.
    if record.carried_from is None:
        say(f"The silo learns of it once it and `aggregator run {fed}` run at the same time.")
    else:
        say(
            "Tell the silo: its expert was carried over into this plan, of which no notice reaches it."
        )
    say("Versions published so far keep its experts: replace them where you serve them.")
