"""The program `silo`: every command of a site's operator, in the order of the work."""

from ddm.io.modes import keep_private
from ddm.system.console import ResumableCommand, new_program, run_app
from ddm.system.secrecy import forbid_core_dumps
from silo.commands.care import check, ledger, log
from silo.commands.images import scan
from silo.commands.join import join
from silo.commands.service import service
from silo.commands.setup import enroll, init, rotate
from silo.commands.work import (
    accept,
    approve,
    pause,
    resume,
    retrain,
    review,
    run,
    status,
    waive,
    withdraw,
)

COMMANDS = {
    "Site and images": (join, init, scan, enroll, rotate),
    "From plan to receipt": (
        run,
        accept,
        status,
        pause,
        resume,
        review,
        waive,
        approve,
        retrain,
        withdraw,
    ),
    "Looking after it": (check, service),
}

app = new_program(
    "Train an expert on private images, which never leave; see, limit and refuse everything that does."
)
for panel, commands in COMMANDS.items():
    for command in commands:
        app.command(command.__name__, rich_help_panel=panel)(command)
for name, group in {"ledger": ledger, "log": log}.items():
    app.add_typer(group, name=name, rich_help_panel="Looking after it")


RESUMABLE = (
    ResumableCommand("join", "Of examined images, key and card, what was finished is kept."),
    ResumableCommand("scan", "Images that were examined and did not change are remembered."),
    ResumableCommand("run", "The state of the plan is kept, with checkpoints and statistics."),
)


def main() -> None:
    """Entry point of the `silo` command."""
    # Before any file is made: what this program writes is private unless a function opens it on purpose.
    keep_private()
    forbid_core_dumps()
    run_app(app, resumable=RESUMABLE)


if __name__ == "__main__":
    main()
