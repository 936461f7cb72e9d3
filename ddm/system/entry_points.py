"""What a command runs first: hardly anything is imported yet, so that Ctrl-C is answered in one line from the start."""

import os
import signal
import sys
from importlib import import_module
from types import FrameType
from typing import NoReturn


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
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, as in a background job
        import_module(module).main()
        return
    # An interrupt in the middle of an import surfaces as whatever that module makes of it; nothing was begun, so leave.
    signal.signal(signal.SIGINT, _leave)
    main = import_module(module).main
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    sys.stderr.write("\nInterrupted before anything was begun.\n")
    sys.stderr.flush()
    os._exit(130)
