"""The differentially private outputs of one plan: debit, draw, write, record, and only then use.

A draw lies under its debit's digest beside the ledger before it is recorded there. After a crash the same call goes on
where it stopped: no second debit, and no second draw for one debit.

With the patient as the unit every statistic looks at one record of each patient, drawn uniformly for that statistic
alone: exchanging all that a patient has then exchanges one record, which is what the noise is made for.
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
from ddm.io.files import write_atomic
from ddm.io.tensors import save_tensors
from ddm.privacy.accounting import GRID, gaussian_mu, moments_sensitivity, t_release
from ddm.privacy.noise import OS_NOISE, Noise, discrete_laplace, one_per_unit, rounded_gaussian, shuffled
from ddm.privacy.plan_cost import Kind, mechanisms
from ddm.protocol.base import sha256_file
from ddm.protocol.plan import ClassCountsStatistic, CountsStatistic, MomentsStatistic, Plan, SketchStatistic
from ddm.routers.sketch import Sketch
from silo.privacy.ledger import Ledger

# Shape legend: N records, U units, G public groups, R sketch dimensions.

STATISTIC_NAMES: Mapping[Kind, str] = {
    "counts": "counts.safetensors",
    "class_counts": "class_counts.safetensors",
    "moments": "moments.safetensors",
    "sketch": "sketch.safetensors",
}
_BLOCK_VALUES = 2**20  # so many at a time; a statistic never needs much more memory than its images

Draw = Callable[[NDArray[np.int64], Noise], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Source:
    """All that a plan's statistics are made from.

    Attributes:
        plan: the accepted plan.
        plan_digest: sha256 of its signed bytes.
        sketch: the plan's public sketch; statistics use its leading dimensions.
        images: shape (N, C, H, W).
        group_N: each image's public group.
        unit_N: the privacy unit of each image, numbered from 0 without a gap; with the image as the unit, its index.
        label_N: each image's class, None where the plan asks for no classes.
        dataset_digest: of the cohort.
    """

    plan: Plan
    plan_digest: str
    sketch: Sketch
    images: Tensor
    group_N: Tensor
    unit_N: Tensor
    label_N: Tensor | None
    dataset_digest: str


def draw(kind: Kind, source: Source, ledger: Ledger, folder: Path, *, noise: Noise = OS_NOISE) -> Path:
    """Release one of the plan's outputs; asked again, hand out the same file.

    Args:
        kind: which one.
        source: what it is made from.
        ledger: of this site; the first of a plan's statistics debits them all.
        folder: where the file goes.
        noise: the operating system's; tests hand in another.

    Returns:
        The file in `folder`, called as in `STATISTIC_NAMES`.

    Raises:
        PolicyError: the plan asks for no such statistic, or its sketch would not protect as its epsilon claims.
        DataError: groups, units or classes that do not fit the plan.
        BudgetError: the ledger would go over; no noise was drawn.
        LedgerError: the ledger is damaged, or an earlier draw is gone.
    """
    num_units = _check_units(source)
    draw_from = _prepared(kind, source)

    def make() -> Mapping[str, Tensor]:
        by_image = source.plan.statistics.unit == "image"
        chosen_U = np.arange(num_units) if by_image else one_per_unit(source.unit_N.numpy(), num_units, noise)
        return draw_from(chosen_U, noise)

    return _draw_once(kind, source, ledger, folder / STATISTIC_NAMES[kind], make)


def _prepared(kind: Kind, source: Source) -> Draw:
    """Do all that may fail before anything is debited; what is left needs the choice of records, and noise."""
    asked = source.plan.statistics
    if kind == "counts":
        return _counts(source, asked.counts)
    if kind == "class_counts" and asked.class_counts:
        return _class_counts(source, asked.class_counts)
    if kind == "moments" and asked.moments:
        return _moments(source, asked.moments)
    if kind == "sketch" and asked.sketch:
        return _sketches(source, asked.sketch)
    expected = f"a statistic of {' or '.join(mechanisms(source.plan))}"
    raise PolicyError(f"plan {source.plan.plan_id}", expected=expected, got=kind)


def _check_units(source: Source) -> int:
    """Check each record's unit; return the number of units."""
    num_records, num_units = len(source.images), int(source.unit_N.max()) + 1
    present_U = torch.unique(source.unit_N)  # ascending
    whole = len(source.unit_N) == num_records and torch.equal(present_U, torch.arange(num_units))
    if not whole or (source.plan.statistics.unit == "image" and num_units != num_records):
        expected = "one of units 0, 1, 2, ... for each image, and none of them twice if the unit is the image"
        raise DataError("privacy units", expected=expected, got="others")
    return num_units


def _counts(source: Source, asked: CountsStatistic) -> Draw:
    """Draw the histogram over public groups, with discrete Laplace noise."""
    group_N = _cells(source.group_N, asked.num_groups, len(source.images), "groups")

    def draw_from(chosen_U: NDArray[np.int64], noise: Noise) -> Mapping[str, Tensor]:
        true_G = np.bincount(group_N[chosen_U], minlength=asked.num_groups)
        return {"counts": torch.from_numpy(true_G + discrete_laplace(asked.num_groups, asked.epsilon, noise))}

    return draw_from


