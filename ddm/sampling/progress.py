"""A progress bar for those who sample in a terminal or a notebook."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from ddm.system.progress import ProgressCallback

_REDRAW_S = 0.1
_NOTEBOOK_REDRAW_S = 0.5  # every redrawing is a message to the reader's browser


@contextmanager
def sampling_progress(
    on_progress: ProgressCallback | None, *, is_shown: bool, label: str = "sampling"
) -> Iterator[ProgressCallback | None]:
    """Yield what is called after each step: the caller's own function, or else a bar where somebody can see it.

    Args:
        on_progress: the caller's.
        is_shown: whether a bar is wanted at all. Standard error must be a terminal as well, or this a notebook.
        label: the text before the bar.
    """
    if on_progress is not None or not is_shown:
        yield on_progress
    elif "ipykernel" in sys.modules:
        yield _notebook_bar()
    elif sys.stderr.isatty():
        with _terminal_bar(label) as advance:
            yield advance
    else:
        yield None


def _notebook_bar() -> ProgressCallback:
    """Return what draws the bar of IPython: that of rich needs widgets, which not every notebook has."""
    from IPython.display import ProgressBar

    bars: list[ProgressBar] = []
    drawn_at = monotonic()

    def advance(completed: int, total: int) -> None:
        nonlocal drawn_at
        # Few small samples are drawn before anything is shown.
        is_due = monotonic() - drawn_at > _NOTEBOOK_REDRAW_S
        is_last = bool(bars) and completed == total
        if not is_due and not is_last:
            return
        if not bars:
            bars.append(ProgressBar(total))
            bars[0].display()
        bars[0].progress = completed
        drawn_at = monotonic()

    return advance


@contextmanager
def _terminal_bar(label: str) -> Iterator[ProgressCallback]:
    """Yield what draws a bar behind a label; it vanishes at the end."""
    # Imported where a bar is drawn, since it takes longer than to draw a few small samples.
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
