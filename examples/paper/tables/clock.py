"""When to stop: at the first Ctrl-C, or when the minutes that were given are over."""

import threading
import time


class OutOfTime(Exception):
    """The minutes are over; what is done is kept."""


class Clock:
    """Asked before every step of everything long.

    Args:
        stop: set by the first Ctrl-C.
        minutes: after which to stop; None for no end.
    """

    def __init__(self, stop: threading.Event, minutes: float | None = None) -> None:
        self._stop = stop
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def expired(self) -> bool:
        """Whether the minutes are over."""
        return self._end is not None and time.monotonic() >= self._end

    def is_over(self) -> bool:
        """Whether to stop."""
        return self._stop.is_set() or self.expired

    def check(self, *_: object) -> None:
        """Go on, or raise.

        Raises:
            KeyboardInterrupt: stopped by a person.
            OutOfTime: the minutes are over.
        """
        if self._stop.is_set():
            raise KeyboardInterrupt
        if self.expired:
            raise OutOfTime
