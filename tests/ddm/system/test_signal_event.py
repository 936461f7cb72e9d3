"""A signal that comes while another one is answered does not make a process wait for itself for ever."""

import subprocess
import sys

SECOND_SIGNAL = """
import signal
from ddm.system.signals import {contextmanager}
with {contextmanager}() as stop:
    # As if the first signal were being answered, or the main thread were about to wait.
    with stop._cond:
        signal.raise_signal(signal.SIGTERM)
    print(stop.wait(1))
"""


def test_signal_that_comes_while_the_event_is_being_set_or_waited_for_is_answered() -> None:
    for contextmanager in ("stop_on_signals", "stop_on_first_signal"):
        program = SECOND_SIGNAL.format(contextmanager=contextmanager)
        result = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
        )
        assert result.stdout == "True\n"
