"""Commands that make a site and its keys: `silo init`, `enroll`, `rotate`."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddm.errors import SetupError
from ddm.io.files import write_atomic
from ddm.io.modes import open_to_everyone
from ddm.system.console import (
    DigestsOption,
    NewPassphraseOption,
    choose_passphrase_file,
    passphrase,
    say,
)
from silo.commands.options import (
    ColumnOption,
    OutsideOption,
    PassphraseOption,
    SiteArgument,
    open_key,
    site_passphrase,
)
from silo.config import LedgerSettings, Site

if TYPE_CHECKING:
    from ddm.trust.keys import SigningKey
    from silo.data.first_look import FirstLook

LedgerOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        file_okay=False,
        help="Privacy ledger that all sites over the same people share.",
    ),
]
AnchorOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        dir_okay=False,
        help="File on another disk that keeps the ledger's head, against rollback.",
    ),
]


def init(
    site: SiteArgument,
    silo_id: Annotated[
        str, typer.Option("--id", help="This silo's name: a letter a-z, then a-z and 0-9.")
    ],
    data: Annotated[
        Path,
        typer.Option(
            help="Private images: a folder of any depth, a table of paths, or a file of many images."
        ),
    ],
    invitation: Annotated[Path, typer.Option(help="invitation.json from the aggregator.")],
    code: Annotated[
        str,
        typer.Option(
            metavar="WORDS",
            help="Code of the invitation, or its sha256, as the aggregator's operator reads it out.",
        ),
    ],
    column: ColumnOption = None,
    outside: OutsideOption = False,
    passphrase_file: PassphraseOption = None,
    new_passphrase_file: NewPassphraseOption = None,
    ledger: LedgerOption = None,
    anchor: AnchorOption = None,
) -> None:
    """Make a site: its folders, keys, configuration and pinned root."""
    from silo.images.command import files_progress, images_settings
    from silo.setup import SiteSetup, first_look, init_site, new_source, read_invitation

    # A forged invitation is refused before anything is made or scanned.
    invited = read_invitation(invitation, code)
    images = images_settings(column or [], outside=outside)
    new_site = Site(site)
    silo_id = checked_id(silo_id)
    source = new_source(new_site, data, images)
    # Images that no plan could use are shown before any key is made.
    with files_progress(source) as advance:
        look = first_look(new_site, source, advance)
    say_first_look(look, new_site)
    # Asked for after the look at the images, which may take long and may end in an error.
    passphrase_file = choose_passphrase_file(passphrase_file, new_passphrase_file)
    secret = passphrase(passphrase_file, None, "New passphrase for the silo's key", is_new=True)
    setup = SiteSetup(
        silo_id,
        data,
        passphrase_file,
        images,
        # Sites over the same people share a ledger, since what each of them spends adds up for a person
        # (docs/adr/0050).
        LedgerSettings(folder=absolute(ledger), anchor=absolute(anchor)),
    )
    # The images were looked at above, and are not read a second time.
    key = init_site(new_site, setup, invited, secret, looked=True)
    say_site(new_site, key, digests=True)
    say(f"Look through {site / 'policy.toml'}, then: silo enroll {site} --out card.json")


def enroll(
    site: SiteArgument,
    out: Annotated[Path, typer.Option(dir_okay=False, help="Where to write the card.")],
    images: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Largest number of images for a plan (default: those there are, rounded up to a power of two).",
        ),
    ] = None,
    patients: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Largest number of patients for a plan (default: counted where policy.toml protects patients).",
        ),
    ] = None,
    digests: DigestsOption = False,
    passphrase_file: PassphraseOption = None,
) -> None:
    """Write the enrolment card for the aggregator: public keys, and the largest number of images of this site."""
    from silo.images.command import files_progress
    from silo.images.report import unused_parts_text
    from silo.images.source import ImageSource
    from silo.setup import make_card

    opened_site = Site(site).require_owner()
    # The card is sealed with this key, so that nobody can enrol a key without having it.
    key = open_key(opened_site, passphrase_file)
    unused_parts = Counter[str]()
    with files_progress(ImageSource.of_site(opened_site)) as advance:
        card = make_card(
            opened_site,
            key,
            images=images,
            patients=patients,
            advance=advance,
            on_count=lambda counts: unused_parts.update(counts.unused_parts),
        )
    if unused_parts:
        say(unused_parts_text(unused_parts))
    write_card(opened_site, card, out)
    say_card(opened_site, out, digests=digests)


def rotate(
    site: SiteArgument,
    out: Annotated[Path, typer.Option(dir_okay=False, help="Where to write the new card.")],
    passphrase_file: PassphraseOption = None,
) -> None:
    """Replace the signing key between two plans; the old key announces the new one to aggregator and readers."""
    from ddm.trust.keys import SigningKey
    from silo.setup import make_card
    from silo.worker.rotation import rotate_key

    opened_site = Site(site).require_owner()
    # One passphrase for both keys: it opens the old one, and encrypts the new one.
    secret = site_passphrase(opened_site, passphrase_file)
    old_key = SigningKey.load(opened_site.key_path, secret)
    key = rotate_key(opened_site, old_key, secret)
    # The card is sealed with the new key, as proof that the site has it; the rotations beside it are sealed by both.
    card = make_card(opened_site, key)
    write_card(opened_site, card, out)
    say(f"Rotated. The new signing key: {key.public.fingerprint}")
    say(
        f"Give {out} to the aggregator, for `aggregator enroll`. It is in force from the next plan on."
    )


def say_first_look(look: "FirstLook", site: Site) -> None:
    """Say what the images of a new site are, and which plans can use them."""
    from silo.images.command import show

    if look.num_adopted:
        say(
            f"Copied: decisions about {look.num_adopted} images of these data, made before the site existed.\n"
        )
    if look.summary:
        show(look.summary, site)
        problems = "; ".join(str(problem) for problem in look.problems)
        if problems:
            say(f"\nOnly plans with a table [transform] can use these data: {problems}.\n")
        else:
            say("\nOnly plans with a table [transform] and plans of volumes can use these data.\n")
    for remark in look.remarks:
        say(f"- {remark}")


def say_site(site: Site, key: "SigningKey", *, digests: bool) -> None:
    """Say what was made of a site."""
    settings = site.settings()
    say(
        f"Site {settings.silo_id} in {site.path}, for federation {settings.federation} at {settings.address}."
    )
    if digests:
        say(f"  signing key   {key.public.fingerprint}")
        say(f"  root          {settings.root_digest}")
    say(f"  isolation     {site.isolation}{_isolation_advice(site)}")
    anchor_advice = ""
    if settings.ledger.anchor is None:
        anchor_advice = ", without an anchor: docs/how-to/run-a-silo.md"
    say(f"  ledger        {site.ledger_path}{anchor_advice}")


def write_card(site: Site, card: bytes, path: Path) -> None:
    """Write a card with all changes of the site's key, so that an aggregator that missed one can follow the chain."""
    from silo.setup import with_rotations
    from silo.worker.rotation import published_rotations

    write_atomic(path, with_rotations(card, published_rotations(site)))
    # Nothing in it is secret, and anybody who carries it to the aggregator may be another user.
    open_to_everyone(path)


