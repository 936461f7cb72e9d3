"""`python -m ddm.training FOLDER`: one process of a job, as `torchrun`, `srun` or a silo's worker starts it."""

import argparse
import os
import sys
from pathlib import Path

from ddm.system.logs import follow_logging
from ddm.system.signals import stop_on_first_signal


def main() -> int:
    """Read the command line, and do this process's part until it ends or SIGTERM or SIGINT stops it."""
    parser = argparse.ArgumentParser(
        prog="python -m ddm.training",
        description="Train the expert of a job's folder, as one process of those that share the work.",
        epilog="Which process this is, RANK and WORLD_SIZE say, or the variables of srun and mpirun. SIGTERM and "
        "Ctrl-C make all of them write a checkpoint and end.",
    )
    parser.add_argument("folder", type=Path, help="made by a silo's worker or by ddm train")
    parser.add_argument(
        "--launch", help="the start that it belongs to: {launch} in training.launcher"
    )
    asked = parser.parse_args()
    with stop_on_first_signal() as stop:  # before torch is imported, which takes seconds
        follow_logging()
        from ddm.training.job import JobFolder
        from ddm.training.process import LAUNCH_VARIABLE, train_folder

        return train_folder(
            JobFolder(asked.folder.absolute()),
            asked.launch or os.environ.get(LAUNCH_VARIABLE),
            stop,
        )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # a thread of torch's that outlives the interpreter may abort; the files are written and closed
    os._exit(code)
