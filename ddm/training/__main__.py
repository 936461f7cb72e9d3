"""`python -P -m ddm.training FOLDER`: one process of a job, as `srun` or a silo's worker starts it."""

import argparse
import os
import sys
from pathlib import Path

from ddm.system.guard import end_with_parent
from ddm.system.logs import follow_logging
from ddm.system.secrecy import forbid_core_dumps
from ddm.system.signals import stop_on_first_signal


def main() -> int:
    """Read the command line, and do this process's part until it ends or SIGTERM or SIGINT stops it."""
    parser = argparse.ArgumentParser(
        prog="python -m ddm.training",
        description="Train the expert of a job's folder, as one process of those that share the work.",
        epilog="RANK and WORLD_SIZE, or the variables of srun and mpirun, say which process this is. SIGTERM and "
        "Ctrl-C make all of them write a checkpoint and end.",
    )
    parser.add_argument(
        "folder", type=Path, help="Folder of the job, made by a silo's worker or by ddm train."
    )
    parser.add_argument(
        "--launch",
        help="Identifier of the start that this process belongs to: {launch} in training.launcher.",
    )
    options = parser.parse_args()
    if not sys.flags.safe_path:
        # A module that is in the working folder would run in the place of one of Python's or ours. Those that are
        # imported by now may have, so this is for the operator to correct, before somebody puts one there.
        parser.error(
            "expected Python to search no working folder for modules: python -P -m ddm.training"
        )
    # A scheduler starts this process elsewhere, where the limit of the worker that asked for it does not hold.
    forbid_core_dumps()
    end_with_parent()
    # Before torch is imported, which takes seconds.
    with stop_on_first_signal() as stop:
        follow_logging()
        from ddm.training.job import LAUNCH_VARIABLE, JobFolder
        from ddm.training.process import train_folder

        launch_id = options.launch or os.environ.get(LAUNCH_VARIABLE)
        return train_folder(JobFolder(options.folder.absolute()), launch_id, stop)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # a thread of torch's that outlives the interpreter may abort; the files are written and closed
    os._exit(code)
