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
            metavar="DIR", help="Another public copy to bring up to date, for a web server."
        ),
    ] = None,
    cosigned: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The last checkpoint as witnesses cosigned it; keeps theirs."
        ),
    ] = None,
    passphrase_file: PassphraseOption = None,
) -> None:
    """Sign what waits in the transparency log, ask its witnesses to cosign, and write its public form."""
    from ddm.publishing.keys import load_key
    from ddm.publishing.public_log import add_cosignatures, export_log, public_folder, sign_waiting
    from ddm.publishing.witnesses import ask_witnesses

    federation = Federation(fed).require()
    witnesses = witnesses_of(federation)
    if cosigned is not None:
        say(f"Added {add_cosignatures(federation, cosigned)} signatures to the checkpoint.")
    else:
        sign_waiting(
            federation,
            load_key(federation, "log", federation_passphrase(federation, passphrase_file)),
        )
    asked = ask_witnesses(federation, witnesses)
    folder = public_folder(federation)
    if out is not None:
        export_log(federation, out)
        folder = out
    say(f"The public log is in {folder}; serve it as static files.")
    say(f"Anybody: ddm log {folder} --root {federation.tuf / '1.root.json'}")
    say_witnessed(asked)
    if problems := [each.problem for each in asked if each.problem]:
        raise problems[0]


def witnesses_of(federation: Federation) -> "list[Witness]":
    """Return the witnesses that federation.toml names.

    Raises:
        SetupError, DocumentError: a key is not one of a witness.
    """
    from ddm.publishing.witnesses import Witness
    from ddm.trust.log.note import VerifierKey

    return [
        Witness(each.url, VerifierKey.parse(each.key)) for each in federation.settings().witnesses
    ]


def say_witnessed(asked: "Sequence[WitnessAnswer]") -> None:
    """Say which witnesses cosigned the last checkpoint, and why others did not."""
    if cosigned := [each.name for each in asked if each.problem is None]:
        say(f"Cosigned by {', '.join(cosigned)}.")
    for each in asked:
        if each.problem:
            say(f"note: witness {each.name} did not cosign: {each.problem.got}", error=True)
