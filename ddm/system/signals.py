"""SIGINT (Ctrl-C) and SIGTERM: what handles them, for how long, and which of them came."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NoReturn

STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def handled(
    handler: Callable[[int, FrameType | None], Any],
    numbers: Sequence[signal.Signals] = STOPPING,
    *,
    even_ignored: bool = False,
) -> Iterator[Callable[[], None]]:
    """Let `handler` answer signals until the block ends, or until what is yielded is called; only in the main thread.

    Args:
        handler: called with the signal's number and the frame that it interrupts.
        numbers: which signals.
        even_ignored: also those that this process was started to ignore, as a shell's background job is SIGINT.
    """
    before = {number: signal.getsignal(number) for number in numbers}
    answered = [
        number for number in numbers if even_ignored or before[number] is not signal.SIG_IGN
    ]

    def restore() -> None:
        for number in answered:
            signal.signal(number, before[number])

    for number in answered:
        signal.signal(number, handler)
    try:
        yield restore
    finally:
        restore()


class SignalEvent(threading.Event):
    """An event that a signal handler may set at any moment.

    The lock of `threading.Event` is not reentrant. A handler runs between two instructions of the main thread: if that
    thread is just waiting for the event, or another handler is setting it, the lock is taken, and the thread would wait
    for itself for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        # A reentrant lock lets the handler set the event while its own thread holds it.
        self._cond = threading.Condition(threading.RLock())


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set, for a service; they do nothing else, however often they come."""
    stop = SignalEvent()
    with handled(lambda *_: stop.set(), even_ignored=True):
        yield stop


@contextmanager
def stop_on_first_signal() -> Iterator[threading.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets; the second one acts as it did before, and so at once."""
    stop = SignalEvent()

    def note(*_: object) -> None:
        stop.set()
        # The next signal finds the handlers of before.
        restore()

    with handled(note) as restore:
        yield stop


@contextmanager
def interrupted_by_sigterm() -> Iterator[Callable[[], set[int]]]:
    """Make SIGTERM interrupt as Ctrl-C does; yield a function that returns which of the two came since its last call.

    A wakeup descriptor notes signals also for commands that handle them in their own way.
    """
    reader, writer = os.pipe()
    for descriptor in (reader, writer):
        os.set_blocking(descriptor, False)

    def came() -> set[int]:
        try:
            return set(os.read(reader, 4096)) & set(STOPPING)
        except BlockingIOError:
            return set()

    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        with handled(_interrupt, (signal.SIGTERM,), even_ignored=True):
            yield came
    finally:
        signal.set_wakeup_fd(wakeup)
        os.close(reader)
        os.close(writer)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


@contextmanager
def blocked() -> Iterator[None]:
    """Keep SIGINT and SIGTERM from a process that is started meanwhile, however early they come.

    A signal that reaches another thread of this process would interrupt the start half-way, and leave a process that
    has no task. So the main thread handles signals when the block has ended.
    """
    received: list[int] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    with ExitStack() as stack:
        # Python runs handlers in the main thread alone, whichever thread the signal reaches.
        if threading.current_thread() is threading.main_thread():
            stack.callback(_raise_again, received)
            stack.enter_context(handled(lambda number, _: received.append(number)))
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        yield


def _raise_again(numbers: Sequence[int]) -> None:
    """Raise signals that were only noted, each once, now that their own handlers are back."""
    for number in dict.fromkeys(numbers):
        signal.raise_signal(number)