def _class_counts(source: Source, asked: ClassCountsStatistic) -> Draw:
    """Draw the histogram over classes and public groups, with discrete Laplace noise."""
    num_groups = source.plan.statistics.counts.num_groups
    if source.label_N is None:
        raise DataError("classes", expected="one for each image", got="none")
    group_N = _cells(source.group_N, num_groups, len(source.images), "groups")
    cell_N = group_N + num_groups * _cells(source.label_N, asked.num_classes, len(source.images), "classes")
    num_cells = asked.num_classes * num_groups

    def draw_from(chosen_U: NDArray[np.int64], noise: Noise) -> Mapping[str, Tensor]:
        noisy = np.bincount(cell_N[chosen_U], minlength=num_cells) + discrete_laplace(num_cells, asked.epsilon, noise)
        return {"counts": torch.from_numpy(noisy.reshape(asked.num_classes, num_groups))}

    return draw_from


def _moments(source: Source, asked: MomentsStatistic) -> Draw:
    """Draw the sums of ``s`` and of ``s s^T`` over units, each term on the public grid, with Gaussian noise.

    Isotropic noise on ``(sum s, sum s s^T / sqrt(2))``: a symmetric matrix has its off-diagonal entries twice in the
    norm, so that they get `std` and the diagonal ``sqrt(2) std``.
    """
    whole_NR = _on_grid(source, asked.rank)
    std = moments_sensitivity(asked.rank) / gaussian_mu(asked.epsilon, asked.delta) / GRID

    def draw_from(chosen_U: NDArray[np.int64], noise: Noise) -> Mapping[str, Tensor]:
        whole_UR = whole_NR[chosen_U]
        sum_R = whole_UR.sum(0) + rounded_gaussian((asked.rank,), std, noise)
        second_RR = np.zeros((asked.rank, asked.rank), dtype=np.int64)
        block = max(1, _BLOCK_VALUES // asked.rank**2)
        for start in range(0, len(whole_UR), block):
            rows = whole_UR[start : start + block]
            second_RR += np.rint(rows[:, :, None] * rows[:, None] * GRID).astype(np.int64).sum(0)
        upper_RR = np.triu(rounded_gaussian(second_RR.shape, std, noise), 1)
        second_RR += upper_RR + upper_RR.T + np.diag(rounded_gaussian((asked.rank,), np.sqrt(2.0) * std, noise))
        return {"sum": _from_grid(sum_R, GRID), "second": _from_grid(second_RR, GRID)}

    return draw_from


def _sketches(source: Source, asked: SketchStatistic) -> Draw:
    """Draw one noised sketch per unit, in a random order.

    ``s_r = alpha_r s_0 + (sigma_r / C) n``, with s_0 rounded to the public grid and the noise rounded to it as well.
    """
    whole_NR = _on_grid(source, asked.rank)
    path, scale = path_named(source.plan.objective.path), source.sketch.scale
    mu = gaussian_mu(asked.epsilon, asked.delta)
    at = torch.tensor(t_release(mu, scale, path, asked.rank), dtype=torch.float64)
    alpha, sigma = float(path.alpha(at)), float(path.sigma(at))

    def draw_from(chosen_U: NDArray[np.int64], noise: Noise) -> Mapping[str, Tensor]:
        whole_UR = whole_NR[chosen_U]
        block = max(1, _BLOCK_VALUES // asked.rank)
        for start in range(0, len(whole_UR), block):
            rows = whole_UR[start : start + block]
            rows += rounded_gaussian(rows.shape, sigma / (alpha * scale) / GRID, noise)
        return {"sketch": _from_grid(whole_UR[shuffled(len(whole_UR), noise)], alpha * GRID)}

    return draw_from


def _on_grid(source: Source, rank: int) -> NDArray[np.int64]:
    """Return every image's sketch in the unit ball, in whole steps of the public grid."""
    source.sketch.check()
    s_NR = source.sketch.head(rank).project(source.images).numpy()
    return np.rint(s_NR / GRID).astype(np.int64)


def _from_grid(whole: NDArray[np.int64], step: float) -> Tensor:
    """Return whole steps as numbers; rounding to float32 comes after the noise and betrays nothing."""
    return torch.from_numpy(whole * step).float()


def _cells(index_N: Tensor, num: int, num_records: int, subject: str) -> NDArray[np.int64]:
    """Return each image's cell, checked."""
    if len(index_N) != num_records or int(index_N.min()) < 0 or int(index_N.max()) >= num:
        raise DataError(subject, expected=f"one of 0 to {num - 1} for each image", got="others")
    return np.asarray(index_N.numpy(), dtype=np.int64)


def _draw_once(
    kind: Kind, source: Source, ledger: Ledger, path: Path, make: Callable[[], Mapping[str, Tensor]]
) -> Path:
    plan = source.plan
    with ledger.drawing():
        debit = ledger.spend(
            plan.plan_id, source.plan_digest, source.dataset_digest, plan.statistics.unit, mechanisms(plan)
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
                got="another file" if kept.exists() else "none",
                remedy="Restore private/draws from backup. Drawing again would need a new debit, so a new plan.",
            )
        write_atomic(path, kept.read_bytes())
    return path
