"""What answers SIGINT and SIGTERM, and for how long."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from ddm.system.signals import (
    STOPPING,
    blocked,
    handled,
    interrupted_by_sigterm,
    stop_on_first_signal,
    stop_on_signals,
)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The handlers of a command at a terminal, which every block must bring back."""
    usual = (signal.default_int_handler, signal.SIG_DFL)
    before = [
        signal.signal(number, handler) for number, handler in zip(STOPPING, usual, strict=True)
    ]
    yield
    handlers = [
        signal.signal(number, handler) for number, handler in zip(STOPPING, before, strict=True)
    ]
    assert handlers == list(usual)


@pytest.mark.parametrize("number", STOPPING)
def test_signal_to_a_service_sets_its_event_however_often_it_comes(number: signal.Signals) -> None:
    with stop_on_signals() as stop:
        assert not stop.is_set()
        for _ in range(3):
            signal.raise_signal(number)
        assert stop.is_set()


def test_second_signal_does_not_wait_for_what_the_first_one_asked_to_end() -> None:
    with stop_on_first_signal() as stop:
        assert not stop.is_set()
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_ignored_signal_stays_ignored_but_for_a_service() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        came: list[int] = []
        with handled(lambda number, _: came.append(number)):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
        assert came == [signal.SIGTERM]
        with stop_on_signals() as stop:
            signal.raise_signal(signal.SIGINT)
        assert stop.is_set() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_sigterm_interrupts_a_command_and_is_told_from_ctrl_c() -> None:
    with interrupted_by_sigterm() as came:
        assert came() == set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert came() == {signal.SIGTERM}
        with stop_on_signals():  # a command that handles them in its own way
            signal.raise_signal(signal.SIGINT)
        assert came() == {signal.SIGINT} and came() == set()


def test_signal_that_another_thread_hears_waits_until_a_process_has_been_started() -> None:
    events: list[str] = []
    now = threading.Event()

    def hear() -> None:
        now.wait()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=hear)
    thread.start()  # before, so that it hears what the main thread does not
    with handled(lambda *_: events.append("answered"), (signal.SIGINT,)):
        with blocked():
            now.set()
            thread.join()
            for _ in range(3):  # in a loop the interpreter looks for signals
                time.sleep(0.01)
            events.append("started")
        assert events == ["started", "answered"]
