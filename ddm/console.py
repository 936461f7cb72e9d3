"""The edge between a command and the person at it: errors on one screen, stable exit codes, clean Ctrl-C."""

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click
import typer

from ddm.errors import ArchipelagoError, PassphraseError

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
EXIT_OS = 8


def new_app(help_text: str) -> typer.Typer:
    """Make a command group in the house's manner: no stack traces, short help."""
    return typer.Typer(
        help=help_text,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def run_app(app: typer.Typer, args: Sequence[str] | None = None) -> NoReturn:
    """Run a command group and leave with a documented exit code; a stack trace never reaches the operator."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code = app(args=args, standalone_mode=False)
        sys.stdout.flush()
    except ArchipelagoError as error:
        code = fail(error)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        say("\nInterrupted. Nothing is lost; run the same command to go on.", error=True)
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        named = f" ({error.filename})" if error.filename else ""
        say(f"error: the operating system refused{named}: {error.strerror or error}", error=True)
        say("  to do: check the disk's space and the folder's permissions, then run it again.", error=True)
        code = EXIT_OS
    except Exception as error:
        code = _unexpected(error)
    sys.exit(code if isinstance(code, int) else 0)


def fail(error: ArchipelagoError) -> int:
    """Print an error as what was expected, found and to be done; return its exit code."""
    say(f"error: {error.subject}", error=True)
    if error.expected:
        say(f"  expected: {error.expected}", error=True)
    if error.got:
        say(f"  found:    {error.got}", error=True)
    say(f"  to do:    {error.remedy}", error=True)
    return error.exit_code


def say(text: str, *, error: bool = False) -> None:
    """Print one line at once, also into a pipe or a log."""
    print(text, file=sys.stderr if error else sys.stdout, flush=True)


def passphrase(path: Path | None, configured: str | None, prompt: str, *, confirm: bool = False) -> bytes:
    """Read a passphrase: from the file named, else the configured one, `-` for standard input, else by asking.

    Raises:
        PassphraseError: nothing to read, or nobody to ask.
    """
    from ddm.trust.keys import read_passphrase

    source = path or (Path(configured) if configured else None)
    if source is not None and str(source) == "-":
        line = sys.stdin.readline().rstrip("\n")
        if not line:
            raise PassphraseError("standard input", expected="a passphrase on one line", got="nothing")
        return line.encode()
    return read_passphrase(source, prompt, confirm=confirm)


def remembered(path: Path | None) -> str | None:
    """Return what a configuration file keeps of --passphrase-file: an absolute path; standard input is not kept."""
    return None if path is None or str(path) == "-" else str(path.resolve())


def human_bytes(count: float) -> str:
    """Write a number of bytes for people, e.g. ``2.7 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def human_seconds(seconds: float) -> str:
    """Write a duration for people, e.g. ``2 min 05 s``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
    return f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60:02d} min"


def table(rows: Sequence[Sequence[Any]], header: Sequence[str]) -> str:
    """Lay out rows in aligned columns; numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(header), *cells]) for i in range(len(header))]
    right = [all(_is_number(line[i]) for line in cells) and bool(cells) for i in range(len(header))]

    def lay(line: Sequence[str]) -> str:
        parts = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True))
        return "  ".join(parts).rstrip()

    return "\n".join([lay(header), lay(["-" * width for width in widths]), *(lay(line) for line in cells)])


def _is_number(text: str) -> bool:
    return text.replace(".", "").replace("-", "").replace("+", "").replace("e", "").replace("%", "").isdigit()


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(EXIT_TERMINATED)


def _unexpected(error: Exception) -> int:
    with tempfile.NamedTemporaryFile("w", prefix="archipelago-", suffix=".log", delete=False) as log:
        traceback.print_exception(error, file=log)
    say(f"error: something unexpected happened ({type(error).__name__}).", error=True)
    say(f"  to do:    {ArchipelagoError.default_remedy} The log is {log.name}", error=True)
    return ArchipelagoError.exit_code
