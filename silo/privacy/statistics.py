"""Draws a plan's differentially private statistics: debit, draw, write, record, and only then use.

A draw is stored under its debit's digest beside the ledger before it is recorded there. After a crash the same call
continues where it stopped: no second debit, and no second draw for one debit.

With the patient as the unit every statistic uses one record of each patient, drawn uniformly for that statistic alone:
replacing all records of a patient then replaces one record, the change that the noise hides.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddm.errors import DataError, LedgerError, PolicyError
from ddm.io.files import write_atomic
from ddm.io.tensors import save_tensors
from ddm.privacy.noise import OS_NOISE, Noise, one_per_unit
from ddm.protocol.base import sha256_file
from ddm.protocol.statistics import StatisticKind
from ddm.statistics.base import Statistic, StatisticSource
from ddm.statistics.of_plan import statistics_of
from silo.privacy.ledger import Ledger
from silo.privacy.spending import PlannedSpending

# Shape legend: U units.


def draw_statistic(
    kind: StatisticKind,
    source: StatisticSource,
    ledger: Ledger,
    folder: Path,
    *,
    noise: Noise = OS_NOISE,
) -> Path:
    """Draw one of the plan's statistics; a second call returns the same file.

    Args:
        kind: which statistic.
        source: the data it is computed from.
        ledger: the ledger of this site; the first of a plan's statistics debits them all.
        folder: where the file goes.
        noise: the operating system's, except in tests.

    Returns:
        The file in `folder`, named by `Statistic.file_name`.

    Raises:
        PolicyError: the plan has no such statistic, or its sketch would not protect as its epsilon claims.
        DataError: groups, units or classes that do not fit the plan.
        BudgetError: the ledger would go over; no noise was drawn.
        LedgerError: the ledger is damaged, or an earlier draw is gone.
    """
    num_units = _check_units(source)
    statistics = statistics_of(source.plan.statistics)
    if kind not in statistics:
        expected = f"a statistic of {' or '.join(statistics)}"
        raise PolicyError(f"plan {source.plan.plan_id}", expected=expected, got=kind)
    # All that may fail comes before the debit, which cannot be taken back.
    statistic = statistics[kind]
    draw = statistic.prepare(source)

    def make_tensors() -> Mapping[str, Tensor]:
        record_U = _chosen_records(source, num_units, noise)
        return draw(record_U, noise)

    spending = PlannedSpending(
        source.plan,
        source.plan_digest,
        source.dataset_digest,
        num_units,
    )
    path = folder / statistic.file_name
    _draw_once(statistic, spending, ledger, path, make_tensors)
    return path


def _chosen_records(source: StatisticSource, num_units: int, noise: Noise) -> NDArray[np.int64]:
    """Return the record that stands for each unit, shape (U,)."""
    if source.plan.statistics.unit == "image":
        return np.arange(num_units)
    return one_per_unit(source.unit_N.numpy(), num_units, noise)


def _check_units(source: StatisticSource) -> int:
    """Check each record's unit; return the number of units."""
    num_records = len(source.images)
    # Two images of one patient under two numbers would count as two units, and a number without an image would make n,
    # which is public, too large: both would make the stated epsilon wrong.
    num_units = int(source.unit_N.max()) + 1
    present_U = torch.unique(source.unit_N)  # ascending
    has_no_gap = torch.equal(present_U, torch.arange(num_units))
    is_complete = len(source.unit_N) == num_records and has_no_gap
    counts_patients = source.plan.statistics.unit != "image"
    is_one_image_a_unit = num_units == num_records
    if not is_complete or not (counts_patients or is_one_image_a_unit):
        expected = f"units 0, 1, 2, ... without a gap for {num_records} images, each once if the unit is the image"
        got = f"{len(present_U)} different units up to {num_units - 1} for {len(source.unit_N)} images"
        raise DataError("privacy units", expected=expected, got=got)
    return num_units


def _draw_once(
    statistic: Statistic,
    spending: PlannedSpending,
    ledger: Ledger,
    path: Path,
    make_tensors: Callable[[], Mapping[str, Tensor]],
) -> None:
    """Debit the plan, draw where nothing was drawn for this debit yet, and write the draw to `path`."""
    # Two workers of one site must not both find nothing drawn, draw twice, and record one of the two.
    with ledger.drawing():
        # A statistic without its draw in the ledger was drawn after the copy of the ledger that is here now.
        if path.exists() and not ledger.has_drawn(sha256_file(path)):
            raise LedgerError(
                f"draw of {statistic.kind}",
                expected="a record in the ledger of the draw of this statistic",
                got="no such record: the ledger is older than the statistic",
                remedy="Restore the newest ledger with its draws from backup; nothing is drawn until then.",
            )
        # After a crash this returns the debit of the first attempt; see `Ledger.spend`.
        debit = spending.pay_from(ledger)
        drawn_path = ledger.draws / f"{debit.digest}.{statistic.file_name}"
        recorded_digest = ledger.draw_of(debit, statistic.kind)
        if recorded_digest is None:
            # A crash after the file was written and before it was recorded: the same file is recorded now.
            if not drawn_path.exists():
                save_tensors(drawn_path, make_tensors())
            ledger.record_draw(debit, statistic.kind, sha256_file(drawn_path))
        else:
            _check_drawn(drawn_path, recorded_digest, statistic)
        # Only now may anybody use the draw: it is durable and recorded, so that no crash can lead to a second one.
        write_atomic(path, drawn_path.read_bytes())


def _check_drawn(
    path: Path,
    recorded_digest: str,
    statistic: Statistic,
) -> None:
    """Refuse a file that is not the draw that the ledger records.

    Raises:
        LedgerError: it is another file, or is gone.
    """
    if not path.exists():
        got = "no file"
    elif sha256_file(path) != recorded_digest:
        got = "a file with another digest"
    else:
        return
    raise LedgerError(
        f"draw of {statistic.kind}",
        expected="the file that was drawn for its debit",
        got=got,
        remedy="Restore draws/ beside the ledger. Drawing again would need a new debit, and so a new plan.",
    )
