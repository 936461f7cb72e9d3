"""The command `silo join`: scan, init and enrol in one conversation, which the same command takes up again."""

import os
import sys
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddm.errors import BusyError, DataError, SetupError
from ddm.io.files import require_file
from ddm.io.settings import load_settings
from ddm.system.console import (
    DigestsOption,
    NewPassphraseOption,
    ask,
    choose_passphrase_file,
    confirm,
    passphrase,
    say,
    table,
)
from silo.commands.options import ColumnOption, OutsideOption, PassphraseOption, open_key
from silo.commands.setup import (
    AnchorOption,
    LedgerOption,
    absolute,
    checked_id,
    say_card,
    say_first_look,
    say_site,
    write_card,
)
from silo.config import LedgerSettings, Policy, Site

if TYPE_CHECKING:
    from ddm.protocol.enrolment import Invitation
    from ddm.trust.keys import SigningKey
    from silo.data.first_look import UnitCounts
    from silo.images.source import ImageSource
    from silo.outlook import Machine


class UnitName(StrEnum):
    """Whom a site protects."""

    IMAGE = "image"
    PATIENT = "patient"


@dataclass(frozen=True)
class JoinOptions:
    """What a person decides about a site by options; see the command for each.

    Attributes:
        data: the images.
        columns: names of a table's columns, each NAME=COLUMN.
        outside: whether links and paths may lead out of the data folder.
        silo_id: the silo's name; None where nobody said.
        policy_file: the policy to begin with.
        unit: whom to protect; None where nobody said.
        images: most images on the card.
        patients: most patients on the card.
        ledger: where the privacy ledger is.
        passphrase_file: the file with the passphrase of the key.
        new_passphrase_file: to make, in its place.
        yes: whether to continue without asking.
    """

    data: Path
    columns: tuple[str, ...]
    outside: bool
    silo_id: str | None
    policy_file: Path | None
    unit: UnitName | None
    images: int | None
    patients: int | None
    ledger: LedgerSettings
    passphrase_file: Path | None
    new_passphrase_file: Path | None
    yes: bool


def join(
    site: Annotated[
        Path,
        typer.Argument(
            metavar="SITE",
            file_okay=False,
            help="The site's folder; it is made if it does not exist.",
        ),
    ],
    invitation: Annotated[Path, typer.Option(help="invitation.json from the aggregator.")],
    data: Annotated[
        Path,
        typer.Option(
            help="Private images: a folder of any depth, a table of paths, or a file of many images."
        ),
    ],
    code: Annotated[
        str | None,
        typer.Option(
            metavar="WORDS",
            help="Code of the invitation, or its sha256, as the aggregator's operator reads it out.",
        ),
    ] = None,
    silo_id: Annotated[
        str | None,
        typer.Option("--id", help="This silo's name (default: that of the site's folder)."),
    ] = None,
    column: ColumnOption = None,
    outside: OutsideOption = False,
    policy: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", dir_okay=False, help="A policy.toml to begin with (default: strict)."
        ),
    ] = None,
    unit: Annotated[
        UnitName | None,
        typer.Option(
            help="Unit to protect: patient, or image if every image is of a different person."
        ),
    ] = None,
    images: Annotated[
        int | None,
        typer.Option(
            min=2, help="Largest number of images for a plan (default: as `silo enroll`)."
        ),
    ] = None,
    patients: Annotated[
        int | None,
        typer.Option(
            min=2, help="Largest number of patients for a plan (default: as `silo enroll`)."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, help="Where to write the card (default: ID.card.json beside SITE)."
        ),
    ] = None,
    ledger: LedgerOption = None,
    anchor: AnchorOption = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask for confirmation, nor for the silo's name.")
    ] = False,
    digests: DigestsOption = False,
    passphrase_file: PassphraseOption = None,
    new_passphrase_file: NewPassphraseOption = None,
) -> None:
    """Join a federation: examine the images, make the site, write its card; the same command resumes it."""
    from silo.setup import read_invitation, renew_address

    options = JoinOptions(
        data=data,
        columns=tuple(column or ()),
        outside=outside,
        silo_id=silo_id,
        policy_file=policy,
        unit=unit,
        images=images,
        patients=patients,
        ledger=LedgerSettings(folder=absolute(ledger), anchor=absolute(anchor)),
        passphrase_file=passphrase_file,
        new_passphrase_file=new_passphrase_file,
        yes=yes,
    )
    # A forged invitation is refused before anything is made or scanned.
    if code is None:
        code = _ask_code(invitation)
    invited = read_invitation(invitation, code)
    joined_site = Site(site)
    if (site / "silo.toml").exists():
        _check_same_site(joined_site, invited, options)
        if renew_address(joined_site, invited):
            # Its card says nothing about the address: nobody needs a new one.
            say(f"{site} reaches its federation at {invited.address} from now on: silo run {site}.")
            return
        # Not before: root renews the address of a site that belongs to the worker's user.
        joined_site.require_own_path()
        say(
            f"{site} is a site of this federation already. It is completed; its key and policy.toml stay."
        )
        key = open_key(joined_site, passphrase_file or new_passphrase_file)
    else:
        key = _make_site(joined_site, invited, options)
        say_site(joined_site, key, digests=digests)
    card_path = out or site.parent / f"{joined_site.settings().silo_id}.card.json"
    _write_card(joined_site, key, options, card_path)
    say_card(joined_site, card_path, digests=digests)
    say(f"Then: silo run {site}, which waits for the plan.")


