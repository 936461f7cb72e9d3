"""The edge between a command and the person at it: output, errors on one screen, stable exit codes, clean Ctrl-C."""

import errno
import getpass
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import click
import typer

from ddm.errors import ArchipelagoError, MissingFileError, PassphraseError, SetupError
from ddm.system.escape import escape_control
from ddm.system.logs import LogOptions, start_logging
from ddm.system.passphrases import (
    ADVICE,
    check_private_passphrase,
    require_strong,
    write_private_passphrase,
)
from ddm.system.progress import ProgressCallback
from ddm.system.signals import interrupted_by_sigterm

EXIT_INTERRUPTED = 130
MAX_PASSPHRASE_BYTES = 1024
EXIT_TERMINATED = 143
EXIT_OS = 8
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
# Characters: a width that no table reaches.
UNBROKEN = 10_000
_REDRAW_S = 0.1
_SIGNS_OF_NUMBERS = str.maketrans("", "", ".-+e%")
_log = logging.getLogger(__name__)

VerboseOption = Annotated[
    bool,
    typer.Option(
        "--verbose", help="Log details, with time, level and logger.", rich_help_panel="Logging"
    ),
]
LogJsonOption = Annotated[
    bool,
    typer.Option(
        "--log-json",
        help="Log one JSON object a line, to standard error.",
        rich_help_panel="Logging",
    ),
]


def _show_version(is_asked: bool) -> None:
    if is_asked:
        # Imported here: reading the metadata takes longer than the start of most commands.
        from ddm.system.version import installed_version

        say(installed_version())
        raise typer.Exit


VersionOption = Annotated[
    bool,
    typer.Option(
        "--version",
        callback=_show_version,
        is_eager=True,
        help="Print the version of the toolkit, and exit.",
    ),
]
DigestsOption = Annotated[
    bool, typer.Option("--digests", help="Also print the digests that the words stand for.")
]
NewPassphraseOption = Annotated[
    Path | None,
    typer.Option(
        "--new-passphrase-file",
        metavar="FILE",
        help="File to make, with a random passphrase for the new keys.",
    ),
]


@dataclass(frozen=True)
class ResumableCommand:
    """A command that continues where it was interrupted; all others begin again.

    Attributes:
        name: as it is typed after the program.
        kept: a sentence about what it keeps.
        next_step: a sentence about how it goes on.
    """

    name: str
    kept: str
    next_step: str = "The same command goes on from there."


def new_program(help_text: str) -> typer.Typer:
    """Make a program of several commands; before them it takes the options for its log and its version."""
    app = new_app(help_text)

    @app.callback()
    def choose_logging(
        verbose: VerboseOption = False,
        log_json: LogJsonOption = False,
        version: VersionOption = False,
    ) -> None:
        inherited = LogOptions.from_environment()
        start_logging(LogOptions(verbose or inherited.verbose, log_json or inherited.as_json))

    return app


