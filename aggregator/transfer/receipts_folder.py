"""What is on disk about a silo's receipts: which it has, which it lacks, and what arrived that it had not signed.

The folders are named in `aggregator.transfer.delivery`.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from ddm.io.files import read_bounded, write_atomic
from ddm.transport.sequences import sequence_numbers

_UNSIGNED = ".unsigned"
HELD = ".held"
_MAX_COUNT_BYTES = 20
# For how long a submission that cannot be fetched, or was not as signed, is left alone: twice as long each time.
HOLD_S = 60.0
_MAX_HOLD_S = 3600.0
_MAX_DOUBLINGS = 16  # far beyond the longest wait, and no overflow


def receipt_name(sequence: int, suffix: str, *, held: bool) -> str:
    """Return the name of a receipt, or of a notice that a person decides, or of the mark that it was delivered."""
    if held:
        return f"{sequence}{HELD}{suffix}"
    return f"{sequence}{suffix}"


def count_unsigned(receipts: Path, sequence: int) -> None:
    """Count that what arrived under this number was not as the silo signed it."""
    path = receipts / f"{sequence}{_UNSIGNED}"
    count = read_unsigned_count(path) + 1
    write_atomic(path, b"%d" % count)


def clear_unsigned(receipts: Path, sequence: int) -> None:
    """Remove that count once the silo's own submission is answered."""
    (receipts / f"{sequence}{_UNSIGNED}").unlink(missing_ok=True)


def unsigned_for_s(receipts: Path, sequence: int) -> float:
    """Return for how many seconds more a submission is not fetched again, after it was not as signed."""
    path = receipts / f"{sequence}{_UNSIGNED}"
    count = read_unsigned_count(path)
    if count == 0:
        return 0.0
    num_doublings = min(count - 1, _MAX_DOUBLINGS)
    delay_s = min(HOLD_S * 2.0**num_doublings, _MAX_HOLD_S)
    left_s = path.stat().st_mtime + delay_s - time.time()
    # A clock that was set back must not hold it for longer.
    return min(left_s, delay_s)


def read_unsigned_count(path: Path) -> int:
    """Read a count of `count_unsigned`; a damaged one counts as 1."""
    if not path.is_file():
        return 0
    text = read_bounded(path, _MAX_COUNT_BYTES)
    if text.isdigit():
        return int(text)
    return 1


def is_plan_finished(fed: Path, plan_id: str, silo_ids: Sequence[str]) -> bool:
    """Whether every silo of a plan has its last receipt, and nothing is left to do."""
    plan_receipts = fed / "receipts" / plan_id
    return all(is_silo_finished(plan_receipts / silo_id) for silo_id in silo_ids)


def is_silo_finished(receipts: Path) -> bool:
    """Whether a silo has its last receipt."""
    return (receipts / "final").exists() and not undelivered_receipts(receipts)


def earlier_plans(fed: Path, plan_id: str) -> list[Path]:
    """List the folders of receipts for other plans than this one."""
    folder = fed / "receipts"
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name != plan_id)


def undelivered_receipts(receipts: Path) -> list[int]:
    """List the submissions whose receipt did not reach the silo."""
    signed = sequence_numbers(receipts, ".json")
    delivered = sequence_numbers(receipts, ".delivered")
    return sorted(signed - delivered)


def undelivered_notices(receipts: Path) -> list[int]:
    """List the submissions that wait for a person without the silo's knowledge."""
    notices = sequence_numbers(receipts, f"{HELD}.json")
    delivered = sequence_numbers(receipts, f"{HELD}.delivered")
    # After the receipt itself the notice would only be confusing.
    answered = sequence_numbers(receipts, ".json")
    return sorted(notices - delivered - answered)
