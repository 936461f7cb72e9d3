"""How long to wait before something that failed is tried again: longer each time, and only so often an hour."""

import math
import time
from collections import deque
from collections.abc import Callable

_HOUR_S = 3600.0
# After no, one, two, ... tries within an hour.
_DELAYS_S = (0.0, 1.0, 5.0, 15.0, 30.0, 60.0)


class Backoff:
    """Counts tries, and forgets those of more than an hour ago: faults of weeks do not add up.

    Args:
        max_per_hour: most tries in any hour.
        longest_s: longest wait.
        clock: seconds that only go forward.

    Attributes:
        num: tries so far, the forgotten ones too.
    """

    def __init__(
        self,
        max_per_hour: float = math.inf,
        *,
        longest_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num = 0
        self._max_per_hour = max_per_hour
        self._longest_s = longest_s
        self._clock = clock
        self._recent: deque[float] = deque()

    def allowed(self) -> bool:
        """Whether this hour has a try left."""
        self._forget()
        return len(self._recent) < self._max_per_hour

    def delay_s(self) -> float:
        """Return how long to wait before the next try, given how many there were in the last hour."""
        self._forget()
        num_recent = min(len(self._recent), len(_DELAYS_S) - 1)
        return min(_DELAYS_S[num_recent], self._longest_s)

    def count(self) -> None:
        """Count a try."""
        self.num += 1
        self._recent.append(self._clock())

    def reset(self) -> None:
        """Forget all tries, since the last one worked."""
        self._recent.clear()

    def _forget(self) -> None:
        while self._recent and self._recent[0] < self._clock() - _HOUR_S:
            self._recent.popleft()
