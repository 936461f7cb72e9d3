"""Reads the statistics that the accepted silos drew, with the public files of the plan that give them their meaning."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aggregator.config import Federation
from aggregator.intake.inventory import Inventory
from ddm.io.tensors import load_tensors
from ddm.loading.plan import PlanFiles
from ddm.partition.layout import Layout, silo_parts
from ddm.protocol.statistics import StatisticKind
from ddm.statistics.of_plan import statistics_of
from ddm.statistics.sketch import sketch_noise_level

# Shape legend: K silos, G public groups, C classes, n_k units of silo k, R dimensions of a sketch.


@dataclass(frozen=True)
class AcceptedStatistics:
    """What the accepted silos drew for the plan, by silo, in the order of the inventory.

    Attributes:
        files: the plan's public tensors.
        counts: each silo's noised histogram, shape (G,), int64.
        class_counts: each silo's noised histogram over classes and groups, shape (C, G), int64; empty if the plan has
            none.
        sketches: each silo's noised sketches, shape (n_k, R), float32; empty if the plan has none.
        t_release: the noise level of the sketches, None if the plan has none.
        layout: every silo's experts, derived from its noised histogram, in the order of the manifest and of the router.
    """

    files: PlanFiles
    counts: Mapping[str, Tensor]
    class_counts: Mapping[str, Tensor]
    sketches: Mapping[str, Tensor]
    t_release: float | None
    layout: Layout

    @property
    def noisy_KG(self) -> Tensor:
        """The histograms of all silos, shape (K, G)."""
        return torch.stack(list(self.counts.values()))

    @property
    def noisy_KCG(self) -> Tensor:
        """The histograms over classes and groups of all silos, shape (K, C, G)."""
        return torch.stack(list(self.class_counts.values()))


def read_statistics(federation: Federation, inventory: Inventory) -> AcceptedStatistics:
    """Read the statistics of every accepted silo.

    Raises:
        DigestError: a file differs from the one that the silo signed, or that the plan lists.
        TensorFileError: a file is not what the plan implies.
    """
    plan = inventory.plan
    files = PlanFiles.load(plan, federation.plan_targets(plan.plan_id))
    counts = _read_tensor(inventory, "counts", "counts")
    parts_of_silos = [
        silo_parts(plan.partition, silo_id, files.clusters, noisy_G)
        for silo_id, noisy_G in counts.items()
    ]
    return AcceptedStatistics(
        files=files,
        counts=counts,
        class_counts=_read_tensor(inventory, "class_counts", "counts"),
        sketches=_read_tensor(inventory, "sketch", "sketch"),
        t_release=sketch_noise_level(plan, files.sketch),
        layout=Layout.of(plan.partition, parts_of_silos),
    )


def _read_tensor(inventory: Inventory, kind: StatisticKind, name: str) -> Mapping[str, Tensor]:
    """Read one tensor of a statistic of each silo; empty if the plan does not require the statistic."""
    statistic = statistics_of(inventory.plan.statistics).get(kind)
    if statistic is None:
        return {}
    tensor_by_silo = {}
    for silo_id, silo in inventory.silos.items():
        file_by_kind = {drawn.kind: drawn.file for drawn in silo.submission.statistics}
        file = file_by_kind[kind]
        # The number of units is signed with the statistic; intake has bounded it.
        specs = statistic.tensor_specs(silo.submission.num_units)
        tensors = load_tensors(
            silo.folder / file.path, specs, max_bytes=file.bytes, digest=file.digest
        )
        tensor_by_silo[silo_id] = tensors[name]
    return tensor_by_silo
