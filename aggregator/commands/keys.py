"""The commands about keys: `aggregator holder`, `sign`, `complete` and `rotate`."""

from pathlib import Path
from typing import Annotated

import typer

from aggregator.commands.options import (
    FederationArgument,
    PassphraseOption,
    federation_passphrase,
    holders_from,
)
from aggregator.config import Federation
from ddm.errors import SetupError
from ddm.system.console import confirm, passphrase, say

HolderPassphraseOption = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file",
        metavar="FILE",
        help="File whose first line is the passphrase of the holder's key.",
    ),
]


def holder(
    key_file: Annotated[Path, typer.Argument(metavar="KEYFILE", help="The private key to make.")],
    passphrase_file: HolderPassphraseOption = None,
) -> None:
    """Make a holder's key on the holder's own machine; only the `.pub` file leaves it."""
    from ddm.trust.keys import SigningKey

    # Before a key is made: one that is overwritten is lost, and with it perhaps the federation's root.
    public_file = key_file.with_suffix(".pub")
    got = None
    if public_file == key_file:
        got = "the name of the private key itself"
    elif public_file.exists():
        got = "a file that is there already"
    if got is not None:
        raise SetupError(
            str(public_file),
            expected="a new file for the public key",
            got=got,
            remedy="Choose a name for the key that does not end in .pub, and that no key has yet.",
        )
    key = SigningKey.generate()
    secret = passphrase(passphrase_file, None, "New passphrase for this key", is_new=True)
    key.save(key_file, secret)
    key.public.save(public_file)
    say(f"Made {key_file}; it stays here. Give {public_file} to the federation's operator.")
    say(f"  fingerprint  {key.public.fingerprint}")


def sign(
    document: Annotated[
        Path,
        typer.Argument(
            metavar="DOCUMENT", help="A document from the federation's folder ceremony/."
        ),
    ],
    key: Annotated[Path, typer.Option(metavar="KEYFILE", help="This holder's private key.")],
    yes: Annotated[
        bool, typer.Option("--yes", help="Sign without asking for confirmation.")
    ] = False,
    passphrase_file: HolderPassphraseOption = None,
) -> None:
    """Show the meaning of a document and sign it as one of its holders; needs only this file, no federation."""
    from aggregator.keys.ceremony import read_request, sign_document
    from ddm.trust.ceremony import describe_request
    from ddm.trust.keys import SigningKey

    # A holder signs what the document says, not what the operator told them: so its meaning comes from the file alone.
    say(describe_request(read_request(document)))
    if not yes:
        confirm("Sign this?", refused="Not signed.")
    # The holder has read by now what is signed, and may still stop here.
    secret = passphrase(passphrase_file, None, f"Passphrase of {key.name}")
    signature_file = sign_document(document, SigningKey.load(key, secret))
    say(
        f"Signed: {signature_file}. Put it beside the document in the federation's ceremony/, "
        "then: aggregator complete FED"
    )


def complete(
    fed: FederationArgument,
    abandon: Annotated[
        bool, typer.Option("--abandon", help="Discard the waiting change instead.")
    ] = False,
    passphrase_file: PassphraseOption = None,
) -> None:
    """Put a change into force once its holders have signed it."""
    from aggregator.keys.ceremony import abandon_change, complete_change

    federation = Federation(fed).require_owner()
    if abandon:
        say(f"Discarded: {abandon_change(federation)}.")
        return
    secret = federation_passphrase(federation, passphrase_file)
    # Holders sign `root` and `targets` alone; the federation's own keys sign the rest of the change (docs/adr/0012).
    change = complete_change(federation, secret)
    say(f"In force: {change.purpose}.")
    if change.act == "found":
        say_founded(federation)


def rotate(
    fed: FederationArgument,
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="Name of the key; docs/how-to/keys.md lists them.")
    ],
    holder: Annotated[
        list[Path] | None,
        typer.Option(metavar="PUB", help="Public key of a new holder; repeatable."),
    ] = None,
    threshold: Annotated[int, typer.Option(min=1, help="How many of these holders must sign.")] = 1,
    passphrase_file: PassphraseOption = None,
) -> None:
    """Replace a key with a new one."""
    from aggregator.keys.rotation import parse_key_name, rotate_key

    # A typing error shows before a passphrase is asked for.
    name = parse_key_name(key)
    federation = Federation(fed).require_owner()
    holders = holders_from(holder, threshold, "--threshold")
    secret = federation_passphrase(federation, passphrase_file)
    missing = rotate_key(federation, name, secret, holders)
    # Holders keep their keys elsewhere: the change waits in ceremony/ and nothing of it is in force.
    if missing:
        say_missing(federation, missing)
        return
    say(f"Rotated {name}. {_NEXT_STEPS[name]}")


_PUBLISHED = "Releases published so far verify as before; publish again, so that readers learn of the new key."
_NEXT_STEPS = {
    "root": _PUBLISHED,
    "targets": _PUBLISHED,
    "plans": _PUBLISHED,
    "release": _PUBLISHED,
    "online": _PUBLISHED,
    "log": _PUBLISHED,
    "receipts": "The plan in progress keeps its key; the next plan names the new one.",
    "model-signing": "Give researchers model-signing.pub.pem; the old key stays beside it for older releases.",
    "tls": "Restart `aggregator run`; silos need nothing, since the authority has not changed.",
}


def say_missing(federation: Federation, missing: list[str]) -> None:
    """Say whose signatures a change waits for, and what to do next."""
    say(f"Waits for signatures, in {federation.path / 'ceremony'}:")
    for line in missing:
        say(f"  {line}")
    say("Take each document to its holders: aggregator sign DOCUMENT --key KEYFILE")
    say(f"Put their .sig files beside it, then: aggregator complete {federation.path}")


def say_founded(federation: Federation, *, digests: bool = False) -> None:
    """Say what silos and researchers need of a new federation."""
    say(f"Federation {federation.settings().name} in {federation.path}.")
    say_codes(federation, digests=digests)


def say_codes(federation: Federation, *, digests: bool = False) -> None:
    """Say which file silos need and which one readers of releases, each with the code that its receiver compares."""
    from aggregator.membership.invitation import INVITATION_NAME, read_own_invitation
    from ddm.protocol.base import sha256_file
    from ddm.trust.comparison import CodeSubject, comparison_code

    invitation_digest = read_own_invitation(federation).digest
    root = federation.tuf / "1.root.json"
    root_digest = sha256_file(root)
    # Anybody who can exchange a file on its way can exchange a digest beside it: hence the second channel.
    say(
        f"For every silo: {federation.path / INVITATION_NAME}. Read its code to the operator on the"
    )
    say("telephone, or send it by letter:")
    say(f"  code of the invitation  {comparison_code(invitation_digest, CodeSubject.INVITATION)}")
    if digests:
        say(f"  its sha256              {invitation_digest}")
    say(f"For readers of releases: {root}, and its code, which `ddm verify` prints:")
    say(f"  code of the root        {comparison_code(root_digest, CodeSubject.ROOT)}")
    if digests:
        say(f"  its sha256              {root_digest}")