def _ask_code(invitation: Path) -> str:
    """Ask for the code of the invitation, once there is one to compare with it."""
    from ddm.trust.comparison import parse_code

    require_file(invitation, "the aggregator's invitation.json")
    return ask(
        "Code of the invitation, six words that the aggregator's operator reads out",
        option="--code WORDS",
        parse=parse_code,
    )


def _check_same_site(site: Site, invited: "Invitation", options: JoinOptions) -> None:
    """Refuse a folder that is another site than the one that this command makes.

    Raises:
        BusyError: the site has another name, other images or another federation.
        SetupError: its policy protects another unit, or its settings do not allow what --outside would.
    """
    settings = site.settings()
    is_same = (
        settings.root_digest == invited.root_digest
        and Path(settings.data) == options.data.resolve()
        and options.silo_id in (None, settings.silo_id)
    )
    if not is_same:
        raise BusyError(
            str(site.path),
            expected="no site yet, or the one that this command has begun",
            got=f"the site {settings.silo_id} of federation {settings.federation}, with other images, name or root",
            remedy="Choose another folder for a new site; or give --id, --data and --invitation of this one.",
        )
    if options.outside and not settings.images.outside:
        raise SetupError(
            "--outside",
            expected="outside = true under [images], as silo.toml of this site would say",
            got="outside = false",
            remedy="Set it in silo.toml of this site, then give the command again.",
        )
    unit = site.policy().privacy.unit
    if options.unit not in (None, unit):
        raise SetupError(
            "--unit",
            expected=f"{unit}, as policy.toml of this site says",
            got=f"{options.unit}",
            remedy="Change unit under [privacy] in policy.toml, then give the command again without --unit: it makes a "
            "new card.",
        )


