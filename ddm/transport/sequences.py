"""Submissions and receipts lie under their sequence number, with or without a suffix."""

import re
from pathlib import Path

_SEQUENCE = re.compile(r"[1-9][0-9]{0,6}")


def sequences(folder: Path, suffix: str = "") -> set[int]:
    """Return the sequence numbers under which something lies in a folder; what has another name does not count.

    Args:
        folder: it need not exist.
        suffix: what follows the number, e.g. ``".json"``.
    """
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
    numbers = (name.removesuffix(suffix) for name in names if name.endswith(suffix))
    return {int(number) for number in numbers if _SEQUENCE.fullmatch(number)}
