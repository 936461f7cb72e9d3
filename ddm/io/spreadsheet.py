"""Cells of CSV files that people open in a spreadsheet, which runs a cell as a formula if it begins with some signs.

The attack: anybody who names a file of an export ``=HYPERLINK(...)`` or ``@SUM(...)`` has the spreadsheet of the one
who opens the list of left-out images send data, or start a program.
"""

# OWASP, "CSV Injection".
_FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")
_QUOTE = "'"


def quote_cell(cell: object) -> object:
    """Return what to write for a cell: a text that would be a formula, or that begins with the quote, gets a quote."""
    # Numbers of ours stay numbers.
    if isinstance(cell, str) and cell.startswith((*_FORMULA_SIGNS, _QUOTE)):
        return _QUOTE + cell
    return cell


def unquote_cell(text: str) -> str:
    """Return the text that `quote_cell` made this cell of."""
    return text.removeprefix(_QUOTE)
