"""The program `aggregator`: every command of its operator, in the order of the work."""

from aggregator.commands.base import base
from aggregator.commands.doctor import doctor
from aggregator.commands.keys import complete, holder, rotate, sign
from aggregator.commands.log import log
from aggregator.commands.membership import enroll, init, invite, remove
from aggregator.commands.plan import plan
from aggregator.commands.publish import publish, release, withdraw
from aggregator.commands.quarantine import admit, quarantine, refuse
from aggregator.commands.router import router
from aggregator.commands.service import service
from aggregator.commands.status import status
from aggregator.commands.work import run
from ddm.io.modes import keep_private
from ddm.system.console import ResumableCommand, new_program, run_app
from ddm.system.secrecy import forbid_core_dumps

COMMANDS = {
    "Federation and silos": (init, invite, enroll, remove),
    "From plan to release": (base, plan, run, release, router, publish, withdraw),
    "Watching and screening": (status, doctor, quarantine, admit, refuse, service),
    "Keys": (holder, sign, complete, rotate, log),
}

app = new_program(
    "Plan a federation of silos, take in their experts, train the router, publish a signed ensemble."
)
for panel, commands in COMMANDS.items():
    for command in commands:
        app.command(command.__name__, rich_help_panel=panel)(command)


RESUMABLE = (
    ResumableCommand("base", "Checkpoints of the training are kept."),
    ResumableCommand("run", "What silos sent is kept, also parts of a submission."),
    ResumableCommand(
        "router", "Checkpoints of a router of the kind samples are kept; other kinds begin again."
    ),
    ResumableCommand(
        "release",
        "A finished router is kept, and so are checkpoints of a router of the kind samples.",
        "If the router is finished: `aggregator publish FED --out RELEASE`; else the same command again.",
    ),
    ResumableCommand(
        "publish", "A version that was signed is kept; one that was not is made again."
    ),
)


def main() -> None:
    """Entry point of the `aggregator` command."""
    keep_private()
    forbid_core_dumps()
    run_app(app, resumable=RESUMABLE)


if __name__ == "__main__":
    main()
