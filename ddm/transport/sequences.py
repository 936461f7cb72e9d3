"""Sequence numbers in the names of submissions and receipts: ``3/``, ``3.json``, ``3.held.json``."""

import re
from pathlib import Path

_SEQUENCE = re.compile(r"[1-9][0-9]{0,6}")


def sequence_numbers(folder: Path, suffix: str = "") -> set[int]:
    """Return the sequence numbers of the entries of a folder; entries of another name are left out.

    Args:
        folder: it need not exist.
        suffix: what follows the number, e.g. ``".json"``.
    """
    if not folder.is_dir():
        return set()
    # Parts on their way and other files have names of their own, which are not numbers.
    numbers = set()
    for path in folder.iterdir():
        number = path.name.removesuffix(suffix)
        if path.name.endswith(suffix) and _SEQUENCE.fullmatch(number):
            numbers.add(int(number))
    return numbers
