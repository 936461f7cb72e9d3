"""What the packages log: one line a record, as people or programs read it; the same in processes that were started."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from ddm.errors import DataError
from ddm.system.logs import (
    JSON_VARIABLE,
    PACKAGES,
    VERBOSE_VARIABLE,
    JsonFormatter,
    LogOptions,
    PlainFormatter,
    follow_logging,
    replay,
    start_logging,
)
from ddm.system.processes import program
from tests.conftest import PublishedRelease

LOG = logging.getLogger("silo.worker.made_up")


@pytest.fixture(autouse=True)
def quiet_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Options and handlers of a test end with it."""
    for variable in (VERBOSE_VARIABLE, JSON_VARIABLE):
        monkeypatch.setenv(variable, "0")
    yield
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)


def test_log_is_plain_lines_and_marks_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging(LogOptions())
    LOG.debug("a detail")
    LOG.info("[%s] %s", "north", "training")
    LOG.warning("the disk is full\n\x1b[2J")
    assert capsys.readouterr().err == "[north] training\nwarning: the disk is full\\n\\x1b[2J\n"


def test_verbose_log_holds_details_with_time_level_and_logger(
    capsys: pytest.CaptureFixture[str],
) -> None:
    start_logging(LogOptions(verbose=True))
    LOG.debug("a detail")
    time, level, logger, *message = capsys.readouterr().err.split()
    assert datetime.fromisoformat(time).tzinfo and (level, logger) == (
        "DEBUG",
        "silo.worker.made_up:",
    )
    assert message == ["a", "detail"]


def test_json_log_is_one_ascii_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging(LogOptions(as_json=True))
    LOG.warning("first\nsecond \x1b[2J \u202e")
    (line,) = capsys.readouterr().err.splitlines()
    record = json.loads(line)
    assert line.isascii() and set(record) == {"time", "level", "logger", "message"}
    assert (record["level"], record["logger"]) == ("WARNING", "silo.worker.made_up")
    assert record["message"] == "first\nsecond \x1b[2J \u202e"


@pytest.mark.parametrize(
    "formatter", [PlainFormatter(), PlainFormatter(details=True), JsonFormatter()]
)
@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ValueError("patient Smith"), "ValueError"),
        (
            FileNotFoundError(2, "No such file or directory", "/data/smith.png"),
            "No such file or directory",
        ),
        (DataError("images", expected="pixels", got="none"), "images: expected pixels"),
    ],
)
def test_log_of_an_error_says_which_and_where_but_not_what_it_quotes(
    formatter: logging.Formatter, error: Exception, shown: str
) -> None:
    try:
        raise error
    except Exception:
        record = LOG.makeRecord(LOG.name, logging.ERROR, "", 0, "it failed", (), sys.exc_info())
    line = formatter.format(record)
    assert shown in line and "test_log_of_an_error" in line and "\n" not in line
    assert "mith" not in line and "Smith" not in line


def test_a_later_choice_replaces_an_earlier_one(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (LogOptions(), LogOptions(verbose=True), LogOptions(as_json=True)):
        start_logging(options)
    LOG.info("once")
    assert json.loads(capsys.readouterr().err)["message"] == "once"


def test_log_of_other_libraries_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging(LogOptions(verbose=True))
    logging.getLogger("somebody.else").info("what others say")
    assert capsys.readouterr().err == ""


def test_processes_log_as_the_one_that_started_them(capfd: pytest.CaptureFixture[str]) -> None:
    start_logging(LogOptions(verbose=True, as_json=True))
    text = "import logging; from ddm.system.logs import follow_logging; follow_logging(); {}"
    program = text.format("logging.getLogger('ddm.x').debug('from a child')")
    subprocess.run([sys.executable, "-c", program], check=True)
    assert json.loads(capfd.readouterr().err)["message"] == "from a child"


def test_a_library_that_nobody_started_as_a_command_leaves_logging_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VERBOSE_VARIABLE)
    follow_logging()
    assert not any(logging.getLogger(package).handlers for package in PACKAGES)


def test_records_of_another_process_are_logged_again_and_other_lines_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    start_logging(LogOptions(verbose=True))
    record = LOG.makeRecord(
        "aggregator.runtime.made_up", logging.WARNING, "", 0, "100%% of %s", ("it",), None
    )
    assert replay(JsonFormatter().format(record))
    assert capsys.readouterr().err.endswith("WARNING aggregator.runtime.made_up: 100% of it\n")
    for line in (
        "[north] accepted",
        "",
        "[]",
        "7",
        '{"level": "INFO"}',
        '{"level": "?", "logger": "ddm", "message": ""}',
    ):
        assert not replay(line)
    assert not replay('{"level": "INFO", "logger": "root", "message": "from a stranger"}')


def test_options_before_the_command_choose_the_log(
    published: PublishedRelease, tmp_path: Path
) -> None:
    look = ("verify", published.release, "--root", published.root, "--state", tmp_path / "state")
    command = [str(program("ddm")), "--verbose", "--log-json", *map(str, look)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    records = [json.loads(line) for line in result.stderr.splitlines()]
    assert any(
        record["level"] == "DEBUG" and record["message"].startswith("verified ")
        for record in records
    )
    assert result.stdout.startswith("Verified ")
    refused = subprocess.run(
        [*command[:-2], "--state", "/dev/null/x"], capture_output=True, text=True, check=False
    )
    assert refused.returncode and all(
        json.loads(line)["time"] for line in refused.stderr.splitlines()
    )
