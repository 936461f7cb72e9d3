"""When to stop: when the minutes that were given are over; and training, at the first Ctrl-C, after a checkpoint."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ddm.errors import ArchipelagoError
from ddm.system.console import EXIT_INTERRUPTED, fail, progress, say
from ddm.system.signals import stop_on_first_signal

EXIT_OUT_OF_TIME = 75  # EX_TEMPFAIL: the same command goes on


class OutOfTime(Exception):
    """The minutes are over; what is done is kept."""


class Clock:
    """Asked in everything long.

    Args:
        minutes: after which to stop; None for no end.
    """

    def __init__(self, minutes: float | None = None) -> None:
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def expired(self) -> bool:
        """Whether the minutes are over."""
        return self._end is not None and time.monotonic() >= self._end

    def check(self, *_: object) -> None:
        """Go on, or raise.

        Raises:
            OutOfTime: the minutes are over.
        """
        if self.expired:
            raise OutOfTime

    @contextmanager
    def progress(self, label: str) -> Iterator[Callable[..., None]]:
        """Yield what shows the steps done of all steps; it raises `OutOfTime` when the minutes are over."""
        with progress(label) as report_progress:

            def step(done: int, total: int, *_: object) -> None:
                self.check()
                report_progress(done, total)

            yield step

    @contextmanager
    def while_training(self) -> Iterator[Callable[[], bool]]:
        """Yield what training asks before every step; it answers a first signal by a checkpoint.

        Everything else that is long is whole or not there, so that a signal may end it anywhere.

        Raises:
            OutOfTime: training stopped because the minutes are over.
        """
        with stop_on_first_signal() as stop:
            try:
                yield lambda: stop.is_set() or self.expired
                if stop.is_set():  # in the last step
                    raise KeyboardInterrupt
            except KeyboardInterrupt:
                if self.expired and not stop.is_set():
                    raise OutOfTime from None
                raise


def ended(work: Callable[[], int | None], out: Path) -> int:
    """Do the work of a command; return its exit status, after a line on why it ended early."""
    try:
        return work() or 0
    except OutOfTime:
        say(f"The minutes are over; the same command goes on from {out}.", error=True)
        return EXIT_OUT_OF_TIME
    except KeyboardInterrupt:
        say(f"Stopped; the same command goes on from {out}.", error=True)
        return EXIT_INTERRUPTED
    except ArchipelagoError as error:
        return fail(error)
