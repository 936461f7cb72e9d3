"""`python -m ddm.training.local FOLDER --launch ID --processes N`: starts the processes of a job on this machine.

It is to one machine what `srun` is to a cluster: anybody who follows the job sees one command and the job's folder.
When a process ends badly, the others cannot continue without it, and are ended too. A process that was killed could not
say why, so this one writes how it ended.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from ddm.system.processes import NEUTRAL_FOLDER, start_tied
from ddm.training.job import (
    EXIT_STOPPED,
    JobFolder,
    ProcessFailure,
    RunFolder,
    write_document,
)

_GOOD_CODES = (0, EXIT_STOPPED)
_POLL_S = 0.1
# After a process ended badly, for another one to write the cause, of which this end may be a consequence.
_GRACE_S = 2.0


def local_command(folder: Path, launch_id: str, num: int, threads: int) -> list[str]:
    """Return the command that runs this program."""
    return [
        *(sys.executable, "-P", "-m", "ddm.training.local", str(folder), "--launch", launch_id),
        *("--processes", str(num), "--threads", str(threads)),
    ]


def main() -> int:
    """Start the processes, wait for their end, and return an exit code that is 0 if all did what they should."""
    parser = argparse.ArgumentParser(
        prog="python -m ddm.training.local",
        description="Start the processes of a job's folder on this machine, and wait for them.",
    )
    parser.add_argument(
        "folder", type=Path, help="Folder of the job, made by a silo's worker or by ddm train."
    )
    parser.add_argument(
        "--launch", required=True, help="identifier of the start that these processes belong to"
    )
    parser.add_argument("--processes", type=int, required=True, help="number of processes")
    parser.add_argument("--threads", type=int, required=True, help="threads of each process")
    options = parser.parse_args()
    folder = options.folder.absolute()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(options.processes):
            process = start_tied(
                "ddm.training",
                str(folder),
                "--launch",
                options.launch,
                env=_environment(rank, options.processes, options.threads),
                cwd=NEUTRAL_FOLDER,
            )
            processes.append(process)
        return _wait_for_all(processes, JobFolder(folder).run(options.launch))
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _environment(rank: int, num: int, threads: int) -> dict[str, str]:
    """Return a process's environment, which says which process it is."""
    return dict(os.environ) | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num),
        # As many as there are: all are on this machine.
        "LOCAL_WORLD_SIZE": str(num),
        # Otherwise accelerate chooses a number.
        "OMP_NUM_THREADS": str(threads),
    }


def _wait_for_all(processes: "list[subprocess.Popen[bytes]]", run: RunFolder) -> int:
    deadline = float("inf")
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            break
        if any(code is not None and code not in _GOOD_CODES for code in codes):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        time.sleep(_POLL_S)
    exit_code = 0
    for rank, process in enumerate(processes):
        code = process.poll()
        # None is one that still waits for the process that failed; `main` kills it, and it is not to blame.
        if code is None or code in _GOOD_CODES:
            continue
        exit_code = 1
        if not run.failure(rank).exists():
            failure = ProcessFailure(
                rank=rank, num_processes=len(processes), kind="died", subject=_describe_end(code)
            )
            # Where the disk is full, the exit code says enough.
            with suppress(OSError):
                write_document(failure, run.failure(rank))
    return exit_code


def _describe_end(code: int) -> str:
    if code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


if __name__ == "__main__":
    sys.exit(main())
