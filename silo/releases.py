"""The differentially private outputs of one plan: debit, draw, write, record, and only then use.

A draw lies under its debit's digest beside the ledger before it is recorded there. After a crash the same call goes on
where it stopped: no second debit, and no second draw for one debit.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddm.errors import DataError, LedgerError
from ddm.files import write_atomic
from ddm.privacy import (
    GRID,
    OS_NOISE,
    DiscreteLaplaceMechanism,
    GaussianMechanism,
    Mechanism,
    Noise,
    discrete_laplace,
    gaussian_mu,
    rounded_gaussian,
    t_release,
)
from ddm.protocol.base import sha256_file
from ddm.protocol.plan import Plan
from ddm.schedule import path_named
from ddm.sketch import Sketch
from ddm.tensors import save_tensors
from silo.ledger import Kind, Ledger

COUNTS_NAME = "counts.safetensors"
SKETCH_NAME = "sketch.safetensors"
_BLOCK = 16384


def mechanisms(plan: Plan) -> Mapping[Kind, Mechanism]:
    """Return everything that the plan draws, by kind."""
    asked = plan.releases
    return {
        "counts": DiscreteLaplaceMechanism(epsilon=asked.counts.epsilon),
        "sketch": GaussianMechanism(mu=gaussian_mu(asked.sketch.epsilon, asked.sketch.delta)),
    }


def draw_counts(
    ledger: Ledger,
    plan: Plan,
    plan_digest: str,
    group_N: Tensor,
    dataset_digest: str,
    folder: Path,
    *,
    noise: Noise = OS_NOISE,
) -> Path:
    """Release the histogram over public groups, with discrete Laplace noise.

    Args:
        ledger: of this site.
        plan: the accepted plan.
        plan_digest: sha256 of its signed bytes.
        group_N: each unit's group.
        dataset_digest: of the cohort.
        folder: where the file goes.
        noise: the operating system's; tests hand in another.

    Returns:
        ``folder/counts.safetensors``, holding ``counts``, int64 (G,).

    Raises:
        BudgetError: the ledger would go over; no noise was drawn.
        LedgerError: the ledger is damaged, or an earlier draw is gone.
        DataError: a group that the plan does not have.
    """
    asked = plan.releases.counts
    if int(group_N.min()) < 0 or int(group_N.max()) >= asked.num_groups:
        raise DataError("groups", expected=f"0 to {asked.num_groups - 1}", got="others")
    true_G = np.bincount(group_N.numpy(), minlength=asked.num_groups)

    def draw() -> Mapping[str, Tensor]:
        return {"counts": torch.from_numpy(true_G + discrete_laplace(asked.num_groups, asked.epsilon, noise))}

    mechanism = mechanisms(plan)["counts"]
    return _draw_once(ledger, plan, plan_digest, "counts", mechanism, dataset_digest, folder / COUNTS_NAME, draw)


def draw_sketches(
    ledger: Ledger,
    plan: Plan,
    plan_digest: str,
    sketch: Sketch,
    images: Tensor,
    dataset_digest: str,
    folder: Path,
    *,
    noise: Noise = OS_NOISE,
) -> Path:
    """Release one noised sketch per unit, in an order drawn at random.

    ``s_r = alpha_r s_0 + (sigma_r / C) n``, with s_0 rounded to the public grid and the noise rounded to it as well.

    Args:
        ledger: of this site.
        plan: the accepted plan.
        plan_digest: sha256 of its signed bytes.
        sketch: the plan's public sketch.
        images: one per unit, shape (N, C, H, W).
        dataset_digest: of the cohort.
        folder: where the file goes.
        noise: the operating system's; tests hand in another.

    Returns:
        ``folder/sketch.safetensors``, holding ``sketch``, float32 (N, R).

    Raises:
        PolicyError: the plan's sketch would not protect as its epsilon claims.
        BudgetError: the ledger would go over; no noise was drawn.
        LedgerError: the ledger is damaged, or an earlier draw is gone.
    """
    sketch.check()
    asked = plan.releases.sketch
    path = path_named(plan.objective.path)
    mu = gaussian_mu(asked.epsilon, asked.delta)
    at = torch.tensor(t_release(mu, sketch.scale, path, sketch.rank), dtype=torch.float64)
    alpha, sigma = float(path.alpha(at)), float(path.sigma(at))
    s_0_NR = sketch.project(images).numpy()

    def draw() -> Mapping[str, Tensor]:
        whole_NR = np.rint(s_0_NR / GRID).astype(np.int64)
        for start in range(0, len(whole_NR), _BLOCK):
            block = whole_NR[start : start + _BLOCK]
            block += rounded_gaussian(block.shape, sigma / (alpha * sketch.scale) / GRID, noise)
        released_NR = whole_NR[_shuffled(len(whole_NR), noise)] * (alpha * GRID)
        return {"sketch": torch.from_numpy(released_NR).float()}

    mechanism = mechanisms(plan)["sketch"]
    return _draw_once(ledger, plan, plan_digest, "sketch", mechanism, dataset_digest, folder / SKETCH_NAME, draw)


def _shuffled(num: int, noise: Noise) -> NDArray[np.int64]:
    """Return a random order: rows sorted by 128 random bits each."""
    keys = np.frombuffer(noise.octets(16 * num), dtype=np.uint64).reshape(2, num)
    return np.asarray(np.lexsort(keys), dtype=np.int64)


def _draw_once(
    ledger: Ledger,
    plan: Plan,
    plan_digest: str,
    kind: Kind,
    mechanism: Mechanism,
    dataset_digest: str,
    path: Path,
    draw: Callable[[], Mapping[str, Tensor]],
) -> Path:
    with ledger.drawing():
        debit = ledger.spend(plan.plan_id, plan_digest, kind, mechanism, dataset_digest)
        kept = ledger.draws / f"{debit.digest}.safetensors"
        recorded = ledger.draw_of(debit)
        if recorded is None:
            if not kept.exists():
                save_tensors(kept, draw())
            ledger.record_draw(debit, sha256_file(kept))
        elif not kept.exists() or sha256_file(kept) != recorded:
            raise LedgerError(
                f"draw of {kind}",
                expected="the file that was drawn for its debit",
                got="another file" if kept.exists() else "none",
                remedy="Restore private/draws from backup. Drawing again would need a new debit, so a new plan.",
            )
        write_atomic(path, kept.read_bytes())
    return path
