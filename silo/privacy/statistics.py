"""Draws a plan's differentially private statistics: debit, draw, write, record, and only then use.

A draw is stored under its debit's digest beside the ledger before it is recorded there. After a crash the same call
continues where it stopped: no second debit, and no second draw for one debit.

With the patient as the unit every statistic uses one record of each patient, drawn uniformly for that statistic alone:
replacing all records of a patient then replaces one record, the change that the noise hides.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddm.diffusion.path import path_named
from ddm.errors import DataError, LedgerError, PolicyError
from ddm.images.rows import Images, blocks, rows_of
from ddm.io.files import write_atomic
from ddm.io.tensors import save_tensors
from ddm.privacy.accounting import GRID, gaussian_mu, t_release
from ddm.privacy.noise import (
    OS_NOISE,
    Noise,
    discrete_laplace,
    one_per_unit,
    rounded_gaussian,
    shuffled,
)
from ddm.privacy.plan_cost import Kind, mechanisms, paid_mechanisms
from ddm.protocol.base import sha256_file
from ddm.protocol.plan import (
    ClassCountsStatistic,
    CountsStatistic,
    Plan,
    SketchStatistic,
)
from ddm.routers.sketch import Sketch
from silo.privacy.ledger import Ledger

# Shape legend: N records, U units, G public groups, R sketch dimensions.

STATISTIC_NAMES: Mapping[Kind, str] = {
    "counts": "counts.safetensors",
    "class_counts": "class_counts.safetensors",
    "sketch": "sketch.safetensors",
}
# values at a time, so that a statistic needs little more memory than its images
_BLOCK_VALUES = 2**20

Draw = Callable[[NDArray[np.int64], Noise], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Source:
    """Everything from which a plan's statistics are computed.

    Attributes:
        plan: the accepted plan.
        plan_digest: sha256 of its signed bytes.
        sketch: the plan's public sketch; statistics use its leading dimensions.
        images: shape (N, ...), read block by block.
        group_N: each image's public group.
        unit_N: the privacy unit of each image, numbered from 0 without a gap; with the image as the unit, its index.
        label_N: each image's class, None for a plan without classes.
        dataset_digest: of the cohort.
    """

    plan: Plan
    plan_digest: str
    sketch: Sketch
    images: Images
    group_N: Tensor
    unit_N: Tensor
    label_N: Tensor | None
    dataset_digest: str


def draw(
    kind: Kind, source: Source, ledger: Ledger, folder: Path, *, noise: Noise = OS_NOISE
) -> Path:
    """Draw one of the plan's statistics; a second call returns the same file.

    Args:
        kind: which statistic.
        source: the data it is computed from.
        ledger: of this site; the first of a plan's statistics debits them all.
        folder: where the file goes.
        noise: the operating system's, except in tests.

    Returns:
        The file in `folder`, named by `STATISTIC_NAMES`.

    Raises:
        PolicyError: the plan has no such statistic, or its sketch would not protect as its epsilon claims.
        DataError: groups, units or classes that do not fit the plan.
        BudgetError: the ledger would go over; no noise was drawn.
        LedgerError: the ledger is damaged, or an earlier draw is gone.
    """
    num_units = _check_units(source)
    draw_from = _prepared(kind, source)

    def make() -> Mapping[str, Tensor]:
        by_image = source.plan.statistics.unit == "image"
        chosen_U = (
            np.arange(num_units)
            if by_image
            else one_per_unit(source.unit_N.numpy(), num_units, noise)
        )
        return draw_from(chosen_U, noise)

    return _draw_once(kind, source, ledger, folder / STATISTIC_NAMES[kind], make)


def _prepared(kind: Kind, source: Source) -> Draw:
    """Do everything that may fail before the debit; the draw that is left needs the chosen records and noise."""
    terms = source.plan.statistics
    if kind == "counts":
        return _counts(source, terms.counts)
    if kind == "class_counts" and terms.class_counts:
        return _class_counts(source, terms.class_counts)
    if kind == "sketch" and terms.sketch:
        return _sketches(source, terms.sketch)
    expected = f"a statistic of {' or '.join(mechanisms(source.plan))}"
    raise PolicyError(f"plan {source.plan.plan_id}", expected=expected, got=kind)


def _check_units(source: Source) -> int:
    """Check each record's unit; return the number of units."""
    num_records, num_units = len(source.images), int(source.unit_N.max()) + 1
    present_U = torch.unique(source.unit_N)  # ascending
    whole = len(source.unit_N) == num_records and torch.equal(present_U, torch.arange(num_units))
    if not whole or (source.plan.statistics.unit == "image" and num_units != num_records):
        expected = f"units 0, 1, 2, ... without a gap for {num_records} images, each once if the unit is the image"
        got = f"{len(present_U)} different units up to {num_units - 1} for {len(source.unit_N)} images"
        raise DataError("privacy units", expected=expected, got=got)
    return num_units


def _counts(source: Source, terms: CountsStatistic) -> Draw:
    """Draw the histogram over public groups, with discrete Laplace noise."""
    group_N = _cells(source.group_N, terms.num_groups, len(source.images), "groups")

    def draw_from(chosen_U: NDArray[np.int64], noise: Noise) -> Mapping[str, Tensor]:
        true_G = np.bincount(group_N[chosen_U], minlength=terms.num_groups)
        return {
            "counts": torch.from_numpy(
                true_G + discrete_laplace(terms.num_groups, terms.epsilon, noise)
            )
        }

    return draw_from


