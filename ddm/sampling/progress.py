"""A progress bar for those who sample in a terminal or a notebook."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

Report = Callable[[int, int], None]
"""Called with the steps taken, summed over all samples, and the total to take."""

_REDRAW_S = 0.1


@contextmanager
def sampling_progress(
    on_progress: Report | None, *, is_shown: bool, label: str = "sampling"
) -> Iterator[Report | None]:
    """Yield what is called after each step: the caller's own function, or else a bar where somebody can see it.

    Args:
        on_progress: the caller's.
        is_shown: whether a bar is wanted at all. Standard error must be a terminal as well, or this a notebook.
        label: stands before the bar.
    """
    # Looked at before rich is imported, which takes longer than to draw a few small samples.
    has_viewer = sys.stderr.isatty() or "ipykernel" in sys.modules
    if on_progress is not None or not is_shown or not has_viewer:
        yield on_progress
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    drawn_at = 0.0
    with Progress(console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(label, total=None)

        def advance(completed: int, total: int) -> None:
            nonlocal drawn_at
            if monotonic() - drawn_at < _REDRAW_S and completed < total:
                return
            bar.update(task, completed=completed, total=total, refresh=True)
            drawn_at = monotonic()

        yield advance
