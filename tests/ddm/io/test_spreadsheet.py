"""Cells of CSV files: none is a formula in a spreadsheet, and each reads back as it was."""

from ddm.io.spreadsheet import quote_cell, unquote_cell
from tests.support.case import case


def test_no_cell_is_a_formula_and_each_reads_back() -> None:
    for text in ("=1+1", "+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "'=1", "''", "plain", "", "a=b"):
        with case(text=text):
            quoted = quote_cell(text)
            assert isinstance(quoted, str)
            assert not quoted.startswith(("=", "+", "-", "@", "\t", "\r"))
            assert unquote_cell(quoted) == text


def test_numbers_stay_numbers() -> None:
    assert quote_cell(-3) == -3
    assert quote_cell(None) is None