def new_app(help_text: str) -> typer.Typer:
    """Make a group of commands that shows no stack traces, and short help."""
    return typer.Typer(
        help=help_text,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def run_app(
    app: typer.Typer,
    args: Sequence[str] | None = None,
    *,
    resumable: Sequence[ResumableCommand] = (),
) -> NoReturn:
    """Run a group of commands and leave with a documented exit code; a stack trace never reaches the operator.

    Args:
        app: the commands.
        args: what is typed after the program; the words of the command line when None.
        resumable: the commands that continue where they were interrupted.
    """
    start_logging(LogOptions.from_environment())
    interruption = "Interrupted. What was not finished is not kept; the same command begins again."
    typed_command = _typed_command(args)
    for command in resumable:
        if command.name == typed_command:
            interruption = f"Interrupted. {command.kept} {command.next_step}"
    with interrupted_by_sigterm() as came:
        code = _run(app, args, came, interruption)
    sys.exit(code)


def _typed_command(args: Sequence[str] | None) -> str | None:
    """Return the first word that is not an option: options before a command take no values."""
    words = sys.argv[1:]
    if args is not None:
        words = list(args)
    for word in words:
        if not word.startswith("-"):
            return word
    return None


def _run(
    app: typer.Typer,
    args: Sequence[str] | None,
    came: Callable[[], set[int]],
    interruption: str,
) -> int:
    try:
        code = app(args=args, standalone_mode=False)
        sys.stdout.flush()
    except ArchipelagoError as error:
        return fail(error)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return _interrupted(came(), interruption)
    except (BrokenPipeError, SystemExit):
        # The reader left, as `head` does; Typer makes a SystemExit of it.
        # Python flushes standard output at exit, and would print an error about the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _os_refused(error)
    except Exception as error:
        # A signal in the middle of an import surfaces as whatever that module makes of it.
        signals = came()
        if signals:
            return _interrupted(signals, interruption)
        return _unexpected(error)
    # Typer turns KeyboardInterrupt into this code.
    if code == EXIT_INTERRUPTED:
        return _interrupted(came(), interruption)
    return code if isinstance(code, int) else 0


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a command that ends with this error; 1, as for a bug, where no other is documented."""
    if isinstance(error, ArchipelagoError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(error, OSError):
        return EXIT_OS
    return ArchipelagoError.exit_code


def fail(error: ArchipelagoError) -> int:
    """Show an error as what was expected, found and to be done; return its exit code."""
    if LogOptions.from_environment().as_json:
        _log.error("%s. %s", error, error.remedy)
        return error.exit_code
    say(f"error: {error.subject}", error=True)
    if error.expected:
        say(f"  expected: {error.expected}", error=True)
    if error.got:
        say(f"  found:    {error.got}", error=True)
    _say_remedy(error.remedy)
    return error.exit_code


def _say_remedy(remedy: str) -> None:
    say(f"  to do:    {remedy}", error=True)


def say(text: str, *, error: bool = False) -> None:
    """Print one line at once, also into a pipe or a log; control characters, which others may have sent, as escapes.

    Args:
        text: the line.
        error: print to standard error; under `--log-json` as a record of the log, so that all of it stays JSON.
    """
    if error and LogOptions.from_environment().as_json:
        # Otherwise a program that reads standard error as JSON would meet a plain line.
        _log.error("%s", text.strip())
        return
    print(escape_control(text), file=sys.stderr if error else sys.stdout, flush=True)


def has_terminal() -> bool:
    """Whether a person sits at the terminal of this process: no service has one, nor a job in the background."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        # A shell with job control leaves its terminal to a background job, and stops it when it reads from there.
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:
        return False


def confirm(question: str, *, refused: str = "Nothing was changed.") -> None:
    """Ask at the terminal whether to continue.

    Args:
        question: what to ask.
        refused: what to say where the answer is no.

    Raises:
        SetupError: standard input is not a terminal.
        typer.Abort: the answer is no.
    """
    if not sys.stdin.isatty():
        raise SetupError(
            question,
            expected="a person to confirm, or --yes",
            got="standard input that is not a terminal",
            remedy="Add --yes.",
        )
    if not typer.confirm(question):
        say(refused)
        raise typer.Abort


def ask(
    question: str,
    *,
    option: str,
    parse: Callable[[str], str] = str,
    default: str | None = None,
) -> str:
    """Ask at the terminal for a text, until one can be parsed.

    Args:
        question: what to ask.
        option: the command's option that gives the same.
        default: the answer of the one who types none.
        parse: returns what is meant by an answer, or raises `SetupError`.

    Raises:
        SetupError: standard input is not a terminal.
    """
    if not sys.stdin.isatty():
        raise SetupError(
            question,
            expected=f"an answer, or {option}",
            got="standard input that is not a terminal",
            remedy=f"Add {option}.",
        )
    while True:
        answer: str = typer.prompt(question, default=default)
        try:
            return parse(answer.strip())
        except SetupError as error:
            # A person at a terminal corrects a slip at once.
            say(f"{error}. {error.remedy}", error=True)


def passphrase(
    path: Path | None, configured: str | None, prompt: str, *, is_new: bool = False
) -> bytes:
    """Read a passphrase: from the file given, else from the configured file, else by asking; `-` is standard input.

    Args:
        path: the file that the command line names.
        configured: the file that the configuration names.
        prompt: what to ask.
        is_new: whether it will encrypt new keys: it must be strong enough then, and a person types it twice.

    Raises:
        MissingFileError: there is no such file.
        PassphraseError: nothing to read, nobody to ask, two different answers, or a new one that is weak.
    """
    # An option of the command line counts before the configuration.
    source = path
    if source is None and configured:
        source = Path(configured)
    if source is None:
        answer = _ask_passphrase(prompt, is_new)
        subject = prompt
    elif str(source) == "-":
        subject = "standard input"
        answer = sys.stdin.readline().rstrip("\n").encode()
        if not answer:
            raise PassphraseError(subject, expected="a passphrase on one line", got="no input")
    else:
        subject = source.name
        if source.is_dir() or not source.exists():
            remedy = "Name the right file with --passphrase-file."
            if path is None:
                remedy = "Name the right file with --passphrase-file, or in the configuration."
            raise MissingFileError(
                str(source),
                expected="a passphrase file",
                got="a folder" if source.is_dir() else "no such file",
                remedy=remedy,
            )
        answer = _first_line(source)
    if is_new:
        require_strong(answer, subject)
    return answer


def choose_passphrase_file(existing: Path | None, new: Path | None) -> Path | None:
    """Return the file with the passphrase of keys that are about to be made; make the new one if it is not there yet.

    Args:
        existing: --passphrase-file.
        new: --new-passphrase-file.

    Raises:
        SetupError: both are given.
        PassphraseError: the new one is there, and somebody else may know it.
    """
    if new is None:
        return existing
    if existing is not None:
        raise SetupError(
            "--new-passphrase-file",
            expected="this option, or --passphrase-file",
            got="--passphrase-file as well",
            remedy="Leave one of them out.",
        )
    # A command that was cut short is given again, and finds the file that encrypts the keys it made already. A link
    # that leads nowhere counts as there.
    if os.path.lexists(new):
        check_private_passphrase(new)
    else:
        write_private_passphrase(new)
        say(
            f"Made {new}, which only you can read. Without it the keys are lost: keep a copy elsewhere."
        )
    return new


def _first_line(file: Path) -> bytes:
    # Not `read_bounded`: a pipe, as shells make for <(...), is a fine place for a passphrase.
    with file.open("rb") as handle:
        line = handle.readline(MAX_PASSPHRASE_BYTES).rstrip(b"\r\n")
    if not line:
        raise PassphraseError(
            file.name, expected="a passphrase on the first line", got="an empty line"
        )
    return line


def _ask_passphrase(prompt: str, is_new: bool) -> bytes:
    if not sys.stdin.isatty():
        raise PassphraseError(
            prompt,
            expected="a terminal, to ask for the passphrase",
            got="standard input that is not a terminal",
            remedy="Give the passphrase with --passphrase-file.",
        )
    question = prompt
    if is_new:
        question = f"{prompt} ({ADVICE})"
    answer = getpass.getpass(f"{question}: ").encode()
    if not answer:
        raise PassphraseError(prompt, expected="a passphrase", got="an empty answer")
    if is_new and getpass.getpass(f"{prompt} (again): ").encode() != answer:
        raise PassphraseError(
            prompt, expected="the same passphrase twice", got="two different passphrases"
        )
    return answer


def remembered(path: Path | None) -> str | None:
    """Return --passphrase-file as a configuration file keeps it: an absolute path; None for standard input."""
    if path is None or str(path) == "-":
        return None
    return str(path.resolve())


def human_bytes(count: float) -> str:
    """Write a number of bytes for people, e.g. ``2.7 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            # There are no parts of a byte.
            num_digits = 0 if unit == "B" else 1
            return f"{count:.{num_digits}f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def human_flops(count: float) -> str:
    """Write a number of floating-point operations for people, e.g. ``1.6 TFLOP``."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if count < 1000:
            return f"{count:.3g} {unit}FLOP"
        count /= 1000
    return f"{count:.3g} EFLOP"


def human_seconds(seconds: float) -> str:
    """Write a duration for people, e.g. ``2 min 05 s``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
    return f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60:02d} min"


@contextmanager
def progress(label: str) -> Iterator[ProgressCallback]:
    """Show a bar from the first call of what is yielded, called with (completed, total); none where nothing is long.

    Where standard output is not a terminal, one line with the label takes the bar's place. A different total, or less
    completed than before, begins a new bar.
    """
    with ExitStack() as stack:
        bars: list[_Bar] = []

        def advance(completed: int, total: int) -> None:
            if not bars or bars[-1].total != total or completed < bars[-1].completed:
                stack.close()
                bars.append(stack.enter_context(_Bar(label, total)))
            bars[-1].advance(completed)

        yield advance


class _Bar:
    """One bar of rich's, drawn when it advances: a thread of its own would share the process with training.

    Args:
        label: printed before the bar.
        total: what all of the work counts.
    """

    def __init__(self, label: str, total: int) -> None:
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        self.total = total
        self.completed = 0
        self._label = label
        self._drawn_at = 0.0
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(30),
            TaskProgressColumn(),
        )
        self._bar = Progress(*columns, TimeRemainingColumn(), auto_refresh=False)
        self._task = self._bar.add_task(escape_control(label, one_line=True), total=total)

    def __enter__(self) -> "_Bar":
        if sys.stdout.isatty():
            self._bar.start()
        else:
            say(self._label)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._bar.live.is_started:
            self._bar.stop()

    def advance(self, completed: int) -> None:
        self.completed = completed
        now = time.monotonic()
        is_due = completed >= self.total or now - self._drawn_at >= _REDRAW_S
        if self._bar.live.is_started and is_due:
            self._drawn_at = now
            self._bar.update(self._task, completed=completed, refresh=True)


def table(rows: Sequence[Sequence[Any]], header: Sequence[str], *, width: int | None = None) -> str:
    """Lay out rows in aligned columns, numbers to the right; markup and control characters in cells show as they are.

    Args:
        rows: the cells, row by row.
        header: the names of the columns.
        width: most characters in a line, beyond which cells wrap. By default the terminal's width; where standard
            output is none, no line is ever broken.
    """
    from rich.console import Console
    from rich.rule import Rule
    from rich.table import Table
    from rich.text import Text

    cells = [[escape_control(str(cell), one_line=True) for cell in row] for row in rows]
    if width is None and not sys.stdout.isatty():
        width = UNBROKEN
    layout = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column, name in enumerate(header):
        is_numeric = bool(cells) and all(_is_number(row[column]) for row in cells)
        layout.add_column(Text(name), justify="right" if is_numeric else "left", overflow="fold")
    layout.add_row(*(Rule(characters="-") for _ in header))
    for row in cells:
        # As Text, so that rich does not read square brackets in a cell as markup.
        layout.add_row(*map(Text, row))
    page = Console(
        width=width, color_system=None, force_terminal=False, emoji=False, highlight=False
    )
    with page.capture() as captured:
        page.print(layout)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _is_number(text: str) -> bool:
    return text.translate(_SIGNS_OF_NUMBERS).isdigit()


def _interrupted(signals: set[int], interruption: str) -> int:
    say(f"\n{interruption}", error=True)
    if signal.SIGTERM in signals:
        return EXIT_TERMINATED
    return EXIT_INTERRUPTED


def _os_refused(error: OSError) -> int:
    named = f" ({error.filename})" if error.filename else ""
    remedy = "Check the paths that the command and its configuration name, then run it again."
    if error.errno in _FULL:
        remedy = "Make room on the disk, then run it again."
    elif error.errno in _FORBIDDEN:
        remedy = "Check who owns this path and what they may do with it, then run it again."
    say(f"error: the operating system refused{named}: {error.strerror or error}", error=True)
    _say_remedy(remedy)
    return EXIT_OS


def _unexpected(error: Exception) -> int:
    # The stack trace goes into a file: it may quote data, and says nothing to an operator.
    with tempfile.NamedTemporaryFile(
        "w", prefix="archipelago-", suffix=".log", delete=False
    ) as log:
        traceback.print_exception(error, file=log)
    say(f"error: something unexpected happened ({type(error).__name__}).", error=True)
    _say_remedy(f"{ArchipelagoError.default_remedy} The log is {log.name}.")
    return ArchipelagoError.exit_code
