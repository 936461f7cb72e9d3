"""Set up logging: what the packages log goes to standard error, as plain lines or as one JSON object a line."""

import json
import logging
import os
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddm.errors import ArchipelagoError
from ddm.system.escape import escape_control

VERBOSE_VARIABLE = "ARCHIPELAGO_VERBOSE"
JSON_VARIABLE = "ARCHIPELAGO_LOG_JSON"
PACKAGES = ("ddm", "silo", "aggregator")
# The innermost; an endless recursion has a thousand.
_MAX_FRAMES = 24
# Marks a handler that a later one replaces.
_OURS = "of_archipelago"


@dataclass(frozen=True)
class LogOptions:
    """What the options `--verbose` and `--log-json` chose.

    Attributes:
        verbose: also log details, and put time, level and logger before every line.
        as_json: log one JSON object a line, with `time`, `level`, `logger` and `message`.
    """

    verbose: bool = False
    as_json: bool = False

    @classmethod
    def from_environment(cls) -> "LogOptions":
        """Return what the process that started this one chose."""
        return cls(verbose=_is_on(VERBOSE_VARIABLE), as_json=_is_on(JSON_VARIABLE))

    def environment(self) -> dict[str, str]:
        """Return the variables that hand the choice on to another process."""
        return {VERBOSE_VARIABLE: str(int(self.verbose)), JSON_VARIABLE: str(int(self.as_json))}

    @property
    def level(self) -> int:
        """The lowest level that is logged."""
        return logging.DEBUG if self.verbose else logging.INFO

    @property
    def formatter(self) -> logging.Formatter:
        """What lays a record out."""
        return JsonFormatter() if self.as_json else PlainFormatter(self.verbose)


class PlainFormatter(logging.Formatter):
    """Lays a record out for people: the message, after its level if that is a warning or worse.

    Args:
        details: put time, level and logger before every message.
    """

    def __init__(self, details: bool = False) -> None:
        super().__init__()
        self._details = details

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        line = escape_control(record.getMessage(), one_line=True)
        cause = _cause(record)
        if cause:
            text = f" ({cause['error']}, in {' < '.join(cause['frames'])})"
            line += escape_control(text, one_line=True)
        if self._details:
            return f"{_time(record)} {record.levelname} {record.name}: {line}"
        if record.levelno >= logging.WARNING:
            return f"{record.levelname.lower()}: {line}"
        return line


class JsonFormatter(logging.Formatter):
    """Lays a record out as one JSON object, in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        fields = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        return json.dumps(fields | _cause(record))


class StderrHandler(logging.Handler):
    """Writes records to whatever standard error is at that moment; a standard error that is gone loses them."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record at once."""
        with suppress(OSError, ValueError):
            print(self.format(record), file=sys.stderr, flush=True)


def start_logging(options: LogOptions) -> None:
    """Log to standard error from now on, and let processes that this one starts do the same."""
    os.environ.update(options.environment())
    handler = StderrHandler()
    handler.setFormatter(options.formatter)
    send_logs(handler, options)


def follow_logging() -> None:
    """Log as the process that started this one does; where none chose anything, leave logging as it is."""
    if VERBOSE_VARIABLE in os.environ:
        start_logging(LogOptions.from_environment())


def send_logs(handler: logging.Handler, options: LogOptions) -> None:
    """Send what the packages log to one handler alone, which takes the place of an earlier one."""
    for name in PACKAGES:
        logger = logging.getLogger(name)
        # A copy of the list, since handlers are removed from it meanwhile.
        for earlier in list(logger.handlers):
            if getattr(earlier, _OURS, False):
                logger.removeHandler(earlier)
        logger.addHandler(handler)
        logger.setLevel(options.level)
    setattr(handler, _OURS, True)


def replay(line: str) -> bool:
    """Log again what another of our processes logged as JSON; return whether the line is such a record."""
    try:
        fields: Any = json.loads(line)
    except ValueError:
        return False
    if not isinstance(fields, dict) or not {"level", "logger", "message"} <= fields.keys():
        return False
    # Everything in the line is a stranger's word, as far as this process knows.
    name = str(fields["logger"])
    level = logging.getLevelNamesMapping().get(str(fields["level"]))
    # The line may come from a process that a submission took over: it speaks for our packages alone.
    if level is None or name.partition(".")[0] not in PACKAGES:
        return False
    logging.getLogger(name).log(level, "%s", fields["message"])
    return True


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() not in ("", "0", "false", "no")


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _cause(record: logging.LogRecord) -> dict[str, Any]:
    """Return which error came where. Its text stays out unless it is ours: it may quote data."""
    if not record.exc_info or record.exc_info[1] is None:
        return {}
    error = record.exc_info[1]
    name = type(error).__name__
    if isinstance(error, ArchipelagoError):
        name += f": {error}"
    elif isinstance(error, OSError) and error.strerror:
        # Without the file that it names.
        name += f": {error.strerror}"
    frames = [
        f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})"
        for frame in reversed(traceback.extract_tb(error.__traceback__)[-_MAX_FRAMES:])
    ]
    return {"error": name, "frames": frames}
