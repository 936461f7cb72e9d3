"""What commands show: tables and progress are plain and stable where nobody sits at a terminal, and obey no sender."""

import io
import sys

import pytest

from ddm.errors import SetupError
from ddm.system.console import fail, progress, say, table
from ddm.system.logs import JSON_VARIABLE, LogOptions, start_logging


class Terminal(io.StringIO):
    """Standard output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_table_aligns_names_to_the_left_and_numbers_to_the_right() -> None:
    drawn = table([("east", 7, "1.5"), ("a longer name", 1200, "-22")], ("silo", "images", "share"))
    assert drawn.splitlines() == [
        "silo           images  share",
        "-------------  ------  -----",
        "east                7    1.5",
        "a longer name    1200    -22",
    ]


def test_table_in_a_pipe_breaks_no_line_and_cuts_no_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    long = "word " * 200
    assert long.strip() in table([("a", long)], ("what", "value")).splitlines()[-1]


def test_table_at_a_terminal_wraps_cells_and_loses_nothing() -> None:
    words = [f"word{n}" for n in range(40)]
    lines = table([("a", " ".join(words))], ("what", "value"), width=60).splitlines()
    assert max(map(len, lines)) <= 60 and len(lines) > 4
    assert " ".join(lines[2:]).split() == ["a", *words]


def test_table_shows_markup_and_control_characters_of_a_cell_as_they_were_sent() -> None:
    drawn = table([("[red]a[/red] :smile:", "b\x1b[2J\nc\u202e")], ("[b]what[/b]", "value"))
    assert drawn.splitlines()[0].startswith("[b]what[/b]")
    assert drawn.splitlines()[2] == "[red]a[/red] :smile:  b\\x1b[2J\\nc\\u202e"


def test_table_without_rows_is_its_header() -> None:
    assert table([], ("what", "value")) == "what  value\n----  -----"


def test_progress_in_a_pipe_is_one_line_for_each_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("encoding [b]4[/b]") as advance:
        for num_done, total in ((1, 3), (2, 3), (3, 3), (1, 2), (2, 2), (1, 2)):
            advance(num_done, total)
    assert capsys.readouterr().out == "encoding [b]4[/b]\n" * 3


def test_progress_says_nothing_where_nothing_is_long(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("encoding"):
        pass
    assert capsys.readouterr().out == ""


def test_progress_at_a_terminal_is_a_bar_that_ends_full(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with progress("encoding [b]4[/b]") as advance:
        for num_done in range(1, 11):
            advance(num_done, 10)
    assert "encoding [b]4[/b]" in terminal.getvalue() and "100%" in terminal.getvalue()


def test_errors_are_records_of_the_log_where_all_of_standard_error_is_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import json

    monkeypatch.setenv(JSON_VARIABLE, "1")
    start_logging(LogOptions.from_environment())
    assert (
        fail(SetupError("--num", expected="a number", got="'x'", remedy="Give one."))
        == SetupError.exit_code
    )
    say("WARNING: look", error=True)
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [record["message"] for record in said] == [
        "--num: expected a number, got 'x'. Give one.",
        "WARNING: look",
    ]
    assert {record["level"] for record in said} == {"ERROR"}
