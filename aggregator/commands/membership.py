"""The commands about who belongs to a federation: `aggregator init`, `invite`, `enroll` and `remove`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aggregator.commands.keys import say_codes, say_founded, say_missing
from aggregator.commands.options import (
    FederationArgument,
    PassphraseOption,
    federation_passphrase,
    holders_from,
)
from aggregator.config import Federation
from ddm.errors import ArchipelagoError, SetupError
from ddm.protocol.address import split_address
from ddm.system.console import (
    DigestsOption,
    NewPassphraseOption,
    ask,
    choose_passphrase_file,
    passphrase,
    remembered,
    say,
)

if TYPE_CHECKING:
    from aggregator.config import FederationSettings
    from ddm.protocol.enrolment import Card, RotatedCard

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
    max_influence: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=1.0,
            help="Largest share of the ensemble that one silo may have without your consent.",
        ),
    ] = 0.5,
    digests: DigestsOption = False,
    passphrase_file: PassphraseOption = None,
    new_passphrase_file: NewPassphraseOption = None,
) -> None:
    """Make a federation: keys, TLS certificates, root of trust, invitation."""
    from aggregator.setup import init_federation

    if licence is None:
        licence = ask(
            "Licence of the releases, for example CC-BY-4.0 or CC-BY-NC-SA-4.0", option="--licence"
        )
    settings = _settings(name, address, licence, max_influence)
    federation = Federation(fed)
    root = holders_from(root_holder, root_threshold, "--root-threshold")
    targets = holders_from(targets_holder, targets_threshold, "--targets-threshold")
    passphrase_file = choose_passphrase_file(passphrase_file, new_passphrase_file)
    # As an absolute path: later commands and the service may run in another folder.
    settings = settings.model_copy(update={"passphrase_file": remembered(passphrase_file)})
    secret = passphrase(
        passphrase_file, None, "New passphrase for the federation's keys", is_new=True
    )
    missing = init_federation(federation, settings, secret, root=root, targets=targets)
    if missing:
        say_missing(federation, missing)
    else:
        say_founded(federation, digests=digests)


def invite(
    fed: FederationArgument,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="New address at which silos reach this aggregator (default: the present one).",
        ),
    ] = None,
    digests: DigestsOption = False,
) -> None:
    """Print the codes of invitation and root; write the invitation again if address or licence have changed."""
    from aggregator.membership.invitation import read_own_invitation, renew_invitation

    federation = Federation(fed).require_owner()
    old_address = read_own_invitation(federation).address
    if address is not None:
        _split_address(address)
    has_changed = renew_invitation(federation, address)
    say_codes(federation, digests=digests)
    if not has_changed:
        return
    say("The invitation has changed, and its code with it. Earlier invitations have another code.")
    if address in (None, old_address):
        return
    say(f"To move from {old_address} to {address}:")
    say(f"  aggregator rotate {fed} tls     its certificate names the new host, and the old one")
    say(f"  aggregator run {fed}            stop it before, if it runs")
    say(
        "  silo join SITE --invitation ... at every silo, with its data, its new invitation and its code"
    )


def enroll(
    fed: FederationArgument,
    cards: Annotated[
        list[Path],
        typer.Argument(metavar="CARD...", help="Files from `silo join`, `enroll` or `rotate`."),
    ],
    code: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SILO=WORDS",
            help="Code of a silo's card, as its operator reads it out; repeatable.",
        ),
    ] = None,
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
    yes: Annotated[
        bool,
        typer.Option(
            "--yes", help="Print the codes instead of asking for them; they are compared later."
        ),
    ] = False,
    digests: DigestsOption = False,
) -> None:
    """Enroll silos or their new keys, and agree to their sizes; each operator reads out the code of the card."""
    from aggregator.membership.registry import (
        CardFile,
        check_agreed_size,
        check_card_code,
        enroll_silos,
        read_card_file,
        read_cards,
    )

    federation = Federation(fed).require_owner()
    # Every file is read before anybody is asked: an operator should not be on the telephone when one cannot be.
    received = [read_card_file(path) for path in cards]
    for card, _ in received:
        check_agreed_size(card, images, patients)
    codes = _codes_of_silos(code or [], [card.silo_id for card, _ in received])
    enrolled_cards = read_cards(federation)
    known = []
    to_compare = []
    for path, (card, rotated) in zip(cards, received, strict=True):
        enrolled_card = enrolled_cards.get(card.silo_id)
        silo_code = codes.get(card.silo_id)
        if enrolled_card is not None and rotated is not None:
            # Its old key, which is enrolled, signed the new one: nobody has to compare anything, but may.
            if silo_code is not None:
                check_card_code(card, silo_code)
            _take_rotation(federation, rotated)
        elif enrolled_card == card:
            # Without a code its digest stands for what was compared then. With one it is compared again: the card may
            # have been enrolled with --yes. All checks are made again, since the silo may have been removed meanwhile.
            if silo_code is None:
                silo_code = card.digest
            known.append(CardFile(path, silo_code))
        elif silo_code is not None or yes:
            known.append(CardFile(path, silo_code))
        else:
            to_compare.append((path, card))

    enrolled = enroll_silos(federation, known, images=images, patients=patients)
    for card_file, card in zip(known, enrolled, strict=True):
        if enrolled_cards.get(card.silo_id) == card:
            say(f"{card.silo_id} is enrolled with this card already, for at most {card.agreed}.")
        else:
            _say_enrolled(card, card_file.code)
    # One after the other: what was compared on the telephone counts, whatever comes of the next call.
    for path, card in to_compare:
        silo_code = _ask_code(card)
        enroll_silos(federation, [CardFile(path, silo_code)], images=images, patients=patients)
        _say_enrolled(card, silo_code)
    _say_late_silos(federation, [card.silo_id for card, _ in received])
    if digests:
        for card, _ in received:
            _say_digests(card)


def _say_late_silos(federation: Federation, silo_ids: list[str]) -> None:
    """Say what follows where a plan is in force that does not name all of these silos."""
    try:
        plan, _ = federation.current_plan()
    except ArchipelagoError:
        # None was signed yet, or none works: then the operator is not told of it by this command.
        return
    late_silos = [silo_id for silo_id in silo_ids if silo_id not in plan.silos]
    if not late_silos:
        return
    # The ServerApp at work does not read the cards again: it sends to the silos with which it was started.
    say(
        f"The plan in force, {plan.plan_id}, does not name {', '.join(late_silos)}. For a plan that does:"
    )
    say(f"  aggregator plan {federation.path} --recipe FILE --carry current")
    say(
        f"  aggregator run {federation.path}     stop it before, if it runs: until then they hear nothing"
    )


def _codes_of_silos(options: list[str], silo_ids: list[str]) -> dict[str, str]:
    """Read --code, by silo.

    Raises:
        SetupError: an option that is not SILO=WORDS, for another silo than those of the cards, or two for one silo; or
            two cards of one silo.
    """
    if len(set(silo_ids)) < len(silo_ids):
        raise SetupError(
            "cards",
            expected="one card of each silo",
            got=f"cards of {', '.join(sorted(silo_ids))}",
            remedy="Name the newest card of each silo alone.",
        )
    codes: dict[str, str] = {}
    for option in options:
        silo_id, equals, words = option.partition("=")
        if not equals or silo_id not in silo_ids or silo_id in codes:
            raise SetupError(
                "--code",
                expected=f"SILO=WORDS, once for each of {', '.join(silo_ids)}",
                got=ascii(option[:100]),
                remedy="Write the silo's name before the equals sign, such as --code "
                f"'{silo_ids[0]}=six words with blanks between them'.",
            )
        codes[silo_id] = words
    return codes


def _ask_code(card: "Card") -> str:
    """Ask for the code of a card."""
    from ddm.trust.comparison import parse_code

    say(f"{card.silo_id}: at most {card.agreed}, which bounds its share of the ensemble.")
    return ask(
        "  the six words that its operator reads out",
        option=f"--code '{card.silo_id}=WORDS'",
        parse=parse_code,
    )


def _say_enrolled(card: "Card", code: str | None) -> None:
    """Say that a silo was enrolled by its card; and the card's code, where nobody compared it yet."""
    from ddm.trust.comparison import CodeSubject, comparison_code

    say(
        f"Enrolled {card.silo_id} for at most {card.agreed}, which bounds its prior from the next plan on."
    )
    if code is None:
        say("  Compare with what its operator reads out, before you sign a plan:")
        say(f"  {comparison_code(card.digest, CodeSubject.CARD)}")


