"""How fast may shards come in, and how large may they be: rules over a clock, no network.

Flower moves a message as fast as the line goes, so what is paced here is when the next one is asked for, and its size:
the rate holds on average over a few messages, and no message takes more than a few seconds of it.
"""

import threading
import time
from collections.abc import Callable

# A message fills the line for no longer than its share of the cap lets through in this time.
_MESSAGE_S = 10.0
_LEAST_BYTES = 64 * 1024


class Pace:
    """A cap on bytes a second; silos that share one may be served by threads of their own.

    Args:
        bytes_per_s: the cap; None for none.
        clock: seconds that only go forward.
    """

    def __init__(
        self, bytes_per_s: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate, self._clock = bytes_per_s, clock
        self._free_at = clock()
        self._lock = threading.Lock()

    def open(self) -> bool:
        """Whether the next piece may be asked for now."""
        return self._rate is None or self._clock() >= self._free_at

    def take(self, num_bytes: int) -> None:
        """Count a piece that was asked for; the next one waits for as long as this one may take."""
        if self._rate is not None:
            with self._lock:
                self._free_at = max(self._free_at, self._clock()) + num_bytes / self._rate

    def piece_bytes(self, most: int) -> int:
        """Return how large a piece may be where memory allows `most`: what the cap lets through in ten seconds.

        64 KiB it is at least, since a message costs seconds itself.
        """
        return (
            most
            if self._rate is None
            else min(most, max(int(self._rate * _MESSAGE_S), _LEAST_BYTES))
        )
