"""The options by which a reader demands cosignatures of witnesses of the federation's log."""

from typing import TYPE_CHECKING, Annotated

import typer

from ddm.cli.options import TRUST
from ddm.errors import SetupError

if TYPE_CHECKING:
    from ddm.trust.log.witness import Witnesses

WitnessOption = Annotated[
    list[str] | None,
    typer.Option(
        "--witness",
        metavar="VKEY",
        help="Key of a witness that must have cosigned; repeatable.",
        rich_help_panel=TRUST,
    ),
]
QuorumOption = Annotated[
    int | None,
    typer.Option(
        "--quorum",
        min=1,
        help="Number of witnesses that must have cosigned (default: all).",
        rich_help_panel=TRUST,
    ),
]


def read_witnesses(keys: list[str] | None, quorum: int | None) -> "Witnesses | None":
    """Read the options --witness and --quorum; None where no witness is named.

    Raises:
        DocumentError: a key is not a witness's verifier key.
        SetupError: a quorum that these witnesses cannot reach.
    """
    from ddm.trust.log.note import VerifierKey
    from ddm.trust.log.witness import Witnesses

    parsed = tuple(VerifierKey.parse(text) for text in keys or [])
    # One key given twice must not count as two witnesses.
    num_distinct = len({key.public.raw for key in parsed})
    # A quorum without witnesses would be reached by every release.
    if quorum is not None and not parsed:
        raise SetupError(
            "--quorum", expected="--witness as well", got=f"--quorum {quorum} without a witness"
        )
    if quorum is not None and quorum > num_distinct:
        raise SetupError(
            "--quorum",
            expected=f"at most {num_distinct}, the number of --witness keys",
            got=str(quorum),
        )
    if not parsed:
        return None
    return Witnesses(parsed, quorum)