def _class_counts(source: Source, terms: ClassCountsStatistic) -> Draw:
    """Draw the histogram over classes and public groups, with discrete Laplace noise."""
    num_groups = source.plan.statistics.counts.num_groups
    if source.label_N is None:
        raise DataError("classes", expected="one for each image", got="images without classes")
    group_N = _cells(source.group_N, num_groups, len(source.images), "groups")
    cell_N = group_N + num_groups * _cells(
        source.label_N, terms.num_classes, len(source.images), "classes"
    )
    num_cells = terms.num_classes * num_groups

    def draw_from(chosen_U: NDArray[np.int64], noise: Noise) -> Mapping[str, Tensor]:
        noisy = np.bincount(cell_N[chosen_U], minlength=num_cells) + discrete_laplace(
            num_cells, terms.epsilon, noise
        )
        return {"counts": torch.from_numpy(noisy.reshape(terms.num_classes, num_groups))}

    return draw_from


def _sketches(source: Source, terms: SketchStatistic) -> Draw:
    """Draw one noised sketch per unit, in a random order.

    ``s_r = alpha_r s_0 + (sigma_r / C) n``, with s_0 and the noise rounded to the public grid.
    """
    whole_NR = _on_grid(source, terms.rank)
    path, scale = path_named(source.plan.objective.ensemble_path), source.sketch.scale
    mu = gaussian_mu(terms.epsilon, terms.delta)
    t_r = torch.tensor(t_release(mu, scale, path, terms.rank), dtype=torch.float64)
    alpha, sigma = float(path.alpha(t_r)), float(path.sigma(t_r))

    def draw_from(chosen_U: NDArray[np.int64], noise: Noise) -> Mapping[str, Tensor]:
        noised_UR, block = (
            np.empty((len(chosen_U), terms.rank), np.int64),
            max(1, _BLOCK_VALUES // terms.rank),
        )
        for start in range(0, len(noised_UR), block):
            rows = whole_NR[chosen_U[start : start + block]]
            noised_UR[start : start + block] = rows + rounded_gaussian(
                rows.shape, sigma / (alpha * scale) / GRID, noise
            )
        order_U, sketch_UR = shuffled(len(noised_UR), noise), torch.empty(noised_UR.shape)
        for start in range(0, len(noised_UR), block):
            sketch_UR[start : start + block] = _from_grid(
                noised_UR[order_U[start : start + block]], alpha * GRID
            )
        return {"sketch": sketch_UR}

    return draw_from


def _on_grid(source: Source, rank: int) -> NDArray[np.int32]:
    """Return every image's sketch in the unit ball, in whole steps of the public grid, of which 2^16 are a radius."""
    source.sketch.check()
    sketch, whole_NR = source.sketch.head(rank), np.empty((len(source.images), rank), np.int32)
    for start, block in blocks(
        source.images, size=rows_of(8 * _BLOCK_VALUES, source.images.shape[1:], 8)
    ):
        whole_NR[start : start + len(block)] = np.rint(sketch.project(block).numpy() / GRID)
    return whole_NR


def _from_grid(whole: NDArray[np.int64], step: float) -> Tensor:
    """Return whole steps as float32; this rounding comes after the noise, so it is post-processing."""
    return torch.from_numpy(whole * step).float()


def _cells(index_N: Tensor, num: int, num_records: int, subject: str) -> NDArray[np.int64]:
    """Return each image's cell, checked."""
    outside = int(((index_N < 0) | (index_N >= num)).sum())
    if len(index_N) != num_records or outside:
        expected = f"one of 0 to {num - 1} for each of {num_records} images"
        raise DataError(
            subject, expected=expected, got=f"{len(index_N)} entries, {outside} of them outside"
        )
    return np.asarray(index_N.numpy(), dtype=np.int64)


def _draw_once(
    kind: Kind, source: Source, ledger: Ledger, path: Path, make: Callable[[], Mapping[str, Tensor]]
) -> Path:
    plan = source.plan
    with ledger.drawing():
        if path.exists() and not ledger.has_drawn(sha256_file(path)):
            raise LedgerError(
                f"draw of {kind}",
                expected="a draw in the ledger for the statistic that is there",
                got="no such draw: the ledger is older",
                remedy="Restore the newest ledger with its draws from backup; nothing is drawn until then.",
            )
        debit = ledger.spend(
            plan.plan_id,
            source.plan_digest,
            source.dataset_digest,
            plan.statistics.unit,
            paid_mechanisms(plan, int(source.unit_N.max()) + 1),
        )
        kept = ledger.draws / f"{debit.digest}.{STATISTIC_NAMES[kind]}"
        recorded = ledger.draw_of(debit, kind)
        if recorded is None:
            if not kept.exists():
                save_tensors(kept, make())
            ledger.record_draw(debit, kind, sha256_file(kept))
        elif not kept.exists() or sha256_file(kept) != recorded:
            raise LedgerError(
                f"draw of {kind}",
                expected="the file that was drawn for its debit",
                got="a file with another digest" if kept.exists() else "no file",
                remedy="Restore draws/ beside the ledger. Drawing again would need a new debit, so a new plan.",
            )
        write_atomic(path, kept.read_bytes())
    return path
