"""Runs the real commands in this process, without a terminal, as test after test needs them quickly."""

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

import aggregator.cli
import ddm.cli.main
import silo.cli
from ddm.system.console import run_app

APPS = {"silo": silo.cli.app, "aggregator": aggregator.cli.app, "ddm": ddm.cli.main.app}


class TypedAnswers(io.StringIO):
    """Standard input that says it is a terminal, with the lines that a person types."""

    def __init__(self, *answers: str) -> None:
        super().__init__("".join(f"{answer}\n" for answer in answers))

    def isatty(self) -> bool:
        return True


@dataclass(frozen=True)
class CommandResult:
    """What a command left: its exit code, what it said on standard output, and on standard error."""

    code: object
    out: str
    err: str


def run_command(*words: object) -> CommandResult:
    """Run a command to its end; a stack trace or an undocumented error fails the test.

    Args:
        words: the program, `silo`, `aggregator` or `ddm`, and its arguments, as they are typed.
    """
    out = io.StringIO()
    err = io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        run_app(APPS[str(words[0])], [str(word) for word in words[1:]])
    assert "Traceback" not in out.getvalue() + err.getvalue()
    # 1 is the code of a bug, which no command may end with.
    assert ended.value.code != 1, err.getvalue()
    return CommandResult(ended.value.code, out.getvalue(), err.getvalue())
