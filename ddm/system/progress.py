"""What long work calls to report how far it is."""

from collections.abc import Callable

ProgressCallback = Callable[[int, int], None]
"""Called with what is completed and the total, both in units of the work: steps, images or bytes."""