def say_card(site: Site, path: Path, *, digests: bool) -> None:
    """Say where a site's card is, what it states, and the code that its operator reads out."""
    from ddm.trust.comparison import CodeSubject, comparison_code
    from ddm.trust.keys import PublicKey

    card = site.card()
    say(
        f"Card in {path}, for at most {card.agreed}; every silo and every reader of a release sees this number."
    )
    # Anybody who carries the card to the aggregator could replace it: hence the second channel.
    say("Give it to the aggregator's operator, and read these words to them on the telephone:")
    say(f"  {comparison_code(card.digest, CodeSubject.CARD)}")
    if digests:
        say(f"  card         {card.digest}")
        say(f"  signing key  {PublicKey.parse(card.signing_key).fingerprint}")


def absolute(path: Path | None) -> str | None:
    """Return a path as silo.toml keeps it: a later command or a service may run in another folder."""
    if path is None:
        return None
    return str(path.resolve())


def checked_id(silo_id: str) -> str:
    """Return a silo's name if it is one.

    Raises:
        SetupError: it is not.
    """
    import re

    from ddm.protocol.base import SILO_ID_PATTERN

    if not re.fullmatch(SILO_ID_PATTERN, silo_id):
        remedy = "Choose a name of this form; the aggregator and all readers see it."
        expected = "a letter a-z, then up to 31 of a-z and 0-9"
        raise SetupError("--id", expected=expected, got=repr(silo_id[:40]), remedy=remedy)
    return silo_id


def _isolation_advice(site: Site) -> str:
    if site.isolation != "none":
        return ""
    return (
        " (only two users, one for the worker and one for the "
        "courier, enforce the boundary: docs/how-to/install.md)"
    )
