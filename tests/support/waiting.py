"""Waiting for what other processes do: long enough for a busy machine, and no longer than it takes."""

import time
from collections.abc import Callable

LIMIT_S = 240.0


def wait_until(
    seen: Callable[[], object],
    what: str = "what the test waits for",
    *,
    check: Callable[[], object] = lambda: None,
    limit_s: float = LIMIT_S,
    every_s: float = 0.02,
) -> None:
    """Look every `every_s` seconds until `seen` is true; after each look in vain, call `check`, which may fail."""
    deadline = time.monotonic() + limit_s
    while not seen():
        assert time.monotonic() < deadline, f"not seen within {limit_s:.0f} s: {what}"
        check()
        time.sleep(every_s)
