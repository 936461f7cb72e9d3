"""The commands about who belongs to a federation: `aggregator init`, `enroll` and `remove`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aggregator.commands.keys import say_founded, say_missing
from aggregator.commands.options import (
    FederationArgument,
    PassphraseOption,
    federation_passphrase,
    holders_from,
)
from aggregator.config import Federation
from ddm.errors import SetupError
from ddm.protocol.address import split_address
from ddm.system.console import ask, passphrase, remembered, say

if TYPE_CHECKING:
    from aggregator.config import FederationSettings

_HOLDERS = "Holders of the offline keys (without any, one key each is made here)"


def init(
    fed: FederationArgument,
    name: Annotated[str, typer.Option(help="The federation's name: a-z, 0-9, hyphens.")],
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address at which silos reach this aggregator.")
    ],
    licence: Annotated[
        str | None,
        typer.Option(
            metavar="SPDX",
            help="Licence of the releases, such as CC-BY-4.0; silos see it before they train.",
        ),
    ] = None,
    root_holder: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PUB",
            help="Public key of a holder of the root; repeatable.",
            rich_help_panel=_HOLDERS,
        ),
    ] = None,
    root_threshold: Annotated[
        int,
        typer.Option(min=1, help="How many of these holders must sign.", rich_help_panel=_HOLDERS),
    ] = 1,
    targets_holder: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PUB",
            help="Public key of a holder of targets, who decide which silos may sign; repeatable.",
            rich_help_panel=_HOLDERS,
        ),
    ] = None,
    targets_threshold: Annotated[
        int,
        typer.Option(min=1, help="How many of these holders must sign.", rich_help_panel=_HOLDERS),
    ] = 1,
    passphrase_file: PassphraseOption = None,
) -> None:
    """Make a federation: keys, TLS certificates, root of trust, invitation."""
    from aggregator.setup import init_federation

    if licence is None:
        licence = ask(
            "Licence of the releases, for example CC-BY-4.0 or CC-BY-NC-SA-4.0", option="--licence"
        )
    settings = _settings(name, address, licence, passphrase_file)
    federation = Federation(fed)
    root = holders_from(root_holder, root_threshold, "--root-threshold")
    targets = holders_from(targets_holder, targets_threshold, "--targets-threshold")
    secret = passphrase(
        passphrase_file, None, "New passphrase for the federation's keys", is_new=True
    )
    missing = init_federation(federation, settings, secret, root=root, targets=targets)
    if missing:
        say_missing(federation, missing)
    else:
        say_founded(federation)


def enroll(
    fed: FederationArgument,
    card: Annotated[
        Path, typer.Argument(metavar="CARD", help="File from `silo enroll` or `silo rotate`.")
    ],
    images: Annotated[
        int | None,
        typer.Option(
            min=2, help="Largest number of images that you agree to; a card with more is refused."
        ),
    ] = None,
    patients: Annotated[
        int | None,
        typer.Option(
            min=2, help="Largest number of patients that you agree to; a card with more is refused."
        ),
    ] = None,
) -> None:
    """Enroll a silo or its new key, and agree to its size; compare both through a second channel."""
    from aggregator.keys.silo_rotation import take_rotation
    from aggregator.membership.registry import (
        check_agreed_size,
        enroll_silo,
        read_cards,
        read_rotated_card,
        signing_key,
    )

    federation = Federation(fed).require()
    # Of an enrolled silo, a card with rotations announces a new key, which its old key signed; of any other silo it
    # is its first card.
    rotated = read_rotated_card(card)
    if rotated is not None and rotated[0].silo_id in read_cards(federation):
        new_card, rotations = rotated
        # Before the new key is taken, so that no size to which nobody agreed comes in with it.
        check_agreed_size(new_card, images, patients)
        renewed = take_rotation(federation, rotations)
        fingerprint = signing_key(renewed).fingerprint
        say(f"The new key of {renewed.silo_id}, which its old key announced: {fingerprint}")
        say(
            f"Agreed size: at most {renewed.agreed}. Both are in force from the next plan on; a plan in progress keeps"
        )
        say("the old ones.")
        return
    enrolled = enroll_silo(federation, card, images=images, patients=patients)
    say(
        f"Enrolled {enrolled.silo_id} for at most {enrolled.agreed}, which bounds its prior from the next plan on."
    )
    say(
        f"Compare the number and this fingerprint with the silo: {signing_key(enrolled).fingerprint}"
    )


def remove(
    fed: FederationArgument,
    silo_id: Annotated[str, typer.Argument(metavar="SILO", help="An enrolled silo.")],
    reason: Annotated[str, typer.Option(help="The reason; kept with its card, not published.")],
    passphrase_file: PassphraseOption = None,
) -> None:
    """Remove a silo from the federation: its submissions are refused, and later plans do not include it."""
    from aggregator.keys.removal import remove_silo

    federation = Federation(fed).require()
    secret = federation_passphrase(federation, passphrase_file)
    # Where the silo has a role in the plan in force, `targets` is signed again without it.
    removal = remove_silo(federation, silo_id, reason, secret)
    say(
        f"Removed {silo_id}: its card is in registry/removed/, and nothing it sends is accepted any more."
    )
    # A plan in force names the silo until its next version is published without it.
    if removal.plan_id is None:
        return
    if removal.missing:
        say_missing(federation, removal.missing)
    say(
        f"It had a part in plan {removal.plan_id}. Its experts leave with the next published version:"
    )
    say(
        f"  aggregator withdraw {fed} {silo_id} --reason ..., then aggregator router and aggregator publish"
    )
    say("Versions published so far keep its experts: replace them where you serve them.")


def _settings(
    name: str, address: str, licence: str, passphrase_file: Path | None
) -> "FederationSettings":
    from pydantic import ValidationError

    from aggregator.config import FederationSettings

    try:
        host, port = split_address(address)
    except ValueError as error:
        raise SetupError(
            "--address",
            expected="HOST:PORT: a name or an IPv4 address, and a port from 1 to 65535",
            got=f"{ascii(address[:100])}: {error}",
            remedy="For example 127.0.0.1:9092 on this machine alone, or aggregator.example.org:9092.",
        ) from error
    try:
        return FederationSettings(
            name=name,
            host=host,
            port=port,
            licence=licence,
            # As an absolute path: later commands and the service may run in another folder.
            passphrase_file=remembered(passphrase_file),
        )
    except ValidationError as error:
        if error.errors()[0]["loc"][0] == "licence":
            raise SetupError(
                "--licence",
                expected="1 to 400 characters, such as CC-BY-4.0",
                got=ascii(licence[:100]),
            ) from error
        raise SetupError(
            "--name",
            expected="a letter a-z, then up to 40 of a-z, 0-9 and hyphens",
            got=repr(name[:40]),
        ) from error
