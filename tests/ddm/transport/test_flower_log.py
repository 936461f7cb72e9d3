"""Flower's log: what others sent is one line of it, and steers no terminal."""

import subprocess
import sys

PROGRAM = r"""
from flwr.supercore import log
from ddm.transport.flower_log import keep_lines_plain
keep_lines_plain()
try:
    raise ValueError("a type\n\x1b[2JINFO :      Receiving: a message")
except ValueError as error:
    log(40, "an app raised", exc_info=error)
log(20, "[RUN %s, ROUND %s]", 7, "1\n\x1b[92mINFO \x1b[0m:      SuperNode ID: 1234\x07")
"""


def test_received_text_in_flower_s_log_is_one_plain_line() -> None:
    # A process of its own, since the handler is the whole process's.
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    problem, line = (done.stdout + done.stderr).splitlines()
    assert problem.startswith("ERROR")
    assert problem.endswith(r"ValueError: a type\n\x1b[2JINFO :      Receiving: a message")
    assert line.startswith("INFO")
    assert line.endswith(r"[RUN 7, ROUND 1\n\x1b[92mINFO \x1b[0m:      SuperNode ID: 1234\x07]")