def _make_site(site: Site, invited: "Invitation", options: JoinOptions) -> "SigningKey":
    """Examine the images, say what will matter later, then make the site; return its key."""
    from silo.images.command import files_progress, images_settings
    from silo.outlook import outlook
    from silo.setup import SiteSetup, declare_data, first_look, init_site, new_source

    silo_id = _choose_id(site, options)
    policy = _policy_to_begin_with(site, options)
    images = images_settings(list(options.columns), outside=options.outside)
    source = replace(
        new_source(site, options.data, images),
        parts=policy.data.parts,
        patient_rule=policy.data.patients,
        declared_range=policy.data.range,
    )
    with files_progress(source) as advance:
        look = first_look(site, source, advance)
    say_first_look(look, site)

    policy = declare_data(policy, source)
    policy, counts = _settle_unit(policy, source, options)
    if not policy.approval.licences:
        # So that a later plan cannot publish under another licence than the one that the operator sees now.
        approval = policy.approval.model_copy(update={"licences": (invited.licence,)})
        policy = policy.model_copy(update={"approval": approval})
    say("\nWhat will matter later:")
    rows = list(outlook(counts, policy, invited.licence, _machine()))
    say(table(rows, ("subject", "at this site")))
    if not options.yes:
        confirm(
            f"\nJoin the federation {invited.federation} as {silo_id}?",
            refused="No site was made. What the scan found is remembered for the next time.",
        )

    # Asked for after the look at the images, which may take long and may end in an error.
    secret_file = choose_passphrase_file(options.passphrase_file, options.new_passphrase_file)
    secret = passphrase(secret_file, None, "New passphrase for the silo's key", is_new=True)
    setup = SiteSetup(silo_id, options.data, secret_file, images, options.ledger, policy)
    # The images were looked at above, and are not read a second time.
    return init_site(site, setup, invited, secret, looked=True)


def _choose_id(site: Site, options: JoinOptions) -> str:
    """Return the silo's name: as given, else that of the folder, unless a person types another one."""
    if options.silo_id is not None:
        return checked_id(options.silo_id)
    folder_name = site.path.resolve().name
    if options.yes or not sys.stdin.isatty():
        return checked_id(folder_name)
    return ask(
        "This silo's name, which every reader of a release sees",
        option="--id",
        parse=checked_id,
        default=folder_name,
    )


def _policy_to_begin_with(site: Site, options: JoinOptions) -> Policy:
    """Return the policy that a person named, else one that is in the folder already, else the default."""
    if options.policy_file is not None:
        return load_settings(Policy, options.policy_file)
    if (site.path / "policy.toml").exists():
        return site.policy()
    return Policy()


def _settle_unit(
    policy: Policy, source: "ImageSource", options: JoinOptions
) -> "tuple[Policy, UnitCounts]":
    """Decide whom the site protects, and count its units.

    Raises:
        DataError: patients are protected, and not known of all images.
    """
    from silo.data.first_look import count_units
    from silo.images.command import files_progress
    from silo.setup import lacks_patients

    unit = policy.privacy.unit
    if options.unit is not None:
        unit = options.unit.value
    with files_progress(source) as advance:
        try:
            counts = count_units(source, patients=unit == "patient", advance=advance)
        except DataError as error:
            if not lacks_patients(error):
                raise
            if options.unit is not None or not sys.stdin.isatty():
                error.remedy = (
                    "Give every image its patient, for example with --column patient=COLUMN. Or, if every image is "
                    "of another person and the plans of this federation protect images: --unit image."
                )
                raise
            # Only a person knows it: two images of one patient, counted as two, would halve what protects them.
            say(f"{error}.")
            confirm(
                "Is every image of another person?",
                refused="Give every image its patient, for example with --column patient=COLUMN.",
            )
            unit = "image"
            counts = count_units(source, patients=False, advance=advance)
    privacy = policy.privacy.model_copy(update={"unit": unit})
    return policy.model_copy(update={"privacy": privacy}), counts


def _machine() -> "Machine":
    """Measure what this machine trains with."""
    import torch

    from ddm.system.speed import matrix_product_rate
    from silo.outlook import Machine

    num_gpus = 0
    if torch.cuda.is_available():
        num_gpus = torch.cuda.device_count()
    return Machine(num_gpus, len(os.sched_getaffinity(0)), matrix_product_rate())


def _write_card(site: Site, key: "SigningKey", options: JoinOptions, path: Path) -> None:
    """Write the card; where the last one still says the same, that one, whose code may have been read out already."""
    from silo.images.command import files_progress
    from silo.images.source import ImageSource
    from silo.setup import is_card_current, make_card, sealed_card

    if is_card_current(site, options.images, options.patients):
        card = sealed_card(site, key)
    else:
        with files_progress(ImageSource.of_site(site)) as advance:
            card = make_card(
                site, key, images=options.images, patients=options.patients, advance=advance
            )
    write_card(site, card, path)
