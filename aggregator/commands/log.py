"""The command `aggregator log`: signs what waits in the federation's log, and writes its public form."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aggregator.commands.options import FederationArgument, PassphraseOption, federation_passphrase
from aggregator.config import Federation
from ddm.system.console import say

if TYPE_CHECKING:
    from ddm.publishing.witnesses import Witness, WitnessAnswer


def log(
    fed: FederationArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Also update a public copy in this folder, for a web server."
        ),
    ] = None,
    cosigned: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The last checkpoint with cosignatures of witnesses, which are added to the log.",
        ),
    ] = None,
    passphrase_file: PassphraseOption = None,
) -> None:
    """Sign new entries of the transparency log, ask its witnesses to cosign, and write its public files."""
    from ddm.publishing.keys import load_key
    from ddm.publishing.public_log import add_cosignatures, export_log, public_folder, sign_waiting
    from ddm.publishing.witnesses import ask_witnesses

    federation = Federation(fed).require_owner()
    # A key that is not a witness's is refused before anything is signed.
    witnesses = witnesses_of(federation)
    # A cosigned copy is of the last checkpoint. Signing what waits would make a newer one, and the copy useless.
    if cosigned is not None:
        num_added = add_cosignatures(federation, cosigned)
        say(f"Added {num_added} signatures to the checkpoint.")
    else:
        secret = federation_passphrase(federation, passphrase_file)
        sign_waiting(federation, load_key(federation, "log", secret))
    # Before the public copy is written, so that it has the cosignatures.
    answers = ask_witnesses(federation, witnesses)
    folder = public_folder(federation)
    if out is not None:
        export_log(federation, out, for_everyone=True)
        folder = out
    say(f"The public log is in {folder}; serve it as static files.")
    say(f"Anybody: ddm log {folder} --root {federation.tuf / '1.root.json'}")
    say_witnessed(answers)
    # The log is written by now; the exit code still says that a witness is missing.
    for answer in answers:
        if answer.problem:
            raise answer.problem


def witnesses_of(federation: Federation) -> "list[Witness]":
    """Return the witnesses that federation.toml names.

    Raises:
        SetupError, DocumentError: a key is not a witness's.
    """
    from ddm.publishing.witnesses import Witness
    from ddm.trust.log.note import VerifierKey

    return [
        Witness(witness.url, VerifierKey.parse(witness.key))
        for witness in federation.settings().witnesses
    ]


def say_witnessed(answers: "Sequence[WitnessAnswer]") -> None:
    """Say which witnesses cosigned the last checkpoint, and why others did not."""
    cosigners = [answer.name for answer in answers if answer.problem is None]
    if cosigners:
        say(f"Cosigned by {', '.join(cosigners)}.")
    for answer in answers:
        if answer.problem:
            say(f"note: witness {answer.name} did not cosign: {answer.problem.got}", error=True)
