"""A clock for code that waits: time passes only when the test says so, and no test sleeps."""


class ManualClock:
    """A clock that stands still until a test sets `now`.

    Args:
        now: the time that it shows first, seconds. Not 0 by default, because code that takes an unset time for the
            beginning of all time would pass unnoticed.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Return the time, as `time.monotonic` does."""
        return self.now
