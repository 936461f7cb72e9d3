"""The samples of an evaluation: drawn from a release with one strategy or several, or read from a file."""

# Shape legend: N samples, E experts.
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddm.cli.conditions import condition_shares, shares_of_each
from ddm.cli.drawing import Advance, Computing, Job, ReleaseSource, draw
from ddm.errors import DataError
from ddm.images.fit import check_row, fit
from ddm.images.npz import read_array
from ddm.io.files import require_file
from ddm.loading.memory import room_for_experts
from ddm.loading.release import Release
from ddm.protocol.footprint import sampling_bytes
from ddm.sampling.guidance import per_sample
from ddm.sampling.strategies import Strategy
from ddm.system.memory import MemoryLimit, available_bytes


@dataclass(frozen=True)
class Sampled:
    """One set of samples.

    Attributes:
        name: its strategy, or its file.
        images: float32, shape (N, ...), clipped to the data's range, as pictures are.
        expert_N: the expert of each; None where it is not known.
    """

    name: str
    images: Tensor
    expert_N: Tensor | None = None

    def silo_N(self, owners: Sequence[str], silos: Sequence[str]) -> Tensor | None:
        """Return the index of each sample's silo, by the owner of each expert."""
        return None if self.expert_N is None else torch.tensor([silos.index(owner) for owner in owners])[self.expert_N]


@dataclass(frozen=True)
class Drawing:
    """How samples are drawn.

    Attributes:
        opened: the release.
        computing: how its experts compute.
        num_processes: how many share the samples.
        seed: of all samples.
        how: arguments of `Ensemble.sample`.
        declared: each expert's share of the condition where somebody declared it.
    """

    opened: Release
    computing: Computing
    num_processes: int
    seed: int
    how: Mapping[str, Any]
    declared: list[float] | None

    def draw(
        self,
        strategies: Mapping[str, Strategy],
        num: int,
        beside: int,
        limit: MemoryLimit,
        told: Callable[[str], AbstractContextManager[Advance]],
    ) -> tuple[list[Sampled], list[float]]:
        """Draw samples with every strategy, from the same noise.

        Args:
            strategies: by name.
            num: how many samples with each.
            beside: bytes of what is done with them.
            limit: on all memory.
            told: shows the progress of one strategy.

        Returns:
            The samples, and the share of them that is due to each expert.
        """
        plan, manifest, processes = self.opened.plan, self.opened.manifest, self.num_processes
        batch, steps = self.computing.batch, self.how["steps"]
        drawing = sampling_bytes(plan, len(manifest.experts), num=-(-num // processes), batch=batch, steps=steps)
        kept = 4 * num * prod(plan.data.shape) * len(strategies)
        needed = max(drawing, -(-beside // processes)) + -(-kept // processes)
        room = room_for_experts(plan, manifest, limit.part(processes), beside=needed)
        source = ReleaseSource(plan, manifest, self.opened.folder, room, self.computing)
        ensemble, condition = source.ensemble(lazily=processes > 1), self.how["condition"]
        weight_K = shares_of_each(ensemble, condition, self.how["prior"], self.declared)
        each = per_sample(ensemble.condition, condition)
        shares = self.declared
        if each is None or each.dim() == 3:
            shares = condition_shares(ensemble, condition if each is None else each[0], self.declared)
        found = []
        for name, strategy in strategies.items():
            with told(f"sampling {num} with {name}") as advance:
                job = Job(source, strategy, self.seed, {**self.how, "condition_prior": shares})
                drawn = draw(job, num, processes, weight_K, advance, ensemble)
            found.append(Sampled(name, drawn.images.clamp(*plan.data.range), drawn.expert_N))
        return found, weight_K.expand(num, -1).mean(0).tolist()


def given_samples(opened: Release, path: Path, num: int | None) -> Sampled:
    """Read samples that were drawn before, clipped to the range, and the expert of each where the file has it."""
    spec = opened.plan.data
    require_file(path, "an npz that ddm sample wrote")
    array = read_array(path, "images", max_bytes=available_bytes())[:num]
    if array.dtype.kind == "f":
        array = np.clip(array, *spec.range)
    check_row(array.dtype, array.shape[1:], spec)
    images = fit(array, range(len(array)), spec=spec)
    with np.load(path, allow_pickle=False) as archive:
        if "expert" not in archive.files:
            return Sampled(path.name, images)
    expert_N = read_array(path, "expert", max_bytes=1 << 28)[:num]
    most = len(opened.manifest.experts)
    if (
        expert_N.dtype.kind not in "iu"
        or expert_N.shape != (len(images),)
        or not ((expert_N >= 0) & (expert_N < most)).all()
    ):
        raise DataError(
            "expert", expected=f"{len(images)} numbers below {most}", got=f"{expert_N.dtype}, other numbers"
        )
    return Sampled(path.name, images, torch.from_numpy(expert_N.astype(np.int64)))
