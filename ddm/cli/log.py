"""The command `ddm log`: checks a whole copy of a federation's log, and compares checkpoints with it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddm.cli.options import CheckpointOption, RootOption, StateOption
from ddm.cli.witnesses import QuorumOption, WitnessOption, read_witnesses
from ddm.system.console import say

if TYPE_CHECKING:
    from ddm.trust.log.entries import LogEntry


def log(
    folder: Annotated[
        Path, typer.Argument(metavar="LOG", help="A copy of the federation's public log.")
    ],
    root: RootOption,
    state: StateOption = None,
    checkpoint: CheckpointOption = None,
    witness: WitnessOption = None,
    quorum: QuorumOption = None,
) -> None:
    """Check a whole log, compare checkpoints with it, and list its entries."""
    from ddm.io.files import read_bounded, require_folder
    from ddm.loading.public_log import read_public_log
    from ddm.loading.release import read_root
    from ddm.trust.log.proof import MAX_PROOF_BYTES
    from ddm.trust.state_folder import default_state_folder

    witnesses = read_witnesses(witness, quorum)
    public_log = read_public_log(
        require_folder(folder, "a folder"), read_root(root), state or default_state_folder()
    )
    for path in checkpoint or []:
        public_log.compare(read_bounded(path, MAX_PROOF_BYTES), path.name)
    # Only cosignatures on the log's own checkpoint count; those that are passed with --checkpoint are compared.
    times = witnesses.check([public_log.signed]) if witnesses else {}
    signed = public_log.signed
    say(f"Log {signed.checkpoint.origin}: {signed.size} entries, root hash {signed.root.hex()}")
    for path in checkpoint or []:
        say(f"  checkpoint {path} is of the same history")
    for name, when in times.items():
        say(f"  cosigned by {name} at {when.isoformat()}")
    for number, entry in enumerate(public_log.entries):
        say(f"{number:>6}  {describe_entry(entry)}")


def describe_entry(entry: "LogEntry") -> str:
    """Return an entry on one line: its kind, then its fields in full."""
    fields = entry.model_dump(mode="json", exclude={"kind"})
    words: list[str] = [entry.kind]
    for name, value in fields.items():
        if isinstance(value, list):
            value = ",".join(value)
        words.append(f"{name}={value}")
    return " ".join(words)