def _take_rotation(federation: Federation, rotated: "RotatedCard") -> None:
    """Take the new key of an enrolled silo."""
    from aggregator.keys.silo_rotation import take_rotation
    from aggregator.membership.registry import signing_key

    card = take_rotation(federation, rotated)
    fingerprint = signing_key(card).fingerprint
    say(f"The new key of {card.silo_id}, which its old key announced: {fingerprint}")
    say(
        f"Agreed size: at most {card.agreed}. Both are in force from the next plan on; a plan in progress keeps"
    )
    say("the old ones.")


def _say_digests(card: "Card") -> None:
    """Print the digests of a card and of the key that it names."""
    from aggregator.membership.registry import signing_key

    say(f"Digests of {card.silo_id}:")
    say(f"  card         {card.digest}")
    say(f"  signing key  {signing_key(card).fingerprint}")


def remove(
    fed: FederationArgument,
    silo_id: Annotated[str, typer.Argument(metavar="SILO", help="An enrolled silo.")],
    reason: Annotated[str, typer.Option(help="The reason; kept with its card, not published.")],
    passphrase_file: PassphraseOption = None,
) -> None:
    """Remove a silo from the federation: its submissions are refused, and later plans do not include it."""
    from aggregator.keys.removal import remove_silo

    federation = Federation(fed).require_owner()
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
    say(f"  aggregator withdraw {fed} {silo_id} --reason ..., then aggregator release")
    say("Versions published so far keep its experts: replace them where you serve them.")


def _settings(name: str, address: str, licence: str, max_influence: float) -> "FederationSettings":
    from pydantic import ValidationError

    from aggregator.config import FederationSettings

    host, port = _split_address(address)
    try:
        return FederationSettings(
            name=name,
            host=host,
            port=port,
            licence=licence,
            max_influence=max_influence,
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


def _split_address(address: str) -> tuple[str, int]:
    """Split --address into host and port.

    Raises:
        SetupError: it is not HOST:PORT.
    """
    try:
        return split_address(address)
    except ValueError as error:
        raise SetupError(
            "--address",
            expected="HOST:PORT: a name or an IPv4 address, and a port from 1 to 65535",
            got=f"{ascii(address[:100])}: {error}",
            remedy="For example 127.0.0.1:9092 on this machine alone, or aggregator.example.org:9092.",
        ) from error
