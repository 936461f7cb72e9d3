"""Draws statistics for an attacker with the silos' own code and the system's noise.

It calls `silo.privacy.statistics.draw_statistic`.
Only the ledger is disabled, since an attack repeats what a site does once.
"""

import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from math import ceil, sqrt
from pathlib import Path

import torch
from torch import Tensor

from ddm.io.tensors import load_tensors
from ddm.privacy.noise import OS_NOISE, Noise
from ddm.protocol.base import Unit
from ddm.protocol.plan import Plan
from ddm.protocol.statistics import Budget, StatisticKind
from ddm.routers.sketch import Sketch
from ddm.statistics.base import StatisticSource
from ddm.statistics.sketch import sketch_noise_level
from examples.paper.plan import plan_for
from silo.privacy.ledger import Ledger, LedgerEntry
from silo.privacy.statistics import draw_statistic

# Shape legend: N images, U units, R sketch dimensions, D values of an image, G public groups.

Released = Mapping[StatisticKind, Mapping[str, Tensor]]
MAX_GROUPS = 4096  # that a plan may have


def noise_of(plan: Plan, sketch: Sketch) -> tuple[float, float]:
    """Return alpha and sigma / C at the noise level at which a plan's sketches are released."""
    t_r = sketch_noise_level(plan, sketch) or 1.0
    return 1 - t_r, t_r / sketch.scale


def public_sketch(rank: int, scale: float = 1.0, num_groups: int = 1) -> Sketch:
    """Return a sketch of an image's first `rank` values; images are just large enough."""
    return Sketch(
        basis_RD=torch.eye(rank, _side(rank) ** 2),
        mean_D=torch.zeros(_side(rank) ** 2),
        scale=scale,
        group_mean_GR=torch.zeros(num_groups, rank),
        group_cov_GRR=torch.eye(rank).repeat(num_groups, 1, 1),
        group_weight_G=torch.full((num_groups,), 1 / num_groups),
    )


def _side(rank: int) -> int:
    return 2 * ceil(sqrt(rank) / 2)


def images_of(s_UR: Tensor, sketch: Sketch) -> Tensor:
    """Return images that have these sketches."""
    side = _side(sketch.rank)
    return (sketch.scale * s_UR @ sketch.basis_RD.double()).reshape(len(s_UR), 1, side, side)


def make_source(
    plan: Plan, sketch: Sketch, images_U: Tensor, group_U: Tensor, images_each: int = 1
) -> StatisticSource:
    images_N, group_N = (part.repeat_interleave(images_each, dim=0) for part in (images_U, group_U))
    unit_N = torch.arange(len(images_N))
    return StatisticSource(
        plan=plan,
        plan_digest=plan.digest,
        sketch=sketch,
        images=images_N,
        group_N=group_N,
        unit_N=unit_N // images_each if plan.statistics.unit == "patient" else unit_N,
        label_N=None,
        dataset_digest="0" * 64,
    )


def release(
    source: StatisticSource, kinds: tuple[StatisticKind, ...], noise: Noise = OS_NOISE
) -> Released:
    """Draw statistics with the silos' code."""
    with tempfile.TemporaryDirectory() as scratch:
        budget = Budget(epsilon=1000.0, delta=0.5)
        ledger = _Unmetered(
            Path(scratch) / "ledger.jsonl", budget=budget, unit=source.plan.statistics.unit
        )
        ledger.draws.mkdir()
        paths = {
            kind: draw_statistic(kind, source, ledger, Path(scratch), noise=noise) for kind in kinds
        }
        return {kind: load_tensors(path, None, max_bytes=1 << 30) for kind, path in paths.items()}


def sketches_in_order(source: StatisticSource) -> Tensor:
    """Release sketches and put row i back where record i stood, shape (N, R); no attacker could.

    The same random bits once more, for cohorts whose sketches are all 0 and whose first dimensions count upwards: the
    difference of the two tells which record became which row.
    """
    num = len(source.images)
    sketch = source.sketch
    tape = _Tape()
    count_N = torch.arange(num, dtype=torch.float64) / num
    released_NR, blank_NR, counted_NR = (
        release(replace(source, images=images), ("sketch",), tape.rewound())["sketch"][
            "sketch"
        ].double()
        for images in (source.images, *_markers(source, count_N))
    )
    alpha, _ = noise_of(source.plan, sketch)
    order_N = ((counted_NR - blank_NR)[:, 0] / alpha * num).round().long()
    if not torch.equal(order_N.sort().values, torch.arange(num)):
        raise ValueError(
            "row order: expected a permutation of all records from the repeated random bits, got another order"
        )
    found_NR = torch.empty_like(released_NR)
    found_NR[order_N] = released_NR
    return found_NR


def _markers(source: StatisticSource, count_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return images whose sketches are 0, and such whose sketches have `count_N` in the first dimension."""
    sketch = source.sketch
    shape = source.images.shape
    blank_ND = sketch.mean_D.double().expand(len(count_N), -1)
    counted_ND = blank_ND + sketch.scale * count_N[:, None] * sketch.basis_RD[0].double()
    return blank_ND.reshape(shape), counted_ND.reshape(shape)


class _Tape:
    """The operating system's random bits, recorded so that they can be replayed."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self._next = 0

    def rewound(self) -> "_Tape":
        self._next = 0
        return self

    def octets(self, num: int) -> bytes:
        if self._next == len(self._kept):
            self._kept.append(OS_NOISE.octets(num))
        self._next += 1
        return self._kept[self._next - 1]

    def below(self, bound: int) -> int:
        raise NotImplementedError(
            "random bits: expected a request for octets, as sketches make, got another one"
        )


class _Unmetered(Ledger):
    """A ledger that records nothing."""

    def spend(self, *_: object) -> LedgerEntry:
        return LedgerEntry(secrets.token_hex(32), None)  # type: ignore[arg-type]

    def draw_of(self, *_: object) -> None:
        return None

    def record_draw(self, debit: LedgerEntry, *_: object) -> LedgerEntry:
        return debit


def make_plan(statistics: Mapping[str, object], *, rank: int = 1, unit: Unit = "image") -> Plan:
    """Write a plan with these statistics."""
    side = _side(rank)
    terms: dict[str, object] = {
        "unit": unit,
        "total": {"epsilon": 1000.0, "delta": 0.5},
        "counts": {"epsilon": 1.0, "num_groups": 1},
    }
    terms |= statistics
    return plan_for((1, side, side), terms, num_groups=MAX_GROUPS, rank=rank)
