"""What a command runs first: hardly anything is imported yet, so that Ctrl-C is answered in one line from the start."""

import os
import signal
import sys
from importlib import import_module
from types import FrameType
from typing import NoReturn

from ddm.system.signals import handled


def aggregator() -> None:
    """Entry point of the `aggregator` command."""
    _start("aggregator.cli")


def ddm() -> None:
    """Entry point of the `ddm` command."""
    _start("ddm.cli.main")


def silo() -> None:
    """Entry point of the `silo` command."""
    _start("silo.cli")


def _start(module: str) -> None:
    # An interrupt in the middle of an import surfaces as whatever that module makes of it; nothing was begun, so leave.
    with handled(_leave, (signal.SIGINT,)):
        main = import_module(module).main
    try:
        main()
    finally:
        # The command has ended. Python takes its handlers down now, and would let Ctrl-C kill the process.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    sys.stderr.write("\nInterrupted before anything was begun.\n")
    sys.stderr.flush()
    os._exit(130)
